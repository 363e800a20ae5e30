"""Wrong and right answers to exercise 05. The name of a wrong answer is the verdict that it must get."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives import Communicator
from course_lib.parallel.naive import NaiveDDP as CoursesDDP


class Right(nn.Module):
    """As the solution, in parts that can be exchanged."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.broadcast()
        self.prepare()

    def broadcast(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def prepare(self):
        self.learnable = [p for p in self.module.parameters() if p.requires_grad]

    def forward(self, *args):
        return self.module(*args)

    def synchronize(self):
        for p in self.learnable:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            self.average(p)

    def average(self, p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


class Stub(Right):
    def __init__(self, module):
        raise NotImplementedError


class TorchDDP(Right):
    def prepare(self):
        self.ddp = nn.parallel.DistributedDataParallel(self.module, find_unused_parameters=True)

    def forward(self, *args):
        return self.ddp(*args)

    def synchronize(self):
        pass


class CourseDDP(Right):
    def prepare(self):
        from course_lib.parallel import NaiveDDP

        self.made = NaiveDDP(self.module, unused="zero")

    def synchronize(self):
        self.made.synchronize()


class Copies(Right):
    def __init__(self, module):
        super().__init__(copy.deepcopy(module))


class Destroys(Right):
    def synchronize(self):
        super().synchronize()
        if dist.get_world_size() == 1:
            dist.destroy_process_group()


class NoBroadcast(Right):
    def broadcast(self):
        pass


class NoBuffers(Right):
    def broadcast(self):
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)


class OnlyLearnable(Right):
    def broadcast(self):
        for p in self.module.parameters():
            if p.requires_grad:
                dist.broadcast(p.data, src=0)
        for b in self.module.buffers():
            dist.broadcast(b, src=0)


class FromTheLast(Right):
    def broadcast(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), src=dist.get_world_size() - 1)


class OnlyWhatIsSaved(Right):
    """A buffer with persistent=False is in no state_dict."""

    def broadcast(self):
        for tensor in self.module.state_dict().values():
            dist.broadcast(tensor, src=0)


class Reseeds(Right):
    def broadcast(self):
        torch.manual_seed(0)
        for layer in self.module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        super().broadcast()


class SeedsOnly(Right):
    def broadcast(self):
        torch.manual_seed(0)
        for layer in self.module.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()


class AveragesStart(Right):
    def broadcast(self):
        for p in self.module.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
        for b in self.module.buffers():
            dist.broadcast(b, src=0)


class Nothing(Right):
    def synchronize(self):
        pass


class Sums(Right):
    def average(self, p):
        dist.all_reduce(p.grad)


class SumsByRebinding(Right):
    def average(self, p):
        grad = p.grad
        dist.all_reduce(grad)
        grad = grad / dist.get_world_size()


class DividesTwice(Right):
    def average(self, p):
        p.grad /= dist.get_world_size()
        super().average(p)


class DividesByTwo(Right):
    def average(self, p):
        dist.all_reduce(p.grad)
        p.grad /= 2


class DividesByBatch(Right):
    def average(self, p):
        dist.all_reduce(p.grad)
        p.grad /= 4


class HookAveragesWeights(Right):
    """The published bug: the hook's argument is the parameter."""

    def prepare(self):
        def hook(grad):
            with torch.no_grad():
                dist.all_reduce(grad)
                grad /= dist.get_world_size()

        for p in self.module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(hook)

    def synchronize(self):
        for p in self.module.parameters():
            if p.grad is None and p.requires_grad:
                with torch.no_grad():
                    dist.all_reduce(p)
                    p /= dist.get_world_size()


class AveragesWeightsAfterStep(Right):
    """In the next forward."""

    def forward(self, *args):
        for p in self.module.parameters():
            dist.all_reduce(p.data)
            p.data /= dist.get_world_size()
        return self.module(*args)

    def synchronize(self):
        pass


class AveragesWeights(Right):
    @torch.no_grad()
    def synchronize(self):
        for p in self.module.parameters():
            dist.all_reduce(p)
            p /= dist.get_world_size()


class AveragesOutputs(Right):
    def forward(self, *args):
        out = self.module(*args)
        dist.all_reduce(out.detach().mean())
        return out

    def synchronize(self):
        pass


class FrozenCrash(Right):
    def synchronize(self):
        for p in self.module.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class FrozenCrashDiv(Right):
    def synchronize(self):
        for p in self.module.parameters():
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)


