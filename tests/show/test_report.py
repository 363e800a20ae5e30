"""`course report`: its numbers against those of the run's own files, its HTML, and folders that are no good."""

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from statistics import median

import pytest

from course_lib import train
from course_lib.cli import main
from course_lib.show.report_chart import Axis, chart, thinned
from course_lib.show.report_options import command
from course_lib.show.report_read import read_run
from course_lib.train.cli import parse
from course_lib.train.config import as_json

VOID = {"meta", "br", "hr", "img", "link", "input"}
LEAST = {"model.width": 4, "optim.epochs": 1, "data.global_batch": 120, "optim.lr": 0.03, "data.drop_last": False}


class Page(HTMLParser):
    """Reads a page as a browser must: every element is closed in order; texts of cells and paragraphs."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.rows, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def value(self, name, column=1):
        """Of the row that begins with this cell."""
        return next(row[column] for row in self.rows if row[:1] == [name])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of 12 steps on two ranks, stopped after the fifth and continued; the last step has 117 samples."""
    place = tmp_path_factory.mktemp("runs") / "small"
    for more in ({"run.stop_after": 5}, {}):
        train("digits", ranks=2, timeout=120, dir=place, **LEAST, **more)
    return place


@pytest.fixture
def copy(folder, tmp_path):
    """The run again, to be spoilt."""
    return Path(shutil.copytree(folder, tmp_path / "run"))


@pytest.fixture
def made(capsys):
    """Function: calls `course report WORDS`; the page that was written, and what was printed."""

    def made(*words):
        assert main(["report", *map(str, words)]) == 0
        out = capsys.readouterr().out
        return Page(Path(out.splitlines()[0]).read_text()), out

    return made


