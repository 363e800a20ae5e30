"""Wrap the functions of torch.distributed in a rank, so that each call leaves a record in the trace."""

import functools
import inspect
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from course_lib.launch.hooks import Hooks
from course_lib.launch.trace import OPS, POINT_TO_POINT, Writer

_PAYLOAD = {  # which argument holds what this rank puts in; "tensor" where not named
    "all_gather_into_tensor": "input_tensor",
    "all_gather_single": "input_tensor",
    "reduce_scatter": "input_list",
    "reduce_scatter_single": "input",
    "all_reduce_coalesced": "tensors",
    "all_gather_coalesced": "input_tensor_list",
    "reduce_scatter_tensor": "input",
    "all_to_all": "input_tensor_list",
    "all_to_all_single": "input",
}
_OBJECTS = {  # calls that pickle: which argument holds what this rank puts in
    "all_gather_object": "obj",
    "gather_object": "obj",
    "broadcast_object_list": "object_list",
    "send_object_list": "object_list",
    "scatter_object_list": "scatter_object_input_list",
}

# Files, or folders of files, that only pass a call on: `where` looks further out. A wrapper around a function of torch
# adds its own file.
passing: list[str] = [str(Path(torch.__file__).parent), str(Path(__file__).parent)]

# Called in the rank as (phase, op, peer, tensor) for each send and receive: phase "start" when the call is made (what
# is sent is in the tensor), "done" when the call or its wait() has returned (what was received is there).
Observer = Callable[[str, str, int | None, torch.Tensor], None]
observers: list[Observer] = []

# The same for the collectives that work in place on one tensor. In the peer's place stands how often torch itself may
# raise the tensor's version: once with ReduceOp.AVG, which gloo does not know, so that torch adds and then divides.
in_place: list[Observer] = []

# Called in the rank each time that is_completed() of a handle says no.
asked: list[Callable[[], None]] = []

_OBSERVED = ("send", "recv", "isend", "irecv")
_IN_PLACE = ("all_reduce", "broadcast", "reduce")


class Watch:
    """Installs the wrappers. `label(file, line)` turns a source position into words."""

    def __init__(self, writer: Writer, label: Callable[[str, int], str]) -> None:
        self.writer, self.label = writer, label
        self._inside = threading.local()
        self._hooks = Hooks(self)
        self._collectives: Counter[int] = Counter()
        self._places: dict[tuple[str, int], int] = {}

    def install(self) -> None:
        """Replace each function wherever torch.distributed keeps it."""
        for number, op in enumerate(OPS):
            original = getattr(distributed_c10d, op, None)
            if original is None:  # another version of torch
                continue
            wrapper = self._wrap(number, op, original)
            for module in (distributed_c10d, dist):
                setattr(module, op, wrapper)
        self._hooks.attach(dist.group.WORLD)
        for name in ("init_process_group", "new_group", "new_subgroups"):
            self._attach_to_new(name)

    def _attach_to_new(self, name: str) -> None:
        original = getattr(distributed_c10d, name)

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            made = original(*args, **kwargs)
            for group in {"init_process_group": [dist.group.WORLD], "new_group": [made]}.get(name) or made[1]:
                self._hooks.attach(group)
            return made

        for module in (distributed_c10d, dist):
            setattr(module, name, wrapper)

    @property
    def inside(self) -> bool:
        """This thread is in a call that already has its record."""
        return getattr(self._inside, "on", False)

    def where(self) -> int:
        """The innermost line that is neither torch's nor ours."""
        frame, skipped = sys._getframe(1), tuple(passing)
        while frame.f_back and frame.f_code.co_filename.startswith(skipped):
            frame = frame.f_back
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in self._places:
            self._places[place] = self.writer.name("where", self.label(*place))
        return self._places[place]

    def _wrap(self, number: int, op: str, original: Callable) -> Callable:
        binder = Binder(original)

        @functools.wraps(original)
        def wrapper(*args, **kwargs):
            if self.inside:  # torch calls its own functions: count the outermost only
                return original(*args, **kwargs)
            given = binder(args, kwargs)
            if given.get("async_op", False) and sys._getframe(1).f_code.co_filename.startswith(passing[0]):
                return original(*args, **kwargs)  # torch hands the Work on to C++ (Join does); `Hooks` notes the call
            where = self.where()
            row, peer = self.note(number, op, given, where)
            tell = self._teller(op, peer, given)
            tell("start")
            asynchronous = op in ("isend", "irecv") or given.get("async_op", False)
            self._inside.on = True
            if not asynchronous:
                self.writer.blocked(row, where)
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside.on = False
                if not asynchronous:
                    self.writer.blocked(-1, -1)
            if asynchronous and result is not None:
                return WatchedWork(result, self, row, tell)
            self.writer.done(row, time.monotonic(), result if op == "recv" else None)
            tell("done")
            return result

        return wrapper

    @staticmethod
    def _teller(op: str, peer: int | None, given: dict) -> Callable[[str], None]:
        told, third = [], None
        if op in _OBSERVED:
            told, third = observers, peer
        elif op in _IN_PLACE:
            told, third = in_place, int(given.get("op") == dist.ReduceOp.AVG)

        def tell(phase: str) -> None:
            for observer in told:
                observer(phase, op, third, given["tensor"])

        return tell

    def note(self, number: int, op: str, given: dict, where: int) -> tuple[int, int | None]:
        """Write the row; returns its number and the peer's global rank."""
        group = given.get("group") or dist.group.WORLD
        ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else []
        peer = given.get("dst", given.get("src"))
        local = given.get("group_dst", given.get("group_src"))
        if peer is None and local is not None:
            peer = ranks[local]
        if op in POINT_TO_POINT and peer is not None and not 0 <= peer < dist.get_world_size():
            verb = "receives from" if "recv" in op else "sends to"
            raise ValueError(
                f"rank {dist.get_rank()} {verb} rank {peer}, but the ranks are 0 to {dist.get_world_size() - 1}: "
                "take the number modulo the world size."
            )
        group_number = self.writer.name("group", ranks)
        sequence = 0
        if op not in POINT_TO_POINT:
            sequence = self._collectives[group_number]
            self._collectives[group_number] += 1
        row = self.writer.start(
            number, -1 if peer is None else peer, given.get("tag", 0), group_number,
            _payload(op, given), time.monotonic(), where, sequence,
        )  # fmt: skip
        return row, peer


