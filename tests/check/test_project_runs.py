"""Exercise 16, the stages one, ddp, survival and hook: each mistake is refused and named.

The runs are trained once, with few epochs. Then they are copied and spoiled, one mistake at a time.
"""

import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import cloudpickle
import nbformat
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from course_lib import check
from course_lib.check import engine
from course_lib.check.project import again, ddp, folder, hook, hook_ranks, one, probe, survival, true
from course_lib.check.project.kill import Killer
from course_lib.check.specs.project import DDP, HOOK, ONE, SURVIVAL
from course_lib.launch import torchrun
from course_lib.train import checkpoint
from course_lib.train.metrics import read_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # five launches before the first test
SOLUTION = nbformat.read(Path(__file__).parents[2] / "solutions/16_project/16_project.ipynb", as_version=4)
(PROJECT,) = (
    text for cell in SOLUTION.cells if (text := cell.source.removeprefix("%%writefile project.py\n")) != cell.source
)
example = ModuleType("project_of_the_solution")
exec(PROJECT, example.__dict__)
sys.modules[example.__name__] = example
for module in (example, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)
STEPS, EVERY, KILL_AT = 60, 10, 12  # of a run: few, so that all this is quick


SHORT = ["--optim.epochs", "2", "--run.save_every", str(EVERY), "--run.keep", "3"]
ENOUGH = 0.9  # of accuracy, after so few steps


def train(project: Path, name: str, ranks: int, *more: str) -> None:
    words = ["-m", "course_lib.train", "project.py:recipe", "--run.dir", f"runs/{name}", *SHORT, *more]
    log, module = project / "log", "course_lib.train.warm"
    torchrun(words, ranks=ranks, log=log, cwd=project, timeout=170, module=module)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """The folder of a right project."""
    project = tmp_path_factory.mktemp("project")
    (project / "project.py").write_text(PROJECT)
    train(project, "one", 1)
    train(project, "ddp", 2)
    train(project, "hook", 2, "--ddp.comm_hook", "project.py:hook")
    killer = Killer(project / "runs/killed", KILL_AT, 1)
    killer.start()
    train(project, "killed", 2)
    killer.stop()
    assert killer.done
    train(project, "killed", 2)
    return project


@pytest.fixture(autouse=True)
def enough(monkeypatch):
    monkeypatch.setattr(one, "ENOUGH", ENOUGH)


@pytest.fixture
def copied(right, tmp_path):
    """A copy, to be spoiled."""
    return Path(shutil.copytree(right, tmp_path / "copied"))


def refused(project: Path, spec) -> tuple[str | None, str]:
    """The name of the mistake and what the learner reads."""
    with pytest.raises(check.CheckFailed) as caught:
        engine.judge_folder(spec, project)
    assert "Traceback" not in str(caught.value)
    return caught.value.mistake, str(caught.value)


def edit(file: Path, change) -> None:
    found = json.loads(file.read_text())
    change(found)
    file.write_text(json.dumps(found))


def option(name: str, value):
    """Change an option in config.json."""
    part, _, key = name.partition(".")
    return lambda project, run: edit(
        project / run / "config.json", lambda facts: facts["config"][part].update({key: value})
    )


def fact(name: str, value):
    return lambda project, run: edit(project / run / "config.json", lambda facts: facts.update({name: value}))


def status(said: str, why: str = "", **more):
    new = {"status": said, "why": why, **more}
    return lambda project, run: edit(project / run / "status.json", lambda found: found.update(new))


def rows(event: str, change, which=slice(None)):
    """Change the rows of one kind in metrics.jsonl."""

    def spoil(project: Path, run: str) -> None:
        file = project / run / "metrics.jsonl"
        found = read_rows(file)
        for row in [row for row in found if row["event"] == event][which]:
            change(row)
        file.write_text("".join(json.dumps(row) + "\n" for row in found))

    return spoil


def remove(name: str):
    def spoil(project: Path, run: str) -> None:
        path = project / run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return spoil


def write(name: str, text: str):
    return lambda project, run: (project / run / name).write_text(text)


def both(*spoils):
    return lambda project, run: [spoil(project, run) for spoil in spoils]


def huge(name: str):
    def spoil(project: Path, run: str) -> None:
        with (project / run / name).open("wb") as file:
            file.truncate(2**30)  # a hole: it takes no room

    return spoil


def linked(name: str):
    def spoil(project: Path, run: str) -> None:
        path = project / run / name if name else project / run
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")

    return spoil


