"""show.loss and show.machine."""

import base64
import io
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from course_lib import show
from course_lib.train.record import TrainRun


def a_run(name="first", losses=(2.0, 1.0, 0.5), accuracy=(), note="", ranks=2, status="finished", data="digits"):
    rows = [{"event": "start", "step": 0}]
    rows += [
        {"event": "train", "step": 10 * k, "loss": value, "lr": 0.1, "samples_per_s": 100.0}
        for k, value in enumerate(losses, 1)
    ]
    rows += [{"event": "eval", "step": step, "loss": 1.0, "accuracy": value} for step, value in accuracy]
    facts = {
        "recipe": "digits",
        "ranks": ranks,
        "steps": 30,
        "data": {"name": data, "note": note},
        "config": {},
    }
    return TrainRun(Path("runs") / name, {}, facts, rows, status)


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved."""
    saved = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: saved.append(self) or save(self, *a, **k))
    return saved


def test_one_run(figures):
    picture = show.loss(a_run(accuracy=[(15, 0.8), (30, 0.98)]))
    top, bottom = figures[0].axes
    assert top.lines[0].get_xydata().tolist() == [[10, 2.0], [20, 1.0], [30, 0.5]]
    assert bottom.lines[0].get_xydata().tolist() == [[15, 0.8], [30, 0.98]]
    assert (top.get_ylabel(), bottom.get_xlabel()) == ("training loss (nats)", "optimizer step")
    assert figures[0].get_suptitle() == "Training on digits, 2 ranks"
    with Image.open(io.BytesIO(base64.b64decode(picture._repr_mimebundle_()["image/png"]))) as image:
        image.load()
        assert image.width == 1440
    assert 'alt="Training loss against the step.' in picture._repr_mimebundle_()["text/html"]


def test_several_runs_say_which_did_not_finish(figures):
    show.loss(a_run("a"), a_run("b", ranks=4, status="failed"), labels=["two", "four"])
    (top,) = figures[0].axes
    assert [text.get_text() for text in top.get_legend().get_texts()] == ["two", "four (failed)"]
    assert figures[0].get_suptitle() == "Training on digits, 2 and 4 ranks"


def test_synthetic_data_is_said(figures):
    picture = show.loss(a_run(note="synthetic data: noise, to measure speed; accuracy means nothing"))
    assert figures[0].axes[0].get_title().startswith("synthetic data")
    assert "synthetic data" in repr(picture)


def test_loss_that_is_not_finite_and_no_loss_at_all(figures):
    show.loss(a_run(losses=(2.0, float("nan"), float("inf"))))
    show.loss(a_run(losses=()))
    said = [[text.get_text().strip() for text in figure.axes[0].texts] for figure in figures]
    assert said == [["not finite from step 20"], ["no step was logged"]]


def test_a_run_folder(tmp_path, figures):
    run = a_run()
    (tmp_path / "config.json").write_text(json.dumps(run.facts))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.metrics))
    (tmp_path / "status.json").write_text(json.dumps({"status": "finished", "why": ""}))
    show.loss(tmp_path)
    assert figures[0].axes[0].lines[0].get_ydata().tolist() == [2.0, 1.0, 0.5]


def test_bad_arguments_are_sentences(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        show.loss(tmp_path / "absent")
    with pytest.raises(ValueError, match="1 runs but 2 labels"):
        show.loss(a_run(), labels=["a", "b"])
    for nothing in ((), ([],)):
        with pytest.raises(ValueError, match="at least one run"):
            show.loss(*nothing)
    for bad, name in ((None, "NoneType"), ([a_run(), 3], "int")):
        with pytest.raises(TypeError, match=f"^show.loss draws what train.* not {name}.$"):
            show.loss(bad)


def test_a_list_of_runs(figures):
    show.loss([a_run("a"), a_run("b")], labels=["x", "y"])
    assert [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()] == ["x", "y"]


PROBE = {
    "torch": "99.0", "torchvision": "99.0", "backends": {"gloo": True, "nccl": True, "mpi": False},
    "rank_bytes": 1000, "built_for": "13.0", "gpus": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "free", "right"),
    [
        (0, 10_000, "4 ranks can start here; no GPU: lessons 13 and 14 use recorded output."),
        (
            0,
            3_000,
            "2 ranks can start here (4 need more memory); no GPU: lessons 13 and 14 use recorded output.",
        ),
        (2, 10_000, "4 ranks can start here; 2 GPUs: card."),
    ],
)
def test_machine_in_words(gpus, free, right):
    from course_lib.show.machine_words import sentence

    assert sentence(PROBE | {"gpus": [{"name": "card", "bytes": 1}] * gpus}, free) == right


def test_machine_as_table_and_with_a_problem():
    machine = show.machine(lambda: PROBE | {"torchvision": "error: <b>broken</b>"})
    assert machine.sentence == "This machine is not ready yet: see torchvision below."
    html = machine._repr_mimebundle_()["text/html"]
    assert "&lt;b&gt;broken&lt;/b&gt;" in html
    assert "What to do:" in html
    assert "problem  torchvision" in repr(machine)
