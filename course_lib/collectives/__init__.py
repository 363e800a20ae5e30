"""Collectives by hand: each algorithm is one readable file over one small interface, `Transport`."""

from course_lib.collectives.communicator import Communicator
from course_lib.collectives.transport import Sub, TorchTransport, Transport

__all__ = ["Communicator", "Sub", "TorchTransport", "Transport"]
