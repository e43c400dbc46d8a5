"""Usage of the pool, cheap: at every event of random traffic it says what a walk through all tables says."""

import random

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request, Status
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.memory.contiguous import STRATEGIES
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.events import SCHEMA, Alloc, Keyframe, Meta, Slide, Step, Submit
from pagedinfer.trace.measures import Slots, external_fragmentation, free_extents, slots_of
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State
from pagedinfer.trace.tables import USAGE
from pagedinfer.trace.usage import slots_in


def slow_slots(state):
    """The oracle: every block of every table, every cached block."""
    tables = {
        (rid, group): table
        for rid, request in state.requests.items()
        for group, table in enumerate(request.tables())
    }
    written = {holder: state.requests[holder[0]].num_computed_tokens for holder in tables}
    idle = sum(1 for block_id in state.cached if block_id not in state.ref_counts)
    return slots_of(tables, written, state.block_size, idle)


def check(state):
    slots, usage = slow_slots(state), state.usage()
    assert slots_in(state) == slots
    assert (usage["live_slots"], usage["shared_slots"], usage["cached_slots"]) == (
        slots.live, slots.shared, slots.cached_idle,
    )  # fmt: skip
    assert (usage["tail_slack_slots"], usage["reserved_slots"]) == (slots.tail_slack, slots.reserved)
    assert (usage["kv_waste"], usage["sharing_ratio"]) == (slots.kv_waste, slots.sharing_ratio)
    if state.config["allocator"] == "paged":
        assert usage["external_fragmentation"] == 0
    else:
        assert usage["external_fragmentation"] == external_fragmentation(free_extents(state.free))
    parts = ("live", "cached", "tail_slack", "reserved", "free")
    assert sum(usage[f"{part}_slots"] for part in parts) == state.num_blocks * state.block_size
    return slots


class Traffic:
    """Seeded arrivals with common beginnings, forks, aborts, preemptions, cancelled and overlapping plans."""

    def __init__(self, seed, **settings):
        self.draw = random.Random(seed)
        settings = {"num_blocks": 24, "block_size": 4, "max_model_len": 40, "max_num_seqs": 6} | settings
        self.config = EngineConfig(max_num_batched_tokens=24, **settings)
        self.scheduler, self.runner = Scheduler(self.config), SimulatedRunner()
        self.state, self.recording, self.seen = State(), Recording(), []
        self.count = 0
        meta = Meta(SCHEMA, self.config.to_dict())
        meta.step = 0
        for sink in (self.recording.add, self.apply):
            sink(meta)
            self.scheduler.bus.subscribe(sink)

    def apply(self, event):
        self.state.apply(event)
        self.seen.append(check(self.state))

    def come_and_go(self):
        scheduler, draw = self.scheduler, self.draw
        self.count += 1
        length = draw.randint(1, 20)
        token_ids = [draw.randrange(2)] * 8 + [draw.randrange(3) for _ in range(12)]
        request = Request(f"r{self.count}", length, draw.randint(1, 18), token_ids=token_ids[:length])
        scheduler.submit(request, scheduler.step)
        running = [r for r in scheduler.running if r.status == Status.RUNNING]
        if running and draw.random() < 0.3 and scheduler.blocks.can_share:
            parent = draw.choice(running)
            twin = parent.fork(f"{parent.request_id}+{self.count}")
            scheduler.fork(parent.request_id, twin, scheduler.step)
        if running and draw.random() < 0.1:
            mode = "swap" if self.config.num_host_blocks else "recompute"
            scheduler.preempt(draw.choice(running).request_id, "a try", mode)
        if scheduler.requests and draw.random() < 0.1:
            scheduler.abort(draw.choice(list(scheduler.requests)))

    def step(self):
        scheduler, draw = self.scheduler, self.draw
        first = scheduler.schedule(scheduler.step)
        if draw.random() < 0.2:
            scheduler.cancel(first)
            return
        second = scheduler.schedule(scheduler.step) if draw.random() < 0.3 else None
        scheduler.commit(first, self.runner.execute(first))
        if second is not None and draw.random() < 0.4:
            scheduler.cancel(second)
        elif second is not None:
            scheduler.commit(second, self.runner.execute(second))

    def run(self, steps):
        for _ in range(steps):
            if self.draw.random() < 0.5 and len(self.scheduler.requests) < 12:
                self.come_and_go()
            self.step()
            assert self.state.snapshot() == self.scheduler.snapshot()
        return self


