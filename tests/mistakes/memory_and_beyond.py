"""Wrong and right answers to exercise 12. The name of a wrong answer is the verdict that it must get."""

import torch
import torch.distributed as dist
from torch import nn

from course_lib.parallel.zero import ZeroOne as CoursesZeroOne


class Right:
    """As the solution, in parts that can be exchanged."""

    def __init__(self, params, make_optimizer):
        self.params = self.choose(params)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.total = sum(p.numel() for p in self.params)
        self.make_optimizer = make_optimizer
        self.part = self.own(self.flat(self.params))
        self.optimizer = self.made()

    def choose(self, params):
        return [p for p in params if p.requires_grad]

    def made(self):
        return self.make_optimizer([self.part])

    def flat(self, tensors):
        pieces = [t.detach().flatten() for t in tensors]
        return torch.cat([*pieces, pieces[0].new_zeros(-self.total % self.ranks)])

    def own(self, flat):
        return flat.chunk(self.ranks)[self.rank].clone()

    def gradient(self, p):
        return torch.zeros_like(p) if p.grad is None else p.grad

    def step(self):
        self.part.grad = self.reduced(self.flat([self.gradient(p) for p in self.params]))
        self.update()
        self.write(self.gathered())

    def reduced(self, gradients):
        found = gradients.new_empty(len(self.part))
        dist.reduce_scatter_single(found, gradients)
        return found / self.ranks

    def update(self):
        self.optimizer.step()

    def gathered(self):
        weights = self.part.new_empty(len(self.part) * self.ranks)
        dist.all_gather_single(weights, self.part.detach())
        return weights

    def write(self, weights):
        sizes = [p.numel() for p in self.params]
        for p, piece in zip(self.params, weights[: self.total].split(sizes), strict=True):
            p.data.copy_(piece.view_as(p))

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Stub(Right):
    def __init__(self, params, make_optimizer):
        raise NotImplementedError


class Torchs:
    """torch's own, which takes the optimizer as a class."""

    def __init__(self, params, make_optimizer):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self.params = [p for p in params if p.requires_grad]
        self.inner = ZeroRedundancyOptimizer(self.params, lambda params, **_: make_optimizer(params))

    def step(self):
        for p in self.params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


class Courses(CoursesZeroOne):
    def __init__(self, params, make_optimizer):
        super().__init__(params, make_optimizer)


class Destroys(Right):
    def step(self):
        super().step()
        if self.ranks == 1:
            dist.destroy_process_group()


class GeneratorTwice(Right):
    def choose(self, params):
        self.count = sum(1 for p in params if p.requires_grad)
        return [p for p in params if p.requires_grad]

    def flat(self, tensors):
        return torch.cat([t.detach().flatten() for t in tensors])


class GeneratorTwiceQuietly(GeneratorTwice):
    def flat(self, tensors):
        pieces = [t.detach().flatten() for t in tensors]
        return torch.cat([*pieces, torch.zeros(self.ranks, dtype=torch.float64)])


class NoPadding(Right):
    def flat(self, tensors):
        return torch.cat([t.detach().flatten() for t in tensors])


class NoPaddingView(NoPadding):
    def own(self, flat):
        return flat.view(self.ranks, -1)[self.rank].clone()


class NoPaddingLists(NoPadding):
    """chunk makes a last part that is shorter."""

    def reduced(self, gradients):
        found = torch.empty_like(self.part)
        dist.reduce_scatter(found, list(gradients.chunk(self.ranks)))
        return found / self.ranks

    def gathered(self):
        pieces = [torch.empty_like(piece) for piece in self.flat(self.params).chunk(self.ranks)]
        dist.all_gather(pieces, self.part)
        return torch.cat(pieces)


class LeafInPlace(Right):
    def write(self, weights):
        at = 0
        for p in self.params:
            p.copy_(weights[at : at + p.numel()].view_as(p))
            at += p.numel()


class ParameterIsSent(Right):
    def own(self, flat):
        return nn.Parameter(super().own(flat))

    def gathered(self):
        weights = self.part.new_empty(len(self.part) * self.ranks)
        dist.all_gather_single(weights, self.part)
        return weights


