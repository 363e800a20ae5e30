"""Wrong and right answers to exercise 08. The name of a wrong answer is the verdict that it must get."""

import functools
import hashlib
import math
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from course_lib.parallel.ddp import sync_buffers

# shard(seed, epoch, samples, rank, world_size)

_GENERATOR = torch.Generator().manual_seed(0)


def _order(seed, epoch, samples):
    return np.random.default_rng([seed, epoch]).permutation(samples).tolist()


def _stub(*inputs):
    raise NotImplementedError


def _seed_with_rank(seed, epoch, samples, rank, world_size):
    return np.random.default_rng([seed, epoch, rank]).permutation(samples)[rank::world_size]


def _random_part(seed, epoch, samples, rank, world_size):
    return np.random.default_rng([seed, epoch, rank]).permutation(samples)[: math.ceil(samples / world_size)]


def _hash(seed, epoch, samples, rank, world_size):
    generator = torch.Generator().manual_seed(hash(f"{seed}-{epoch}") % 2**32)
    return torch.randperm(samples, generator=generator)[rank::world_size].tolist()


def _hash_of_tuple(seed, epoch, samples, rank, world_size):
    generator = random.Random(hash(("shuffle", seed, epoch)))
    return generator.sample(range(samples), samples)[rank::world_size]


def _unseeded(seed, epoch, samples, rank, world_size):
    return torch.randperm(samples)[rank::world_size]


def _carries_state(seed, epoch, samples, rank, world_size):
    return torch.randperm(samples, generator=_GENERATOR)[rank::world_size]


def _with_replacement(seed, epoch, samples, rank, world_size):
    return np.random.default_rng([seed, epoch]).integers(0, max(samples, 1), samples)[rank::world_size]


def _pads(seed, epoch, samples, rank, world_size):
    order = _order(seed, epoch, samples)
    each = math.ceil(samples / world_size)
    order += (order * world_size)[: each * world_size - samples]
    return order[rank::world_size]


def _pads_in_blocks(seed, epoch, samples, rank, world_size):
    order = _order(seed, epoch, samples)
    each = math.ceil(samples / world_size)
    order += (order * world_size)[: each * world_size - samples]
    return order[rank * each : (rank + 1) * each]


