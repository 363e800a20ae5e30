"""Every source by the same loader; a failed download; exact evaluation."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

from course_lib.train.data import DataConfig, Samples, collate, identity
from course_lib.train.data import test_keys as keys_of_test
from course_lib.train.evaluate import count
from course_lib.train.record import TrainRun
from course_lib.train.sources import digits, synthetic

OFFLINE = """
import urllib.request
def refuse(*args, **kwargs):
    raise OSError("no network in this test")
urllib.request.urlopen = refuse
"""


@pytest.mark.parametrize("samples", range(1, 14))
def test_evaluation_counts_each_sample_once(samples):
    """Shares of 1 to 4 ranks, added up, against one pass over everything."""
    generator = torch.Generator().manual_seed(samples)
    images = torch.randn(samples, 1, 4, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (samples,), generator=generator)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double()
    net.eval()
    right = int((net(images).argmax(1) == labels).sum())
    loss = nn.functional.cross_entropy(net(images), labels, reduction="sum").item()
    net.train()
    for ranks in range(1, 5):
        for batch in (1, 2, 5):
            parts = []
            for rank in range(ranks):
                keys = keys_of_test(samples, batch, rank, ranks)
                batches = (collate((1, 4, 4), [(images[i], int(labels[i])) for _, i in part]) for part in keys)
                parts.append(count(net, batches, torch.device("cpu")))
            total = torch.stack(parts).sum(0).tolist()
            assert total[:2] == [right, samples]
            assert total[2] == pytest.approx(loss, rel=1e-12)
    assert net.training  # left as it was


def test_digits_file(root):
    with np.load(root / "course_lib" / "data" / "digits.npz") as arrays:
        images, labels = arrays["images"], arrays["labels"]
    assert (images.shape, images.dtype, labels.shape) == ((1797, 8, 8), np.uint8, (1797,))
    assert (images.min(), images.max()) == (0, 16)
    assert np.bincount(labels).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]  # as UCI's page says
    assert (root / "course_lib" / "data" / "digits.npz").stat().st_size < 50_000


class Doubled(TensorDataset):
    """Somebody's own, which works on each sample."""

    def __getitem__(self, index):
        return 2 * self.tensors[0][int(index)], self.tensors[1][int(index)]


def pairs(kind: type, *label: int) -> Samples:
    made = torch.Generator().manual_seed(0)
    return Samples(kind(torch.randn(20, 3, generator=made), torch.arange(20).view(20, *label)), 0, identity)


@pytest.mark.parametrize(
    ("make", "by_tensor"),
    [
        (lambda: digits(DataConfig(), 0).train, True),
        (lambda: digits(DataConfig(augment="crop"), 0).train, False),
        (lambda: synthetic(DataConfig(name="synthetic:3x4x4", samples=100), 0).train, True),
        (lambda: pairs(TensorDataset), True),
        (lambda: pairs(TensorDataset, 1), False),
        (lambda: pairs(Doubled), False),
    ],
)
def test_a_batch_is_the_same_as_sample_by_sample(make, by_tensor):
    """The same bits and types, with a sample that comes twice; also for a rank without a share."""
    samples = make()
    assert samples.by_tensor == by_tensor
    assert samples.__getitems__([]) == []
    keys = [(1, 7), (2, 0), (1, 7)]
    for (image, label), (other, its_label) in zip(
        samples.__getitems__(keys), map(samples.__getitem__, keys), strict=True
    ):
        assert image.dtype == other.dtype and torch.equal(image, other)
        assert type(label) is type(its_label) is int and label == its_label


def test_offline_falls_back_visibly(launch, tmp_path, read_status, read_rows):
    words = f"mnist --run.dir {tmp_path / 'run'} --optim.epochs 1 --data.root {tmp_path / 'data'}"
    done = launch(words, ranks=2, before=OFFLINE)
    assert done.codes == [0, 0], done.everything
    note = "digits instead of mnist, which could not be downloaded"
    assert f"Training on {note}" in done.output(0)
    assert "no network in this test" in done.output(0)
    assert note not in done.output(1)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["data"]["name"], config["data"]["asked"], config["data"]["note"]) == (
        "digits",
        "mnist",
        note,
    )
    assert read_status(tmp_path / "run")["note"] == note
    assert read_rows(tmp_path / "run", "start")[0]["note"] == note
    assert note in repr(TrainRun.read(tmp_path / "run"))


