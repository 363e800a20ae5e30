"""Simulated ranks as threads, of which exactly one runs: whoever has the baton. See simulate.py."""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class SimulationError(RuntimeError):
    """A simulated rank raised or never came back, or all of them wait for each other."""


class _Stopped(BaseException):
    """Raised in a rank whose simulation is over; no `except Exception` of the simulated code holds it up."""


@dataclass(eq=False, slots=True)
class Call:
    """One send or receive of a rank, and the logical clock at which it was called: what the message carries."""

    rank: int
    name: str  # "send", "recv", or "isend" and "irecv" for the two halves of an exchange
    peer: int
    tensor: torch.Tensor
    op: str | None
    start: float
    where: str
    end: float | None = None

    @property
    def sends(self) -> bool:
        return self.name in ("send", "isend")

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def what(self) -> str:
        return f"{self.tensor.numel()} elements of {str(self.tensor.dtype).removeprefix('torch.')}"

    def story(self) -> str:
        return f"{self.name} {'to' if self.sends else 'from'} rank {self.peer} ({self.where})"


class Player:
    """One rank: its thread, its clock, and the calls that it waits for."""

    def __init__(self, rank: int, turn: threading.Semaphore) -> None:
        self.rank, self.clock, self.state = rank, 0.0, "ready"  # then "waiting", "ready", ..., "finished"
        self.value: Any = None
        self._error: BaseException | None = None
        self._calls: list[Call] = []
        self._baton, self._turn, self._over = threading.Semaphore(0), turn, False

    def begin(self, fn: Callable[..., Any], args: tuple) -> None:
        self._thread = threading.Thread(target=self._main, args=(fn, args), name=f"rank {self.rank}", daemon=True)
        self._thread.start()

    def go(self, patience: float) -> list[Call]:
        """Give the baton to this rank until it waits or has finished; the calls that it made."""
        self._baton.release()
        if not self._turn.acquire(timeout=patience):
            raise SimulationError(f"Simulated rank {self.rank} has computed for {patience:g} s without a message.")
        if self._error is not None:
            kind, text = type(self._error).__name__, self._error
            raise SimulationError(f"Simulated rank {self.rank} raised {kind}: {text}") from self._error
        return self._calls

    def wait_for(self, calls: list[Call]) -> None:
        """Called in the rank: hand the baton back until all `calls` are done."""
        if self._over:  # code that still sends on its way out
            raise _Stopped
        self._calls, self.state = calls, "waiting"
        self._turn.release()
        self._baton.acquire()
        if self._over:
            raise _Stopped

    def go_on_when_done(self) -> None:
        if all(call.end is not None for call in self._calls):
            self.clock, self.state = max(call.end for call in self._calls), "ready"
            self._calls = []

    def stop(self) -> None:
        """End the thread, if it still waits for its turn."""
        self._over = True
        self._baton.release()
        self._thread.join(timeout=1)  # one that computes for ever is a daemon and ends with the process

    def story(self) -> str:
        if self.state == "finished":
            return f"rank {self.rank} has finished"
        waits = " and in ".join(call.story() for call in self._calls if call.end is None)
        return f"rank {self.rank} waits in {waits}"

    def _main(self, fn: Callable[..., Any], args: tuple) -> None:
        self._baton.acquire()
        if self._over:
            return
        try:
            self.value = fn(*args)
        except _Stopped:
            return  # nobody waits for this rank any more
        except BaseException as error:  # noqa: BLE001 - handed to the caller, who raises it
            self._error = error
        self.state, self._calls = "finished", []
        self._turn.release()


class SimulatedTransport:
    """The `Transport` of one simulated rank."""

    def __init__(self, player: Player, size: int) -> None:
        self.rank, self.size, self._player = player.rank, size, player

    @property
    def clock(self) -> float:
        """This rank's time in simulated seconds."""
        return self._player.clock

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to rank `to`."""
        self._call(("send", to, tensor, None))

    def recv(self, tensor: torch.Tensor, source: int, op: str | None = None) -> None:
        """Receive from rank `source`."""
        self._call(("recv", source, tensor, op))

    def exchange(self, out: torch.Tensor, to: int, into: torch.Tensor, source: int, op: str | None = None) -> None:
        """Send `out` and receive `into` at the same time."""
        self._call(("isend", to, out, None), ("irecv", source, into, op))

    def _call(self, *wanted: tuple[str, int, torch.Tensor, str | None]) -> None:
        where, start = _caller(), self._player.clock
        calls = [
            Call(self.rank, name, peer, tensor, op, start, where) for name, peer, tensor, op in wanted if tensor.numel()
        ]
        if calls:
            self._player.wait_for(calls)


def _caller() -> str:
    """File and line of the code that called send, recv or exchange, also through a `Sub` transport."""
    frame = sys._getframe(3)
    while Path(frame.f_code.co_filename).name == "transport.py":
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    name = "a cell" if path.parent.name.startswith("ipykernel_") else path.name
    return f"{name}, line {frame.f_lineno}"
