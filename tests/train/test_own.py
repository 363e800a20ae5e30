"""One's own recipe, data and network: README's example as it stands there, and a sentence for what can be wrong."""

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from course_lib.train import config, own, sources
from course_lib.train.cli import Help, parse
from course_lib.train.data import DataConfig
from course_lib.train.errors import ConfigError
from course_lib.train.model import ModelConfig, build, check


@pytest.fixture(scope="module")
def example(root: Path, tmp_path_factory) -> SimpleNamespace:
    """README's file in a folder of its own, and the words after `-m course_lib.train` in README's command."""
    section = (root / "README.md").read_text().partition("### Your own model and data")[2]
    folder = tmp_path_factory.mktemp("own recipe")
    (folder / "spirals.py").write_text(re.search(r"```python\n(.*?)```", section, re.S)[1])
    command = re.search(r"nproc-per-node=2 -m course_lib.train (.*)", section)[1]
    return SimpleNamespace(folder=folder, words=command)


def test_readme_s_example_learns(launch, example, read_rows, read_status):
    """Stopped in the middle and continued, with loader processes, from a folder that was moved meanwhile."""
    words = f"{example.words} --optim.epochs 9"
    assert launch(f"{words} --run.stop_after 200", cwd=example.folder).codes == [75, 75]
    moved = example.folder.rename(example.folder.with_name("moved"))
    done = launch(f"{words} --data.workers 1", cwd=moved)
    assert done.codes == [0, 0], done.everything
    folder = moved / "runs/spirals"
    config = json.loads((folder / "config.json").read_text())
    assert (config["recipe"], config["data"]["name"]) == ("spirals.py:spirals", "spirals.py:points")
    assert (config["data"]["train"], config["data"]["test"], config["data"]["shape"]) == (1600, 400, [2])
    assert config["parameters"] == 2 * 64 + 64 + 64 * 64 + 64 + 64 * 2 + 2
    assert [row["step"] for row in read_rows(folder, "start")] == [0, 200]
    assert read_rows(folder, "eval")[-1]["accuracy"] > 0.97
    assert read_status(folder)["status"] == "finished"


HOOK = """
import torch
import torch.distributed as dist
from course_lib.train.config import Config, DDPOptions

def recipe():
    return Config(ddp=DDPOptions(comm_hook=f"{__file__}:average"))

def average(group, bucket):
    mine = bucket.buffer()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    done = torch.futures.Future()
    done.set_result(torch.stack(parts).mean(0))
    with open(f"calls_{dist.get_rank()}", "a") as file:
        file.write(f"{bucket.buffer().numel()}\\n")
    return done

def tensor(group, bucket):
    return bucket.buffer()

def alone(bucket):
    return bucket
"""


def test_a_comm_hook_of_one_s_own_averages_the_gradients(launch, read_rows, tmp_path):
    (tmp_path / "my_hook.py").write_text(HOOK)
    words = "--model.dtype float64 --optim.epochs 1 --run.stop_after 5 --run.dir"
    for recipe, folder in (("my_hook.py:recipe", "own"), ("digits", "torch")):
        done = launch(f"{recipe} {words} {folder}", cwd=tmp_path)
        assert done.codes == [75, 75], done.everything
    facts = json.loads((tmp_path / "own" / "config.json").read_text())
    assert facts["config"]["ddp"]["comm_hook"] == "my_hook.py:average"
    calls = [(tmp_path / f"calls_{rank}").read_text().split() for rank in (0, 1)]
    assert calls[0] == calls[1] and sum(map(int, calls[0])) == 5 * facts["parameters"]
    own_rows, rows = (read_rows(tmp_path / folder, "train") for folder in ("own", "torch"))
    assert len(rows) == 5
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in own_rows] == pytest.approx([row[key] for row in rows], rel=1e-12)


def test_a_comm_hook_that_ddp_cannot_call(launch, tmp_path, monkeypatch):
    (tmp_path / "my_hook.py").write_text(HOOK)
    wrong = launch("digits --ddp.comm_hook my_hook.py:tensor", cwd=tmp_path)
    assert 1 in wrong.codes
    assert "comm hook my_hook.py:tensor returned a Tensor, and DDP needs a torch.futures.Future" in wrong.everything
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, said in (
        ("alone", "my_hook.py:alone must take two arguments, state and bucket"),
        ("gone", "no function"),
    ):
        with pytest.raises(ConfigError, match=said):
            config.check(parse(["digits", "--ddp.comm_hook", f"my_hook.py:{name}"]), 2)
    sys.modules.pop("my_hook")


