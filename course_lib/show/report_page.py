"""The HTML of `course report`: one file, no script, nothing from elsewhere; it fits a dark screen and paper."""

from html import escape
from typing import Any

MAKER = '<meta name="generator" content="course report">'
# Lines: Okabe and Ito's colours, see looks.py; each has a dash of its own, so that none rests on colour alone.
STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#57606a;--paper:#fff;--rule:#d0d7de;--note:#fff6e0;
--s0:#0072B2;--s1:#C24E00;--s2:#00805E;--s3:#8F4A78;--s4:#222}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa5b1;--paper:#14181d;--rule:#39424d;
--note:#3a3018;--s0:#56B4E9;--s1:#FF8A4C;--s2:#2BC79A;--s3:#E08CBC;--s4:#ddd}}
body{margin:0 auto;padding:20px;max-width:1080px;font:16px/1.5 system-ui,sans-serif;color:var(--ink);
background:var(--paper)}
h1{font-size:1.6em;margin:.2em 0;overflow-wrap:anywhere}h2{font-size:1.2em;margin:1.6em 0 .4em;
border-bottom:1px solid var(--rule)}h3{font-size:1em;margin:0 0 4px}
.verdict{font-size:1.1em;font-weight:600;overflow-wrap:anywhere}.note{background:var(--note);padding:6px 10px}
.curves{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:24px}
figure{margin:0;break-inside:avoid}figcaption{font-size:.9em;color:var(--soft)}
svg{display:block;width:100%;height:auto;font-size:13px;fill:var(--ink)}
.axis{stroke:var(--ink);fill:none}.grid{stroke:var(--ink);opacity:.13;fill:none}
.mark{stroke:var(--ink);stroke-dasharray:2 3;fill:none}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.faint{stroke-width:1;opacity:.3}
.s0{stroke:var(--s0)}.s1{stroke:var(--s1);stroke-dasharray:6 3}.s2{stroke:var(--s2);stroke-dasharray:8 3 2 3}
.s3{stroke:var(--s3);stroke-dasharray:2 2}.s4{stroke:var(--s4);stroke-dasharray:12 4}.faint{stroke-dasharray:none}
.dot{stroke-dasharray:none}.dot.s0{fill:var(--s0)}.dot.s1{fill:var(--s1)}.dot.s2{fill:var(--s2)}.dot.s3{fill:var(--s3)}
.dot.s4{fill:var(--s4)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.93em}td,th{padding:3px 14px 3px 0;text-align:left;
vertical-align:top;border-bottom:1px solid var(--rule);overflow-wrap:break-word;max-width:40em}
th,.num{white-space:nowrap}.num{text-align:right}.alone{max-width:720px;margin-top:1em}
tr.differs{background:var(--note)}tr.differs td:first-child,.bad{font-weight:600}
pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--rule);padding:8px;font-size:.88em}
footer{margin-top:2em;color:var(--soft);font-size:.85em}
@media print{body{max-width:none;padding:0;font-size:11pt}.curves{grid-template-columns:1fr 1fr}}
"""


def page(title: str, body: str) -> str:
    """A whole document."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">{MAKER}\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}\n"
        "<footer>Written by <code>course report</code> from the files of the run folder; what they do not record is "
        "not here. Speeds and shares are medians over the rows of metrics.jsonl.</footer>\n</body></html>\n"
    )


def table(
    head: list[str], lines: list[list[Any]], marked: set[int] = frozenset(), right: set[int] = frozenset()
) -> str:
    """A table; `marked` are rows that stand out, `right` columns of numbers."""

    def cells(values: list[Any], tag: str) -> str:
        classes = [' class="num"' if k in right else "" for k in range(len(values))]
        return "".join(
            f"<{tag}{style}>{escape(str(value))}</{tag}>" for value, style in zip(values, classes, strict=True)
        )

    styles = [' class="differs"' if k in marked else "" for k in range(len(lines))]
    body = "".join(f"<tr{style}>{cells(line, 'td')}</tr>\n" for style, line in zip(styles, lines, strict=True))
    top = f"<thead><tr>{cells(head, 'th')}</tr></thead>" if head else ""
    return f'<div class="wide"><table>{top}<tbody>\n{body}</tbody></table></div>'