class UnusedCrash(Right):
    def synchronize(self):
        for p in self.learnable:
            self.average(p)


class UnusedCrashFlat(Right):
    def synchronize(self):
        flat = torch.cat([p.grad.flatten() for p in self.learnable])
        dist.all_reduce(flat)
        for p, part in zip(self.learnable, flat.split([p.numel() for p in self.learnable]), strict=True):
            p.grad = part.view_as(p) / dist.get_world_size()


class SkipsUnused(Right):
    def synchronize(self):
        for p in self.learnable:
            if p.grad is not None:
                self.average(p)


class SkipsUnusedFlat(Right):
    def synchronize(self):
        grads = [p.grad for p in self.learnable if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g) / dist.get_world_size())


class MeanOfUsers(Right):
    def average(self, p):
        users = torch.tensor(float(p.grad.any()))
        dist.all_reduce(users)
        dist.all_reduce(p.grad)
        p.grad /= max(users.item(), 1)


class TiedTwiceSums(Right):
    """Divides first, then sums once for each name."""

    def synchronize(self):
        for p in self.learnable:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad /= dist.get_world_size()
        for _, p in self.module.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                dist.all_reduce(p.grad)


class TiedTwiceMeans(Right):
    def prepare(self):
        self.learnable = [p for _, p in self.module.named_parameters(remove_duplicate=False) if p.requires_grad]


class NotCopiedBack(Right):
    def synchronize(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.learnable]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()


class NotCopiedBackClone(Right):
    def average(self, p):
        grad = p.grad / dist.get_world_size()
        dist.all_reduce(grad)


class OnlyFirstStep(Right):
    done = False

    def synchronize(self):
        if not self.done:
            super().synchronize()
        self.done = True


class OnlyTenSteps(Right):
    """As long as a test is wont to look."""

    left = 10

    def synchronize(self):
        if self.left:
            super().synchronize()
        self.left = max(self.left - 1, 0)


class EveryOtherStep(Right):
    now = False

    def synchronize(self):
        self.now = not self.now
        if self.now:
            super().synchronize()


class SumsWeights(Right):
    def average(self, p):
        dist.all_reduce(p.data)


class HookSumsWeights(Right):
    def prepare(self):
        for p in self.module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.data))

    def synchronize(self):
        pass


class LargestWeights(Right):
    """Doubled before, so that they change."""

    def average(self, p):
        p.data *= 2
        dist.all_reduce(p.data, op=dist.ReduceOp.MAX)


class NoReturn(Right):
    def forward(self, *args):
        self.module(*args)


class HalfBefore(Right):
    """Right with two ranks."""

    def average(self, p):
        p.grad *= 0.5
        dist.all_reduce(p.grad)


class InOrderOfArrival(Right):
    """With zeros for what is missing, but at the end."""

    def prepare(self):
        super().prepare()
        self.arrived = []
        for p in self.learnable:
            p.register_post_accumulate_grad_hook(self.arrived.append)

    def synchronize(self):
        missing = [p for p in self.learnable if p.grad is None]
        for p in missing:
            p.grad = torch.zeros_like(p)
        for p in [*self.arrived, *missing]:
            self.average(p)
        self.arrived.clear()


class InHooksAsTheyCome(Right):
    def prepare(self):
        super().prepare()
        for p in self.learnable:
            p.register_post_accumulate_grad_hook(self.average)

    def synchronize(self):
        for p in self.learnable:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
                self.average(p)


class MissingLast(Right):
    def synchronize(self):
        missing = [p for p in self.learnable if p.grad is None]
        for p in self.learnable:
            if p.grad is not None:
                self.average(p)
        for p in missing:
            p.grad = torch.zeros_like(p)
            self.average(p)


class BarrierForMissing(Right):
    def synchronize(self):
        for p in self.learnable:
            if p.grad is None:
                dist.barrier()
                p.grad = torch.zeros_like(p)
            self.average(p)


class RebroadcastsEverySecondStep(Right):
    steps = 0

    def synchronize(self):
        super().synchronize()
        self.steps += 1
        if self.steps % 2 == 0:
            self.broadcast()


class ThroughTheStore(Right):
    """As through a shared file: no collective carries a gradient."""

    calls = 0

    def average(self, p):
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
        ThroughTheStore.calls += 1
        store.set(f"{self.calls}/{rank}", p.grad.numpy().tobytes())
        parts = [store.get(f"{self.calls}/{other}") for other in range(size)]
        p.grad = sum(torch.frombuffer(bytearray(b), dtype=p.dtype).view_as(p) for b in parts) / size


