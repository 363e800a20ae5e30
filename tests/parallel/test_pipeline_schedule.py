"""Pipeline schedules: order, time and memory, counted another way."""

import pytest

from course_lib.parallel import pipeline_schedule
from course_lib.parallel.pipeline_schedule import Op

SCHEDULES = {"gpipe": pipeline_schedule.gpipe, "1f1b": pipeline_schedule.one_f_one_b}
sizes = pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (2, 1), (3, 2), (4, 4), (4, 8), (5, 3)])
names = pytest.mark.parametrize("name", SCHEDULES)


def test_one_f_one_b_by_hand():
    f, b = (lambda m: Op("forward", m)), (lambda m: Op("backward", m))
    assert pipeline_schedule.one_f_one_b(3, 4) == [
        [f(0), f(1), f(2), b(0), f(3), b(1), b(2), b(3)],
        [f(0), f(1), b(0), f(2), b(1), f(3), b(2), b(3)],
        [f(0), b(0), f(1), b(1), f(2), b(2), f(3), b(3)],
    ]


@names
@sizes
def test_each_stage_does_everything_once_and_keeps_what_it_must(name, stages, microbatches):
    everything = sorted(Op(kind, m) for kind in ("forward", "backward") for m in range(microbatches))
    for stage, ops in enumerate(SCHEDULES[name](stages, microbatches)):
        assert sorted(ops) == everything
        wanted = microbatches if name == "gpipe" else min(stages - stage, microbatches)
        assert pipeline_schedule.peak_stored(ops) == wanted


@names
@sizes
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (0.5, 1.25)])
def test_the_timeline_has_the_predicted_bubble(name, stages, microbatches, forward, backward):
    """Also counted by hand: the first stage is free while the others fill and drain, (P - 1)(forward + backward)."""
    spans = pipeline_schedule.timeline(SCHEDULES[name](stages, microbatches), forward, backward)
    assert pipeline_schedule.idle(spans) == pytest.approx(pipeline_schedule.bubble(stages, microbatches), abs=1e-12)
    assert max(s.end for s in spans) == pytest.approx((microbatches + stages - 1) * (forward + backward))
    ends = {(s.stage, s.op): s.end for s in spans}
    for s in spans:
        before = s.stage - 1 if s.op.kind == "forward" else s.stage + 1
        assert s.start >= ends.get((before, s.op), 0)
        assert all(t.end <= s.start or t.start >= s.end for t in spans if t.stage == s.stage and t != s)


def test_stages_that_wait_for_each_other_are_named():
    schedule = [[Op("backward", 0), Op("forward", 0)], [Op("forward", 0), Op("backward", 0)]]
    with pytest.raises(ValueError, match="Stage 0 waits for its backward of microbatch 0, stage 1 waits for its forw"):
        pipeline_schedule.timeline(schedule)
    with pytest.raises(ValueError, match="not 0 and 4"):
        pipeline_schedule.gpipe(0, 4)
