"""Exercise 16, the final project: its stages."""

from course_lib.check.project.ddp import DDP
from course_lib.check.project.hook import HOOK
from course_lib.check.project.one import ONE
from course_lib.check.project.plan import PLAN
from course_lib.check.project.report import REPORT
from course_lib.check.project.speed import SPEED
from course_lib.check.project.survival import SURVIVAL

__all__ = ["DDP", "HOOK", "ONE", "PLAN", "REPORT", "SPEED", "SURVIVAL"]