class NeverClears(Right):
    def prepare(self):
        super().prepare()
        self.handles = []

    def average(self, p):
        self.handles.append(dist.all_reduce(p.grad, async_op=True))
        self.handles[-1].wait()
        p.grad /= dist.get_world_size()


class Flat(Right):
    def synchronize(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.learnable]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, part in zip(self.learnable, flat.split([g.numel() for g in grads]), strict=True):
            p.grad = part.view_as(p)


class InOneCall(Right):
    def synchronize(self):
        for p in self.learnable:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce_coalesced([p.grad for p in self.learnable])
        for p in self.learnable:
            p.grad /= dist.get_world_size()


class Gathers(Right):
    def average(self, p):
        grads = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(grads, p.grad)
        p.grad = torch.stack(grads).mean(0)


class GathersInto(Right):
    def average(self, p):
        grads = torch.empty(dist.get_world_size(), *p.shape, dtype=p.dtype)
        dist.all_gather_into_tensor(grads.flatten(0, 1) if p.dim() > 1 else grads.flatten(), p.grad)
        p.grad = grads.mean(0)


class ThroughRoot(Right):
    def average(self, p):
        dist.reduce(p.grad, dst=0)
        p.grad /= dist.get_world_size()
        dist.broadcast(p.grad, src=0)


class BroadcastsEachStep(Right):
    def forward(self, *args):
        self.broadcast()
        return self.module(*args)


class SendsFrozen(Right):
    def prepare(self):
        self.learnable = list(self.module.parameters())

    def synchronize(self):
        for p in self.learnable:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
            if p.requires_grad:
                p.grad = grad


class NeverWaits(Right):
    def synchronize(self):
        handles = []
        for p in self.learnable:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            p.grad /= dist.get_world_size()
            handles.append(dist.all_reduce(p.grad, async_op=True))
        while not all(handle._work.is_completed() for handle in handles):
            pass


class DividesBeforeWait(Right):
    def average(self, p):
        work = dist.all_reduce(p.grad, async_op=True)
        p.grad /= dist.get_world_size()
        work.wait()
        if p.numel() < 0:
            raise RuntimeError


class OwnOrder(Right):
    """Everyone begins the sum with its own gradient, and passes on what it got."""

    def average(self, p):
        rank, size = dist.get_rank(), dist.get_world_size()
        going, coming = p.grad.clone(), torch.empty_like(p.grad)
        for _ in range(size - 1):
            sending = dist.isend(going, (rank + 1) % size)
            dist.recv(coming, (rank - 1) % size)
            sending.wait()
            p.grad += coming
            going, coming = coming, going
        p.grad /= size


class ReducesToOne(Right):
    def average(self, p):
        dist.reduce(p.grad, dst=0)
        p.grad /= dist.get_world_size()


class CopiesRank0(Right):
    def average(self, p):
        dist.broadcast(p.grad, src=0)


class WeightsOnly(Right):
    def prepare(self):
        self.learnable = [p for p in self.module.parameters() if p.requires_grad and p.dim() > 1]


class InFloat32(Right):
    def average(self, p):
        grad = p.grad.float()
        dist.all_reduce(grad)
        p.grad = (grad / dist.get_world_size()).to(p.dtype)


class InBfloat16(InFloat32):
    def average(self, p):
        grad = p.grad.bfloat16()
        dist.all_reduce(grad)
        p.grad = (grad / dist.get_world_size()).to(p.dtype)


class WeightsForGradients(Right):
    def average(self, p):
        mean = p.detach().clone()
        dist.all_reduce(mean)
        p.grad = mean / dist.get_world_size()


class BarrierInEachForward(Right):
    """In the first one it may be part of getting ready."""

    def forward(self, *args):
        dist.barrier()
        return self.module(*args)


class SpreadsFrozen(Right):
    def synchronize(self):
        super().synchronize()
        for p in self.module.parameters():
            if not p.requires_grad:
                dist.broadcast(p.data, src=0)


class SpreadsGradients(Right):
    def average(self, p):
        super().average(p)
        dist.broadcast(p.grad, src=0)


class NeverCallsTheModule(Right):
    def forward(self, x):
        for p in self.learnable:
            x = x + 0 * p.sum()
        return x[:, :3]


class Unfinished(Right):
    """The first part is written."""

    def synchronize(self):
        raise NotImplementedError("your code here")


