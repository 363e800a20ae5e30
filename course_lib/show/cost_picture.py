"""Time of an all-reduce over its size, by algorithm: `show.cost(...)`."""

from collections.abc import Callable, Sequence
from functools import partial

from matplotlib.figure import Figure

from course_lib.collectives import cost as model
from course_lib.collectives.fit import Fit
from course_lib.collectives.topology import Link
from course_lib.show.cost_curves import Curves, curves, draw
from course_lib.show.picture import Picture, png_of

ALL = (*model.ALGORITHMS, "hierarchical")
_WIDTH = 760  # pixels on the page; the file has twice as many


def cost(
    machine: Fit | None = None,
    *,
    ranks: int = 4,
    alpha: float = 50e-6,
    beta: float = 1e-9,
    gamma: float = 1e-10,
    node_size: int = 1,
    inside: Link | None = None,
    shared_uplink: bool = False,
    algorithms: Sequence[str] = (),
    formula: Callable[..., float] | None = None,
    smallest: float = 1e3,
    largest: float = 1e9,
) -> Picture:
    """Draw the predicted time over the size, both logarithmic; dots mark where another algorithm gets faster.

    machine            what `fit` returned: its predictions, and circles for what was measured. Without it:
    ranks, alpha, ...  as in `cost.predict`: seconds a message, seconds a byte
    algorithms         which ones; without it, those that fit the question
    formula            yours: formula(algorithm, nbytes, ranks, alpha, beta, gamma) -> seconds
    smallest, largest  bytes of the tensor, from and to
    """
    if not 1 <= smallest < largest:
        raise ValueError(f"show.cost draws from smallest to largest bytes; {smallest:g} and {largest:g} are no range.")
    if machine is not None and not isinstance(machine, Fit):
        raise TypeError(f"show.cost draws what fit(...) returned, not {type(machine).__name__}.")
    if isinstance(algorithms, str):
        algorithms = (algorithms,)
    if formula is not None and not callable(formula):
        raise TypeError(f"formula must be a function such as your cost, not {formula!r}.")
    if unknown := set(algorithms) - set(ALL):
        raise ValueError(f"show.cost does not know {', '.join(sorted(unknown))}: choose from {', '.join(ALL)}.")
    if not machine and ranks < 2:
        raise ValueError(f"With ranks={ranks} nothing is sent, so there is nothing to draw: give ranks=2 or more.")
    if machine:
        seconds, measured = machine.predict, machine.measured
        names, largest = algorithms or ("naive", "tree", "ring"), min(largest, 1e8)
        title = f"{machine.ranks} ranks on {machine.cores} cores: lines predicted, circles measured"
    else:
        seconds, measured = model_seconds(ranks, alpha, beta, gamma, node_size, inside, shared_uplink), None
        names = algorithms or (ALL if node_size > 1 else ALL[:-1])
        title = heading(ranks, node_size, alpha, beta, gamma)
        if formula:
            names, title = algorithms or ("naive", "tree", "ring"), f"Your formulas, {title}"
            seconds = partial(_call, formula, (ranks, alpha, beta, gamma))
    found = curves(seconds, names, smallest, largest)
    figure = Figure(figsize=(_WIDTH / 100, 4.4), dpi=200, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    draw(axes, found, measured)
    axes.set_title(title, fontsize=11)
    text = f"{title}. {found.words()}"
    return Picture(png_of(figure), f"Time of an all-reduce over its size. {text}", _table(text, found), _WIDTH)


def model_seconds(
    ranks: int, alpha: float, beta: float, gamma: float, node_size: int = 1, inside: Link | None = None,
    shared_uplink: bool = False,
) -> Callable[[str, float], float]:  # fmt: skip
    """`cost.predict` as a function of the algorithm and the bytes."""
    options = {"node_size": node_size, "inside": inside, "shared_uplink": shared_uplink}
    return lambda name, nbytes: model.predict(name, nbytes, ranks, alpha, beta, gamma, **options)


def _call(formula: Callable[..., float], machine: tuple, name: str, nbytes: float) -> float:
    seconds = formula(name, nbytes, *machine)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ValueError(
            f"Only times above 0 can be drawn: the formula gives {seconds!r} for {name!r} and {nbytes:.0f} bytes."
        )
    return seconds


def heading(ranks: int, node_size: int, alpha: float, beta: float, gamma: float) -> str:
    """What the lines hold for, in one line."""
    nodes = f" on {ranks // node_size} nodes" if node_size > 1 else ""
    parts = [f"α = {_digits(alpha * 1e6)} µs", f"1/β = {_rate(beta)}", f"1/γ = {_rate(gamma)}"]
    return f"{ranks} ranks{nodes}: " + ", ".join(parts)


def _rate(seconds_a_byte: float) -> str:
    return f"{_digits(1e-9 / seconds_a_byte)} GB/s" if seconds_a_byte else "unlimited"


def _digits(value: float) -> str:
    """Three digits, and never 1e+03."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _table(text: str, found: Curves) -> str:
    lines = [text, f"{'bytes':>12}" + "".join(f"{name:>14}" for name in found.seconds)]
    for k in range(0, len(found.sizes), 17):
        lines.append(f"{found.sizes[k]:12,.0f}" + "".join(f"{t[k] * 1e3:11.3f} ms" for t in found.seconds.values()))
    return "\n".join(lines)
