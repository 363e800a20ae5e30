"""Wrong and right answers to exercise 07. The name of a wrong answer is the verdict that it must get."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn import functional as F

from course_lib.parallel.hooks.onebit import pack, unpack


def _count(microbatches):
    count = torch.tensor(sum(len(y) for _, y in microbatches))
    dist.all_reduce(count)
    return count.item()


def _accumulate(
    sync=lambda k, last: k == last,
    scale=lambda total, y, batches: dist.get_world_size() / total,
    reduction="sum",
    before=lambda k, optimizer: optimizer.zero_grad() if k == 0 else None,
    after=lambda k, last, optimizer: None,
    end=lambda model, optimizer: optimizer.step(),
    count=_count,
):
    """The solution with some part exchanged. Without arguments it is right."""

    def answer(model, optimizer, microbatches):
        total, last = count(microbatches), len(microbatches) - 1
        for k, (x, y) in enumerate(microbatches):
            before(k, optimizer)
            with nullcontext() if sync(k, last) else model.no_sync():
                loss = F.cross_entropy(model(x), y, reduction=reduction)
                if reduction == "mean" and not len(y):
                    loss = model(x).sum()
                (loss * scale(total, y, microbatches)).backward()
            after(k, last, optimizer)
        end(model, optimizer)

    return answer


def _stub(*_):
    raise NotImplementedError


def _local(batches):
    return sum(len(y) for _, y in batches)


def _everywhere(y):
    count = torch.tensor(len(y))
    dist.all_reduce(count)
    return max(count.item(), 1)


def _around_backward(model, optimizer, microbatches):
    total = _count(microbatches)
    optimizer.zero_grad()
    for k, (x, y) in enumerate(microbatches):
        loss = F.cross_entropy(model(x), y, reduction="sum") * dist.get_world_size() / total
        with model.no_sync() if k < len(microbatches) - 1 else nullcontext():
            loss.backward()
    optimizer.step()


def _again(divide):
    def end(model, optimizer):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size() ** divide
        optimizer.step()

    return end


def _zero_then_step(model, optimizer):
    optimizer.zero_grad()
    optimizer.step()


def _forwards_first(model, optimizer, microbatches, ahead=99):
    """Each forward in no_sync or not as it should be, and backwards behind them: after all, or after the next one."""
    total, losses = _count(microbatches), []
    optimizer.zero_grad()
    for k, (x, y) in enumerate(microbatches, 1):
        with nullcontext() if k == len(microbatches) else model.no_sync():
            losses.append(_loss(model, x, y, total))
            if len(losses) > ahead:
                losses.pop(0).backward()
    for loss in losses:
        loss.backward()
    optimizer.step()


def _one_forward_ahead(*arguments):
    _forwards_first(*arguments, ahead=1)


def _also_sums_losses(model, optimizer, microbatches):
    _accumulate()(model, optimizer, microbatches)
    dist.all_reduce(torch.zeros(1))


def _barrier_then_step(model, optimizer):
    dist.barrier()
    optimizer.step()


def _counts_often(microbatches):
    counts = [_count(microbatches) for _ in range(5)]
    return counts[-1]


def _skips_empty(model, optimizer, microbatches):
    _accumulate()(model, optimizer, [(x, y) for x, y in microbatches if len(y)])


def _unwrapped(model, optimizer, microbatches):
    total = _count(microbatches)
    optimizer.zero_grad()
    for x, y in microbatches:
        (F.cross_entropy(model.module(x), y, reduction="sum") * dist.get_world_size() / total).backward()
    optimizer.step()


def _gathers_gradients(model, optimizer, microbatches):
    """Right, and each rank receives the gradients of all."""
    total = _count(microbatches)
    optimizer.zero_grad()
    for x, y in microbatches:
        (F.cross_entropy(model.module(x), y, reduction="sum") / total).backward()
    for p in model.parameters():
        parts = [torch.empty_like(p) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, p.grad)
        p.grad = sum(parts)
    optimizer.step()


def _nothing(*_):
    return None


def _zero_at_the_end(model, optimizer, microbatches):
    counts = torch.tensor([float(len(y)) for _, y in microbatches])
    dist.all_reduce(counts)
    *first, (x, y) = microbatches
    factor = dist.get_world_size() / counts.sum().item()
    if first:
        with model.no_sync():
            for more, labels in first:
                (factor * F.cross_entropy(model(more), labels, reduction="sum")).backward()
    (factor * F.cross_entropy(model(x), y, reduction="sum")).backward()
    optimizer.step()
    optimizer.zero_grad()


def _loss(model, x, y, total):
    return F.cross_entropy(model(x), y, reduction="sum") * dist.get_world_size() / total


def _all_at_once(model, optimizer, microbatches):
    total = _count(microbatches)
    optimizer.zero_grad()
    x, y = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    _loss(model, x, y, total).backward()
    optimizer.step()


def _in_pairs(model, optimizer, microbatches):
    """Two microbatches at a time, in one forward."""
    total, half = _count(microbatches), (len(microbatches) + 1) // 2
    _accumulate(count=lambda _: total)(
        model, optimizer, [tuple(map(torch.cat, zip(*microbatches[k::half], strict=True))) for k in range(half)]
    )


def _one_backward(model, optimizer, microbatches):
    total, losses = _count(microbatches), []
    optimizer.zero_grad()
    for k, (x, y) in enumerate(microbatches, 1):
        with nullcontext() if k == len(microbatches) else model.no_sync():
            losses.append(_loss(model, x, y, total))
    sum(losses).backward()
    optimizer.step()


def _retains(model, optimizer, microbatches):
    total, losses = _count(microbatches), []
    optimizer.zero_grad()
    for k, (x, y) in enumerate(microbatches, 1):
        with nullcontext() if k == len(microbatches) else model.no_sync():
            losses.append(_loss(model, x, y, total))
            losses[-1].backward(retain_graph=True)
    optimizer.step()


def _counts_each(model, optimizer, microbatches):
    total = sum(_count([batch]) for batch in microbatches)
    _accumulate(count=lambda _: total)(model, optimizer, microbatches)


def _then(change):
    """After the last backward the gradients are changed."""

    def end(model, optimizer):
        change(model.parameters())
        optimizer.step()

    return _accumulate(end=end)


def _divides_by_a_tensor(model, optimizer, microbatches):
    """2 / torch.tensor(7) is float32."""
    count = torch.tensor(_local(microbatches))
    dist.all_reduce(count)
    _accumulate(scale=lambda *_: dist.get_world_size() / count)(model, optimizer, microbatches)


def _half_precision(model, optimizer, microbatches):
    total = _count(microbatches)
    optimizer.zero_grad()
    for k, (x, y) in enumerate(microbatches, 1):
        with nullcontext() if k == len(microbatches) else model.no_sync():
            _loss(lambda x: model(x).bfloat16(), x, y, total).backward()
    optimizer.step()


def _one_backward_behind_the_loop(model, optimizer, microbatches):
    total = _count(microbatches)
    optimizer.zero_grad()
    for x, y in microbatches:
        loss = _loss(model, x, y, total)
    loss.backward()
    optimizer.step()


def _no_sync_without_with(model, optimizer, microbatches):
    total = _count(microbatches)
    optimizer.zero_grad()
    for k, (x, y) in enumerate(microbatches, 1):
        if k < len(microbatches):
            model.no_sync()
        _loss(model, x, y, total).backward()
    optimizer.step()


_each = {"before": lambda k, optimizer: optimizer.zero_grad()}
_means = {"reduction": "mean"}
ACCUMULATE_WRONG = {
    "stub": _stub,
    "steps_each_time": _accumulate(after=lambda k, last, optimizer: optimizer.step(), end=_nothing),
    "no_step": _accumulate(end=_nothing),
    "zeroed_before_step": _accumulate(end=_zero_then_step),
    "zeroes_each_microbatch": _accumulate(**_each),
    "zeroes_each_microbatch_of_means": _accumulate(**_each, **_means, scale=lambda *_: 1),
    "calls_module": _unwrapped,
    "synchronises_all_but_the_last": _accumulate(sync=lambda k, last: k < last),
    "divides_by_microbatches": _accumulate(scale=lambda total, y, b: dist.get_world_size() / total / len(b)),
    "synchronises_too_often": _accumulate(sync=lambda k, last: k >= last - 1),
    "sends_another_way": _gathers_gradients,
    "never_synchronises": _accumulate(sync=lambda k, last: False),
    "synchronises_the_first": _accumulate(sync=lambda k, last: k == 0),
    "mean_of_means": _accumulate(**_means, scale=lambda total, y, batches: 1 / len(batches)),
    "sum_of_means": _accumulate(**_means, scale=lambda *_: 1),
    "divides_by_local_count": _accumulate(scale=lambda total, y, batches: 1 / _local(batches)),
    "forgets_world_size": _accumulate(scale=lambda total, *_: 1 / total),
    "sums_over_ranks": _accumulate(scale=lambda total, *_: dist.get_world_size() ** 2 / total),
    "local_count_times_world": _accumulate(scale=lambda total, y, b: dist.get_world_size() / _local(b)),
    "not_divided": _accumulate(scale=lambda *_: 1),
    "not_each_backward": _one_backward_behind_the_loop,
    "mean_and_count": _accumulate(**_means),
    "counts_one_microbatch": _accumulate(count=lambda batches: _count(batches[:1])),
    "count_of_each_microbatch": _accumulate(scale=lambda total, y, b: dist.get_world_size() / _everywhere(y)),
    "mean_of_each_microbatch": _accumulate(scale=lambda total, y, b: dist.get_world_size() / _everywhere(y) / len(b)),
    "takes_equal_sizes": _accumulate(scale=lambda total, y, b: 1 / (len(b[0][1]) * len(b))),
    "never_zeroes": _accumulate(before=_nothing),
    "no_sync_around_backward_only": _around_backward,
    "no_no_sync": _accumulate(sync=lambda *_: True),
    "averages_again": _accumulate(end=_again(1)),
    "two_for_world_size": _accumulate(scale=lambda total, *_: 2 / total),
    "zeroes_only_at_the_end": _zero_at_the_end,
    "clips": _then(lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 5.0)),
    "lower_precision": _divides_by_a_tensor,
    "all_in_one_forward": _all_at_once,
    "keeps_graphs": _one_backward,
    "retains_graphs": _retains,
    "sends_for_each_microbatch": _counts_each,
    "factor_of_0": _accumulate(scale=lambda total, *_: dist.get_world_size() // total),
    "backwards_too_late": _forwards_first,
    "waits_at_a_barrier": _accumulate(end=_barrier_then_step),
    "several_small_calls": _accumulate(count=_counts_often),
    "skips_empty_microbatch": _skips_empty,
}
ACCUMULATE_AGAIN = [
    ("no_no_sync", _no_sync_without_with),
    ("all_in_one_forward", _in_pairs),
    ("sends_for_each_microbatch", _accumulate(after=lambda k, last, optimizer: dist.barrier())),
    ("clips", _then(lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e-3))),
    ("clips", _then(lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.5))),
    ("lower_precision", _half_precision),
    ("backwards_too_late", _one_forward_ahead),
    ("several_small_calls", _also_sums_losses),
]


def _scales_gradients(model, optimizer, microbatches):
    """Sums first, and one division of the gradients at the end; also tells the mean loss."""
    optimizer.zero_grad()
    told = torch.zeros(2, dtype=torch.float64)
    for k, (x, y) in enumerate(microbatches, 1):
        with model.no_sync() if k < len(microbatches) else nullcontext():
            loss = F.cross_entropy(model(x), y, reduction="sum")
            loss.backward()
        told += torch.stack([loss.detach(), torch.tensor(float(len(y)))])
    dist.all_reduce(told)
    for p in model.parameters():
        p.grad *= dist.get_world_size() / told[1]
    optimizer.step()
    return (told[0] / told[1]).item()


def _one_no_sync(model, optimizer, microbatches):
    model.zero_grad(set_to_none=False)
    total, (*first, last) = _count(microbatches), microbatches
    with model.no_sync():
        for x, y in first:
            _loss(model, x, y, total).backward()
    _loss(model, *last, total).backward()
    optimizer.step()


def _smaller_pieces(model, optimizer, microbatches):
    """Even less memory: one sample at a time, all but those of the last microbatch."""
    total, (*first, last) = _count(microbatches), microbatches
    pieces = [pair for x, y in first for pair in zip(x.split(1), y.split(1), strict=True)]
    _accumulate(count=lambda _: total)(model, optimizer, [*pieces, last])


def _bare_module_first(model, optimizer, microbatches):
    """Outside of DDP's forward a backward sends nothing, as in no_sync."""
    total = _count(microbatches)
    optimizer.zero_grad()
    for k, (x, y) in enumerate(microbatches, 1):
        _loss(model if k == len(microbatches) else model.module, x, y, total).backward()
    optimizer.step()


