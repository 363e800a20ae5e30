"""The stated bytes against the formulas of the textbooks, and where they go."""

import torch
import torch.distributed as dist

from course_lib import run
from course_lib.collectives import Communicator
from course_lib.collectives.communicator import ALGORITHMS


def test_bytes_add_up_to_the_textbook_formulas():
    """Where all divides: 2(N-1)/N·M a rank by ring and by halving, 2(N-1)·M in all by naive and by tree."""
    for size in (1, 2, 4, 8):
        numel, nbytes = 24 * size, 24 * size * 4
        for name in ("ring", "halving"):
            assert {ALGORITHMS[name].sent(rank, numel, 4, size) * size for rank in range(size)} == {
                2 * (size - 1) * nbytes
            }
    for size in range(1, 20):
        for name in ("naive", "tree"):
            assert sum(ALGORITHMS[name].sent(rank, 10, 4, size) for rank in range(size)) == 2 * (size - 1) * 40
    for rank in range(8):  # 2(L-1)/L·M + 2(K-1)/K·M/L with 4 ranks on each of 2 nodes
        assert ALGORITHMS["hierarchical"].sent(rank, 64, 4, 8, node_size=4) == 2 * 3 * 256 // 4 + 2 * 1 * 64 // 2


def test_between_nodes_goes_only_what_must(sent_by):
    """Two nodes of two: each rank sends M/2 to the other node, whatever it sends inside."""

    def work():
        dist.barrier()
        Communicator(algorithm="hierarchical", node_size=2).all_reduce(torch.ones(40))

    done = run(work, 4, quiet=True)
    across = [
        sum(m.nbytes for m in done.messages if m.rank == rank and m.op == "isend" and m.peer // 2 != rank // 2)
        for rank in range(4)
    ]
    assert across == [80] * 4
    assert [sent_by(done, rank) for rank in range(4)] == [[2 * 80 + 80]] * 4