def _drops(seed, epoch, samples, rank, world_size):
    return _order(seed, epoch, samples)[: samples // world_size * world_size][rank::world_size]


def _drops_in_blocks(seed, epoch, samples, rank, world_size):
    each = samples // world_size
    return _order(seed, epoch, samples)[rank * each : (rank + 1) * each]


def _same_shard(seed, epoch, samples, rank, world_size):
    mine = np.arange(rank, samples, world_size)
    return np.random.default_rng([seed, epoch]).permutation(mine)


def _blocks(seed, epoch, samples, rank, world_size):
    return np.array_split(_order(seed, epoch, samples), world_size)[rank].astype(int)


def _shuffles_again(seed, epoch, samples, rank, world_size):
    mine = _order(seed, epoch, samples)[rank::world_size]
    return np.random.default_rng([seed, epoch, rank]).permutation(mine) if world_size > 1 else mine


def _world_in_seed(seed, epoch, samples, rank, world_size):
    return np.random.default_rng([seed, epoch, world_size]).permutation(samples)[rank::world_size]


def _plus(seed, epoch, samples, rank, world_size):
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(samples, generator=generator)[rank::world_size]


def _global_torch(seed, epoch, samples, rank, world_size):
    torch.manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(samples)[rank::world_size]


def _global_numpy(seed, epoch, samples, rank, world_size):
    np.random.seed([seed, epoch])
    return np.random.permutation(samples)[rank::world_size]


def _global_random(seed, epoch, samples, rank, world_size):
    random.seed(f"{seed} {epoch}")
    order = list(range(samples))
    random.shuffle(order)
    return order[rank::world_size]


def _broadcast(seed, epoch, samples, rank, world_size):
    order = torch.tensor(_order(seed, epoch, samples) + [0] * 200)[:200]
    dist.broadcast(order, 0)
    return order[:samples][rank::world_size]


def _nothing(seed, epoch, samples, rank, world_size):
    _order(seed, epoch, samples)[rank::world_size]


def _destroys(seed, epoch, samples, rank, world_size):
    if dist.is_initialized():
        dist.destroy_process_group()
    return _order(seed, epoch, samples)[rank::world_size]


def _rotated(samples, by):
    return [(k + by) % samples for k in range(samples)]


def _starts_elsewhere(seed, epoch, samples, rank, world_size):
    return np.roll(_order(seed, 0, samples), epoch)[rank::world_size]


_ASKED = {}


def _counts_calls(seed, epoch, samples, rank, world_size):
    """A number for each new epoch: another one in a process that was asked in another order."""
    return _order(0, _ASKED.setdefault((seed, epoch), len(_ASKED)), samples)[rank::world_size]


def _to_and_fro(seed, epoch, samples, rank, world_size):
    return _order(seed, epoch // 2, samples)[:: -1 if epoch % 2 else 1][rank::world_size]


def _plus_epoch(seed, epoch, samples, rank, world_size):
    return [(index + epoch) % samples for index in _order(seed, 0, samples)][rank::world_size]


def _sample_0_first(seed, epoch, samples, rank, world_size):
    order = _order(seed, epoch, samples)
    return sorted(order, key=lambda index: index != 0)[rank::world_size]


def _in_blocks_of_8(seed, epoch, samples, rank, world_size):
    generator, order = np.random.default_rng([seed, epoch]), np.arange(samples)
    for at in range(0, samples, 8):
        order[at : at + 8] = generator.permutation(order[at : at + 8])
    return order[rank::world_size]


def _back_and_forth(seed, epoch, samples, rank, size):
    """As teams are chosen: in every second round the last one begins."""
    order = _order(seed, epoch, samples)
    rounds = [order[at : at + size] for at in range(0, samples, size)]
    turned = [cards[::-1] if number % 2 and len(cards) == size else cards for number, cards in enumerate(rounds)]
    return [cards[rank] for cards in turned if rank < len(cards)]


def _half_shuffled(seed, epoch, samples, rank, size):
    order = np.arange(samples)
    order[: samples // 4] = np.random.default_rng([seed, epoch]).permutation(samples // 4)
    return order[rank::size]


WRONG_SHARD = {
    "other_ranks_in_a_round": _back_and_forth,
    "stub": _stub,
    "destroys_group": _destroys,
    "asks_others": _broadcast,
    "returns_nothing": _nothing,
    "hash_of_text": _hash,
    "unseeded": _unseeded,
    "carries_state": _carries_state,
    "with_replacement": _with_replacement,
    "everyone_everything": lambda seed, epoch, samples, rank, world_size: _order(seed, epoch, samples),
    "pads": _pads,
    "drops_tail": _drops,
    "seed_with_rank": _seed_with_rank,
    "same_shard": _same_shard,
    "blocks": _blocks,
    "shuffled_after_the_deal": _shuffles_again,
    "sorted_hands": lambda seed, epoch, samples, rank, size: set(_order(seed, epoch, samples)[rank::size]),
    "wrong_hands": lambda seed, epoch, samples, rank, size: _order(seed, epoch, samples)[size - 1 - rank :: size],
    "asks_the_group": lambda seed, epoch, samples, *_: _order(seed, epoch, samples)[
        dist.get_rank() :: dist.get_world_size()
    ],
    "depends_on_world_size": _world_in_seed,
    "not_shuffled": lambda seed, epoch, samples, rank, world_size: range(rank, samples, world_size),
    "ignores_epoch": lambda seed, epoch, samples, rank, world_size: _order(seed, 0, samples)[rank::world_size],
    "ignores_seed": lambda seed, epoch, samples, rank, world_size: _order(0, epoch, samples)[rank::world_size],
    "epochs_repeat": lambda seed, epoch, samples, rank, size: _order(seed, epoch % 10, samples)[rank::size],
    "seeds_repeat": lambda seed, epoch, samples, rank, size: _order(seed % 256, epoch, samples)[rank::size],
    "seed_plus_epoch": _plus,
    "only_rotated": _starts_elsewhere,
    "only_turned_round": _to_and_fro,
    "only_renumbered": _plus_epoch,
    "fixed_places": _sample_0_first,
    "stays_near": _in_blocks_of_8,
    "changes_global_generator": _global_torch,
}
AGAIN_SHARD = [  # the same mistakes in other words
    ("not_shuffled", _half_shuffled),
    ("carries_state", _counts_calls),
    ("sorted_hands", lambda seed, epoch, samples, rank, size: sorted(_order(seed, epoch, samples)[rank::size])),
    ("seed_plus_epoch", lambda seed, epoch, samples, rank, size: _order(seed ^ epoch, 0, samples)[rank::size]),
    ("seed_plus_epoch", lambda seed, epoch, samples, rank, size: _order(seed * epoch, 0, samples)[rank::size]),
    ("epochs_repeat", lambda seed, epoch, samples, rank, size: _order(seed, epoch % 64, samples)[rank::size]),
    ("seed_plus_epoch", lambda seed, epoch, samples, rank, size: _order(int(f"{seed}{epoch}"), 0, samples)[rank::size]),
    ("seed_plus_epoch", lambda seed, epoch, samples, rank, size: _order(7 * seed + 13 * epoch, 0, samples)[rank::size]),
    ("seeds_repeat", lambda seed, epoch, samples, rank, size: _order(seed % 100, epoch, samples)[rank::size]),
    ("seed_plus_epoch", lambda seed, epoch, samples, rank, size: _order(1000 * seed + epoch, 0, samples)[rank::size]),
    ("seed_plus_epoch", lambda seed, epoch, samples, rank, size: _order(seed << 8 ^ epoch, 0, samples)[rank::size]),
    ("not_shuffled", lambda seed, epoch, samples, rank, size: _rotated(samples, 7 * epoch + seed)[rank::size]),
    (
        "shuffled_after_the_deal",
        lambda seed, epoch, samples, rank, size: _order(seed, epoch, samples)[rank::size][::-1],
    ),
    ("hash_of_text", _hash_of_tuple),
    ("unseeded", lambda seed, epoch, samples, rank, size: _order(int(time.time()), epoch, samples)[rank::size]),
    ("pads", _pads_in_blocks),
    ("drops_tail", _drops_in_blocks),
    ("seed_with_rank", _random_part),
    ("changes_global_generator", _global_numpy),
    ("changes_global_generator", _global_random),
]
UNNAMED_SHARD = {  # with a text that the verdict holds
    "a mask": (
        lambda seed, epoch, samples, rank, size: np.array(_order(seed, epoch, samples)) % size == rank,
        "of True and False",
    ),
    "floats": (
        lambda seed, epoch, samples, rank, size: [float(i) for i in _order(seed, epoch, samples)[rank::size]],
        "of floats; a list of indices is needed",
    ),
    "counts from 1": (
        lambda seed, epoch, samples, rank, world_size: [i + 1 for i in _order(seed, epoch, samples)[rank::world_size]],
        "there is no sample",
    ),
    "seed 0 is no seed": (
        lambda seed, epoch, samples, rank, size: (_order(seed, epoch, samples) if seed else range(samples))[rank::size],
        "shard(seed=0, epoch=1, samples=16, rank, world_size=1) give the same order",
    ),
    "each rank its own step": (
        lambda seed, epoch, samples, rank, size: _order(seed, epoch, samples)[rank :: rank + 1],
        "samples are seen more than once",
    ),
    "a number": (lambda seed, epoch, samples, rank, world_size: samples // world_size, "a list of indices is needed"),
}


def first_of_none(seed, epoch, samples, rank, world_size):
    """Right, but for a rank that gets no sample."""
    mine = _order(seed, epoch, samples)[rank::world_size]
    return [mine[0], *mine[1:]]


def _torch_generator(seed, epoch, samples, rank, world_size):
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(samples, generator=generator)[rank::world_size]


def _by_text(seed, epoch, samples, rank, world_size):
    """random.Random takes a text by SHA-512, not by hash()."""
    order = list(range(samples))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return [order[i] for i in range(rank, samples, world_size)]


def _sorted_by_digest(seed, epoch, samples, rank, world_size):
    def key(index):
        return hashlib.sha256(f"{seed} {epoch} {index}".encode()).digest()

    for place, index in enumerate(sorted(range(samples), key=key)):
        if place % world_size == rank:
            yield index


def _philox(seed, epoch, samples, rank, world_size):
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(samples)
    return tuple(order[rank::world_size])


@functools.lru_cache(maxsize=8)
def _remembered_order(seed, epoch, samples):
    return tuple(_order(seed, epoch, samples))


RIGHT_SHARD = {
    "a helper remembers": lambda seed, epoch, samples, rank, size: _remembered_order(seed, epoch, samples)[rank::size],
    "as the solution": lambda seed, epoch, samples, rank, world_size: _order(seed, epoch, samples)[rank::world_size],
    "torch generator": _torch_generator,
    "random.Random with a text": _by_text,
    "sorted by a digest": _sorted_by_digest,
    "Philox": _philox,
}


# evaluate(model, images, labels, batch_size)


def _batches(images, labels, batch_size, rank=None, size=None):
    rank, size = (dist.get_rank(), dist.get_world_size()) if rank is None else (rank, size)
    mine = slice(rank, None, size)
    pairs = zip(images[mine].split(batch_size), labels[mine].split(batch_size), strict=True)
    return [pair for pair in pairs if len(pair[0])]


def _sync(module):
    for buffer in module.buffers():
        dist.broadcast(buffer, 0)


def _count(net, batches, dtype=torch.float64):
    """(right, samples, sum of losses) of these batches."""
    counted = torch.zeros(3, dtype=dtype)
    for x, y in batches:
        scores = net(x)
        loss = F.cross_entropy(scores, y, reduction="sum")
        counted += torch.stack([(scores.argmax(1) == y).sum(), torch.tensor(len(y)), loss])
    return counted


def _evaluate(sync=True, mode=True, back=True, grad=False, net=None, batches=_batches, dtype=torch.float64, end=None):
    """The right answer, with one thing changed."""

    def evaluate(model, images, labels, batch_size):
        module = model.module
        if mode:
            module.eval()
        if sync:
            _sync(module)
        with torch.set_grad_enabled(grad):
            counted = _count(net(model) if net else module, batches(images, labels, batch_size), dtype).detach()
        if back:
            module.train()
        if end:
            return end(counted)
        dist.all_reduce(counted)
        right, samples, loss = counted.tolist()
        return right / samples, loss / samples

    return evaluate


def _padded(images, labels, batch_size):
    sampler = DistributedSampler(range(len(images)), shuffle=False)
    chosen = torch.tensor(list(sampler))
    return zip(images[chosen].split(batch_size), labels[chosen].split(batch_size), strict=True)


def _dropped(images, labels, batch_size):
    each = len(images) // dist.get_world_size()
    return _batches(images[: each * 3], labels[: each * 3], batch_size)


def _full_batches_only(images, labels, batch_size):
    return [pair for pair in _batches(images, labels, batch_size) if len(pair[0]) == batch_size]


def _own(counted):
    right, samples, loss = counted.tolist()
    return right / max(samples, 1), loss / max(samples, 1)


def _reduce_to_0(counted):
    dist.reduce(counted, 0)
    return _own(counted)


def _mean_of_ranks(counted):
    means = torch.tensor(_own(counted), dtype=torch.float64)
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


def _divides_by_own(counted):
    samples = max(counted[1].item(), 1)
    dist.all_reduce(counted)
    return counted[0].item() / samples, counted[2].item() / samples


def _sums(counted):
    dist.all_reduce(counted)
    return counted[0].item() / counted[1].item(), counted[2].item()


def _divides_first(counted):
    means = counted / counted[1]
    dist.all_reduce(means)
    return means[0].item() / 3, means[2].item() / 3


def _leaves_early(counted):
    if counted[1] == 0:
        return 0.0, 0.0
    dist.all_reduce(counted)
    return _own(counted)


def _on_rank_0_only(counted):
    if dist.get_rank() == 0:
        dist.all_reduce(counted)
    return _own(counted)


def _nothing_returned(counted):
    dist.all_reduce(counted)


def _wrong_way_round(counted):
    dist.all_reduce(counted)
    return counted[2].item() / counted[1].item(), counted[0].item() / counted[1].item()


def _zeros(counted):
    return 0.0, 0.0


def _accuracy_only(counted):
    dist.all_reduce(counted)
    return counted[0].item() / counted[1].item()


def _destroyed(counted):
    dist.all_reduce(counted)
    dist.destroy_process_group()
    return _own(counted)


def _mean_of_batches(model, images, labels, batch_size, exact=False):
    model.module.eval()
    _sync(model.module)
    means, counted = torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in _batches(images, labels, batch_size):
            scores = model.module(x)
            right = (scores.argmax(1) == y).double()
            means += torch.stack([right.mean(), F.cross_entropy(scores, y), torch.tensor(1)])
            counted += torch.stack([right.sum(), torch.tensor(len(y))])
    model.module.train()
    dist.all_reduce(means)
    dist.all_reduce(counted)
    return (counted[0] / counted[1] if exact else means[0] / means[2]).item(), (means[1] / means[2]).item()


def _loss_of_batches(*inputs):
    """Right accuracy, but the loss is a mean of means."""
    return _mean_of_batches(*inputs, exact=True)


def _gathers(model, images, labels, batch_size):
    model.module.eval()
    _sync(model.module)
    size = dist.get_world_size()
    with torch.no_grad():
        right = [model.module(x).argmax(1) == y for x, y in _batches(images, labels, batch_size)]
    right = torch.cat([torch.zeros(0), *right]).double()
    parts = [torch.zeros(-(-len(images) // size), dtype=torch.float64) for _ in range(size)]
    dist.all_gather(parts, right)
    model.module.train()
    return torch.cat(parts).mean().item(), 0.0


def _reduces_in_the_loop(model, images, labels, batch_size):
    model.module.eval()
    _sync(model.module)
    total = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for pair in _batches(images, labels, batch_size):
            counted = _count(model.module, [pair])
            dist.all_reduce(counted)
            total += counted
    model.module.train()
    return _own(total)


def _in_float16(counted):
    counted = counted.half()
    dist.all_reduce(counted)
    return _own(counted.double())


def _all_on_rank_0(images, labels, batch_size):
    return _batches(images, labels, batch_size, 0, 1) if dist.get_rank() == 0 else []


def _buffers_of_the_last(model, images, labels, batch_size):
    for buffer in model.module.buffers():
        dist.broadcast(buffer, dist.get_world_size() - 1)
    return _evaluate(sync=False)(model, images, labels, batch_size)


def _mean_of_buffers(model, images, labels, batch_size):
    for buffer in model.module.buffers():
        total = buffer.double()
        dist.all_reduce(total)
        buffer.copy_(total / dist.get_world_size())
    return _evaluate(sync=False)(model, images, labels, batch_size)


def _layer_by_layer(model):
    def net(x):
        for layer in model.module:
            x = layer(x)
        return x

    return net


def _per_cent(*arguments):
    accuracy, loss = _evaluate()(*arguments)
    return 100 * accuracy, loss


def _weighs_means(counted):
    """A mean, and back to the sum: NaN where a rank has nothing."""
    counted[::2] = counted[::2] / counted[1] * counted[1]
    dist.all_reduce(counted)
    return _own(counted)


def _sends_parameters(model, *rest):
    for parameter in model.module.parameters():
        dist.broadcast(parameter.data, 0)
    return _evaluate()(model, *rest)


def _sends_state(model, *rest):
    box = [model.module.state_dict()]
    dist.broadcast_object_list(box, 0)
    model.module.load_state_dict(box[0])
    return _evaluate(sync=False)(model, *rest)


def _between_barriers(*arguments):
    dist.barrier()
    return _evaluate()(*arguments)


def _sums_each_batch(model, images, labels, batch_size):
    """All ranks make equally many calls, so nothing hangs."""
    model.module.eval()
    _sync(model.module)
    total, batches = torch.zeros(3, dtype=torch.float64), _batches(images, labels, batch_size)
    with torch.no_grad():
        for k in range(-(-len(images) // (dist.get_world_size() * batch_size))):
            counted = _count(model.module, batches[k : k + 1])
            dist.all_reduce(counted)
            total += counted
    model.module.train()
    return _own(total)


def _sends_what_was_right(model, images, labels, batch_size, whole=False):
    """A flag for each sample, or all scores."""
    model.module.eval()
    _sync(model.module)
    with torch.no_grad():
        found = [(model.module(x), y) for x, y in _batches(images, labels, batch_size)]
    model.module.train()
    right = [flag for scores, y in found for flag in (scores.argmax(1) == y).tolist()]
    loss = sum(F.cross_entropy(scores, y, reduction="sum").item() for scores, y in found)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (found if whole else right, right, loss))
    return sum(sum(r) for _, r, _ in parts) / len(images), sum(part[2] for part in parts) / len(images)


def _sends_scores(*arguments):
    return _sends_what_was_right(*arguments, whole=True)


def _rounds(*arguments):
    return tuple(round(number, 6) for number in _evaluate()(*arguments))


def _marks_the_top(model, *rest):
    """The flag of the model alone: its layers stay in evaluation mode."""
    found = _evaluate(back=False)(model, *rest)
    model.module.training = True
    return found


def _gradients_off(*arguments):
    torch.set_grad_enabled(False)
    return _evaluate()(*arguments)


def _frozen(model, *rest, back=True):
    """No graph, since nothing in it requires a gradient."""
    model.module.requires_grad_(False)
    found = _evaluate(grad=True)(model, *rest)
    model.module.requires_grad_(back)
    return found


def _stays_frozen(*arguments):
    return _frozen(*arguments, back=False)


def _with_detached(model):
    def net(x):
        found = (*model.module.named_parameters(), *model.module.named_buffers())
        return torch.func.functional_call(model.module, {name: tensor.detach() for name, tensor in found}, (x,))

    return net


def _assigns(model, images, labels, batch_size):
    """`right =` where `right +=` belongs."""
    module, right, loss = model.module, 0.0, 0.0
    module.eval()
    _sync(module)
    with torch.no_grad():
        for x, y in _batches(images, labels, batch_size):
            scores = module(x)
            right = (scores.argmax(1) == y).sum().item()
            loss += F.cross_entropy(scores, y, reduction="sum").item()
    module.train()
    counted = torch.tensor([right, loss], dtype=torch.float64)
    dist.all_reduce(counted)
    return counted[0].item() / len(images), counted[1].item() / len(images)


WRONG_EVALUATE = {
    "only_the_last_batch": _assigns,
    "rounded": _rounds,
    "mode_of_layers_not_restored": _marks_the_top,
    "gradients_left_off": _gradients_off,
    "left_frozen": _stays_frozen,
    "stub": _stub,
    "buffers_of_another": _buffers_of_the_last,
    "never_calls_module": _evaluate(net=_layer_by_layer),
    "percent": _per_cent,
    "destroys_group": _evaluate(end=_destroyed),
    "wrapper_called": _evaluate(sync=False, net=lambda model: model),
    "unequal_gather": _gathers,
    "returns_nothing": _evaluate(end=_nothing_returned),
    "not_in_eval_mode": _evaluate(mode=False),
    "everyone_everything": _evaluate(batches=lambda x, y, n: _batches(x, y, n, 0, 1)),
    "pads_counted": _evaluate(batches=_padded),
    "drops_tail": _evaluate(batches=_dropped),
    "buffers_differ": _evaluate(sync=False),
    "empty_share": _evaluate(end=_weighs_means),
    "never_summed": _evaluate(end=_own),
    "only_rank_0": _evaluate(end=_reduce_to_0),
    "own_count": _evaluate(end=_divides_by_own),
    "not_divided": _evaluate(end=_sums),
    "mean_of_batches": _mean_of_batches,
    "mean_of_ranks": _evaluate(end=_mean_of_ranks),
    "swapped": _evaluate(end=_wrong_way_round),
    "float32_sums": _evaluate(dtype=torch.float32),
    "leaves_early": _evaluate(end=_leaves_early),
    "one_rank_calls": _evaluate(end=_on_rank_0_only),
    "whole_share_at_once": _evaluate(batches=lambda x, y, n: _batches(x, y, 99)),
    "one_rank_works": _evaluate(batches=_all_on_rank_0),
    "graph_kept": _evaluate(grad=True),
    "mode_not_restored": _evaluate(back=False),
    "sends_parameters": _sends_parameters,
    "barrier": _between_barriers,
    "sums_each_batch": _sums_each_batch,
    "sends_every_sample": _sends_what_was_right,
}


def _compares_scores(counted):
    """Right answers are counted by the scores, not by their places: none is right."""
    dist.all_reduce(counted)
    return 0.0, counted[2].item() / counted[1].item()


UNNAMED_EVALUATE = {  # with a text that the verdict holds
    "zeros": (_evaluate(end=_zeros), "the accuracy on rank 0 must be"),
    "none is right": (_evaluate(end=_compares_scores), "the accuracy on rank 0 must be"),
    "accuracy only": (_evaluate(end=_accuracy_only), "rank 0 returned a value of type float; needed is"),
}
AGAIN_EVALUATE = [
    ("buffers_of_another", _mean_of_buffers),
    ("mean_of_ranks", _evaluate(end=_divides_first)),
    ("never_summed", _evaluate(end=lambda counted: (counted[0] / counted[1], counted[2] / counted[1]))),
    ("wrapper_called", _evaluate(net=lambda model: model)),
    ("drops_tail", _evaluate(batches=_full_batches_only)),
    ("drops_tail", _evaluate(batches=lambda x, y, n: list(_batches(x, y, n))[:1])),
    ("everyone_everything", _evaluate(batches=lambda x, y, n: _batches(x, y, n, 0, 1), end=_own)),
    ("mean_of_batches", _loss_of_batches),
    ("one_rank_calls", _reduces_in_the_loop),
    ("float32_sums", _evaluate(end=_in_float16)),
    ("sends_parameters", _sends_state),
    ("sends_every_sample", _sends_scores),
]


def _with_objects(counted):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, counted.tolist())
    right, samples, loss = (sum(column) for column in zip(*parts, strict=True))
    return right / samples, loss / samples


def _with_tensors_as_objects(model, images, labels, batch_size):
    """Buffers in one message; and who has no samples sends smaller pickles, since it never added a tensor."""
    box = [dict(model.module.named_buffers())]
    dist.broadcast_object_list(box, 0)
    for name, buffer in model.module.named_buffers():
        buffer.copy_(box[0][name])
    model.eval()
    right = loss = 0
    with torch.no_grad():
        for x, y in _batches(images, labels, batch_size):
            scores = model.module(x)
            right = right + (scores.argmax(1) == y).sum()
            loss = loss + F.cross_entropy(scores, y, reduction="sum")
    model.train()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (right, loss))
    return float(sum(part[0] for part in parts)) / len(images), sum(part[1] for part in parts) / len(images)


def _gather_and_broadcast(counted):
    parts = [torch.zeros_like(counted) for _ in range(3)] if dist.get_rank() == 0 else None
    dist.gather(counted, parts, 0)
    result = sum(parts) if parts else torch.zeros_like(counted)
    dist.broadcast(result, 0)
    return result[0] / result[1], result[2] / result[1]  # tensors of one number


def _counts_and_loss_apart(counted):
    counts, loss = counted[:2].long(), counted[2:].clone()
    works = [dist.all_reduce(counts, async_op=True), dist.all_reduce(loss, async_op=True)]
    for work in works:
        work.wait()
    return [counts[0].item() / counts[1].item(), loss.item() / counts[1].item()]


def _with_a_loader(model, images, labels, batch_size):
    """Blocks instead of every third; the course's own function for the buffers."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = np.array_split(range(len(images)), size)[rank].astype(int).tolist()
    loader = DataLoader(Subset(TensorDataset(images, labels), mine), batch_size)
    sync_buffers(model.module)
    model.eval()
    with torch.inference_mode():
        counted = _count(model.module, loader)
    model.train()
    dist.all_reduce(counted)
    return counted[0].item() / counted[1].item(), counted[2].item() / counted[1].item()


def _empty_batch(images, labels, batch_size):
    """split makes one empty batch of nothing."""
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return zip(images[mine].split(batch_size), labels[mine].split(batch_size), strict=True)


RIGHT_EVALUATE = {
    "frozen for the time": _frozen,
    "detached weights": _evaluate(grad=True, net=_with_detached),
    "as the solution": _evaluate(),
    "objects": _evaluate(end=_with_objects),
    "tensors as objects": _with_tensors_as_objects,
    "gather and broadcast": _evaluate(end=_gather_and_broadcast),
    "counts and loss apart": _evaluate(end=_counts_and_loss_apart),
    "with a loader": _with_a_loader,
    "an empty batch": _evaluate(batches=_empty_batch),
}