def _gathers_counts(model, optimizer, microbatches):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, _local(microbatches))
    _accumulate(count=lambda _: sum(found))(model, optimizer, microbatches)


def _in_a_closure(model, optimizer, microbatches):
    """step() calls it before it changes a weight."""

    def closure():
        _accumulate(end=_nothing)(model, optimizer, microbatches)

    optimizer.step(closure)


def _one_all_reduce_for_all(model, optimizer, microbatches):
    """Without DDP's: a flat tensor of all gradients and the count."""
    parameters, count = list(model.module.parameters()), torch.tensor([float(_local(microbatches))]).double()
    sums = [torch.zeros_like(p) for p in parameters]
    for x, y in microbatches:
        found = torch.autograd.grad(F.cross_entropy(model.module(x), y, reduction="sum"), parameters)
        sums = [total + part for total, part in zip(sums, found, strict=True)]
    flat = torch.cat([*(total.flatten() for total in sums), count])
    dist.all_reduce(flat)
    torch.nn.utils.vector_to_parameters(flat[:-1] / flat[-1], sums)
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient
    optimizer.step()


ACCUMULATE_RIGHT = {
    "a closure": _in_a_closure,
    "one all-reduce for all": _one_all_reduce_for_all,
    "as the solution": _accumulate(),
    "one no_sync": _one_no_sync,
    "divides the gradients": _scales_gradients,
    "gathers objects": _gathers_counts,
    "smaller pieces": _smaller_pieces,
    "the bare module first": _bare_module_first,
}


