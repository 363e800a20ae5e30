"""Each check says what it wants when it gets something else: for every graded name."""

from functools import partial

import pytest

from course_lib import check
from course_lib.check.catalogue import GRADED
from course_lib.check.wanted import not_wanted

CLASSES = {"NaiveDDP", "BucketedDDP", "Checkpoints", "ZeroOne"}  # what the exercises say; the others are functions
NAMES = sorted({name for graded in GRADED.values() if (name := graded.spec().function)})


class NaiveDDP:
    def __call__(self):
        """As an nn.Module, an instance can be called."""


def function():
    """As good as any."""


@pytest.mark.parametrize("name", NAMES)
def test_names_what_is_wanted(name):
    kind = "class" if name in CLASSES else "function"
    assert not_wanted(name, 3) == (
        f"{name} must be a {kind}, and is an int. Pass {name} itself, without calling it: the check does that."
    )
    assert f"{name} must be a {kind}, and is a NoneType." in not_wanted(name, None)
    assert not_wanted(name, function) is None and not_wanted(name, partial(function)) is None
    if kind == "class":
        assert not_wanted(name, NaiveDDP) is None
    else:
        assert f"{name} must be a function, and is the class NaiveDDP." in not_wanted(name, NaiveDDP)


def test_an_instance_is_no_class():
    assert "NaiveDDP must be a class, and is an instance of NaiveDDP." in not_wanted("NaiveDDP", NaiveDDP())
    assert "ZeroOne must be a class, and is a NaiveDDP." in not_wanted("ZeroOne", NaiveDDP())


def test_the_check_says_so_at_once():
    for given, says in ((3, "must be a class, and is an int"), (NaiveDDP(), "is an instance of NaiveDDP")):
        with pytest.raises(check.CheckFailed, match=says):
            check.naive_ddp(given)
    with pytest.raises(check.CheckFailed, match="shift must be a function, and is the class NaiveDDP"):
        check.messages(NaiveDDP)
