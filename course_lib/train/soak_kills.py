"""Who is killed when: the part of `course soak` that does harm, in a thread beside the launch that it harms."""

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from course_lib.train.checkpoint import saved, step_of
from course_lib.train.processes import ranks_under

WHO = ("a rank", "the launcher", "everything")
WHEN = ("in training", "in training", "during a save", "during a save", "at any time")
TICK = 0.001  # seconds between two looks for a save: it lasts a few of them


@dataclass
class Harm:
    """What was done so far, over all launches."""

    left: int  # kills still to do
    who: Counter = field(default_factory=Counter)
    when: Counter = field(default_factory=Counter)

    @property
    def kills(self) -> int:
        """All kills."""
        return sum(self.who.values())


class Killer(threading.Thread):
    """Kills ranks of one launch until it kills the launch; `before` is called right before each kill.

    agent  the process whose child the launcher is
    """

    def __init__(self, folder: Path, agent: int, chance: random.Random, harm: Harm, before: Callable[[], None]) -> None:
        super().__init__(name="killer", daemon=True)
        self.folder, self.agent, self.chance, self.harm, self.before = folder, agent, chance, harm, before
        self.over = threading.Event()  # the launch has ended

    def run(self) -> None:
        """Kill after kill; ends with the launch."""
        while self.harm.left > 0:
            who, when = self.chance.choice(WHO), self.chance.choice(WHEN)
            if not self._wait(when) or self.over.is_set():
                return
            self.before()
            if self._kill(who, during_save=when == "during a save"):
                self.harm.left -= 1
                self.harm.who[who] += 1
                self.harm.when[when] += 1
                if who != "a rank":
                    return

    def stop(self) -> None:
        """The launch is over."""
        self.over.set()
        self.join()

    def _wait(self, when: str) -> bool:
        """Until the moment has come; False when the launch ended before."""
        if when == "at any time":  # also while ranks start, meet, load
            return not self.over.wait(self.chance.uniform(0, 3))
        known = newest(self.folder)
        while newest(self.folder) == known:  # a run that makes no progress would never end
            if self.over.wait(0.01):
                return False
        if when == "in training":
            return not self.over.wait(self.chance.uniform(0, 0.5))
        place = self.folder / "checkpoints"
        while not any(entry.name.startswith(".step_") for entry in os.scandir(place)):
            if self.over.wait(TICK):
                return False
        time.sleep(self.chance.uniform(0, 0.004))
        return True

    def _kill(self, who: str, during_save: bool) -> bool:
        """Whether there was somebody to kill."""
        with contextlib.suppress(psutil.NoSuchProcess):
            launchers = psutil.Process(self.agent).children()
            ranks = [rank for launcher in launchers for rank in ranks_under(launcher)]
            if who == "a rank":
                victims = [ranks[0] if during_save else self.chance.choice(ranks)] if ranks else []  # rank 0 saves
            elif who == "the launcher":
                victims = launchers
            else:
                victims = [*launchers, *(process for one in launchers for process in one.children(recursive=True))]
                self.chance.shuffle(victims)
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
            return bool(victims)
        return False


def newest(folder: Path) -> int:
    """The step of the newest checkpoint, by its name alone; 0: there is none."""
    return max((step_of(path) for path in saved(folder)), default=0)
