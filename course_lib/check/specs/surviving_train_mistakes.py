"""What people get wrong in a loop that is to survive, recognised by what its launches did."""

import torch

from course_lib.check.group import Evidence, GroupSpec, Wrong
from course_lib.check.known import destroys_group, known
from course_lib.check.specs.surviving_train import SAVES, WORLD, cases
from course_lib.check.specs.surviving_train_judge import Seen, compare


def all_ranks_save(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "All ranks have the same state and the same file: two that write it at once leave a mixture. One writes, and "
        "that is rank 0; the others have nothing to do."
    )


def saves_objects(e: Evidence, wrong: Wrong) -> str | None:
    if Seen(e).note(0)["objects"]:
        return (
            "A whole model or optimizer was put into the state. As a pickle it runs code when it is loaded, and it "
            "wants the same classes again, in the same files. Save state_dict() of each."
        )
    return None


def module_prefix(e: Evidence, wrong: Wrong) -> str | None:
    if any(prefixed for _, prefixed, _ in Seen(e).note(0)["saves"]):
        return (
            "These are the names of the wrapper. Whoever loads them into the bare network, to test it or to use it, "
            'gets "Missing key(s)", or with strict=False nothing at all. Save model.module.state_dict().'
        )
    return None


def no_save_at_the_end(e: Evidence, wrong: Wrong) -> str | None:
    if [step for step, *_ in Seen(e).note(0)["saves"]] == SAVES[:-1]:
        return "The last steps are in no checkpoint: when `last` is no multiple of `every`, they would be made again."
    return None


def counts_from_zero(e: Evidence, wrong: Wrong) -> str | None:
    saves = [step for step, *_ in Seen(e).note(0)["saves"]]
    if saves == [step - 1 for step in SAVES]:
        return "The loop's variable is one behind: a checkpoint of step 2 is what there is after two updates."
    return None