def other_weights(project: Path, run: str) -> None:
    """The newest checkpoint with other weights, and a manifest that fits."""
    newest = checkpoint.saved(project / run)[-1]
    state = torch.load(newest / "state.pt", weights_only=True)
    name = next(iter(state["model"]))
    state["model"][name] = state["model"][name] * 1.05
    checkpoint.write(project / run, state["step"], checkpoint.encode(state), keep=9)


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("evil"),)


def a_pickle(project: Path, run: str) -> None:
    newest = checkpoint.saved(project / run)[-1]
    checkpoint._remove(newest)
    content = checkpoint.encode({"model": Evil(), "step": STEPS})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_read_back", lambda path: None)
        checkpoint.write(project / run, STEPS, content, keep=9)


def no_checkpoint(project: Path, run: str) -> None:
    for path in checkpoint.saved(project / run)[:-1]:
        shutil.rmtree(path)


def from_elsewhere(project: Path, run: str) -> None:
    manifest = checkpoint.saved(project / run)[-1] / "manifest.json"
    edit(manifest, lambda found: found["files"].update({"/dev/zero": {"bytes": 1, "sha256": ""}}))


def shorter(project: Path, run: str) -> None:
    """The folder of a run that is said to end with step 50, where its newest checkpoint is."""
    fact("steps", STEPS - EVERY)(project, run)
    rows("train", lambda row: row.update(step=min(row["step"], STEPS - EVERY)))(project, run)
    rows("eval", lambda row: row.update(step=STEPS - EVERY), slice(-1, None))(project, run)
    shutil.rmtree(checkpoint.saved(project / run)[-1])


def not_there(project: Path, run: str) -> None:
    shutil.rmtree(project / run)


def copy_of(other: str):
    def spoil(project: Path, run: str) -> None:
        shutil.rmtree(project / run)
        shutil.copytree(project / other, project / run)

    return spoil


def previous(**new):
    """What the second launch says about the first."""
    return rows("start", lambda row: row["previous"].update(new), slice(1, 2))


def forged_copy(project: Path, run: str) -> None:
    """runs/ddp under another name, with a second start row put in."""
    file = project / run / "metrics.jsonl"
    start = next(row for row in read_rows(file) if row["event"] == "start" and "previous" in row)
    copy_of("runs/ddp")(project, run)
    file.write_text(file.read_text() + json.dumps(start) + "\n")


ODD = {
    "no config": (remove("config.json"), "missing", "has no run"),
    "no status": (remove("status.json"), "odd_file", "status.json is missing"),
    "no metrics": (remove("metrics.jsonl"), "odd_file", "metrics.jsonl is missing"),
    "config is a list": (write("config.json", "[]"), "odd_file", "it is no JSON object"),
    "config is deep": (write("config.json", "[" * 100000), "odd_file", "it is no JSON"),
    "config is huge": (huge("config.json"), "odd_file", "has 1,024 MiB"),
    "metrics are huge": (huge("metrics.jsonl"), "odd_file", "has 1,024 MiB"),
    "status is a link": (linked("status.json"), "odd_file", "is a link"),
    "no options": (fact("config", 5), "odd_file", "is missing"),
    "an option that is none": (option("optim.speed", 1), "odd_file", "optim.speed is unknown"),
    "an option of another type": (option("optim.lr", "fast"), "odd_file", "config.json is not what training writes"),
    "an option that is a list": (option("optim.lr", [0.1]), "odd_file", "optim.lr is a list"),
    "half a character": (fact("recipe", "\ud800"), "odd_file", "it is no JSON"),
    "steps are text": (fact("steps", "60"), "odd_file", "steps is '60'"),
    "ranks without end": (fact("ranks", 100000), "ranks", "starts 16 at most"),
    "another file": (option("model.name", "other.py:network"), "other_file", "functions of project.py only"),
    "a loss that is text": (rows("train", lambda row: row.update(loss="0.1")), "odd_file", "the loss '0.1'"),
    "a loss that is nan": (rows("train", lambda row: row.update(loss=float("nan"))), "odd_file", "the loss 'nan'"),
    "a loss without end": (rows("train", lambda row: row.update(loss=10**400)), "odd_file", "has the loss"),
    "no loss": (rows("train", lambda row: row.pop("loss")), "odd_file", "the loss 'None'"),
    "a step that is text": (rows("eval", lambda row: row.update(step="30")), "odd_file", "no row with an event"),
    "steps go back": (rows("train", lambda row: row.update(step=1), slice(-1, None)), "odd_file", "goes back"),
    "rows are missing": (write("metrics.jsonl", '{"event": "start", "step": 0}\n'), "odd_file", "no row 'train'"),
    "another status": (status("done"), "odd_file", "the status is 'done'"),
}  # fmt: skip

