"""Wrong and right answers to exercise 03. The name of a wrong answer is the verdict that it must get."""

import os
import time

import torch
import torch.distributed as dist


def _me():
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, size, (rank + 1) % size, (rank - 1) % size


def _swap(out, right, into, left):
    sending = dist.isend(out, right)
    dist.irecv(into, left).wait()
    sending.wait()


def _ring(
    cut=torch.tensor_split,
    send1=lambda r, s, n: r - s,
    add1=lambda r, s, n: r - s - 1,
    send2=lambda r, s, n: r + 1 - s,
    put2=lambda r, s, n: r - s,
    steps=(-1, -1),
    combine=torch.Tensor.add_,
    store=torch.Tensor.copy_,
    swap=_swap,
    divide=lambda tensor, op, n: tensor.div_(n) if op == "mean" else None,
    room=lambda chunks, into: torch.empty_like(into),
):
    """A ring with some part exchanged. Without arguments it is right."""

    def answer(tensor, op="sum"):
        r, n, right, left = _me()
        chunks = list(cut(tensor, n))
        for s in range(n + steps[0]):
            into = chunks[add1(r, s, n) % n]
            buffer = room(chunks, into)
            swap(chunks[send1(r, s, n) % n], right, buffer, left)
            combine(into, buffer)
        for s in range(n + steps[1]):
            into = chunks[put2(r, s, n) % n]
            buffer = room(chunks, into)
            swap(chunks[send2(r, s, n) % n], right, buffer, left)
            store(into, buffer)
        divide(tensor, op, n)

    return answer


def _stub(tensor, op="sum"):
    raise NotImplementedError


def _sends_first(out, right, into, left):
    dist.send(out, right)
    dist.recv(into, left)


def _waits_for_send_first(out, right, into, left):
    dist.isend(out, right).wait()
    dist.recv(into, left)


def _receives_first(out, right, into, left):
    dist.recv(into, left)
    dist.send(out, right)


def _from_the_right(out, right, into, left):
    sending = dist.isend(out, right)
    dist.recv(into, right)
    sending.wait()


def _one_too_far(tensor, op="sum"):
    r, n, _, _ = _me()
    chunks = list(torch.tensor_split(tensor, n))
    for s in range(n - 1):
        buffer = torch.empty_like(chunks[(r - s - 1) % n])
        _swap(chunks[(r - s) % n], (r + 2) % n, buffer, (r - 2) % n)
        chunks[(r - s - 1) % n] += buffer


def _no_modulo(tensor, op="sum"):
    r, n, _, _ = _me()
    chunks = list(torch.tensor_split(tensor, n))
    if n > 1:
        _swap(chunks[r], r + 1, torch.empty_like(chunks[r - 1]), r - 1)


def _shifted_tags(out, right, into, left):
    sending = dist.isend(out, right, tag=dist.get_rank())
    dist.recv(into, left, tag=dist.get_rank())
    sending.wait()


def _even_ranks_the_other_way(out, right, into, left):
    _swap(out, *((right, into, left) if dist.get_rank() % 2 else (left, into, right)))


def _first_half(add):
    """A reduce-scatter that combines by add(chunks, i, arrived); the all-gather is right."""

    def answer(tensor, op="sum"):
        r, n, right, left = _me()
        chunks = list(torch.tensor_split(tensor, n))
        for s in range(n - 1):
            buffer = torch.empty_like(chunks[(r - s - 1) % n])
            _swap(chunks[(r - s) % n], right, buffer, left)
            add(chunks, (r - s - 1) % n, buffer)
        for s in range(n - 1):
            _swap(chunks[(r + 1 - s) % n], right, chunks[(r - s) % n], left)
        if op == "mean":
            tensor /= n

    return answer


def _rebinds_a_chunk(chunks, i, arrived):
    chunks[i] = chunks[i] + arrived


def _rebinds_a_name(chunks, i, arrived):
    mine = chunks[i]
    mine = mine + arrived


