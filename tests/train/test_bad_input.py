"""Everything that cannot start: one full sentence, from rank 0 only, exit code 2, and nothing written."""

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import psutil
import pytest
from PIL import Image

from course_lib.train import main, model
from course_lib.train.cli import Help, parse
from course_lib.train.config import check
from course_lib.train.errors import ConfigError

OPTIONS = [  # words, and what the sentence must say: known before torch starts anything
    ("", "A recipe must come first (digits, mnist"),
    ("--optim.lr 1", "A recipe must come first"),
    ("digit", "There is no recipe 'digit'; the recipes are digits, mnist"),
    ("digits --optim.lrr 1", "There is no option --optim.lrr; did you mean --optim.lr?"),
    ("digits --lr 1", "There is no option --lr; did you mean --optim.lr?"),
    ("digits --local-rank=0", "There is no option --local_rank"),
    ("digits --optim.lr abc", "--optim.lr: could not convert string to float: 'abc'"),
    ("digits --optim.lr", "Missing value for argument '--optim.lr'. Expected 1 values."),
    ("digits --data.augment flip", "Invalid choice 'flip' for argument '--data.augment'. Expected one of ('none', "),
    ("digits --optim.epochs 1.5", "--optim.epochs: invalid literal for int() with base 10: '1.5'"),
    ("digits --optim.learning_rate 1", "no option --optim.learning_rate; --help after the recipe lists all."),
    ("digits --optim.lr inf", "--optim.lr must be a finite number, but is inf."),
    ("digits --optim.lr nan", "--optim.lr must be a finite number, but is nan."),
    ("digits --optim.weight_decay inf", "--optim.weight_decay must be at least 0 and finite, but is inf."),
    ("digits --run.seed 9223372036854775808", "--run.seed must be less than 2**63, but is 9223372036854775808."),
    ("digits --run.timeout inf", "at most 1000000 seconds, but is inf."),
    ("digits --run.timeout nan", "at most 1000000 seconds, but is nan."),
    (f"digits --run.dir {'d' * 300}", "cannot be used: File name too long."),
    ("digits --optim.name foo", "'foo'"),
    ("digits --data.strict yes", "The word 'yes' belongs to no option"),
    ("digits --optim.lr 0", "--optim.lr must be greater than 0, but is 0.0."),
    ("digits --optim.epochs 0", "--optim.epochs must be at least 1, but is 0."),
    ("digits --optim.warmup_epochs 11", "between 0 and the 10 epochs"),
    ("digits --optim.nesterov --optim.momentum 0", "needs a momentum greater than 0"),
    ("digits --model.dropout 1", "--model.dropout must be at least 0 and less than 1"),
    ("digits --model.width 0", "--model.width must be at least 1"),
    ("digits --data.global_batch 0", "--data.global_batch must be at least 1"),
    (
        "digits --data.global_batch 64",
        "64 cannot be divided among 3 ranks; --data.global_batch 63 or 66 would do.",
    ),
    ("digits --data.global_batch 2", "2 cannot be divided among 3 ranks; --data.global_batch 3 would do."),
    (
        "digits --data.global_batch 64 --data.accumulate 5",
        "64 cannot be divided among 3 ranks and 5 microbatches; --data.global_batch 60 or 75 would do.",
    ),
    (
        "digits --data.batch 10",
        "48 cannot be divided among 3 ranks in microbatches of 10; --data.global_batch 30 or 60 would do.",
    ),
    (
        "digits --data.batch 8 --data.accumulate 4",
        "--data.batch 8 x 3 ranks x --data.accumulate 4 is 96 samples, but --data.global_batch is 48;",
    ),
    ("digits --data.global_batch -1", "--data.global_batch must be at least 0"),
    ("digits --data.mixup -1", "--data.mixup must be at least 0 and finite"),
    ("digits --optim.clip inf", "--optim.clip must be at least 0 and finite"),
    ("digits --optim.average 1", "--optim.average must be at least 0 and less than 1"),
    ("digits --optim.reference_batch -256", "--optim.reference_batch must be at least 0"),
    ("digits --model.recompute --model.compile inductor", "--model.recompute does not go with --model.compile:"),
    ("digits --amp.dtype fp16 --model.dtype float64", "use --model.dtype float32."),
    ("digits --amp.scale 0", "--amp.scale must be greater than 0"),
    ("digits --amp.growth_interval 0", "--amp.growth_interval must be at least 1"),
    ("digits --ddp.static_graph --data.accumulate 2", "--ddp.static_graph does not go with accumulation (2 backwards"),
    ("digits --ddp.static_graph --ddp.find_unused_parameters", "--ddp.static_graph and find_unused_parameters exclude"),
    ("digits --ddp.bucket_mb 0", "--ddp.bucket_mb must be a finite number greater than 0, or None, but is 0.0."),
    ("digits --ddp.comm_hook int8", "--ddp.comm_hook must be one of none, fp16, bf16"),
    ("digits --ddp.comm_hook gone.py:hook", "--ddp.comm_hook gone.py:hook: there is no file "),
    ("digits --measure.profile_at -1", "--measure.profile_at must be at least 0"),
    ("digits --measure.profile_steps 0", "--measure.profile_steps must be at least 1"),
    ("digits --measure.peak_tflops nan", "--measure.peak_tflops must be at least 0 and finite"),
    ("digits --data.workers -1", "--data.workers must be at least 0"),
    ("digits --run.timeout 0", "--run.timeout must be greater than 0"),
    ("digits --run.keep 0", "--run.keep must be at least 1"),
    ("digits --run.dir /etc/hostname", "--run.dir /etc/hostname is a file, not a folder."),
]