def test_a_download_that_fails_on_local_rank_0_fails_everywhere(launch, tmp_path):
    done = launch(f"cifar10 --run.dir {tmp_path / 'run'} --data.strict", ranks=2, before=OFFLINE, cwd=tmp_path)
    assert done.codes[0] == 2
    assert "cifar10 could not be downloaded to data (" in done.output(0)
    assert not (tmp_path / "run").exists()


def fake_cifar(root, samples=24):
    """CIFAR-10's real file format, with few images, accepted in place of the download."""
    import pickle

    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = {
            "data": rng.integers(0, 256, (samples, 3072), dtype=np.uint8),
            "labels": [i % 10 for i in range(samples)],
        }
        (folder / name).write_bytes(pickle.dumps(data))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))


def test_cifar10_files(launch, tmp_path):
    fake_cifar(tmp_path / "data")
    trust = "from torchvision.datasets import cifar; cifar.check_integrity = lambda *args: True"
    words = f"cifar10 --run.dir {tmp_path / 'run'} --optim.epochs 1 --data.root {tmp_path / 'data'} --model.width 4"
    done = launch(words, ranks=2, before=trust)
    assert done.codes == [0, 0], done.everything
    data = json.loads((tmp_path / "run" / "config.json").read_text())["data"]
    assert (data["name"], data["note"], data["train"], data["test"]) == ("cifar10", "", 120, 24)
    assert (data["shape"], data["classes"]) == ([3, 32, 32], 10)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Real JPEG files of three colours and odd sizes, grey and RGBA among them."""
    base = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for part, each in (("train", 8), ("val", 3)):
        for label, colour in (("red", (220, 30, 30)), ("green", (30, 220, 30)), ("blue", (30, 30, 220))):
            (base / part / label).mkdir(parents=True)
            for i in range(each):
                noise = rng.normal(0, 20, (30 + i, 40, 3))
                image = Image.fromarray(np.clip(np.array(colour) + noise, 0, 255).astype(np.uint8))
                image.save(base / part / label / f"{i}.jpg")
        Image.new("L", (33, 50), 128).save(base / part / "red" / "grey.jpg")
        Image.new("RGBA", (50, 33), (20, 210, 30, 255)).save(base / part / "green" / "alpha.png")
    return base


@pytest.mark.parametrize(("split", "train", "test"), [("", 26, 11), ("/train", 20, 6)])
def test_image_folder(launch, photos, tmp_path, split, train, test):
    """With train and val, and without: then every fifth is the test."""
    words = f"digits --data.name imagefolder:{photos}{split} --data.side 16 --data.global_batch 6 --optim.epochs 1"
    done = launch(f"{words} --data.workers 1 --data.augment resized-crop --run.dir {tmp_path / 'run'}", ranks=2)
    assert done.codes == [0, 0], done.everything
    run = TrainRun.read(tmp_path / "run")
    assert (run.facts["data"]["train"], run.facts["data"]["test"], run.facts["data"]["classes"]) == (
        train,
        test,
        3,
    )
    assert run.facts["data"]["shape"] == [3, 16, 16]
    assert run.rows("eval")[-1]["samples"] == test


def test_a_broken_image_is_named(launch, photos, tmp_path):
    import shutil

    shutil.copytree(photos, tmp_path / "photos")
    (tmp_path / "photos/train/red/0.jpg").write_bytes(b"no image")
    words = f"digits --data.name imagefolder:{tmp_path / 'photos'} --data.side 16 --data.global_batch 26"
    done = launch(f"{words} --run.dir {tmp_path / 'run'}", ranks=2)
    assert 1 in done.codes
    assert "red/0.jpg" in TrainRun.read(tmp_path / "run").why


def test_synthetic_is_labelled(launch, tmp_path):
    words = f"synthetic --data.name synthetic:3x32x32 --data.samples 49 --run.dir {tmp_path / 'run'} --data.drop_last"
    done = launch(words, ranks=1)  # ResNet-18
    assert done.codes == [0], done.everything
    run = TrainRun.read(tmp_path / "run")
    assert run.note.startswith("synthetic data")
    assert run.facts["data"]["shape"] == [3, 32, 32]
    assert len(run.losses) == 2


def test_a_rank_without_samples_takes_part(launch, tmp_path):
    """1437 = 1436 + 1: in the last step of an epoch only rank 0 has a sample; with BatchNorm."""
    words = "digits --data.global_batch 1436 --model.norm batch --model.width 4 --optim.epochs 2"
    done = launch(f"{words} --run.dir {tmp_path / 'run'}", ranks=2)
    assert done.codes == [0, 0], done.everything
    assert len(TrainRun.read(tmp_path / "run").losses) == 4