STATIC = {
    ONE: {
        "not there": (not_there, "missing", "runs/one is not there: train with --run.dir runs/one"),
        "a link": (linked(""), "missing", "is a link"),
        "killed": (status("running", step=12), "not_finished", "was killed at about step 12"),
        "stopped": (status("stopped", "rank 0 received SIGTERM"), "not_finished", "rank 0 received SIGTERM"),
        "failed": (status("failed", "rank 1 raised ValueError: x"), "not_finished", "has failed"),
        "ranks": (copy_of("runs/ddp"), "ranks", "trained by 2 ranks"),
        "accuracy": (rows("eval", lambda row: row.update(accuracy=0.81)), "accuracy", "0.8100, and 0.9 is asked"),
        "another data set": (option("data.name", "mnist"), "other_data", "trained on mnist"),
        "a network of the course": (option("model.name", "cnn"), "ready_made_network", "the network cnn of the course"),
        "one checkpoint": (no_checkpoint, "checkpoints", "has those of the steps 60."),
        "no checkpoint": (remove("checkpoints"), "checkpoints", "and has none"),
    },
    DDP: {
        "one rank": (copy_of("runs/one"), "one_rank", "Train with ranks=2"),
        "the batch grew": (option("data.global_batch", 96), "global_batch_grew", "96 samples a step instead of 48"),
        "another batch": (option("data.global_batch", 24), "global_batch", "24 samples a step instead of 48"),
        "the rate was scaled": (option("optim.lr", 0.2), "rate_scaled", "multiplied by the ranks"),
        "another rate": (option("optim.lr", 0.07), "other_rate", "0.07 instead of 0.1"),
        "another reference": (option("optim.reference_batch", 24), "rate_scaled", "reference_batch 24 instead of 0"),
        "another seed": (option("run.seed", 1), "other_seed", "--run.seed is 1 instead of 0"),
        "other epochs": (option("optim.epochs", 4), "other_epochs", "4 epochs instead of 2"),
        "another network": (option("model.name", "project.py:other"), "other_network", "project.py:other, not"),
        "other parameters": (fact("parameters", 5), "other_network", "5 parameters instead of"),
        "another momentum": (option("optim.momentum", 0.8), "other_job", "optim.momentum is 0.8, not 0.9"),
        "a copy": (both(copy_of("runs/one"), fact("ranks", 2)), "copied", "is a copy of runs/one"),
    },
    SURVIVAL: {
        "no kill": (copy_of("runs/ddp"), "no_kill", "was started once"),
        "stopped": (previous(status="stopped", why="rank 0 received SIGTERM"), "stopped", "stopped in good order"),
        "failed": (previous(status="failed", why="rank 0 raised ValueError: x"), "not_killed", "ValueError"),
        "finished": (previous(status="finished", step=STEPS), "killed_after_end", "when it had finished"),
        "after the last step": (previous(step=STEPS), "killed_after_end", "all its 60 steps were done"),
        "from scratch": (rows("start", lambda row: row.update(step=0)), "from_scratch", "before it had a checkpoint"),
        "a forged copy": (forged_copy, "copied", "is a copy of runs/ddp"),
        "other weights": (other_weights, "other_weights", "ends with other weights than runs/ddp"),
        "other ranks": (fact("ranks", 3), "ranks", "on 3 ranks, runs/ddp on 2"),
        "a pickle": (a_pickle, "checkpoints", "cannot be read"),
        "a manifest that leads away": (from_elsewhere, "checkpoints", "does not name state.pt alone"),
    },
    HOOK: {
        "no hook": (option("ddp.comm_hook", "none"), "no_hook", "--ddp.comm_hook project.py:hook"),
        "a hook of the course": (option("ddp.comm_hook", "ring"), "course_hook", "the hook ring of the course"),
        "one rank": (fact("ranks", 1), "one_rank", "nobody to talk to"),
        "another job": (option("run.seed", 1), "other_seed", "is not the job of runs/ddp"),
        "a copy": (
            both(copy_of("runs/ddp"), option("ddp.comm_hook", "project.py:hook")), "copied", "is a copy of runs/ddp"
        ),
    },
}  # fmt: skip
NAMES = {ONE: "runs/one", DDP: "runs/ddp", SURVIVAL: "runs/killed", HOOK: "runs/hook"}
CASES = [(ONE, name, *rest) for name, rest in ODD.items()]
CASES += [(spec, name, *rest) for spec, found in STATIC.items() for name, rest in found.items()]


