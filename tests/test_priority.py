"""Interactive and background requests: who is more urgent gets the seat, the blocks, the tokens; and nobody starves.

With the limits beside them: a bounded queue, deadlines and timeouts, shares of tenants.
"""

import pytest
from scheduling import Story

from pagedinfer import Recorder, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.request import BACKGROUND, INTERACTIVE
from pagedinfer.errors import ConfigError, QueueFull
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.testing import assert_no_leak, run_bounded


def by_priority(**config):
    return Story(order="priority", **config)


# -- what is short: seats, blocks, tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sc_12_seats_go_to_the_more_urgent(mode):
    story = by_priority(max_num_seqs=2, num_host_blocks=8, preempt_mode=mode)
    story.submit("low0", 6, 40, priority=BACKGROUND)
    story.submit("low1", 6, 40, priority=BACKGROUND)
    story.run(3)
    story.submit("high", 6, 3, priority=INTERACTIVE)
    plan = story.step()
    assert plan.preempted == ["low1"]
    assert story.steps[-1] == {"low0": 1, "high": 6}  # in the very step
    (told,) = story.told("preempt")
    assert (told.mode, told.why) == (
        mode, "high is more urgent and all 2 seats (max_num_seqs) are taken"
    )  # fmt: skip
    story.run()
    assert story.num_preemptions == 1  # low1 comes back when high is done, and stays
    assert story.ends == dict.fromkeys(("low0", "low1", "high"), "length")


def test_sc_12_blocks_go_to_the_more_urgent():
    story = by_priority(num_blocks=8)
    story.submit("low0", 12, 8, priority=BACKGROUND)
    story.submit("low1", 12, 8, priority=BACKGROUND)
    story.run(2)
    story.submit("high", 9, 3, priority=INTERACTIVE)  # needs 3 blocks, none is free
    plan = story.step()
    assert plan.preempted == ["low1"]
    assert story.steps[-1] == {"low0": 1, "high": 9}
    story.run()
    assert story.num_preemptions <= 2
    assert set(story.ends.values()) == {"length"}


def test_sc_12_tokens_go_to_the_more_urgent():
    """A background prefill takes the whole budget; an urgent request gets its tokens first, nobody loses a block."""
    story = by_priority(max_num_batched_tokens=8)
    story.submit("talks", 2, 40, priority=INTERACTIVE)
    story.submit("low", 40, 4, priority=BACKGROUND)
    story.run(2)
    story.submit("high", 6, 3, priority=INTERACTIVE)
    assert story.run(3) == [
        {"talks": 1, "high": 6, "low": 1}, {"talks": 1, "high": 1, "low": 6}, {"talks": 1, "high": 1, "low": 6},
    ]  # fmt: skip
    assert story.num_preemptions == 0
    story.run()


def test_nobody_is_preempted_where_that_would_not_help():
    """The urgent one needs more than all background ones hold; and what an equally urgent one holds stays."""
    story = by_priority(num_blocks=8, max_num_batched_tokens=32)
    story.submit("talks", 16, 12, priority=INTERACTIVE)
    story.submit("low", 4, 8, priority=BACKGROUND)
    story.run(2)
    story.submit("high", 17, 3, priority=INTERACTIVE)  # 5 blocks; talks and low hold 5 and 2 of 8
    plan = story.step()
    assert plan.preempted == []
    assert plan.reasons == {"high": "needs 5 blocks, 1 free"}
    story.run()
    assert "high is more urgent" not in " ".join(event.why for event in story.told("preempt"))


def test_a_prefill_that_is_promised_blocks_is_reckoned_with():
    """Taking low's blocks would not do: those that are free belong to the rest of talks' prompt."""
    story = by_priority(num_blocks=10, max_chunk_tokens=4)
    story.submit("talks", 28, 2, priority=INTERACTIVE)
    story.submit("low", 4, 8, priority=BACKGROUND)
    story.step()
    story.submit(
        "high", 13, 2, priority=INTERACTIVE
    )  # 4 blocks; 8 are free, of which talks gets 6, and low has 1
    for _ in range(5):
        plan = story.step()
        assert plan.preempted == []
        assert plan.reasons["high"].startswith("needs 4 blocks, ")
    story.run()


