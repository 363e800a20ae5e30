"""Colours and line styles, one table for SVG and PNG.

The hues follow Okabe and Ito (2008), which people with colour-blindness can tell apart; no meaning rests on
colour alone (waiting is dashed, failures carry a cross). `dark` is for JupyterLab's dark theme; a PNG is on
white. An empty colour means the colour of the text around the picture.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    light: str = ""
    dark: str = ""
    fill: float = 0.0  # opacity of the inside
    stroke: float = 0.0  # width of the outline, pixels
    dash: str = ""
    opacity: float = 1.0


LOOKS = {
    "lane": Look(stroke=1, opacity=0.35),
    "grid": Look(stroke=1, opacity=0.12),
    "send": Look("#0072B2", "#56B4E9", fill=1),
    "recv": Look("#009E73", "#2BC79A", fill=1),
    "group": Look("#B26F00", "#E69F00", fill=1),
    "band": Look("#B26F00", "#E69F00", fill=0.16),
    "wait": Look(fill=0.08, stroke=1, dash="3 2", opacity=0.75),
    "open-send": Look("#0072B2", "#56B4E9", fill=0.12, stroke=1.5),
    "open-recv": Look("#009E73", "#2BC79A", fill=0.12, stroke=1.5),
    "forward": Look("#0072B2", "#56B4E9", fill=0.55),
    "backward": Look("#009E73", "#2BC79A", fill=1),
    "optimizer": Look("#8F4A78", "#E08CBC", fill=1),
    "other": Look("#777777", "#AAAAAA", fill=1),
    "exposed": Look("#C24E00", "#FF8A4C", fill=1),
    "arrow": Look("#0072B2", "#56B4E9", stroke=1.8),
    "lost": Look("#C24E00", "#FF8A4C", stroke=2.2, dash="6 4"),
    "rank-0": Look("#C77C00", "#E69F00", fill=0.5),
    "rank-1": Look("#2A8CCB", "#56B4E9", fill=0.42),
    "rank-2": Look("#009E73", "#2BC79A", fill=0.45),
    "rank-3": Look("#B8619A", "#E08CBC", fill=0.5),
    "rank-4": Look("#8F8400", "#F0E442", fill=0.5),
    "rank-5": Look("#0072B2", "#3E9BD6", fill=0.65),
    "rank-6": Look("#D55E00", "#FF8A4C", fill=0.55),
    "rank-7": Look("#777777", "#AAAAAA", fill=0.6),
    "twice": Look("#C24E00", "#FF8A4C", fill=1),
    "again": Look("#C24E00", "#FF8A4C", fill=0.5, stroke=2.5),
    "box": Look(stroke=1, opacity=0.45),
    "whole": Look(stroke=2.5),
    "done": Look(fill=0.08, stroke=1.5),
    "new": Look("#0072B2", "#56B4E9", stroke=3),
    "edge": Look(stroke=1.5),
    "text": Look(fill=1),
    "strong": Look(fill=1),
    "small": Look(fill=1, opacity=0.8),
    "label": Look(fill=1),
}
SIZES = {"text": 14, "strong": 15, "small": 13, "label": 13}  # of texts, pixels


def css(scope: str) -> str:
    """The table as a style sheet whose rules hold inside `scope` only."""
    rules = []
    for name, look in LOOKS.items():
        colour = f"var(--{name})" if look.light else "currentColor"
        style = f"opacity:{look.opacity:g};" if look.opacity != 1 else ""
        style += f"fill:{colour};fill-opacity:{look.fill:g};" if look.fill else "fill:none;"
        style += f"stroke:{colour};stroke-width:{look.stroke:g};" if look.stroke else ""
        style += f"stroke-dasharray:{look.dash};" if look.dash else ""
        style += f"font-size:{SIZES[name]}px;" if name in SIZES else ""
        rules.append(f"{scope} .{name}{{{style}}}")
    light = "".join(f"--{name}:{look.light};" for name, look in LOOKS.items() if look.light)
    dark = "".join(f"--{name}:{look.dark};" for name, look in LOOKS.items() if look.dark)
    themes = [f"{scope}{{{light}}}"]
    themes += [f"{where} {scope}{{{dark}}}" for where in ('[data-jp-theme-light="false"]', ".vscode-dark")]
    return "\n".join(themes + rules)
