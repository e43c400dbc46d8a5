"""The core with everything switched on, under random traffic: `core_run.Run` driven by Hypothesis and by random walks.

What is drawn: every order, victim, preempt mode, admission and chunking, paged and contiguous memory, windows, prefix
caching on and off, host pools, drafts, tenants, priorities, retention, timeouts, and policies that raise or answer
nonsense. What happens: shared prefixes, groups, forks, aborts, several open plans, cancels, runners that fail after
they ran, refused allocations, other pool sizes. After each call `check()` holds, the folded events are the state and
no slot is read for a token that is not in it; at the end everybody has ended within a bound, nothing has leaked, and
the recording runs again byte for byte.
"""

from collections import Counter

import core_run
import pytest
from core_run import ACTIONS, IDS, Moody, Run, draw_config
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from pagedinfer.config import ADMISSIONS, ALLOCATORS, CHUNKINGS, ORDERS, PREEMPT_MODES, VICTIMS
from pagedinfer.engine.queues import Queues


class CoreMachine(RuleBasedStateMachine):
    """Hypothesis finds a short run that fails; what has many arguments is drawn from the run's own seed."""

    run = None

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed):
        self.run = Run(seed)

    @rule(name=st.sampled_from([name for name, weight in ACTIONS.items() for _ in range(weight)]))
    def act(self, name):
        self.run.act(name)

    @rule(
        length=st.integers(1, 12),
        max_tokens=st.integers(1, 12),
        shared=st.integers(0, 12),
        n=st.integers(1, 3),
    )
    def submit(self, length, max_tokens, shared, n):
        self.run.submit(length, max_tokens, shared=min(shared, length), n=n)

    @rule(row=st.integers(0, 3), what=st.sampled_from(["goes on", "stops", "fails"]))
    def commit(self, row, what):
        self.run.commit(row, what)

    @rule(rid=st.sampled_from(IDS), mode=st.sampled_from(["recompute", "swap"]))
    def preempt(self, rid, mode):
        self.run.preempt(rid, mode)

    @invariant()
    def all_is_well(self):
        if self.run is not None:
            self.run.check()

    def teardown(self):
        if self.run is not None:
            self.run.finish()


def hypothesis_run(examples, steps):
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, derandomize=True, database=None, deadline=None,
            print_blob=True,
        ),
    )  # fmt: skip


def walk(seed, actions, **fixed):
    """A random walk, busier than shrinkable examples can be; returns the run, drained. A failure names its seed."""
    run = Run(seed, **fixed)
    try:
        for _ in range(actions):
            run.act(run.draw.choices(list(ACTIONS), list(ACTIONS.values()))[0])
            run.check()
        run.finish()
    except Exception as error:
        raise AssertionError(f"seed {seed}, step {run.scheduler.step}, {run!r}: {error!r}") from error
    return run


def kinds(run):
    return Counter(event.kind for event in run.seen.recording.events)


def test_random_traffic():
    hypothesis_run(examples=30, steps=30)


@pytest.mark.slow
def test_random_traffic_long():
    hypothesis_run(examples=200, steps=80)


@pytest.mark.parametrize("seed", range(24))
def test_random_walk(seed):
    run = walk(seed, 80)
    assert kinds(run)["finish"] == kinds(run)["submit"] + kinds(run)["fork"]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 220, 20))
def test_random_walks_long(first):
    for seed in range(first, first + 20):
        walk(seed, 300)


CROWDED = {
    "num_blocks": 8, "block_size": 2, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 45,
    "num_host_blocks": 8, "watermark": 0.0, "max_num_waiting": None, "tenant_max_running": None,
    "tenant_max_blocks": None, "enable_prefix_caching": True, "group_windows": (None,), "allocator": "paged",
    "admission": "fits-now", "preempt_mode": "cheaper", "swap_cost_tokens": 1.0, "num_draft_tokens": 2,
}  # fmt: skip


def test_the_walks_meet_what_they_are_for():
    """A pool that crowds: each kind of event, both modes, accepted and rejected guesses, shared and copied blocks."""
    runs = [walk(seed, 250, moods=seed if seed > 2 else 0, **CROWDED) for seed in (1, 2, 3)]
    seen = sum((kinds(run) for run in runs), Counter())
    for kind in ("hit", "share", "copy", "evict", "cache", "retain", "expire", "swap", "preempt", "resume", "trim",
                 "refuse", "cancel", "abort", "fork", "reset", "resize", "error", "reject"):  # fmt: skip
        assert seen[kind] > 0, f"no {kind}: {seen}"
    events = [event for run in runs for event in run.seen.recording.events]
    assert {event.mode for event in events if event.kind == "preempt"} == {"recompute", "swap"}
    assert {event.dir for event in events if event.kind == "swap"} == {"in", "out"}


def test_every_name_is_drawn():
    configs = [Run(seed).config for seed in range(200)]
    for name, known in (
        ("allocator", ALLOCATORS), ("order", ORDERS), ("victim", VICTIMS), ("preempt_mode", PREEMPT_MODES),
        ("admission", ADMISSIONS), ("chunking", CHUNKINGS), ("enable_prefix_caching", (True, False)),
    ):  # fmt: skip
        assert {getattr(config, name) for config in configs} == set(known)
    assert {len(config.group_windows) for config in configs} == {1, 2}
    assert {bool(config.num_host_blocks) for config in configs} == {True, False}


# -- the harness can fail ---------------------------------------------------------------------------------------------


def lose_the_undo(monkeypatch):
    """Cancelling forgets to give a swapped request its host slots back."""
    monkeypatch.setattr("pagedinfer.memory.tiers.HostTier._unfree", lambda self, slots, journal: None)


def copy_too_late(monkeypatch):
    """A shared block is written without a copy."""
    monkeypatch.setattr("pagedinfer.memory.tables.BlockTables._shared_at", lambda self, rid, start: [])


def swap_in_backwards(monkeypatch):
    """A swapped request's blocks come back in another order."""
    swap_in = Queues.swap_in
    monkeypatch.setattr(Queues, "swap_in", lambda self, request, ids: swap_in(self, request, ids[::-1]))


def silent_swap(monkeypatch):
    """A swap is done and not told."""
    monkeypatch.setattr("pagedinfer.engine.queues.Queues._swap_out", _swap_out_silently)


def _swap_out_silently(self, request, held, slots):
    self.host_tables[request.request_id] = slots


@pytest.mark.parametrize("fault", [lose_the_undo, copy_too_late, swap_in_backwards, silent_swap])
def test_a_planted_fault_is_found(monkeypatch, fault):
    fault(monkeypatch)

    def walk_often():
        for seed in range(10):
            walk(seed, 150, moods=0, **CROWDED)

    with pytest.raises(AssertionError, match="seed"):
        walk_often()


def test_moods_come_again():
    """A learner's policy in bad mood is in the same mood in the re-run: `finish` compares the bytes."""
    run = walk(5, 80, moods=5, **CROWDED)
    told = [event.where for event in run.seen.recording.events if event.kind == "error"]
    assert len(told) > 5
    assert all(where.startswith("policy.") for where in told)
    assert isinstance(run.scheduler.guard.policy, Moody)


def test_configs_are_drawn_from_the_seed_alone():
    assert draw_config(core_run.random.Random(3)) == draw_config(core_run.random.Random(3))
