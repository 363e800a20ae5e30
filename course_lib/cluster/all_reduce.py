"""A real all-reduce between real ranks: `python -m course_lib.cluster.all_reduce gloo 2 60` prints JSON.

In a process of its own, as all that could hang: when it is killed, its ranks end with it.
"""

import json
import sys

from course_lib.cluster import child
from course_lib.cluster.finding import Finding, ok, problem

LENGTH = 1000  # elements


def all_reduce(backend: str = "gloo", ranks: int = 2, limit: float = 60) -> Finding:
    """Start ranks with the course's launcher, add up a tensor, and compare with the right sum."""
    name = f"{backend} all-reduce"
    answer = child.python("course_lib.cluster.all_reduce", backend, str(ranks), str(limit), limit=limit + 30)
    if answer.code is None:
        return problem(name, f"{ranks} ranks did not finish within {limit + 30:g} s.", _cure(backend))
    if answer.code != 0:
        return problem(name, f"{ranks} ranks could not be run: {answer.last_line}", _cure(backend))
    found = json.loads(answer.out.splitlines()[-1])
    return judge(name, found["sums"], ranks, found["seconds"], _cure(backend))


def judge(name: str, sums: list[float], ranks: int, seconds: float, cure: str) -> Finding:
    """Rank r sends r + 1 in each place, so that each place holds 1 + ... + ranks afterwards."""
    right = LENGTH * ranks * (ranks + 1) / 2
    if sums == [right] * ranks:
        return ok(name, f"{ranks} ranks started and agree on the right sum, {seconds:.1f} s in all.")
    return problem(name, f"the ranks found {sums} where each should have found {right}.", cure)


def _cure(backend: str) -> str:
    if backend == "nccl":
        return "try NCCL_DEBUG=INFO, then NCCL_P2P_DISABLE=1: if that helps, turn ACS off in the BIOS."
    return "see the lines about host name, port and memory; then try GLOO_SOCKET_IFNAME=lo."


def sum_on_rank(backend: str) -> float:
    """On each rank: the sum over all places after the all-reduce."""
    import os

    import torch
    import torch.distributed as dist

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    values = torch.full((LENGTH,), float(dist.get_rank() + 1), dtype=torch.float64, device=device)
    dist.all_reduce(values)
    return values.sum().item()


def main(argv: list[str]) -> int:
    import time

    from course_lib import run
    from course_lib.cluster.all_reduce import sum_on_rank as fn  # not __main__: ranks must find it by name

    backend, ranks, limit = argv[0], int(argv[1]), float(argv[2])
    began = time.monotonic()
    result = run(fn, ranks=ranks, args=(backend,), timeout=limit, backend=backend, quiet=True)
    print(json.dumps({"sums": result.results, "seconds": time.monotonic() - began}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
