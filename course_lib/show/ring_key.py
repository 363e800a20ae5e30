"""Beside and below the picture of a tracked run: how much was sent, and the legend."""

from course_lib.show import words
from course_lib.show.ring_board import FEW, Board
from course_lib.show.ring_steps import Story, decode
from course_lib.show.shapes import Line, Rect, Shape, Text


def goal(story: Story) -> float:
    """Bytes that a ring all-reduce sends from each rank: 2(N-1)/N of the tensor, whose elements have 8 bytes."""
    return 2 * (story.size - 1) / story.size * 8 * story.numel


def meter(story: Story, board: Board, step: int, left: float, wide: float) -> list[Shape]:
    """How much each rank has sent so far, against the ring's 2(N-1)/N of the tensor."""
    most = max([goal(story), 1.0, *(story.sent(rank, story.steps) for rank in range(story.size))])
    scale = wide / most
    end = left + goal(story) * scale
    shapes: list[Shape] = [Text(left, 46, "sent so far", "small")]
    for rank in range(story.size):
        middle, sent = board.y(rank) + board.height / 2, story.sent(rank, step)
        shapes.append(Rect(left, middle - 14, end - left, 11, "box"))
        # With uneven chunks a rank may send up to two elements more than the formula, which is no fault.
        shapes.append(Rect(left, middle - 14, sent * scale, 11, "twice" if sent > goal(story) + 16 else "send"))
        shapes.append(Line(end, middle - 18, end, middle + 1, "edge"))
        shapes.append(Text(left, middle + 14, f"{words.size(sent)} of {words.size(round(goal(story)))}", "small"))
    return shapes


def key(story: Story, x: float, y: float, *, measured: bool) -> list[Shape]:
    """The legend: what occurs in this picture, no more; `measured`: the bars of `meter` do."""
    shapes: list[Shape] = []

    def entry(looks: list[str], text: str, number: bool = False) -> None:
        nonlocal x
        for rank, look in enumerate(looks):
            shapes.append(Rect(x, y - 13, 20, 17, look))
            if number:
                shapes.append(Text(x + 10, y, str(rank), "text", "middle"))
            x += 21
        shapes.append(Text(x + 6, y, text, "small"))
        x += 6.5 * len(text) + 22

    last = [decode(value, story.size) or {} for rank in range(story.size) for value in story.tensor(rank, story.steps)]
    entry([f"rank-{rank}" for rank in range(min(story.size, FEW))], "ranks in the sum", number=True)
    entry(["new"], "just arrived")
    entry(["whole" if story.size <= FEW else "done"], "finished: all ranks once")
    if any(times > 1 for found in last for times in found.values()):
        entry(["twice"], "more than once")
    if measured:
        shapes += [Line(x + 8, y - 13, x + 8, y + 4, "edge"), Text(x + 18, y, "2(N-1)/N of the tensor", "small")]
    return shapes