@pytest.mark.parametrize(
    ("spec", "name", "spoil", "mistake", "says"), CASES, ids=[f"{c[0].label}-{c[1]}" for c in CASES]
)
def test_what_a_look_at_the_files_tells(copied, monkeypatch, spec, name, spoil, mistake, says):
    monkeypatch.setattr(again.Room, "part", None)  # no need to run anything
    spoil(copied, NAMES[spec])
    found, text = refused(copied, spec)
    assert found == mistake and says in text, (found, text)


def test_without_a_project(copied):
    (copied / "project.py").unlink()
    assert refused(copied, ONE)[0] == "missing"


def test_what_only_running_again_tells_of_the_first_steps(copied):
    rows("train", lambda row: row.update(loss=row["loss"] * 1.01))(copied, "runs/ddp")
    found, text = refused(copied, DDP)
    assert found == "metrics_edited" and "metrics.jsonl says that the loss of step 1 was" in text, (found, text)


def test_a_row_of_several_steps_is_their_mean():
    run = SimpleNamespace(losses={2: 1.5, 5: 3.0, 9: 7.0})
    ran = dict(enumerate((1.0, 2.0, 2.0, 3.0, 4.0, 5.0), 1))
    assert list(true.rows_again(run, ran)) == [(2, 1.5, 1.5), (5, 3.0, 3.0)]


@pytest.mark.parametrize(
    ("spoil", "mistake", "says"),
    [
        (rows("eval", lambda row: row.update(accuracy=0.9944)), "accuracy_edited", "the weights of that step reach"),
        (other_weights, "weights_edited", "run again from the checkpoint of step 50 to step 60"),
        (shorter, "odd_file", "50 steps are no whole number of epochs"),
    ],
)
def test_what_only_running_again_tells_of_the_last_steps(copied, spoil, mistake, says):
    spoil(copied, "runs/one")
    with again.room(copied) as room, pytest.raises(check.CheckFailed) as caught:
        true.last_steps(room, folder.read(copied, "runs/one"))
    assert caught.value.mistake == mistake and says in str(caught.value), str(caught.value)


def with_code(project: Path, *changes: tuple[str, str], more: str = "") -> None:
    """Change the code of project.py."""
    file = project / "project.py"
    text = file.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    file.write_text(text + more)


def test_batch_norm_is_not_equal_to_one_process(copied):
    with_code(copied, ("nn.GroupNorm(4, outside)", "nn.BatchNorm2d(outside)"))
    with again.room(copied) as room, pytest.raises(check.CheckFailed, match="GroupNorm") as caught:
        ddp.refuse_unequal(room, folder.read(copied, "runs/ddp"))
    assert caught.value.mistake == "batch_norm"
    assert "after step 1, 2 ranks and one process differ" in str(caught.value)


def test_why_a_network_is_unequal(copied):
    run = folder.read(copied, "runs/ddp")
    assert probe.why_unequal(copied, run)[0] == "not_equal"  # nothing is wrong with it
    mixing = replace(run, config=replace(run.config, data=replace(run.config.data, mixup=0.2)))
    assert probe.why_unequal(copied, mixing)[0] == "mixup"
    with_code(copied, ("nn.Flatten(),", "nn.Flatten(), nn.Dropout(0.1),"))
    assert probe.why_unequal(copied, run)[0] == "dropout"


def test_a_network_with_a_memory_does_not_survive(copied):
    remembers = """

class Remembers(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        return x * (1 + 0.01 * self.calls)
"""
    with_code(copied, ("stem, nn.ReLU(),", "stem, Remembers(), nn.ReLU(),"), more=remembers)
    with again.room(copied) as room, pytest.raises(check.CheckFailed, match="in parameters and buffers") as caught:
        survival.kill_and_continue(room, folder.read(copied, "runs/killed"))
    assert caught.value.mistake == "not_survivable"


def test_a_wrong_ring_is_named_as_in_exercise_03(copied, monkeypatch):
    monkeypatch.setattr(again.Room, "part", None)
    with_code(copied, ("range(2 * (size - 1))", "range(size - 1)"))
    found, text = refused(copied, HOOK)
    assert found == "only_reduce_scatter", text
    assert text.startswith("ring_all_reduce of project.py, as in exercise 03: ")


def test_a_hook_that_averages_a_part_is_not_ddp(copied):
    with_code(copied, ("    ring_all_reduce(gradients)", "    ring_all_reduce(gradients[:50])"))
    with again.room(copied) as room, pytest.raises(check.CheckFailed, match="all of each bucket") as caught:
        hook.refuse_unequal(room, folder.read(copied, "runs/hook"))
    assert caught.value.mistake == "not_equal"


