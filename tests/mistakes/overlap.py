"""Wrong and right answers to exercise 06. The name of a wrong answer is the verdict that it must get."""

import torch
import torch.distributed as dist
from torch import nn


class Right(nn.Module):
    """As the solution, in parts that can be exchanged."""

    def __init__(self, module, bucket_mb):
        super().__init__()
        self.module = module
        self.broadcast()
        self.learnable = [p for p in module.parameters() if p.requires_grad]
        self.buckets = self.fill(self.learnable, bucket_mb * 2**20)
        self.reset()
        self.hook()

    def broadcast(self):
        for tensor in self.module.state_dict().values():
            dist.broadcast(tensor, src=0)

    def fill(self, parameters, capacity):
        buckets, filled = [], capacity
        for p in reversed(parameters):
            nbytes = p.numel() * p.element_size()
            if not buckets or filled + nbytes > capacity:
                buckets.append([])
                filled = 0
            buckets[-1].append(p)
            filled += nbytes
        return buckets

    def hook(self):
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda _, number=number: self.arrived(number))

    def reset(self):
        self.missing = [len(bucket) for bucket in self.buckets]
        self.flats, self.handles = [], []

    def arrived(self, number):
        self.missing[number] -= 1
        while len(self.flats) < len(self.buckets) and self.missing[len(self.flats)] == 0:
            self.start()

    def flat(self, bucket):
        return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in bucket])

    def start(self):
        self.flats.append(self.flat(self.buckets[len(self.flats)]))
        self.handles.append(self.reduce(self.flats[-1]))

    def reduce(self, flat):
        return dist.all_reduce(flat, async_op=True)

    def forward(self, *args):
        return self.module(*args)

    def synchronize(self):
        while len(self.flats) < len(self.buckets):
            self.start()
        for bucket, flat, handle in zip(self.buckets, self.flats, self.handles, strict=True):
            self.finish(bucket, flat, handle)
        self.reset()

    def finish(self, bucket, flat, handle):
        handle.wait()
        flat /= dist.get_world_size()
        self.give_back(bucket, flat)

    def give_back(self, bucket, flat):
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = part.view_as(p)


class Stub(Right):
    def __init__(self, module, bucket_mb):
        raise NotImplementedError


class TorchDDP(nn.Module):
    def __init__(self, module, bucket_mb):
        super().__init__()
        self.module = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=bucket_mb, find_unused_parameters=True)

    def forward(self, *args):
        return self.module(*args)

    def synchronize(self):
        pass


class NoBroadcast(Right):
    def broadcast(self):
        pass


class OnePerParameter(Right):
    def fill(self, parameters, capacity):
        return [[p] for p in reversed(parameters)]


class OnePerParameterForward(Right):
    def fill(self, parameters, capacity):
        return [[p] for p in parameters]


class OneFlat(Right):
    def fill(self, parameters, capacity):
        return [list(reversed(parameters))]


class OneFlatAfterwards(OneFlat):
    def hook(self):
        pass


class ElementsNotBytes(Right):
    def fill(self, parameters, capacity):
        return super().fill(parameters, capacity * 8)


class ForwardOrder(Right):
    def fill(self, parameters, capacity):
        return super().fill(list(reversed(parameters)), capacity)


class InSynchronize(Right):
    def hook(self):
        pass


class WhenAllAreThere(Right):
    """Counts all gradients, and starts all buckets with the last one."""

    def arrived(self, number):
        self.missing[number] -= 1
        if not any(self.missing):
            while len(self.flats) < len(self.buckets):
                self.start()


class WaitsInHook(Right):
    def reduce(self, flat):
        dist.all_reduce(flat)

    def finish(self, bucket, flat, handle):
        flat /= dist.get_world_size()
        self.give_back(bucket, flat)


class WaitsForHandleInHook(Right):
    def reduce(self, flat):
        handle = dist.all_reduce(flat, async_op=True)
        handle.wait()
        return handle