def _scale_of(wanted, gradient):
    return wanted.abs().mean()


def _mean(parts):
    return sum(parts) / len(parts)


def _onebit(
    key=lambda bucket: tuple(bucket.parameters()),
    keep=lambda wanted, gradient, sent: wanted - sent,
    scale=_scale_of,
    combine=_mean,
    finish=lambda future, decode: future.then(decode),
    old=lambda state, key: state.get(key, 0),
    plus=lambda wanted: wanted >= 0,
):
    """The solution with some part exchanged. Without arguments it is right."""

    def onebit_hook(state, bucket):
        gradient, n = bucket.buffer(), bucket.buffer().numel()
        wanted = gradient + old(state, key(bucket))
        payload = pack(plus(wanted), scale(wanted, gradient))
        state[key(bucket)] = keep(wanted, gradient.clone(), unpack(payload, [n], wanted.dtype))
        everyones = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
        work = dist.all_gather(everyones, payload, async_op=True)

        def decode(_):
            gradient.copy_(combine([unpack(part, [n], gradient.dtype) for part in everyones]))
            return gradient

        return finish(work.get_future(), decode)

    return onebit_hook


def _vote(parts):
    scales = sum(part.abs() for part in parts) / len(parts)
    return torch.where(sum(part.sign() for part in parts) >= 0, scales, -scales)


