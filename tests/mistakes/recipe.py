"""Wrong and right answers to exercise 09. The name of a wrong answer is the verdict that it must get."""

import math

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm


def _stub(*_):
    raise NotImplementedError


# learning_rate(step, total, warmup, base, reference, batch, ranks, optimizer)


def _half(done):
    return 0.5 * (1 + math.cos(math.pi * done))


def _rate(
    times=lambda ratio, b, r, ref, sgd: ratio if sgd else math.sqrt(ratio),
    rising=lambda step, warmup, total, base, peak: peak * step / warmup,
    falling=lambda step, warmup, total: _half((step - max(warmup, 1)) / (total + 1 - max(warmup, 1))),
):
    """The solution with some part exchanged. Without arguments it is right."""

    def answer(step, total, warmup, base, reference, batch, ranks, optimizer):
        peak = base * times(batch * ranks / reference, batch, ranks, reference, optimizer == "sgd")
        if step <= warmup:
            return rising(step, warmup, total, base, peak)
        return peak * falling(step, warmup, total)

    return answer


def _always_divides(step, total, warmup, base, reference, batch, ranks, optimizer):
    rising = step / warmup
    right = _rate()(step, total, warmup, base, reference, batch, ranks, optimizer)
    return right if step > warmup else right / (step / warmup) * rising


