# %% [markdown]
# # 04 · What it costs
#
# **Afterwards you can** measure what a message costs on your machine, predict how long an all-reduce takes by
# three algorithms, and choose between them.
#
# **Time** 25 minutes to read; the cells run in less than a minute.

# %%
from course_lib import run, show
from course_lib.collectives import cost, hierarchical, naive, ring, tree
from course_lib.collectives.fit import fit
from course_lib.collectives.measure import measure
from course_lib.collectives.simulate import simulate_all_reduce
from course_lib.collectives.topology import Link, Topology, flat

# %% [markdown]
# ## What one message costs
#
# Four ranks measure, in turns: one message between ranks 0 and 1, adding two tensors, and whole all-reduces, which we
# need later. `measure` goes round up to nine times; medians count, and the slowest rank.
#
# **Predict:** 4 MB are 4,096 times as much as 1 kB. How much longer does the message take? And 4 kB?

# %%
samples = run(lambda: measure(totals=(2**20, 2**23)), ranks=4, watch=False).results
machine = fit(samples)
for nbytes, seconds, off in machine.pair.points:
    print(f"{nbytes:>9,} B  {seconds * 1e6:>8,.0f} µs   the line is {off:+.0%} off")

# %% [markdown]
# Far less than 4,096 times. Small messages all cost about the same, large ones grow with their size. A straight line
# says both:
#
# **seconds = α + bytes · β**
#
# - **α**, the *latency*: what a message costs because it is one, in seconds.
# - **β**: what each byte costs, in seconds. 1/β is the bandwidth.
#
# A third number is for the sums: **γ**, seconds for each byte that is added to another one. This model is Hockney's,
# from 1994. `fit` lays the line through the points by least squares. It makes the *relative* deviations small; with
# absolute ones the 4 MB point would settle everything alone.
#
# Here are the three numbers, for three ways of talking. **Predict** before you look: does a byte cost more when all
# ranks talk at once?

# %%
machine

# %% [markdown]
# *One pair* is the ping-pong from above. *All pairs at once* is the same on ranks 0 and 1, and 2 and 3. *Around the
# ring* is what lesson 03 did in each step: everybody sends to the right and receives from the left.
#
# If you have fewer free cores than ranks, each row is more expensive than the one above it. Hockney's model gives each
# pair of ranks a link of its own. Ranks on one machine have none: a message is a copy in memory, a core makes it, and
# the ranks share the cores. So **α and β belong to a situation, not to a machine alone**. Measure what you are going to
# do. The last column says how far the worst point is from its line. If a warning stands below the table, something
# else keeps your machine busy: run the two cells again.
#
# ## Count what comes one after the other
#
# With α, β and γ, a prediction is counting. Do not count what all ranks do together. Count the longest chain of things
# that must wait for each other. N ranks, each with a tensor of M bytes:
#
# - **naive**: N-1 tensors arrive at rank 0 one after the other, each is added, then N-1 leave again.
# - **tree**: in each level up, half of the ranks that are left send their tensor to the other half. That takes log₂ N
#   levels, rounded up, and as many down again.
# - **ring**: 2(N-1) steps, each with one chunk, M/N. The first N-1 of them add.
#
# | | messages in a chain (α) | bytes in a chain (β) | bytes added (γ) |
# |---|---|---|---|
# | naive | 2(N-1) | 2(N-1)·M | (N-1)·M |
# | tree | 2⌈log₂ N⌉ | 2⌈log₂ N⌉·M | ⌈log₂ N⌉·M |
# | ring | 2(N-1) | 2(N-1)/N·M | (N-1)/N·M |
#
# The tree is in Thakur, Rabenseifner and Gropp, *Optimization of collective communication operations in MPICH* (2005).
# Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations* (2009), show the ring, and
# that no algorithm gets by with fewer bytes a rank.
#
# **Predict:** 8 ranks, α = 50 µs, 1 GB/s, sums at 10 GB/s. Who wins for 1 kB, and who for 10 MB?

# %%
for nbytes in (1_000, 10_000_000):
    for name in ("naive", "tree", "ring"):
        print(f"{nbytes:>10,} B  {name:5}  {cost.predict(name, nbytes, 8, 50e-6, 1e-9, 1e-10) * 1e3:8.3f} ms")

