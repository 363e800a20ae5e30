"""Step by step, what is summed where: `show.ring(r)` for `r = run(show.tracked(my_all_reduce), ranks=4)`."""

from course_lib.collectives.tracked import Track
from course_lib.launch.result import Result
from course_lib.show import ring_words, words
from course_lib.show.ring_arrows import arrows
from course_lib.show.ring_board import FEW, Board
from course_lib.show.ring_key import key, meter
from course_lib.show.ring_steps import Story
from course_lib.show.shapes import Canvas, Shape, Text
from course_lib.show.stepper import Stepper
from course_lib.show.still import png
from course_lib.show.svg import svg

_WIDTH, _LEFT, _METER, _TOP = 900.0, 74.0, 132.0, 84.0
_HEADING = 58.0  # pixels that "chunk 10" needs


def ring(r: Result) -> Stepper:
    """Draw a tracked all-reduce: a row a rank, its tensor in chunks, each striped by the ranks that are summed in it.

    r   what run(show.tracked(fn), ranks=N) returned

    Step 0 is the whole run in small; the arrow keys then go through the steps. Works for wrong rings as well: a rank
    that was added twice is marked, one that is missing leaves its place blank.
    """
    tracks = getattr(r, "results", None)
    if not tracks or not all(isinstance(track, Track) for track in tracks):
        raise TypeError(
            "show.ring draws a tracked run: r = run(show.tracked(my_all_reduce), ranks=4), then show.ring(r)."
        )
    story = Story(tracks)
    board = Board(story.size, story.numel, _LEFT, _TOP, _WIDTH - _LEFT - _METER - 26)
    told = ring_words.overview(story, board.spans)
    whole = _overview(story, told)
    frames = [whole] + [_frame(story, board, step) for step in range(1, story.steps + 1)]
    captions = [f"{told} Drag the slider, or press → on it, to go through the steps."]
    captions += [ring_words.caption(story, board.spans, step) for step in range(1, story.steps + 1)]
    text = ring_words.table(story, board.spans)
    return Stepper([svg(frame) for frame in frames], captions, png(whole), told, text)


def _frame(story: Story, board: Board, step: int) -> Canvas:
    phase = story.phase(step)
    title = f"After step {step} of {story.steps}" + (f" ({phase})" if phase else "")
    shapes: list[Shape] = [Text(_LEFT, 22, title, "strong")]
    narrow = board.chunk + board.gap < _HEADING
    if narrow:
        shapes.append(Text(_LEFT - 14, 46, "chunk", "small", "end"))
    for number, (_, length) in enumerate(board.spans):
        name = f"{number}" if narrow else f"chunk {number}"
        name += f": {words.count(length, 'element')}" if story.size <= FEW else ""
        shapes.append(Text(board.x(number) + board.chunk / 2, 46, name, "small", "middle"))
    for rank in range(story.size):
        shapes.append(Text(_LEFT - 14, board.y(rank) + board.height / 2 + 5, f"rank {rank}", "text", "end"))
    shapes += [*_tensors(story, board, step), *meter(story, board, step, _WIDTH - _METER, _METER - 12)]
    height = board.bottom + 46
    return Canvas(_WIDTH, height, title, [*shapes, *key(story, _LEFT, height - 10, measured=True)])


def _tensors(story: Story, board: Board, step: int) -> list[Shape]:
    """The chunks after a step, and the messages that made them so."""
    moves = story.moves_of(step)
    shapes: list[Shape] = []
    for rank in range(story.size):
        fresh = {board.chunk_of(move.target[0]) for move in moves if move.dst == rank and move.target}
        shapes += board.row(rank, story.tensor(rank, step), fresh)
    shapes += [board.mark(move.dst, *move.target) for move in moves if move.target]
    return shapes + arrows(board, moves)


def _overview(story: Story, told: str) -> Canvas:
    """The steps in small, beside each other: what a page without scripts shows, too."""
    shown = list(range(story.steps + 1))
    if story.size > FEW and story.steps > 6:  # the first, the turning point, the last
        shown = sorted({0, 1, 2, story.steps // 2, story.steps // 2 + 1, story.steps})
    across = 4 if len(shown) in (4, 7, 8) else 3
    wide = (_WIDTH - 8) / across
    tall = Board(story.size, story.numel, 0, 0, 0, small=True).bottom + 58
    shapes: list[Shape] = [Text(24, 22, "What is summed where, step by step", "strong")]
    for place, step in enumerate(shown):
        left, top = wide * (place % across) + 24, 40 + tall * (place // across)
        board = Board(story.size, story.numel, left, top + 32, wide - 36, small=True)
        phase = story.phase(step)
        name = f"step {step}" + (f", {phase}" if phase and across == 4 else f": {phase}" if phase else "")
        shapes.append(Text(left, top + 12, name if step else "start", "small", "start", step))
        for rank in range(story.size):
            shapes.append(Text(left - 7, board.y(rank) + 12, str(rank), "small", "end"))
        shapes += _tensors(story, board, step)
    bottom = 40 + tall * -(-len(shown) // across)
    return Canvas(_WIDTH, bottom + 14, told, [*shapes, *key(story, 24, bottom, measured=False)])
