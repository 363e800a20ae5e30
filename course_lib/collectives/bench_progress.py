"""Progress of a bench while it runs: one line that changes on a terminal, plain lines elsewhere."""

import contextlib
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def progress(stream: TextIO) -> Iterator[None]:
    """Show the lines that are printed within as one that changes, on a terminal; else as they are."""
    if not stream.isatty():
        with contextlib.redirect_stdout(stream):
            yield
        return
    with contextlib.redirect_stdout(_OneLine(stream)):
        yield
    stream.write("\r\x1b[K")


class _OneLine:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if text.strip():
            self._stream.write(f"\r\x1b[K{text.strip()}")

    def flush(self) -> None:
        self._stream.flush()