def _own_scale(parts):
    return parts[dist.get_rank()].abs() * sum(part.sign() for part in parts) / len(parts)


def _own_first(parts):
    first = dist.get_rank()
    return sum(parts[first:] + parts[:first]) / len(parts)


def _waits(future, decode):
    future.wait()
    done = torch.futures.Future()
    done.set_result(decode(future))
    return done


def _tensor(future, decode):
    future.wait()
    return decode(future)


def _waits_at_first(state, bucket):
    """In two steps of four; this hook is called twice a step, or less."""
    state["calls"] = state.get("calls", 0) + 1
    return (_onebit(finish=_waits) if state["calls"] <= 2 else _onebit())(state, bucket)


def _decodes_before(fill):
    """What stands in `everyones` by chance: these bytes."""

    def onebit_hook(state, bucket):
        gradient, n, key = bucket.buffer(), bucket.buffer().numel(), tuple(bucket.parameters())
        wanted = gradient + state.get(key, 0)
        payload = pack(wanted >= 0, wanted.abs().mean())
        state[key] = wanted - unpack(payload, [n], wanted.dtype)
        everyones = [torch.full_like(payload, fill) for _ in range(dist.get_world_size())]
        early = _mean([unpack(part, [n], gradient.dtype) for part in everyones])
        return dist.all_gather(everyones, payload, async_op=True).get_future().then(lambda _: early)

    return onebit_hook


