"""A window of steps under torch's profiler: what each rank did when, as a trace for ui.perfetto.dev."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from course_lib.train.measure import MeasureConfig


class Window:
    """Records the steps from `profile_at` on; call `before` and `after` each step."""

    def __init__(self, config: MeasureConfig, folder: Path, rank: int, say: Callable[[str], None]) -> None:
        self.first, self.last = config.profile_at, config.profile_at + config.profile_steps - 1
        self.path, self.say = folder / "traces" / f"rank_{rank}.json", say
        self.profiler: profile | None = None

    def before(self, step: int) -> None:
        """Start in the first step of the window."""
        if step == self.first:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints lines that help nobody here
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self.profiler = profile(activities=activities)
            self.profiler.start()

    def after(self, step: int) -> None:
        """Write the trace after the last step of the window."""
        if step == self.last:
            self.close(step)

    def close(self, step: int) -> None:
        """Write the trace now, when one is being made: the run ends with this step."""
        if self.profiler:
            self.profiler.stop()
            self.path.parent.mkdir(exist_ok=True)
            self.profiler.export_chrome_trace(str(self.path))
            self.say(f"steps {self.first} to {step} of each rank: {self.path.parent}, for ui.perfetto.dev")
            self.profiler = None
