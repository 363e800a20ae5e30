"""Pictures of what a run did. Each call returns an object that a notebook displays by itself.

messages(r)   who sent what to whom, and when: a lane a rank, message by message with the arrow keys
loss(t, ...)  the training loss of one or several runs
ring(r)       step by step, what is summed where, for r = run(show.tracked(my_all_reduce), ranks=4)
timeline(r)   what each rank computes and what it sends, for r = run(show.profiled(train_steps), ranks=2);
              overlap(r) is the same in numbers
spans(trace)  what each rank did, from a plain list of (rank, kind, start, end) in microseconds
shards(s, n)  which of n samples each rank sees: repeated and missing ones stand out
difference(one, runs)  how far the weights of several ranks are from those of one process, step by step
curves(lines, x, y)  numbers by step, one line for each way to do something
survived(calm, hurt)  the losses of a run that was killed on those of one that was left alone
kill_button(...)  train(...) in the background, with buttons that kill a rank
cost(fit)     what an all-reduce costs, over its size, by algorithm; cost_explorer() the same with sliders
machine()     what this machine can do, in words
"""

from importlib import import_module

# Where each picture lives. No module may have the name of a function: its import would bind the module.
# Loaded on first use: matplotlib costs a second, `import course_lib` must not.
_HOME = {
    "messages": "course_lib.show.messages_picture",
    "ring": "course_lib.show.ring_picture",
    "tracked": "course_lib.collectives.tracked",
    "timeline": "course_lib.show.timeline_picture",
    "overlap": "course_lib.show.timeline_numbers",
    "profiled": "course_lib.parallel.profiled",
    "shards": "course_lib.show.shards_picture",
    "difference": "course_lib.show.difference_picture",
    "spans": "course_lib.show.spans_picture",
    "loss": "course_lib.show.loss_picture",
    "curves": "course_lib.show.curves_picture",
    "cost": "course_lib.show.cost_picture",
    "cost_explorer": "course_lib.show.cost_sliders",
    "machine": "course_lib.show.machine_words",
    "survived": "course_lib.show.survival_picture",
    "kill_button": "course_lib.show.kill_panel",
    "Stepper": "course_lib.show.stepper",
}
__all__ = [*_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'course_lib.show' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
