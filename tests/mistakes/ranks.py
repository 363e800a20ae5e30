"""Wrong and right answers to exercise 01. The name of a wrong answer is the verdict that it must get."""

import os
import sys

import torch


def _right(env, gpus):
    local = int(env.get("LOCAL_RANK", 0))
    if gpus and local >= gpus:
        raise ValueError(f"LOCAL_RANK {local}, but only {gpus} GPUs")
    return {
        "rank": int(env.get("RANK", 0)),
        "world_size": int(env.get("WORLD_SIZE", 1)),
        "local_rank": local,
        "node": int(env.get("GROUP_RANK", 0)),
        "device": f"cuda:{local}" if gpus else "cpu",
        "writes_log": int(env.get("RANK", 0)) == 0,
        "downloads": local == 0,
    }


def _with(**changes):
    def answer(env, gpus):
        found = _right(env, gpus)
        return {**found, **{name: change(env, found) for name, change in changes.items()}} if env else found

    return answer


def _needs_torchrun(env, gpus):
    int(env["RANK"])
    return _right(env, gpus)


def _no_check(env, gpus):
    return _right(env, gpus if int(env.get("LOCAL_RANK", 0)) < gpus else 0)


def _stub(env, gpus):
    raise NotImplementedError


def _never(env, gpus):
    while True:
        pass


def _leaves(env, gpus):
    os._exit(0)


WRONG = {
    "text": _with(rank=lambda env, _: env["RANK"]),
    "own_environment": lambda env, gpus: _right(os.environ, gpus),
    "local_rank_as_rank": _with(rank=lambda env, _: int(env["LOCAL_RANK"])),
    "local_world_size": _with(world_size=lambda env, _: int(env["LOCAL_WORLD_SIZE"])),
    "rank_as_local_rank": _with(local_rank=lambda env, _: int(env["RANK"])),
    "node_by_division": _with(node=lambda env, _: int(env["RANK"]) // int(env["LOCAL_WORLD_SIZE"])),
    "rank_as_device": _with(device=lambda env, f: f"cuda:{env['RANK']}" if f["device"] != "cpu" else "cpu"),
    "one_device": _with(device=lambda env, f: "cuda:0" if f["device"] != "cpu" else "cpu"),
    "device_without_number": _with(device=lambda env, f: "cuda" if f["device"] != "cpu" else "cpu"),
    "gpu_that_is_not_there": _with(device=lambda env, _: f"cuda:{env['LOCAL_RANK']}"),
    "log_on_each_node": _with(writes_log=lambda env, _: env["LOCAL_RANK"] == "0"),
    "download_on_one_node": _with(downloads=lambda env, _: env["RANK"] == "0"),
    "needs_torchrun": _needs_torchrun,
    "no_check": _no_check,
    "stub": _stub,
    "no_answer": _leaves,
}
UNNAMED = {
    "returns nothing": lambda env, gpus: None,
    "a field is missing": lambda env, gpus: {"rank": int(env.get("RANK", 0))},
    "True for rank 1": _with(rank=lambda env, f: bool(f["rank"])),
    "crashes": lambda env, gpus: 1 / 0,
    "takes one argument": lambda env: {},
    "generator": lambda env, gpus: (k for k in env),
    "array": lambda env, gpus: {"rank": torch.tensor([1, 2])},
    "leaves": lambda env, gpus: sys.exit(),
}
ENDLESS = _never


def _by_get(env, gpus):
    number = {k: int(env.get(k, d)) for k, d in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"))}
    assert isinstance(number["RANK"], int)
    if 0 < gpus <= number["LOCAL_RANK"]:
        raise ValueError("not enough GPUs")
    return {
        "rank": number["RANK"],
        "world_size": number["WORLD_SIZE"],
        "local_rank": number["LOCAL_RANK"],
        "node": int(env.get("GROUP_RANK") or 0),
        "device": "cpu" if gpus == 0 else "cuda:" + str(number["LOCAL_RANK"]),
        "writes_log": not number["RANK"],
        "downloads": not number["LOCAL_RANK"],
    }


def _by_cases(env, gpus):
    if "RANK" not in env:
        env = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "GROUP_RANK": 0}
    names = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "node": "GROUP_RANK"}
    place = {name: int(env[variable]) for name, variable in names.items()}
    place["device"] = "cpu"
    if gpus:
        place["device"] = (
            [f"cuda:{k}" for k in range(gpus)][place["local_rank"]] if place["local_rank"] < gpus else None
        )
        if place["device"] is None:
            raise ValueError("too few GPUs")
    return place | {"writes_log": place["rank"] == 0, "downloads": place["local_rank"] == 0, "extra": 1}


RIGHT = {"as the solution": _right, "with get": _by_get, "with tables": _by_cases}