# %% [markdown]
# For 1 kB it is the tree, since messages count; for 10 MB the ring, since bytes count.
#
# ## Prediction against measurement
#
# Now your machine. The naive way is priced like one pair, the ring like "around", and the tree between one pair and all
# pairs, because from level to level fewer pairs talk.
#
# **Predict:** how far off is a model with three numbers? 5 %, 25 %, a factor of 2?

# %%
for name, nbytes, predicted, measured, error in machine.compare():
    print(
        f"{name:5} {nbytes / 2**20:2.0f} MiB   predicted {predicted * 1e3:6.2f} ms   "
        f"measured {measured * 1e3:6.2f} ms   {error:+.0%}"
    )

# %% [markdown]
# The last column is the honest part. On a quiet machine we expect it to stay within a quarter. It cannot be zero: the
# line is not perfect (see its residuals), caches treat 1 MB better than 8 MB, and ranks wait for a free core.

# %%
show.cost(machine)

# %% [markdown]
# Both axes are logarithmic. To the left, where the lines are flat, α decides; to the right, where they rise, β.
#
# Look at the right end. Did you expect the ring far below the others? On a machine with fewer cores than ranks it is
# not. Here is why:

# %%
for algorithm in (naive, tree, ring):
    total = sum(algorithm.sent(rank, 1000, 4, 4) for rank in range(4))
    print(f"{algorithm.__name__.split('.')[-1]:5} all ranks together send {total} bytes of a tensor of 4000")

# %% [markdown]
# All three move 2(N-1)·M bytes in all. The ring only *spreads* them evenly over the links. That helps if there are
# links to spread them over, as in a cluster. If a few cores carry everything, the total decides, and all come close to
# each other.
#
# ## A cluster on your desk: the simulator
#
# So we need ranks with a link each. `simulate_all_reduce` runs the very same code, `ring.all_reduce`, on simulated
# ranks. Each has a *logical clock*. A message carries the clock of its sender, and moves that of the receiver to
# α + bytes · β later. No time is measured, so the result is exact and the same each time.
#
# **Predict:** what does the picture of four ranks look like, compared with your runs in lessons 02 and 03?

# %%
show.messages(simulate_all_reduce(ring.all_reduce, 250_000, flat(4, 50e-6, 1e-9, 1e-10)))

# %% [markdown]
# Nobody is late; after each step all are equally far. The simulator knows nothing of our table, so it can test it:

# %%
for name, algorithm in {"naive": naive, "tree": tree, "ring": ring}.items():
    simulated = simulate_all_reduce(algorithm.all_reduce, 300_000, flat(6, 50e-6, 1e-9, 1e-10)).seconds
    formula = cost.predict(name, 1_200_000, 6, 50e-6, 1e-9, 1e-10)
    print(f"{name:5}  simulated {simulated * 1e3:.6f} ms   formula {formula * 1e3:.6f} ms")

# %% [markdown]
# ## Where the lines cross
#
# **Predict:** 16 ranks, each with its own link of 1 GB/s and 50 µs. Up to which size would you take the tree?

# %%
show.cost(ranks=16, algorithms=("naive", "tree", "ring"))

# %% [markdown]
# The dot marks the size at which both cost the same: left of it the tree, right of it the ring. Naive is never the
# fastest. With more ranks, the crossover moves:

# %%
for ranks in (4, 8, 16, 64, 256):
    print(f"{ranks:>3} ranks: {cost.crossover('tree', 'ring', ranks, 50e-6, 1e-9, 1e-10) / 1e3:8,.0f} kB")

# %% [markdown]
# A model has many small gradients, a bias of 256 bytes for instance. Sent one by one, each pays the latencies of a
# whole all-reduce. That is why DDP packs them into buckets, of 25 MiB by default (lesson 06).
#
# Now play. Find settings in which tree and ring cost the same at 1 MB; then double the ranks. *Halving* (recursive
# halving and doubling) has the tree's few messages and the ring's few bytes, if N is a power of two: compare 12 ranks
# with 16. *Hierarchical* comes below. Links inside a node are drawn ten times as fast as those between nodes.

# %%
show.cost_explorer()

# %% [markdown]
# ## A myth: "from O(N) to O(N-1)"
#
# A widely read tutorial says that the ring lowers the complexity of communication from O(N) to O(N-1). First, these two
# are the same class; one less is nothing when N grows. Second, *of what*? Ask the simulator: 4 MB, more and more ranks.
#
# **Predict:** which columns grow with N?

