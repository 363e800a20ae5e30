"""From a stored image to the tensor that the network sees."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def scale_digits(image: torch.Tensor) -> torch.Tensor:
    """uint8 (..., 1, 8, 8) with values 0 to 16 -> float32, over the data set about mean 0 and deviation 1."""
    return (image.float() / 16 - 0.305) / 0.376


def chain(steps: list[Callable], image: Any) -> Any:
    """One step after the other (a function, so that loader processes can be given it)."""
    for step in steps:
        image = step(image)
    return image


def augmentation(kind: str, side: int) -> list[Callable]:
    """Random changes for training. They draw from torch's generator, which is seeded for each sample."""
    if kind == "none":
        return []
    from torchvision.transforms import v2  # a second of import that digits does without

    if kind == "resized-crop":
        return [v2.RandomResizedCrop(side, antialias=True), v2.RandomHorizontalFlip()]
    crop = [v2.RandomCrop(side, padding=max(1, side // 8))]
    return crop if kind == "crop" else [*crop, v2.RandomHorizontalFlip()]


def changed_digits(augment: str) -> Callable:
    """For the embedded digits, to train."""
    return partial(chain, [*augmentation(augment, 8), scale_digits])


def pictures(augment: str, side: int, resize: bool, mean: list[float], std: list[float]) -> tuple[Callable, Callable]:
    """For PIL images: (training, test).

    With `resize` they come in any size, and the test sees the middle of them.
    """
    from torchvision.transforms import v2

    rgb_or_grey = v2.RGB() if len(mean) == 3 else v2.Grayscale()
    finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    # 256 for 224, as everywhere for ImageNet.
    middle = [v2.Resize(side * 8 // 7, antialias=True), v2.CenterCrop(side)] if resize else []
    change = augmentation(augment, side)
    train = change if augment == "resized-crop" else [*middle, *change]
    return partial(chain, [rgb_or_grey, *train, *finish]), partial(chain, [rgb_or_grey, *middle, *finish])


def mixup(alpha: float, classes: int) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """From (images, labels) to mixtures of neighbours in the batch, with labels as probabilities; 0: unchanged.

    Draws from torch's CPU generator. Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization".
    """
    if not alpha:
        return unchanged
    from torchvision.transforms import v2

    return v2.MixUp(alpha=alpha, num_classes=classes)


def unchanged(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Not mixed."""
    return images, labels
