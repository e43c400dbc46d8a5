# Source of notebook 01; `python notebooks/build.py 01` makes the notebooks from it.

# %% [markdown]
# # Block tables
#
# The tokens of a request lie in blocks all over the pool. One short list, its **block table**, keeps them in order. You will predict one, watch it grow, and write the translation that the engine does for every token.
#
# | | |
# |:--|:--|
# | **Time** | 30 minutes |
# | **You need** | notebook 00; Python lists, `divmod` |
# | **Memory** | 1.1 GB (server and kernel together) |
# | **Works on** | JupyterLab, Binder, Colab; the pictures also show on a static page |
# | **Seed** | none needed: greedy |

# %% setup pagedinfer torch numpy ipywidgets anywidget safetensors tokenizers gguf jinja2 rich

# %% [markdown]
# ## A picture first
#
# In the recording of notebook 00, `r5` came back after it had been preempted. Its blocks now lie all over the pool. On the right is its block table: logical block 0 is the beginning of its text, wherever that lies.

# %% check
from pagedinfer.course import bundled_recording, check, hint, reveal
from pagedinfer.views import EngineView, block_map, export_html

block_map(bundled_recording("eight_requests"), step=60, request="r5")

# %% [markdown]
# ## A model and three requests
#
# Now with a model in your kernel: SmolLM2, 135 million weights, fetched once (93 MB). The pool is tiny on purpose: 12 blocks of 8 tokens.

# %%
import torch

from pagedinfer import LLM, Session
from pagedinfer.errors import ModelError, OutOfBlocks