def _by_broadcasts(packed):
    """A broadcast from each rank: of bits, or of floats."""

    def onebit_hook(state, bucket):
        gradient, n, key = bucket.buffer(), bucket.buffer().numel(), tuple(bucket.parameters())
        wanted = gradient + state.get(key, 0)
        payload = pack(wanted >= 0, wanted.abs().mean())
        sent = unpack(payload, [n], wanted.dtype)
        state[key] = wanted - sent
        mine = payload if packed else sent
        parts = [mine.clone() for _ in range(dist.get_world_size())]
        works = [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(parts)]

        def decode(_):
            return _mean([unpack(part, [n], gradient.dtype) if packed else part for part in parts])

        return torch.futures.collect_all([work.get_future() for work in works]).then(decode)

    return onebit_hook


def _averages_the_residual(state, bucket):
    gradient, n, key = bucket.buffer(), bucket.buffer().numel(), tuple(bucket.parameters())
    wanted = gradient + state.get(key, 0)
    payload = pack(wanted >= 0, wanted.abs().mean())
    everyones = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    work = dist.all_gather(everyones, payload, async_op=True)

    def decode(_):
        average = _mean([unpack(part, [n], gradient.dtype) for part in everyones])
        state[key] = wanted - average
        return gradient.copy_(average)

    return work.get_future().then(decode)


def _floats(state, bucket):
    gradient, key = bucket.buffer(), tuple(bucket.parameters())
    wanted = gradient + state.get(key, 0)
    sent = torch.where(wanted >= 0, 1.0, -1.0).double() * wanted.abs().mean()
    state[key] = wanted - sent
    parts = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, sent, async_op=True)
    return work.get_future().then(lambda _: gradient.copy_(_mean(parts)))


def _bytes(state, bucket):
    gradient, key = bucket.buffer(), tuple(bucket.parameters())
    wanted = gradient + state.get(key, 0)
    scale, signs = wanted.abs().mean().view(1), (wanted >= 0).to(torch.uint8)
    state[key] = wanted - torch.where(wanted >= 0, scale, -scale)
    scales, all_signs = [[torch.empty_like(t) for _ in range(dist.get_world_size())] for t in (scale, signs)]
    dist.all_gather(scales, scale)
    dist.all_gather(all_signs, signs)
    done = torch.futures.Future()
    done.set_result(gradient.copy_(_mean([s * (2.0 * b - 1) for s, b in zip(scales, all_signs, strict=True)])))
    return done


def _stub_hook(state, bucket):
    raise NotImplementedError


