# Source of notebook 07; `python notebooks/build.py 07` makes the notebooks from it.

# %% [markdown]
# # Breakpoints and what-ifs
#
# You will stop an engine where it gets interesting, go back in time, and ask what would have happened otherwise.
#
# | | |
# |:--|:--|
# | **Time** | 35 minutes |
# | **You need** | notebook 00; Python functions; no GPU, no download, no torch |
# | **Memory** | 179 MB (server and kernel together) |
# | **Works on** | JupyterLab, Binder, Colab; the pictures also show on a static page |
# | **Seed** | none needed: nothing is random |

# %% setup pagedinfer ipywidgets anywidget

# %% [markdown]
# ## A picture, found
#
# This is the run of notebook 00, at its first preemption. Nobody scrubbed to it: the recording was *asked*.

# %% check
from pagedinfer import Engine, EngineConfig, Session, compare, fork, why
from pagedinfer.course import bundled_recording, check, hint, reveal
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.watch import parse
from pagedinfer.views import (
    EngineView,
    Latency,
    RunComparison,
    batch_timeline,
    block_map,
    describe,
    export_html,
)

recording = bundled_recording("eight_requests")
EngineView(recording, step=recording.find("any preempted"))

# %% [markdown]
# `find` gives the first step at which a **condition** comes true, `find_all` every one, with its cause:

# %% check
for condition in (
    "any preempted",
    "r6 admitted",
    "any resumed and free blocks < 20",
    "ttft of any > 20 steps",
):
    print(f"{condition!r}: {parse(condition).describe()}")
    for stop in recording.find_all(condition)[:3]:
        print(f"    step {stop.step}: {stop.cause}")

# %% [markdown]
# The grammar is small:
#
# | | examples |
# |:--|:--|
# | what happens to a request, or to `any` | `r3 preempted` · `any resumed` · `r3 finishes` · `any rejected` |
# | what happens to a block | `block 17 written` · `any block evicted` |
# | how things stand | `free blocks < 4` · `kv_usage > 0.9` · `step == 40` |
# | how long somebody waits | `ttft of any > 20 steps` · `stall of r3 > 5` |
# | together | `r3 preempted and free blocks < 4` · `not …` · `… or …` |
#
# A condition that it cannot read gets an answer that helps; try `recording.find("free block < 4")`.
#
# ## Predict
#
# The same conditions are **breakpoints** of a live run. Below is an engine with 16 blocks of 4 tokens, and three requests with prompts of 6, 5 and 9 tokens. (A rule stands in for the model: the scheduler and the pool do not mind. With a real one, say `Session(llm)`.)

# %% check
config = EngineConfig(
    num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, enable_prefix_caching=False
)
session = Session(Engine(config, SimulatedRunner()))
for length in (6, 5, 9):
    session.submit({"prompt_token_ids": list(range(length))}, max_tokens=20, detokenize=False)
session.advance()
print(describe(session.recording, 1))
print({rid: request.block_table for rid, request in session.recording.at(1).requests.items()})

# %% [markdown]
# In step 1 all three prompts were read. From now on each request stores one token in each step, and takes a block when it needs one.
#
# **Exercise 07.1.** At which step does `"free blocks < 4"` stop the run? Paper is allowed.

# %% exercise=07.1
prediction = ...  # a step

# %% [markdown]
# ## Run
#
# `run(until=...)` steps until the condition comes true, or until nothing is left, and says where it stopped and why.

# %% check
stop = session.run(until="free blocks < 4")
print(stop)
block_map(session.recording, step=stop.step if stop else -1)

# %% check
check("07.1", prediction, session)

# %% [markdown]
# Breakpoints can also stay, and stop every run, and the Play button of a view. Run the next cell, and press play: it stops at the preemption, and says the cause above the picture. (After "Run all cells" it does not: a later cell has cleared the breakpoints. Run the cells one by one.) Type another condition into the box of the view, and press play again.

# %% check
session.breakpoints.add("any preempted")
print(session.breakpoints)
view = session.view(panes=("blocks", "timeline"))
view

# %% [markdown]
# A run in a cell stops there, too. The view learns of its steps, and stays where you left it: *Next stop* takes you along.

# %% check
if session.recording.find("any preempted") is None:
    session.run()
print(session.stops[-1])

# %% [markdown]
# ## Step back
#
# At the stop, press ← in the view. You walk into the past of the recording; the engine itself does not move. Each earlier state is still there:

# %% check
step = session.recording.find("any preempted")
for back in (step - 1, step):
    state = session.recording.at(back)
    free = state.num_blocks - len(state.ref_counts)
    print(f"after step {back}: {state.running} run, {state.waiting} wait, {free} blocks are free")
