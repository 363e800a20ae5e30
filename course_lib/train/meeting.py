"""After torchrun has restarted the ranks, its store still holds what the ranks before wrote there.

gloo would connect to addresses of dead processes (pytorch#135712). So the ranks agree on a fresh part of the store.
The number of restarts will not do as its name: nodes can differ in it.
"""

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store

TICK = 0.005  # seconds


def fresh(store: Store, rank: int, world_size: int, patience: float) -> PrefixStore:
    """A part of the store that belongs to this start alone, the same for all ranks.

    Each rank shows a word that nobody used before; rank 0 answers each word with the name of the part. To the word of
    a dead process it answers in vain. Raises RuntimeError after `patience` seconds.
    """
    if rank:
        word = uuid.uuid4().hex
        store.set(f"meeting/word/{rank}", word)
        store.wait([f"meeting/answer/{word}"], timedelta(seconds=patience))
        name = store.get(f"meeting/answer/{word}").decode()
        store.set(f"meeting/heard/{name}/{rank}", "yes")
        return PrefixStore(name, store)
    name, until = f"start-{uuid.uuid4().hex}", time.monotonic() + patience
    answered: dict[int, str] = {}
    missing = set(range(1, world_size))
    while missing:
        for other in sorted(missing):
            word = store.get(key).decode() if store.check([key := f"meeting/word/{other}"]) else ""
            if word and answered.get(other) != word:
                answered[other] = word
                store.set(f"meeting/answer/{word}", name)
            if store.check([f"meeting/heard/{name}/{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > until:
            raise RuntimeError(f"Waited {patience:g} s for rank {min(missing)} to start, in vain.")
        time.sleep(TICK if missing else 0)
    return PrefixStore(name, store)