class TooEarly(Right):
    """The first gradient of a bucket starts it."""

    def arrived(self, number):
        if self.missing[number] == len(self.buckets[number]):
            while len(self.flats) <= number:
                self.start()
        self.missing[number] -= 1


class WithItsLastParameter(Right):
    """Right where gradients come in the order of the parameters."""

    def hook(self):
        for number, bucket in enumerate(self.buckets):
            bucket[-1].register_post_accumulate_grad_hook(lambda _, number=number: self.up_to(number))

    def up_to(self, number):
        while len(self.flats) <= number:
            self.start()


class CountsAllGradients(Right):
    """Whichever bucket they are for."""

    def arrived(self, number):
        self.missing[number] -= 1
        came = sum(map(len, self.buckets)) - sum(self.missing)
        while len(self.flats) < len(self.buckets) and came >= sum(map(len, self.buckets[: len(self.flats) + 1])):
            self.start()


class OneTooEarly(Right):
    def reset(self):
        super().reset()
        self.missing = [max(len(bucket) - 1, 1) for bucket in self.buckets]


class NeverWaits(Right):
    def finish(self, bucket, flat, handle):
        while not handle._work.is_completed():
            pass
        self.give_back(bucket, flat / dist.get_world_size())


class PollsInHook(Right):
    """Waits without a wait()."""

    def reduce(self, flat):
        handle = dist.all_reduce(flat, async_op=True)
        while not handle.is_completed():
            pass
        return handle


class AddsToCounters(Right):
    """What a step has left of them stays for ever."""

    def reset(self):
        left = getattr(self, "missing", [0] * len(self.buckets))
        super().reset()
        self.missing = [count + more for count, more in zip(left, self.missing, strict=True)]


class OverlapsWhenAllWereThere(Right):
    calm = True

    def arrived(self, number):
        self.missing[number] -= 1
        while self.calm and len(self.flats) < len(self.buckets) and self.missing[len(self.flats)] == 0:
            self.start()

    def synchronize(self):
        calm = not any(self.missing)
        super().synchronize()
        self.calm = calm


class OverlapsForFiveSteps(Right):
    steps = 0

    def arrived(self, number):
        if self.steps < 5:
            super().arrived(number)

    def synchronize(self):
        super().synchronize()
        self.steps += 1


class OneLate(Right):
    """Starts a bucket when the next one is full."""

    def arrived(self, number):
        self.missing[number] -= 1
        while len(self.flats) + 1 < len(self.buckets) and not any(self.missing[: len(self.flats) + 2]):
            self.start()


class AfterBackward(Right):
    """A callback of the autograd engine starts everything."""

    waiting = False

    def arrived(self, number):
        if not self.waiting:
            torch.autograd.Variable._execution_engine.queue_callback(self.begin)
        self.waiting = True

    def begin(self):
        while len(self.flats) < len(self.buckets):
            self.start()

    def reset(self):
        super().reset()
        self.waiting = False


class BarrierFirst(Right):
    """Some buckets start before it, and which ones depends on the rank."""

    def synchronize(self):
        dist.barrier()
        super().synchronize()


class Padded(Right):
    def flat(self, bucket):
        flat = super().flat(bucket)
        return torch.cat([flat, flat.new_zeros(-len(flat) % 1024)])

    def give_back(self, bucket, flat):
        super().give_back(bucket, flat[: sum(p.numel() for p in bucket)])


class NeverClears(Right):
    def reset(self):
        super().reset()
        self.all_handles = getattr(self, "all_handles", [])

    def reduce(self, flat):
        self.all_handles.append(super().reduce(flat))
        return self.all_handles[-1]


class InHalves(Right):
    """Each bucket in two pieces."""

    def reduce(self, flat):
        return [dist.all_reduce(half, async_op=True) for half in flat.chunk(2)]

    def finish(self, bucket, flat, handle):
        for half in handle:
            half.wait()
        self.give_back(bucket, flat / dist.get_world_size())


