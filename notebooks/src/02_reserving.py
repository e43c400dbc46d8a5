# Source of notebook 02; `python notebooks/build.py 02` makes the notebooks from it.

# %% [markdown]
# # The memory you reserve and never use
#
# Before paging, an engine gave each request its keys' and values' memory in one piece. You will see where that memory goes, predict the holes it leaves, write the rule that chooses a hole for the real engine, and count what it costs to push the holes together.
#
# | | |
# |:--|:--|
# | **Time** | 35 minutes |
# | **You need** | notebooks 00 and 01; Python functions; no GPU, no download, no torch |
# | **Memory** | 230 MB (server and kernel together) |
# | **Works on** | JupyterLab, Binder, Colab; the pictures also show on a static page |
# | **Seed** | 0: the same arrivals for everybody |

# %% setup pagedinfer ipywidgets anywidget

# %% [markdown]
# ## A picture first
#
# The same 60 requests, in the same steps, in an engine with 64 blocks of 8 tokens; four ways of giving memory out. Each strip is the memory, block 0 at the left. A colour is a request. Its *pale part is reserved and empty*; white is free.

# %% check
from pagedinfer.course import check, hint, reveal
from pagedinfer.course.arrivals import arrivals, memory_run
from pagedinfer.views import FragmentationLab, block_map, export_html

runs = {name: memory_run(name) for name in ("reserve-max", "best-fit", "buddy", "paged")}
lab = FragmentationLab(runs, step=30)
lab

# %% [markdown]
# Scheduler and allocators are the real ones; a rule stands in for the model, so a run takes a moment.
#
# | way | what a request gets when it comes |
# |:--|:--|
# | `reserve-max` | room for `max_model_len` tokens, 128 here, in one piece |
# | `best-fit` | room for its prompt and its `max_tokens`, in one piece: the smallest hole that is large enough |
# | `buddy` | the same, rounded up to a power of two of blocks, at a multiple of that |
# | `paged` | blocks for the tokens that it has, from anywhere; one more when they are full |
#
# Requests ask for more tokens than they produce, and nobody can know it before. The first ones:

# %% check
for number, request in enumerate(arrivals()[:6]):
    print(
        f"r{number} comes at step {request.step:2}: prompt {request.num_prompt_tokens:2}, max_tokens "
        f"{request.max_tokens}; will produce {request.num_output_tokens}"
    )

# %% [markdown]
# ## What reserving costs
#
# **Exercise 02.1.** A request has a prompt of 20 tokens and `max_tokens=20`. `max_model_len` is 128, a block has 8 token slots. Now 30 of its tokens are in memory. How many of the slots that it holds are *empty*, under reserve-max, best-fit, buddy, paged?

# %% exercise=02.1
empty = ..., ..., ..., ...

# %% check
check("02.1", empty)

# %% [markdown]
# Over a whole run: what is in the pool's slots, on average over the steps in which somebody waits, so that memory is what everybody wants?


# %% check
def where_memory_goes(run):
    """Shares of the pool's slots, requests per step, and external fragmentation; means over steps with a queue."""
    rows = []
    for state in run.states():
        if state.waiting:
            usage, slots = state.usage(), state.num_blocks * state.block_size
            shares = [usage[f"{part}_slots"] / slots for part in ("live", "reserved", "tail_slack", "free")]
            rows.append([*shares, usage["external_fragmentation"], len(state.last.scheduled)])
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def table(runs):
    print(f"{'':16} tokens  reserved  tails   free   ext. fragm.  requests a step  steps in all")
    for name, run in runs.items():
        tokens, reserved, tails, free, holes, batch = where_memory_goes(run)
        print(
            f"{name:16}  {tokens:4.0%}      {reserved:4.0%}   {tails:4.0%}   {free:4.0%}         {holes:4.0%}"
            f"             {batch:4.1f}          {run.last_step:4}"
        )


table(runs)

# %% [markdown]
# - *tokens*: slots that hold a token. Only these do anything.
# - *reserved*: blocks that somebody holds and that have no token yet. Many never will.
# - *tails*: the empty ends of last blocks.
# - *free*: nobody's, and still somebody waits: in contiguous memory because no *hole* is large enough.
#
# More tokens in memory means more requests in each step, and so fewer steps for the same work. The paper that brought paging to LLM serving (Kwon et al., 2023, figure 2) found 20 to 38 % of the memory of earlier systems to hold tokens, and 96 % with paging.
#
# ## Run it live
#
# Press play, or →. Which requests wait though blocks are free? Blocks with a dashed frame are reserved, and have no token yet.

# %% check
from pagedinfer import Engine, EngineConfig, Session
from pagedinfer.sim.simulated import SimulatedRunner

