"""A picture that people step through with the arrow keys, live without a kernel.

The output is one HTML fragment: a PNG and a script that swaps it for SVG with a slider. So it moves in a
notebook that is reopened without a kernel and in an exported page without a network; where scripts are not
allowed (a notebook that is not trusted yet) the PNG stays.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from html import escape

from course_lib.show.stepper_page import CONTROLS, SCRIPT, STYLE


class Stepper:
    """Displays itself as the last value of a cell.

    frames     SVG texts: one for all steps, in which shapes carry data-step="k", or one for each caption
    captions   a sentence for each step; captions[0] belongs to the whole picture
    still      PNG bytes of the whole picture
    alt        what the picture shows, for people who do not see it
    text       the same as plain text, for terminals
    """

    def __init__(self, frames: Sequence[str], captions: Sequence[str], still: bytes, alt: str, text: str = ""):
        if not captions:
            raise ValueError("A stepper needs at least one caption, that of the whole picture.")
        if len(frames) not in (1, len(captions)):
            raise ValueError(
                f"A stepper needs one frame for all steps or one for each of the {len(captions)} captions; "
                f"it got {len(frames)}."
            )
        self.frames, self.captions = list(frames), list(captions)
        self.still, self.alt, self.text = still, alt, text or "\n".join(captions)

    @property
    def html(self) -> str:
        """The self-contained fragment; it loads nothing."""
        last = len(self.captions) - 1
        data = {
            "frames": self.frames,
            "captions": self.captions,
            "style": STYLE,
            "controls": CONTROLS.format(last=last, hidden="" if last else " hidden"),
        }
        # "<" must not stand in a script that may hold "</script>" in somebody's file name.
        script = SCRIPT.replace("__DATA__", json.dumps(data).replace("<", "\\u003c"))
        image = f"data:image/png;base64,{b64encode(self.still).decode()}"
        return (
            f'<div class="rtd-stepper"><div class="stage"><img alt="{escape(self.alt)}" src="{image}" '
            f'style="max-width: 100%"></div><script>{script}</script></div>'
        )

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        png = b64encode(self.still).decode()
        return {"text/html": self.html, "image/png": png, "text/plain": self.text}

    def __repr__(self) -> str:
        return self.text