# %%
print("ranks   naive ms    ring ms   busiest rank sends: naive   ring   ring, 1 kB: ms")
for ranks in (2, 4, 8, 16):
    where = flat(ranks, 50e-6, 1e-9, 1e-10)
    slow, fast = (simulate_all_reduce(a.all_reduce, 2**20, where) for a in (naive, ring))
    tiny = simulate_all_reduce(ring.all_reduce, 256, where).seconds
    print(
        f"{ranks:>5} {slow.seconds * 1e3:10.1f} {fast.seconds * 1e3:10.1f} {max(slow.sent) / 2**22:21.2f} M "
        f"{max(fast.sent) / 2**22:10.2f} M {tiny * 1e3:12.1f}"
    )

# %% [markdown]
# - Naive: the root sends (N-1)·M. Time grows with N.
# - Ring: each rank sends 2(N-1)/N·M, less than 2M for any N. *That* is the gain: the bytes do not grow.
# - But its 2(N-1) latencies do. For 1 kB the time of the ring grows with N like that of the naive way.
#
# ## Two nodes: not every link is equal
#
# Inside a node it is fast, between nodes slow, and all ranks of a node share one cable. Two nodes with four ranks each:
#
# - a **ring** in rank order: one hop in four leaves the node;
# - a ring whose ranks are dealt out like cards, rank 0 here, rank 1 there: every hop leaves the node;
# - **hierarchical**: reduce-scatter inside the node, a ring between the nodes with that quarter, all-gather inside.
#
# **Predict:** how many times M leaves each node?

# %%
inside, between, M = Link(5e-6, 1 / 20e9), Link(50e-6, 1 / 1e9), 16_000_000
in_order = Topology((0, 0, 0, 0, 1, 1, 1, 1), inside, between, 1e-10, shared_uplink=True)
dealt = Topology((0, 1, 0, 1, 0, 1, 0, 1), inside, between, 1e-10, shared_uplink=True)
for name, done in {
    "ring, in order": simulate_all_reduce(ring.all_reduce, M // 4, in_order),
    "ring, dealt out": simulate_all_reduce(ring.all_reduce, M // 4, dealt),
    "hierarchical": simulate_all_reduce(hierarchical.all_reduce, M // 4, in_order, node_size=4),
}.items():
    print(f"{name:16} {done.seconds * 1e3:7.1f} ms   {done.uplinks[0] / M:.2f} M leave node 0")

# %% [markdown]
# The ring in order sends 2(N-1)/N·M = 1.75 M across, hierarchical 2(K-1)/K·M = 1 M for K = 2 nodes. A bad order costs a
# factor of four: with several nodes, most neighbours in the ring must share a node. Lesson 14 measures this on a slow
# network.
#
# ## In three lines
#
# - A message costs α + bytes · β, a sum bytes · γ; count what comes one after the other.
# - Small tensors: few messages, a tree. Large tensors: few bytes a rank, a ring; its bytes hardly depend on N.
# - α and β belong to a situation: measure the pattern that you will use, and look at the residuals.
#
# ## On A100s
#
# An A100 has 600 GB/s of NVLink, which is 300 GB/s in each direction (NVIDIA's data sheet). nccl-tests, NVIDIA's
# benchmark, reports a *bus bandwidth*: bytes / seconds · 2(N-1)/N for an all-reduce. This is our volume over time, so
# it can be compared with the speed of the link for any N (`PERFORMANCE.md` in its repository).
#
# ResNet-50 has 97.5 MiB of float32 gradients. The least that a ring over eight A100s can need, with no latency at all:

# %%
print(f"{cost.predict('ring', 97.5 * 2**20, 8, alpha=0, beta=1 / 300e9) * 1e3:.2f} ms")

# %% [markdown]
# One A100 does 2,470 images a second with AMP (NVIDIA DeepLearningExamples, DGX A100 80GB, 21.03), so a step with a
# batch of 256 takes 104 ms. Eight of them were 6.72 times as fast in the same table, not 8. By our number the bytes of
# an undisturbed all-reduce would be 0.6 % of a step; so look elsewhere first, for instance at the data (lesson 11).
#
# ## Exercise
#
# [Exercise 04: what it costs](../exercises/04_what_it_costs/04_what_it_costs.ipynb) Write the three formulas, and the
# function that chooses. About 20 minutes.
