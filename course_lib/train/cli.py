"""From the words of the command line to a configuration, or to one full sentence."""

import contextlib
import difflib
import io
import re
from dataclasses import replace
from typing import Any

import tyro

from course_lib.train.config import Config, option_names
from course_lib.train.errors import ConfigError
from course_lib.train.exits import IN_WORDS
from course_lib.train.recipes import RECIPES, find

_RULE = re.compile(r"[\s─╰╭╮╯├┤-]*[─-]{2}[\s─╰╭╮╯├┤-]*$")  # of hyphens, or a side of a box
USAGE = "python -m course_lib.train RECIPE [--optim.lr 0.1 ...]"


class Help(Exception):
    """The person asked for help; the text is the message."""


def overview() -> str:
    """What `--help` without a recipe says."""
    lines = [f"usage: {USAGE}", "", "recipes (RECIPE --help lists the options of one):"]
    lines += [f"  {name:<14} {recipe.__doc__.splitlines()[0]}" for name, recipe in RECIPES.items()]
    lines += [
        "",
        f"exit codes: {IN_WORDS}",
    ]
    return "\n".join(lines)


def parse(words: list[str]) -> Config:
    """The configuration; raises Help, or ConfigError that names the word which was not understood."""
    if words and words[0] in ("-h", "--help"):
        raise Help(overview())
    if not words or words[0].startswith("-"):
        raise ConfigError(f"A recipe must come first ({', '.join(RECIPES)}): {USAGE}.")
    name, *options = words
    default = replace(find(name)(), recipe=name)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            config, unknown = tyro.cli(
                Config,
                prog=f"python -m course_lib.train {name}",
                description=find(name).__doc__,
                args=options,
                default=default,
                return_unknown_args=True,
                use_underscores=True,
            )
    except SystemExit as stop:
        if not stop.code:
            raise Help(said.getvalue().rstrip()) from None
        raise ConfigError(sentence(said.getvalue())) from None
    if unknown:
        raise ConfigError(unknown_word(unknown[0]))
    return config


def words(recipe: str, options: dict[str, Any]) -> list[str]:
    """The command line for keyword options.

    >>> words("digits", {"optim.lr": 0.1, "data.strict": True, "data.drop_last": False})
    ['digits', '--optim.lr', '0.1', '--data.strict', '--data.no_drop_last']
    """
    line = [recipe]
    for name, value in options.items():
        part, _, option = name.rpartition(".")
        if isinstance(value, bool) and part:  # without a part it is no option, and parse says so
            line.append(f"--{name}" if value else f"--{part}.no_{option}")
        else:
            line += [f"--{name}", str(value)]
    return line


def sentence(box: str) -> str:
    """tyro explains itself between rules, drawn as a box or with hyphens; the first part is what went wrong."""
    lines = [re.sub(r"^\s*│|│\s*$", "", line).strip() for line in box.splitlines()]
    text: list[str] = []
    for line in lines[1:]:  # the first says "Value error" and the like
        if _RULE.match(line):
            if text:
                break
        elif line:
            text.append(line)
    message = " ".join(" ".join(text).split()).rstrip(".")
    return f"{message[:1].upper()}{message[1:]}."


def unknown_word(word: str) -> str:
    """What to say about a word that is no option."""
    if not word.startswith("--"):
        return f"The word {word!r} belongs to no option; write --optim.lr 0.1, or a switch: --data.strict."
    name = word[2:].partition("=")[0].replace("-", "_")
    known = option_names()
    # Alike must be the last part: every option of "optim." is alike to every other at the front.
    last = difflib.get_close_matches(name.rpartition(".")[2], {o.rpartition(".")[2] for o in known}, n=3)
    near = difflib.get_close_matches(name, [o for o in known if o.rpartition(".")[2] in last], n=1, cutoff=0)
    guess = f"did you mean --{near[0]}?" if near else "--help after the recipe lists all."
    return f"There is no option --{name}; {guess}"
