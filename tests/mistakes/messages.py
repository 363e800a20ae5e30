"""Wrong and right answers to exercise 02. The name of a wrong answer is the verdict that it must get."""

import os
import time

import torch
import torch.distributed as dist

_LOST = []


def _me():
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, size, (rank + 1) % size, (rank - 1) % size


def _with(talk):
    """A whole answer around the calls talk(tensor, right, buffer, left)."""

    def answer(tensor):
        _, size, right, left = _me()
        if size == 1:
            return tensor.clone()
        buffer = torch.empty_like(tensor)
        talk(tensor, right, buffer, left)
        return buffer

    return answer


def _right(tensor, right, buffer, left):
    sending = dist.isend(tensor, right)
    dist.irecv(buffer, left).wait()
    sending.wait()


def _stub(tensor):
    raise NotImplementedError


def _sends_first(tensor, right, buffer, left):
    dist.send(tensor, right)
    dist.recv(buffer, left)


def _waits_for_send(tensor, right, buffer, left):
    dist.isend(tensor, right).wait()
    dist.recv(buffer, left)


def _receives_first(tensor, right, buffer, left):
    dist.recv(buffer, left)
    dist.send(tensor, right)


def _no_modulo(tensor):
    rank, _, _, left = _me()
    buffer = torch.empty_like(tensor)
    sending = dist.isend(tensor, rank + 1)
    dist.recv(buffer, left)
    sending.wait()
    return buffer


def _left_of_zero(tensor):
    rank, _, right, _ = _me()
    buffer = torch.empty_like(tensor)
    sending = dist.isend(tensor, right)
    dist.recv(buffer, rank - 1)
    sending.wait()
    return buffer


def _same_neighbour(tensor, right, buffer, left):
    sending = dist.isend(tensor, right)
    dist.recv(buffer, right)
    sending.wait()


def _tag_is_rank(tensor, right, buffer, left):
    sending = dist.isend(tensor, right, tag=dist.get_rank())
    dist.recv(buffer, left, tag=dist.get_rank())
    sending.wait()


def _even_ranks_the_other_way(tensor, right, buffer, left):
    _right(tensor, *((right, buffer, left) if dist.get_rank() % 2 else (left, buffer, right)))


def _returns_handle(tensor):
    _, size, right, left = _me()
    if size == 1:
        return tensor
    sending = dist.isend(tensor, right)
    receiving = dist.irecv(torch.empty_like(tensor), left)
    sending.wait()
    return receiving


def _destroys(tensor):
    result = _with(_right)(tensor)
    dist.destroy_process_group()
    return result


def _fails_on_last_rank(tensor):
    if dist.get_rank() == 3:
        raise ZeroDivisionError("no rank three")
    return _with(_right)(tensor)


def _ends_on_last_rank(tensor):
    if dist.get_rank() == 3:
        os._exit(3)
    return _with(_right)(tensor)


def _fails_alone(tensor):
    if dist.get_world_size() == 1:
        raise ValueError("what now?")
    return _with(_right)(tensor)


def _early(tensor):
    return tensor if dist.get_rank() == 0 else _with(_right)(tensor)


def _endless(tensor):
    result = _with(_right)(tensor)
    while dist.get_rank() == 1:
        time.sleep(0.01)  # without it the loop would take a core from other tests
    return result


def _returns_own(tensor):
    buffer = torch.empty_like(tensor)
    if dist.get_world_size() > 1:
        _right(tensor, _me()[2], buffer, _me()[3])
    return tensor


def _returns_nothing(tensor):
    _with(_right)(tensor)


def _in_place(tensor):
    tensor.copy_(_with(_right)(tensor))
    return tensor


def _scribbles(tensor):
    result = _with(_right)(tensor)
    tensor.zero_()
    return result


def _one_tensor_for_both(tensor):
    result = tensor.clone()
    if dist.get_world_size() > 1:
        _right(result, _me()[2], result, _me()[3])
    return result


def _flat(tensor):
    return _with(_right)(tensor.flatten())


def _float_buffer(tensor):
    _, size, right, left = _me()
    if size == 1:
        return tensor.clone()
    buffer = torch.empty(tensor.shape)
    _right(tensor, right, buffer, left)
    return buffer


def _wrong_handle(tensor, right, buffer, left):
    sending = dist.isend(tensor, right)
    dist.irecv(buffer, left)
    sending.wait()
    time.sleep(0.02)  # mostly long enough, so that the values alone would not tell


def _send_not_waited(tensor, right, buffer, left):
    _LOST.append(dist.isend(tensor, right))
    dist.recv(buffer, left)


def _send_dropped(tensor, right, buffer, left):
    dist.isend(tensor, right)
    dist.recv(buffer, left)


def _reads_early(tensor):
    _, size, right, left = _me()
    if size == 1:
        return tensor.clone()
    buffer = torch.empty_like(tensor)
    sending, receiving = dist.isend(tensor, right), dist.irecv(buffer, left)
    result = buffer.clone()
    receiving.wait()
    sending.wait()
    return result


def _open_chain(tensor):
    rank, size, _, _ = _me()
    buffer = tensor.clone()
    if rank < size - 1:
        sending = dist.isend(tensor, rank + 1)
    if rank > 0:
        dist.recv(buffer, rank - 1)
    if rank < size - 1:
        sending.wait()
    return buffer


