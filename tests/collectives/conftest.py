"""What the tests of collectives share."""

import pytest


class Alone:
    """The transport of a group of one rank, which has nobody to talk to."""

    rank, size = 0, 1


@pytest.fixture
def alone() -> Alone:
    return Alone()


@pytest.fixture
def sent_by():
    """Function (result, rank) -> bytes that the rank sent after each of its barriers, in order."""

    def count(result, rank: int) -> list[int]:
        parts = []
        for message in (m for m in result.messages if m.rank == rank):
            if message.op == "barrier":
                parts.append(0)
            elif message.op in ("send", "isend"):
                parts[-1] += message.nbytes
        return parts

    return count
