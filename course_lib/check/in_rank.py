"""What a rank does while it is judged: every case in turn, each answer written to a file at once.

So the answers that a rank gave before it failed or hung are not lost. The largest group comes first. To go on
with a smaller one the process group is made anew without the last rank, which has done its part: one start of
processes serves all world sizes.
"""

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.check import plain
from course_lib.check.group import HANDLE
from course_lib.check.recorder import Handles, Recorder, poison
from course_lib.launch import watch
from course_lib.launch.pickling import text_of
from course_lib.launch.watch import observers

LATE = 0.02  # seconds by which a late rank begins after the others
place: str | None = None  # a folder in which a driver may write; it goes with the check
FENCE = Path(__file__).name  # the barriers called in this file separate the cases in the list of messages


def take_part(fn, script: list[tuple], folder: str, cells: dict[str, str]) -> None:
    """`script`: for each case (number, inputs, options, traced, late, drive), see GroupCase."""
    global place
    place = folder
    for number, inputs, options, traced, late, drive in script:
        if len(inputs) < dist.get_world_size() and not _shrink(len(inputs), number, folder):
            return
        rank = dist.get_rank()
        dist.barrier()
        if rank == late:
            time.sleep(LATE)
        path = Path(folder, f"case_{number}_rank_{rank}")
        if drive:
            _drive(drive, fn, inputs[rank], options, path, cells)
        else:
            _answer(fn, inputs[rank], options, traced, path, cells)
    dist.barrier()


def _shrink(size: int, number: int, folder: str) -> bool:
    """Make the default group anew with the first `size` ranks; False on the others."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    if rank >= size:
        return False
    world = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {name: text for name, text in world.items() if name in os.environ}  # they agree with the group
    store = dist.FileStore(str(Path(folder, f"store_{number}")), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return True


@contextmanager
def _observed(watching: list, tensor: torch.Tensor, path: Path, cells: dict[str, str]) -> Iterator[None]:
    """The learner's code runs in here: followed by the observers, and what it raises is its answer."""
    observers.extend(watching)
    try:
        yield
    except BaseException as error:
        plain.write(path, _error(error, cells), {"after": tensor})
        raise
    finally:
        for observer in watching:
            observers.remove(observer)


def _drive(drive, fn, tensor: torch.Tensor, options: dict, path: Path, cells: dict[str, str]) -> None:
    handles = Handles(compare=False)
    with _observed([handles], tensor, path, cells):
        facts, tensors = drive(fn, tensor, **options)
    told = {"facts": facts, "open": handles.open, "destroyed": not dist.is_initialized()}
    plain.write(path, told, {"after": tensor, **{f".{name}": value for name, value in tensors.items()}})
    if told["destroyed"] or handles.open:
        raise Unfinished("the process group was destroyed, or messages were on their way at the end")


def _answer(fn, tensor: torch.Tensor, options: dict, traced: bool, path: Path, cells: dict[str, str]) -> None:
    handles, recorder = Handles(compare=traced), Recorder(dist.get_rank(), tensor)
    watching = [handles, recorder, poison] if traced else [handles]
    with _observed(watching, tensor, path, cells):
        value = fn(tensor, **options)
    facts = {"returned": _kind(value), "itself": _itself(value, tensor), "destroyed": not dist.is_initialized()}
    facts |= {"open": handles.open, "touched": handles.touched}
    if traced:
        facts["events"] = [{name: getattr(e, name) for name in e.__slots__} for e in recorder.events()]
    other = isinstance(value, torch.Tensor) and value.dtype in plain.DTYPES.values() and not facts["itself"]
    plain.write(path, facts, {"after": tensor, **({"value": value} if other else {})})
    if facts["destroyed"]:
        raise Unfinished("the function destroyed the process group")
    if handles.open:
        raise Unfinished("the function returned while messages were on their way")  # they would meet later ones


class Unfinished(RuntimeError):
    """Nothing more can be learnt: calls that nobody waits for disturb whatever comes after them."""


def _error(error: BaseException, cells: dict[str, str]) -> dict[str, str]:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _hidden(f.filename)]
    at = around = ""
    if frames:
        file, line = frames[-1].filename, frames[-1].lineno
        at, around = f"{cells.get(file) or Path(file).name}, line {line}", frames[-1].name
    text = "\n".join([text_of(error), *getattr(error, "__notes__", ())])
    return {"error": type(error).__name__, "error_text": text, "error_at": at, "error_in": around}


def _hidden(file: str) -> bool:
    if Path(file).name == "typing_extensions.py":  # around each function of torch that is deprecated
        return True
    return file.startswith((str(Path(torch.__file__).parent), str(Path(watch.__file__).parents[1])))


def _kind(value: object) -> str:
    if isinstance(value, (dist.Work, watch.WatchedWork)):
        return HANDLE
    return "None" if value is None else type(value).__name__


def _itself(value: object, tensor: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    mine, theirs = tensor.untyped_storage(), value.untyped_storage()
    return value is tensor or (tensor.numel() > 0 and mine.data_ptr() == theirs.data_ptr())
