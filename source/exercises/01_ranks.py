# %% [markdown]
# # Exercise 01: who am I?
#
# **Difficulty** easy · **Time** 15 minutes · **You write** about 12 lines · **Points** 5
#
# The same program runs on every rank. The environment that `torchrun` made is all that tells one rank from
# another. Read it once, in one function, and the rest of a training script need not look at the environment again.
#
# **Goal.** `read_environment(env, gpus)` turns the environment into a dictionary with these seven fields,
# right on one node, on several, on nodes of different size, and without `torchrun` at all:
#
# | field | type | what |
# |---|---|---|
# | `rank` | int | number of this process in the whole job |
# | `world_size` | int | how many processes the whole job has |
# | `local_rank` | int | number of this process on its own node |
# | `node` | int | number of the node (`torchrun` calls it `GROUP_RANK`) |
# | `device` | str | `"cuda:K"` for the GPU of this rank; `"cpu"` when `gpus` is 0 |
# | `writes_log` | bool | True on exactly one rank of the whole job, rank 0 |
# | `downloads` | bool | True on exactly one rank of each node, the one with local rank 0 |
#
# `env` is a dictionary of strings, such as `os.environ`; `gpus` is the number of GPUs on this node.
#
# - Started by plain `python`, none of the variables is set. Then this process is the only rank.
# - If this rank has no GPU although the node has some (local rank 3, but 2 GPUs), raise a `ValueError` that says so.

# %% solution="read_environment"
def read_environment(env, gpus):
    """The place of this rank. env: mapping of str to str; gpus: int. Raises ValueError, see above."""
    ### BEGIN SOLUTION
    local_rank = int(env.get("LOCAL_RANK", 0))
    if 0 < gpus <= local_rank:
        raise ValueError(f"LOCAL_RANK is {local_rank}, but this node has only {gpus} GPUs: start fewer ranks.")
    rank = int(env.get("RANK", 0))
    return {
        "rank": rank,
        "world_size": int(env.get("WORLD_SIZE", 1)),
        "local_rank": local_rank,
        "node": int(env.get("GROUP_RANK", 0)),
        "device": f"cuda:{local_rank}" if gpus else "cpu",
        "writes_log": rank == 0,
        "downloads": local_rank == 0,
    }
    ### END SOLUTION


# %% [markdown]
# ## See it run
#
# Six real ranks, started by two `torchrun` commands as if on two nodes with three GPUs each. (The GPUs are
# imagined: the function only names the device.)

# %% tags=["show"]
import os

from course_lib import check, run


def where_am_i():
    return read_environment(os.environ, gpus=3)


for place in run(where_am_i, ranks=6, nodes=2).results:
    print(place)

# %% [markdown]
# ## Check
#
# The check calls your function on layouts that it makes up afresh each time. If something is wrong, it says in
# which layout, and why.

# %% graded="check_read_environment" points=5
check.ranks(read_environment)