SETTINGS = {
    "paged": {},
    "paged, blocks of one": {"block_size": 1, "num_blocks": 80},
    "paged, swap": {"num_host_blocks": 12, "preempt_mode": "swap"},
    "windows": {"group_windows": (None, 7), "num_blocks": 48},
    "one window": {"group_windows": (6,)},
} | {name: {"allocator": name} for name in STRATEGIES}


@pytest.mark.parametrize("name", SETTINGS)
def test_at_every_event_it_says_what_a_walk_through_all_tables_says(name):
    traffic = Traffic(1, **SETTINGS[name]).run(150)
    if SETTINGS[name].get("allocator", "paged") == "paged":
        assert max(slots.shared for slots in traffic.seen) > 0
        assert max(slots.cached_idle for slots in traffic.seen) > 0
    else:
        assert max(slots.tail_slack for slots in traffic.seen) > 0


def test_it_goes_on_from_a_snapshot_and_from_a_copy():
    traffic = Traffic(2).run(40)
    assert traffic.state.num_shared
    assert traffic.state.num_idle
    state = State(traffic.config.to_dict())
    state.apply(Keyframe(traffic.scheduler.snapshot()))
    for other in (state, traffic.state.copy()):
        check(other)
        assert other.usage() == traffic.state.usage()


def test_the_step_table_and_residency_say_the_same():
    recording = Traffic(3).run(100).recording
    steps = recording.steps
    assert list(steps)[-len(USAGE) :] == list(USAGE)
    for row in steps.rows():
        usage = recording.at(row["step"]).usage()
        assert {name: row[name] for name in USAGE} == {name: usage[name] for name in USAGE}
    assert max(steps["sharing_ratio"]) > 1
    assert {steps.types[name] for name in ("sharing_ratio", "external_fragmentation")} == {float}
    assert {steps.types[name] for name in ("shared_slots", "cached_slots", "reserved_slots")} == {int}
    stay = recording.residency()
    assert stay.life_times
    assert stay.idle_before_eviction
    assert stay.reuse_gaps
    assert max(stay.life_times) <= recording.last_step


def test_usage_costs_by_what_lives_not_by_the_pool(monkeypatch):
    """A count, not a time: nothing of the free list or of the cache is walked through."""
    traffic = Traffic(4, num_blocks=4000).run(30)
    assert traffic.state.num_idle
    for name in ("cached", "free", "ref_counts"):
        monkeypatch.setattr(traffic.state, name, Unwalkable(getattr(traffic.state, name)))
    assert traffic.state.usage()["live_slots"] > 0


class Unwalkable:
    """Look-ups and lengths only."""

    def __init__(self, inner):
        self._inner = inner

    def __len__(self):
        return len(self._inner)

    def __getitem__(self, key):
        return self._inner[key]

    def __contains__(self, key):
        return key in self._inner

    def __iter__(self):
        raise AssertionError("walked through")


def test_a_table_that_is_ahead_of_its_tokens():
    """Blocks at its end may be empty, and a window may have left one that is not full: in the middle of a step."""
    events = [
        Meta(SCHEMA, {"num_blocks": 8, "block_size": 4, "group_windows": [5], "allocator": "paged"}),
        Submit("a", 9, 9, 0, 0.0),
        Step(1, 0.0, 16, {"a": 6}, {}),
        Alloc("a", 0, 0, (0, 1, 2, 3)),
    ]
    state = State()
    for event in events:
        state.apply(event)
        check(state)
    assert slots_in(state) == Slots(live=6, tail_slack=2, reserved=8, logical=6)
    state.apply(Slide("a", 0, 0, (0, 1)))
    assert check(state) == Slots(reserved=8)
