"""`course soak` in short; and that it would find what it looks for."""

import json
import random

import pytest
import torch

from course_lib import cli
from course_lib.train import checkpoint
from course_lib.train.soak_kills import Harm, newest
from course_lib.train.soak_rounds import Soak, Starts, differences, finished


@pytest.mark.slow
def test_a_few_kills(capsys, tmp_path):
    """Real ones; with this seed of a rank, of everything and of the launcher, two of them during a save."""
    words = ["soak", "--kills", "3", "--epochs", "1", "--ranks", "2", "--seed", "5", "--dir", str(tmp_path / "soak")]
    code = cli.main(words)
    said = capsys.readouterr().out
    assert code == 0, said
    table = {line[2:40].strip(): line[40:].split() for line in said.splitlines()[1:]}
    assert table["kills"][0] == "3"
    assert int(table["checkpoints looked at"][0]) >= 3
    zeros = ("corrupt checkpoints", "steps lost beyond the last checkpoint", "launches that hung")
    assert [table[name] for name in zeros] == [["0"]] * 3
    assert table["final bits equal"] == ["yes"]
    runs = list((tmp_path / "soak").glob("round_*"))
    assert runs
    assert all(finished(run) for run in runs)


def test_words_that_make_no_sense(capsys, tmp_path):
    (tmp_path / "mine").write_text("")
    assert cli.main(["soak", "--dir", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["soak", "--kills", "0"])
    assert end.value.code == 2
    assert "must be a whole number of at least 1" in capsys.readouterr().err


def run_folder(folder, weight=1.0, loss=0.5, steps=6):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"config": {}}))
    (folder / "status.json").write_text(json.dumps({"status": "finished"}))
    rows = [{"event": "start", "step": 0}]
    rows += [{"event": "train", "step": s, "loss": loss, "grad_norm": 1.0, "lr": 0.1} for s in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checkpoint.save(folder, {"step": steps, "model": {"w": torch.tensor([1.0, weight])}}, keep=1)
    return folder


def test_differences_are_found(tmp_path):
    straight = run_folder(tmp_path / "straight")
    assert differences(straight, run_folder(tmp_path / "same")) == []
    other = run_folder(tmp_path / "bit", weight=1.0 + 2**-23)
    assert differences(straight, other) == [f"{other}: model"]
    other = run_folder(tmp_path / "loss", loss=0.5 + 2**-53)
    assert differences(straight, other) == [f"{other}: the rows of metrics.jsonl"]
    other = run_folder(tmp_path / "short", steps=5)
    assert differences(straight, other) == [f"{other}: the rows of metrics.jsonl", f"{other}: step"]


def test_a_damaged_checkpoint_breaks_a_promise(tmp_path):
    soak = Soak(tmp_path, 3, 1, 0, 1, "auto")
    folder = run_folder(tmp_path / "run")
    soak._look_at_checkpoints(folder)
    assert soak.found.kept
    file = folder / "checkpoints" / "step_00000006" / "state.pt"
    file.write_bytes(file.read_bytes()[:-1])
    soak._look_at_checkpoints(folder)
    assert not soak.found.kept
    assert soak.found.looked_at == 2
    assert "state.pt has" in soak.found.corrupt[0]


def test_lost_steps_are_counted(tmp_path):
    folder = run_folder(tmp_path / "run")
    starts = Starts(folder)
    starts.note()  # a kill; checkpoint 6 is there
    assert (starts.lost, newest(folder)) == (0, 6)
    starts.note()  # a kill before the next start had begun
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "start", "step": 4}) + "\n")
    starts.note()
    assert starts.lost == 2


def test_what_breaks_a_promise_ends_with_1_and_stays(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Soak, "straight", lambda self: None)
    monkeypatch.setattr(Soak, "round", lambda self: self.found.unequal.append("round_1: model"))
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(tmp_path))
    assert cli.main(["soak"]) == 1
    said = capsys.readouterr().out
    assert "no  round_1: model" in said
    assert f"A promise is broken. All runs and what they printed are in {tmp_path}." in said
    assert tmp_path.exists()
    assert Soak(tmp_path, 3, 1, 0, 5, "auto").harm == Harm(5)
    assert random.Random(0).random() == Soak(tmp_path, 3, 1, 0, 5, "auto").chance.random()  # the seed decides
