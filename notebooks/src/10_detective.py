# Source of notebook 10; `python notebooks/build.py 10` makes the notebooks from it.

# %% [markdown]
# # Detective
#
# Four engines, four complaints, four recordings. You will find out what went wrong and when, and prove the cure by running the engine again with your change.
#
# | | |
# |:--|:--|
# | **Time** | 40 minutes |
# | **You need** | notebook 00; 07 helps; no GPU, no download, no torch |
# | **Memory** | 184 MB (server and kernel together) |
# | **Works on** | JupyterLab, Binder, Colab; the pictures also show on a static page |
# | **Seed** | 0: the incidents are recorded; scheduler and pool are the real ones, a rule stands in for the model |

# %% setup pagedinfer ipywidgets anywidget

# %% [markdown]
# ## The first complaint
#
# > *"The engine is half empty, and still we wait for ever. We only ask for a few tokens!"* — the people behind `r4` to `r11`
#
# Read it, look at the picture, and make a guess before you scrub. Who is to blame?

# %% check
from pagedinfer import EngineConfig, compare, fork, why
from pagedinfer.course import bundled_recording, check, hint, reveal
from pagedinfer.views import EngineView, Latency, PrefixTree, batch_timeline, describe, export_html

first = bundled_recording("incident_1")
EngineView(first, step=20)

# %% [markdown]
# ## The suspects
#
# | cause | what happens | its steps: from the first to the last |
# |:--|:--|:--|
# | `"head-of-line blocking"` | a large request that does not fit waits in front; those behind it would fit, and wait too | at whose end somebody waits behind it |
# | `"preemption storm"` | requests lose their places again and again, and with them what they had computed | with a preemption |
# | `"cache wipe"` | cached prefixes that many shared are evicted for contents that nobody shares | in which a block is evicted that had been shared |
# | `"starvation"` | one waits, and others that came later are admitted before it, time after time | in which it waits |
# | `"token budget too small"` | there are seats and blocks, and the steps have no tokens left | with the budget used up |
# | `"pool too small for a request"` | a request needs more than the whole pool | in which it waits |
#
# For each incident you name the cause, its steps, and a **change** of the settings that removes it, as a dict: `{"watermark": 0.2}`. The machine stays as it is: no larger pool, no more seats, no larger budget. Everybody must still be served. The ends of the range may be a few steps off.
#
# These are the settings, and the questions that you can put to a recording:

# %% check
first.config

# %% [markdown]
# `help(EngineConfig)` has a line for each. Some count in units that one cannot guess: `watermark` is a share of the pool; `aging` is how many steps of waiting are worth one level of priority, where `"interactive"` requests are at level 0 and `"background"` ones at 10; `tenant_max_blocks` is what the requests of one tenant may come to need.

# %% check
print(describe(first, 20))
print(
    first.at(20).waiting,
    "wait;",
    first.config["num_blocks"] - len(first.at(20).ref_counts),
    "blocks are free",
)
print(first.find_all("any preempted"))
Latency(first)

# %% [markdown]
# **Exercise 10.1.** What went wrong, in which steps, and what would you change? (`first.requests` has the numbers of every request.)

# %% exercise=10.1
cause = ...
steps = ...  # a pair (first, last)
change = ...  # a dict of settings

# %% check
check("10.1", cause, steps, change)

# %% [markdown]
# ### How the check knows
#
# It has no list of right changes. `fork` goes back to the first step and lets the scheduler decide anew, with your settings, over the same requests. Do it yourself: here are three changes that do not help. Put yours beside them.

# %% check
for tried in ({"chunking": "equal-progress"}, {"max_chunk_tokens": 16}, {"max_num_seqs": 6}):
    branch = fork(first, 0, **tried)
    print(*compare(first, branch, names=["as recorded", branch.name]).sentences)
    print("   times to first token, in steps:", branch.recording.requests["ttft_steps"])

# %% [markdown]
# And `why` asks for one request what it waited for, and tries some changes by itself:

# %% check
why(first, "r10")

# %% [markdown]
# ## The second complaint
#
# > *"Answers begin at once, then they freeze in the middle. Some freeze three or four times."*
#
# Sixteen requests come within six steps. They have prompts of 8 to 14 tokens, and will get answers of 36 to 44. There are 16 seats, and 40 blocks of 4 tokens. Predict before you run on: how many of the sixteen will lose their place at least once?

# %%
guess = ...  # 0 to 16

# %% [markdown]
# Now look, and count. The run has 162 steps, and the timeline has room for a part of them: drag the slider to its end for the rest.