RATE_WRONG = {
    "stub": _stub,
    "nothing": lambda *inputs: None,
    "linear_for_adam": _rate(times=lambda ratio, b, r, ref, sgd: ratio),
    "sqrt_for_sgd": _rate(times=lambda ratio, b, r, ref, sgd: math.sqrt(ratio)),
    "scales_by_ranks": _rate(times=lambda ratio, b, r, ref, sgd: r if sgd else math.sqrt(r)),
    "forgets_ranks": _rate(times=lambda ratio, b, r, ref, sgd: b / ref if sgd else math.sqrt(b / ref)),
    "no_reference": _rate(times=lambda ratio, b, r, ref, sgd: b * r),
    "upside_down": _rate(times=lambda ratio, b, r, ref, sgd: 1 / ratio if sgd else 1 / math.sqrt(ratio)),
    "whole_division": _rate(times=lambda ratio, b, r, ref, sgd: b * r // ref),
    "not_scaled": _rate(times=lambda *_: 1),
    "warmup_from_zero": _rate(rising=lambda step, w, t, base, peak: peak * (step - 1) / w),
    "warmup_ends_late": _rate(rising=lambda step, w, t, base, peak: peak * step / (w + 1)),
    "warmup_one_ahead": _rate(rising=lambda step, w, t, base, peak: peak * (step + 1) / w),
    "warmup_to_base": _rate(rising=lambda step, w, t, base, peak: base * step / w),
    "warmup_from_base": _rate(rising=lambda step, w, t, base, peak: base + (peak - base) * step / w),
    "warmup_shapes_cosine": _rate(rising=lambda step, w, t, base, peak: peak * step / w * _half((step - 1) / t)),
    "no_warmup": _rate(rising=lambda step, w, t, base, peak: peak),
    "cosine_in_warmup": _rate(rising=lambda step, w, t, base, peak: peak * _half((step - 1) / t)),
    "starts_during_warmup": _rate(falling=lambda step, w, t: _half((step - 1) / t)),
    "starts_during_warmup_at_0": _rate(falling=lambda step, w, t: _half(step / t)),
    "length_with_warmup": _rate(falling=lambda step, w, t: _half((step - w) / t)),
    "ends_on_zero": _rate(falling=lambda step, w, t: _half((step - w) / max(t - w, 1))),
    "holds_the_peak": _rate(falling=lambda step, w, t: _half((step - w - 1) / (t - w))),
    "whole_cosine": _rate(falling=lambda step, w, t: _half(2 * (step - max(w, 1)) / (t + 1 - max(w, 1)))),
    "bare_cosine": _rate(falling=lambda step, w, t: math.cos(math.pi * (step - max(w, 1)) / (t + 1 - max(w, 1)))),
    "straight_line": _rate(falling=lambda step, w, t: 1 - (step - max(w, 1)) / (t + 1 - max(w, 1))),
    "no_cosine": _rate(falling=lambda step, w, t: 1.0),
    "first_step_late": _rate(falling=lambda step, w, t: _half((step - w) / (t + 1 - w))),
    "no_warmup_divides": _always_divides,
}
RATE_AGAIN = [("scales_by_ranks", _rate(times=lambda ratio, b, r, ref, sgd: r))]  # found with SGD already
RATE_UNNAMED = {
    "minus": (lambda *inputs: -1.0, "was expected, the function returned -1"),
    "text": (lambda *inputs: "0.1", "a rate was expected, a float"),
    "raises": (lambda *inputs: {}["lr"], "the function raised KeyError"),
}


def _another_form(step, total, warmup, base, reference, batch, ranks, optimizer):
    """cos(x) = 1 - 2 sin(x/2)**2."""
    peak = base * (batch * ranks / reference) ** {"sgd": 1, "adamw": 0.5}[optimizer]
    if warmup and step < warmup:
        return peak / (warmup / step)
    start = warmup if warmup else 1
    return peak * (1 - math.sin(math.pi * (step - start) / (2 * (total + 1 - start))) ** 2)


def _with_torch(*inputs):
    return torch.tensor(_rate()(*inputs), dtype=torch.float64).item()


RATE_RIGHT = {"as the solution": _rate(), "another form": _another_form, "through a tensor": _with_torch}


# update(model, optimizer, scaler, loss, max_norm)


def _update(*calls, zero=True):
    """The calls one after the other: (model, optimizer, scaler, loss, max_norm) each."""

    def answer(model, optimizer, scaler, loss, max_norm):
        if zero:
            optimizer.zero_grad()
        for call in calls:
            if call(model, optimizer, scaler, loss, max_norm) == "stop":
                return

    return answer


def _backward(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()


def _plain_backward(model, optimizer, scaler, loss, max_norm):
    loss.backward()


def _average(model, optimizer, scaler, loss, max_norm):
    model.synchronize()


def _unscale(model, optimizer, scaler, loss, max_norm):
    scaler.unscale_(optimizer)


def _clip(model, optimizer, scaler, loss, max_norm):
    clip_grad_norm_(model.parameters(), max_norm)


def _clip_each(model, optimizer, scaler, loss, max_norm):
    for parameter in model.parameters():
        clip_grad_norm_(parameter, max_norm)


def _clip_values(model, optimizer, scaler, loss, max_norm):
    clip_grad_value_(model.parameters(), max_norm)


def _normalise(model, optimizer, scaler, loss, max_norm):
    norm = get_total_norm([p.grad for p in model.parameters()])
    for parameter in model.parameters():
        parameter.grad.mul_(max_norm / norm)


def _step(model, optimizer, scaler, loss, max_norm):
    scaler.step(optimizer)


def _plain_step(model, optimizer, scaler, loss, max_norm):
    optimizer.step()


def _renew(model, optimizer, scaler, loss, max_norm):
    scaler.update()


def _zero(model, optimizer, scaler, loss, max_norm):
    optimizer.zero_grad()


def _finite(model):
    return all(p.grad.isfinite().all() for p in model.parameters())


def _leave_if_infinite(model, optimizer, scaler, loss, max_norm):
    return None if _finite(model) else "stop"


def _halve_by_hand(model, optimizer, scaler, loss, max_norm):
    if _finite(model):
        return None
    scaler.update(scaler.get_scale() / 2)
    return "stop"


def _alone(model, optimizer, scaler, loss, max_norm):
    """Looks before the average, and steps without the scaler."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    fine = _finite(model)
    model.synchronize()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    if fine:
        optimizer.step()
    scaler.update()


def _factor_alone(model, optimizer, scaler, loss, max_norm):
    """All skip, but only the culprit halves the factor."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    fine = _finite(model)
    model.synchronize()
    if _finite(model):
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
    elif not fine:
        scaler.update(scaler.get_scale() / 2)


def _zero_only_after_a_step(model, optimizer, scaler, loss, max_norm):
    scaler.scale(loss).backward()
    model.synchronize()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), max_norm)
    if _finite(model):
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()


