"""Record what C++ code sends, such as DDP's reducer during backward: it never passes the functions that watch.py wraps.

torch calls a process group's pre-hook before each collective is issued and its post-hook after; the latter gets the
work handle, whose future tells when the collective has completed.
"""

import threading
import time

import torch
import torch.distributed as dist

from course_lib.launch.trace import OPS

_OPS = {
    "ALLREDUCE": "all_reduce",
    "BROADCAST": "broadcast",
    "REDUCE": "reduce",
    "ALLGATHER": "all_gather",
    "GATHER": "gather",
    "SCATTER": "scatter",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "BARRIER": "barrier",
}
_NUMBER = 7031  # of our hook among those of a group


class Hooks:
    """`watch.note(number, given, where)` starts a record; calls that a wrapper of `watch` has seen are left out."""

    def __init__(self, watch) -> None:
        self.watch = watch
        self._rows: dict[int, int] = {}  # torch's number of the call: our row
        self._lock = threading.Lock()

    def attach(self, group: dist.ProcessGroup) -> None:
        """From now on, for this group."""
        if not hasattr(group, "register_pre_hook"):  # a rank that is not in the group gets no group
            return
        group.register_pre_hook(_NUMBER, lambda call: self._before(group, call))
        group.register_post_hook(_NUMBER, self._after)

    def _before(self, group: dist.ProcessGroup, call) -> None:
        op = _OPS.get(call.name.name)
        if op is None or self.watch.inside:
            return
        given = {"group": group, "tensor": list(call.input_tensors)}
        if op in ("broadcast", "reduce", "gather", "scatter"):
            given["src"] = dist.get_process_group_ranks(group)[call.root]
        where = self.watch.where()
        row, _ = self.watch.note(OPS.index(op), op, given, where)
        self.watch.writer.blocked(row, where)  # the caller computes on, but ends up waiting for this
        with self._lock:
            self._rows[call.op_id] = row

    def _after(self, call) -> None:
        with self._lock:
            row = self._rows.pop(call.op_id, None)
        if row is not None:
            call.work.get_future().then(lambda future: self._over(row, future))

    def _over(self, row: int, future: torch.futures.Future) -> None:
        self.watch.writer.done(row, time.monotonic())
