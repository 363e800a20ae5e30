"""N ranks compute what one process computes, step by step, also when the number of ranks changes on the way.

Bits of resumed runs: test_survival.py.
"""

import numpy as np
import pytest
import torch

from course_lib.train.soak_rounds import equal_bits

# Rank 0 keeps all parameters after each step, as they are right after the optimizer.
SPY = """
import numpy as np
from course_lib.train import journal
kept, write = [], journal.Journal.train
def train(self, step, epoch, lr, row):
    kept.append(np.concatenate([p.detach().numpy().ravel() for p in self.job.module.parameters()]))
    if rank == 0:
        np.save(self.job.folder / "spy.npy", np.stack(kept))
    write(self, step, epoch, lr, row)
journal.Journal.train = train
"""
EXACT = (
    "digits --model.dtype float64 --model.dropout 0 --model.width 4 --data.global_batch 444 --optim.epochs 2 "
    "--optim.warmup_epochs 1"
)  # 1437 = 3 * 444 + 105: the last batch of an epoch is uneven for 2 ranks, steps 4 and 8


@pytest.fixture(scope="module")
def straight(launch, tmp_path_factory):
    """Parameters after each of 8 steps, for one process and for 1, 2 and 3 ranks."""
    folder, kept = tmp_path_factory.mktemp("exact"), {}
    for ranks in (0, 1, 2, 3):
        done = launch(f"{EXACT} --run.dir {folder / str(ranks)}", ranks=ranks, before=SPY)
        assert done.codes == [0] * max(ranks, 1), done.everything
        kept[ranks] = np.load(folder / str(ranks) / "spy.npy")
    return folder, kept


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_equals_one_process_after_every_step(straight, ranks):
    _, kept = straight
    assert kept[0].shape[0] == 8
    assert np.ptp(kept[0], axis=0).max() > 1e-3  # it did train
    for step, (alone, together) in enumerate(zip(kept[0], kept[ranks], strict=True), 1):
        np.testing.assert_allclose(together, alone, rtol=1e-10, atol=1e-13, err_msg=f"step {step}")


def test_one_process_is_plain_torch(straight, root):
    """The same 8 steps without course_lib's loop: whole batches, mean loss, SGD."""
    from course_lib.train.model import ModelConfig, build
    from course_lib.train.order import epoch_order
    from course_lib.train.schedule import rate

    _, kept = straight
    with np.load(root / "course_lib" / "data" / "digits.npz") as arrays:
        train = np.arange(1797) % 5 != 0
        images = (torch.from_numpy(arrays["images"][train]).float().unsqueeze(1) / 16 - 0.305) / 0.376
        labels = torch.from_numpy(arrays["labels"][train]).long()
    net = build(ModelConfig(width=4, dropout=0, dtype="float64"), (1, 8, 8), 10, seed=0)
    moving = {p: torch.zeros_like(p) for p in net.parameters()}
    step = 0
    for epoch in (1, 2):
        order = torch.from_numpy(epoch_order(0, epoch, 1437))
        for chosen in order.split(444):
            torch.nn.functional.cross_entropy(net(images[chosen].double()), labels[chosen]).backward()
            for p, velocity in moving.items():
                velocity.mul_(0.9).add_(p.grad + 5e-4 * p.detach())
                p.data -= rate(step + 1, 8, 0.05, warmup=4) * velocity
                p.grad = None
            now = torch.cat([p.detach().ravel() for p in net.parameters()]).numpy()
            np.testing.assert_allclose(kept[0][step], now, rtol=1e-10, atol=1e-13, err_msg=f"step {step + 1}")
            step += 1


def test_losses_and_evaluation_do_not_depend_on_ranks(straight, read_rows):
    folder, _ = straight
    for ranks in (1, 2, 3):
        for mine, alone in zip(read_rows(folder / str(ranks), "train"), read_rows(folder / "0", "train"), strict=True):
            assert mine["loss"] == pytest.approx(alone["loss"], rel=1e-10)
            assert (mine["step"], mine["epoch"], mine["lr"]) == (alone["step"], alone["epoch"], alone["lr"])
        for mine, alone in zip(read_rows(folder / str(ranks), "eval"), read_rows(folder / "0", "eval"), strict=True):
            assert (mine["right"], mine["samples"]) == (alone["right"], alone["samples"])
            assert mine["samples"] == 360
            assert mine["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-10)


def test_two_three_one_ranks_are_the_run_of_one_process(straight, launch, tmp_path):
    """Stopped in the middle of an epoch and continued by other numbers of ranks: the same samples in each step."""
    done, words = 0, f"{EXACT} --run.dir {tmp_path / 'run'}"
    for ranks, until in ((2, 3), (3, 6), (1, 8)):
        assert launch(f"{words} --run.stop_after {until}", ranks=ranks, before=SPY).codes[0] in (0, 75)
        kept = np.load(tmp_path / "run" / "spy.npy")
        np.testing.assert_allclose(kept, straight[1][0][done:until], rtol=1e-10, atol=1e-13, err_msg=f"{ranks} ranks")
        done = until


def state(folder, step):
    return torch.load(folder / "checkpoints" / f"step_{step:08d}" / "state.pt", weights_only=True)


WIDE = "digits --model.name mlp --model.width 600 --data.global_batch 720 --optim.epochs 2"  # 1.4 MB: two buckets


def test_bits_with_several_buckets(launch, tmp_path):
    """DDP regroups its buckets after the first backward; a restart must not change the order of additions."""
    launch(f"{WIDE} --run.dir {tmp_path / 'a'}", ranks=3)
    launch(f"{WIDE} --run.dir {tmp_path / 'b'} --run.stop_after 2", ranks=3)
    launch(f"{WIDE} --run.dir {tmp_path / 'b'}", ranks=3)
    a, b = state(tmp_path / "a", 4), state(tmp_path / "b", 4)
    assert equal_bits(a["model"], b["model"])