class Binder:
    """Arguments by name, as inspect.Signature.bind gives them, many times faster: it stands in every call's way."""

    def __init__(self, function: Callable) -> None:
        self._signature = inspect.signature(function)
        self._names = list(self._signature.parameters)
        empty = inspect.Parameter.empty
        self._needed = [name for name, p in self._signature.parameters.items() if p.default is empty]

    def __call__(self, args: tuple, kwargs: dict) -> dict:
        given = dict(zip(self._names, args, strict=False))
        given.update(kwargs)
        fits = len(given) == len(args) + len(kwargs) and all(name in given for name in self._needed)
        if not fits or not all(name in self._signature.parameters for name in kwargs):
            return self._signature.bind(*args, **kwargs).arguments  # raises the TypeError that Python would raise
        return given


def _payload(op: str, given: dict) -> int:
    """Bytes that this rank puts in; of an object, those of its pickle."""
    if op not in _OBJECTS:
        return _nbytes(given.get(_PAYLOAD.get(op, "tensor")))
    if given.get("src") not in (None, dist.get_rank()):
        return 0  # it only receives
    try:
        thing = given.get(_OBJECTS[op])
        return sum(len(pickle.dumps(part)) for part in (thing if isinstance(thing, list) else [thing]))
    except Exception:  # noqa: BLE001 - torch will say what cannot be pickled
        return 0


def _nbytes(thing: object) -> int:
    if isinstance(thing, torch.Tensor):
        return thing.numel() * thing.element_size()
    if isinstance(thing, (list, tuple)):
        return sum(map(_nbytes, thing))
    return 0


class WatchedWork:
    """A `Work` handle that notes when its `wait()` returns; all else goes to torch's own handle."""

    def __init__(self, work: dist.Work, watch: Watch, row: int, tell: Callable[[str], None]) -> None:
        self._work, self._watch, self._row, self._tell = work, watch, row, tell
        self._over = False

    def wait(self, *args, **kwargs):
        """Wait as torch does; meanwhile the trace says where."""
        writer = self._watch.writer
        writer.blocked(self._row, self._watch.where())
        try:
            result = self._work.wait(*args, **kwargs)
        finally:
            writer.blocked(-1, -1)
        self._done()
        return result

    def is_completed(self) -> bool:
        """As torch's; True is noted as the end of the call."""
        done = self._work.is_completed()
        if done:
            self._done()
        else:
            for observer in asked:
                observer()
        return done

    def get_future(self) -> torch.futures.Future:
        """As torch's; its end is noted as the end of the call."""
        return self._work.get_future().then(self._passed_on)

    def _passed_on(self, future: torch.futures.Future) -> object:
        self._done()
        return future.value()

    def _done(self) -> None:
        if not self._over:
            self._over = True
            self._watch.writer.done(self._row, time.monotonic())
            self._tell("done")

    def __getattr__(self, name: str):
        return getattr(self._work, name)