# %% check
second = bundled_recording("incident_2")
EngineView(second, step=60, panes=("timeline", "memory"))

# %% [markdown]
# **Exercise 10.2.** The same three questions.

# %% exercise=10.2
cause = ...
steps = ...
change = ...

# %% check
check("10.2", cause, steps, change)

# %% [markdown]
# **Explain.** A request is admitted by what it needs *now*. Sixteen small prompts fit; sixteen long answers do not. Whoever is preempted begins anew when it comes back, and soon takes the place of another. With the cure the run has more steps, for fewer requests run at a time. But a step of this clock counts the same whatever it computes. What the storm really costs are tokens that are computed twice:

# %% check
reserved = fork(second, 0, admission="full-reservation")
table = compare(second, reserved, names=["as recorded", "full reservation"]).table
print(
    {
        row["metric"]: (row["as recorded"], row["full reservation"])
        for row in table.rows()
        if "tokens" in row["metric"]
    }
)

# %% [markdown]
# ## The third complaint
#
# > *"Our three applications begin each prompt with the same long instructions. That made them quick. At some point they were slow again, for no reason."*
#
# The requests of the applications came every three steps, with prompts of about 85 tokens. `num_hits` tells how many of those each found in the prefix cache. Where is the gap?

# %% check
third = bundled_recording("incident_3")
num_hits = {event.rid: event.n for event in third.events if event.kind == "hit"}
tenants = {event.rid: event.tenant for event in third.events if event.kind == "submit"}
print({rid: n for rid, n in num_hits.items() if tenants[rid].startswith("app")})
EngineView(third, step=33, panes=("timeline",))

# %% [markdown]
# Below is what the cache holds, as a tree: each row a prefix, each cell some blocks of it, with the number of hits. Step on from 28.

# %% check
PrefixTree(third, step=28)

# %% [markdown]
# **Exercise 10.3.** Cause, steps, change.

# %% exercise=10.3
cause = ...
steps = ...
change = ...

# %% check
check("10.3", cause, steps, change)

# %% [markdown]
# ## The fourth complaint
#
# > *"My report is not urgent, I know. But yesterday it took one step, and today forty."*
#
# The report is `"background"`, and whoever is more urgent goes first. Every two steps an urgent request comes, and takes one of three seats for 5 to 8 steps. Predict before you run on: will the report be admitted while they keep coming?

# %%
guess = ...  # True or False

# %% [markdown]
# The report is `r6`.

# %% check
fourth = bundled_recording("incident_4")
EngineView(fourth, step=30, panes=("timeline", "queues"))

# %% [markdown]
# **Exercise 10.4.** Cause, steps, change.

# %% exercise=10.4
cause = ...
steps = ...
change = ...

# %% check
check("10.4", cause, steps, change)

# %% [markdown]
# ## Run it live: cause one yourself
#
# An engine in your kernel, with a rule for a model. Twelve short prompts want long answers. The run stops at the first preemption, and the view opens there; press → to go on. Then change a setting and run the cell again: can you make the storm worse? Can you make it vanish?

# %% check
from pagedinfer import Engine, Session
from pagedinfer.sim.simulated import SimulatedRunner

config = EngineConfig(num_blocks=24, block_size=4, max_num_seqs=12, max_num_batched_tokens=16)
session = Session(Engine(config, SimulatedRunner()))
for number in range(12):
    session.submit({"prompt_token_ids": [number] * 8}, max_tokens=20, detokenize=False)
print(session.run(until="any preempted"))
session.view(panes=("blocks", "timeline"))

# %% [markdown]
# ## Build
#
# Nobody looks at pictures all night. **Exercise 10.5.** Write a detector: it gets a recording, and returns the cause (one of the first four of the table), or `None` when nothing is wrong. The check runs it on fifteen runs that you have not seen.


# %% exercise=10.5
def diagnose(recording):
    """The cause, or None."""
    raise NotImplementedError


# %% check
check("10.5", diagnose)

# %% [markdown]
# ## Keep it
#
# An incident report should come with its evidence. This page works offline, slider and all.

# %% check
export_html(second, "incident_2.html", title="Incident 2")
print("Written: incident_2.html")

# %% [markdown]
# **You can now** tell four incidents apart by their evidence, prove a cure before you roll it out, and let a program watch for you. **Next:** cure them with a rule of your own. An admission policy is the task of [03 Continuous batching](03_continuous_batching.ipynb), an eviction rule that of [08 Sharing](08_sharing.ipynb); and `session.why` and `session.fork` do with any engine of yours what you did here.
