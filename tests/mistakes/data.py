"""Wrong and right answers to exercise 08. The name of a wrong answer is the verdict that it must get."""

import hashlib
import math
import random

import numpy as np
import torch
import torch.distributed as dist

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
    torch.manual_seed(1000 * seed + epoch)
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


WRONG_SHARD = {
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
    "depends_on_world_size": _world_in_seed,
    "not_shuffled": lambda seed, epoch, samples, rank, world_size: range(rank, samples, world_size),
    "ignores_epoch": lambda seed, epoch, samples, rank, world_size: _order(seed, 0, samples)[rank::world_size],
    "ignores_seed": lambda seed, epoch, samples, rank, world_size: _order(0, epoch, samples)[rank::world_size],
    "seed_plus_epoch": _plus,
    "changes_global_generator": _global_torch,
}
AGAIN_SHARD = [  # the same mistakes in other words
    ("hash_of_text", _hash_of_tuple),
    ("pads", _pads_in_blocks),
    ("drops_tail", _drops_in_blocks),
    ("seed_with_rank", _random_part),
    ("changes_global_generator", _global_numpy),
    ("changes_global_generator", _global_random),
]


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


RIGHT_SHARD = {
    "as the solution": lambda seed, epoch, samples, rank, world_size: _order(seed, epoch, samples)[rank::world_size],
    "torch generator": _torch_generator,
    "random.Random with a text": _by_text,
    "sorted by a digest": _sorted_by_digest,
    "Philox": _philox,
}