def _own_name_for_the_buffer(state, bucket):
    wanted, n, key = bucket.buffer(), bucket.buffer().numel(), tuple(bucket.parameters())
    if key in state:
        wanted += state[key]
    payload = pack(wanted >= 0, wanted.abs().mean())
    wanted -= unpack(payload, [n], wanted.dtype)
    state[key] = wanted
    everyones = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    work = dist.all_gather(everyones, payload, async_op=True)
    return work.get_future().then(lambda _: wanted.copy_(_mean([unpack(p, [n], wanted.dtype) for p in everyones])))


def _exact(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())


def _elsewhere(state, bucket):
    return _onebit()(_LEFT, bucket)


def _signs(state, bucket):
    """torch.sign of 0 is 0."""
    gradient, key = bucket.buffer(), tuple(bucket.parameters())
    wanted = gradient + state.get(key, 0)
    sent = wanted.sign() * wanted.abs().mean()
    state[key] = wanted - sent
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda _: gradient.copy_(sent / dist.get_world_size()))


def _scales(state, bucket, dtype=torch.float64, each=True):
    """A scale for each parameter; or one, and everything in another dtype."""
    gradient, key = bucket.buffer().to(dtype), tuple(bucket.parameters())
    sizes = [p.numel() for p in bucket.parameters()] if each else [len(gradient)]
    wanted = gradient + state.get(key, 0)
    payload = pack(wanted >= 0, torch.stack([part.abs().mean() for part in wanted.split(sizes)]))
    state[key] = wanted - unpack(payload, sizes, dtype)
    everyones = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    future = dist.all_gather(everyones, payload, async_op=True).get_future()
    return future.then(lambda _: bucket.buffer().copy_(_mean([unpack(part, sizes, dtype) for part in everyones])))


def _in_two_messages(state, bucket, both=lambda first, second: second.get_future()):
    """The bits and the scale, each in an all-gather of its own."""
    gradient, n, key = bucket.buffer(), bucket.buffer().numel(), tuple(bucket.parameters())
    wanted = gradient + state.get(key, 0)
    payload = pack(wanted >= 0, wanted.abs().mean())
    state[key] = wanted - unpack(payload, [n], wanted.dtype)
    halves = [half.clone() for half in payload.split([len(payload) - 8, 8])]
    found = [[torch.empty_like(half) for _ in range(dist.get_world_size())] for half in halves]
    works = [dist.all_gather(f, half, async_op=True) for f, half in zip(found, halves, strict=True)]

    def decode(_):
        parts = [torch.cat(pair) for pair in zip(*found, strict=True)]
        return gradient.copy_(_mean([unpack(part, [n], gradient.dtype) for part in parts]))

    return both(*works).then(decode)


def _two_futures(state, bucket):
    def both(*works):
        return torch.futures.collect_all([work.get_future() for work in works])

    return _in_two_messages(state, bucket, both)


_LEFT = {}


def _waits_in_decode(state, bucket):
    payload = pack(bucket.buffer() >= 0, bucket.buffer().abs().mean())
    everyones = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    work = dist.all_gather(everyones, payload, async_op=True)

    def decode(_):
        work.wait()
        return _mean([unpack(part, [bucket.buffer().numel()], torch.float64) for part in everyones])

    return work.get_future().then(decode)


