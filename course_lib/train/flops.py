"""How much of what the machine could compute does this run compute? MFU, after Chowdhery et al. 2022 (PaLM), app. B.

    MFU = FLOPs of forward and backward of a sample x samples a second / (peak of a device x devices)

What is computed twice (activation checkpointing) counts once. A multiplication and an addition are two FLOPs.
"""

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

# Dense peaks in TFLOP/s as (float32 on tensor cores or, without them, on the others; 16 bits), from NVIDIA's data
# sheets: A100 80GB (2022), H100 and H200 (SXM; the sheets give values with sparsity, twice these), V100 (2020).
PEAKS = {"A100": (156, 312), "H100 80GB HBM3": (494.5, 989), "H200": (494.5, 989), "V100": (15.7, 125)}


def count(module: nn.Module, shape: tuple[int, int, int]) -> float:
    """FLOPs of a sample, forward and backward, of all matrix products and convolutions.

    Nothing is computed and no memory taken: a copy of the network runs on torch's "meta" device.
    """
    samples = 2  # BatchNorm wants more than one
    twin = copy.deepcopy(module).to("meta")
    with FlopCounterMode(display=False) as counter:
        twin(torch.zeros(samples, *shape, device="meta", dtype=next(twin.parameters()).dtype)).sum().backward()
    return counter.get_total_flops() / samples


def peak(given: float, device: torch.device, half: bool) -> float | None:
    """FLOP/s that one device could do, in 16 bits or not: `given` in TFLOP/s, or from a data sheet, or None."""
    if given:
        return given * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = [peaks[half] for part, peaks in PEAKS.items() if part in name]
    return known[0] * 1e12 if known else None