UPDATE_WRONG = {
    "stub": _stub,
    "synchronize_before_backward": _update(_average, _backward, _unscale, _clip, _step, _renew),
    "zeroed_before_step": _update(_backward, _average, _unscale, _clip, _zero, _plain_step, _renew),
    "never_steps": _update(_backward, _average, _unscale, _clip, _renew),
    "never_zeroes": _update(_backward, _average, _unscale, _clip, _step, _renew, zero=False),
    "unscales_before_average": _update(_backward, _unscale, _average, _clip, _step, _renew),
    "decides_alone": _alone,
    "steps_with_infinities": _update(_backward, _average, _unscale, _clip, _plain_step, _renew),
    "halves_alone": _factor_alone,
    "factor_stays": _update(_backward, _average, _leave_if_infinite, _unscale, _clip, _step, _renew),
    "clips_scaled": _update(_backward, _average, _clip, _unscale, _step, _renew),
    "never_unscaled": _update(_backward, _average, _plain_step),
    "clips_and_never_unscales": _update(_backward, _average, _clip, _halve_by_hand, _plain_step),
    "loss_not_scaled": _update(_plain_backward, _average, _unscale, _clip, _step, _renew),
    "never_averages": _update(_backward, _unscale, _clip, _step, _renew),
    "clips_before_average": _update(_backward, _unscale, _clip, _average, _step, _renew),
    "no_clip": _update(_backward, _average, _unscale, _step, _renew),
    "clips_each_parameter": _update(_backward, _average, _unscale, _clip_each, _step, _renew),
    "clips_values": _update(_backward, _average, _unscale, _clip_values, _step, _renew),
    "always_this_length": _update(_backward, _average, _unscale, _normalise, _step, _renew),
    "leaves_early": _update(_backward, _leave_if_infinite, _average, _unscale, _clip, _step, _renew),
    "unscales_twice": _update(_backward, _average, _unscale, _clip, _unscale, _step, _renew),
    "update_missing": _update(_backward, _average, _unscale, _clip, _step),
    "updates_twice": _update(_backward, _average, _unscale, _clip, _step, _renew, _renew),
}
UPDATE_AGAIN = [  # the same mistakes in other words
    ("clips_scaled", _update(_backward, _average, _clip, _step, _renew)),
    ("no_clip", _update(_clip, _backward, _average, _unscale, _step, _renew)),
    ("zeroed_before_step", _update(_backward, _zero, _average, _unscale, _clip, _step, _renew)),
    ("never_zeroes", _zero_only_after_a_step),
    ("never_averages", _update(_backward, _unscale, _clip, _step, _renew, _average)),
    ("steps_with_infinities", _update(_backward, _average, _unscale, _clip, _plain_step, _renew, _zero, zero=False)),
]
UPDATE_ENDS = [  # and these end badly, each for itself
    ("update_missing", _update(_backward, _average, _step)),
    ("update_missing", _update(_backward, _average, _unscale, _clip, _renew, _step)),
]


def _by_own_flag(model, optimizer, scaler, loss, max_norm):
    """Agrees before the average, and skips that, too."""
    for parameter in model.parameters():
        parameter.grad = None
    scaler.scale(loss).backward()
    fine = torch.tensor(float(_finite(model)))
    dist.all_reduce(fine, op=dist.ReduceOp.MIN)
    if not fine:
        scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
        return
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    scaler.unscale_(optimizer)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad *= min(1.0, max_norm / norm.item())
    scaler.step(optimizer)
    scaler.update()


def _asks_the_norm(model, optimizer, scaler, loss, max_norm):
    """zero_grad at the end; the step is made without the scaler, when the norm is finite."""
    scaler.scale(loss).backward()
    model.synchronize()
    scaler.unscale_(optimizer)
    norm = get_total_norm([p.grad for p in model.parameters()])
    if norm.isfinite():
        clip_grads_with_norm_(model.parameters(), max_norm, norm)
        optimizer.step()
    scaler.update()
    optimizer.zero_grad(set_to_none=False)


def _clips_at_the_scale(model, optimizer, scaler, loss, max_norm):
    """Clips scaled gradients at a scaled norm; scaler.step unscales."""
    model.zero_grad()
    scaler.scale(loss).backward()
    model.synchronize()
    clip_grad_norm_(model.parameters(), max_norm * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


UPDATE_RIGHT = {
    "as the solution": _update(_backward, _average, _unscale, _clip, _step, _renew),
    "by an own flag": _by_own_flag,
    "asks the norm": _asks_the_norm,
    "clips at the scale": _clips_at_the_scale,
}
