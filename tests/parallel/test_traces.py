"""Spans from the files of torch's profiler: by hand, and from a real one, whose marks may change with torch."""

import json
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from course_lib.launch import run
from course_lib.parallel.traces import read_spans, spans_of, without_waiting

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NODE = "autograd::engine::evaluate_function: "
STEP = [  # name, start, length: two passes, in microseconds with fractions
    ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100.2, 50),
    ("DistributedDataParallel.forward", 160, 40),
    ("aten::mm", 165, 5),
    (f"{NODE}MulBackward0", 210, 10),
    (f"{NODE}torch::autograd::AccumulateGrad", 225, 5.4),
    ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 240, 50),
    ("DistributedDataParallel.forward", 300, 40),
    (f"{NODE}MulBackward0", 350, 10),
    ("gloo:all_reduce", 358, 20),
    (f"{NODE}AddmmBackward0", 362, 8),
    ("Optimizer.step#SGD.step", 385, 6),
    ("Optimizer.zero_grad#SGD.zero_grad", 395, 2),
]


def trace(events) -> str:
    made = [{"ph": "X", "name": name, "ts": start, "dur": length} for name, start, length in events]
    return json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *made]})


def test_spans_of_a_step_by_hand():
    assert spans_of(3, trace(STEP)) == [
        (3, "data", 100, 150),
        (3, "forward", 160, 200),
        (3, "backward", 210, 230),
        (3, "data", 240, 290),
        (3, "forward", 300, 340),
        (3, "backward", 350, 370),
        (3, "communication", 358, 378),
        (3, "optimizer", 385, 391),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("not json", "is no trace"),
        ("[]", "is no trace"),
        ('{"traceEvents": [{"ph": "X"}]}', "is no trace"),
        ('{"traceEvents": 3}', "is no trace"),
        ('{"traceEvents": [{"ph": "X", "name": "x", "ts": Infinity, "dur": 1}]}', "is no trace"),
        (trace(STEP[:4]), "has no whole step"),
    ],
)
def test_what_is_no_trace_is_a_sentence(content, says):
    with pytest.raises(ValueError, match=says):
        spans_of(0, content)


def test_a_folder_without_traces(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--measure\.profile_at"):
        read_spans(tmp_path)


def test_ranks_come_in_the_order_of_their_numbers(tmp_path):
    (tmp_path / "traces").mkdir()
    for rank in (10, 2):
        (tmp_path / "traces" / f"rank_{rank}.json").write_text(trace(STEP))
    spans = read_spans(tmp_path)
    assert [rank for rank, *_ in spans] == [2] * 8 + [10] * 8


def test_waiting_is_cut_off_up_to_the_last_rank():
    spans = [(0, "forward", 0, 5), (0, "communication", 10, 40), (0, "communication", 50, 60)]
    spans += [(1, "communication", 1, 2)]  # from before the window, on this rank only
    spans += [(1, "communication", 30, 41), (1, "communication", 45, 61)]
    assert without_waiting(spans) == [
        (0, "forward", 0, 5),
        (0, "communication", 30, 40),
        (0, "communication", 50, 60),
        (1, "communication", 30, 41),
        (1, "communication", 50, 61),
    ]


def train(folder):
    """Two steps of two microbatches."""
    rank = dist.get_rank()
    data = TensorDataset(torch.randn(8, 4), torch.randint(3, (8,)))
    model = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        batches = iter(DataLoader(data, batch_size=2))
        for _ in range(2):
            with model.no_sync():
                x, y = next(batches)
                nn.functional.cross_entropy(model(x), y).backward()
            x, y = next(batches)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    Path(folder, "traces").mkdir(exist_ok=True)
    recorded.export_chrome_trace(str(Path(folder, "traces", f"rank_{rank}.json")))


def test_torch_still_leaves_these_marks(tmp_path):
    run(train, ranks=2, args=(str(tmp_path),), quiet=True)
    spans = read_spans(tmp_path)
    for rank in range(2):
        mine = [kind for r, kind, *_ in spans if r == rank and kind != "communication"]
        assert mine == ["data", "forward", "backward", "data", "forward", "backward", "optimizer"] * 2
        calls, backwards, optimizers = (
            [start for r, kind, start, _ in spans if (r, kind) == (rank, wanted)]
            for wanted in ("communication", "backward", "optimizer")
        )
        for backward, optimizer in zip(backwards[1::2], optimizers, strict=True):
            assert any(backward <= start <= optimizer for start in calls)