@pytest.mark.parametrize(("words", "said"), OPTIONS)
def test_options(words, said):
    with pytest.raises(ConfigError) as caught:
        check(parse(words.split()), world_size=3 if "3 ranks" in said else 1)
    sentence = str(caught.value)
    assert said in sentence
    assert sentence[0].isupper() or sentence.startswith("--")
    assert sentence.endswith((".", "?", ".)"))
    assert "\n" not in sentence
    assert "---" not in sentence  # the rules that tyro draws
    assert "helptext" not in sentence


def test_help():
    with pytest.raises(Help) as everything:
        parse(["--help"])
    assert "resnet50-a100" in str(everything.value)
    assert "75 stopped" in str(everything.value)
    with pytest.raises(Help) as one:
        parse(["digits", "--help"])
    assert "--data.global_batch" in str(one.value)
    assert "0 takes those of the data" in " ".join(str(one.value).split())


def test_options_reach_the_configuration():
    words = ["digits", "--optim.lr", "0.25", "--data.global-batch=96", "--data.strict", "--run.dir", "a/b"]
    config = parse([*words, "--run.stop_after", "3"])
    assert (config.optim.lr, config.data.global_batch, config.data.strict) == (0.25, 96, True)
    assert (str(config.run.dir), config.run.stop_after, config.recipe) == ("a/b", 3, "digits")
    assert parse(["resnet50-a100", "--data.root", "/data/imagenet"]).data.root == "/data/imagenet"


def pictures(folder, names, count=1, size=(8, 8)):
    for name in names:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", size, (i * 40 % 256, 90, 200)).save(folder / name / f"{i}.jpg")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("folders")
    (base / "empty").mkdir()
    pictures(base / "uneven/train", ["a", "b"])
    pictures(base / "uneven/val", ["a", "c"])
    pictures(base / "no val/train", ["a", "b"])
    (base / "void/train/a").mkdir(parents=True)
    (base / "void/val/a").mkdir(parents=True)
    (base / "strangers").mkdir()
    (base / "strangers" / "thesis.txt").write_text("mine")
    return base


