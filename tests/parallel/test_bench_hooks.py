"""course bench hooks: its arithmetic on made-up times, its bad input, and one small real run."""

import json

import pytest

from course_lib import cli
from course_lib.parallel import bench_hooks
from course_lib.parallel.bench_hooks import main, rows_of, table
from course_lib.parallel.bench_hooks_measure import ALONE, CONTENDERS, GLOO, Times, over_ranks


def made_up(scale: float) -> dict[str, Times]:
    """Contender k takes (5 - k) * scale seconds in the first round, twice that in the second, and so on."""
    return {"mlp": Times(4096, {n: [(5 - k) * scale * r for r in (1, 2, 3)] for k, n in enumerate(CONTENDERS)})}


def test_rows_hold_medians_quartiles_and_ratios():
    rows = {row.name: row for row in rows_of(4, made_up(0.01))}
    assert set(rows) == set(CONTENDERS)
    gloo, shared = rows[GLOO], rows["shared memory"]
    assert (gloo.low, gloo.seconds, gloo.high) == pytest.approx((0.075, 0.1, 0.125))
    assert (gloo.times_faster, shared.times_faster) == pytest.approx((1, 5 / 4))
    assert gloo.communication == pytest.approx(1 - 1 / 5) and rows[ALONE].communication == 0


def test_the_slowest_rank_counts():
    assert over_ranks([made_up(0.01), made_up(0.03), made_up(0.02)]) == made_up(0.03)


def test_table_names_each_contender_once():
    text = table(rows_of(2, made_up(0.01)))
    assert all(text.count(f" {name} ") == 1 for name in CONTENDERS) and "mlp, 4 KB" in text and "1.25x" in text


def test_a_small_run(monkeypatch, tmp_path, capsys):
    """Steps of all contenders run and give figures; how fast they are is not for a test."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "hooks", "--ranks", "2", "--models", "mlp", "--rounds", "1", "--steps", "1",
                     "--json", "rows.json"]) == 0  # fmt: skip
    told = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in told["rows"]] == list(CONTENDERS)
    assert all(row["nbytes"] == 4 * 4 * (1448 * 1448 + 1448) and row["seconds"] > 0 for row in told["rows"])
    assert "median of 1 rounds of 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--ranks", "1"], ["--rounds", "0"], ["--models", "gpt"], ["--json", "no/file"]])
def test_bad_input_ends_with_a_sentence(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def test_ranks_that_fail_end_the_command(monkeypatch, capsys):
    monkeypatch.setattr("course_lib.launch.run", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("rank 1 failed")))
    assert bench_hooks.main(["--ranks", "2"]) == 1 and "rank 1 failed" in capsys.readouterr().err
