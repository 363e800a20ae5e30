"""What people get wrong in the plan of a run. A wrong formula is recognised by its value."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_lib.check.spec import Answer, Case, Mistake


def close(got: float, want: float) -> bool:
    """Equal but for rounding."""
    return math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-15)


@dataclass(frozen=True)
class Run:
    """The arguments, and the right parts that wrong formulas are made of."""

    parameters: int
    samples: int
    global_batch: int
    ranks: int
    epochs: int
    warmup_epochs: float
    lr: float
    reference: int

    @property
    def gradients(self) -> int:
        """Bytes."""
        return 4 * self.parameters

    @property
    def per_epoch(self) -> int:
        """Steps, the last one of few samples included."""
        return math.ceil(self.samples / self.global_batch)

    @property
    def tail(self) -> int:
        """Samples of the last step of an epoch."""
        return self.samples % self.global_batch or self.global_batch

    @property
    def share(self) -> int:
        """Samples of a rank in a full step."""
        return self.global_batch // self.ranks

    @property
    def peak(self) -> float:
        """The highest rate."""
        return self.lr * self.global_batch / self.reference

    @property
    def warmup(self) -> int:
        """Steps."""
        return round(self.warmup_epochs * self.per_epoch)


Formula = Callable[[Run], Any]


def _same(got: Any, wrong: Any) -> bool:
    if isinstance(wrong, list):
        return isinstance(got, list | tuple) and list(got) == wrong
    return isinstance(got, int | float) and not isinstance(got, bool) and close(got, wrong)


def _wrong(name: str, key: str, formula: Formula, says: str) -> Mistake:
    """Fits when the plan says under `key` what the wrong formula gives, and this is not what is right."""

    def fits(case: Case, answer: Answer) -> bool:
        if not isinstance(case.expected, dict) or not isinstance(answer.value, dict) or key not in answer.value:
            return False
        try:
            wrong = formula(Run(*case.inputs))
        except ArithmeticError:
            return False
        return not _same(wrong, case.expected[key]) and _same(answer.value[key], wrong)

    return Mistake(name, fits, says)


_BYTES = (
    _wrong(
        "elements", "gradient_bytes", lambda r: r.parameters,
        "That is the number of parameters. A float32 has four bytes, and so has its gradient.",
    ),
    _wrong(
        "mebibytes", "gradient_bytes", lambda r: r.gradients / 2**20,
        "Those are MiB; bytes were asked for.",
    ),
    _wrong(
        "bits", "gradient_bytes", lambda r: 8 * r.gradients,
        "Those are bits; bytes were asked for.",
    ),
    _wrong(
        "with_momentum", "gradient_bytes", lambda r: 2 * r.gradients,
        "Twice too many. Gradients alone travel; weights and momentum stay where they are.",
    ),
    _wrong(
        "whole_tensor", "sent_bytes", lambda r: 2 * (r.ranks - 1) * r.gradients,
        "That is what all ranks send together, or one that sends the whole tensor in each of the 2(N-1) steps. In a "
        "ring each step carries one chunk, 1/N of the gradients.",
    ),
    _wrong(
        "one_way", "sent_bytes", lambda r: (r.ranks - 1) / r.ranks * r.gradients,
        "That is the reduce-scatter alone. The all-gather sends as much again: 2(N-1)/N of the gradients.",
    ),
    _wrong(
        "two_tensors", "sent_bytes", lambda r: 2 * r.gradients,
        "The volume comes near to twice the gradients with many ranks only. It is 2(N-1)/N of them.",
    ),
    _wrong(
        "gradients_once", "sent_bytes", lambda r: r.gradients,
        "That is the size of the gradients, which is what goes *into* the all-reduce. A ring sends 2(N-1)/N of that.",
    ),
    _wrong(
        "sent_while_training", "sent_bytes",
        lambda r: 2 * (r.ranks - 1) / r.ranks * r.gradients * r.per_epoch * r.epochs,
        "Those are the bytes of the whole run; those of one step were asked for.",
    ),
)  # fmt: skip
_STEPS = (
    _wrong(
        "tail_dropped", "steps", lambda r: r.samples // r.global_batch * r.epochs,
        "The samples that do not fill the last batch of an epoch are a step, too: round up. (The loop leaves them out "
        "with --data.drop_last only.)",
    ),
    _wrong(
        "one_epoch", "steps", lambda r: r.per_epoch,
        "Those are the steps of one epoch; the steps of the whole run were asked for.",
    ),
    _wrong(
        "epochs_joined", "steps", lambda r: math.ceil(r.samples * r.epochs / r.global_batch),
        "Here the epochs flow into each other. Each epoch ends with a step of its own: round up, then multiply.",
    ),
    _wrong(
        "batch_times_ranks", "steps", lambda r: math.ceil(r.samples / (r.global_batch * r.ranks)) * r.epochs,
        "The global batch holds the samples of *all* ranks already: do not multiply it by the ranks.",
    ),
    _wrong(
        "steps_of_a_rank", "steps", lambda r: math.ceil(r.samples / r.share) * r.epochs,
        "That divides all samples by the batch of one rank. All ranks work at the same step: divide by the global "
        "batch.",
    ),
    _wrong(
        "not_whole", "steps", lambda r: r.samples / r.global_batch * r.epochs,
        "There is no part of a step: round up.",
    ),
)  # fmt: skip
_SAMPLES = (
    _wrong(
        "whole_batch_each", "samples_of_ranks", lambda r: [r.global_batch] * r.ranks,
        "Each rank has the whole global batch here. They share it: global_batch / ranks for each.",
    ),
    _wrong(
        "one_number", "samples_of_ranks", lambda r: r.share,
        "A list with a number for each rank was asked for.",
    ),
    _wrong(
        "end_as_always", "samples_at_the_end", lambda r: [r.share] * r.ranks,
        "The last step of an epoch has what is left: samples % global_batch, when that is not 0.",
    ),
    _wrong(
        "nothing_left", "samples_at_the_end", lambda r: _dealt(r.samples % r.global_batch, r.ranks),
        "When the samples fill all steps, samples % global_batch is 0, and the last step is a full one.",
    ),
    _wrong(
        "padded", "samples_at_the_end", lambda r: [math.ceil(r.tail / r.ranks)] * r.ranks,
        "So samples are repeated until all ranks have as many, as torch's DistributedSampler does. The loop deals what "
        "is there like cards: the first ranks have one more.",
    ),
    _wrong(
        "cut_off", "samples_at_the_end", lambda r: [r.tail // r.ranks] * r.ranks,
        "So the samples that do not come out even are left out. The loop deals them like cards: the first ranks have "
        "one more.",
    ),
    _wrong(
        "in_blocks", "samples_at_the_end",
        lambda r: [max(0, min(r.share, r.tail - rank * r.share)) for rank in range(r.ranks)],
        "Here the first ranks take full parts and the last ones have nothing to do. The loop deals the samples like "
        "cards, one for each rank in turn.",
    ),
    _wrong(
        "rest_to_the_last", "samples_at_the_end",
        lambda r: [r.tail // r.ranks] * (r.ranks - 1) + [r.tail // r.ranks + r.tail % r.ranks],
        "Here one rank gets all that does not come out even, and the others wait for it. Dealt like cards, ranks "
        "differ by one sample at most.",
    ),
)  # fmt: skip
_RATES = (
    _wrong(
        "not_scaled", "peak", lambda r: r.lr,
        "lr is right for `reference` samples a step. For SGD the peak grows in proportion to the global batch.",
    ),
    _wrong(
        "scaled_by_ranks", "peak", lambda r: r.lr * r.ranks,
        "The rate belongs to the global batch, not to the number of ranks: lr * global_batch / reference.",
    ),
    _wrong(
        "ranks_twice", "peak", lambda r: r.peak * r.ranks,
        "The global batch holds the samples of all ranks already: do not multiply by the ranks again.",
    ),
    _wrong(
        "share_for_batch", "peak", lambda r: r.peak / r.ranks,
        "That takes the batch of one rank. A step averages over the samples of all ranks: take the global batch.",
    ),
    _wrong(
        "square_root", "peak", lambda r: r.lr * math.sqrt(r.global_batch / r.reference),
        "The square root is Adam's rule; for SGD take the ratio itself (lesson 09).",
    ),
    _wrong(
        "upside_down", "peak", lambda r: r.lr * r.reference / r.global_batch,
        "The ratio is upside down: a larger batch gets a larger rate.",
    ),
    _wrong(
        "starts_at_zero", "first_rate", lambda r: 0.0,
        "A rate of 0 makes the first step do nothing. Steps count from 1: step 1 of the warm-up has 1/warmup of the "
        "peak.",
    ),
    _wrong(
        "starts_at_the_peak", "first_rate", lambda r: r.peak,
        "The first step has the full rate: where is the warm-up?",
    ),
    _wrong(
        "warmup_in_epochs", "first_rate", lambda r: r.peak / r.warmup_epochs,
        "The warm-up is given in epochs, and the rate rises with each *step*: multiply by the steps of an epoch.",
    ),
    _wrong(
        "starts_from_lr", "first_rate", lambda r: r.lr / r.warmup,
        "The warm-up rises to the peak, not to lr: step 1 has peak / warmup.",
    ),
    _wrong(
        "one_step_ahead", "first_rate", lambda r: 2 * r.peak / r.warmup,
        "That is the rate of the second step.",
    ),
    _wrong(
        "one_step_long", "first_rate", lambda r: r.peak / (r.warmup + 1),
        "The warm-up is one step too long: at its last step the rate is at the peak.",
    ),
)  # fmt: skip


def _dealt(samples: int, ranks: int) -> list[int]:
    return [len(range(rank, samples, ranks)) for rank in range(ranks)]


MISTAKES = (
    *(mistake for group in (_BYTES, _STEPS, _SAMPLES, _RATES) for mistake in group),
    Mistake(
        "no_warmup_divides",
        lambda case, answer: answer.error == "ZeroDivisionError" and case.inputs[5] == 0,
        "A run may have no warm-up: then its first step has the peak.",
    ),
    Mistake(
        "does_not_refuse",
        lambda case, answer: case.expected is ValueError,
        "The loop refuses such a batch, since a rank with more samples makes the others wait in each step. Raise a "
        "ValueError that says which batch would do.",
    ),
    Mistake(
        "nothing",
        lambda case, answer: answer.error is None and answer.value is None,
        "The function came to its end without `return`.",
    ),
)
