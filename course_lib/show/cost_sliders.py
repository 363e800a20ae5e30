"""The cost model with sliders: `show.cost_explorer(...)`."""

from base64 import b64encode
from html import escape
from io import BytesIO

import ipywidgets
from IPython.display import HTML, display
from matplotlib.figure import Figure

from course_lib.collectives.topology import Link
from course_lib.show.cost_curves import Curves, curves, draw
from course_lib.show.cost_picture import ALL, heading, model_seconds

_INSIDE = 10  # links inside a node are that much faster, in latency and in bandwidth
_RANKS = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
_LIMITS = (1e3, 1e9, 1e-6, 1e3)  # bytes and seconds: the frame stays, so that the eye sees the lines move


def cost_explorer(
    *, ranks: int = 12, node_size: int = 4, alpha: float = 50e-6, beta: float = 1e-9, gamma: float = 1e-10
) -> "CostExplorer":
    """Sliders for latency, bandwidth, the speed of sums, ranks and ranks of a node; the lines follow.

    The links inside a node are ten times as fast as those between nodes, which `alpha` (seconds a message) and
    `beta` (seconds a byte) describe. Each rank has its own link. Where no kernel runs, the first picture stays.
    """
    if ranks not in _RANKS or node_size not in (1, 2, 4, 8):
        raise ValueError(f"The sliders know ranks of {', '.join(map(str, _RANKS))} and 1, 2, 4 or 8 ranks of a node.")
    return CostExplorer(ranks, node_size, alpha, beta, gamma)


class CostExplorer:
    """Displays itself as the last value of a cell. `image.value` is the PNG of what the sliders say now."""

    def __init__(self, ranks: int, node_size: int, alpha: float, beta: float, gamma: float) -> None:
        style = {"style": {"description_width": "150px"}, "layout": {"width": "470px"}, "continuous_update": True}
        log = ipywidgets.FloatLogSlider
        self.alpha = log(
            alpha * 1e6, min=0, max=4, step=0.1, description="α, latency (µs)", readout_format=".3s", **style
        )
        self.bandwidth = log(
            1e-9 / beta, min=-1, max=3, step=0.1, description="1/β, a link (GB/s)", readout_format=".3s", **style
        )
        self.sums = log(
            1e-9 / gamma, min=0, max=4, step=0.1, description="1/γ, sums (GB/s)", readout_format=".3s", **style
        )
        self.ranks = ipywidgets.SelectionSlider(options=_RANKS, value=ranks, description="ranks", **style)
        self.node_size = ipywidgets.SelectionSlider(
            options=[1, 2, 4, 8], value=node_size, description="ranks of a node", **style
        )
        self.image = ipywidgets.Image(format="png", width=_PIXELS[0])
        self.sentence = ipywidgets.HTML()
        self.sliders = (self.alpha, self.bandwidth, self.sums, self.ranks, self.node_size)
        for slider in self.sliders:
            slider.observe(self._redraw, "value")
        self._redraw()
        self._widget = ipywidgets.VBox([*self.sliders, self.image, self.sentence])

    def _redraw(self, change: object = None) -> None:
        """Called when a slider moves."""
        found, title, note = self._curves()
        self.image.value = _png(found, title)
        self.text = f"{title}. {found.words()}{note}"
        self.sentence.value = found.words() + note

    def _curves(self) -> tuple[Curves, str, str]:
        ranks, node_size = self.ranks.value, self.node_size.value
        fitting = max(size for size in (1, 2, 4, 8) if size <= node_size and ranks % size == 0)
        note = (
            f" ({ranks} ranks do not fill nodes of {node_size}: drawn with {fitting}.)" if fitting < node_size else ""
        )
        alpha, beta, gamma = self.alpha.value * 1e-6, 1e-9 / self.bandwidth.value, 1e-9 / self.sums.value
        seconds = model_seconds(
            ranks, alpha, beta, gamma, node_size=fitting, inside=Link(alpha / _INSIDE, beta / _INSIDE)
        )
        names = ALL if fitting > 1 else ALL[:-1]  # on one level, hierarchical is the ring
        return curves(seconds, names, *_LIMITS[:2]), heading(ranks, fitting, alpha, beta, gamma), note

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict[str, object]:
        live = self._widget._repr_mimebundle_()
        live = live[0] if isinstance(live, tuple) else live
        return {**live, "image/png": b64encode(self.image.value).decode(), "text/plain": self.text}

    def _ipython_display_(self) -> None:
        """JupyterLab prefers widgets to pictures, also where no kernel is there to bring them to life: so the still
        is an output of its own, folded away."""
        display(self._repr_mimebundle_(), raw=True)
        still = f'<img alt="{escape(self.text)}" src="data:image/png;base64,{b64encode(self.image.value).decode()}">'
        display(HTML(f"<details><summary>As a still picture, if no sliders appear above</summary>{still}</details>"))

    def __repr__(self) -> str:
        return self.text


_PIXELS = (760, 440)


def _png(found: Curves, title: str) -> bytes:
    """Small and quick: a picture a slider's step."""
    figure = Figure(figsize=(_PIXELS[0] / 100, _PIXELS[1] / 100), dpi=100, facecolor="white")
    axes = figure.add_axes((0.11, 0.12, 0.86, 0.79))
    draw(axes, found, limits=_LIMITS[2:])
    axes.set_title(title, fontsize=11)
    file = BytesIO()
    figure.savefig(file, format="png", pil_kwargs={"compress_level": 1})
    return file.getvalue()
