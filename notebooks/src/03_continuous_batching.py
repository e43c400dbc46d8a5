# Source of notebook 03; `python notebooks/build.py 03` makes the notebooks from it.

# %% [markdown]
# # Continuous batching
#
# A model reads all its weights for each step, whether it computes one request or thirty. So requests are computed together, in a **batch**. Who may join, and when? You will compare two answers on the same arrivals, write both as policies of the real engine, and then write a third that serves more people well.
#
# | | |
# |:--|:--|
# | **Time** | 45 minutes |
# | **You need** | notebook 00; Python classes |
# | **Memory** | 215 MB (server and kernel together); no torch needed |
# | **Works on** | JupyterLab, Binder, Colab; the pictures also show on a static page |
# | **Seed** | fixed in each run |

# %% setup pagedinfer ipywidgets anywidget

# %% [markdown]
# ## A picture first
#
# Twenty-four requests came one by one to an engine with four **seats**, places in the batch. A row is a seat, a column is a step. In the lower chart you see what the engine did: a seat that becomes free is given on at once. The upper chart has the same requests in **static batches**: a batch is put together, runs until its *last* request has ended, and only then comes the next. Hatched is where a seat waits in vain.

# %% check
from pagedinfer.course import check, hint, reveal
from pagedinfer.course.traffic import ROOMY, TIGHT, run_traffic
from pagedinfer.views import BatchComposition, Latency, batch_timeline, export_html

BatchComposition(run_traffic(ROOMY, seed=1), step=100)

# %% [markdown]
# Drag the slider, or step with ← and →. The line below each title counts: of all seats × steps, those that gave a token. (A token rule stands in for the model here: who computes when does not depend on what the tokens are.)
#
# ## Predict
#
# Six requests wait from the beginning. Their answers have 12, 3, 4, 9, 5 and 3 tokens, in this order. There are two seats. A request's prompt is short: the step that reads it also brings its first token, and each step after it one more.
#
# **Exercise 03.1.** After how many steps has the last one ended: in static batches of two, and in continuous batching? Take paper, and draw the seats.

# %% exercise=03.1
static, continuous = ..., ...

# %% check
check("03.1", static, continuous)

# %% [markdown]
# ## Run it live
#
# This is the continuous one, in an engine in your kernel. Press play, or →.

# %% check
from pagedinfer import Engine, EngineConfig, Session
from pagedinfer.engine.policy import Policy
from pagedinfer.sim.simulated import SimulatedRunner

config = EngineConfig(num_blocks=64, block_size=8, max_num_seqs=2)
session = Session(Engine(config, SimulatedRunner()))
for length in (12, 3, 4, 9, 5, 3):
    session.submit({"prompt_token_ids": [1, 2, 3, 4]}, max_tokens=length, detokenize=False)
session.run(2)
session.view(panes=("queues", "timeline"))

# %% [markdown]
# The same requests, seat by seat, once the engine has run to its end:

# %% check
session.run()
BatchComposition(session.recording, step=13)

# %% [markdown]
# ## Explain
#
# - **Static:** in the first batch, `r1` ends in step 3. Its seat then waits nine steps for `r0`. The longest request of a batch sets the price for all.
# - **Continuous:** the engine decides anew *before each step* who is in the batch (the paper that introduced it, Orca, calls this iteration-level scheduling). In step 4 the seat of `r1` is `r2`'s.
# - With one-token steps for everybody, this costs nothing. The step that takes in a newcomer also reads its prompt, though. So a long one is read in chunks, as in notebook 00, and the others go on beside it.
#
# ## Build: static batching
#
# In this engine, who may join is decided by a **policy**. It is asked about the request at the head of the queue, when there is a seat and some of the step's token budget left: `admit(request, view)` returns `None` for yes, or a sentence that says why not. Before each step, it is asked about one request after the other until it says no.
#
# `view` shows the scheduler, read-only. Among others it has
#
# - `view.num_running`: requests in the batch, those admitted a moment ago among them,
# - `view.num_admitted`: requests admitted for the step that is being planned.
#
# **Exercise 03.2.** Make the engine static: nobody joins before everybody of the batch has ended; then as many as there are seats for.


# %% exercise=03.2
class StaticBatching(Policy):
    def admit(self, request, view):
        raise NotImplementedError  # `super().admit(request, view)` asks whether there is memory


# %% check
check("03.2", StaticBatching)

