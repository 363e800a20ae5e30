"""Recipes: functions that return a complete configuration. The first line of each is what `--help` shows."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

from course_lib.parallel.ddp import DDPOptions
from course_lib.train import own
from course_lib.train.config import Config
from course_lib.train.data import DataConfig
from course_lib.train.errors import ConfigError
from course_lib.train.folder import RunConfig
from course_lib.train.model import ModelConfig
from course_lib.train.optim import OptimConfig
from course_lib.train.precision import AmpConfig


def digits() -> Config:
    """A small CNN on the embedded 8x8 digits: seconds on a laptop, no network needed."""
    return Config()


def mnist() -> Config:
    """A small CNN on MNIST (70,000 images of 28x28, downloaded)."""
    return Config(
        run=RunConfig(log_every=10),
        data=DataConfig("mnist", global_batch=120),
        optim=OptimConfig(epochs=3, warmup_epochs=0.5),
    )


def fashion() -> Config:
    """A small CNN on Fashion-MNIST (70,000 images of 28x28, downloaded)."""
    return Config(
        run=RunConfig(log_every=10),
        data=DataConfig("fashion", global_batch=120),
        model=ModelConfig(width=32),
        optim=OptimConfig(epochs=5, warmup_epochs=0.5),
    )


def cifar10() -> Config:
    """A CNN with BatchNorm on CIFAR-10 (60,000 images of 32x32, downloaded)."""
    return Config(
        run=RunConfig(log_every=10),
        data=DataConfig("cifar10", global_batch=120, augment="crop-flip"),
        model=ModelConfig(width=64, norm="batch"),
        optim=OptimConfig(epochs=15),
    )


def imagenette() -> Config:
    """ResNet-18 on Imagenette (ten classes of ImageNet at 128x128, downloaded)."""
    return Config(
        run=RunConfig(log_every=10),
        data=DataConfig("imagenette", global_batch=48, workers=2, augment="resized-crop", side=128),
        model=ModelConfig("resnet18"),
        optim=OptimConfig(lr=0.05, epochs=20, decay="matrices", label_smoothing=0.1),
    )


def resnet50_a100() -> Config:
    """ResNet-50 on ImageNet with 8 GPUs: the rule of Goyal et al. 2017, 0.1 per 256 images.

    --data.root IMAGENET. 256 images a GPU at a time, so with fewer GPUs more microbatches make the same step.
    """
    return Config(
        run=RunConfig(log_every=20),
        data=DataConfig(
            "imagefolder", global_batch=2048, batch=256, workers=8, augment="resized-crop", side=224, drop_last=True
        ),
        model=ModelConfig("resnet50", channels_last=True),
        optim=OptimConfig(
            lr=0.1,
            reference_batch=256,
            epochs=90,
            warmup_epochs=5,
            nesterov=True,
            weight_decay=1e-4,
            decay="matrices",
            label_smoothing=0.1,
        ),
        amp=AmpConfig("bf16"),
        ddp=DDPOptions(gradient_as_bucket_view=True),
    )


def synthetic() -> Config:
    """ResNet-18 on noise of 3x64x64: how fast is the loop? The accuracy means nothing."""
    return Config(
        data=DataConfig("synthetic:3x64x64", global_batch=24, samples=1024),
        model=ModelConfig("resnet18"),
        optim=OptimConfig(epochs=1, warmup_epochs=0),
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion": fashion,
    "cifar10": cifar10,
    "imagenette": imagenette,
    "resnet50-a100": resnet50_a100,
    "synthetic": synthetic,
}


def find(name: str) -> Callable[[], Config]:
    """The recipe of that name, or the one in FILE.py:FUNCTION."""
    if own.is_named(name):
        return one_s_own(name)
    if name not in RECIPES:
        raise ConfigError(f"There is no recipe {name!r}; the recipes are {', '.join(RECIPES)}, or FILE.py:FUNCTION.")
    return RECIPES[name]


def one_s_own(name: str) -> Callable[[], Config]:
    """The recipe in FILE.py:FUNCTION. Where it says `__file__`, its configuration gets FILE as it was given here.

    So a run can be continued when the folder has moved.
    """
    made, file = own.function(name), name.rpartition(":")[0]

    def as_given(value: str) -> str:
        mine = own.is_named(value) and own.split(value)[0] == own.split(name)[0]
        return f"{file}:{own.split(value)[1]}" if mine else value

    @wraps(made)
    def complete() -> Config:
        config = made()
        if not isinstance(config, Config):
            raise ConfigError(f"{name} must return a Config, but returns {type(config).__name__}.")
        return replace(
            config,
            data=replace(config.data, name=as_given(config.data.name)),
            model=replace(config.model, name=as_given(config.model.name)),
            ddp=replace(config.ddp, comm_hook=as_given(config.ddp.comm_hook)),
        )

    return complete
