"""Public data sets through torchvision: what they are, and how to get them."""

import socket

from torch.utils.data import Dataset

from course_lib.train.data import DataConfig

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]  # mean and deviation of the channels
DOWNLOADS = {  # torchvision's class, side, classes, and mean and deviation over the training images
    "mnist": ("MNIST", 28, 10, ([0.1307], [0.3081])),
    "fashion": ("FashionMNIST", 28, 10, ([0.2860], [0.3530])),
    "cifar10": ("CIFAR10", 32, 10, ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])),
    "imagenette": ("Imagenette", 224, 10, IMAGENET),
}


def torchvision_set(config: DataConfig, download: bool) -> tuple[Dataset, Dataset]:
    """The training and test images as torchvision has them.

    Raises what torchvision raises when they are not there.
    """
    from torchvision import datasets

    kind = getattr(datasets, DOWNLOADS[config.name][0])
    if config.name == "imagenette":
        size = "160px" if 0 < config.side <= 160 else "320px"
        return tuple(kind(config.root, split=split, size=size, download=download) for split in ("train", "val"))
    return tuple(kind(config.root, train=train, download=download) for train in (True, False))


def fetch(config: DataConfig) -> str:
    """Download what is not there yet; an empty string, or why it did not work."""
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)  # for each read: a dead network shall not look like a slow one
    try:
        torchvision_set(config, download=True)
    except Exception as error:  # noqa: BLE001  whatever stops a download, the answer is the same
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    finally:
        socket.setdefaulttimeout(patience)
    return ""
