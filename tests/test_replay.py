"""The fold: state from events alone. (Equality with the scheduler on random traffic: test_scheduler_machine.)"""

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace import events as ev
from pagedinfer.trace.recorder import Recorder
from pagedinfer.trace.replay import State, fold

SMALL = EngineConfig(
    num_blocks=4, block_size=2, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20,
    enable_prefix_caching=False,
)  # fmt: skip


def crowded():
    """A scheduler in which b is preempted in step 3 and comes back in step 5, with a state that follows it."""
    scheduler = Scheduler(SMALL)
    state = State(SMALL.to_dict())
    scheduler.bus.subscribe(state.apply)
    scheduler.submit(Request("a", 3, 4), 0)
    scheduler.submit(Request("b", 3, 4), 0)
    return scheduler, state


def step(scheduler):
    plan = scheduler.schedule(scheduler.step)
    scheduler.commit(plan, SimulatedRunner().execute(plan))
    return plan


def test_an_empty_state():
    state = State({"num_blocks": 3, "block_size": 4})
    assert state.snapshot() == Scheduler(EngineConfig(num_blocks=3, block_size=4)).snapshot()
    assert state.usage() == {
        "live_slots": 0, "shared_slots": 0, "cached_slots": 0, "tail_slack_slots": 0, "reserved_slots": 0,
        "free_slots": 12, "logical_tokens": 0, "sharing_ratio": 1.0, "kv_usage": 0.0, "kv_waste": 0.0,
        "external_fragmentation": 0.0,
    }  # fmt: skip
    assert repr(state) == "State(step 0: 0 running, 0 waiting, 0 of 3 blocks used)"


def test_a_story_by_hand():
    events = [
        ev.Meta("1.0", {"num_blocks": 4, "block_size": 2}),
        ev.Submit("a", 3, 9, 0, 0.0),
        ev.Step(1, 0.0, 16, {"a": 3}, {}),
        ev.Alloc("a", 0, 0, (0, 1)),
        ev.Admit("a", "2 blocks for 3 tokens, 2 free"),
        ev.Commit({"a": 1}),
    ]
    assert fold(events).snapshot() == {
        "step": 1,
        "waiting": [],
        "running": ["a"],
        "swapped": [],
        "host_tables": {},
        "host_free": [],
        "requests": {
            "a": {
                "status": "running", "num_prompt_tokens": 3, "max_tokens": 9, "priority": 0, "arrival": 0,
                "num_tokens": 4, "num_computed_tokens": 3, "num_preemptions": 0,
                "num_cached_tokens": 0, "num_draft_tokens": 0, "tenant": "",
            }
        },
        "num_submitted": 1,
        "num_preemptions": 0,
        "num_finished": 0,
        "block_tables": {"a": [0, 1]},
        "ref_counts": {"0": 1, "1": 1},
        "free": [2, 3],
        "idle": {},
        "cached": {},
        "retained": {},
    }  # fmt: skip


def test_what_the_newest_step_did_and_why():
    scheduler, state = crowded()
    step(scheduler)
    assert state.last.admitted == ["a", "b"]
    assert state.last.causes == {
        "a": "2 blocks for 3 tokens, 2 free",
        "b": "2 blocks for 3 tokens, 0 free",
    }
    assert state.last.scheduled == {"a": 3, "b": 3}
    assert state.last.tokens == {"a": 1, "b": 1}
    step(scheduler)
    step(scheduler)
    assert (state.last.now, state.last.budget) == (2, 16)
    assert state.last.preempted == ["b"]
    assert state.last.causes == {"b": "a needs 1 block, 0 free; b gives way"}
    assert state.last.reasons == {"b": "b was preempted in this step"}
    step(scheduler)
    assert state.last.finished == ["a"]
    assert state.finished == {"a": ("length", "4 tokens produced")}
    assert state.last.causes == {"a": "length: 4 tokens produced"}
    step(scheduler)
    assert state.last.resumed == ["b"]
    assert state.last.admitted == []