class DividesByTwo(Right):
    def finish(self, bucket, flat, handle):
        handle.wait()
        self.give_back(bucket, flat / 2)


class SumsWeights(Right):
    def flat(self, bucket):
        return torch.cat([p.detach().flatten() for p in bucket])

    @torch.no_grad()
    def finish(self, bucket, flat, handle):
        handle.wait()
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.copy_(part.view_as(p))


class Arrived:
    def wait(self):
        """It is over."""


class ThroughTheStore(Right):
    """As through a shared file: no collective carries a gradient."""

    calls = 0

    def reduce(self, flat):
        store = dist.distributed_c10d._get_default_store()
        ThroughTheStore.calls += 1
        store.set(f"{self.calls}/{dist.get_rank()}", flat.numpy().tobytes())
        return Arrived()

    def synchronize(self):
        store, size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
        while len(self.flats) < len(self.buckets):
            self.start()
        first = self.calls - len(self.flats) + 1
        for call, (bucket, flat) in enumerate(zip(self.buckets, self.flats, strict=True), first):
            parts = [store.get(f"{call}/{rank}") for rank in range(size)]
            self.give_back(bucket, sum(torch.frombuffer(bytearray(b), dtype=flat.dtype) for b in parts) / size)
        self.reset()


class WaitsForTheLast(Right):
    """Of one kind of backend that may even work."""

    def finish(self, bucket, flat, handle):
        self.handles[-1].wait()
        while not handle._work.is_completed():
            pass
        self.give_back(bucket, flat / dist.get_world_size())


class DividesBeforeWait(Right):
    def finish(self, bucket, flat, handle):
        flat /= dist.get_world_size()
        handle.wait()
        self.give_back(bucket, flat)


class NotReset(Right):
    """The counters stay at zero, so that nothing starts again."""

    def arrived(self, number):
        self.missing[number] -= 1
        while len(self.flats) < len(self.buckets) and self.missing[len(self.flats)] == 0:
            self.start()

    def synchronize(self):
        while not self.first_done and len(self.flats) < len(self.buckets):
            self.start()
        for bucket, flat, handle in zip(self.buckets, self.flats, self.handles, strict=False):
            self.finish(bucket, flat, handle)
        self.flats, self.handles = [], []
        self.first_done = True

    first_done = False


class OverCapacity(Right):
    """As torch's DDP: a bucket is closed when it has reached its capacity."""

    def fill(self, parameters, capacity):
        buckets, filled = [[]], 0
        for p in reversed(parameters):
            if filled >= capacity:
                buckets.append([])
                filled = 0
            buckets[-1].append(p)
            filled += p.numel() * p.element_size()
        return buckets


class HalfBuckets(Right):
    def fill(self, parameters, capacity):
        return super().fill(parameters, capacity / 2)


class Decimal(Right):
    """A MiB of 10**6 bytes."""

    def fill(self, parameters, capacity):
        return super().fill(parameters, capacity * 10**6 / 2**20)


class AsTheyGetFull(Right):
    """In whatever order."""

    def reset(self):
        super().reset()
        self.flats, self.handles = {}, {}

    def arrived(self, number):
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self.begin(number)

    def begin(self, number):
        self.flats[number] = self.flat(self.buckets[number])
        self.handles[number] = self.reduce(self.flats[number])

    def synchronize(self):
        for number in range(len(self.buckets)):
            if number not in self.flats:
                self.begin(number)
        for number, bucket in enumerate(self.buckets):
            self.finish(bucket, self.flats[number], self.handles[number])
        self.reset()


class OrderOfTheRank(Right):
    def fill(self, parameters, capacity):
        buckets = super().fill(parameters, capacity)
        return buckets if dist.get_rank() or len(parameters) != 10 or buckets[0][0].numel() != 3 else buckets[::-1]


