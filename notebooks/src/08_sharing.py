# Source of notebook 08; `python notebooks/build.py 08` makes the notebooks from it.

# %% [markdown]
# # Sharing: prefixes, reference counts, copy-on-write
#
# Many prompts begin alike. Keys and values that are the same need to be computed once and stored once. You will predict what a cache finds, see who may write where, mend a fault that no crash tells of, and write the rule that decides what is forgotten.
#
# | | |
# |:--|:--|
# | **Time** | 45 minutes |
# | **You need** | notebooks 00 and 01; Python classes |
# | **Memory** | 195 MB without torch, 415 MB with it (server and kernel together) |
# | **Works on** | JupyterLab, Binder, Colab; the pictures also show on a static page |
# | **Seed** | fixed in each run |

# %% setup pagedinfer ipywidgets anywidget

# %% [markdown]
# ## A picture first
#
# A recording of SmolLM2. Five questions were asked, all under one **system prompt**: a text that the service puts before each question. The last one was asked for three answers at once. A blue frame with `×5` marks a block that five requests hold; hatched blocks are *cached and idle*: nobody uses them now, and somebody may come who does.

# %% check
from pagedinfer.course import bundled_prompts, bundled_recording, bundled_texts, check, hint, reveal
from pagedinfer.views import EngineView, PrefixTree, block_map, export_html

recording = bundled_recording("shared_prompt")
EngineView(recording, panes=("blocks", "chains", "timeline"), step=18, request="r4.1")

# %% check
for request_id, text in bundled_texts("shared_prompt").items():
    question, _, answer = text.partition("\n")
    print(f"{request_id:5} {question}\n      {' '.join(answer.split())}")

# %% [markdown]
# ## Predict
#
# A block holds 8 tokens. When all 8 are written, the block is **cached**: it gets a *key*, made of its tokens and of the key of the block before it. A later request compares keys from its first block on, and shares what it finds instead of computing it. These are the prompts of `r0` and `r1`, a block in each row:

# %% check
prompts = bundled_prompts("shared_prompt")
for request_id in ("r0", "r1"):
    tokens = prompts[request_id]
    print(f"{request_id}: {len(tokens)} tokens")
    for start in range(0, len(tokens), 8):
        print(f"  {start:2}  {'|'.join(tokens[start : start + 8])!r}")

# %% [markdown]
# **Exercise 08.1.** `r1` comes while `r0` is writing. Of how many of its tokens are the keys and values in the cache? And later `r3` asks word for word what `r1` asked: how many tokens does it find?

# %% exercise=08.1
r1, r3 = ..., ...

# %% check
check("08.1", r1, r3)

# %% [markdown]
# ## Scrub
#
# Step from 0 on, and watch blocks 0 to 4. Their *reference count*, the number of block tables that hold them, goes up with each request that comes, and down with each that ends. A block is free to be taken only at 0. The pane *Prefix chains* shows which cached block follows which.

# %% check
EngineView(recording, panes=("blocks", "chains", "timeline"), step=0)

# %% [markdown]
# The engine says what it found, and why it was not more:

# %% check
for event in recording.events:
    if event.kind == "hit":
        print(f"step {event.step:2}: {event.rid:4} found {event.n:2} tokens; {event.why}")

# %% [markdown]
# - `r0` came to an empty cache.
# - `r1` and `r2` differ from `r0` in block 5. So that block, and all behind it, are new: *what a token's key and value are depends on every token before it*.
# - `r3` found all of its full blocks. Even if its prompt had ended with them, its last token would have been computed again: the model's answer begins with the output of that token, and the cache keeps keys and values only.
#
# ## What it saves
#
# The same requests once more, with the cache switched off from the first step. `fork` runs the real scheduler over what was recorded; no model is needed.

# %% check
from pagedinfer import fork

