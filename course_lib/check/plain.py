"""Answers cross from the learner's process as JSON and raw bytes: reading them runs no code of theirs."""

import json
from pathlib import Path
from typing import Any

import torch

DTYPES = {str(d).removeprefix("torch."): d for d in (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)}  # fmt: skip

NOTHING = torch.empty(0)


def write(path: Path, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """One file: a line of JSON, then the bytes of each tensor. It appears complete or not at all."""
    table, blobs = {}, []
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().flatten()
        blobs.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        table[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    partial = path.with_suffix(".partial")
    partial.write_bytes(json.dumps({"facts": facts, "tensors": table}).encode() + b"\n" + b"".join(blobs))
    partial.replace(path)


def read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What `write` wrote. Raises ValueError when the file is something else."""
    head, _, data = path.read_bytes().partition(b"\n")
    try:
        told = json.loads(head)
        tensors, at = {}, 0
        for name, entry in told["tensors"].items():
            dtype, count = DTYPES[entry["dtype"]], 1
            for length in entry["shape"]:
                count *= length
            nbytes = count * dtype.itemsize
            piece = bytearray(data[at : at + nbytes])
            if len(piece) != nbytes:
                raise ValueError("too short")
            flat = torch.frombuffer(piece, dtype=torch.uint8).view(dtype) if nbytes else torch.empty(0, dtype=dtype)
            tensors[name] = flat.reshape(entry["shape"])
            at += nbytes
    except (KeyError, TypeError, ValueError, RuntimeError) as problem:
        raise ValueError(f"{path.name} does not hold an answer: {problem}") from None
    return told["facts"], tensors