HOOK_WRONG = {
    "stub": _stub_hook,
    "not_compressed": _exact,
    "keeps_the_buffer": _own_name_for_the_buffer,
    "keeps_sent": _onebit(keep=lambda wanted, gradient, sent: sent),
    "wrong_sign": _onebit(keep=lambda wanted, gradient, sent: sent - wanted),
    "scale_is_rms": _onebit(scale=lambda wanted, gradient: wanted.square().mean().sqrt()),
    "future_of_no_tensor": _onebit(finish=lambda future, decode: future),
    "no_feedback": _onebit(old=lambda state, key: 0),
    "residual_overwritten": _onebit(key=lambda bucket: "residual"),
    "keyed_by_index": _onebit(
        key=lambda bucket: bucket.index(),
    ),
    "keeps_all": _onebit(keep=lambda wanted, gradient, sent: wanted),
    "forgets_old_residual": _onebit(keep=lambda wanted, gradient, sent: gradient - sent),
    "residual_of_average": _averages_the_residual,
    "scale_of_gradient": _onebit(scale=lambda wanted, gradient: gradient.abs().mean()),
    "scale_is_max": _onebit(scale=lambda wanted, gradient: wanted.abs().max()),
    "scale_is_norm": _onebit(scale=lambda wanted, gradient: wanted.norm()),
    "forgets_average": _onebit(combine=sum),
    "averages_twice": _onebit(combine=lambda parts: _mean(parts) / len(parts)),
    "majority_vote": _onebit(combine=_vote),
    "own_scale": _onebit(combine=_own_scale),
    "never_exchanges": _onebit(combine=lambda parts: parts[dist.get_rank()]),
    "different_order": _onebit(combine=_own_first),
    "sends_floats": _floats,
    "byte_for_each_sign": _bytes,
    "returns_no_future": _onebit(finish=_tensor),
    "loses_a_handle": _in_two_messages,
    "zero_is_minus": _onebit(plus=lambda wanted: wanted > 0),
    "zero_is_nothing": _signs,
    "kept_elsewhere": _elsewhere,
    "scale_of_each_parameter": _scales,
    "lower_precision": lambda state, bucket: _scales(state, bucket, torch.float32, each=False),
    "waits_in_hook": _waits_at_first,
    "read_too_early": _decodes_before(0),
    "waits_in_decode": _waits_in_decode,
}


def _by_parameter(state, bucket):
    """What is left over follows each parameter into another bucket."""
    gradient, sizes = bucket.buffer(), [p.numel() for p in bucket.parameters()]
    wanted = gradient + torch.cat([state.get(p, torch.zeros(p.numel()).double()) for p in bucket.parameters()])
    payload = pack(wanted >= 0, wanted.abs().mean())
    left = wanted - unpack(payload, [sum(sizes)], torch.float64)
    state.update(zip(bucket.parameters(), left.split(sizes), strict=True))
    size = dist.get_world_size()
    found = payload.new_empty(size * len(payload))
    future = dist.all_gather_single(found, payload, async_op=True).get_future()
    return future.then(lambda _: sum(unpack(p, [sum(sizes)], torch.float64) for p in found.chunk(size)) / size)


def _another_tensor(state, bucket):
    """DDP takes what the Future holds, wherever it stands."""
    gradient, n, key = bucket.buffer(), bucket.buffer().numel(), tuple(bucket.parameters())
    wanted = gradient + state.get(key, 0)
    payload = pack(wanted >= 0, wanted.abs().mean())
    state[key] = wanted - unpack(payload, [n], wanted.dtype)
    everyones = [torch.empty_like(payload) for _ in range(dist.get_world_size())]
    future = dist.all_gather(everyones, payload, async_op=True).get_future()
    return future.then(lambda _: _mean([unpack(part, [n], gradient.dtype) for part in everyones]))


def other_names(s, b):
    """Right, but for the names of its parameters, by which DDP asks for the bucket."""
    return _onebit()(s, b)


HOOK_AGAIN = [
    ("keyed_by_index", _onebit(key=lambda bucket: (bucket.index(), *(p.shape for p in bucket.parameters())))),
    ("keyed_by_index", _onebit(key=lambda bucket: bucket.parameters()[0])),
    ("read_too_early", _decodes_before(255)),
    ("sends_floats", _by_broadcasts(packed=False)),
]
HOOK_RIGHT = {
    "broadcasts of bits": _by_broadcasts(packed=True),
    "as the solution": _onebit(),
    "by parameter": _by_parameter,
    "another tensor": _another_tensor,
    "two messages": _two_futures,
    "ids": _onebit(key=lambda bucket: tuple(id(p) for p in bucket.parameters())),
}