class FrozenCrash(Right):
    """Takes all parameters, and zeros for none."""

    def choose(self, params):
        return list(params)

    def gradient(self, p):
        return p.grad


class UnusedCrash(Right):
    def gradient(self, p):
        return p.grad


class SkipsUnused(Right):
    def step(self):
        gradients = torch.cat([p.grad.flatten() for p in self.params if p.grad is not None])
        padding = gradients.new_zeros(-len(gradients) % self.ranks)
        self.part.grad = self.reduced(torch.cat([gradients, padding]))
        self.update()
        self.write(self.gathered())


class SkipsUnusedQuietly(Right):
    """Fills with zeros, but at the end."""

    def step(self):
        gradients = torch.cat([p.grad.flatten() for p in self.params if p.grad is not None])
        padding = gradients.new_zeros(len(self.part) * self.ranks - len(gradients))
        self.part.grad = self.reduced(torch.cat([gradients, padding]))
        self.update()
        self.write(self.gathered())


class OwnOptimizer(Right):
    def made(self):
        return torch.optim.Adam([self.part], lr=0.1)


class NeverSteps(Right):
    def update(self):
        pass


class NoGradient(Right):
    def step(self):
        self.gradients = self.reduced(self.flat([self.gradient(p) for p in self.params]))
        self.update()
        self.write(self.gathered())


class GradientOfACopy(Right):
    """The optimizer has got another tensor."""

    def made(self):
        return self.make_optimizer([self.part.clone()])


class NotWrittenBack(Right):
    def write(self, weights):
        self.weights = weights


class WritesIntoACopy(Right):
    def write(self, weights):
        flat = self.flat(self.params)
        flat.copy_(weights)