def test_fill_owners_and_usage():
    scheduler, state = crowded()
    step(scheduler)
    assert state.fill("a") == [2, 1]
    assert state.owners() == {0: [("a", 0)], 1: [("a", 1)], 2: [("b", 0)], 3: [("b", 1)]}
    assert state.usage() == {
        "live_slots": 6, "shared_slots": 0, "cached_slots": 0, "tail_slack_slots": 2, "reserved_slots": 0,
        "free_slots": 0, "logical_tokens": 6, "sharing_ratio": 1.0, "kv_usage": 1.0, "kv_waste": 0.25,
        "external_fragmentation": 0.0,
    }  # fmt: skip
    usage = state.usage()
    assert usage["live_slots"] + usage["tail_slack_slots"] + usage["free_slots"] == 4 * 2


def test_cancel_takes_the_whole_plan_back():
    scheduler, state = crowded()
    step(scheduler)
    step(scheduler)
    before = state.snapshot()
    plan = scheduler.schedule(2)
    assert plan.preempted == ["b"]
    assert state.has_open_plan
    assert state.snapshot() == scheduler.snapshot() != before
    scheduler.cancel(plan, "out of luck")
    assert state.snapshot() == scheduler.snapshot() == before
    assert not state.has_open_plan
    assert state.last.cancelled
    assert state.last.causes == {"": "out of luck"}


def test_an_end_is_no_part_of_a_plan_that_is_open_meanwhile():
    scheduler, state = crowded()
    scheduler.abort("b")
    scheduler.requests["a"].max_tokens = 1
    first, second = scheduler.schedule(0), scheduler.schedule(1)
    scheduler.commit(first, SimulatedRunner().execute(first))  # a ends, its blocks are free
    scheduler.cancel(second)
    assert state.snapshot() == scheduler.snapshot()
    assert state.snapshot()["free"] == [2, 3, 1, 0]


def test_the_host_slots_of_a_swapped_request_that_ends_are_free_at_once():
    config = EngineConfig(num_blocks=4, block_size=2, num_host_blocks=3)
    scheduler, state = Scheduler(config), State(config.to_dict())
    scheduler.bus.subscribe(state.apply)
    scheduler.submit(Request("a", 3, 4), 0)
    step(scheduler)
    scheduler.preempt("a", "forced", "swap")
    assert state.snapshot()["host_free"] == [2]
    scheduler.blocks.refuse_calls = {scheduler.blocks.num_calls}
    plan = scheduler.schedule(1)  # it cannot come back yet, so the plan leaves it alone
    scheduler.abort("a")
    assert state.snapshot() == scheduler.snapshot()
    scheduler.cancel(plan)
    assert state.snapshot() == scheduler.snapshot()
    assert state.snapshot()["host_free"] == [2, 0, 1]


def test_a_copy_stands_on_its_own():
    scheduler, state = crowded()
    step(scheduler)
    twin, before = state.copy(), state.snapshot()
    last = (list(state.last.admitted), dict(state.last.causes))
    scheduler.abort("a")
    assert twin.snapshot() == before != state.snapshot()
    assert (twin.last.admitted, twin.last.causes) == last
    assert twin.last.finished == []
    scheduler.schedule(1)
    with pytest.raises(AssertionError, match="a plan is open"):
        state.copy()


def test_kinds_that_say_nothing_about_the_state_change_nothing():
    state = State(SMALL.to_dict())
    before = state.snapshot()
    for event in (
        ev.Error("x", "y"),
        ev.Gap(3),
        ev.Refuse(0, 1),
        ev.Reject("a", 0, 1, 0, 0.0, "why"),
        ev.Abort("a"),
    ):
        state.apply(event)
    assert state.snapshot() == before


def test_an_id_that_is_used_again():
    scheduler, state = crowded()
    scheduler.abort("a")
    assert "a" in state.finished
    scheduler.submit(Request("a", 1, 1), 0)
    assert "a" not in state.finished
    assert state.snapshot() == scheduler.snapshot()


def test_a_recording_begun_mid_run_folds_from_its_keyframe():
    engine = Engine(SMALL, SimulatedRunner())
    for prompt in ([1, 2, 3], [4, 5, 6]):
        engine.add_request(prompt)
    for _ in range(3):
        engine.step()
    assert engine.metrics()["num_preemptions"] == 1
    with Recorder(engine) as recording:
        assert fold(recording.events).snapshot() == engine.snapshot()
        for _ in range(100):
            engine.step()
            assert fold(recording.events).snapshot() == engine.snapshot()
        assert not engine.has_unfinished()
    assert [event.kind for event in recording.events[:2]] == ["meta", "keyframe"]