def _pairs(tensor):
    rank, size, _, _ = _me()
    buffer = tensor.clone()
    if size > 1 and rank ^ 1 < size:
        _right(tensor, rank ^ 1, buffer, rank ^ 1)
    return buffer


def _alone(tensor):
    _, _, right, left = _me()
    buffer = torch.empty_like(tensor)
    _right(tensor, right, buffer, left)
    return buffer


def _gathers(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts[dist.get_rank() - 1]


def _to_all(tensor):
    rank, size, _, left = _me()
    parts = {k: torch.empty_like(tensor) for k in range(size) if k != rank}
    handles = [dist.isend(tensor, k) for k in parts] + [dist.irecv(part, k) for k, part in parts.items()]
    for handle in handles:
        handle.wait()
    return parts.get(left, tensor)


def _long_way(tensor):
    """To the left, N - 1 times."""
    _, size, right, left = _me()
    out = tensor.clone()
    for _ in range(size - 1):
        into = torch.empty_like(out)
        _right(out, left, into, right)
        out = into
    return out


WRONG = {
    "stub": _stub,
    "ready_made": _gathers,
    "no_modulo": _no_modulo,
    "sends_first": _with(_sends_first),
    "receives_first": _with(_receives_first),
    "wrong_neighbour": _with(_same_neighbour),
    "wrong_direction": _with(lambda tensor, right, buffer, left: _right(tensor, left, buffer, right)),
    "returns_own": _returns_own,
    "returns_nothing": _returns_nothing,
    "modifies_input": _in_place,
    "buffer_in_flight": _one_tensor_for_both,
    "wrong_shape": _flat,
    "buffer_dtype": _float_buffer,
    "wrong_handle": _with(_wrong_handle),
    "send_not_waited": _with(_send_not_waited),
    "read_before_wait": _reads_early,
    "open_chain": _open_chain,
    "two_ranks_only": _pairs,
    "fails_alone": _alone,
    "sends_too_much": _to_all,
    "wrong_tag": _with(_tag_is_rank),
    "ends_do_not_meet": _with(_even_ranks_the_other_way),
    "returns_handle": _returns_handle,
    "destroys_group": _destroys,
}
AGAIN = [  # the same mistakes in other words
    ("sends_first", _with(_waits_for_send)),
    ("no_modulo", _left_of_zero),
    ("send_not_waited", _with(_send_dropped)),
    ("modifies_input", _scribbles),
    ("sends_too_much", _long_way),
]
UNNAMED = {  # each with a text that its verdict holds, and then texts that would be false
    "zeros": (torch.zeros_like, "must be", "2 ranks only"),
    "text": (lambda tensor: "done", "returned a value of type str instead of a tensor"),
    "crashes": (lambda tensor: tensor.no_such_thing, "raised AttributeError", "copy of the tensor"),
    "last rank raises": (_fails_on_last_rank, "rank 3 raised ZeroDivisionError: no rank three", "ring is closed"),
    "last rank ends": (_ends_on_last_rank, "rank 3 left with exit code 3", "ring is closed"),
    "raises alone": (_fails_alone, "1 rank, ", "cannot send to itself"),
    "returns early": (_early, "but rank 0 has finished this case without", "circle", "in_rank.py"),
}
ENDLESS = _endless  # on rank 1


def _batched(tensor, right, buffer, left):
    ops = [dist.P2POp(dist.isend, tensor, right), dist.P2POp(dist.irecv, buffer, left)]
    for handle in dist.batch_isend_irecv(ops):
        handle.wait()


def _odd_and_even(tensor, right, buffer, left):
    if dist.get_rank() % 2:
        dist.recv(buffer, left)
        dist.send(tensor, right)
    else:
        dist.send(tensor, right)
        dist.recv(buffer, left)


def _one_breaks_the_circle(tensor, right, buffer, left):
    if dist.get_rank() == 0:
        dist.recv(buffer, left)
        dist.send(tensor, right)
    else:
        dist.send(tensor, right)
        dist.recv(buffer, left)


def _receive_posted_first(tensor, right, buffer, left):
    receiving = dist.irecv(buffer, left)
    dist.send(tensor, right)
    receiving.wait()


def _in_two_halves(tensor, right, buffer, left):
    out, into = tensor.flatten(), buffer.view(-1)
    half = len(out) // 2
    handles = [dist.isend(piece, right) for piece in (out[:half], out[half:])]
    handles += [dist.irecv(piece, left) for piece in (into[:half], into[half:])]
    for handle in handles:
        handle.wait()


def _named_arguments(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return tensor
    group = dist.group.WORLD
    received = torch.zeros(tensor.shape, dtype=tensor.dtype)
    receiving = dist.irecv(received, group=group, group_src=(rank + size - 1) % size, tag=3)
    sending = dist.isend(tensor=tensor, dst=(rank + 1) % size, tag=3)
    sending.wait()
    receiving.wait()
    return received


def _world_from_environment(tensor):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    received = tensor.clone()
    if size > 1:
        _right(tensor, (rank + 1) % size, received, (rank - 1) % size)
    return received


RIGHT = {
    "WORLD_SIZE and RANK": _world_from_environment,
    "as the solution": _with(_right),
    "batch_isend_irecv": _with(_batched),
    "odd and even": _with(_odd_and_even),
    "rank 0 receives first": _with(_one_breaks_the_circle),
    "receive posted first": _with(_receive_posted_first),
    "in two halves": _with(_in_two_halves),
    "named arguments": _named_arguments,
}
