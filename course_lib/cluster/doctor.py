"""`course doctor`: is this machine, this network, are these GPUs fit for the course?"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from course_lib.cluster import cores, gpus, memory, network, probe, storage, versions
from course_lib.cluster.all_reduce import all_reduce
from course_lib.cluster.examine import Check, Findings, examine
from course_lib.cluster.finding import Finding, note, ok, problem


def checks(look: Callable[[], dict[str, Any]] | None = None) -> list[Check]:
    """All checks. torch is looked at once, in a process of its own."""
    look = look or probe.Torch()
    return [
        Check("Python", versions.python_version),
        Check("torch", lambda: _torch(look), limit=100),
        Check("cores and threads", cores.threads),
        Check("memory", _needs(look, "memory", lambda found: memory.memory(found["rank_bytes"]))),
        Check("disk", storage.disk),
        Check("shared memory", storage.shared_memory),
        Check("port", network.port),
        Check("default port", network.default_port),
        Check("host name", network.host_name),
        Check("gloo all-reduce", all_reduce, limit=100),
        Check("GPU", _needs(look, "GPU", gpus.gpus)),
        Check("nccl all-reduce", _needs(look, "nccl all-reduce", _nccl), limit=100),
    ]


def quick_checks(look: Callable[[], dict[str, Any]] | None = None) -> list[Check]:
    """Those that start no ranks: what `show.machine()` tells in a notebook."""
    quick = ("Python", "torch", "cores and threads", "memory", "disk", "GPU")
    return [check for check in checks(look) if check.name in quick]


def _needs(look: Callable, name: str, work: Callable[[dict[str, Any]], Findings]) -> Callable[[], Findings]:
    """A check that cannot say anything without torch; the line about torch holds the cure."""

    def check() -> Findings:
        try:
            found = look()
        except probe.ProbeFailed:
            return note(name, "not known, since torch could not be looked at.")
        return work(found)

    return check


def _torch(look: Callable[[], dict[str, Any]]) -> list[Finding]:
    try:
        found = look()
    except probe.ProbeFailed as error:
        return [problem("torch", f"{error}.", "call make lab, which installs it; a network disk makes it slow.")]
    return [*versions.packages(found), backends(found)]


def backends(found: dict[str, Any]) -> Finding:
    """gloo carries the whole course; nccl needs GPUs; the wheels have no mpi."""
    there = [name for name, available in found["backends"].items() if available]
    if "gloo" not in there:
        cure = "install torch from the wheels of pytorch.org, which have it."
        return problem("backends", f"this torch has no gloo (it has: {', '.join(there) or 'none'}).", cure)
    return ok("backends", ", ".join(there) + ".")


def _nccl(found: dict[str, Any]) -> Findings:
    if not found["gpus"] or "nccl" not in found:
        return []
    if len(found["gpus"]) == 1:
        return note("nccl all-reduce", "not tried: it needs two GPUs, and there is one.")
    return all_reduce("nccl")


def main(argv: list[str] | None = None) -> int:
    """Print a line for each finding; 1 when there is a problem, else 0."""
    parser = argparse.ArgumentParser(prog="course doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args(argv)
    found = []
    for finding in examine(checks()):
        found.append(finding)
        if not options.json:
            print(finding, flush=True)
    problems = sum(finding.verdict == "problem" for finding in found)
    if options.json:
        print(json.dumps({"fit": not problems, "findings": [asdict(finding) for finding in found]}, indent=2))
    elif problems:
        print(f"{problems} problem{'s' if problems > 1 else ''}: the lines above say what to do.")
    else:
        print("This machine is fit for the course.")
    return 1 if problems else 0