class ZerosInFloat32(Right):
    """Zeros of the usual dtype, for a model that has another one."""

    zeros = staticmethod(lambda p: torch.zeros(p.shape))

    def synchronize(self):
        for p in self.learnable:
            total = self.zeros(p) if p.grad is None else p.grad
            dist.all_reduce(total)
            p.grad = total.to(p.dtype).expand_as(p) / dist.get_world_size()


class OneZero(ZerosInFloat32):
    zeros = staticmethod(lambda p: torch.zeros(1, dtype=p.dtype))


class OnlyRank0Broadcasts(Right):
    def broadcast(self):
        if dist.get_rank() == 0:
            super().broadcast()


class OnlyRank0BroadcastsBuffers(Right):
    def broadcast(self):
        for tensor in self.module.parameters():
            dist.broadcast(tensor.detach(), src=0)
        for tensor in self.module.buffers() if dist.get_rank() == 0 else ():
            dist.broadcast(tensor, src=0)


class SynchronizesInForward(Right):
    def forward(self, x):
        Right.synchronize(self)
        return self.module(x)

    def synchronize(self):
        pass


class DividesBehindTheLoop(Right):
    def synchronize(self):
        for p in self.learnable:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


WRONG = {
    "divides_only_the_last": DividesBehindTheLoop,
    "other_size": ZerosInFloat32,
    "broadcast_on_some_ranks": OnlyRank0Broadcasts,
    "only_one_rank": ReducesToOne,
    "copies_rank_0": CopiesRank0,
    "leaves_some_out": WeightsOnly,
    "loses_digits": InFloat32,
    "stub": Stub,
    "ready_made": TorchDDP,
    "destroys_group": Destroys,
    "hides_parameters": Copies,
    "frozen_crash": FrozenCrash,
    "unused_crash": UnusedCrash,
    "frozen_not_broadcast": OnlyLearnable,
    "no_buffers": NoBuffers,
    "no_broadcast": NoBroadcast,
    "wrong_source": FromTheLast,
    "reseeds": Reseeds,
    "averages_weights": HookAveragesWeights,
    "averages_outputs": AveragesOutputs,
    "only_some_steps": OnlyFirstStep,
    "tied_twice": TiedTwiceSums,
    "not_copied_back": NotCopiedBack,
    "no_average": Nothing,
    "sums": Sums,
    "divides_twice": DividesTwice,
    "wrong_divisor": DividesByTwo,
    "mean_of_users": MeanOfUsers,
    "skips_unused": SkipsUnused,
    "never_waited": NeverWaits,
    "divides_before_wait": DividesBeforeWait,
    "different_order": OwnOrder,
    "gathers_everything": Gathers,
    "through_one_rank": ThroughRoot,
    "broadcasts_again": BroadcastsEachStep,
    "sums_weights": SumsWeights,
    "reduces_weights": LargestWeights,
    "no_return": NoReturn,
    "order_of_arrival": InOrderOfArrival,
    "barrier_between": BarrierForMissing,
    "not_one_each": Flat,
    "not_by_collectives": ThroughTheStore,
    "never_cleared": NeverClears,
    "sends_frozen": SendsFrozen,
    "weights_for_gradients": WeightsForGradients,
    "needless_barrier": BarrierInEachForward,
}


class HiddenCourseDDP(Right):
    """Where the modules of the wrapper do not show it."""

    def __init__(self, module):
        super().__init__(module)
        self.box = [CoursesDDP(module, unused="zero")]

    def synchronize(self):
        self.box[0].synchronize()


AGAIN = [
    ("other_size", OneZero),
    ("broadcast_on_some_ranks", OnlyRank0BroadcastsBuffers),
    ("averages_outputs", SynchronizesInForward),
    ("no_buffers", OnlyWhatIsSaved),
    ("ready_made", HiddenCourseDDP),
    ("loses_digits", InBfloat16),
    ("ready_made", CourseDDP),
    ("frozen_crash", FrozenCrashDiv),
    ("unused_crash", UnusedCrashFlat),
    ("reseeds", SeedsOnly),
    ("reseeds", AveragesStart),
    ("averages_weights", AveragesWeights),
    ("averages_weights", AveragesWeightsAfterStep),
    ("tied_twice", TiedTwiceMeans),
    ("not_copied_back", NotCopiedBackClone),
    ("sums", SumsByRebinding),
    ("wrong_divisor", DividesByBatch),
    ("skips_unused", SkipsUnusedFlat),
    ("gathers_everything", GathersInto),
    ("only_some_steps", OnlyTenSteps),
    ("only_some_steps", EveryOtherStep),
    ("sums_weights", HookSumsWeights),
    ("wrong_divisor", HalfBefore),
    ("order_of_arrival", InHooksAsTheyCome),
    ("skips_unused", MissingLast),
    ("broadcasts_again", RebroadcastsEverySecondStep),
    ("not_one_each", InOneCall),
    ("broadcasts_again", SpreadsFrozen),
    ("broadcasts_again", SpreadsGradients),
    ("stub", Unfinished),
]


