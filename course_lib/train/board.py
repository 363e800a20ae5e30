"""The rows of metrics.jsonl for TensorBoard, too: `tensorboard --logdir RUN/tensorboard`."""

from pathlib import Path
from typing import Any


class Board:
    """Writes numbers; made with wanted=False, it writes nothing.

    After a resume TensorBoard drops what a killed run had written after `step`.
    """

    def __init__(self, wanted: bool, folder: Path, step: int) -> None:
        self.writer = None
        if wanted:
            from torch.utils.tensorboard import SummaryWriter  # an optional package; measure.check has looked for it

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, event: str, step: int, row: dict[str, Any]) -> None:
        """Each number of a row under "train/..." or "eval/..."."""
        if self.writer:
            for name, value in row.items():
                self.writer.add_scalar(f"{event}/{name}", value, step)

    def settle(self) -> None:
        """Put all on disk."""
        if self.writer:
            self.writer.flush()