class LeavesIncomplete(Right):
    def synchronize(self):
        for bucket, flat, handle in zip(self.buckets, self.flats, self.handles, strict=False):
            self.finish(bucket, flat, handle)
        self.reset()


class ExpectsAll(Right):
    def synchronize(self):
        for number, bucket in enumerate(self.buckets):
            self.finish(bucket, self.flats[number], self.handles[number])
        self.reset()


class UnusedCrash(Right):
    def flat(self, bucket):
        return torch.cat([p.grad.flatten() for p in bucket])


class SkipsUnused(Right):
    def flat(self, bucket):
        return torch.cat([torch.empty(0).double(), *(p.grad.flatten() for p in bucket if p.grad is not None)])

    def give_back(self, bucket, flat):
        super().give_back([p for p in bucket if p.grad is not None], flat)


class FrozenCrash(Right):
    def fill(self, parameters, capacity):
        return super().fill(list(self.module.parameters()), capacity)

    def flat(self, bucket):
        return torch.cat([p.grad.flatten() for p in bucket])

    def hook(self):
        pass


class Sums(Right):
    def finish(self, bucket, flat, handle):
        handle.wait()
        self.give_back(bucket, flat)


class DividesTwice(Right):
    def finish(self, bucket, flat, handle):
        handle.wait()
        flat /= dist.get_world_size() ** 2
        self.give_back(bucket, flat)


class NotCopiedBack(Right):
    def give_back(self, bucket, flat):
        pass


class AveragesWeights(Right):
    def flat(self, bucket):
        return torch.cat([p.detach().flatten() for p in bucket])

    @torch.no_grad()
    def give_back(self, bucket, flat):
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.copy_(part.view_as(p))


class TiedTwice(Right):
    def fill(self, parameters, capacity):
        named = self.module.named_parameters(remove_duplicate=False)
        return super().fill([p for _, p in named if p.requires_grad], capacity)


class Gathers(Right):
    def reduce(self, flat):
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        return dist.all_gather(parts, flat, async_op=True), parts

    def finish(self, bucket, flat, handle):
        handle[0].wait()
        self.give_back(bucket, torch.stack(handle[1]).mean(0))


class EmptyFirst(Right):
    """Begins with an open bucket, and closes it also when nothing is in it."""

    def fill(self, parameters, capacity):
        buckets, filled = [[]], 0
        for p in reversed(parameters):
            nbytes = p.numel() * p.element_size()
            if filled + nbytes > capacity:
                buckets.append([])
                filled = 0
            buckets[-1].append(p)
            filled += nbytes
        return buckets


class SendsEmpty(Right):
    def fill(self, parameters, capacity):
        return [[], *super().fill(parameters, capacity)]

    def flat(self, bucket):
        return super().flat(bucket) if bucket else torch.empty(0).double()


class NotToTheLastByte(Right):
    def fill(self, parameters, capacity):
        return super().fill(parameters, capacity - 1)


class FrozenTakeRoom(Right):
    def fill(self, parameters, capacity):
        buckets = super().fill(list(self.module.parameters()), capacity)
        learned = [[p for p in bucket if p.requires_grad] for bucket in buckets]
        return [bucket for bucket in learned if bucket]


class FirstFit(Right):
    """A gradient goes back into a bucket that has room."""

    def fill(self, parameters, capacity):
        buckets = []
        for p in reversed(parameters):
            room = (b for b in buckets if 8 * (p.numel() + sum(q.numel() for q in b)) <= capacity)
            bucket = next(room, None)
            if bucket is None:
                buckets.append(bucket := [])
            bucket.append(p)
        return buckets


class LargeMap(Right):
    def synchronize(self):
        super().synchronize()
        dist.all_reduce(torch.zeros(10).double())


class CountersNotReset(Right):
    def reset(self):
        counts = getattr(self, "missing", None)
        super().reset()
        self.missing = counts or self.missing


class NothingCleared(Right):
    def reset(self):
        flats, handles = getattr(self, "flats", []), getattr(self, "handles", [])
        super().reset()
        self.flats, self.handles = flats, handles