def _rebinds_in_all_gather(tensor, op="sum"):
    r, n, right, left = _me()
    chunks = list(torch.tensor_split(tensor, n))
    for s in range(n - 1):
        buffer = torch.empty_like(chunks[(r - s - 1) % n])
        _swap(chunks[(r - s) % n], right, buffer, left)
        chunks[(r - s - 1) % n] += buffer
    for s in range(n - 1):
        buffer = torch.empty_like(chunks[(r - s) % n])
        _swap(chunks[(r + 1 - s) % n], right, buffer, left)
        chunks[(r - s) % n] = buffer


def _only_first_phase(tensor, op="sum"):
    _ring(steps=(-1, -dist.get_world_size()))(tensor, op)


def _forgets_its_copy(tensor, op="sum"):
    _ring()(tensor.clone(), op)


def _divides_in_each_step(tensor, op="sum"):
    n = dist.get_world_size()

    def add(chunks, i, arrived):
        chunks[i] += arrived
        if op == "mean":
            chunks[i] /= n

    _first_half(add)(tensor, "sum")


def _divides_a_new_tensor(tensor, op="sum"):
    _ring()(tensor, "sum")
    if op == "mean":
        tensor = tensor / dist.get_world_size()


def _rounds_the_mean(tensor, op="sum"):
    _ring()(tensor, "sum")
    if op == "mean":
        tensor.copy_(tensor // dist.get_world_size())


def _in_float32(tensor, op="sum"):
    copy = tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor
    _ring()(copy, op)
    tensor.copy_(copy)


def _padded_with_float32(tensor, op="sum"):
    n = dist.get_world_size()
    room = torch.zeros(-(-len(tensor) // n) * n)
    room[: len(tensor)] = tensor
    _ring()(room, op)
    tensor[:] = room[: len(tensor)]


def _in_half(tensor, op="sum"):
    copy = tensor.half()
    _ring()(copy, op)
    tensor.copy_(copy)


def _destroys(tensor, op="sum"):
    _ring()(tensor, op)
    dist.destroy_process_group()


def _fails_on_rank_2(tensor, op="sum"):
    if dist.get_rank() == 2:
        raise ValueError("no rank two")
    _ring()(tensor, op)


def _fails_but_for_two(tensor, op="sum"):
    if dist.get_world_size() > 2:
        return [][dist.get_rank()]
    return _ring()(tensor, op)


def _early(tensor, op="sum"):
    if dist.get_rank():
        _ring()(tensor, op)


def _third_call_wrong(tensor, op="sum"):
    _LOST.append(None)
    _ring()(tensor, op)
    if _LOST.count(None) > 3 and len(tensor):
        tensor[0] += 1


def _returns_a_copy(tensor, op="sum"):
    result = tensor.clone()
    _ring()(result, op)
    return result


def _wrong_handle(out, right, into, left):
    sending = dist.isend(out, right)
    dist.irecv(into, left)
    sending.wait()
    time.sleep(0.02)  # mostly long enough, so that the values alone would not tell


def _send_not_waited(out, right, into, left):
    _LOST.append(dist.isend(out, right))  # kept alive, but never waited for
    dist.recv(into, left)


_LOST = []


def _adds_before_wait(tensor, op="sum"):
    r, n, right, left = _me()
    chunks = list(torch.tensor_split(tensor, n))
    for s in range(n - 1):
        into = chunks[(r - s - 1) % n]
        buffer = torch.empty_like(into)
        sending, receiving = dist.isend(chunks[(r - s) % n], right), dist.irecv(buffer, left)
        into += buffer
        receiving.wait()
        sending.wait()
    for s in range(n - 1):
        _swap(chunks[(r + 1 - s) % n], right, chunks[(r - s) % n], left)


def _buffer_in_flight(tensor, op="sum"):
    r, n, right, left = _me()
    chunks = list(torch.tensor_split(tensor, n))
    buffer = torch.empty(len(chunks[0]), dtype=tensor.dtype)
    sending = None
    for s in range(n - 1):
        out, into = chunks[(r - s) % n], chunks[(r - s - 1) % n]
        buffer[: len(out)] = out
        again = dist.isend(buffer[: len(out)], right)
        came = torch.empty_like(into)
        dist.irecv(came, left).wait()
        into += came
        buffer[: len(into)] = into  # the next step's load, while this one may still be on its way
        again.wait()
    for s in range(n - 1):
        _swap(chunks[(r + 1 - s) % n], right, chunks[(r - s) % n], left)
    if op == "mean":
        tensor /= n
    return sending


def _in_and_out_of_one_buffer(tensor, op="sum"):
    r, n, right, left = _me()
    chunks = list(torch.tensor_split(tensor, n))
    for s in range(n - 1):
        buffer = chunks[(r - s) % n].clone()
        if len(chunks[0]) == len(chunks[-1]):
            _swap(buffer, right, buffer, left)
            chunks[(r - s - 1) % n] += buffer
    for s in range(n - 1):
        _swap(chunks[(r + 1 - s) % n], right, chunks[(r - s) % n], left)


def _two_ranks(tensor, op="sum"):
    r, n, right, left = _me()
    if n == 1:
        return
    mine, other = list(torch.tensor_split(tensor, 2))[:: 1 - 2 * (r % 2)]
    buffer = torch.empty_like(mine)
    _swap(other, right, buffer, left)
    mine += buffer
    _swap(mine, right, other, left)
    if op == "mean":
        tensor /= n


def _partner(tensor, op="sum"):
    """Halving and doubling with a partner, as if every number of ranks were a power of two."""
    _r, n, _, _ = _me()
    if n == 3:
        _stops_short(tensor, op)
        return
    _ring()(tensor, op)


def _stops_short(tensor, op):
    r, n, right, left = _me()
    steps = n.bit_length() - 1
    chunks = list(torch.tensor_split(tensor, n))
    for s in range(steps):
        buffer = torch.empty_like(chunks[(r - s - 1) % n])
        _swap(chunks[(r - s) % n], right, buffer, left)
        chunks[(r - s - 1) % n] += buffer


def _whole(tensor, op="sum"):
    """Pass everything on, keep a list, add in the order of the ranks: the same bits everywhere."""
    r, n, right, left = _me()
    parts = {r: tensor.clone()}
    for s in range(n - 1):
        parts[(r - s - 1) % n] = torch.empty_like(tensor)
        _swap(parts[(r - s) % n], right, parts[(r - s - 1) % n], left)
    tensor.copy_(parts[0])
    for k in range(1, n):
        tensor += parts[k]
    if op == "mean":
        tensor /= n


def _own_order(tensor, op="sum"):
    """Pass everything on and add at once, as in several popular listings."""
    _r, n, right, left = _me()
    travelling, into = tensor.clone(), torch.empty_like(tensor)
    for _ in range(n - 1):
        _swap(travelling, right, into, left)
        tensor += into
        travelling, into = into, travelling
    if op == "mean":
        tensor /= n


def _mean_in_two_ways(tensor, op="sum"):
    r, n, _, _ = _me()
    _ring()(tensor, "sum")
    if op == "mean":
        tensor.div_(n) if r % 2 else tensor.mul_(1 / n)


def _to_root(tensor, op="sum"):
    r, n, _right, _left = _me()
    if r == 0:
        buffer = torch.empty_like(tensor)
        for k in range(1, n):
            dist.recv(buffer, k)
            tensor += buffer
        for k in range(1, n):
            dist.send(tensor, k)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
    if op == "mean":
        tensor /= n


def _along_a_chain(tensor, op="sum"):
    """Neighbours only, but all of it through each link, twice: up the line and down again."""
    r, n, _, _ = _me()
    if r:
        buffer = torch.empty_like(tensor)
        dist.recv(buffer, r - 1)
        tensor += buffer
    if r < n - 1:
        dist.send(tensor, r + 1)
        dist.recv(tensor, r + 1)
    if r:
        dist.send(tensor, r - 1)
    if op == "mean":
        tensor /= n


def _everybody_owns_one(tensor, op="sum"):
    """Each chunk straight to its owner and straight back: the right bytes, but not a ring."""
    r, n, _, _ = _me()
    chunks = list(torch.tensor_split(tensor, n))
    others = [(r + k) % n for k in range(1, n)]
    came = {k: torch.empty_like(chunks[r]) for k in others}
    handles = [dist.isend(chunks[k], k) for k in others] + [dist.irecv(came[k], k) for k in others]
    for handle in handles:
        handle.wait()
    for k in sorted(came):
        chunks[r] += came[k]
    handles = [dist.isend(chunks[r], k) for k in others] + [dist.irecv(chunks[k], k) for k in others]
    for handle in handles:
        handle.wait()
    if op == "mean":
        tensor /= n


def _crumbs(out, right, into, left):
    """Three elements a message."""
    handles = [dist.irecv(piece, left) for piece in filter(len, into.split(3))]
    for piece in filter(len, out.split(3)):
        dist.isend(piece, right).wait()
    for handle in handles:
        handle.wait()


def _ready_made(tensor, op="sum"):
    dist.all_reduce(tensor)
    if op == "mean":
        tensor /= dist.get_world_size()


def _through_floats(tensor, op="sum"):
    if tensor.is_floating_point():
        _ring()(tensor, op)
    else:
        copy = tensor.double()
        _ring()(copy, op)
        tensor.copy_(copy)


def _fails_alone(tensor, op="sum"):
    _r, n, right, _left = _me()
    dist.barrier()
    chunks = list(torch.tensor_split(tensor, n))
    if n == 1:
        dist.send(chunks[0], right)
    _ring()(tensor, op)


def _floor_cut(tensor, n):
    length = len(tensor) // n
    return [tensor[k * length : (k + 1) * length] for k in range(n)]


def _no_op(tensor):
    _ring()(tensor)


def _leaves_out(tensor, op):
    raise KeyError(op)


WRONG = {
    "stub": _stub,
    "ready_made": _ready_made,
    "no_op": _no_op,
    "no_modulo": _no_modulo,
    "sends_first": _ring(swap=_sends_first),
    "receives_first": _ring(swap=_receives_first),
    "wrong_neighbour": _one_too_far,
    "wrong_chunk_reduce_scatter": _ring(send1=lambda r, s, n: r + s),
    "wrong_chunk_all_gather": _ring(send2=lambda r, s, n: r - s),
    "off_by_one_step": _ring(steps=(0, -1)),
    "adds_in_second_phase": _ring(store=torch.Tensor.add_),
    "replaces_instead_of_adds": _ring(combine=torch.Tensor.copy_),
    "forgets_remainder": _ring(cut=_floor_cut),
    "chunk_size_of_rank_0": _ring(room=lambda chunks, into: torch.empty_like(chunks[0])),
    "fewer_chunks": _ring(cut=torch.chunk),
    "buffer_dtype": _ring(room=lambda chunks, into: torch.empty(len(into))),
    "averages_twice": _ring(divide=lambda tensor, op, n: tensor.div_(n * n) if op == "mean" else None),
    "forgets_average": _ring(divide=lambda tensor, op, n: None),
    "averages_sums": _ring(divide=lambda tensor, op, n: tensor.copy_(tensor / n)),
    "different_order": _own_order,
    "sends_whole_tensor": _whole,
    "through_one_rank": _to_root,
    "not_a_ring": _everybody_owns_one,
    "one_message_per_element": _ring(swap=_crumbs),
    "not_in_place": _returns_a_copy,
    "wrong_handle": _ring(swap=_wrong_handle),
    "send_not_waited": _ring(swap=_send_not_waited),
    "read_before_wait": _adds_before_wait,
    "buffer_in_flight": _buffer_in_flight,
    "two_ranks_only": _two_ranks,
    "power_of_two_only": _partner,
    "loses_integers": _through_floats,
    "fails_alone": _fails_alone,
    "wrong_tag": _ring(swap=_shifted_tags),
    "ends_do_not_meet": _ring(swap=_even_ranks_the_other_way),
    "makes_new_tensors": _first_half(_rebinds_a_chunk),
    "only_reduce_scatter": _only_first_phase,
    "copy_not_copied_back": _forgets_its_copy,
    "wrong_divisor": _ring(divide=lambda tensor, op, n: tensor.div_(2) if op == "mean" else None),
    "divides_each_step": _divides_in_each_step,
    "wrong_mean": _rounds_the_mean,
    "loses_precision": _in_float32,
    "destroys_group": _destroys,
}
AGAIN = [  # the same mistakes in other words
    ("sends_first", _ring(swap=_waits_for_send_first)),
    ("wrong_neighbour", _ring(swap=_from_the_right)),
    ("wrong_chunk_reduce_scatter", _ring(add1=lambda r, s, n: r - s)),
    ("wrong_chunk_reduce_scatter", _ring(send1=lambda r, s, n: r - s - 1)),
    ("wrong_chunk_reduce_scatter", _ring(add1=lambda r, s, n: r + s + 1)),
    ("wrong_chunk_all_gather", _ring(put2=lambda r, s, n: r + 1 - s)),
    ("wrong_chunk_all_gather", _ring(send2=lambda r, s, n: r + 1 + s, put2=lambda r, s, n: r + s)),
    ("off_by_one_step", _ring(steps=(-1, -2))),
    ("off_by_one_step", _ring(steps=(-1, 0))),
    ("off_by_one_step", _ring(steps=(-2, -2))),
    ("buffer_in_flight", _in_and_out_of_one_buffer),
    ("different_order", _mean_in_two_ways),
    ("makes_new_tensors", _first_half(_rebinds_a_name)),
    ("makes_new_tensors", _rebinds_in_all_gather),
    ("wrong_divisor", _ring(divide=lambda tensor, op, n: tensor.div_(4) if op == "mean" else None)),
    ("forgets_average", _divides_a_new_tensor),
    ("loses_precision", _padded_with_float32),
    ("loses_precision", _in_half),
]
UNNAMED = {  # each with a text that its verdict holds, and then texts that would be false
    "along a chain": (_along_a_chain, "the ring needs 2(N-1)/N"),
    "does nothing": (lambda tensor, op="sum": None, "must be", "copy", "2 ranks only"),
    "raises": (_leaves_out, "raised TypeError: _leaves_out() missing"),
    "one rank raises": (_fails_on_rank_2, "rank 2 raised ValueError: no rank two", "2 ranks only", "Rank"),
    "all raise, but for two ranks": (_fails_but_for_two, "raised IndexError", "2 ranks only", "torch.chunk"),
    "returns early": (_early, "but rank 0 has finished this case without", "circle", "in_rank.py"),
    "wrong from some call on": (_third_call_wrong, "must be", "2 ranks only", "power of two", "digits"),
}


def _batched(out, right, into, left):
    ops = [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, into, left)]
    for handle in dist.batch_isend_irecv(ops):
        handle.wait()


def _recursive(tensor, op="sum"):
    r, n, right, left = _me()
    chunks = tensor.tensor_split(n)

    def step(s):
        if s == 2 * (n - 1):
            return
        out, into = chunks[(r - s) % n], chunks[(r - s - 1) % n]
        if s >= n - 1:
            out, into = chunks[(r + 1 - (s - n + 1)) % n], chunks[(r - (s - n + 1)) % n]
        buffer = torch.zeros_like(into)
        _swap(out, right, buffer, left)
        into.copy_(into + buffer if s < n - 1 else buffer)
        step(s + 1)

    step(0)
    if op == "mean":
        tensor.div_(n)
    return tensor


def _to_the_left(tensor, op="sum"):
    r, n, right, left = _me()
    chunks = list(torch.tensor_split(tensor, n))
    for s in range(n - 1):
        buffer = torch.empty_like(chunks[(r + s + 1) % n])
        _swap(chunks[(r + s) % n], left, buffer, right)
        chunks[(r + s + 1) % n] += buffer
    for s in range(n - 1):
        _swap(chunks[(r - 1 + s) % n], left, chunks[(r + s) % n], right)
    if op == "mean":
        tensor /= n


def _both_ways(tensor, op="sum"):
    half = len(tensor) // 2
    _ring()(tensor[:half], op)
    _to_the_left(tensor[half:], op)


def _pipelined(tensor, op="sum", piece=50):
    """Each chunk in pieces: the next piece is on its way while the last one is added."""
    r, n, right, left = _me()
    chunks = list(torch.tensor_split(tensor, n))
    for s in range(2 * (n - 1)):
        adds = s < n - 1
        out = chunks[(r - s) % n] if adds else chunks[(r + n - s) % n]
        into = chunks[(r - s - 1) % n] if adds else chunks[(r - (s - n + 1)) % n]
        buffer = torch.empty_like(into)
        receives = [
            (dist.irecv(b, left), a, b) for a, b in zip(into.split(piece), buffer.split(piece), strict=True) if len(b)
        ]
        sends = [dist.isend(a, right) for a in out.split(piece) if len(a)]
        for handle, a, b in receives:
            handle.wait()
            a.add_(b) if adds else a.copy_(b)
        for handle in sends:
            handle.wait()
    if op == "mean":
        tensor /= n


def _owner_is_rank(tensor, op="sum"):
    """Shifted by one: rank r finishes chunk r, divides it there, and sends the finished one around."""
    r, n, right, left = _me()
    chunks = list(torch.tensor_split(tensor, n))
    for s in range(1, n):
        buffer = torch.empty_like(chunks[(r - s - 1) % n])
        _swap(chunks[(r - s) % n].clone(), right, buffer, left)
        chunks[(r - s - 1) % n] += buffer
    if op == "mean":
        chunks[r] /= n
    for s in range(n - 1):
        _swap(chunks[(r - s) % n], right, chunks[(r - s - 1) % n], left)


def _odd_and_even(out, right, into, left):
    """Blocking calls only: even ranks send first, odd ranks receive first."""
    if dist.get_rank() % 2:
        dist.recv(into, left)
        dist.send(out, right)
    else:
        dist.send(out, right)
        dist.recv(into, left)


def _padded(tensor, op="sum"):
    _r, n, _, _ = _me()
    room = torch.zeros(-(-len(tensor) // n) * n, dtype=tensor.dtype)
    room[: len(tensor)] = tensor
    _ring(cut=lambda t, k: t.view(k, -1))(room, op)
    tensor.copy_(room[: len(tensor)])


def _world_from_environment(tensor, op="sum"):
    r, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    assert (r, n) == (dist.get_rank(), dist.get_world_size())
    _ring()(tensor, op)


def _skips_empty(out, right, into, left):
    handles = [dist.isend(out, right)] if out.numel() else []
    handles += [dist.irecv(into, left)] if into.numel() else []
    for handle in handles:
        handle.wait()


RIGHT = {
    "as the solution": _ring(),
    "batch_isend_irecv": _ring(swap=_batched),
    "recursive": _recursive,
    "to the left": _to_the_left,
    "in both directions": _both_ways,
    "pipelined": _pipelined,
    "rank r owns chunk r": _owner_is_rank,
    "blocking, odd and even": _ring(swap=_odd_and_even),
    "padded": _padded,
    "no empty messages": _ring(swap=_skips_empty),
    "WORLD_SIZE and RANK": _world_from_environment,
    "divides first": _ring(divide=lambda tensor, op, n: tensor.mul_(1 / n) if op == "mean" else None),
}