def ready(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def sums(state, bucket):
    example.ring_all_reduce(bucket.buffer())
    return ready(bucket.buffer())


def divides_twice(state, bucket):
    example.ring_all_reduce(bucket.buffer())
    return ready(bucket.buffer() / dist.get_world_size() / dist.get_world_size())


def no_average(state, bucket):
    example.ring_all_reduce(bucket.buffer().clone())
    return ready(bucket.buffer())


def by_torch(state, bucket):
    dist.all_reduce(bucket.buffer(), group=state)
    return ready(bucket.buffer() / dist.get_world_size())


def by_torch_in_float32(state, bucket):
    """In float64 as the solution does it, so that a check in float64 alone sees nothing."""
    return (by_torch if bucket.buffer().dtype == torch.float32 else example.hook)(state, bucket)


def by_telling_everybody(state, bucket):
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [torch.empty_like(bucket.buffer()) for _ in range(size)]
    parts[rank] = bucket.buffer()
    calls = [dist.isend(bucket.buffer(), other) for other in range(size) if other != rank]
    calls += [dist.irecv(parts[other], other) for other in range(size) if other != rank]
    for call in calls:
        call.wait()
    return ready(torch.stack(parts).mean(0))


def no_future(state, bucket):
    return bucket.buffer()


WRONG_HOOKS = {
    "sums": (sums, "sums", "divide by dist.get_world_size()"),
    "divides twice": (divides_twice, "divides_twice", "divide once"),
    "no average": (no_average, "no_average", "Each rank has its own gradients still"),
    "by torch": (by_torch, "not_by_ring", "rank 0 calls all_reduce"),
    "by torch in float32": (by_torch_in_float32, "not_by_ring", "float32 gradients in several buckets: rank 0 calls"),
    "by telling everybody": (by_telling_everybody, "not_by_ring", "do not come from ring_all_reduce"),
}


@pytest.fixture(scope="module")
def hooks_seen(many):
    """The evidence for each wrong hook, and for the right one."""
    answers = {name: hook for name, (hook, *_) in WRONG_HOOKS.items()} | {"right": example.hook}
    return many({name: (answer, hook_ranks.cases(random.Random(0))) for name, answer in answers.items()})


@pytest.mark.parametrize("name", WRONG_HOOKS)
def test_a_wrong_hook_is_named(hooks_seen, name):
    _, mistake, says = WRONG_HOOKS[name]
    failed = engine.told(hook_ranks.SPEC, hooks_seen[name])
    assert failed and failed.mistake == mistake and says in str(failed), str(failed)


def test_the_right_hook_is_right(hooks_seen):
    assert engine.told(hook_ranks.SPEC, hooks_seen["right"]) is None


def test_a_hook_returns_a_future():
    with pytest.raises(check.CheckFailed, match="A hook returns a torch") as caught:
        engine.judge(hook_ranks.SPEC, no_future)
    assert caught.value.mistake == "no_future"


def test_images_of_one_s_own_are_asked_for_half_of_the_way(tmp_path, monkeypatch):
    """Four colours: a guess is right in 0.25, so 0.625 is asked for."""
    for number, colour in enumerate(("red", "green", "blue", "white")):
        (tmp_path / "images" / str(number)).mkdir(parents=True)
        for k in range(150):
            Image.new("RGB", (9, 8), colour).save(tmp_path / "images" / str(number) / f"{k}.png")
    (tmp_path / "project.py").write_text(PROJECT)
    train(tmp_path, "one", 1, "--data.name", "imagefolder:images", "--data.side", "8")
    asked = []
    monkeypatch.setattr(one, "refuse_low_accuracy", lambda run, enough: asked.append((run.accuracy, enough)))
    assert engine.judge_folder(ONE, tmp_path).points == 10
    ((reached, enough),) = asked
    assert reached >= enough == 0.625
    monkeypatch.undo()
    with pytest.raises(check.CheckFailed, match=r"accuracy of 0.6000, and 0.625 is asked for"):
        one.refuse_low_accuracy(SimpleNamespace(accuracy=0.6), enough)


def test_what_keeps_a_part_from_its_end_is_a_sentence(copied):
    run = folder.read(copied, "runs/one")
    with again.room(copied) as room:
        with pytest.raises(check.CheckFailed, match="the judge does not wait longer") as late:
            room.part(run, STEPS, seconds=0.2)
        with_code(copied, ("def network(shape, classes):", "def network(shape):"))
        with pytest.raises(check.CheckFailed, match="takes 1 positional argument") as fails:
            room.part(run, 2)
    assert (late.value.mistake, fails.value.mistake) == ("too_slow", "does_not_run_again")
    assert not room.place.exists()
