"""What happens in a tracked run, in words: captions, overview and plain text."""

from collections.abc import Sequence

from course_lib.show import words
from course_lib.show.ring_steps import Move, Story, decode

_MOST = 4  # messages that a caption names


def contents(value: float, size: int) -> str:
    """Which ranks are in a value.

    >>> contents(1 + 8, 4), contents(8, 4), contents(2 * 8 + 64, 4), contents(585, 4)
    ('the sum of ranks 0 and 1', "rank 1's own", 'the sum of ranks 1 (×2) and 2', 'the sum of all ranks')
    """
    found = decode(value, size)
    if found is None:
        return f"{value:g}, which is no sum of ranks"
    if not found:
        return "nothing but zeros"
    if max(found.values()) > 1:
        each = [f"{rank}" if times == 1 else f"{rank} (×{times})" for rank, times in found.items()]
        return f"the sum of rank{'s' * (len(each) > 1)} {_and(each)}"
    if len(found) == size:
        return f"the {'sum' if value == sum(8**rank for rank in found) else 'mean'} of all ranks"
    return f"the sum of {words.ranks(found)}" if len(found) > 1 else f"rank {next(iter(found))}'s own"


def _and(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def place(span: tuple[int, int] | None, spans: Sequence[tuple[int, int]], length: int) -> str:
    """A part of the tensor: by the chunk's number where it is one."""
    if span == (0, sum(many for _, many in spans)) and len(spans) > 1:
        return "the whole tensor"
    if span in spans:
        return f"chunk {spans.index(span)}"
    if span is None:
        return words.count(length, "element")
    return f"elements {span[0]} to {sum(span) - 1}" if span[1] > 1 else f"element {span[0]}"


def said(move: Move, spans: Sequence[tuple[int, int]]) -> str:
    """One message as a clause."""
    inside = sorted(set(move.payload))
    what = contents(inside[0], len(spans)) if len(inside) == 1 else "sums of different ranks"
    text = f"rank {move.src} sends {place(move.source, spans, len(move.payload))}, {what}, to rank {move.dst}"
    if not move.arrived:
        return f"{text}, which never received it"
    if move.target and move.source and move.target != move.source:
        text += f", where it goes to {place(move.target, spans, len(move.payload))}"
    return text


def caption(story: Story, spans: Sequence[tuple[int, int]], step: int) -> str:
    """The sentences below a step's picture."""
    moves, phase = story.moves_of(step), story.phase(step)
    told = [said(move, spans) for move in moves[:_MOST]]
    if len(moves) > _MOST:
        told.append(f"and {words.count(len(moves) - _MOST, 'more message')}")
    text = f"step {step} of {story.steps}{', ' + phase if phase else ''}: {'; '.join(told)}."
    sent = {story.sent(rank, step) for rank in range(story.size)}
    amount = words.size(max(sent))
    return f"{text} Sent so far: {amount} a rank." if len(sent) == 1 else f"{text} Sent so far: up to {amount} a rank."


def outcome(story: Story, spans: Sequence[tuple[int, int]]) -> str:
    """Whether the all-reduce is right, and if not, the first places where it is not."""
    wrong = []
    divided = {value for track in story.tracks for value in track.end} == {story.total / story.size} != {story.total}
    for rank in range(story.size):
        tensor = story.tensor(rank, story.steps)
        for chunk, (first, length) in enumerate(spans):
            odd = [value for value in tensor[first : first + length] if value != story.total and not divided]
            if odd:
                wrong.append(f"rank {rank} holds {contents(odd[0], story.size)} in chunk {chunk}")
    if not wrong:
        return f"At the end every rank holds the {'mean' if divided else 'sum'} of all ranks in every chunk."
    more = f", and so on: {len(wrong)} chunks are wrong" if len(wrong) > 2 else ""
    return f"At the end {'; '.join(wrong[:2])}{more}."


def overview(story: Story, spans: Sequence[tuple[int, int]]) -> str:
    """The whole run in a few sentences."""
    text = f"{words.count(story.size, 'rank')}, {words.count(story.steps, 'step')}, "
    text += f"{words.count(len(story.moves), 'message')}. {outcome(story, spans)}"
    whole = 8 * story.numel
    if whole and story.size > 1:
        most = max(story.sent(rank, story.steps) for rank in range(story.size))
        text += f" The busiest rank sent {most / whole:.3g} times the tensor; the ring needs {2 - 2 / story.size:.3g}."
    copies = all(story.tensor(r, s) == t.start for r, t in enumerate(story.tracks) for s in range(story.steps))
    if story.moves and copies:
        text += " The tensor itself changed only at the end: the function worked on copies, which cannot be seen here."
    return text


def table(story: Story, spans: Sequence[tuple[int, int]]) -> str:
    """The run as plain text: what each rank holds in each chunk after each step, ranks by their numbers."""
    lines = [overview(story, spans)]
    for step in range(story.steps + 1):
        lines.append(f"step {step} of {story.steps} {story.phase(step)}".rstrip() if step else "start")
        for rank in range(story.size):
            tensor = story.tensor(rank, step)
            cells = [_digits(tensor[first], story.size) if length else "-" for first, length in spans]
            lines.append(f"  rank {rank}  " + "  ".join(cell.ljust(story.size) for cell in cells).rstrip())
    return "\n".join(lines)


def _digits(value: float, size: int) -> str:
    found = decode(value, size)
    return "?" if found is None else "+".join(f"{r}" if n == 1 else f"{n}*{r}" for r, n in sorted(found.items())) or "0"
