"""show.cost and show.cost_explorer: the right lines, dots and words."""

import base64
import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from course_lib import show
from course_lib.collectives import cost
from course_lib.collectives.fit import Costs, Fit
from course_lib.show.cost_curves import curves, draw

MACHINE = {"ranks": 16, "alpha": 50e-6, "beta": 1e-9, "gamma": 1e-10}
NAMES = ("naive", "tree", "ring")


def predict(name, nbytes):
    return cost.predict(name, nbytes, *MACHINE.values())


@pytest.fixture(scope="module")
def found():
    return curves(predict, NAMES, 1e3, 1e9)


@pytest.fixture
def axes(found):
    panel = Figure().add_subplot()
    draw(panel, found, {("ring", 1_000_000): 0.005, ("halving", 10): 1.0})
    return panel


def png_size(data):
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert len(set(image.convert("L").tobytes())) > 5  # not an empty sheet
        return image.size


def test_fastest_and_crossover(found):
    (first, tree), (at, ring) = found.best
    assert (first, tree, ring) == (pytest.approx(1e3), "tree", "ring")
    assert at == pytest.approx(cost.crossover("tree", "ring", *MACHINE.values()), rel=2e-3)
    assert found.words() == "Fastest between 1 kB and 1 GB: tree up to 171 kB; ring from 171 kB."


def test_lines_are_the_predictions(axes, found):
    lines = {line.get_label(): line for line in axes.lines}
    for name in NAMES:
        x, y = lines[name].get_data()
        assert (x[0], x[-1]) == pytest.approx((1e3, 1e9))
        assert y.tolist() == pytest.approx([predict(name, size) for size in x])
    styles = {lines[name].get_linestyle() for name in NAMES}
    assert len(styles) == 3  # no meaning rests on colour alone
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("size of the tensor on each rank", "time of one all-reduce")


def test_dots_and_circles(axes, found):
    points = [
        (line.get_mfc(), float(np.ravel(line.get_xdata())[0]), float(np.ravel(line.get_ydata())[0]))
        for line in axes.lines
        if line.get_marker() == "o" and len(np.ravel(line.get_xdata()))
    ]
    at = found.best[1][0]
    assert ("white", 1_000_000, 0.005) in points  # measured; what is not drawn has no circle either
    (dot,) = [(x, y) for colour, x, y in points if colour != "white"]
    assert dot == (pytest.approx(at), pytest.approx(predict("ring", at), rel=1e-2))
    texts = [text.get_text() for text in axes.texts]
    assert {"171 kB", "tree is fastest", "ring is fastest"} <= set(texts)


def test_a_picture_of_numbers():
    picture = show.cost(**MACHINE, algorithms=NAMES)
    bundle = picture._repr_mimebundle_()
    assert png_size(base64.b64decode(bundle["image/png"])) == (1520, 880)
    assert repr(picture).startswith(
        "16 ranks: α = 50 µs, 1/β = 1 GB/s, 1/γ = 10 GB/s. Fastest between 1 kB and 1 GB: tree"
    )
    row = repr(picture).splitlines()[2].split()
    assert row == [
        "1,000",
        *(f(t) for t in (predict(n, 1000) * 1e3 for n in NAMES) for f in ("{:.3f}".format, lambda _: "ms")),
    ]
    assert "Time of an all-reduce over its size" in bundle["text/html"]


def test_a_picture_of_a_fitted_machine():
    one = Costs(30e-6, 1e-9, 2e-10, ())
    picture = show.cost(Fit(4, 2, one, one, one, {("ring", 1 << 20): 0.002}))
    assert picture.text.startswith("4 ranks on 2 cores: lines predicted, circles measured.")
    assert "hierarchical" in show.cost(ranks=8, node_size=4).text


def test_your_own_formula():
    def flat_rate(algorithm, nbytes, ranks, alpha, beta, gamma):
        return {"naive": 3, "tree": 2, "ring": 1}[algorithm] * ranks * alpha

    assert "Your formulas, 4 ranks" in show.cost(formula=flat_rate).text
    assert "1 GB: ring." in show.cost(formula=flat_rate).text
    with pytest.raises(ValueError, match="formula gives None for 'naive' and 1000 bytes"):
        show.cost(formula=lambda *inputs: None)


def test_sliders_redraw(monkeypatch):
    explorer = show.cost_explorer(ranks=16, node_size=4)
    assert explorer.text.startswith("16 ranks on 4 nodes: α = 50 µs")
    before = explorer.image.value
    assert png_size(before) == (760, 440)
    explorer.alpha.value = 1000
    assert explorer.image.value != before and "α = 1,000 µs" in explorer.text
    explorer.ranks.value = 6  # not four on a node
    assert "6 ranks on 3 nodes" in explorer.text and "drawn with 2" in explorer.sentence.value
    explorer.node_size.value = 1
    assert explorer.text.startswith("6 ranks: ")
    bundle = explorer._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == explorer.image.value
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"] == explorer.text == repr(explorer)
    shown = []
    monkeypatch.setattr("course_lib.show.cost_sliders.display", lambda thing, **_: shown.append(thing))
    explorer._ipython_display_()
    live, still = shown  # the still stands alone too: without a kernel JupyterLab shows no picture of a widget
    assert live == bundle and base64.b64encode(explorer.image.value).decode() in still.data


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: show.cost(3), "draws what fit"),
        (lambda: show.cost(smallest=10, largest=10), "are no range"),
        (lambda: show.cost(algorithms=("star",)), "does not know star: choose from naive, tree"),
        (lambda: show.cost(ranks=1), "nothing is sent"),
        (lambda: show.cost(ranks=6, node_size=4), "does not divide 6 ranks"),
        (lambda: show.cost(formula=5), "must be a function"),
        (lambda: show.tracked(5), "wraps a function"),
        (lambda: show.cost_explorer(ranks=5), "sliders know ranks of 2, 3, 4"),
    ],
)
def test_bad_arguments_are_sentences(call, text):
    with pytest.raises((TypeError, ValueError), match=text):
        call()
