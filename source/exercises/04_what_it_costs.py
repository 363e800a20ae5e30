# %% [markdown]
# # Exercise 04: what it costs
#
# **Difficulty** medium · **Time** 20 minutes · **You write** about 15 lines · **Points** 10
#
# Before you start 64 ranks for a week, you want to know what an all-reduce will cost. Three numbers describe the
# machine: a message of n bytes takes alpha + n · beta seconds, and adding n bytes takes n · gamma seconds. A rank can
# send one message and receive one at the same time, and each has its own link.
#
# **Goal 1.** `cost(algorithm, nbytes, ranks, alpha, beta, gamma)` returns the seconds of one all-reduce:
#
# - `"naive"`: rank 0 receives the whole tensor from each other rank in turn and adds it; then it sends the result to
#   each in turn.
# - `"tree"`: in each level half of the ranks that are left send the whole tensor to the other half, which adds it. At
#   the end rank 0 has the sum. Then the same levels back, without adding.
# - `"ring"`: reduce-scatter, then all-gather, as in lesson 03.
#
# The rules:
#
# - `nbytes` is the size of the tensor on each rank, in bytes; `alpha` is in seconds, `beta` and `gamma` in seconds a
#   byte. Do not round chunks: a chunk is `nbytes / ranks`.
# - With 4 ranks, 1,000,000 bytes, `alpha=50e-6`, `beta=1e-9` and `gamma=1e-10` the results are 0.0066, 0.0044 and
#   0.001875.
# - The number of ranks need not be a power of two. One rank alone needs 0 seconds.
# - Any other name of an algorithm is a `ValueError`.

# %% solution="cost"
def cost(algorithm, nbytes, ranks, alpha, beta, gamma):
    """Seconds of an all-reduce. nbytes: int; alpha: s; beta, gamma: s a byte. Raises ValueError, see above."""
    ### BEGIN SOLUTION
    levels = (ranks - 1).bit_length()  # log2, rounded up
    if algorithm == "naive":
        steps, piece = ranks - 1, nbytes
    elif algorithm == "tree":
        steps, piece = levels, nbytes
    elif algorithm == "ring":
        steps, piece = ranks - 1, nbytes / ranks
    else:
        raise ValueError(f"There is no algorithm {algorithm!r}: naive, tree or ring.")
    return 2 * steps * (alpha + piece * beta) + steps * piece * gamma
    ### END SOLUTION


# %% [markdown]
# ## See it run
#
# The course's own all-reduce on six simulated ranks, beside your formula. The simulator knows no formula: it runs the
# algorithm, and each message moves the clock of its receiver.

# %%
from course_lib import check, show
from course_lib.collectives import naive, ring, tree
from course_lib.collectives.simulate import simulate_all_reduce
from course_lib.collectives.topology import flat

for name, algorithm in {"naive": naive, "tree": tree, "ring": ring}.items():
    simulated = simulate_all_reduce(algorithm.all_reduce, 300_000, flat(6, 50e-6, 1e-9, 1e-10)).seconds
    yours = cost(name, 1_200_000, 6, 50e-6, 1e-9, 1e-10)
    print(f"{name:5}  simulated {simulated * 1e3:.6f} ms   yours {yours * 1e3:.6f} ms")

# %% [markdown]
# Your formulas as a picture: the time over the size, for 16 ranks. Where do they cross?

# %%
show.cost(formula=cost, ranks=16)

# %% [markdown]
# ## Check the formulas
#
# The check makes up machines, sizes and numbers of ranks afresh each time.

# %% graded="check_cost" points=6
check.what_it_costs(cost)

# %% [markdown]
# ## Choose
#
# **Goal 2.** `choose(nbytes, ranks, alpha, beta, gamma)` returns the name of the fastest of the three, `"naive"`,
# `"tree"` or `"ring"`. It may call `cost`.


# %% solution="choose"
def choose(nbytes, ranks, alpha, beta, gamma):
    """The name of the fastest algorithm. The arguments are those of `cost`."""
    ### BEGIN SOLUTION
    return min(("naive", "tree", "ring"), key=lambda name: cost(name, nbytes, ranks, alpha, beta, gamma))
    ### END SOLUTION


# %% [markdown]
# A gradient of 256 bytes, one of 1 MB and a bucket of 25 MiB, on 4 and on 256 ranks:

# %%
for nbytes in (256, 1_000_000, 25 * 2**20):
    print(f"{nbytes:>10,} B:", [choose(nbytes, ranks, 50e-6, 1e-9, 1e-10) for ranks in (4, 256)])

# %% graded="check_choose" points=4
check.choose(choose)
