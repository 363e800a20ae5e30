"""A finished picture: PNG for the eye, a sentence for people who do not see it, plain text for terminals."""

from base64 import b64encode
from html import escape
from io import BytesIO

from matplotlib.figure import Figure
from PIL import Image


def png_of(figure: Figure) -> bytes:
    """PNG with 64 colours: a third of the size, and a notebook keeps each picture twice."""
    full, small = BytesIO(), BytesIO()
    figure.savefig(full, format="png")
    with Image.open(full) as image:
        image.convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()


class Picture:
    """Displays itself as the last value of a cell; `png` is the file's content."""

    def __init__(self, png: bytes, alt: str, text: str, width: int):
        self.png, self.alt, self.text, self.width = png, alt, text, width

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, str]:
        data = b64encode(self.png).decode()
        image = (
            f'<img alt="{escape(self.alt)}" src="data:image/png;base64,{data}" width="{self.width}" '
            'style="max-width: 100%">'
        )
        return {"text/html": image, "image/png": data, "text/plain": self.text}

    def __repr__(self) -> str:
        return self.text