class LateBinding(Right):
    def hook(self):
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda _: self.arrived(number))  # noqa: B023


class WeightsForGradients(Right):
    def flat(self, bucket):
        return torch.cat([p.detach().flatten() for p in bucket])


class WaitsAfterAGap(Right):
    """Inside backward, in a step after one in which something was not used."""

    gap = False

    def reduce(self, flat):
        handle = super().reduce(flat)
        if self.gap:
            handle.wait()
        return handle

    def synchronize(self):
        self.gap = any(self.missing)
        super().synchronize()


class SpreadsFrozen(Right):
    def synchronize(self):
        super().synchronize()
        for p in self.module.parameters():
            if not p.requires_grad:
                dist.broadcast(p.data, src=0)


class OneBucketAHook(Right):
    """When a bucket gets full, those behind it may have waited for it; only one of them starts."""

    def arrived(self, number):
        self.missing[number] -= 1
        if len(self.flats) < len(self.buckets) and self.missing[len(self.flats)] == 0:
            self.start()


class OnlyItsOwnTurn(Right):
    """A bucket that gets full before its turn starts in synchronize()."""

    def arrived(self, number):
        self.missing[number] -= 1
        if self.missing[number] == 0 and number == len(self.flats):
            self.start()


WRONG = {
    "stub": Stub,
    "ready_made": TorchDDP,
    "no_broadcast": NoBroadcast,
    "one_per_parameter": OnePerParameter,
    "one_flat": OneFlat,
    "forward_order": ForwardOrder,
    "starts_in_synchronize": InSynchronize,
    "waits_for_all": WhenAllAreThere,
    "waits_in_hook": WaitsInHook,
    "too_early": TooEarly,
    "never_waited": NeverWaits,
    "divides_before_wait": DividesBeforeWait,
    "only_some_steps": NotReset,
    "not_begun_anew": AddsToCounters,
    "late_buckets": OneLate,
    "barrier_between": BarrierFirst,
    "padding": Padded,
    "never_cleared": NeverClears,
    "not_by_collectives": ThroughTheStore,
    "over_capacity": OverCapacity,
    "small_buckets": HalfBuckets,
    "order_differs": AsTheyGetFull,
    "leaves_incomplete": LeavesIncomplete,
    "unused_crash": UnusedCrash,
    "skips_unused": SkipsUnused,
    "frozen_crash": FrozenCrash,
    "sums": Sums,
    "divides_twice": DividesTwice,
    "not_copied_back": NotCopiedBack,
    "averages_weights": AveragesWeights,
    "tied_twice": TiedTwice,
    "gathers_everything": Gathers,
    "empty_bucket": EmptyFirst,
    "weights_for_gradients": WeightsForGradients,
}
AGAIN = [
    ("late_buckets", OneBucketAHook),
    ("late_buckets", OnlyItsOwnTurn),
    ("one_per_parameter", OnePerParameterForward),
    ("one_flat", OneFlatAfterwards),
    ("one_flat", ElementsNotBytes),
    ("waits_in_hook", WaitsForHandleInHook),
    ("too_early", OneTooEarly),
    ("too_early", WithItsLastParameter),
    ("too_early", CountsAllGradients),
    ("never_waited", WaitsForTheLast),
    ("order_differs", OrderOfTheRank),
    ("leaves_incomplete", ExpectsAll),
    ("small_buckets", Decimal),
    ("waits_in_hook", PollsInHook),
    ("not_begun_anew", OverlapsWhenAllWereThere),
    ("starts_in_synchronize", OverlapsForFiveSteps),
    ("waits_for_all", AfterBackward),
    ("small_buckets", InHalves),
    ("wrong_divisor", DividesByTwo),
    ("sums_weights", SumsWeights),
    ("small_buckets", SendsEmpty),
    ("small_buckets", NotToTheLastByte),
    ("small_buckets", FrozenTakeRoom),
    ("small_buckets", LargeMap),
    ("waits_for_all", FirstFit),
    ("not_begun_anew", CountersNotReset),
    ("not_begun_anew", NothingCleared),
    ("starts_in_synchronize", LateBinding),
    ("waits_in_hook", WaitsAfterAGap),
    ("broadcasts_again", SpreadsFrozen),
]


