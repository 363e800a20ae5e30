"""The options of a run: what differs from its recipe, and the command that starts it or goes on with it."""

import shlex
from dataclasses import dataclass, replace
from typing import Any

from course_lib.show.report_read import Seen
from course_lib.train.cli import words
from course_lib.train.config import as_json
from course_lib.train.data import settled
from course_lib.train.errors import ConfigError
from course_lib.train.recipes import RECIPES

UNKNOWN = object()  # the recipe's value, where the recipe is not one of the course's
OF_A_LAUNCH = ("run.dir", "run.stop_after")  # belongs to one launch, not to the run


@dataclass(frozen=True)
class Option:
    """An option, its value, and what the recipe says (UNKNOWN when nobody knows)."""

    name: str
    value: Any
    default: Any

    @property
    def differs(self) -> bool:
        """Whether somebody changed it. The run folder is another one each time."""
        return self.default is not UNKNOWN and self.value != self.default and self.name != "run.dir"


def options(seen: Seen) -> list[Option]:
    """All of config.json, in its order."""
    defaults = _defaults(seen)
    return [
        Option(f"{part}.{name}", value, defaults.get(part, {}).get(name, UNKNOWN))
        for part, names in seen.run.config.items()
        for name, value in names.items()
    ]


def _defaults(seen: Seen) -> dict[str, dict[str, Any]]:
    """The recipe's options, with batch sizes as they come out for as many ranks. Runs nobody's code.

    A recipe of one's own is a Python file that config.json names: to look into a run must not start it.
    """
    recipe = seen.run.facts.get("recipe")
    if not isinstance(recipe, str) or recipe not in RECIPES:
        return {}
    config = RECIPES[recipe]()
    try:
        config = replace(config, data=settled(config.data, max(seen.ranks, 1)))
    except ConfigError:  # its batch does not fit so many ranks; then one was given
        return as_json(config)
    return as_json(config)


def command(seen: Seen) -> str:
    """What starts this run again; with the same run folder it goes on. For one machine: nodes are not recorded."""
    known = bool(_defaults(seen))
    given = {
        option.name: option.value
        for option in options(seen)
        if option.name not in OF_A_LAUNCH and (option.differs or not known)
    }
    recipe = str(seen.run.facts.get("recipe") or "RECIPE")
    line = ["torchrun", "--standalone", f"--nproc-per-node={max(seen.ranks, 1)}", "-m", "course_lib.train"]
    return shlex.join([*line, *words(recipe, {**given, "run.dir": seen.run.dir})])
