"""What `run` was asked for: checked before any process starts, and turned into torchrun's arguments."""

import os
import socket
import sys
from pathlib import Path

import psutil

from course_lib.launch.supervise import TAG, can_fork

# Memory of a rank that is not shared with others. Idle ranks took 10 and 282 MB (`course bench launch --memory`);
# the rest is for what the function does.
NEED_MB = {"direct": 40, "fork": 40, "torchrun": 320}
STARTS = ("auto", "fork", "torchrun", "direct")


def check(fn, ranks, args, timeout, backend, start, nodes) -> str:
    """Raises TypeError or ValueError with a sentence; returns the way to start."""
    if not callable(fn):
        raise TypeError(f"run() needs a function to call on each rank, not a {type(fn).__name__}.")
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        raise TypeError(f"ranks must be a whole number, not {ranks!r}.")
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least one rank must run.")
    if not isinstance(nodes, int) or nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks do not spread evenly over nodes={nodes!r}.")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple, such as args=({args!r},), not a {type(args).__name__}.")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}.")
    if not 0 < timeout <= 1e6:
        raise ValueError(f"timeout={timeout}: give a positive number of seconds, at most a million.")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend={backend!r}: choose 'gloo' (CPU tensors) or 'nccl' (GPUs).")
    if TAG in os.environ and "RANK" in os.environ:
        raise RuntimeError("run() was called inside a rank of another run(): call it from the notebook or script only.")
    return _way(start, ranks, backend, nodes)


def _way(start: str, ranks: int, backend: str, nodes: int) -> str:
    if start not in STARTS:
        raise ValueError(f"start={start!r}: choose 'auto', 'fork', 'torchrun' or 'direct'.")
    if start in ("fork", "direct") and not can_fork():
        raise ValueError(f"start={start!r} is not safe on {sys.platform}; use start='torchrun'.")
    if start == "direct" and nodes > 1:
        raise ValueError("start='direct' has no torchrun, and so no nodes: use nodes=1.")
    if backend == "nccl":
        import torch

        if not torch.cuda.is_available():
            raise ValueError("backend='nccl' needs NVIDIA GPUs, and there is none here; use backend='gloo'.")
    if start == "auto":
        start = "fork" if can_fork() and backend == "gloo" else "torchrun"
    free = psutil.virtual_memory().available // 2**20
    if ranks * NEED_MB[start] > free:
        raise ValueError(
            f"{ranks} ranks need about {ranks * NEED_MB[start]} MB of memory (start={start!r}), and {free} MB "
            f"are free: at most {free // NEED_MB[start]} ranks can start here."
        )
    return start


def commands(folder: Path, ranks: int, nodes: int, start: str) -> list[list[str]]:
    """The arguments of torchrun, for each node.

    On one node, too, we name the meeting point (static rendezvous): the c10d rendezvous of --standalone sleeps for
    a random time of up to 0.3 s before each meeting, although nobody else can come.
    """
    common = ["--nproc-per-node", str(ranks // nodes), "--local-addr", "127.0.0.1"]
    common += ["--log-dir", str(folder / "torchrun")]
    if start == "fork":
        common += ["--run-path", "--start-method", "fork", "--monitor-interval", "0.02"]
    program = [str(Path(__file__).with_name("_rank_main.py")), str(folder)]
    meet = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(_free_port())]
    return [[*meet, "--node-rank", str(node), *common, *program] for node in range(nodes)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment() -> dict[str, str]:
    """Ours, without torchrun's own options (PET_*), which would change what was asked for."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PET_")}


def cwd() -> Path:
    """The current folder. Raises ValueError with a sentence when it is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise ValueError("The current folder of this notebook has been deleted; change to another.") from None
