"""course bench ring: its arithmetic on made-up samples, its bad input, and one small real run."""

import io
import json
import statistics

import pytest
import torch

from course_lib import cli
from course_lib.collectives import bench_measure
from course_lib.collectives.bench import main, size_of
from course_lib.collectives.bench_limits import LIMITS
from course_lib.collectives.bench_measure import CONTENDERS, GLOO, Sample, over_ranks, words
from course_lib.collectives.bench_progress import progress
from course_lib.collectives.bench_rows import rows_of, summary, table
from course_lib.collectives.bench_threads import OWN
from course_lib.collectives.bench_threads import table as thread_table


def made_up(scale: float) -> dict:
    """Two sizes; contender k takes (k + 1) * scale seconds in the first round, twice that in the second, and so on."""
    names = [*CONTENDERS, *LIMITS]
    return {
        size: {name: [Sample((k + 1) * scale * r, k + r, 10.0 * k) for r in (1, 2, 3)] for k, name in enumerate(names)}
        for size in (4096, 1 << 20)
    }


def test_rows_hold_medians_bandwidths_and_ratios():
    rows = rows_of(4, made_up(0.001))
    assert len(rows) == 2 * (len(CONTENDERS) + len(LIMITS))
    gloo, p2p = rows[0], rows[1]
    assert (gloo.name, gloo.nbytes, gloo.ranks, gloo.times_faster) == (GLOO, 4096, 4, 1.0)
    assert (gloo.low, gloo.seconds, gloo.high) == pytest.approx((0.0015, 0.002, 0.0025))
    assert gloo.bandwidth == pytest.approx(4096 / 0.002 / 1e9)
    assert gloo.bus_bandwidth == pytest.approx(1.5 * 4096 / 0.002 / 1e9)  # 2(4 - 1)/4
    assert p2p.times_faster == pytest.approx(0.5)
    assert (p2p.cpu, p2p.sleeps) == (1 + 2, 10.0)
    limit = next(row for row in rows if row.name == "memcpy")
    assert limit.times_faster is None
    assert limit.bus_bandwidth == limit.bandwidth


def test_one_round_has_no_spread():
    one = {4096: {name: [Sample(0.5, 0.1, 1)] for name in CONTENDERS}}
    assert {(row.low, row.seconds, row.high) for row in rows_of(2, one)} == {(0.5, 0.5, 0.5)}


def test_the_slowest_rank_counts():
    joined = over_ranks([made_up(0.001), made_up(0.004), made_up(0.002)])
    assert joined == made_up(0.004)


def test_table_and_summary_name_everything_once_for_each_size():
    rows = rows_of(2, made_up(0.001))
    text = table(rows)
    for name in [*CONTENDERS, *LIMITS]:
        assert text.count(f"  {name} ") == 2
    assert "2.0 ms" in text
    assert summary(rows).splitlines()[2].split() == ["4", "KB", "0.50", "0.33", "0.25", "0.20"]


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("64K", 65536), ("1 MB", 1 << 20), ("2MiB", 2 << 20), ("1g", 1 << 30)]
)
def test_sizes_are_read(text, nbytes):
    assert size_of(text) == nbytes
    assert size_of(words(nbytes).replace("1024 MB", "1G")) == nbytes


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--sizes", "big"], "'big' is no size"),
        (["--sizes", "6"], "a multiple of 4"),
        (["--ranks", "1"], "--ranks takes numbers from 2"),
        (["--rounds", "0"], "--rounds from 1"),
        (["--plot", "no/such/folder/a.png"], "there is no folder no/such/folder"),
        (["--plot", "a.txt"], "must end in .png, .svg or .pdf"),
        (["--sizes", "4000G"], "are free"),
    ],
)
def test_bad_input_is_a_sentence(argv, told, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_ranks_that_cannot_start_are_a_sentence(capsys):
    assert main(["--ranks", "1000000", "--sizes", "4"]) == 1
    assert "1000000 ranks need about" in capsys.readouterr().err


def test_it_measures_draws_and_writes(tmp_path, capsys):
    plot, rows = tmp_path / "plot.png", tmp_path / "rows.json"
    argv = ["bench", "ring", "--ranks", "2", "3", "--sizes", "4K", "1000004", "--rounds", "2"]
    assert cli.main([*argv, "--plot", str(plot), "--json", str(rows)]) == 0
    told = capsys.readouterr()
    assert "median of 2 rounds" in told.out
    assert "3 ranks, 976.6 KB: round 2 of 2" in told.err
    assert plot.read_bytes().startswith(b"\x89PNG")
    facts = json.loads(rows.read_text())
    assert facts["rounds"] == 2
    found = {(row["ranks"], row["nbytes"], row["name"]) for row in facts["rows"]}
    all_names = [*CONTENDERS, *LIMITS]
    pairs = {2: all_names, 3: [name for name in all_names if name != "loopback TCP"]}  # ranks send in pairs
    assert found == {(n, size, name) for n, names in pairs.items() for size in (4096, 1_000_004) for name in names}
    for row in facts["rows"]:
        assert row["low"] <= row["seconds"] <= row["high"]
        assert row["bandwidth"] == pytest.approx(row["nbytes"] / row["seconds"] / 1e9)
    # Asleep, not spinning: a rank whose peer is late gives up its core.
    sleeps = [row["sleeps"] for row in facts["rows"] if row["name"].startswith("ring") and row["nbytes"] == 1_000_004]
    assert statistics.mean(sleeps) > 0


def test_a_wrong_sum_is_not_timed(monkeypatch):
    monkeypatch.setattr(bench_measure.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(bench_measure.dist, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="ring, TCP gives a wrong sum of 5 elements over 2 ranks"):
        bench_measure._verify({"ring, TCP": lambda: None}, {"ring, TCP": torch.zeros(5)}, 5)


def test_progress_is_one_line_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, ending in ((io.StringIO(), "two\n"), (Terminal(), "two\r\x1b[K")):
        with progress(stream):
            print("one")
            print("two")
        assert stream.getvalue().endswith(ending)


def test_threads_are_told_apart(capsys):
    assert main(["--threads", "--ranks", "2", "--sizes", "64K"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "CPU time of rank 0 of 2 for each all-reduce, by thread"
    assert [line[9:28].strip() for line in lines] == list(CONTENDERS)
    assert "gloo_tcp_loop" in lines[1]  # torch's sends and receives go through gloo's thread
    assert all(line[28:].startswith(OWN) for line in lines[2:])  # ours do the work in the thread that calls


def test_thread_table_leaves_idle_threads_out():
    text = thread_table(2, {4096: {GLOO: {"busy": 5e-6, "idle": 1e-9, OWN: 1.5e-5}}})
    assert text.splitlines()[1].split("  ")[-1].strip() == f"{OWN} 15 µs, busy 5 µs"