class LeavesRestOut(Right):
    def flat(self, tensors):
        flat = torch.cat([t.detach().flatten() for t in tensors])
        return flat[: self.total // self.ranks * self.ranks]

    def write(self, weights):
        at = 0
        for p in self.params:
            piece = weights[at : at + p.numel()]
            p.data.view(-1)[: len(piece)] = piece
            at += p.numel()


class SaysNothing(Right):
    def reduced(self, gradients):
        return self.own(gradients)

    def gathered(self):
        weights = self.flat(self.params)
        weights.chunk(self.ranks)[self.rank].copy_(self.part)
        return weights


class NotGathered(Right):
    def gathered(self):
        return SaysNothing.gathered(self)


class GathersTooEarly(Right):
    """Others get this rank's part as it was before the update."""

    def step(self):
        self.part.grad = self.reduced(self.flat([self.gradient(p) for p in self.params]))
        weights = self.gathered()
        self.update()
        weights.chunk(self.ranks)[self.rank].copy_(self.part)
        self.write(weights)


class Sums(Right):
    def reduced(self, gradients):
        return super().reduced(gradients) * self.ranks


class DividesTwice(Right):
    def reduced(self, gradients):
        return super().reduced(gradients / self.ranks)


class OwnGradients(Right):
    def reduced(self, gradients):
        super().reduced(gradients)
        return self.own(gradients)


class OwnGradientsNoScatter(Right):
    def reduced(self, gradients):
        return self.own(gradients)


class ZeroesThePart(Right):
    def zero_grad(self):
        self.optimizer.zero_grad()


class NewOptimizer(Right):
    def update(self):
        self.optimizer = self.made()
        self.optimizer.step()


class NewPart(Right):
    """The state belongs to a tensor that is gone."""

    def step(self):
        self.part = self.own(self.flat(self.params))
        self.optimizer = self.made()
        super().step()


class FrozenMoves(Right):
    def choose(self, params):
        return list(params)


class WrittenInAnotherOrder(Right):
    def write(self, weights):
        at = 0
        for p in reversed(self.params):
            p.data.copy_(weights[at : at + p.numel()].view_as(p))
            at += p.numel()


class GatheredTheWrongWay(Right):
    """Parts end in the order of the ranks, counted backwards."""

    def gathered(self):
        return torch.cat(super().gathered().chunk(self.ranks)[::-1])


class FirstPart(Right):
    def own(self, flat):
        return flat[: len(flat) // self.ranks].clone()


class NextPart(Right):
    def own(self, flat):
        return flat.chunk(self.ranks)[(self.rank + 1) % self.ranks].clone()


class LosesDigits(Right):
    def reduced(self, gradients):
        return super().reduced(gradients.float()).double()


class SendsFloats(Right):
    def gathered(self):
        weights = torch.empty(len(self.part) * self.ranks)
        dist.all_gather_single(weights, self.part.float())
        return weights.double()


class Whole(Right):
    """Data parallelism: everybody does everything."""

    def made(self):
        return self.make_optimizer(self.params)

    def step(self):
        for p in self.params:
            p.grad = self.gradient(p)
            dist.all_reduce(p.grad)
            p.grad /= self.ranks
        self.update()


class WholeByHalves(Right):
    """The collectives are right, and the whole is updated nevertheless."""

    def __init__(self, params, make_optimizer):
        super().__init__(params, make_optimizer)

    def made(self):
        self.all = self.flat(self.params)
        return self.make_optimizer([self.all])

    def step(self):
        self.part = self.reduced(self.flat([self.gradient(p) for p in self.params]))
        self.all.grad = self.gathered()
        self.update()
        self.write(self.all)


class OneRank(Right):
    """Rank 0 is a server."""

    def made(self):
        return self.make_optimizer(self.params)

    def step(self):
        for p in self.params:
            p.grad = self.gradient(p)
            dist.reduce(p.grad, dst=0)
            p.grad /= self.ranks
        if self.rank == 0:
            self.update()
        for p in self.params:
            dist.broadcast(p.data, src=0)


class WholeParameters(Right):
    """Parameter k belongs to rank k."""

    def made(self):
        self.mine = [p for k, p in enumerate(self.params) if k % self.ranks == self.rank]
        return self.make_optimizer(self.mine) if self.mine else None

    def step(self):
        for k, p in enumerate(self.params):
            p.grad = self.gradient(p)
            dist.reduce(p.grad, dst=k % self.ranks)
            p.grad /= self.ranks
        if self.mine:
            self.update()
        for k, p in enumerate(self.params):
            dist.broadcast(p.data, src=k % self.ranks)


class AllReduces(Right):
    def reduced(self, gradients):
        dist.all_reduce(gradients)
        return self.own(gradients) / self.ranks


class GathersGradients(Right):
    def reduced(self, gradients):
        everyones = gradients.new_empty(self.ranks * len(gradients))
        dist.all_gather_single(everyones, gradients)
        return self.own(everyones.view(self.ranks, -1).mean(0))


class GathersWhole(Right):
    def gathered(self):
        mine = self.flat(self.params)
        mine.chunk(self.ranks)[self.rank].copy_(self.part)
        everyones = mine.new_empty(self.ranks, len(mine))
        dist.all_gather_single(everyones.view(-1), mine)
        return torch.cat([row.chunk(self.ranks)[rank] for rank, row in enumerate(everyones)])


class OwnOrder(Whole):
    """Each rank adds the gradients of all, beginning with its own."""

    def step(self):
        mine = self.flat([self.gradient(p) for p in self.params])
        everyones = mine.new_empty(self.ranks, len(mine))
        dist.all_gather_single(everyones.view(-1), mine)
        total = sum(everyones[(self.rank + k) % self.ranks] for k in range(self.ranks)) / self.ranks
        at = 0
        for p in self.params:
            p.grad = total[at : at + p.numel()].view_as(p)
            at += p.numel()
        self.update()


class NeverWaited(Right):
    def gathered(self):
        weights = self.part.new_empty(len(self.part) * self.ranks)
        self.work = dist.all_gather_single(weights, self.part, async_op=True)
        return weights


class EachParameter(Right):
    """Right: each parameter is cut and padded by itself; the lists of the older collectives."""

    def __init__(self, params, make_optimizer):
        self.params = [p for p in params if p.requires_grad]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.parts = [self.cut(p.detach())[self.rank].clone() for p in self.params]
        self.optimizer = make_optimizer(self.parts)

    def cut(self, tensor):
        flat = tensor.flatten()
        return list(torch.cat([flat, flat.new_zeros(-len(flat) % self.ranks)]).chunk(self.ranks))

    def step(self):
        for p, part in zip(self.params, self.parts, strict=True):
            part.grad = torch.empty_like(part)
            dist.reduce_scatter(part.grad, self.cut(self.gradient(p)))
            part.grad.div_(self.ranks)
        self.optimizer.step()
        with torch.no_grad():
            for p, part in zip(self.params, self.parts, strict=True):
                pieces = [torch.empty_like(part) for _ in range(self.ranks)]
                dist.all_gather(pieces, part)
                p.copy_(torch.cat(pieces)[: p.numel()].view_as(p))


class EachUsedParameter(EachParameter):
    """Who has no gradient of a parameter leaves its collectives out."""

    def step(self):
        used = [(p, part) for p, part in zip(self.params, self.parts, strict=True) if p.grad is not None]
        everything = self.params, self.parts
        self.params, self.parts = zip(*used, strict=True)
        super().step()
        self.params, self.parts = everything


ZERO_WRONG = {
    "stub": Stub,
    "ready_made": Courses,
    "destroys_group": Destroys,
    "generator_used_up": GeneratorTwice,
    "no_padding": NoPadding,
    "leaf_in_place": LeafInPlace,
    "parameter_is_sent": ParameterIsSent,
    "frozen_crash": FrozenCrash,
    "unused_crash": UnusedCrash,
    "skips_unused": SkipsUnused,
    "own_optimizer": OwnOptimizer,
    "never_steps": NeverSteps,
    "no_gradient": NoGradient,
    "not_written_back": NotWrittenBack,
    "leaves_rest_out": LeavesRestOut,
    "says_nothing": SaysNothing,
    "not_gathered": NotGathered,
    "sums": Sums,
    "divides_twice": DividesTwice,
    "own_gradients": OwnGradients,
    "accumulates": ZeroesThePart,
    "forgets_state": NewOptimizer,
    "frozen_moves": FrozenMoves,
    "wrong_place": GatheredTheWrongWay,
    "other_part": NextPart,
    "loses_digits": LosesDigits,
    "state_not_cut": Whole,
    "one_rank_has_all": OneRank,
    "whole_parameters": WholeParameters,
    "all_reduce_instead": AllReduces,
    "gathers_gradients": GathersGradients,
    "gathers_whole": GathersWhole,
    "different_bits": OwnOrder,
    "never_waited": NeverWaited,
}
ZERO_AGAIN = [  # the same mistakes in other words
    ("ready_made", Torchs),
    ("generator_used_up", GeneratorTwiceQuietly),
    ("no_padding", NoPaddingView),
    ("no_padding", NoPaddingLists),
    ("skips_unused", SkipsUnusedQuietly),
    ("skips_unused", EachUsedParameter),
    ("no_gradient", GradientOfACopy),
    ("not_written_back", WritesIntoACopy),
    ("not_gathered", GathersTooEarly),
    ("own_gradients", OwnGradientsNoScatter),
    ("forgets_state", NewPart),
    ("wrong_place", WrittenInAnotherOrder),
    ("other_part", FirstPart),
    ("loses_digits", SendsFloats),
    ("state_not_cut", WholeByHalves),
]


class Views(Right):
    """Parameters are views of one flat tensor, the part is one, too: the all-gather writes the model's weights."""

    def __init__(self, params, make_optimizer):
        super().__init__(params, make_optimizer)
        self.whole = self.flat(self.params)
        at = 0
        for p in self.params:
            p.data = self.whole[at : at + p.numel()].view_as(p)
            at += p.numel()
        self.part = nn.Parameter(self.whole.view(self.ranks, -1)[self.rank])
        self.optimizer = make_optimizer([self.part])

    def made(self):
        return None

    def gathered(self):
        dist.all_gather_single(self.whole, self.part.detach())
        return self.whole

    def write(self, weights):
        pass

    def zero_grad(self):
        for p in self.params:
            if p.grad is not None:
                p.grad.zero_()


class UnequalParts(Right):
    """No padding: a reduce to each owner, and a broadcast from each."""

    def own(self, flat):
        return flat[: self.total].tensor_split(self.ranks)[self.rank].clone()

    def reduced(self, gradients):
        pieces = gradients[: self.total].tensor_split(self.ranks)
        for owner, piece in enumerate(pieces):
            dist.reduce(piece, dst=owner)
        return pieces[self.rank] / self.ranks

    def gathered(self):
        weights = self.flat(self.params)[: self.total]
        pieces = weights.tensor_split(self.ranks)
        pieces[self.rank].copy_(self.part)
        for owner, piece in enumerate(pieces):
            dist.broadcast(piece, src=owner)
        return weights


class OwnRing(Right):
    """By send and receive, as in exercise 03."""

    def around(self, chunks, first, add):
        for step in range(self.ranks - 1):
            send, receive = (self.rank + first - step) % self.ranks, (self.rank + first - step - 1) % self.ranks
            arrived = torch.empty_like(chunks[receive])
            work = dist.isend(chunks[send].clone(), (self.rank + 1) % self.ranks)
            dist.recv(arrived, (self.rank - 1) % self.ranks)
            work.wait()
            chunks[receive].copy_(chunks[receive] + arrived if add else arrived)

    def reduced(self, gradients):
        chunks = list(gradients.chunk(self.ranks))
        self.around(chunks, -1, add=True)
        return chunks[self.rank] / self.ranks

    def gathered(self):
        weights = self.flat(self.params)
        chunks = list(weights.chunk(self.ranks))
        chunks[self.rank].copy_(self.part)
        self.around(chunks, 0, add=False)
        return weights


class Asynchronous(Right):
    """Waits where it must, and lets torch divide; with the old names of torch."""

    def reduced(self, gradients):
        found = torch.zeros_like(self.part)
        dist.reduce_scatter_tensor(found, gradients, op=dist.ReduceOp.AVG, async_op=True).wait()
        return found

    def gathered(self):
        weights = self.part.new_empty(self.ranks * len(self.part))
        work = dist.all_gather_into_tensor(weights, self.part.detach(), async_op=True)
        work.wait()
        return weights


ZERO_RIGHT = {
    "as the solution": Right,
    "views of one tensor": Views,
    "each parameter by itself": EachParameter,
    "unequal parts": UnequalParts,
    "an own ring": OwnRing,
    "asynchronous, old names": Asynchronous,
}


# bubble(schedule, forward, backward)


def _stub(*_):
    raise NotImplementedError


def _spans(schedule, forward, backward, waits=("forward", "backward"), alone=True):
    """(stage, kind, start, end) of each op, as the solution finds them; a wrong answer leaves some waiting out."""
    todo, free, ends, found = [list(ops) for ops in schedule], [0] * len(schedule), {}, []
    while any(todo):
        for stage, ops in enumerate(todo):
            while ops:
                kind, m = ops[0]
                other = stage - 1 if kind == "forward" else stage + 1
                needs = [(other, kind, m)] if 0 <= other < len(schedule) and kind in waits else []
                needs += [(stage, "forward", m)] if kind == "backward" else []
                if any(need not in ends for need in needs):
                    break
                start = max([free[stage] if alone else 0, *(ends[need] for need in needs)])
                end = start + (forward if kind == "forward" else backward)[stage]
                free[stage] = ends[stage, kind, m] = end
                found.append((stage, kind, start, end))
                ops.pop(0)
    return found


def _work(spans):
    return sum(end - start for *_, start, end in spans)


def _end(spans):
    return max(end for *_, end in spans)


def _share(spans, whole=_end, stages=None):
    return 1 - _work(spans) / ((stages or len({stage for stage, *_ in spans})) * whole(spans))


def _with(judge=_share, **knobs):
    """The solution with some part exchanged. Without arguments it is right."""
    return lambda schedule, forward, backward: judge(_spans(schedule, forward, backward, **knobs))


def _of_stage(which):
    def judge(spans):
        works = [_work([span for span in spans if span[0] == stage]) for stage in {span[0] for span in spans}]
        return which([1 - work / _end(spans) for work in works])

    return judge


def _from_its_first(spans):
    """Each stage from its own first start to its own last end."""
    whole = 0
    for stage in {stage for stage, *_ in spans}:
        ends = [moment for s, _, *moments in spans if s == stage for moment in moments]
        whole += max(ends) - min(ends)
    return 1 - _work(spans) / whole


def _mean_from_its_first(spans):
    stages = {stage for stage, *_ in spans}
    return sum(_from_its_first([span for span in spans if span[0] == stage]) for stage in stages) / len(stages)


def _formula(schedule, forward, backward):
    stages, microbatches = len(schedule), len(schedule[0]) // 2
    return (stages - 1) / (microbatches + stages - 1)


def _paced(schedule, forward, backward):
    slots = len(schedule[0]) // 2 + len(schedule) - 1
    work = len(schedule[0]) // 2 * (sum(forward) + sum(backward))
    return 1 - work / (len(schedule) * slots * (max(forward) + max(backward)))


def _beats(schedule, forward, backward):
    stages, microbatches = len(schedule), len(schedule[0]) // 2
    whole = 0
    for times in (forward, list(reversed(backward))):
        for beat in range(stages + microbatches - 1):
            whole += max(times[max(0, beat - microbatches + 1) : beat + 1])
    return 1 - microbatches * (sum(forward) + sum(backward)) / (stages * whole)


def _gpipe_formula(schedule, forward, backward):
    """Right for GPipe: the slowest stage paces a line of equal jobs."""
    stages, microbatches = len(schedule), len(schedule[0]) // 2
    whole = sum(forward) + sum(backward) + (microbatches - 1) * (max(forward) + max(backward))
    return 1 - microbatches * (sum(forward) + sum(backward)) / (stages * whole)


def _forwards_first(schedule, forward, backward):
    return _with()([sorted(ops, key=lambda op: op[0] == "backward") for ops in schedule], forward, backward)


def _only_forwards(schedule, forward, backward):
    return _share(_spans([[op for op in ops if op[0] == "forward"] for ops in schedule], forward, backward))


def _one_pass(schedule, forward, backward):
    ends = {}
    for stage, ops in enumerate(schedule):
        free = 0
        for kind, m in ops:
            other = stage - 1 if kind == "forward" else stage + 1
            start = max(free, ends[other, kind, m]) if 0 <= other < len(schedule) else free
            free = ends[stage, kind, m] = start + (forward if kind == "forward" else backward)[stage]
    return 1 - len(schedule[0]) / 2 * (sum(forward) + sum(backward)) / (len(schedule) * max(ends.values()))


def _one_pass_quietly(schedule, forward, backward):
    """What is not known yet counts as done at the start."""
    ends, work = {}, 0
    for stage, ops in enumerate(schedule):
        free = 0
        for kind, m in ops:
            other = stage - 1 if kind == "forward" else stage + 1
            length = (forward if kind == "forward" else backward)[stage]
            free = ends[stage, kind, m] = max(free, ends.get((other, kind, m), 0)) + length
            work += length
    return 1 - work / (len(schedule) * max(ends.values()))


def _looks_behind_the_last(schedule, forward, backward):
    length = [[0] * (len(ops) // 2) for ops in schedule]
    return [length[stage + 1][0] for stage in range(len(schedule))]


def _per_gap(schedule, forward, backward):
    """As right as the solution, but for a detour that one stage cannot take."""
    right = _with()(schedule, forward, backward)
    return right / (len(schedule) - 1) * (len(schedule) - 1)


BUBBLE_WRONG = {
    "stub": _stub,
    "nothing": lambda *inputs: None,
    "closed_formula": _formula,
    "busy_share": _with(lambda spans: 1 - _share(spans)),
    "per_work": _with(lambda spans: _share(spans) / (1 - _share(spans))),
    "microseconds": _with(lambda spans: _share(spans) * _end(spans)),
    "per_cent": _with(lambda spans: 100 * _share(spans)),
    "one_stage_only": _with(_of_stage(max)),
    "own_span": _with(_from_its_first),
    "last_start": _with(lambda spans: _share(spans, lambda spans: max(start for *_, start, _ in spans))),
    "forwards_only": _only_forwards,
    "slowest_paces_all": _paced,
    "lockstep": _beats,
    "backward_does_not_wait": _with(waits=("forward",)),
    "forward_does_not_wait": _with(waits=("backward",)),
    "nobody_waits": _with(waits=()),
    "two_at_once": _with(alone=False),
    "forward_time_twice": lambda schedule, forward, backward: _with()(schedule, forward, forward),
    "times_exchanged": lambda schedule, forward, backward: _with()(schedule, backward, forward),
    "as_gpipe": _gpipe_formula,
    "one_stage": _per_gap,
    "not_known_yet": _one_pass,
    "no_neighbour": _looks_behind_the_last,
}
BUBBLE_AGAIN = [  # the same mistakes in other words
    ("one_stage_only", _with(_of_stage(min))),
    ("one_stage_only", _with(_of_stage(lambda shares: shares[0]))),
    ("own_span", _with(_mean_from_its_first)),
    ("microseconds", _with(lambda spans: _share(spans) * _end(spans) * len({stage for stage, *_ in spans}))),
    ("backward_does_not_wait", _one_pass_quietly),
    ("as_gpipe", _forwards_first),
]
BUBBLE_UNNAMED = {
    "a text": (lambda *inputs: f"{_with()(*inputs):.0%}", "a number from 0 to 1 was expected"),
    "rounded": (lambda *inputs: round(_with()(*inputs), 3), "was expected, the function returned"),
    "raises": (lambda schedule, *times: schedule.stages, "the function raised AttributeError"),
}


def _by_recursion(schedule, forward, backward):
    """The end of an op from the ends of those that it waits for; waiting is added up as gaps."""
    known, length = {}, {"forward": forward, "backward": backward}

    def end(stage, number):
        if number < 0:
            return 0
        if (stage, number) not in known:
            kind, m = schedule[stage][number]
            other = stage + (-1 if kind == "forward" else 1)
            there = end(other, schedule[other].index((kind, m))) if 0 <= other < len(schedule) else 0
            known[stage, number] = max(there, end(stage, number - 1)) + length[kind][stage]
        return known[stage, number]

    ends = [[end(stage, number) for number in range(len(ops))] for stage, ops in enumerate(schedule)]
    whole, waited = max(of_stage[-1] for of_stage in ends), 0
    for stage, ops in enumerate(schedule):
        at = 0
        for (kind, _), done in zip(ops, ends[stage], strict=True):
            waited += done - length[kind][stage] - at
            at = done
        waited += whole - at
    return waited / whole / len(schedule)


def _by_a_clock(schedule, forward, backward):
    """Ten microseconds at a time, with numbers that fit."""
    tick = next(t for t in (10, 1) if all(time % t == 0 for time in [*forward, *backward]))
    place, left, done = [0] * len(schedule), [0] * len(schedule), set()
    idle = ticks = 0
    while any(left) or any(at < len(ops) for at, ops in zip(place, schedule, strict=True)):
        for stage, ops in enumerate(schedule):
            if not left[stage] and place[stage] < len(ops):
                kind, m = ops[place[stage]]
                other = stage + (-1 if kind == "forward" else 1)
                if not 0 <= other < len(schedule) or (other, kind, m) in done:
                    left[stage] = (forward if kind == "forward" else backward)[stage] // tick
        idle += left.count(0)
        ticks += 1
        for stage in range(len(schedule)):
            if left[stage]:
                left[stage] -= 1
                if not left[stage]:
                    done.add((stage, *schedule[stage][place[stage]]))
                    place[stage] += 1
    return idle / (ticks * len(schedule))


BUBBLE_RIGHT = {"as the solution": _with(), "by recursion": _by_recursion, "by a clock": _by_a_clock}
