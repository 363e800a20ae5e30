"""The messages of one step of a tracked run: from the chunk that is sent to the chunk that it lands in."""

from collections import Counter

from course_lib.show.ring_board import Board, arrow_path
from course_lib.show.ring_steps import Move
from course_lib.show.ring_words import place, said
from course_lib.show.shapes import Shape, Text


def arrows(board: Board, moves: list[Move]) -> list[Shape]:
    """Straight to a neighbouring row; past other rows through the gap beside the sender's chunk."""
    shapes: list[Shape] = []
    used: Counter[int] = Counter()  # lanes, by the gap that they are in
    met: Counter[int] = Counter()  # arrows, by the rank where they end
    both = {(move.src, move.dst) for move in moves}
    for move in moves:
        shift = 0.15 * board.chunk * (1 if move.dst > move.src else -1) if (move.dst, move.src) in both else 0.0
        begin, end = _middle(board, move.source) + shift, _middle(board, move.target or move.source) + shift
        end += 22 * met[move.dst] if move.source and move.source[1] == board.numel else 0
        met[move.dst] += 1
        down = move.dst > move.src
        start = board.y(move.src) + (board.height if down else 0)
        if abs(move.dst - move.src) == 1:
            stop = board.y(move.dst) + (0 if down else board.height)
            points, beside = [(begin, start), (end, stop)], (begin + end) / 2
            words = (beside + 8, (start + stop) / 2 + 4)
        else:
            points = _around(board, move, begin, end, used)
            words = (points[-2][0] + 8, points[-2][1] - 5)
        look, head = ("arrow", "arrow") if move.arrived else ("lost", "cross")
        shapes += arrow_path(points, look, said(move, board.spans), head)
        if not board.small and move.source and (met[move.dst] == 1 or abs(move.dst - move.src) == 1):
            shapes.append(Text(*words, place(move.source, board.spans, 0), "label"))
    return shapes


def _middle(board: Board, span: tuple[int, int] | None) -> float:
    if not span or not span[1]:
        return board.left - 8  # a buffer that is no part of the tensor
    left, right = board.edges(*span)
    return (left + right) / 2


def _around(board: Board, move: Move, begin: float, end: float, used: Counter) -> list[tuple[float, float]]:
    """Out below (or above) the sender's chunk, through the gap, into the receiver's chunk from outside."""
    room = (board.pitch - board.height) * (0.7 if board.small else 0.36)
    chunk = board.chunk_of(move.source[0]) if move.source else -1
    lane = board.x(chunk) + board.chunk + board.gap * (0.5 + 0.2 * (used[chunk] % 3 - (used[chunk] > 0)))
    used[chunk] += 1
    down = move.dst > move.src
    out = board.y(move.src) + (board.height + room if down else -room)
    into = board.y(move.dst) - room
    return [
        (begin, board.y(move.src) + (board.height if down else 0)), (begin, out), (lane, out), (lane, into),
        (end, into), (end, board.y(move.dst)),
    ]  # fmt: skip
