"""Does slow writes, beside the training when wanted: one at a time, and none of them fails in silence."""

import threading
from collections.abc import Callable


class Writer:
    """`submit` a piece of work; in the background it returns at once. What the work raises, the next call raises."""

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Do it; first wait for the one before, and raise what that one raised."""
        self.wait()
        if not self.background:
            work()
            return
        # A daemon: a run that fails must not wait for a disk. What is half written then is no checkpoint yet.
        self.thread = threading.Thread(target=self._run, args=(work,), name="checkpoint writer", daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised by `wait`, in the thread that trains
            self.error = error

    @property
    def failed(self) -> bool:
        """Whether the last work has failed, asked without waiting."""
        return self.error is not None

    def wait(self) -> None:
        """Until nothing is being written; raises what the work raised."""
        if self.thread:
            self.thread.join()
            self.thread = None
        if self.error:
            error, self.error = self.error, None
            raise error
