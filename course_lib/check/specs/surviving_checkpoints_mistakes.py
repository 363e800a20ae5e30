"""What people get wrong when they save a checkpoint, recognised by what a kill or a damaged file left them with."""

from typing import Any

from course_lib.check.group import Evidence, GroupSpec, Wrong
from course_lib.check.known import destroys_group, known
from course_lib.check.specs.surviving_checkpoints import cases, compare, digest, first_wrong, make_state


def _trials(e: Evidence) -> list[dict[str, Any]]:
    return e.answers[0][1].facts["trials"]


def _trial(e: Evidence, wrong: Wrong) -> dict[str, Any]:
    """The one that `compare` names."""
    return first_wrong(e) or {}


def returns_nothing(e: Evidence, wrong: Wrong) -> str | None:
    if all(trial["got"].get("step", 0) is None for trial in _trials(e) if trial["kind"] in ("saved", "damage")):
        return "Not even a finished save is found again: does load_newest come to its end without `return`?"
    return None


def stumbles_over_nothing(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "empty":
        return "The very first launch finds no checkpoint, and must begin at step 1: return None."
    return None


def string_order(e: Evidence, wrong: Wrong) -> str | None:
    steps = [trial["step"] for trial in _trials(e) if trial["kind"] == "saved"]
    got, wanted = _trial(e, wrong)["got"].get("step"), _trial(e, wrong)["allowed"][-1]
    if got is not None and got in steps and got < wanted and str(got) > str(wanted):
        return (
            f'Names are compared letter by letter, and "{got}" > "{wanted}". Compare the numbers, or write them with '
            "leading zeros: step_00000010."
        )
    return None


def newest_by_mtime(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "newest":
        return (
            "The newest is chosen by the times of the files. A copy to another disk, a restored backup or a clock that "
            "was set change them; the number of the step says which is the newest."
        )
    return None


def pickle_code(e: Evidence, wrong: Wrong) -> str | None:
    return (
        "A pickle may run any code when it is loaded, and a checkpoint comes from a disk that others write to. "
        "torch.load with weights_only=True, the default since torch 2.6, loads tensors, numbers, dicts and lists only."
    )


def writes_in_place(e: Evidence, wrong: Wrong) -> str | None:
    trial = _trial(e, wrong)
    if trial["overwritten"]:
        return (
            f"The only whole checkpoint, {trial['overwritten'][0]}, is overwritten in its place: from then on, "
            "until the last byte is there, there is none. Write beside it, then rename."
        )
    return None


def deletes_old_first(e: Evidence, wrong: Wrong) -> str | None:
    trial = _trial(e, wrong)
    if trial["removed"] and not _whole_in(trial):
        return (
            f"{trial['removed'][0]} was removed before the new checkpoint was whole. First the new one in its place, "
            "then remove older ones."
        )
    return None


def _whole_in(trial: dict[str, Any]) -> bool:
    return trial["got"].get("step") is not None


def takes_half_a_file(e: Evidence, wrong: Wrong) -> str | None:
    trial = _trial(e, wrong)
    if "error" in trial["got"] and trial["got"].get("in") is None and trial["kind"] in ("kill", "power"):
        return (
            "What the kill left looks like a checkpoint and cannot be read, and the one before is still there. Try "
            "each, newest first, and go on to the next when one is damaged."
        )
    return None


def no_fsync(e: Evidence, wrong: Wrong) -> str | None:
    trial = _trial(e, wrong)
    if wrong.kind == "power" and trial["unsafe"] and not trial["late"]:
        return (
            f"The bytes of {trial['unsafe'][0]} were only in the memory of the system, which writes them to the disk "
            "some seconds later; a name can be there before the content. os.fsync(file.fileno()) waits for the disk: "
            "call it before the file gets its final name."
        )
    return None


def fsync_before_flush(e: Evidence, wrong: Wrong) -> str | None:
    trial = _trial(e, wrong)
    if wrong.kind == "power" and trial["late"]:
        return (
            f"os.fsync was called for {trial['late'][0]} while its last bytes were still in Python's own buffer, which "
            "the system knows nothing of. First file.flush(), then os.fsync(file.fileno())."
        )
    return None


def no_checksum(e: Evidence, wrong: Wrong) -> str | None:
    trial = _trial(e, wrong)
    if trial.get("way") == "with one flipped bit" and "digest" in trial["got"]:
        step = trial["got"]["step"]
        if trial["got"]["digest"] != digest(make_state(e.cases[0].inputs[0], step)):
            return (
                "One bit was flipped, a weight changed, and nobody noticed: torch.load does not verify the bytes of "
                "tensors. Save a checksum of all bytes (hashlib.sha256), and compare it when you load."
            )
    return None


def stops_at_a_damaged_one(e: Evidence, wrong: Wrong) -> str | None:
    if "error" in _trial(e, wrong)["got"]:
        return (
            "A damaged checkpoint ends the search, although an older one is whole. Try each, newest first; whatever a "
            "broken file raises, go on to the next."
        )
    return None


def keeps_only_one(e: Evidence, wrong: Wrong) -> str | None:
    if _trial(e, wrong)["got"].get("step", 0) is None:
        return "There is no older one to go back to. Keep as many as `keep` says, each in files of its own."
    return None


def deletes_the_valid_one(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "back" and len(_trial(e, wrong)["allowed"]) == 1:  # the save has ended
        return (
            "`keep` counted the damaged checkpoint, which has the highest step, and the good one was removed. Of those "
            "with a higher step than the one being saved none counts: the run went back because they are damaged."
        )
    return None


def leftover_in_the_way(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "again":
        return (
            "What a killed save left behind is in the way of the next one, so the run could never save again. Write "
            "over the leftovers, or remove them first."
        )
    return None


def swallows_errors(e: Evidence, wrong: Wrong) -> str | None:
    if wrong.kind == "full" and not _trial(e, wrong)["raised"]:
        return (
            "The error was caught and dropped. The run would train for days without a checkpoint; let the exception "
            "out, after cleaning up."
        )
    return None


def never_deletes(e: Evidence, wrong: Wrong) -> str | None:
    return "Old checkpoints stay for ever: a run of a thousand saves fills the disk. Keep the newest `keep`."


MISTAKES = (
    *known(destroys_group, kinds=("destroyed",)),
    *known(pickle_code, kinds=("unsafe",)),
    *known(stumbles_over_nothing, kinds=("empty",)),
    *known(returns_nothing, string_order, kinds=("saved",)),
    *known(deletes_the_valid_one, kinds=("back",)),
    *known(fsync_before_flush, no_fsync, takes_half_a_file, kinds=("power",)),
    *known(writes_in_place, deletes_old_first, takes_half_a_file, kinds=("kill", "back")),
    *known(no_checksum, stops_at_a_damaged_one, keeps_only_one, kinds=("damage",)),
    *known(newest_by_mtime, kinds=("newest",)),
    *known(leftover_in_the_way, kinds=("again",)),
    *known(swallows_errors, kinds=("full",)),
    *known(never_deletes, kinds=("keep",)),
)


def praise(e: Evidence) -> list[str]:
    """What was tested, with the numbers of this run."""
    count: dict[str, int] = {}
    for trial in _trials(e):
        count[trial["kind"]] = count.get(trial["kind"], 0) + 1
    return [
        f"kill -9 at {count['kill'] + count['back']} moments of a save, also in the middle of a write: a fresh process "
        "found the new checkpoint or the one before, whole",
        f"a power cut at the moments when not all was safe ({count.get('power', 0)}), a full disk, "
        f"{count['damage']} kinds of damage: the newest good one was found",
        f"the next save worked in all of {count['again']} leftovers; keep was kept; no pickle was run",
    ]


SPEC = GroupSpec("10_surviving", "Checkpoints", 6, cases, compare, MISTAKES, praise, "kills")