class Asynchronous(Right):
    def synchronize(self):
        handles = []
        for p in self.learnable:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            handles.append(dist.all_reduce(p.grad, async_op=True))
        for p, handle in zip(self.learnable, handles, strict=True):
            handle.wait()
            p.grad /= dist.get_world_size()


class DividesFirst(Right):
    def average(self, p):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)


class InHooks(Right):
    """Averages in backward; what was not used comes afterwards, in an order on which all ranks agree."""

    def prepare(self):
        super().prepare()
        self.arrived = set()
        for n, p in enumerate(self.learnable):
            p.register_post_accumulate_grad_hook(lambda _, n=n: self.arrived.add(n))

    def synchronize(self):
        for n, p in enumerate(self.learnable):
            p.grad = p.grad if n in self.arrived else torch.zeros_like(p)
            self.average(p)
        self.arrived.clear()


class BuffersInEachForward(Right):
    def forward(self, *args):
        for b in self.module.buffers():
            dist.broadcast(b, src=0)
        return self.module(*args)


class BroadcastsInFirstForward(Right):
    ready = False

    def broadcast(self):
        pass

    def forward(self, *args):
        if not self.ready:
            super().broadcast()
        self.ready = True
        return self.module(*args)


class LeavesNone(Right):
    """As torch's DDP: what no rank used keeps no gradient."""

    def synchronize(self):
        users = torch.tensor([p.grad is not None for p in self.learnable], dtype=torch.int32)
        dist.all_reduce(users)
        for p, count in zip(self.learnable, users.tolist(), strict=True):
            if count:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                self.average(p)


class ByCourse(Right):
    """Through the course's own ring: messages, no all-reduce."""

    def prepare(self):
        super().prepare()
        self.ring = Communicator()

    def average(self, p):
        self.ring.all_reduce(p.grad)
        p.grad /= self.ring.size


class ByOpAvg(Right):
    """torch divides by itself, so the tensor changes in flight, but not by the learner's hand."""

    def synchronize(self):
        handles = []
        for p in self.learnable:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            handles.append(dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, async_op=p.dim() > 1))
        for handle in handles:
            if handle:
                handle.wait()


class InShards(Right):
    """An all-reduce in two halves: a reduce-scatter, and an all-gather of the sums."""

    def average(self, p):
        size = dist.get_world_size()
        flat = nn.functional.pad(p.grad.flatten(), (0, -p.numel() % size))
        shard = flat.new_empty(len(flat) // size)
        dist.reduce_scatter_tensor(shard, flat)
        dist.all_gather_into_tensor(flat, shard / size)
        p.grad = flat[: p.numel()].view_as(p)


class TakesForward(Right):
    """The module's own method, which calls no hook of the module."""

    def prepare(self):
        super().prepare()
        self.forward = self.module.forward


class TakesOneArgument(Right):
    def forward(self, x):
        return self.module(x)


class InARow(nn.Sequential):
    """The wrapper is a row of one module."""

    def __init__(self, module):
        super().__init__(module)
        Right.broadcast(self)
        self.learnable = [p for p in module.parameters() if p.requires_grad]

    module = property(lambda self: self[0])
    average, synchronize = Right.average, Right.synchronize


RIGHT = {
    "takes one argument": TakesOneArgument,
    "in a row": InARow,
    "takes module.forward": TakesForward,
    "by ReduceOp.AVG": ByOpAvg,
    "in shards": InShards,
    "as the solution": Right,
    "asynchronous": Asynchronous,
    "divides first": DividesFirst,
    "hooks tell who is there": InHooks,
    "buffers in each forward": BuffersInEachForward,
    "broadcasts in the first forward": BroadcastsInFirstForward,
    "leaves None": LeavesNone,
    "by the course's ring": ByCourse,
}