@pytest.fixture(scope="module")
def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def refused(capsys, *words):
    """The one sentence of a call that ends with 2."""
    assert main(["report", *map(str, words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (sentence,) = captured.err.splitlines()
    return sentence


def in_ms(words):
    return float(words.replace(",", "")) / 1000


def test_the_numbers_are_those_of_the_run(folder, made, rows, tmp_path):
    page, out = made(folder, "--out", tmp_path / "page.html")
    trained = [row for row in rows if row["event"] == "train"]
    tested = [row for row in rows if row["event"] == "eval"]
    assert [row["step"] for row in trained] == list(range(1, 13))
    score = f"{tested[-1]['right'] / 360:.4f} ({tested[-1]['right']} of 360)"
    verdict = f"Finished: all 12 steps are done, test accuracy {score}, training loss {trained[-1]['loss']:.4f}."
    assert out.splitlines() == [str(tmp_path / "page.html"), verdict]
    assert verdict in page.text
    assert page.value("recipe") == "digits"
    assert page.value("ranks") == "2"
    assert page.value("global batch") == "120 samples = 60 a rank x 2 ranks"
    assert page.value("speed") == f"{median(row['samples_per_s'] for row in trained):,.0f} samples/s"
    seconds = [(117 if row["step"] == 12 else 120) / row["samples_per_s"] for row in trained]  # 1437 = 11 * 120 + 117
    assert float(page.value("duration").split()[0]) == pytest.approx(sum(seconds), rel=0.01, abs=0.006)
    said = re.search(r"A step took ([\d.,]+) ms.*waiting for data ([\d.]+)%", page.text)
    assert in_ms(said[1]) == pytest.approx(median(seconds), rel=0.01)
    shares = [row["data_wait"] / one for row, one in zip(trained, seconds, strict=True)]
    assert float(said[2]) / 100 == pytest.approx(median(shares), abs=0.001)


def test_communication_is_counted_in_the_rows_that_have_it(folder, made, rows, tmp_path):
    page, _ = made(folder, "--out", tmp_path / "page.html")
    trained = [row for row in rows if row["event"] == "train"]
    said = re.search(r"nothing hid ([\d.]+)%", page.text)
    assert float(said[1]) / 100 == pytest.approx(median(row["comm_share"] for row in trained), abs=0.001)
    overlaps = [row["overlap"] for row in trained if "overlap" in row]  # DDP's first ten backwards, in each launch
    assert 10 <= len(overlaps) <= len(trained)
    said = re.search(r"The median is (\d+) %: so much of rank 0's communication", page.text)
    assert float(said[1]) / 100 == pytest.approx(median(overlaps), abs=0.006)


def test_launches_with_their_ends(folder, made, rows, tmp_path):
    page, _ = made(folder, "--out", tmp_path / "page.html")
    began = [datetime.fromtimestamp(row["time"], UTC) for row in rows if row["event"] == "start"]
    head = page.rows.index(["began (UTC)", "ranks", "from step", "to step", "how it ended"])
    assert page.rows[head + 1 : head + 3] == [
        [f"{began[0]:%Y-%m-%d %H:%M:%S}", "2", "0", "5", "stopped: run.stop_after=5 was reached"],
        [f"{began[1]:%Y-%m-%d %H:%M:%S}", "2", "5", "12", "finished"],
    ]


def test_launches_of_rows_that_tell_little(copy, made):
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(row for row in rows if row["event"] == "start"):
        row |= {"time": "<b>", "ranks": None, "previous": [{"status": "killed"}] if number else None}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, _ = made(copy)
    assert ["", "?", "0", "0", "unknown"] in page.rows
    assert ["", "?", "5", "12", "finished"] in page.rows


def test_the_slowest_rank_is_named(folder, made, rows, tmp_path):
    page, _ = made(folder, "--out", tmp_path / "page.html")
    trained = [row for row in rows if row["event"] == "train"]
    said = re.search(r"Rank (\d) was the slowest in (\d+) of 12 rows. In these it needed ([\d.,]+) ms", page.text)
    mine = [row["slowest_s"] for row in trained if row["slowest_rank"] == int(said[1])]
    assert len(mine) == int(said[2]) >= 6
    assert in_ms(said[3]) == pytest.approx(median(mine), rel=0.01)
    assert page.value(f"rank {said[1]}") == said[2]


def test_events_and_checkpoints(folder, made, tmp_path):
    page, _ = made(folder, "--out", tmp_path / "page.html")
    assert page.value("0", 1) == "start"
    assert page.value("5", 1) == "resume"
    assert ["12", "finished"] in [row[:2] for row in page.rows]
    for step in (5, 12):
        place = folder / "checkpoints" / f"step_{step:08d}"
        size = sum(file.stat().st_size for file in place.iterdir())
        assert [str(step), f"{size / 2**20:.2f} MiB", "whole, by its manifest"] in page.rows
    assert page.text.count("Dotted: a launch went on after step 5.") == page.tags.count("figure") >= 8


def test_options_that_differ_are_marked_and_the_command_gives_them(folder, made, tmp_path):
    made(folder, "--out", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    marked = re.findall(r'<tr class="differs"><td>([\w.]+)</td>', text)
    assert marked == ["data.global_batch", "data.batch", "model.width", "optim.lr", "optim.epochs"]
    words = shlex.split(html.unescape(re.search(r"<pre>(torchrun .*?)</pre>", text)[1]))
    assert words[:6] == ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "course_lib.train", "digits"]
    assert as_json(parse(words[5:])) | {"data": {}} == read_run(folder).run.config | {"data": {}}
    assert words[-1] == str(folder)


def test_switches_and_names_with_spaces_survive_the_command(copy):
    config = json.loads((copy / "config.json").read_text())
    config["config"]["data"] |= {"strict": True, "root": "my data; rm -rf x"}
    config["config"]["ddp"] |= {"forward_sync_buffers": False, "bucket_mb": 3}
    (copy / "config.json").write_text(json.dumps(config))
    again = parse(shlex.split(command(read_run(copy)))[5:])
    assert (again.data.strict, again.data.root) == (True, "my data; rm -rf x")
    assert (again.ddp.forward_sync_buffers, again.ddp.bucket_mb) == (False, 3)


def test_the_page_needs_nothing_from_elsewhere(copy, made):
    page, _ = made(copy)
    text = (copy / "report.html").read_text()
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name in ("src", "href", "xlink:href") or name[:2] == "on"]
    for word in ("<script", "http:", "https:", "url(", "@import"):
        assert word not in text.lower()
    assert [path.name for path in copy.glob(".report*")] == []
    made(copy)  # a report of before is replaced


def test_text_from_files_is_only_text(copy, made):
    evil = '<script>alert("1")</script><img src=x onerror=alert(1)>'
    hostile = Path(shutil.move(copy, copy.with_name("<b onclick=x>&amp;'\"")))
    config = json.loads((hostile / "config.json").read_text())
    config |= {"recipe": evil, "torch": evil, "device": evil}
    config["data"] |= {"name": evil, "note": evil}
    config["config"]["model"] |= {"name": evil, evil: evil}
    (hostile / "config.json").write_text(json.dumps(config))
    status = {"status": "failed", "why": evil, "traceback": evil, "rank": evil, "time": evil, "step": evil}
    (hostile / "status.json").write_text(json.dumps(status))
    row = {
        "event": "train",
        "step": 13,
        "loss": evil,
        "lr": True,
        "samples_per_s": [evil],
        "overlap": evil,
        "mfu": 10**400,
    }
    with (hostile / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n" + json.dumps({"event": "eval", "step": 13, "accuracy": evil}) + "\n")
    page, _ = made(hostile)
    assert not {"script", "img", "b"} & set(page.tags)
    assert page.value("recipe") == evil
    assert page.text.startswith("<b onclick=x>&amp;'\"")
    assert not [name for _, name, _ in page.attributes if name[:2] == "on"]
    made(hostile, hostile.parent / hostile.name, "--out", hostile / "two.html")


@pytest.mark.parametrize(
    ("status", "why", "verdict"),
    [
        ("stopped", "rank 1 received SIGTERM", "Stopped after step 12 of 12, to be continued"),
        ("failed", "rank 1 raised ValueError: bad", "Failed after step 12 of 12"),
        ("running", "", "Killed: the last step that is known is 12 of 12"),
    ],
)
def test_other_ends(copy, made, status, why, verdict):
    said = json.loads((copy / "status.json").read_text()) | {"status": status, "why": why, "traceback": "at line 7"}
    (copy / "status.json").write_text(json.dumps(said))
    page, out = made(copy)
    assert out.splitlines()[1].startswith(verdict)
    assert (why or "without a word") in page.text
    assert ("at line 7" in page.text) == (status == "failed")


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_run_that_is_still_at_work(copy, made):
    said = json.loads((copy / "status.json").read_text()) | {"status": "running", "step": 5}
    (copy / "status.json").write_text(json.dumps(said))
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:8]) + lines[8][:20])
    words = [sys.executable, "-c", HOLD, str(copy / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            page, out = made(copy)
        finally:
            holder.kill()
    steps = [row["step"] for row in map(json.loads, lines[:8]) if row["event"] == "train"]
    assert out.splitlines()[1].startswith(f"Running: step {steps[-1]} of 12 is done, ")
    assert "the last line is only half written" in page.text


def test_a_folder_that_is_damaged(copy, made):
    lines = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[3:5] = [b"\xff\xfe broken\n", b"[1, 2]\n"]
    (copy / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"event": "tr')
    (copy / "status.json").write_text("{")
    (copy / "checkpoints" / "step_00000012" / "state.pt").write_bytes(b"short")
    page, out = made(copy)
    assert out.splitlines()[1].startswith("It is not known how the run ended; the last known step is 12 of 12")
    assert f"metrics.jsonl: 2 of {len(lines)} lines cannot be read and are left out." in page.text
    assert "the last line is only half written" in page.text
    assert any(row[0] == "12" and row[2].startswith("damaged: state.pt has 5 bytes") for row in page.rows)


def test_a_folder_with_a_configuration_only(copy, made):
    for name in ("metrics.jsonl", "status.json"):
        (copy / name).unlink()
    shutil.rmtree(copy / "checkpoints")
    page, out = made(copy)
    assert out.splitlines()[1].startswith("Killed: the last step that is known is 0 of 12")
    for words in ("There is no metrics.jsonl", "There is no status.json", "No step was logged.", "None is there."):
        assert words in page.text


def test_a_loss_that_is_no_number(copy, made):
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "step": 13, "lr": 0.1, "loss": NaN, "grad_norm": Infinity}\n')
    page, _ = made(copy)
    assert "From step 13 on it is not a finite number." in page.text
    assert "nan" not in "".join(value or "" for _, name, value in page.attributes if name == "points")


def test_a_straggler(copy, made):
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"slowest_rank": 1, "slowest_s": 0.9, "others_s": 0.1} if row["event"] == "train" else {}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, _ = made(copy)
    assert "Rank 1 was the slowest in 12 of 12 rows. In these it needed 900 ms" in page.text
    assert "it is a straggler" in page.text


def test_several_runs(copy, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, ranks, speed in (("two", 2, 100.0), ("eight", 8, 300.0)):
        shutil.copytree(copy, name)
        config = json.loads(Path(name, "config.json").read_text()) | {"ranks": ranks}
        Path(name, "config.json").write_text(json.dumps(config))
        rows = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            row |= {"ranks": ranks} if row["event"] == "start" else {"samples_per_s": speed}
        Path(name, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page, out = made("eight", "two")
    assert out.splitlines()[0] == "report.html"
    table = [row[:5] for row in page.rows if row[0] in ("two", "eight")]
    assert table == [["two", "2", "120 (60 x 1)", "100", "100.0%"], ["eight", "8", "120 (60 x 1)", "300", "75.0%"]]
    assert "same recipe, data, network and batch a rank (weak scaling)" in page.text
    config["config"]["data"]["batch"] = 15
    config["config"]["model"]["width"] = 8
    Path("eight", "config.json").write_text(json.dumps(config))
    page, _ = made("eight", "two")
    assert "not comparable without thought" in page.text
    assert "model.width: 4 against 8." in page.text
    assert "15 x 1 against 60 x 1. The global batch is the same (strong scaling)" in page.text


def test_what_is_no_run_is_a_sentence(tmp_path, copy, capsys):
    assert refused(capsys, tmp_path / "absent") == f"There is no folder {tmp_path / 'absent'}."
    assert "there is no config.json in it" in refused(capsys, tmp_path)
    assert "is no folder" in refused(capsys, copy / "config.json")
    for text in ("{", "[]", '{"config": 3}', '{"config": {"run": 3}}'):
        (copy / "config.json").write_text(text)
        assert "cannot be read as the configuration of a run" in refused(capsys, copy)
    assert not (copy / "report.html").exists()


def test_a_page_that_has_no_place(copy, tmp_path, capsys):
    assert "that is a folder" in refused(capsys, copy, "--out", tmp_path)
    assert "No such file or directory" in refused(capsys, copy, "--out", tmp_path / "absent" / "page.html")
    place = tmp_path / "file"
    place.touch()
    sentence = refused(capsys, copy, "--out", place / "page.html")
    assert sentence == f"The report cannot be made: {place / 'page.html'}: Not a directory. --out names another file."
    before = (copy / "metrics.jsonl").read_bytes()
    assert "is not a report of before" in refused(capsys, copy, "--out", copy / "metrics.jsonl")
    assert (copy / "metrics.jsonl").read_bytes() == before
    if os.geteuid():  # root may write everywhere
        copy.chmod(0o500)
        assert "Permission denied" in refused(capsys, copy)
        copy.chmod(0o700)


def test_chart_places_points_by_its_axes():
    text = chart({"a": [(0, 0.0), (10, 5.0), (20, 10.0)]}, "y", [10], zero=True)
    xs, ys = zip(*((float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', text)), strict=True)
    assert xs[1] == pytest.approx((xs[0] + xs[2]) / 2, abs=0.1)
    assert ys[1] == pytest.approx((ys[0] + ys[2]) / 2, abs=0.1)
    assert ys[0] > ys[2]
    assert f'class="mark" d="M{xs[1]:.1f} ' in text
    assert Axis(0, 10).ticks() == [0, 2, 4, 6, 8, 10]
    assert Axis(0.01, 1, log=True).place(0.1) == pytest.approx(0.5)
    spike = [(step, 50.0 if step == 77_777 else 1.0) for step in range(100_000)]
    assert (77_777, 50.0) in thinned(spike)
