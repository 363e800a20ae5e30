"""What the ranks print: shown line by line while they run, kept for `Result.output`."""

import os
from pathlib import Path

_SHOWN = 1 << 20  # bytes of a rank's output that are printed while it runs
KEPT = 16 << 20  # bytes of a rank's output that Result.output keeps
DISK = 2 << 30  # bytes of output at which a rank is stopped


class Printed:
    """The output files of all ranks of a run folder."""

    def __init__(self, folder: Path, ranks: int, quiet: bool) -> None:
        self.paths = [folder / f"rank_{rank}.out" for rank in range(ranks)]
        self.quiet, self.shown = quiet, [0] * ranks

    def size(self, rank: int) -> int:
        """Bytes that the rank has printed so far."""
        try:
            return self.paths[rank].stat().st_size
        except FileNotFoundError:
            return 0

    def flood(self) -> int | None:
        """The rank that fills the disk, if one does."""
        return next((rank for rank in range(len(self.paths)) if self.size(rank) > DISK), None)

    def show(self, last: bool = False) -> None:
        """Print the whole lines that the ranks have written since the last look."""
        for rank, path in enumerate(self.paths):
            if self.quiet or self.shown[rank] >= _SHOWN or self.size(rank) == self.shown[rank]:
                continue
            with path.open("rb") as file:
                file.seek(self.shown[rank])
                data = file.read(_SHOWN - self.shown[rank])
            if not last:
                data = data[: data.rfind(b"\n") + 1]
            self.shown[rank] += len(data)
            for line in data.decode(errors="replace").removesuffix("\n").split("\n"):
                print(f"[rank {rank}] {line.rsplit(chr(13), 1)[-1]}")  # a progress bar: what stands at last
            if self.shown[rank] >= _SHOWN:
                print(f"[rank {rank}] … more than {_SHOWN >> 20} MB: the rest is in .output[{rank}] only")

    def texts(self) -> list[str]:
        """What each rank printed; the middle of a very long output is cut."""
        return [self._text(rank) for rank in range(len(self.paths))]

    def _text(self, rank: int) -> str:
        size = self.size(rank)
        if size <= KEPT:
            return self.paths[rank].read_bytes().decode(errors="replace") if size else ""
        with self.paths[rank].open("rb") as file:
            head = file.read(KEPT // 2).decode(errors="replace")
            file.seek(-KEPT // 2, os.SEEK_END)
            tail = file.read().decode(errors="replace")
        return f"{head}\n… {(size - KEPT) >> 20} MB left out …\n{tail}"


def last_words(output: str) -> str:
    """The last line that says something."""
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
