"""course bench loop: turns, arithmetic on made-up times, bad input, and one small real run without peers."""

import doctest
import json

import pytest

from course_lib import cli
from course_lib.train import bench_loop, bench_loop_peers, bench_loop_rows
from course_lib.train.bench_loop_measure import AGAIN, BARE, EACH, OWN, TENTH, Block, Found, over_ranks, refuse_unequal
from course_lib.train.bench_loop_peers import ACCELERATE, FABRIC, PEERS, TRAINER, missing
from course_lib.train.bench_loop_rows import rows_of, table
from course_lib.train.bench_loop_turns import Run


def test_doctests():
    found = doctest.testmod(bench_loop_rows)
    assert found.attempted and not found.failed


def test_runs_take_turns():
    """Each sleeps in its pause, keeps its place, and comes to its end after the last turn."""
    told = []

    def counting(name: str, steps: int):
        def train(pause) -> None:
            for step in range(steps):
                told.append(f"{name}{step}")
                pause()
            told.append(f"{name} over")

        return Run(name, train)

    a, b = counting("a", 3), counting("b", 2)
    assert told == []  # nothing runs before its turn
    a.turn(2), b.turn(2), a.turn(1)
    assert told == ["a0", "a1", "b0", "b1", "a2"]
    b.finish(), a.finish()
    assert told[5:] == ["b over", "a over"] and not a.thread.is_alive()


def test_runs_that_are_too_short_too_long_or_fail_are_told():
    def failing(pause) -> None:
        pause()
        raise ValueError("no more data")

    run = Run("short", lambda pause: pause())
    with pytest.raises(RuntimeError, match="short ended 2 steps too early"):
        run.turn(3)
    run = Run("long", lambda pause: [pause(), pause()])
    run.turn(1)
    with pytest.raises(RuntimeError, match="long takes more steps than it should"):
        run.finish()
    with pytest.raises(ValueError, match="no more data"):
        Run("failing", failing).turn(2)


def made_up(factor: float = 1.0, apart: float = 0.0) -> dict[str, Found]:
    """Bare takes 1, 2, 3 s a block, a row a step 2, 2, 12 s, the others 2 s always; CPU half of it."""
    walls = {BARE: (1, 2, 3), AGAIN: (2, 2, 2), EACH: (2, 2, 12), TENTH: (2, 2, 2)}
    blocks = {name: [Block(factor * wall, wall / 2) for wall in of] for name, of in walls.items()}
    return {"small": Found(blocks, dict.fromkeys(OWN, 0.5), dict.fromkeys(OWN, apart))}


def test_rows_hold_seconds_a_step_and_ratios_of_the_same_round():
    rows = {row.name: row for row in rows_of(2, 10, made_up())}
    assert list(rows) == list(OWN)
    bare, each = rows[BARE], rows[EACH]
    assert (bare.wall.low, bare.wall.middle, bare.wall.high) == pytest.approx((0.15, 0.2, 0.25))
    assert (bare.cpu.middle, each.cpu.middle, each.wall.high) == pytest.approx((0.1, 0.1, 0.7))
    assert (bare.wall_ratio.low, bare.wall_ratio.middle, bare.wall_ratio.high) == (1, 1, 1)
    # 1/2, 2/2, 3/12: sorted 0.25, 0.5, 1. The ratio of the medians would be 1.
    assert (each.wall_ratio.low, each.wall_ratio.middle, each.wall_ratio.high) == pytest.approx((0.375, 0.5, 0.75))
    assert each.cpu_ratio == each.wall_ratio
    assert rows[AGAIN].wall_ratio.middle == 1  # 0.5, 1, 1.5


def test_the_slowest_rank_counts_and_cpu_is_the_mean():
    other = made_up(3, apart=0.25)
    other["small"].blocks[BARE][0] = Block(0.5, 1.5)
    found = over_ranks([made_up(1), other])["small"]
    assert found.blocks[BARE][0] == Block(1, 1) and found.blocks[BARE][1] == Block(6, 1)
    assert found.apart == dict.fromkeys(OWN, 0.25)


def test_table_names_each_contender_once():
    text = table(rows_of(2, 10, made_up()))
    assert all(text.count(f"\n{name}  ") == 1 for name in OWN) and text.startswith("small: ") and "2 ranks" in text
    assert "0.500 0.375 – 0.750" in text
    slow = table(rows_of(2, 1, made_up()))  # the same with blocks of one step: of 2 s each
    assert f"{BARE}                    2000 1500 – 2500 " in slow and "e+" not in slow


def test_jobs_that_are_not_equal_are_refused():
    refuse_unequal({BARE: 2.0, EACH: 2.00001})
    for loss in (2.1, float("nan")):
        with pytest.raises(RuntimeError, match=f"{EACH} ends with a loss of {loss}, bare DDP with 2.0"):
            refuse_unequal({BARE: 2.0, EACH: loss})


@pytest.mark.parametrize(
    ("lost", "left", "told"),
    [
        ((), [FABRIC, ACCELERATE, TRAINER], ""),
        (("accelerate",), [FABRIC, TRAINER], "accelerate cannot be imported: Accelerate."),
        (
            ("lightning", "accelerate"),
            [],
            "lightning and accelerate cannot be imported: Lightning Fabric, Accelerate, ",
        ),
    ],
)
def test_peers_that_are_missing_are_left_out_with_a_sentence(monkeypatch, lost, left, told):
    monkeypatch.setattr(bench_loop_peers.importlib.util, "find_spec", lambda name: None if name in lost else name)
    names, sentence = missing(list(PEERS))
    assert names == left and told in sentence
    assert sentence.endswith("pip install -r requirements-bench.txt") == bool(lost)


def test_a_small_run(monkeypatch, tmp_path, capsys):
    """Bare and ours do the same job: the weights at the end are the same bits; how fast is not for a test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_loop, "missing", lambda names: ([], "Left out." if names else "Nobody asked."))
    assert cli.main(["bench", "loop", "--quick", "--json", "rows.json"]) == 0
    told = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in told["rows"]] == list(OWN) and told["steps"] == {"small": 5}
    for row in told["rows"]:
        assert row["apart"] == 0 and row["loss"] == told["rows"][0]["loss"] > 0
        assert min(row["wall"]["low"], row["cpu"]["low"]) > 0
    out, err = capsys.readouterr()
    assert "medians of 2 blocks" in out and "Left out." in out and "small: round 2 of 2" in err
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"]


@pytest.mark.parametrize(
    "words", [["--ranks", "0"], ["--rounds", "0"], ["--steps", "-1"], ["--tasks", "gpt"], ["--json", "no/file"]]
)
def test_bad_input_ends_with_a_sentence(words, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_loop.main(words)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def test_ranks_that_fail_end_the_command(monkeypatch, capsys):
    monkeypatch.setattr("course_lib.launch.run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("rank 1 failed")))
    assert bench_loop.main(["--no-peers"]) == 1 and "rank 1 failed" in capsys.readouterr().err
