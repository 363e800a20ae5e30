"""course bench scaling: efficiencies of made-up times by hand, bad input, and one small real run."""

import json

import pytest
from torch import nn

from course_lib import cli
from course_lib.parallel.bench_hooks_measure import Times, over_ranks
from course_lib.train import bench_scaling
from course_lib.train.bench_scaling import rows_of, table, warning
from course_lib.train.bench_scaling_measure import ALL, ALL_AGAIN, APART, CONTENDERS, LOADS, ONE, ONE_AGAIN, verify


def made_up(ranks_seconds: tuple[float, ...] = (1.25, 2.0, 10.0)) -> dict[str, Times]:
    """Blocks of 5 steps with 16 samples a rank. One rank takes 1, 1, 2 s, three ranks apart 1, 1.25, 4 s."""
    seconds = {ONE: [1, 1, 2], ONE_AGAIN: [2, 1, 1.6], APART: [1, 1.25, 4]}
    return {"compute": Times(2 << 20, seconds | {ALL: list(ranks_seconds), ALL_AGAIN: list(ranks_seconds)})}


def test_rates_and_efficiencies():
    rows = {row.name: row for row in rows_of(3, 5, made_up())}
    assert list(rows) == list(CONTENDERS)
    one, together, apart = rows[ONE], rows[ALL], rows[APART]
    assert (one.rate.middle, one.rate.low) == pytest.approx((80, 60))  # 16 * 5 samples in 1, 1 and 2 s
    assert one.efficiency.middle == 1 and one.of_ceiling is None
    assert together.rate.middle == pytest.approx(120)  # 3 * 16 * 5 samples in 1.25, 2 and 10 s: 192, 120, 24
    # each rank does what one does alone, so the efficiency is the quotient of times: 1/1.25, 1/2, 2/10
    assert together.efficiency.middle == pytest.approx(0.5)
    assert (together.efficiency.low, together.efficiency.high) == pytest.approx((0.35, 0.65))
    assert apart.efficiency.middle == pytest.approx(0.8)  # 1/1, 1/1.25, 2/4
    assert together.of_ceiling.middle == pytest.approx(0.625)  # 1/1.25, 1.25/2, 4/10
    assert rows[ONE_AGAIN].efficiency.middle == 1  # 1/2, 1/1, 2/1.6


def test_the_slowest_rank_counts():
    """Also when it slept: a rank at rest took no time."""
    slept = made_up((1.0, 3.0, 10.0))
    slept["compute"].seconds[ONE] = [0.0, 0.0, 0.0]
    found = over_ranks([made_up(), slept])["compute"]
    assert found.seconds[ONE] == [1, 1, 2] and found.seconds[ALL] == [1.25, 3.0, 10.0]


def test_table_names_each_contender_once():
    text = table(rows_of(3, 5, made_up()))
    assert all(text.count(f"\n{name.replace('N ', '3 ')}  ") == 1 for name in CONTENDERS)
    assert "2 MB of gradients" in text and " 62.5%" in text and LOADS["compute"].about in text


def test_more_ranks_than_cores_are_told(monkeypatch):
    monkeypatch.setattr(bench_scaling, "cores", lambda: 2)
    assert warning(2) == "" and warning(3).startswith("3 ranks share 2 cores")


def test_a_small_run(monkeypatch, tmp_path, capsys):
    """The run itself compares weights: those of twins, of ranks, and of rank 0 alone and apart."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "scaling", "--quick", "--loads", "communication", "--json", "rows.json"]) == 0
    told = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in told["rows"]] == list(CONTENDERS) and told["steps"] == {"communication": 1}
    hidden = 4096
    assert all(row["nbytes"] == 4 * (1024 * hidden + hidden + hidden * 10 + 10) for row in told["rows"])
    assert all(row["rate"]["low"] > 0 and row["efficiency"]["low"] > 0 for row in told["rows"])
    out, err = capsys.readouterr()
    assert "medians of 2 blocks" in out and "communication: round 2 of 2" in err


@pytest.mark.parametrize(("one", "other"), [(ONE, ONE_AGAIN), (ALL, ALL_AGAIN)])
def test_twins_with_other_weights_are_refused(one, other):
    same = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=f"'{one}' and '{other}' end with other weights"):
        verify(dict.fromkeys(CONTENDERS, same) | {other: nn.Linear(2, 2)})


@pytest.mark.parametrize(
    "words", [["--ranks", "1"], ["--rounds", "0"], ["--steps", "-1"], ["--loads", "gpt"], ["--json", "no/file"]]
)
def test_bad_input_ends_with_a_sentence(words, capsys):
    with pytest.raises(SystemExit) as ended:
        bench_scaling.main(words)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def test_ranks_that_fail_end_the_command(monkeypatch, capsys):
    monkeypatch.setattr("course_lib.launch.run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("rank 1 failed")))
    assert bench_scaling.main([]) == 1 and "rank 1 failed" in capsys.readouterr().err