# %% [markdown]
# Now the requests of the first picture, the same ones at the same steps under both policies. There is plenty of memory. (A policy that fails costs nothing: the engine notes an `error`, and the default decides. So as long as yours is a stub, both runs are the same.)

# %% check
runs = {"continuous": run_traffic(ROOMY, seed=1), "yours": run_traffic(ROOMY, seed=1, policy=StaticBatching)}
for name, run in runs.items():
    waited = sum(run.requests["ttft_steps"]) / len(run.requests["ttft_steps"])
    print(f"{name:10} {run.num_steps} steps, {waited:5.1f} steps to the first token on average")

# %% check
batch_timeline(runs["yours"].until(120))

# %% [markdown]
# ## What users feel
#
# Two times matter to somebody who waits for an answer:
#
# - **TTFT**, time to first token: from the request's arrival until something appears.
# - **TPOT**, time per output token: the mean gap between tokens after the first. Here 1.0 is the best: a token in each step.
#
# A service promises limits for both, its **SLO** (service-level objective). **Goodput** is the share of the requests for which both were kept. The view below counts it.

# %% check
Latency(runs["continuous"], slo={"TTFT": 30, "TPOT": 1.2})

# %% [markdown]
# **Exercise 03.3.** Write it. `rows` is a list of dictionaries, one for each request, as in `recording.requests.rows()`. Here are two of them. The check also uses runs that were stopped half-way, where some requests have not ended.

# %% check
for row in list(runs["continuous"].requests.rows())[:2]:
    print({name: row[name] for name in ("request", "output_tokens", "finished", "ttft_steps", "tpot_steps")})


# %% exercise=03.3
def share_served_well(rows, ttft, tpot):
    """The share of the requests that ended and kept both limits, 0 to 1."""
    raise NotImplementedError


# %% check
check("03.3", share_served_well)

# %% [markdown]
# ## When memory is short
#
# Now the other way round: 16 seats, and a pool of 32 blocks of 8 tokens. Forty requests come, with prompts of 8 to 24 tokens. Their answers turn out to have 40 to 80, but nobody knows that beforehand: each could ask for 160. The default policy admits whoever fits *now*, with a small reserve.

# %% check
from pagedinfer.trace.metrics import goodput

SLO = {"ttft": 150, "tpot": 1.2}  # in steps
default = run_traffic(TIGHT, seed=1)
print(goodput(default, **SLO))
print(sum(default.requests["preemptions"]), "preemptions")
batch_timeline(default.until(200))

# %% [markdown]
# See what happens: requests come in early and have their first token soon. Then all of them grow, the pool is full, and the newest lose their places, again and again. Their users stare at half a sentence. The opposite, to admit only when the longest answers of all would fit, is no better; try it:

# %% check
from pagedinfer.engine.policies import POLICIES

for name, policy in POLICIES["admission"].items():
    if name in ("fits-now", "full-reservation"):
        print(f"{name:16} {goodput(run_traffic(TIGHT, seed=1, policy=policy), **SLO)}")

# %% [markdown]
# **Exercise 03.4.** Write an admission policy with a goodput of at least 70 %, on two runs that you have not seen. What you may use, beside the two numbers above:
#
# - `request.num_prompt_tokens`, `request.num_tokens` (prompt and output so far), `request.max_tokens`,
# - `view.running`: the requests in the batch, each with these same fields,
# - `view.num_held_blocks(request)`, `view.blocks_for(num_tokens)`, `view.num_free_blocks`, `view.num_blocks`, `view.kv_usage` (0 to 1),
# - `view.shortage(request)`: the sentence why it does not fit now, or `None`.


# %% exercise=03.4
class MyAdmission(Policy):
    def admit(self, request, view):
        raise NotImplementedError


# %% check
check("03.4", MyAdmission)

# %% check
mine = run_traffic(TIGHT, seed=1, policy=MyAdmission)
for name, run in (("default", default), ("yours", mine)):
    print(f"{name:8} {goodput(run, **SLO)}; {sum(run.requests['preemptions'])} preemptions")
Latency(mine, slo={"TTFT": 150, "TPOT": 1.2})

# %% check
export_html(mine, "batching.html", title="My admission policy")
print("Written: batching.html")

# %% [markdown]
# **You can now** say what a static batch wastes and why, write a policy that decides who joins, and measure it by what users feel. **Next:** [07 Breakpoints and what-ifs](07_breakpoints_and_what_ifs.ipynb): stop a run where it becomes interesting, and try another policy from there on.