LATER = [  # found when the ranks are up already
    (["--data.name", "imagefolder:nowhere"], "The image folder nowhere does not exist"),
    (["--data.name", "imagefolder:empty"], "needs one folder of images for each class"),
    (["--data.name", "imagefolder:uneven"], "differ in their classes: b, c."),
    (["--data.name", "imagefolder:no val"], "has train but neither val nor test"),
    (["--data.name", "imagefolder:void"], "needs one folder of images for each class"),
    (["--data.name", "cifar"], "There is no data set 'cifar'; --data.name can be digits, mnist"),
    (["--data.name", "synthetic:64"], "has no shape; write for example synthetic:3x224x224."),
    (["--data.name", "synthetic:1x2x40"], "too narrow for the cnn"),
    (["--data.side", "16"], "--data.side does not apply to digits"),
    (
        ["--data.global_batch", "1500"],
        "larger than the 1437 training samples of digits; --data.global_batch 1436",
    ),
    (["--data.name", "mnist", "--data.strict"], "mnist could not be downloaded to data ("),
    (["--model.name", "resnet18", "--data.global_batch", "359"], "has 1 samples for 1 ranks"),
    (["--model.name", "mlp", "--model.channels_last"], "is for networks with 2-d convolutions, and this one has none."),
    (["--model.sync_batchnorm", "--run.device", "cpu"], "--model.sync_batchnorm works on GPUs only"),
    (["--model.width", "10000000000"], "--model.width 10000000000 makes "),
    (["--run.dir", "strangers"], "strangers is not empty and holds no run (it has thesis.txt)."),
    (["--run.device", "cuda"], "torch sees no GPU here"),
]


@pytest.mark.parametrize(("words", "said"), LATER)
def test_found_by_the_ranks(launch, folders, words, said):
    if "cuda" in words and __import__("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    before = sorted(str(path) for path in folders.rglob("*") if "data" not in path.parts)
    done = launch(
        ["digits", "--run.dir", "run", *words], ranks=1 if "1 ranks" in said else 2, cwd=folders, before=NO_NETWORK
    )
    assert done.codes[0] == 2
    assert all(code in (2, -15) for code in done.codes)  # told to go by the launcher, or gone by itself
    lines = [line for line in done.output(0).splitlines() if not line.startswith("[W")]
    assert said in lines[-1]
    assert len(lines) == 1
    assert all(said not in done.output(rank) for rank in range(1, len(done.codes)))
    after = sorted(str(path) for path in folders.rglob("*") if "data" not in path.parts)
    assert after == before


NO_NETWORK = """
import urllib.request
def refuse(*args, **kwargs):
    raise OSError("no network in this test")
urllib.request.urlopen = refuse
"""


def test_half_a_launcher(launch):
    done = launch("digits", ranks=0, before="import os; os.environ['RANK'] = '0'")
    assert done.codes == [2]
    assert "only a part of the environment: LOCAL_RANK, WORLD_SIZE" in done.output()


def test_the_real_command(tmp_path):
    """`python -m course_lib.train`, as typed: the sentence on stderr, nothing on stdout, exit code 2."""
    command = [sys.executable, "-m", "course_lib.train", "digits", "--optim.lrr", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "There is no option --optim.lrr; did you mean --optim.lr?\n"
    assert list(tmp_path.iterdir()) == []


def test_nobody_reads(monkeypatch, capfd):
    """As in `... --help | head -1`, where the reader is gone already."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:  # closing it writes what is left, as the end of Python does
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main.main(["digits", "--help"]) == 0
        monkeypatch.undo()
    assert capfd.readouterr().err == ""


def test_help_is_not_waited_for(monkeypatch):
    """Rank 1 of `torchrun ... --help`: the launcher ends nobody whose launch went well."""
    monkeypatch.setattr(main.time, "sleep", lambda seconds: pytest.fail("waited"))
    assert main.leave("help", main.FINISHED, first=False) == 0


def test_a_network_larger_than_memory(monkeypatch):
    """4 times 4 bytes for each of the parameters of an mlp, counted by hand."""
    parameters = (64 * 8000 + 8000) + (8000 * 10 + 10)
    for spare, fits in ((0, True), (-1, False)):
        monkeypatch.setattr(
            psutil, "virtual_memory", lambda spare=spare: SimpleNamespace(total=16 * parameters + spare)
        )
        with nullcontext() if fits else pytest.raises(ConfigError, match=f"1000 makes {parameters:,} parameters"):
            model.check_memory(model.ModelConfig("mlp", width=1000), (1, 8, 8), 10)
    with pytest.raises(ConfigError, match="larger than can be counted"):
        model.check_memory(model.ModelConfig("mlp", width=10**30), (1, 8, 8), 10)
