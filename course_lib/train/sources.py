"""Where the samples come from: the embedded digits, torchvision, a folder of images, or noise."""

import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from course_lib.train import own, transforms
from course_lib.train.data import Data, DataConfig, Samples, identity
from course_lib.train.downloads import DOWNLOADS, IMAGENET, fetch, torchvision_set
from course_lib.train.environment import Environment
from course_lib.train.errors import ConfigError
from course_lib.train.randomness import mix

NAMES = "digits, mnist, fashion, cifar10, imagenette, imagefolder:PATH, synthetic:3x224x224 or FILE.py:FUNCTION"


def every_fifth(samples: int) -> tuple[list[int], list[int]]:
    """(training, test) indices for data that has no test set of its own.

    >>> every_fifth(7)
    ([1, 2, 3, 4, 6], [0, 5])
    """
    return [i for i in range(samples) if i % 5], [i for i in range(samples) if i % 5 == 0]


def digits(config: DataConfig, seed: int) -> Data:
    """The embedded digits: 1,437 to train, 360 to test; see course_lib/data/README.md."""
    with as_file(files("course_lib") / "data" / "digits.npz") as path, np.load(path) as arrays:
        images = torch.from_numpy(arrays["images"]).unsqueeze(1)
        labels = torch.from_numpy(arrays["labels"]).long()
    scaled = transforms.scale_digits(images)  # once, and not sample by sample
    changed, change = images, transforms.changed_digits(config.augment)
    if config.augment == "none":
        changed, change = scaled, identity
    train, test = every_fifth(len(images))
    return Data(
        "digits",
        Samples(TensorDataset(changed[train], labels[train]), seed, change),
        Samples(TensorDataset(scaled[test], labels[test]), seed, identity),
        (1, 8, 8),
        10,
    )


class Noise(Dataset):
    """`samples` images of noise, made once from a pool of 64, so that making them takes no time of a step."""

    by_tensor = True  # an index may be a tensor of them

    def __init__(self, samples: int, shape: tuple[int, int, int]) -> None:
        self.samples = samples
        self.pool = torch.randn(64, *shape, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int | torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        return self.pool[index % 64], index % 10


def synthetic(config: DataConfig, seed: int) -> Data:
    """Noise of a given shape: good for measuring speed, never for accuracy."""
    found = re.fullmatch(r"synthetic:([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", config.name)
    if not found:
        raise ConfigError(f"--data.name {config.name} has no shape; write for example synthetic:3x224x224.")
    shape = tuple(int(part) for part in found.groups())
    train, test = Noise(config.samples, shape), Noise(min(config.samples, 256), shape)
    note = "synthetic data: noise, to measure speed; accuracy means nothing"
    return Data(config.name, Samples(train, seed, identity), Samples(test, seed, identity), shape, 10, note)


def image_folder(config: DataConfig, seed: int) -> Data:
    """PATH/train and PATH/val (or test) with a folder for each class.

    Without them, every fifth image is the test.
    """
    from torchvision.datasets import ImageFolder

    root = Path(config.name.partition(":")[2] or config.root)
    if not root.is_dir():
        raise ConfigError(f"The image folder {root} does not exist; give --data.name imagefolder:PATH.")
    try:
        if (root / "train").is_dir():
            held_out = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
            if held_out is None:
                raise ConfigError(f"The image folder {root} has train but neither val nor test beside it.")
            train, test = ImageFolder(root / "train"), ImageFolder(held_out)
            if train.classes != test.classes:
                odd = sorted(set(train.classes) ^ set(test.classes))
                raise ConfigError(f"{root / 'train'} and {held_out} differ in their classes: {', '.join(odd)}.")
            classes = len(train.classes)
        else:
            whole = ImageFolder(root)
            classes = len(whole.classes)
            train, test = (Subset(whole, part) for part in every_fifth(len(whole)))
    except FileNotFoundError as error:  # torchvision's word for a folder without classes, or a class without images
        raise ConfigError(
            f"The image folder {root} needs one folder of images for each class: {str(error).rstrip('.')}."
        ) from error
    side = config.side or 224
    change, plain = transforms.pictures(config.augment, side, True, *IMAGENET)
    name = f"imagefolder:{root}"
    return Data(name, Samples(train, seed, change), Samples(test, seed, plain), (3, side, side), classes)


def downloaded(config: DataConfig, seed: int, env: Environment) -> Data:
    """A public data set. Local rank 0 downloads while the others wait; a failure is everybody's failure."""
    failures = [why for why in env.gather(fetch(config) if env.local_rank == 0 else "") if why]
    if failures and config.strict:
        raise ConfigError(f"{config.name} could not be downloaded to {config.root} ({failures[0]}).")
    if failures:
        note = f"digits instead of {config.name}, which could not be downloaded"
        env.say(f"Training on {note} to {config.root} ({failures[0]}); use --data.strict to stop instead.")
        return replace(digits(replace(config, augment="none"), seed), note=note)
    train, test = torchvision_set(config, download=False)
    _, side, classes, (mean, std) = DOWNLOADS[config.name]
    resize = config.name == "imagenette" or config.side not in (0, side)
    side = config.side or side
    change, plain = transforms.pictures(config.augment, side, resize, mean, std)
    shape = (len(mean), side, side)
    return Data(config.name, Samples(train, seed, change), Samples(test, seed, plain), shape, classes)


def one_s_own(config: DataConfig, seed: int) -> Data:
    """What FILE.py:FUNCTION returns, the same on each rank when its chance comes from torch's generator.

    How a sample is augmented is its own affair: the generator is seeded for each.
    """
    if config.augment != "none" or config.side:
        raise ConfigError(f"--data.augment and --data.side do not apply to {config.name}, which makes its own samples.")
    torch.manual_seed(mix(seed, 1))
    train, test, classes = own.data(config.name)
    shape = tuple(train[0][0].shape) if len(train) else ()
    return Data(config.name, Samples(train, seed, identity), Samples(test, seed, identity), shape, classes)


def open_data(config: DataConfig, seed: int, env: Environment) -> Data:
    """The data set of the configuration; raises ConfigError on all ranks or on none."""
    if config.name in DOWNLOADS:
        return downloaded(config, seed, env)
    kinds: dict[str, Callable[[DataConfig, int], Data]] = {
        "digits": digits,
        "imagefolder": image_folder,
        "synthetic": synthetic,
    }
    with env.together():
        open_it = one_s_own if own.is_named(config.name) else kinds.get(config.name.partition(":")[0])
        if config.side and config.name.partition(":")[0] in ("digits", "synthetic"):
            raise ConfigError(f"--data.side does not apply to {config.name}, whose images have one size.")
        if open_it is None or (config.name.startswith("digits") and config.name != "digits"):
            raise ConfigError(f"There is no data set {config.name!r}; --data.name can be {NAMES}.")
        found = open_it(config, seed)
    sizes = env.gather((len(found.train), len(found.test), found.shape, found.classes))
    with env.together():
        if other := next((k for k, size in enumerate(sizes) if size != sizes[0]), 0):
            raise ConfigError(
                f"The ranks have opened different data: training and test samples, shape and classes are {sizes[0]} on "
                f"rank 0 and {sizes[other]} on rank {other}. Each rank must have all of it; the loop deals it out."
            )
    return found
