"""torch's flight recorder: the last collectives of a rank, and which rank has not come to the newest one."""

import json
import os
from pathlib import Path
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

# Collectives kept; it must stand in the environment before the first group is made. 0 would turn the recorder off.
SIZE = "TORCH_FR_BUFFER_SIZE"


def turn_on() -> None:
    """Record the last collectives, also with gloo. What the person set stays."""
    os.environ.setdefault(SIZE, "200")


def dump() -> str:
    """What the recorder holds, as JSON. (Private in torch; tests/train/test_watching.py tells when it changes.)"""
    found = c10d._dump_nccl_trace_json() if dist.get_backend() == "nccl" else c10d._dump_fr_trace_json()
    return found if isinstance(found, str) else found.decode()


def collectives(record: dict[str, Any]) -> dict[str, dict[int, str]]:
    """For each process group the numbers of the collectives that this rank came to, with their names.

    >>> one = {"process_group": ["0", "default_pg"], "collective_seq_id": 9, "profiling_name": "gloo:all_reduce"}
    >>> collectives({"entries": [one, one | {"collective_seq_id": 10, "profiling_name": "gloo:broadcast"}]})
    {'0': {9: 'all_reduce', 10: 'broadcast'}}
    """
    found: dict[str, dict[int, str]] = {}
    for entry in record.get("entries", []):
        name = entry["profiling_name"].rpartition(":")[2]
        found.setdefault(entry["process_group"][0], {})[entry["collective_seq_id"]] = name
    return found


def who_is_missing(place: Path, world_size: int) -> str:
    """In words: who wrote nothing, or who is behind all others.

    Not everybody who is behind somebody: in a broadcast some ranks have what they need and go on, while others wait.
    """
    files = {rank: place / f"rank_{rank}.json" for rank in range(world_size)}
    silent = [rank for rank, path in files.items() if not path.exists()]
    if silent:
        return f"{ranks(silent)} did not say where: stopped, gone, or on another disk"
    records = {}
    for rank, path in files.items():
        try:
            records[rank] = collectives(json.loads(path.read_text()))
        except ValueError:  # it is being written
            return f"what {ranks([rank])} recorded cannot be read"
    for group in sorted({group for record in records.values() for group in record}):
        newest = {rank: max(record.get(group, {0: ""})) for rank, record in records.items()}
        first = min(newest.values())
        if first < max(newest.values()):
            late = [rank for rank, number in newest.items() if number == first]
            names = {name for record in records.values() if (name := record.get(group, {}).get(first + 1))}
            return f"{ranks(late)} did not come to {names.pop() if names else 'collective'} number {first + 1}"
    return "all ranks are in the same collective, or in none"


def ranks(numbers: list[int]) -> str:
    """The ranks in words.

    >>> ranks([1]), ranks([0, 2])
    ('rank 1', 'ranks 0 and 2')
    """
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