torch.set_num_threads(min(2, torch.get_num_threads()))  # leave a core to the browser
LIMITS = {"block_size": 8, "num_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 64}
LIMITS["enable_prefix_caching"] = False  # sharing comes in notebook 08
try:
    llm = LLM("smollm2-135m", **LIMITS)
except ModelError as error:
    print(f"The tiny model with random weights stands in, because the real one is out of reach: {error}")
    llm = LLM("tiny", **LIMITS)
llm

# %% [markdown]
# Three requests, with prompts cut to 20, 13 and 6 tokens, so that your numbers match the text below:

# %% check
session = Session(llm)


def submit(text, num_tokens, max_tokens):
    prompt = {"prompt_token_ids": llm.tokenizer.encode(text, add_special_tokens=False)[:num_tokens]}
    return session.submit(prompt, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


submit(
    "The little robot opened the door of the old library, and there, between two dusty shelves, it", 20, 12
)
submit("To make a good tomato soup you need ripe tomatoes, some garlic, a little salt", 13, 12)
submit("The capital of France is the city of", 6, 10)
session.advance()
block_map(session.recording, step=1, request="r0")

# %% [markdown]
# That was step 1: all three prompts were read. `r0` stored 20 tokens; 20 = 8 + 8 + 4, so it took three blocks. The pool hands out blocks in the order 0, 1, 2, … so the tables are
#
# | request | tokens | block table |
# |:--|--:|:--|
# | `r0` | 20 | `[0, 1, 2]` |
# | `r1` | 13 | `[3, 4]` |
# | `r2` | 6 | `[5]` |
#
# ## Predict
#
# From now on every request stores one token in each step, `r0` first. A request takes a new block in the step in which it needs it, and not before.
#
# **Exercise 01.1.** What is the block table of `r0` after step 8? Take paper, and decide before you run the engine.

# %% exercise=01.1
prediction = ...  # a list of block ids

# %% [markdown]
# ## Run
#
# Press → at the last step: the engine runs one more. Go to step 8. Then go back with ← and find the steps in which a block was taken. (The cell after the view runs the engine to step 8, too, and shows it there.)

# %%
session.view(step=1, request="r0")

# %% check
session.run(max(0, 8 - session.recording.last_step))
block_map(session.recording, step=8, request="r0")

# %% check
check("01.1", prediction, session)

# %% [markdown]
# ## Explain
#
# Every request counts its tokens 0, 1, 2, … : the **position**. The model only thinks in positions. The pool only knows **slots**: with blocks of 8, block 0 has the slots 0 to 7, block 1 the slots 8 to 15, and so on. The block table leads from one to the other:
#
# $$\text{position} \;\longrightarrow\; (\text{logical block},\ \text{offset}) \;\longrightarrow\; \text{block id} \;\longrightarrow\; \text{slot}$$
#
# Let us do it for the newest token of `r0`.

# %% check
block_size = llm.engine.config.block_size
request = session.recording.at(8).requests["r0"]
position = request.num_computed_tokens - 1

logical, offset = divmod(position, block_size)
block_id = request.block_table[logical]
slot = block_id * block_size + offset
print(f"position {position} = logical block {logical}, offset {offset}; block {block_id}; slot {slot}")

# %% [markdown]
# Is it really there? `kv.slots(layer)` is the pool of one layer: a row for each slot, with key and value. `kv.gather` is the engine's own way to collect the keys and values of a request. Both should find the same key.

# %% check
kv = llm.engine.runner.kv
by_slot = kv.slots(0)[slot, 0]
keys, values = kv.gather(0, request.block_table, position + 1)
print("the same key:", torch.equal(by_slot, keys[position]))

# %% [markdown]
# ## Build
#
# **Exercise 01.2.** In each step the engine needs the slots of all tokens that it computes: the **slot mapping**. Write it for one request: the slots of `num_tokens` positions, the first of which is `start`.
#
# The check tries random tables. Then it reads keys out of *this* engine's pool, through your slots, in every layer.


# %% exercise=01.2
def slot_mapping(block_table, start, num_tokens, block_size):
    """A list of `num_tokens` slots."""
    raise NotImplementedError


# %% check
check("01.2", slot_mapping, session)

# %% [markdown]
# ## Blocks come back
#
# `r2` ends after step 10, and its blocks 6 and 5 join the end of the free list: `[9, 10, 11, 6, 5]`. Now somebody new arrives with 37 tokens. That is five blocks. There are five free ones, but no more than three side by side: an engine that wants a request in one piece would have to send it away. What will its block table be? (If you ran past step 10 already, go back to the cell that submits the three requests.)

# %% check
session.run(max(0, 10 - session.recording.last_step))
story = """It was a rainy Sunday, and the lighthouse keeper had nothing to do but count the ships: first a red one,
then two small ones that kept close together, then for a long time none, and at last"""
submit(story, 37, 8)
session.run()
block_map(session.recording, step=11, request="r3")

# %% [markdown]
# The order in a block table is the order of the text, whatever the ids. And this is what the model wrote through all that patchwork:

# %%
for request_id, text in session.texts.items():
    print(f"{request_id}: …{text!r}")

# %% [markdown]
# ## Build the other half
#
# **Exercise 01.3.** Write the allocator's inner step: make room for *one more* token. `num_tokens` tokens are stored already; `free` is the free list, the next block to take is its first. Change `block_table` and `free` in place, and return the new token's slot. Take a block when it is needed, not before. If one is needed and none is free, raise `OutOfBlocks(1, 0)` and leave the table as it was.
#
# The check puts your function in the place of the engine's allocator, in whole runs with preemptions: after every step, your tables must equal the engine's.


# %% exercise=01.3
def append_token(block_table, free, num_tokens, block_size):
    """The slot of one more token."""
    raise NotImplementedError


# %% check
check("01.3", append_token)

# %% [markdown]
# ## What it costs
#
# A block table is a few small integers per request. What is wasted is the end of each last block: about half a block for a request on average, and never a whole one. The view below shows it as *tail slack*. Try another `block_size` where the model is loaded: 1 wastes nothing and makes long tables; 64 does the opposite.

# %% check
EngineView(session.recording, panes=("memory", "timeline"), request="r3")

# %% check
export_html(session.recording, "block_tables.html", title="Block tables")
print("Written: block_tables.html")
llm.close()

# %% [markdown]
# **You can now** predict a block table, translate positions to slots, and grow a table. **Next:** [02 The memory you reserve and never use](02_reserving.ipynb): what an engine without block tables does.
