"""Look at torch from a process of its own: `python -m course_lib.cluster.probe` prints JSON.

So a broken library or a dead driver ends the probe and not the doctor, and the memory that one rank needs is
measured where nothing else is loaded.
"""

import json
from collections.abc import Callable
from typing import Any

import psutil

from course_lib.cluster import child
from course_lib.startup import importing


class ProbeFailed(Exception):
    """torch could not be looked at; the text says why."""


def look(limit: float = 90) -> dict[str, Any]:
    """What the probe found. Memory in bytes. Raises ProbeFailed."""
    answer = child.python("course_lib.cluster.probe", limit=limit)
    if answer.code is None:
        raise ProbeFailed(f"importing torch took more than {limit:g} s")
    if answer.code != 0:
        raise ProbeFailed(f"importing torch failed: {answer.last_line}")
    return json.loads(answer.out.splitlines()[-1])


class Torch:
    """The probe's answer, asked for once; what depends on it raises ProbeFailed quickly the next time."""

    def __init__(self, ask: Callable[[], dict[str, Any]] = look) -> None:
        self._ask = ask
        self._answer: dict[str, Any] | ProbeFailed | None = None

    def __call__(self) -> dict[str, Any]:
        if self._answer is None:
            try:
                self._answer = self._ask()
            except ProbeFailed as error:
                self._answer = error
        if isinstance(self._answer, ProbeFailed):
            raise self._answer
        return self._answer


def _find() -> dict[str, Any]:
    with importing():
        import torch
        import torch.distributed as dist

    torch.set_num_threads(1)
    found: dict[str, Any] = {"torch": torch.__version__, "torchvision": _torchvision()}
    found["backends"] = {
        "gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()
    }  # fmt: skip
    found["rank_bytes"] = _memory_of_a_rank(torch)
    found["built_for"] = torch.version.cuda or torch.version.hip
    found["gpus"] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found["gpus"].append({"name": properties.name, "bytes": properties.total_memory})
    if found["gpus"] and found["backends"]["nccl"]:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _torchvision() -> str | None:
    """Its version if it can be imported: a torchvision made for another torch fails here, not later."""
    try:
        import torchvision
    except Exception as error:  # noqa: BLE001  whatever a binary that does not fit may raise
        return f"error: {type(error).__name__}: {error}"
    return torchvision.__version__


def _memory_of_a_rank(torch) -> int:
    """Bytes that only this process uses, after one training step of a small network on the CPU."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 16, 3), torch.nn.Flatten(), torch.nn.Linear(576, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(64, 1, 8, 8)).sum().backward()
    optimizer.step()
    return psutil.Process().memory_full_info().uss


if __name__ == "__main__":
    print(json.dumps(_find()))
