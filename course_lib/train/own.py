"""A recipe, a data set or a network of one's own: FILE.py:FUNCTION, wherever the name of one is expected."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from course_lib.launch import named
from course_lib.launch.named import is_named, split
from course_lib.train.errors import ConfigError

__all__ = ["data", "function", "is_named", "network", "split"]


def function(name: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names. Raises ConfigError when file or function are not there."""
    try:
        return named.function(name)
    except named.NoFunction as problem:
        raise ConfigError(str(problem)) from None


def data(name: str) -> tuple[Dataset, Dataset, int]:
    """Training data, test data, number of classes, as one's own function of no arguments returns them.

    Each is a map-style Dataset of (floating-point tensor, class), all tensors of one shape. Raises ConfigError for
    something else.
    """
    made = function(name)()
    if not isinstance(made, tuple) or len(made) != 3 or not isinstance(made[2], int) or made[2] < 1:
        raise ConfigError(f"{name} must return three things: training data, test data and the number of classes.")
    train, test, classes = made
    for which, items in (("training", train), ("test", test)):
        if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
            raise ConfigError(f"{name}: the {which} data must have a length and indices, as map-style Datasets do.")
        if len(items):
            _check_sample(f"{name}: sample 0 of the {which} data", items[0], classes)
    if len(train) and len(test) and train[0][0].shape != test[0][0].shape:
        shapes = f"{tuple(train[0][0].shape)} and {tuple(test[0][0].shape)}"
        raise ConfigError(f"{name}: training and test samples differ in their shapes, {shapes}.")
    return train, test, classes


def _check_sample(where: str, sample: Any, classes: int) -> None:
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise ConfigError(f"{where} must be a pair: tensor and class.")
    tensor, label = sample
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigError(f"{where} must begin with a floating-point tensor, but begins with {kind}.")
    if not 0 <= int(label) < classes:
        raise ConfigError(f"{where} has class {int(label)}, and the {classes} classes begin with 0.")


def network(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network that one's own function makes for samples of a shape and a number of classes."""
    made = function(name)(shape, classes)
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{name} must return a torch.nn.Module, but returns {type(made).__name__}.")
    if not any(parameter.requires_grad for parameter in made.parameters()):
        raise ConfigError(f"{name} returns a network without a parameter to train.")
    return made