class DividesFirst(Right):
    def flat(self, bucket):
        return super().flat(bucket) / dist.get_world_size()

    def finish(self, bucket, flat, handle):
        handle.wait()
        self.give_back(bucket, flat)


class CopiesBack(Right):
    def give_back(self, bucket, flat):
        for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = torch.empty_like(p) if p.grad is None else p.grad
            p.grad.copy_(part.view_as(p))


class Views(Right):
    """A buffer for each bucket that stays, and gradients that are views of it."""

    def reset(self):
        super().reset()
        if not hasattr(self, "buffers_"):
            self.buffers_ = [torch.zeros(sum(p.numel() for p in bucket)).double() for bucket in self.buckets]

    def flat(self, bucket):
        buffer = self.buffers_[next(k for k, other in enumerate(self.buckets) if other is bucket)]
        for p, part in zip(bucket, buffer.split([p.numel() for p in bucket]), strict=True):
            part.zero_() if p.grad is None else part.copy_(p.grad.flatten())
        return buffer


class TensorHooks(Right):
    """register_hook gets the gradient before it is stored in .grad."""

    def hook(self):
        self.found = {}
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_hook(lambda grad, p=p, number=number: self.came(p, grad, number))

    def came(self, p, grad, number):
        self.found[p] = grad
        self.arrived(number)

    def flat(self, bucket):
        return torch.cat([self.found.pop(p, torch.zeros_like(p)).flatten() for p in bucket])


class NodeHooks(Right):
    """Hooks of the nodes that accumulate gradients, as DDP did for long."""

    def hook(self):
        self.nodes = []
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                node = p.expand_as(p).grad_fn.next_functions[0][0]
                node.register_hook(lambda *_, number=number: self.arrived(number))
                self.nodes.append(node)


class Futures(Right):
    """The division follows in the thread of the backend."""

    def reduce(self, flat):
        future = dist.all_reduce(flat, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / dist.get_world_size())

    def finish(self, bucket, flat, handle):
        self.give_back(bucket, handle.wait())


class CountsUsers(Right):
    """One small all-reduce more; what no rank used keeps no gradient."""

    def synchronize(self):
        users = torch.tensor([p.grad is not None for p in self.learnable], dtype=torch.int32)
        super().synchronize()
        dist.all_reduce(users)
        for p, count in zip(self.learnable, users.tolist(), strict=True):
            p.grad = p.grad if count else None


class Sets(Right):
    """Names what is missing, in place of counting."""

    def reset(self):
        super().reset()
        self.missing = [set(map(id, bucket)) for bucket in self.buckets]

    def hook(self):
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(lambda p, number=number: self.came(p, number))

    def came(self, p, number):
        self.missing[number].discard(id(p))
        while len(self.flats) < len(self.buckets) and not self.missing[len(self.flats)]:
            self.start()


class NothingAlone(Right):
    """With one rank there is nothing to do. The module's own method calls no hook of the module."""

    def forward(self, *args):
        return self.module.forward(*args)

    def synchronize(self):
        if dist.get_world_size() > 1:
            super().synchronize()

    def arrived(self, number):
        if dist.get_world_size() > 1:
            super().arrived(number)


RIGHT = {
    "nothing alone": NothingAlone,
    "as the solution": Right,
    "divides first": DividesFirst,
    "copies back": CopiesBack,
    "views": Views,
    "hooks on tensors": TensorHooks,
    "hooks on nodes": NodeHooks,
    "futures": Futures,
    "counts users": CountsUsers,
    "sets": Sets,
}
