"""Exercise 01: read the environment that torchrun makes, right on any number of nodes."""

import random
from collections.abc import Callable

from course_lib.check.spec import Answer, Case, Mistake, Spec

FIELDS = ("rank", "world_size", "local_rank", "node", "device", "writes_log", "downloads")


def environment(nodes: list[int], node: int, local_rank: int) -> dict[str, str]:
    """What torchrun sets on one rank, when node k runs nodes[k] ranks (torch.distributed.run's documentation)."""
    return {
        "RANK": str(sum(nodes[:node]) + local_rank),
        "WORLD_SIZE": str(sum(nodes)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(nodes[node]),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "MASTER_ADDR": "node-0",
        "MASTER_PORT": "29500",
    }


def right(env: dict[str, str], gpus: int) -> dict:
    """The answer that the exercise asks for; where it must raise, the case says so."""
    local_rank = int(env.get("LOCAL_RANK", 0))
    return {
        "rank": int(env.get("RANK", 0)),
        "world_size": int(env.get("WORLD_SIZE", 1)),
        "local_rank": local_rank,
        "node": int(env.get("GROUP_RANK", 0)),
        "device": f"cuda:{local_rank}" if gpus else "cpu",
        "writes_log": int(env.get("RANK", 0)) == 0,
        "downloads": local_rank == 0,
    }


def _case(group: str, nodes: list[int], node: int, local_rank: int, gpus: int) -> Case:
    env = environment(nodes, node, local_rank)
    size = " and ".join(map(str, nodes)) if len(set(nodes)) > 1 else f"{nodes[0]} each"
    story = f"{len(nodes)} node{'s' * (len(nodes) > 1)}, ranks: {size}, GPUs a node: {gpus}; RANK={env['RANK']}, "
    return Case(group, f"{story}LOCAL_RANK={local_rank}, node {node}", (env, gpus), right(env, gpus))


def cases(rng: random.Random) -> list[Case]:
    """Fresh layouts each time."""
    size, others = rng.randint(2, 8), rng.randint(2, 4)
    uneven = [rng.randint(2, 4), rng.randint(5, 8)]
    found = [_case("one node, no GPU", [size], 0, k, 0) for k in (0, size - 1)]
    found += [_case("one node with GPUs", [size], 0, k, size) for k in (0, size - 1)]
    found += [
        _case("several nodes with GPUs", [size] * others, node, k, 8)
        for node, k in ((0, 0), (1, 0), (others - 1, size - 1))
    ]
    found += [_case("nodes of different size", uneven, 1, k, 8) for k in (0, uneven[0], uneven[1] - 1)]
    alone: dict[str, str] = {}
    for gpus in (0, 1):
        story = f"started by plain `python`, without torchrun, on a machine with {gpus} GPUs"
        found.append(Case("without torchrun", story, (alone, gpus), right(alone, gpus)))
    few = environment([4], 0, 3)
    story = "4 ranks on a machine with 2 GPUs, LOCAL_RANK=3: there is no GPU for this rank"
    found.append(Case("more ranks than GPUs", story, (few, 2), ValueError))
    return found


def compare(case: Case, answer: Answer) -> str | None:
    """None when right, else what differs."""
    if case.expected is ValueError:
        if "ValueError" in answer.kinds:
            return None
        got = f"raised {answer.error}: {answer.message}" if answer.error else f"returned {_field(answer, 'device')!r}"
        return f"a ValueError was expected, the function {got}."
    if answer.error:
        return f"the function raised {answer.error}: {answer.message}."
    if not isinstance(answer.value, dict):
        return f"a dictionary was expected, the function returned {answer.value!r}."
    for name in FIELDS:
        if name not in answer.value:
            return f"the answer has no {name!r}."
        got, want = answer.value[name], case.expected[name]
        if type(got) is not type(want) or got != want:
            return f"{name} must be {want!r}, and is {got!r}."
    return None


def _field(answer: Answer, name: str) -> object:
    got = answer.value.get(name) if isinstance(answer.value, dict) else answer.value
    return got if isinstance(got, (int, str)) else None  # an array has no truth value


def _wrong(name: str, value: Callable[[dict[str, str]], object]) -> Callable[[Case, Answer], bool]:
    """Fits when field `name` is wrong and is what `value(env)` gives."""

    def fits(case: Case, answer: Answer) -> bool:
        env = case.inputs[0]
        if not env or not isinstance(answer.value, dict) or case.expected is ValueError:
            return False
        got = answer.value.get(name)
        return isinstance(got, (int, str)) and got != case.expected[name] and got == value(env)

    return fits


def _is_text(case: Case, answer: Answer) -> bool:
    return any(isinstance(_field(answer, n), str) for n in ("rank", "world_size", "local_rank", "node"))


def _reads_own_environment(case: Case, answer: Answer) -> bool:
    # the judge runs the function as rank 0 of 1: whoever reads os.environ sees that
    return case.inputs[0].get("WORLD_SIZE", "1") != "1" and _field(answer, "world_size") == 1


def _division(env: dict[str, str]) -> int:
    return int(env["RANK"]) // int(env["LOCAL_WORLD_SIZE"])


MISTAKES = (
    Mistake("text", _is_text, "Environment variables are text: '10' < '9' is true for text. Turn each into an int."),
    Mistake(
        "own_environment",
        _reads_own_environment,
        "The function reads os.environ. It gets the environment as `env`: use that, so that it can be tested.",
    ),
    Mistake(
        "local_rank_as_rank",
        _wrong("rank", lambda env: int(env["LOCAL_RANK"])),
        "LOCAL_RANK counts from 0 again on each node: with two nodes, two ranks would both be rank 0. RANK is unique.",
    ),
    Mistake(
        "local_world_size",
        _wrong("world_size", lambda env: int(env["LOCAL_WORLD_SIZE"])),
        "LOCAL_WORLD_SIZE counts the ranks of this node only. WORLD_SIZE counts all of them.",
    ),
    Mistake(
        "rank_as_local_rank",
        _wrong("local_rank", lambda env: int(env["RANK"])),
        "RANK counts over all nodes; on the second node it is larger than any GPU number there. Use LOCAL_RANK.",
    ),
    Mistake(
        "node_by_division",
        _wrong("node", _division),
        "RANK // LOCAL_WORLD_SIZE is the node only when all nodes have the same number of ranks. torchrun says which "
        "node it is: GROUP_RANK.",
    ),
    Mistake(
        "gpu_that_is_not_there",
        lambda case, answer: not case.inputs[1] and str(_field(answer, "device")).startswith("cuda"),
        "This machine has no GPU (gpus is 0), so the device is 'cpu'.",
    ),
    Mistake(
        "rank_as_device",
        _wrong("device", lambda env: f"cuda:{env['RANK']}"),
        "The second node has no GPU with that number: GPUs are numbered from 0 on each node, as LOCAL_RANK is.",
    ),
    Mistake(
        "one_device",
        _wrong("device", lambda env: "cuda:0"),
        "All ranks of a node would share its first GPU (NCCL then says 'Duplicate GPU detected'). Use LOCAL_RANK.",
    ),
    Mistake(
        "device_without_number",
        _wrong("device", lambda env: "cuda"),
        "'cuda' means the current device, which is GPU 0 in every rank unless it was set. Name it: 'cuda:LOCAL_RANK'.",
    ),
    Mistake(
        "log_on_each_node",
        _wrong("writes_log", lambda env: env["LOCAL_RANK"] == "0"),
        "The log is written once in the whole job, by rank 0; LOCAL_RANK 0 exists on every node.",
    ),
    Mistake(
        "download_on_one_node",
        _wrong("downloads", lambda env: env["RANK"] == "0"),
        "Each node has its own disk: one rank of each node downloads, the one with LOCAL_RANK 0.",
    ),
    Mistake(
        "needs_torchrun",
        lambda case, answer: not case.inputs[0] and answer.error == "KeyError",
        "Without torchrun none of the variables is there. Then this process is the only rank: rank 0 of 1.",
    ),
    Mistake(
        "no_check",
        lambda case, answer: case.expected is ValueError and answer.error is None,
        "Say it here, with both numbers; otherwise the job dies later, in CUDA's words: 'invalid device ordinal'.",
    ),
)

SPEC = Spec("01_ranks", "read_environment", 5, cases, MISTAKES, compare)
