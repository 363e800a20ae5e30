"""Which check belongs to which graded cell, by the cell's grade id. The file of a notebook may have any name."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they import torch
    from course_lib.check.group import GroupSpec
    from course_lib.check.spec import FolderSpec, Spec


@dataclass(frozen=True)
class Graded:
    """A graded cell: the module below course_lib.check.specs that holds its specification, under this name."""

    module: str
    name: str = "SPEC"

    def spec(self) -> "Spec | GroupSpec | FolderSpec":
        """The specification; loaded on demand."""
        return getattr(import_module(f"course_lib.check.specs.{self.module}"), self.name)


GRADED = {
    "check_read_environment": Graded("ranks"),
    "check_shift": Graded("messages"),
    "check_ring_all_reduce": Graded("ring_all_reduce"),
    "check_cost": Graded("what_it_costs"),
    "check_choose": Graded("what_it_costs", "CHOOSE"),
    "check_naive_ddp": Graded("data_parallel"),
    "check_bucketed_ddp": Graded("overlap"),
    "check_shard": Graded("data_shard_mistakes"),
    "check_evaluate": Graded("data_evaluate_mistakes"),
    "check_accumulate": Graded("torch_ddp_accumulate"),
    "check_onebit_hook": Graded("torch_ddp_onebit"),
    "check_learning_rate": Graded("recipe_rate"),
    "check_update": Graded("recipe_update"),
    "check_checkpoints": Graded("surviving_checkpoints_mistakes"),
    "check_train": Graded("surviving_train_mistakes"),
    "check_where_time_goes": Graded("where_time_goes"),
    "check_thief": Graded("where_time_thief"),
    "check_zero_one": Graded("zero_one"),
    "check_bubble": Graded("bubble"),
    "check_project_plan": Graded("project", "PLAN"),
    "check_project_one": Graded("project", "ONE"),
    "check_project_ddp": Graded("project", "DDP"),
    "check_project_speed": Graded("project", "SPEED"),
    "check_project_survival": Graded("project", "SURVIVAL"),
    "check_project_hook": Graded("project", "HOOK"),
    "check_project_report": Graded("project", "REPORT"),
}
