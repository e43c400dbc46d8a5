# Source of notebook 00; `python notebooks/build.py 00` makes the notebooks from it.

# %% [markdown]
# # Sixty seconds inside an engine
#
# You will watch an inference engine answer eight questions at once, in a memory that is too small for them, and learn to read its view.
#
# | | |
# |:--|:--|
# | **Time** | 15 minutes |
# | **You need** | a little Python; no GPU, no download; torch is optional |
# | **Memory** | 180 MB without torch, 390 MB with it (server and kernel together) |
# | **Works on** | JupyterLab, Binder, Colab; the pictures also show on a static page |
# | **Seed** | none needed: the run is recorded, and greedy |
#
# In each notebook of this course: *a picture, a prediction, a run, an explanation, something to build, a check.*

# %% setup pagedinfer ipywidgets anywidget

# %% [markdown]
# ## A real run
#
# Below is a recording of a real model, SmolLM2 with 135 million weights, on an ordinary CPU. Eight people asked it something within 16 steps. Each question became a **request**: `r0`, `r1`, … `r7`.
#
# While a model writes, it keeps a *key* and a *value* of every token it has seen, in every layer: the **KV cache**. Here the cache is a pool of 40 **blocks**, and a block has room for 8 tokens. That is not enough for eight answers at once. So what happens?
#
# Run the next cell (`Shift`+`Enter`): a saved notebook shows only still pictures, a running one lets you step. You see the first 12 steps; what comes then is for you to predict.

# %% check
from pagedinfer.course import bundled_recording, bundled_texts, check, hint, reveal
from pagedinfer.views import EngineView, batch_timeline, block_map, describe, export_html

recording = bundled_recording("eight_requests")
EngineView(recording.until(12), step=12)

# %% [markdown]
# **Sixty seconds.** Do this once, in the running view:
#
# 1. Click into it, and press →, ← and `Shift`+→. `Space` plays; a click into the timeline jumps to that step.
# 2. Click a block. Its request lights up in every pane, and the pane *Requests* becomes *Selected*: what this block is, and whose.
# 3. Click a request in the timeline or the queues: *Selected* shows its **block table**, which keeps its blocks in order.
# 4. In step 12, somebody waits. Read in *Queues* why: `r6` came a moment too late for this step. (Worse reasons will follow.)
# 5. Type `free blocks < 4` into the box *Stop when*, press `Enter`, drag the slider to the beginning, and play: it stops where that comes true, and says why.
#
# **Read it:**
#
# - **Block map:** every block of the pool, in the place where it lies in memory. Colour, pattern and name say whose it is; the filled part says how many of its 8 slots hold a token. Blocks of one request need not be neighbours.
# - **Token budget:** a **step** is one pass through the model, here over 64 tokens at most. The bar shows who got how many of them.
# - **Queues:** who runs, and how far it is; who waits, and why.
# - **Batch timeline:** one row for each request, one column for each step. A request *waits*, then reads its question (*prefill*, many tokens in one step), then writes (*decode*, one token in a step).
# - **Memory:** the token slots of the pool over time. *Live* slots hold a token. *Tail slack* is allocated and still empty: the unfilled ends of last blocks. The rest is *free*. *KV waste* is the share of the allocated slots that hold no token of a request; blocks that only the prefix cache keeps count too.
#
# And this is who asked what, and what the model answered (40 tokens at most; small models say strange things):

# %% check
for request_id, text in bundled_texts("eight_requests").items():
    question, _, answer = text.partition("\n")
    print(f"{request_id}  {question}\n    {' '.join(answer.split())}")

# %% [markdown]
# ## Predict
#
# In step 12 all 40 blocks are taken, and everybody wants to go on writing. Soon a request needs a block and there is none. The engine will then **preempt** one of the running requests: take its blocks away, and let it start over later.
#
# Whose blocks should it take? Decide before you scrub: `"oldest"` (the request that came first), `"newest"` (the one that came last), or `"largest"` (the one with the most tokens).

# %% exercise=00.1
prediction = ...

# %% check
check("00.1", prediction)

# %% [markdown]
# `hint("00.1")` gives a hint, and one more each time you call it, three in all. `reveal("00.1")` shows the solution. It is the same for every exercise.
#
# ## Scrub
#
# Here is the whole run. Find out whether you were right: step on from 12.

# %% check
EngineView(recording, step=12)

# %% [markdown]
# The view draws what `recording` holds. You can ask it directly, too. Change the number and run the cell again:

# %% check
look_at = 12
print(describe(recording, look_at))
block_map(recording, step=look_at)

# %% [markdown]
# **Exercise 00.2.** Find the *first* preemption of the run. In which step is it? Who is the victim? What is the cause: who needed how many blocks, and how many were free?
#
# Write the cause as a sentence, as the view says it. (There is a quick way: what would you type into *Stop when*?)

# %% exercise=00.2
step, victim, cause = ..., ..., ...

# %% check
check("00.2", step, victim, cause)

# %% [markdown]
# ## Explain
#
# Here is the life of every request in numbers. All of them are counted in steps, so this table is the same on every machine.

# %% check
recording.requests

# %% [markdown]
# - **Nobody waits for a whole batch to end.** A request joins and leaves between two steps. This is *continuous batching*.
# - **A step has a budget,** here 64 tokens. In step 1, `r0` spends 44 of them on its question and `r1` gets the other 20; it reads the second half of its question in step 2. This is *chunked prefill*.
# - **Requests are served first come, first served.** `r6` came in step 12 and saw `r5` lose its place in step 14. It was admitted in step 43, after `r5`: nobody overtakes.
# - **A preempted request loses no text.** It keeps its tokens. When it comes back, it computes their keys and values anew, in one go: look for the second prefill in its row.
# - **The newest gives way, even to itself.** In step 40, `r3` needs a block and is itself the newest that runs: it steps back.
# - **The unused part is small.** Only the last block of a request can be partly empty. See how thin *tail slack* is.
#
# ## Run it live
#
# Now an engine runs in your kernel. The model is tiny and its weights are random, so the tokens it writes are noise. But scheduler, pool, keys and values are real. The first four steps are done. Press play, or →: each new step on screen is a step of the engine. (If the cells below have run already, so has the engine, and the view has its steps; run this cell again for a fresh one.)

# %% check
import importlib.util

from pagedinfer import Engine, EngineConfig, Session

LIMITS = {"block_size": 4, "num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 16}
LIMITS["enable_prefix_caching"] = False  # sharing comes in notebook 08
if importlib.util.find_spec("torch"):
    from pagedinfer import LLM

    engine = LLM("tiny", **LIMITS).engine
else:
    from pagedinfer.sim.simulated import SimulatedRunner

    print("torch is not installed, so a token rule stands in for the model; scheduler and pool are the same.")
    engine = Engine(EngineConfig(**LIMITS), SimulatedRunner())

session = Session(engine)
for text in (b"The fox jumped", b"A quiet evening", b"Once upon a time", b"It rained"):
    prompt = {"prompt_token_ids": list(text)}  # the tiny model has one token for each byte
    session.submit(prompt, temperature=0.0, max_tokens=14, ignore_eos=True, detokenize=False)
session.run(4)
session.view()

# %% [markdown]
# The box *Stop when* works here, too, and so it does in code: let the engine run on until it has to preempt somebody. The view above stays where you left it; the picture below is of the stop.

# %% check
stop = session.run(until="any preempted")
print(stop or "From here on nobody is preempted.")
block_map(session.recording, step=stop.step if stop else -1)

# %% [markdown]
# The next cell runs whatever is left, and draws the whole run. Change `num_blocks` or the texts above, run the three cells again, and see when preemptions come and go.

# %% check
session.run()
batch_timeline(session.recording)

# %% [markdown]
# ## Build
#
# A recording is a list of **events**, in order of time. Each has a `kind` and a `step`; the other fields depend on the kind. These are the events of one step:

# %% check
for event in recording.step_events(9):
    print(event)

# %% [markdown]
# **Exercise 00.3.** Write the query that answers exercise 00.2 for *any* recording. A preemption is an event of kind `"preempt"`; its `rid` is the victim. The check runs your function on recordings that you have not seen. Some of them have no preemption: return `None` for those.


# %% exercise=00.3
def first_preemption(recording):
    """The pair (step, victim) of the first preemption, or None."""
    raise NotImplementedError


# %% check
check("00.3", first_preemption)

# %% [markdown]
# ## Keep it
#
# The whole run as one page that works offline; open it in a browser, or send it to a friend.

# %% check
texts = bundled_texts("eight_requests")
export_html(recording, "eight_requests.html", texts=texts, title="Eight requests, forty blocks")
print("Written: eight_requests.html")

# %% [markdown]
# **You can now** read the engine view, say why a request waited or lost its place, and search a recording. **Next:** [01 Block tables](01_block_tables.ipynb): how does a request find its tokens in that patchwork?
