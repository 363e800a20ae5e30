"""The usual mistakes in gradient accumulation with right values: too much memory, too many messages, or a hang."""

from course_lib.check.group import Evidence, Wrong
from course_lib.check.specs.torch_ddp_oracle import gradient_bytes


def all_in_one_forward(e: Evidence, wrong: Wrong) -> str | None:
    if "in one forward" not in wrong.text:
        return None
    return (
        "Several microbatches were put together again, and the batch was cut because it does not fit into memory. Let "
        "each have a forward and a backward of its own."
    )


def keeps_graphs(e: Evidence, wrong: Wrong) -> str | None:
    if "no backward yet" not in wrong.text:
        return None
    return (
        "What backward needs of a microbatch waits while others go forward, so memory is that of several. One backward "
        "over the sum of all losses does so. Call backward for each microbatch, before the next forward: .grad adds up."
    )


def retains_graphs(e: Evidence, wrong: Wrong) -> str | None:
    if "after its backward" not in wrong.text:
        return None
    return (
        "backward(retain_graph=True) keeps what a second backward through the same graph would need, as long as the "
        "loss lives. There is none here: leave it out."
    )


OF_MEMORY = (all_in_one_forward, keeps_graphs, retains_graphs)


def no_sync_around_backward_only(e: Evidence, wrong: Wrong) -> str | None:
    facts = e.answers[wrong.case][0].facts
    if not facts["entered"] or facts["inside"]:
        return None
    return (
        "no_sync() is around backward only. DDP decides in forward whether the backward will be synchronised: put both "
        "inside."
    )


def no_no_sync(e: Evidence, wrong: Wrong) -> str | None:
    if e.answers[wrong.case][0].facts["entered"]:
        return None
    return (
        "The values are right, but DDP sends all gradients after each microbatch. Put forward and backward of all "
        "microbatches but the last into `with model.no_sync():`."
    )


def sends_another_way(e: Evidence, wrong: Wrong) -> str | None:
    return wrong.detail or None


def synchronises_too_often(e: Evidence, wrong: Wrong) -> str | None:
    facts, case = e.answers[wrong.case][0].facts, e.cases[wrong.case]
    updates = case.options["sizes"][0]
    micro = sum(len(of_update) - 1 for of_update in updates)
    if not 0 < facts["inside"] < micro:
        return None
    return (
        f"In {len(updates)} updates {facts['inside']} forwards were in no_sync(), and {micro} belong there: those of "
        "all microbatches but the last."
    )


def averages_again(e: Evidence, wrong: Wrong) -> str | None:
    facts, case = e.answers[wrong.case][0].facts, e.cases[wrong.case]
    micro = sum(len(of_update) - 1 for of_update in case.options["sizes"][0])
    if facts["inside"] < micro:
        return None
    return (
        f"The gradients travel again after DDP has averaged them ({gradient_bytes()} bytes an update would do). Leave "
        "the all-reduce of gradients to DDP."
    )


OF_TRAFFIC = (
    sends_another_way, no_sync_around_backward_only, no_no_sync, synchronises_too_often, averages_again,
)  # fmt: skip


def sends_for_each_microbatch(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "Something is sent for each microbatch, such as its number of samples, and each call costs a latency and waits "
        "for the slowest rank. Add up on this rank first; then one all-reduce an update tells the number of all."
    )


OF_CALLS = (sends_for_each_microbatch,)


def waits_at_a_barrier(e: Evidence, wrong: Wrong) -> str | None:
    if "barrier" not in wrong.text:
        return None
    return (
        "A barrier carries nothing, and all wait for the slowest. The all-reduces wait for all ranks anyway: leave it "
        "out."
    )


def several_small_calls(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "Each call costs a latency and waits for the slowest rank, however few its bytes. One small all-reduce an "
        "update is enough: what more is to be added up, such as a loss, goes into the same tensor as the number of "
        "samples."
    )


OF_SMALL = (waits_at_a_barrier, several_small_calls)


def skips_empty_microbatch(e: Evidence, wrong: Wrong) -> str | None:
    if e.cases[wrong.case].group != "tail":
        return None
    return (
        "It happens only where rank 1 has a microbatch without samples. The others wait for its all-reduce: let it run "
        "forward and backward all the same (the sum of no losses is 0, and so is its gradient), and divide by the "
        "number of samples of all ranks, which is not 0."
    )


OF_HANGS = (skips_empty_microbatch,)
