"""What a notebook shows of long sentences: JupyterLab would break them in the middle of a word."""

import pytest
from IPython.lib.pretty import pretty

from course_lib.check.verdict import CheckFailed, Verdict
from course_lib.launch.errors import RunError, RunInterrupted
from course_lib.launch.supervise import AgentDied
from course_lib.train.errors import ConfigError
from course_lib.train.notebook import TrainError

SENTENCE = "each rank says what it has and waits for the one on its left, which waits for the next one, " * 3
SOURCE = "    value = function_with_a_long_name(of, many, arguments)  " + "# and a comment " * 5


@pytest.mark.parametrize("kind", [RunError, RunInterrupted, AgentDied, CheckFailed, ConfigError, TrainError])
def test_an_error_is_broken_between_words(kind):
    shown = "\n".join(kind(f"{SENTENCE}\n{SOURCE}")._render_traceback_()).splitlines()
    assert shown.pop() == SOURCE  # a line of source is left as it is
    assert max(map(len, shown)) <= 100
    assert SENTENCE.split() == " ".join(shown).split()[-len(SENTENCE.split()) :]


def test_a_verdict_is_broken_between_words():
    verdict = Verdict("ring_all_reduce", 5, [SENTENCE, "short"])
    shown = pretty(verdict).splitlines()
    assert max(map(len, shown)) <= 100
    assert shown[-2:] == ["✔ short", "The checks passed: 5 points."]
    assert " ".join(shown).split() == repr(verdict).split()