print(describe(session.recording, step))

# %% [markdown]
# **Note:** `run(until="any preempted")` stops *after* the step. What you see at the stop is the state in which the preemption has happened; what led to it is one step further left.
#
# ## All views go together
#
# There are more views, each with a question of its own: where did a request's time go, what does the prefix cache hold, who sat in the batch? The views of one run go together. Step in the one below, or click a request in it, and watch the one above go along (`view.linked = False` would leave it out); and past the last step, each of them steps the engine.

# %% check
Latency(session)

# %% [markdown]
# ## A predicate of your own
#
# Where the grammar ends, Python begins. A breakpoint may be a function of one event, or of the state and all events of a step. True stops, and so does a sentence, which is then the cause:


# %% check
def large_prefill(event):
    if event.kind == "step" and max(event.scheduled.values()) > 42:
        return f"a prefill of {max(event.scheduled.values())} tokens"
    return None


for stop in recording.find_all(large_prefill):
    print(stop)

# %% [markdown]
# **Exercise 07.2.** To lose one's place once is bad luck. Write `lost_again(state, events)`: true in a step in which a request is preempted for the *second* time, or third, and so on. `events` are the events of the step; `state.requests` holds a request for each id, with its `num_preemptions`.


# %% exercise=07.2
def lost_again(state, events):
    """Whether somebody is preempted again in this step; a sentence counts as true."""
    raise NotImplementedError


# %% check
check("07.2", lost_again)

# %% [markdown]
# ## What if?
#
# In step 16 `r0` needed a block, and `r2`, the newest, gave way. Was that wise? First let the run come to its end. Then **fork** it after step 15: up to there all stays as it was, from there on the scheduler decides by another policy. The victim shall be whoever loses the fewest tokens.
#
# **Exercise 07.3.** Who will it be?

# %% check
session.breakpoints.clear()
session.run()
state = session.recording.at(15)
print({rid: f"{request.num_computed_tokens} tokens stored" for rid, request in state.requests.items()})

# %% exercise=07.3
prediction = ...  # a request id

# %% check
check("07.3", prediction, session)

# %% [markdown]
# And this is how both runs go on. They are shown in lockstep; the strip says in which steps they differ, and rings mark the blocks that differ. Step on.

# %% check
branch = session.fork(15, victim="fewest-tokens-lost")
comparison = compare(session.recording, branch, names=["newest", "fewest tokens lost"])
RunComparison(comparison)

# %% [markdown]
# In numbers. Was it worth it? Both runs last 25 steps, but fewer tokens were computed twice.

# %% check
comparison

# %% [markdown]
# ## Explain
#
# Some settings cannot change in a running engine, such as the size of the pool. Then a fork begins at the first step, and says so:

# %% check
print(fork(recording, 13, max_num_seqs=4).way)
larger = fork(recording, 13, num_blocks=60)
print(larger.way)

# %% [markdown]
# What a fork has done is a recording like any other, with everything that you can ask one. `config` has the settings, and `steps` is a table with a column for each number of a step:

# %% check
for run in (recording, larger.recording):
    num_blocks, preempted = run.config["num_blocks"], sum(run.steps["preempted"])
    print(f"{num_blocks} blocks: {preempted} preempted in {run.num_steps} steps")

# %% [markdown]
# You need not guess what to try. `why` looks back at one request: where its time went, whom it waited for, and what would have helped, by trying it.

# %% check
why(recording, "r6")

# %% [markdown]
# ## Build
#
# **Exercise 07.4.** How large would the pool have to be, so that nobody is preempted? Write `smallest_pool(recording)`: the smallest number of blocks, the recorded one or more, with which the same requests run without a preemption. The check asks it about runs that you have not seen, and about this one.


# %% exercise=07.4
def smallest_pool(recording):
    """A number of blocks."""
    raise NotImplementedError


# %% check
check("07.4", smallest_pool)

# %% [markdown]
# Does each block that you add help?

# %% check
for num_blocks in (40, 44, 45, 55, 56, 67, 68, 72):
    other = fork(recording, 0, num_blocks=num_blocks).recording
    print(f"{num_blocks} blocks: {sum(other.steps['preempted'])} preempted in {other.num_steps} steps")

# %% [markdown]
# ## Keep it
#
# The comparison as one page, offline:

# %% check
RunComparison(comparison).html("what_if.html")
print("Written: what_if.html")

# %% [markdown]
# **You can now** stop a run at a condition, walk back, and prove with a fork what a change would have done. **Next:** [10 Detective](10_detective.ipynb): four incidents, and nobody tells you where to look.