def saves_before_update(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if wrong.kind == "bits" and wrong.case == 2:
        held = seen.tensor("held", 2)
        if torch.equal(held, seen.after(1)):
            return "The checkpoint of step 2 has the weights from before that update: save after optimizer.step()."
    return None


def one_rank_in_a_collective(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "Some ranks are in a call that the others do not make. A barrier, a broadcast or a forward of DDP inside "
        "`if rank == 0:` is one: all ranks must come there, in the same order."
    )


def each_rank_looks(e: Evidence, wrong: Wrong) -> str | None:
    loads = [Seen(e).note(1, rank)["loads"] for rank in range(WORLD)]
    if wrong.kind == "start" and all(loads):
        return (
            "Each rank looked for itself, and the last one did not see the newest checkpoint yet, as happens with "
            "network disks. Let rank 0 load, and tell the others what it found: dist.broadcast_object_list."
        )
    return None


def only_rank_0_loads(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    launch = min(2, seen.count - 1)
    loads = [seen.note(launch, rank)["loads"] for rank in range(WORLD)]
    differ = seen.count > launch and not torch.equal(seen.tensor("held", launch, 1), seen.tensor("held", launch, 0))
    if loads[0] and not any(loads[1:]) and (wrong.kind == "start" or differ):
        return (
            "Only rank 0 has the state of the checkpoint. DDP makes the ranks equal when it is built, and not again. "
            "Give what rank 0 found to all, and let every rank load it."
        )
    return None


def never_loads(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "again" and not any(Seen(e).note(2, rank)["loads"] for rank in range(WORLD)):
        return (
            "The second launch did not call checkpoints.load_newest(), so it begins at step 1. --max-restarts starts "
            "the program again, nothing more: to look for its checkpoint is the program's own work."
        )
    return None


def forgets_step(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "again" and Seen(e).note(2)["asked"][:1] == [1]:
        return "The checkpoint was loaded, and the loop begins at step 1 all the same: go on with the step after it."
    return None


def off_by_one(e: Evidence, wrong: Wrong) -> str | None:
    first = Seen(e).note(2)["asked"][:1] if wrong.kind == "again" else []
    if first == [2]:
        return "Step 2 is in the checkpoint and is made a second time: go on with the step after it."
    if first == [4]:
        return "Step 3 is never made: the checkpoint holds what there is after step 2."
    return None


def trains_when_done(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "again" and wrong.case == 3:
        return "The run is finished. Started once more, it must do nothing: a scheduler may well do that at night."
    return None


def bypasses_ddp(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if not torch.equal(seen.after(1, 0), seen.after(1, 1)):
        return "The ranks have different weights: was model.module called? Only DDP's own forward averages gradients."
    return None


def same_mask_each_step(e: Evidence, wrong: Wrong) -> str | None:
    if "in steps" in wrong.text:
        return "The seed is the same in each step. Make it from step and rank: torch.manual_seed(1000 * step + rank)."
    return None


def same_mask_on_all_ranks(e: Evidence, wrong: Wrong) -> str | None:
    if "on rank 0 and on rank 1" in wrong.text:
        return "Then N ranks try only one mask. Put the rank into the seed as well."
    return None


def _first_after_the_kill(e: Evidence, wrong: Wrong) -> bool:
    return wrong.kind == "bits" and wrong.case == 2


def optimizer_on_rank_0(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if _first_after_the_kill(e, wrong) and torch.equal(seen.tensor("weights", 2)[0], seen.after(3)):
        same = torch.equal(seen.tensor("held", 2, 1), seen.after(2))
        if same and not torch.equal(seen.tensor("weights", 2, 1)[0], seen.after(3)):
            return (
                "The weights went to all ranks, and the optimizer's momentum only to rank 0: from here on each rank "
                "has weights of its own. Every rank loads all of the state."
            )
    return None


def forgets_weights(e: Evidence, wrong: Wrong) -> str | None:
    if _first_after_the_kill(e, wrong) and not torch.equal(Seen(e).tensor("held", 2), Seen(e).after(2)):
        return "When the first batch was asked for, the network did not have the weights of the checkpoint of step 2."
    return None


def _masks_are_right(e: Evidence) -> bool:
    seen = Seen(e)
    return all(torch.equal(seen.mask(2, rank, 3), seen.mask(0, rank, 3)) for rank in range(WORLD))


def rng_of_rank_0_for_all(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if wrong.kind == "bits" and wrong.case >= 2:
        masks = [seen.mask(2, rank, 3) for rank in range(WORLD)]
        if torch.equal(masks[0], masks[1]) and torch.equal(masks[0], seen.mask(0, 0, 3)):
            return (
                "All ranks go on with the random numbers of rank 0: its generator's state was saved, and loaded "
                "everywhere. Save that of each rank, or seed by step and rank."
            )
    return None


def reseeds_at_start(e: Evidence, wrong: Wrong) -> str | None:
    seen = Seen(e)
    if wrong.kind == "bits" and wrong.case >= 2 and torch.equal(seen.mask(2, 0, 3), seen.mask(0, 0, 1)):
        return (
            "Step 3 has the dropout mask that step 1 had: the generator is seeded when `train` begins, so each launch "
            "draws the same numbers again. Seed in each step, by step and rank."
        )
    return None


def forgets_rng(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "bits" and wrong.case >= 2 and not _masks_are_right(e):
        return (
            "Dropout's masks are others than in the straight run: the state of the random generator is in no "
            "checkpoint. Best is not to need it: torch.manual_seed(1000 * step + rank) before each forward."
        )
    return None


def forgets_optimizer(e: Evidence, wrong: Wrong) -> str | None:
    if _first_after_the_kill(e, wrong) and _masks_are_right(e):
        return (
            "Weights and masks are right; what is missing is the optimizer's momentum. Save optimizer.state_dict(), "
            "and load it on every rank."
        )
    return None


def forgets_buffers(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "parameters() leaves the buffers out. Save and load module.state_dict(), which has both; else the network is "
        "right in training and wrong when it is evaluated."
    )


MISTAKES = (
    *known(destroys_group, kinds=("destroyed",)),
    *known(one_rank_in_a_collective, kinds=("hangs",)),
    *known(all_ranks_save, kinds=("writers",)),
    *known(saves_objects, module_prefix, kinds=("content",)),
    *known(no_save_at_the_end, counts_from_zero, kinds=("saves",)),
    *known(bypasses_ddp, kinds=("training",)),
    *known(same_mask_each_step, same_mask_on_all_ranks, kinds=("random",)),
    *known(each_rank_looks, only_rank_0_loads, kinds=("start",)),
    *known(never_loads, forgets_step, off_by_one, trains_when_done, kinds=("again",)),
    *known(saves_before_update, only_rank_0_loads, optimizer_on_rank_0, forgets_weights, kinds=("bits",)),
    *known(rng_of_rank_0_for_all, reseeds_at_start, forgets_rng, forgets_optimizer, kinds=("bits",)),
    *known(forgets_buffers, kinds=("buffers",)),
)


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    return [
        "the straight run of 5 steps on 3 ranks has the weights of one process, after each step, to 10 digits",
        "killed in step 4 and started again: the same bits after every step, on all ranks",
        "one rank wrote, data only, by the names of the bare network; the ranks agreed on the newest checkpoint",
        "a finished run that was started once more did nothing",
    ]


SPEC = GroupSpec("10_surviving", "train", 6, cases, compare, MISTAKES, praise, "launches")
