"""What in a network keeps N ranks from being equal to one process: it is tried out, in a process of its own."""

import os
from pathlib import Path
from typing import Any

import torch

from course_lib.check.alone import start
from course_lib.check.project.folder import Run, as_dict
from course_lib.launch import RunError
from course_lib.launch import run as run_ranks
from course_lib.train.model import ModelConfig, build

SECONDS = 30.0
SAYS = {
    "mixup": "--data.mixup mixes each rank's samples with random numbers of its own, so N ranks train on other images "
    "than one process. Leave it at 0 here.",
    "batch_norm": "The network's output for a sample depends on the other samples of its batch, as BatchNorm's does: a "
    "rank normalises over its own part of the global batch, one process over all of it. Use GroupNorm, which looks at "
    "each sample for itself.",
    "dropout": "The network's output is random, as dropout makes it, and each rank draws numbers of its own: N ranks "
    "drop other units than one process. Leave dropout out of this network.",
    "not_equal": "Does the network, or the data, look at the rank, or at how many samples come at a time?",
}


def why_unequal(project: Path, run: Run) -> tuple[str, str]:
    """The name of the mistake, and a sentence."""
    if run.config.data.mixup:
        return "mixup", SAYS["mixup"]
    shape, classes = as_dict(run.facts.get("data")).get("shape"), as_dict(run.facts.get("data")).get("classes")
    try:
        arguments = (str(project), run.config.model, shape, classes)
        seen = run_ranks(_look, 1, arguments, SECONDS, start=start(), quiet=True).results[0]
    except RunError:  # it trained a moment ago; what keeps it from being looked at is not the question here
        seen = {}
    name = next((name for name in ("batch_norm", "dropout") if seen.get(name)), "not_equal")
    return name, SAYS[name]


def _look(project: str, config: ModelConfig, shape: list[int], classes: int) -> dict[str, Any]:
    os.chdir(project)
    network = build(config, tuple(shape), classes, seed=0).double().train()
    images = torch.randn(6, *shape, dtype=torch.float64)
    others = torch.cat([images[:3], torch.randn(3, *shape, dtype=torch.float64)])

    def output(batch: torch.Tensor, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with torch.no_grad():
            return network(batch)[:3]

    return {
        "batch_norm": not torch.allclose(output(images, 1), output(others, 1), rtol=1e-9, atol=1e-12),
        "dropout": not torch.allclose(output(images, 1), output(images, 2), rtol=1e-9, atol=1e-12),
    }