config = EngineConfig(allocator="best-fit", num_blocks=32, block_size=8, max_model_len=128, max_num_seqs=16)
session = Session(Engine(config, SimulatedRunner()))
for request in arrivals()[:14]:
    prompt = {"prompt_token_ids": [0] * request.num_prompt_tokens}
    session.submit(prompt, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
session.run(2)
session.view(panes=("blocks", "timeline"))

# %% [markdown]
# Step 17 of the same run, once the engine has run to its end:

# %% check
session.run()
FragmentationLab({"best-fit": session.recording}, step=17)

# %% [markdown]
# ## Predict: which holes?
#
# Memory of 22 blocks, first-fit: a request takes the lowest hole that is large enough. This happens:
#
# 1. `z` takes 2 blocks, `a` 6, `b` 4, `c` 5, `d` 3.
# 2. `b` ends. `d` ends.
# 3. `e` comes and takes 3.
# 4. `a` ends.
#
# **Exercise 02.2.** Which holes are there now? Give each as (first block, length). And now `f` comes and wants 7 blocks in a row: does it fit?

# %% exercise=02.2
holes = ...
fits = ...

# %% check
check("02.2", holes, fits)

# %% [markdown]
# The story played by the engine's own allocator, a letter for each block:

# %% check
from pagedinfer.course.reserving import story

story()

# %% [markdown]
# ## Write: best-fit
#
# **Exercise 02.3.** `holes` is a list of pairs (first block, length), by address. Return the first block of the *smallest* hole that has room for `size` blocks; of equally small ones the lowest. None when there is none.


# %% exercise=02.3
def best_fit(holes, size):
    """The first block of the smallest hole that is large enough, or None."""
    raise NotImplementedError


# %% check
check("02.3", best_fit)

# %% [markdown]
# Your function in the real engine. An engine can be told what to make its memory with; here it is the contiguous allocator with your choice of a hole. (As long as it is a stub, the engine says so in an `error` event, and first-fit decides: a rule that fails costs nothing else.)

# %% check
from pagedinfer.memory.make import make_allocator


def make_memory(config, bus):
    return make_allocator(config, bus, fit=best_fit)


mine = memory_run("best-fit", make_memory=make_memory)
fits_compared = {"first-fit": memory_run("first-fit"), "yours": mine, "next-fit": memory_run("next-fit")}
if mine.errors:
    print(mine.errors[0].what)
table(fits_compared)

# %% check
FragmentationLab(fits_compared, step=227)

# %% [markdown]
# The rules differ little: first-fit and best-fit agree up to step 211. Whatever the rule, requests of all sizes that come and go leave holes of all sizes. And no rule for choosing a hole wins back what is reserved inside.
#
# ## Compaction
#
# Holes can be pushed together: extents slide down, lowest first, until the newcomer fits. Each block that moves is copied, keys, values and all.
#
# **Exercise 02.4.** In the story above, `f` wants 7 blocks, and now compaction is on. Everybody's blocks are full. How many blocks are moved, and at which block does `f` start?

# %% exercise=02.4
moved, first = ..., ...

# %% check
check("02.4", moved, first)

# %% check
story(compaction=True)

# %% [markdown]
# And in the run of 60 requests? The runner gets the copies with the plan of a step; blocks that are reserved and empty move without a copy. For a sense of the price: a token of Llama 2 70B has 320 KiB of keys and values (80 layers, 8 heads of 128, K and V, 2 bytes each), so a block of 8 has 2.5 MiB.

# %% check
copied = {}


class Counting(SimulatedRunner):
    def execute(self, plan):
        copied[plan.step] = sum(len(op.pairs) for op in plan.ops)
        return super().execute(plan)


compacted = memory_run("best-fit", compaction=True, runner_class=Counting)
moves = {event.step: event.why for event in compacted.events if event.kind == "move"}
sliding = FragmentationLab({"best-fit, with compaction": compacted}, step=min(moves))
for step, why in moves.items():
    before, after = (sliding.layout("best-fit, with compaction", s) for s in (step - 1, step))
    print(
        f"step {step:3}: {why:29} {before.free:2} free, largest hole {before.largest:2}; "
        f"{copied[step]:2} blocks copied; then {after.free:2} free, largest hole {after.largest:2}"
    )
total = sum(copied.values())
print(f"{total} blocks copied in {len(moves)} of {compacted.last_step} steps: {total * 2.5:,.0f} MiB")
sliding

# %% check
table({"best-fit": runs["best-fit"], "and compaction": compacted, "paged": runs["paged"]})

# %% [markdown]
# (*Then*: with the newcomer in its place. Where the largest hole looks large enough before, others who came in the same step took it first.)
#
# Compaction wins back holes, by copying. It does not win back what is *reserved*, and that was the larger part.
#
# ## Why paging needs none
#
# A paged request finds its tokens through its block table, so its blocks may lie anywhere, and *every* free block is as good as any other. No hole is too small for one block, there is nothing to choose and nothing to push together. And because one more block can be had at any time, there is no reason to reserve. What is left is the tail of the last block, less than one block for each request.

# %% check
step = 60
paged = runs["paged"].at(step)
for rid in list(paged.running)[:4]:
    print(rid, "has blocks", *paged.requests[rid].block_table)
block_map(runs["paged"], step=step, request=paged.running[-1])

# %% [markdown]
# It has a price too: an engine that does not reserve can run out in the middle of a request. Then it must send somebody away, who computes again later, as you saw in notebook 00.

# %% check
for name, run in runs.items():
    print(f"{name:12} {sum(event.kind == 'preempt' for event in run.events):2} preemptions")

# %% check
export_html(runs["paged"], "reserving.html", title="Sixty requests, paged")
print("Written: reserving.html")

# %% [markdown]
# **You can now** say where reserved memory goes, predict holes, write a fit for the engine's allocator, and say what compaction costs and why paging does not need it. **Next:** [08 Sharing](08_sharing.ipynb): since any block will do, several requests can hold the same one.
