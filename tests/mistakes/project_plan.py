"""Wrong and right plans for exercise 16. The name of a wrong one is the verdict that it must get."""

import math


def _stub(*_):
    raise NotImplementedError


def _dealt(samples, ranks):
    return [samples // ranks + (rank < samples % ranks) for rank in range(ranks)]


class Run:
    """The arguments by name, and the parts that formulas are made of."""

    def __init__(self, parameters, samples, batch, ranks, epochs, warmup_epochs, lr, reference):
        self.parameters, self.samples, self.batch, self.ranks = parameters, samples, batch, ranks
        self.epochs, self.warmup_epochs, self.lr, self.reference = epochs, warmup_epochs, lr, reference
        self.per_epoch = -(-samples // batch)
        self.tail = samples - (self.per_epoch - 1) * batch
        self.warmup = round(warmup_epochs * self.per_epoch)


def _plan(refuse=True, **other):
    """The solution with some entries exchanged, each a function of a Run. Without arguments it is right."""

    def answer(*inputs):
        r = Run(*inputs)
        if refuse and r.batch % r.ranks:
            raise ValueError(f"{r.batch} samples cannot be divided among {r.ranks} ranks")
        n, peak = r.ranks, r.lr * r.batch / r.reference
        found = {
            "gradient_bytes": 4 * r.parameters,
            "sent_bytes": 2 * (n - 1) / n * 4 * r.parameters,
            "steps": r.per_epoch * r.epochs,
            "samples_of_ranks": [r.batch // n] * n,
            "samples_at_the_end": _dealt(r.tail, n),
            "peak": peak,
            "first_rate": peak / r.warmup if r.warmup else peak,
        }
        return found | {name: formula(r) for name, formula in other.items()}

    return answer


def _peak(r):
    return r.lr * r.batch / r.reference


def _blocks(r):
    left, found = r.tail, []
    for _ in range(r.ranks):
        found.append(min(left, r.batch // r.ranks))
        left -= found[-1]
    return found


def _sent(times):
    return _plan(sent_bytes=lambda r: times(r.ranks) * 4 * r.parameters)


def _first(formula):
    return _plan(first_rate=lambda r: formula(r) if r.warmup else _peak(r))


WRONG = {
    "stub": _stub,
    "nothing": lambda *inputs: None,
    "elements": _plan(gradient_bytes=lambda r: r.parameters),
    "mebibytes": _plan(gradient_bytes=lambda r: 4 * r.parameters / 1024 / 1024),
    "bits": _plan(gradient_bytes=lambda r: 32 * r.parameters),
    "with_momentum": _plan(gradient_bytes=lambda r: 8 * r.parameters),
    "whole_tensor": _sent(lambda n: 2 * (n - 1)),
    "one_way": _sent(lambda n: (n - 1) / n),
    "two_tensors": _sent(lambda n: 2),
    "gradients_once": _sent(lambda n: 1),
    "sent_while_training": _plan(
        sent_bytes=lambda r: 8 * (r.ranks - 1) / r.ranks * r.parameters * r.per_epoch * r.epochs
    ),
    "tail_dropped": _plan(steps=lambda r: r.epochs * (r.samples // r.batch)),
    "one_epoch": _plan(steps=lambda r: r.per_epoch),
    "epochs_joined": _plan(steps=lambda r: math.ceil(r.epochs * r.samples / r.batch)),
    "batch_times_ranks": _plan(steps=lambda r: r.epochs * math.ceil(r.samples / r.batch / r.ranks)),
    "steps_of_a_rank": _plan(steps=lambda r: r.epochs * math.ceil(r.samples / (r.batch // r.ranks))),
    "not_whole": _plan(steps=lambda r: r.epochs * r.samples / r.batch),
    "whole_batch_each": _plan(samples_of_ranks=lambda r: [r.batch] * r.ranks),
    "one_number": _plan(samples_of_ranks=lambda r: r.batch // r.ranks),
    "end_as_always": _plan(samples_at_the_end=lambda r: [r.batch // r.ranks] * r.ranks),
    "nothing_left": _plan(samples_at_the_end=lambda r: _dealt(r.samples % r.batch, r.ranks)),
    "padded": _plan(samples_at_the_end=lambda r: [-(-r.tail // r.ranks)] * r.ranks),
    "cut_off": _plan(samples_at_the_end=lambda r: [r.tail // r.ranks] * r.ranks),
    "in_blocks": _plan(samples_at_the_end=_blocks),
    "rest_to_the_last": _plan(
        samples_at_the_end=lambda r: [r.tail // r.ranks] * (r.ranks - 1) + [r.tail - r.tail // r.ranks * (r.ranks - 1)]
    ),
    "not_scaled": _plan(peak=lambda r: r.lr),
    "scaled_by_ranks": _plan(peak=lambda r: r.lr * r.ranks),
    "ranks_twice": _plan(peak=lambda r: _peak(r) * r.ranks),
    "share_for_batch": _plan(peak=lambda r: r.lr * (r.batch // r.ranks) / r.reference),
    "square_root": _plan(peak=lambda r: r.lr * (r.batch / r.reference) ** 0.5),
    "upside_down": _plan(peak=lambda r: r.lr / (r.batch / r.reference)),
    "starts_at_zero": _first(lambda r: 0),
    "starts_at_the_peak": _first(_peak),
    "warmup_in_epochs": _first(lambda r: _peak(r) / r.warmup_epochs),
    "starts_from_lr": _first(lambda r: r.lr / r.warmup),
    "one_step_ahead": _first(lambda r: _peak(r) * 2 / r.warmup),
    "one_step_long": _first(lambda r: _peak(r) / (r.warmup + 1)),
    "no_warmup_divides": _plan(first_rate=lambda r: _peak(r) / r.warmup),
    "does_not_refuse": _plan(refuse=False),
}
UNNAMED = {
    "a list": (lambda *inputs: list(_plan()(*inputs).values()), "a dict was expected"),
    "a part is missing": (
        lambda *inputs: {k: v for k, v in _plan()(*inputs).items() if k != "steps"},
        "the plan has no steps",
    ),
    "a text": (_plan(peak=lambda r: f"{_peak(r)}"), "peak: a number was expected"),
    "raises": (_plan(steps=lambda r: r.nothing), "the function raised AttributeError"),
    "another number": (_plan(steps=lambda r: 100_003), "steps: "),
}


def _whole(*inputs):
    """As whole numbers and tuples where that is possible, and with more than was asked for."""
    found = _plan()(*inputs)
    found["samples_of_ranks"] = tuple(found["samples_of_ranks"])
    return found | {"note": "mine", "steps": float(found["steps"])}


RIGHT = {"as the solution": _plan(), "tuples and floats": _whole}
EXPECTED = {  # by hand: 1000 parameters, 103 samples in batches of 24 on 4 ranks, so 4 full steps and one of 7
    "inputs": (1000, 103, 24, 4, 3, 1, 0.1, 48),
    "plan": {
        "gradient_bytes": 4000,
        "sent_bytes": 6000,
        "steps": 15,
        "samples_of_ranks": [6, 6, 6, 6],
        "samples_at_the_end": [2, 2, 2, 1],
        "peak": 0.05,
        "first_rate": 0.01,
    },
}