FILE = '''
from course_lib.train.config import Config, DataConfig, ModelConfig

def good():
    """Mine."""
    return Config(data=DataConfig(f"{__file__}:samples"), model=ModelConfig("mlp", width=3))

def number():
    return 3

value = 3
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "a_recipe_of_mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("a_recipe_of_mine", None)


def test_a_file_that_changed_is_read_again(mine):
    """A notebook's kernel lives on while its user edits the file."""
    assert parse(["a_recipe_of_mine.py:good"]).model.width == 3
    (mine / "a_recipe_of_mine.py").write_text(FILE.replace("width=3", "width=55"))
    config = parse(["a_recipe_of_mine.py:good", "--optim.lr", "0.5"])
    assert (config.model.width, config.optim.lr, config.data.name) == (55, 0.5, "a_recipe_of_mine.py:samples")
    with pytest.raises(Help, match=r"Mine\."):
        parse(["a_recipe_of_mine.py:good", "--help"])


def test_names_that_lead_nowhere(mine):
    for words, said in (
        ("nowhere.py:good", "nowhere.py:good: there is no file "),
        ("a_recipe_of_mine.py:bad", "a_recipe_of_mine.py has no function bad."),
        ("a_recipe_of_mine.py:value", "has no function value."),
        ("a_recipe_of_mine.py:number", "must return a Config, but returns int."),
        ("a_recipe_of_mine.py", "There is no recipe 'a_recipe_of_mine.py'; the recipes are digits, "),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            parse([words])
    (mine / "json.py").write_text(FILE)
    with pytest.raises(ConfigError, match="another module is called json, too"):
        parse(["json.py:good"])
    with pytest.raises(ConfigError, match=r"There is no network 'net'; --model\.name can be cnn, mlp, "):
        check(ModelConfig("net"))


class Endless(IterableDataset):
    """No length, no indices."""

    def __iter__(self):
        return iter([(torch.zeros(2), 0)])


def pairs(n: int, *shape: int, label: int = 0) -> TensorDataset:
    return TensorDataset(torch.zeros(n, *shape), torch.full((n,), label))


DATA = [
    (pairs(3, 2), "must return three things"),
    ((pairs(3, 2), pairs(3, 2), "two"), "must return three things"),
    ((Endless(), pairs(3, 2), 2), "the training data must have a length and indices"),
    ((pairs(3, 2), pairs(3, 5), 2), "differ in their shapes, (2,) and (5,)."),
    ((pairs(3, 2), pairs(3, 2, label=2), 2), "sample 0 of the test data has class 2, and the 2 classes begin with 0."),
    (([(1.0, 0)], pairs(3, 2), 2), "must begin with a floating-point tensor, but begins with float."),
    (([(torch.zeros(2, dtype=torch.uint8), 0)], pairs(3, 2), 2), "but begins with torch.uint8."),
    (([torch.zeros(2)], pairs(3, 2), 2), "must be a pair: tensor and class."),
]


@pytest.mark.parametrize(("returned", "said"), DATA)
def test_data_that_the_loop_cannot_take(monkeypatch, returned, said):
    monkeypatch.setattr(own, "function", lambda name: lambda: returned)
    with pytest.raises(ConfigError, match=re.escape(said)):
        own.data("f.py:f")


def test_networks(monkeypatch):
    monkeypatch.setattr(own, "function", lambda name: lambda shape, classes: nn.Bilinear(*shape, classes))
    assert build(ModelConfig("f.py:f"), (3, 4), 5, seed=0).weight.shape == (5, 3, 4)
    for returned, said in ((3, "must return a torch.nn.Module, but returns int."), (nn.ReLU(), "without a parameter")):
        monkeypatch.setattr(own, "function", lambda name, made=returned: lambda shape, classes: made)
        with pytest.raises(ConfigError, match=said):
            build(ModelConfig("f.py:f"), (3, 4), 5, seed=0)
    with pytest.raises(ConfigError, match=re.escape("--model.name cnn is for images, and a sample here has the shape")):
        build(ModelConfig("cnn"), (2,), 5, seed=0)


def test_ranks_that_open_different_data_are_told(monkeypatch):
    """The same function on each rank, but a shard of its own in each: gathered here by hand."""
    monkeypatch.setattr(own, "function", lambda name: lambda: (pairs(8, 2), pairs(4, 2), 2))
    env = SimpleNamespace(together=nullcontext, gather=lambda mine: [mine, (7, 4, (2,), 2)], local_rank=0)
    with pytest.raises(ConfigError, match=r"are \(8, 4, \(2,\), 2\) on rank 0 and \(7, 4, \(2,\), 2\) on rank 1"):
        sources.open_data(DataConfig("f.py:f"), 0, env)
    env.gather = lambda mine: [mine, mine]
    opened = sources.open_data(DataConfig("f.py:f"), 0, env)
    images, labels = next(iter(DataLoader(opened.train, sampler=[(0, 1), (3, 7)], batch_size=2)))
    assert (images.shape, labels.tolist(), opened.classes) == ((2, 2), [0, 0], 2)
    with pytest.raises(ConfigError, match=re.escape("--data.augment and --data.side do not apply to f.py:f")):
        sources.open_data(DataConfig("f.py:f", side=3), 0, env)
