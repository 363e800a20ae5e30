"""What each rank computes and what it sends, side by side: `show.timeline(r)`."""

from course_lib.launch.result import Result
from course_lib.show import timeline_words
from course_lib.show.stepper import Stepper
from course_lib.show.still import png
from course_lib.show.svg import svg
from course_lib.show.timeline_draw import draw
from course_lib.show.timeline_lanes import story
from course_lib.show.timeline_numbers import Overlap, numbers

_MOST = 200  # collectives to step through


class Timeline(Stepper):
    """A stepper with the numbers of what it shows: `picture.numbers[k].exposed` is seconds on rank k."""

    numbers: Overlap


def timeline(r: Result, steps: int | None = 1) -> Timeline:
    """Draw training steps: for each rank computing above, communication below, and what of that is exposed.

    r       what run(show.profiled(train_steps), ranks=N) returned
    steps   the last so many; None: everything that was profiled

    Computing is when operators ran. Communication is dashed while it waits for a rank that has not come yet, full
    while bytes move. Step 0 is the whole picture; the arrow keys then go through the collectives, in the order of
    time.
    """
    told = story(r, steps, "timeline")
    found = numbers(told, steps)
    canvas = draw(told, found, _MOST)
    whole = timeline_words.overview(told, found)
    drawn = min(len(told.events), _MOST)
    start = f"{whole} Drag the slider, or press → on it, to go through the communication." if drawn else whole
    captions = [start, *(timeline_words.caption(told, number) for number in range(1, drawn + 1))]
    picture = Timeline([svg(canvas)], captions, png(canvas), whole, timeline_words.table(told, found))
    picture.numbers = found
    return picture