without = fork(recording, 0, enable_prefix_caching=False).recording
for name, run in (("with the cache", recording), ("without", without)):
    steps = run.steps
    computed, most = sum(steps["prefill_tokens"]), max(steps["used_blocks"])
    print(f"{name:15} {computed:3} prompt tokens computed, at most {most} blocks in use")

# %% [markdown]
# ## Run it live
#
# Your own engine now, with a prompt that has two answers. Press play, or →, and watch which blocks get a frame, and when a block is written although its request was given one already.

# %% check
import importlib.util

from pagedinfer import Engine, EngineConfig, Session
from pagedinfer.sim.simulated import SimulatedRunner

LIMITS = {"block_size": 8, "num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 64}
HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    from pagedinfer import LLM

    engine = LLM("tiny", **LIMITS).engine
else:
    print("torch is not installed, so a token rule stands in for the model; scheduler and pool are the same.")
    engine = Engine(EngineConfig(**LIMITS), SimulatedRunner())

session = Session(engine)
system = b"You are a helpful robot. "
for question, answers in ((b"What is a block?", 1), (b"What is a table?", 1), (b"Tell me a story", 2)):
    prompt = {"prompt_token_ids": list(system + question)}  # the tiny model has one token for each byte
    session.submit(prompt, n=answers, seed=1, max_tokens=12, ignore_eos=True, detokenize=False)
session.run(1)
session.view(panes=("blocks", "chains", "timeline"))

# %% [markdown]
# And this is what the cache holds in step 4 of that run. A row is a prefix; the cells right of it are what follows.

# %% check
session.run()
PrefixTree(session.recording, step=4)

# %% [markdown]
# ## Predict: who copies?
#
# When a prompt gets several answers, the first request computes it. The others wait for that, then share the blocks of all its tokens but the last; that one they compute themselves, because each needs its output. Now the last block that they share may be only partly full, and everybody wants to write there. But a block that others hold must not be written. So whoever writes first into it gets a copy: **copy-on-write**.
#
# **Exercise 08.2.** Blocks hold 8 tokens, the prompt gets 4 answers. How many blocks are copied when the prompt has 13 tokens? When it has 16? 17?

# %% exercise=08.2
copies = ..., ..., ...

# %% check
check("08.2", copies)

# %% [markdown]
# Look at it for a prompt of 13 tokens: `r0.0` computed it in blocks 0 and 1. Go from step 1 to step 2.

# %% check
CONFIG = EngineConfig(num_blocks=16, block_size=8)
ONE_PROMPT = {"prompt_token_ids": list(range(13))}
FOUR_ANSWERS = {"n": 4, "seed": 1, "max_tokens": 8, "ignore_eos": True, "detokenize": False}

session = Session(Engine(CONFIG, SimulatedRunner()))
session.submit(ONE_PROMPT, **FOUR_ANSWERS)
session.run()
for event in session.recording.step_events(2):
    if event.kind in ("share", "copy"):
        print(event)
block_map(session.recording, step=2, request="r0.1")

# %% [markdown]
# ## A fault
#
# This is how the engine's block manager does a copy, with one fault planted in it. Everything that you can see is as it should be: block tables, reference counts, events.

# %% check
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.ops import BlockOp
from pagedinfer.trace.events import Copy


class Faulty(BlockManager):
    def _copy_on_write(self, rid, group, logical, new):
        """`rid` is about to write to a shared block: give it the empty block `new` in that block's place."""
        table = self.table(rid, group)
        old, table[logical] = table[logical], new
        if self.journal is not None:  # a plan is being made: remember how to take this back
            self.journal.record(lambda: table.__setitem__(logical, old))
        self.ops.append(BlockOp("copy", ((new, old),)))  # what the runner does before the step
        if self._bus.subs:  # what recordings and views are told
            self._bus.emit(Copy(rid, group, logical, ((old, new),)))
        self.pool.drop(old)  # one holder less


def engine_with(manager, runner):
    return Engine(
        CONFIG, runner, make_memory=lambda config, bus: manager(config.num_blocks, config.block_size, bus)
    )


session = Session(engine_with(Faulty, SimulatedRunner()))
session.submit(ONE_PROMPT, **FOUR_ANSWERS)
session.run()
session.engine.check()  # the engine's own books: nothing is wrong with them
block_map(session.recording, step=2, request="r0.1")

# %% [markdown]
# With a model, the answers are others than they should be, and nothing says so:

# %% check
for manager in (BlockManager, Faulty) if HAS_TORCH else ():
    session = Session(engine_with(manager, LLM("tiny", num_blocks=16, block_size=8).engine.runner))
    session.submit(ONE_PROMPT, **FOUR_ANSWERS)
    session.run()
    print(manager.__name__)
    for answer in session.outputs["r0"].outputs:
        print("  ", *answer.token_ids)

# %% [markdown]
# A **shadow** finds it. It is a runner without a model. Its slots hold, in place of keys and values, *whose* keys and values they are, and each read of each step is checked:

# %% check
from pagedinfer.sim.shadow import ShadowFault, ShadowRunner

session = Session(engine_with(Faulty, ShadowRunner(num_blocks=16, block_size=8)))
session.submit(ONE_PROMPT, **FOUR_ANSWERS)
try:
    session.run()
except ShadowFault as fault:
    print(fault)

# %% [markdown]
# **Exercise 08.3.** Find the fault and mend it. The check runs your class under a shadow, in a pool that is sometimes too small, and looks at the books after each step.


# %% exercise=08.3
class Mended(BlockManager):
    def _copy_on_write(self, rid, group, logical, new):
        raise NotImplementedError


# %% check
check("08.3", Mended)

# %% [markdown]
# ## What is forgotten
#
# Idle cached blocks stay until the pool needs room. Then one is **evicted**: by default the *least recently used*. That is a good guess, often. Here is a service where it is not. Chats begin with one system prompt of 6 blocks. Between two chats come one to four long documents, each read once and never again. The pool has 40 blocks.

# %% check
from pagedinfer.course.eviction import eviction_run


def least_recently_used(idle):
    return idle[0]  # the list is in this order


lru = eviction_run(least_recently_used, seed=1)
lru

# %% check
hits = {event.rid: event.n for event in lru.recording.events if event.kind == "hit"}
for row in list(lru.recording.requests.rows())[:12]:
    prompt, found = row["prompt_tokens"], hits[row["request"]]
    print(
        f"{row['request']:3} {'document' if prompt > 72 else 'chat':8} {prompt:3} tokens, {found:2} in the cache"
    )

# %% check
PrefixTree(lru.recording, step=48)

# %% [markdown]
# **Exercise 08.4.** Write a better rule. `idle` is a list of the cached blocks that nobody uses, least recently used first. Each has
#
# - `.hits`: how many requests have found it since it was filled,
# - `.last_used`: the step after which nobody used it any more,
# - `.position`: which block of its prompt it is, 0 for the first,
# - `.block_id`.
#
# Return the one that goes. The rule works inside the engine's real pool. At least 80 % of the system prompt's tokens must be found, on two runs that you have not seen.


# %% exercise=08.4
def evict(idle):
    """The idle block that goes."""
    raise NotImplementedError


# %% check
check("08.4", evict)

# %% [markdown]
# See your rule at work, beside the other. (As long as it is a stub, the engine says so in an `error` event and takes the least recently used block: a rule that fails costs nothing else.)

# %% check
mine = eviction_run(evict, seed=1)
print("least recently used:", lru)
print("yours:              ", mine)
PrefixTree(mine.recording)

# %% check
export_html(recording, "sharing.html", texts=bundled_texts("shared_prompt"), title="One system prompt")
print("Written: sharing.html")

# %% [markdown]
# **You can now** say what a prefix cache finds and why not more, who copies before a write, and what an eviction rule is worth. **Next:** [10 Detective](10_detective.ipynb): in one of its four incidents a cache is wiped.