@pytest.mark.parametrize("aging", [None, 2.0])
@pytest.mark.parametrize("priority", [INTERACTIVE, BACKGROUND])
@pytest.mark.parametrize("seats", [1, 2, 3])
def test_sc_12_equal_priorities_never_take_seats_from_each_other(priority, seats, aging):
    story = by_priority(max_num_seqs=seats, aging=aging)
    for number in range(8):
        story.submit(f"r{number}", 3 + number, 6, priority=priority)
        story.step()
    story.run()
    assert story.num_preemptions == 0
    assert story.first_steps() == [f"r{number}" for number in range(8)]


def test_sc_12_a_preempted_request_and_its_better_do_not_ping_pong():
    """Each urgent request costs at most one preemption, however long the background ones run."""
    story = by_priority(max_num_seqs=1)
    story.submit("low", 4, 60, priority=BACKGROUND)
    for number in range(5):
        story.run(4)
        story.submit(f"high{number}", 2, 3, priority=INTERACTIVE)
        story.run(4)
    story.run()
    assert story.num_preemptions == 5


@pytest.mark.parametrize("victim", ["newest", "lowest-priority", "fewest-tokens-lost", "largest"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_nobody_gives_way_to_a_less_urgent_one(victim, mode):
    """Blocks run out while a background request grows: whatever the victim policy likes, no urgent one is taken."""
    story = by_priority(num_blocks=9, victim=victim, num_host_blocks=9, preempt_mode=mode)
    for number in range(3):
        story.submit(f"high{number}", 4 + number, 10, priority=INTERACTIVE)
        story.submit(f"low{number}", 4 + number, 10, priority=BACKGROUND)
        story.step()
    story.run()
    assert story.num_preemptions > 0
    for event in story.told("preempt"):
        for_whom = event.why.split()[0]
        assert not (event.rid.startswith("high") and for_whom.startswith("low")), event
    assert story.requests["high0"].num_preemptions == 0


def test_the_more_urgent_comes_in_before_one_that_was_swapped():
    story = by_priority(max_num_seqs=1, num_host_blocks=8, preempt_mode="swap")
    story.submit("low", 4, 20, priority=BACKGROUND)
    story.run(2)
    story.submit("high0", 2, 2, priority=INTERACTIVE)
    story.run(1)
    story.submit("high1", 2, 2, priority=INTERACTIVE)
    story.submit("low1", 2, 2, priority=BACKGROUND)
    story.run(1)
    assert story.run(2) == [{"high1": 2}, {"high1": 1}]
    assert [event.dir for event in story.told("swap")] == ["out"]  # not in and out again in between
    assert story.run(1) == [{"low": 1}]  # and before the one that is new
    story.run()


# -- SC-10 ------------------------------------------------------------------------------------------------------------


def test_sc_10_a_victim_that_was_placed_leaves_the_batch():
    """b has its token in this step when c needs a block: b's row goes, its token returns to the budget, d gets it."""
    story = Story(num_blocks=6, victim="largest", max_num_batched_tokens=32)
    for rid, prompt in (("a", 3), ("b", 9), ("c", 4), ("d", 2)):
        story.submit(rid, prompt, 8)
    story.step()
    plan = story.step()
    assert plan.preempted == ["b"]
    assert story.steps[-1] == {"a": 1, "c": 1, "d": 1}
    assert plan.num_tokens == 3 <= plan.token_budget
    assert {item.request_id for item in plan.scheduled} <= {"a", "c", "d"}
    story.run()
    assert set(story.ends.values()) == {"length"}


# -- SC-14 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [3, 5, 8])
def test_sc_14_with_a_chunk_cap_the_short_prompt_starts_at_once(cap):
    """A prompt of ten budgets while one decodes: it goes on every step, and a short one need not wait for the long."""
    budget = 16
    story = Story(num_blocks=200, max_num_batched_tokens=budget, max_model_len=1000, max_chunk_tokens=cap)
    story.submit("talks", 3, 100)
    story.run(1)
    story.submit("long", 10 * budget, 5)
    story.submit("short", 6, 5)
    after = story.run(4)
    assert all(scheduled["talks"] == 1 for scheduled in after)
    # budget - 1 - cap tokens are left beside talks and a chunk, at most a cap of them in a step for the short one
    steps = -(-6 // min(cap, budget - 1 - cap))
    assert sum(scheduled.get("short", 0) for scheduled in after[:steps]) >= 6
    assert max(scheduled.get("long", 0) for scheduled in after) == cap
    story.run()


def test_a_request_back_from_the_host_keeps_to_the_cap():
    story = by_priority(max_num_seqs=2, max_chunk_tokens=4, num_host_blocks=8, preempt_mode="swap")
    story.submit("low", 20, 2, priority=BACKGROUND)
    story.run(2)
    story.scheduler.preempt("low", "forced", "swap")
    assert story.run(1) == [{"low": 4}]
    story.run()


# -- the queue's limit, deadlines, timeouts ---------------------------------------------------------------------------


def engine_of(**config):
    settings = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 2} | config
    return Engine(EngineConfig(**settings), SimulatedRunner())


def test_a_full_queue_refuses_by_type_and_takes_the_next_one_when_there_is_room():
    engine = engine_of(max_num_waiting=2)
    with Recorder(engine) as recording:
        for _ in range(2):
            engine.add_request([1, 2], SamplingParams(max_tokens=2))
        with pytest.raises(
            QueueFull, match=r"Request 'r2': 2 requests wait and max_num_waiting=2; try again later"
        ):
            engine.add_request([1, 2])
        engine.step()
        engine.add_request([1, 2], SamplingParams(max_tokens=2))
        with pytest.raises(QueueFull):  # a group needs room for all its outputs, or none comes in
            engine.add_request([1, 2], SamplingParams(max_tokens=2, n=2, temperature=1.0))
        assert len(engine.scheduler.waiting) == 1
        assert len(run_bounded(engine, 50)) == 3
        assert_no_leak(engine)
    assert [event.room_for for event in recording.events if event.kind == "reject"] == [1, 2]


def test_requests_over_their_time_end_with_the_sentence():
    engine = engine_of(max_num_seqs=1)
    running = engine.add_request([1, 2, 3], SamplingParams(max_tokens=50), timeout=4)
    waiting = engine.add_request([1, 2], SamplingParams(max_tokens=50), timeout=2)
    patient = engine.add_request([4], SamplingParams(max_tokens=3))
    done = run_bounded(engine, 100)
    assert done[waiting].outputs[0].finish_reason == "abort"
    assert done[waiting].detail == "timed out: it came at 0 and was given until 2"
    assert done[waiting].outputs[0].token_ids == []
    assert done[running].outputs[0].finish_reason == "abort"
    assert done[running].detail == "timed out: it came at 0 and was given until 4"
    assert len(done[running].outputs[0].token_ids) == 4  # what it had is kept
    assert done[patient].outputs[0].finish_reason == "length"
    assert_no_leak(engine)


def test_a_swapped_request_over_its_time_gives_its_host_blocks_back():
    engine = engine_of(max_num_seqs=1, num_host_blocks=4, preempt_mode="swap", order="priority")
    low = engine.add_request([1] * 5, SamplingParams(max_tokens=50), priority="background", timeout=5)
    engine.step()
    engine.step()
    engine.add_request([2] * 5, SamplingParams(max_tokens=10), priority="interactive")
    engine.step()
    assert engine.snapshot()["swapped"] == [low]
    done = run_bounded(engine, 50)
    assert done[low].detail == "timed out: it came at 0 and was given until 5"
    assert_no_leak(engine)
    assert sorted(engine.snapshot()["host_free"]) == [0, 1, 2, 3]


def test_deadlines_are_in_the_callers_clock():
    times = iter(range(0, 10_000, 100))
    config = EngineConfig(num_blocks=16, block_size=4, max_num_seqs=1, order="deadline")
    engine = Engine(config, SimulatedRunner(), clock=lambda: next(times))
    with Recorder(engine) as recording:
        engine.add_request([1], SamplingParams(max_tokens=2))  # at 0, none
        engine.add_request([1], SamplingParams(max_tokens=2), deadline=900)  # at 100: by 1000
        engine.add_request([1], SamplingParams(max_tokens=2), deadline=700)  # at 200: by 900
        run_bounded(engine, 20)
    assert [event.rid for event in recording.events if event.kind == "admit"] == ["r2", "r1", "r0"]


def test_a_priority_that_would_be_ignored_is_refused():
    engine = engine_of()
    with pytest.raises(ConfigError, match=r"priority=10 of 'r0' would be ignored under order='fcfs'"):
        engine.add_request([1], priority="background")
    engine = engine_of(order="priority")
    with pytest.raises(ConfigError, match="give an integer, or interactive or background"):
        engine.add_request([1], priority="urgent")
    assert not engine.has_unfinished()


# -- tenants ----------------------------------------------------------------------------------------------------------


def test_a_tenant_at_its_limit_of_requests_blocks_nobody_else():
    story = Story(max_num_seqs=4, tenant_max_running=2)
    for number in range(4):
        story.submit(f"x{number}", 2, 6, tenant="x")
    story.submit("y", 2, 6, tenant="y")
    plan = story.step()
    assert story.steps[-1] == {"x0": 2, "x1": 2, "y": 2}
    assert plan.reasons == {
        "x2": "tenant 'x' has 2 running, tenant_max_running=2"
    }  # the others stand behind it
    story.run()
    assert all(sum(rid.startswith("x") for rid in scheduled) <= 2 for scheduled in story.steps)
    assert story.first_steps() == ["x0", "x1", "y", "x2", "x3"]


def test_a_tenant_at_its_limit_of_blocks_blocks_nobody_else():
    story = Story(tenant_max_blocks=6)
    for number in range(3):
        story.submit(f"x{number}", 4, 8, tenant="x")  # 12 tokens: 3 blocks each
    story.submit("y", 4, 8, tenant="y")
    plan = story.step()
    assert story.steps[-1] == {"x0": 4, "x1": 4, "y": 4}
    assert plan.reasons == {"x2": "tenant 'x' may come to need 6 + 3 blocks, tenant_max_blocks=6"}
    story.run()
    alone = Story(tenant_max_blocks=1)
    alone.submit("whole", 12, 8, tenant="x")  # more than its share, but alone it may
    alone.submit("next", 1, 1, tenant="x")
    assert list(alone.step().reasons) == ["next"]
    alone.run()


def test_one_that_comes_back_from_the_host_counts_too():
    story = by_priority(max_num_seqs=2, tenant_max_running=1, num_host_blocks=8, preempt_mode="swap")
    story.submit("x0", 4, 9, tenant="x", priority=BACKGROUND)
    story.run(2)
    story.scheduler.preempt("x0", "forced", "swap")
    story.submit("x1", 4, 4, tenant="x", priority=INTERACTIVE)
    story.submit("y0", 4, 4, tenant="y", priority=BACKGROUND)
    plan = story.step()
    assert story.steps[-1] == {"x1": 4, "y0": 4}
    assert plan.reasons == {"x0": "tenant 'x' has 1 running, tenant_max_running=1"}
    story.run()


def test_the_last_one_running_may_be_refused_its_block_while_a_more_urgent_one_than_the_others_waits():
    """Two refused allocations in a row: high takes low's blocks, gets none all the same, and gives way itself."""
    story = by_priority()
    story.submit("high", 4, 9, priority=INTERACTIVE)
    story.submit("low", 4, 9, priority=BACKGROUND)
    story.step()
    story.submit("between", 4, 9, priority=5)
    calls = story.scheduler.blocks.num_calls
    story.scheduler.blocks.refuse_calls = {calls, calls + 1}
    plan = story.step()
    assert plan.preempted == ["low", "high"]
    assert plan.scheduled == []
    story.run()
    assert set(story.ends.values()) == {"length"}
