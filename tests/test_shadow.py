"""The shadow notices what would make a real pool give wrong numbers: planted faults, each beside its right twin."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.plan import BlockOp, ScheduledRequest, StepPlan
from pagedinfer.engine.protocols import Runner
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.shadow import ShadowFault, ShadowMemory, ShadowRunner
from pagedinfer.sim.simulated import SimulatedRunner

PARAMS = SamplingParams()


def item(rid, token_ids, span, table, drafts=(), groups=()):
    """Tokens `span` = (start, end) of a request, computed."""
    return ScheduledRequest(
        rid, span[0], span[1] - span[0], True, 0, span[0] == 0, (), table, token_ids, PARAMS, 0,
        draft_token_ids=drafts, group_tables=groups,
    )  # fmt: skip


A, B = [1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3]


class Story:
    """A pool of 8 blocks of 2 tokens and 3 host slots; `step` runs one plan."""

    def __init__(self, **options):
        self.memory = ShadowMemory(8, 2, 3, **options)
        self.plans = []

    def step(self, *items, ops=(), overwritten=()):
        ops = [BlockOp(kind, tuple(pairs)) for kind, *pairs in ops]
        self.plans.append(StepPlan(len(self.plans) + 1, 0.0, 99, list(items), ops=ops))
        self.plans[-1].overwritten = list(overwritten)
        self.memory.run(self.plans[-1])


def wrong_table_entry(right):
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]), item("b", B, (0, 4), [2, 3]))
    s.step(item("a", A, (4, 5), [0, 1 if right else 3, 4]))


def tables_out_of_order(right):
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]))
    s.step(item("a", A, (4, 5), [0, 1, 2] if right else [1, 0, 2]))


def a_table_too_short(right):
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]))
    s.step(item("a", A, (4, 5), [0, 1, 2] if right else [0, 1]))


def tokens_never_computed(right):
    s = Story()
    s.step(item("a", A, (0, 2 + right), [0, 1]))
    s.step(item("a", A, (3, 4), [0, 1]))


def a_prefix_taken_for_another(right):
    """A hit on a block of other tokens (right: of the same tokens, so that it may be shared)."""
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]))
    s.step(item("b", [*A[:4], 30] if right else [*B[:2], *A[2:4], 30], (4, 5), [0, 1, 2]))


def the_same_tokens_after_others(right):
    """Equal tokens in the second block are not enough: keys and values depend on the first one too."""
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]), item("b", [*B[:2], *A[2:4]], (0, 4), [2, 3]))
    s.step(item("b", [*B[:2], *A[2:5]], (4, 5), [2, 3 if right else 1, 4]))


def missing_copy_on_write(right):
    """Two children share a partly filled block; one writes to it, then the other's next read is wrong."""
    s = Story()
    s.step(item("a", A, (0, 3), [0, 1]))
    ops = [("copy", (1, 2))] if right else []
    s.step(item("b", [*A[:3], 50], (3, 4), [0, 2 if right else 1]), ops=ops)
    s.step(item("a", A, (3, 4), [0, 1]))
    s.step(item("b", [*A[:3], 50, 51], (4, 5), [0, 2 if right else 1, 3]))


def two_writers_of_one_slot(right):
    s = Story()
    s.step(item("a", A, (0, 2), [0]), item("b", A, (0, 2), [1 if right else 0]))


def a_block_reused_too_early(right):
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]))
    s.step(item("b", B, (0, 2), [2 if right else 1]))
    s.step(item("a", A, (4, 5), [0, 1, 3]))


def a_block_reused_in_the_same_step(right):
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]))
    s.step(item("a", A, (4, 5), [0, 1, 3]), item("b", B, (0, 2), [2 if right else 0]))


def a_freed_block_still_read(right):
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]))
    s.memory.poison([5 if right else 1])
    s.step(item("a", A, (4, 5), [0, 1, 2]))


def a_stale_swap(right):
    """A slot that another request was swapped out to in the meantime."""
    s = Story()
    s.step(item("a", A, (0, 2), [0]), item("b", B, (0, 2), [1]))
    s.step(ops=[("swap_out", (0, 0)), ("swap_out", (1, 1 if right else 0))])
    s.step(item("a", A, (2, 3), [4, 5]), ops=[("swap_in", (0, 4))])


def a_swap_in_of_nothing(right):
    s = Story()
    s.step(item("a", A, (0, 2), [0]))
    s.step(ops=[("swap_out", (0, 0))])
    s.step(item("a", A, (2, 3), [4, 5]), ops=[("swap_in", (0 if right else 1, 4))])


def a_swap_in_left_out(right):
    s = Story()
    s.step(item("a", A, (0, 2), [0]))
    s.step(ops=[("swap_out", (0, 0))])
    s.step(item("a", A, (2, 3), [4, 5]), ops=[("swap_in", (0, 4))] if right else [])


def a_swap_out_after_the_block_was_overwritten(right):
    """The operation came a step too late: another request has written to the block."""
    s = Story()
    s.step(item("a", A, (0, 2), [0]))
    out = [("swap_out", (0, 0))]
    s.step(item("b", B, (0, 2), [0]), ops=out if right else [])
    s.step(ops=[] if right else out)
    s.step(item("a", A, (2, 3), [4, 5]), ops=[("swap_in", (0, 4))])


def wrong_order_of_moves(right):
    s = Story()
    s.step(item("a", A, (0, 4), [3, 4]))
    s.step(
        item("a", A, (4, 5), [2, 3, 4]), ops=[("move", *([(3, 2), (4, 3)] if right else [(4, 3), (3, 2)]))]
    )


def a_move_left_out(right):
    s = Story()
    s.step(item("a", A, (0, 4), [3, 4]))
    s.step(item("a", A, (4, 5), [2, 4, 5]), ops=[("move", (3, 2))] if right else [])


def the_source_of_a_move_still_read(right):
    s = Story()
    s.step(item("a", A, (0, 4), [3, 4]))
    s.step(item("a", A, (4, 5), [2 if right else 3, 4, 5]), ops=[("move", (3, 2))])


def the_copy_after_the_write(right):
    """Copy-on-write in the wrong direction."""
    s = Story()
    s.step(item("a", A, (0, 3), [0, 1]))
    s.step(item("b", [*A[:3], 50], (3, 4), [0, 2]), ops=[("copy", (1, 2) if right else (2, 1))])


def a_pool_made_too_small(right):
    s = Story()
    s.step(item("a", A, (0, 4), [0, 6]))
    if right:
        s.memory.run_ops([BlockOp("move", ((6, 1),))])
    s.memory.resize(4)
    s.memory.resize(8)
    s.step(item("a", A, (4, 5), [0, 1 if right else 6, 2]))


def rejected_drafts_taken_for_tokens(right):
    """Positions 3 and 4 were guessed and rejected; the next step must write them anew."""
    s = Story()
    s.step(item("a", A[:3], (0, 5), [0, 1, 2], drafts=[70, 71]))
    s.step(item("a", A[:5], (3 if right else 4, 5), [0, 1, 2]))


def a_window_that_keeps_too_little(right):
    """Tokens see 3: at position 5 those from 3 on, so block 1 (tokens 2 and 3) is still needed."""
    s = Story(windows=(None, 3))
    s.step(item("a", A, (0, 5), [0, 1, 2], groups=[[4, 5, 6]]))
    s.step(item("a", A, (5, 6), [0, 1, 2], groups=[[-1, 5 if right else -1, 6]]))


def groups_mixed_up(right):
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1], groups=[[4, 5]]))
    s.step(item("a", A, (4, 5), [0, 1 if right else 5, 2], groups=[[4, 5 if right else 1, 6]]))


def lengths_share_nothing(right):
    """Without token ids nobody can know that two requests have a prefix in common."""
    s = Story()
    s.step(item("a", [], (0, 2), [0]))
    s.step(item("a" if right else "b", [], (2, 3), [0, 1]))


def an_id_that_comes_again(right):
    s = Story()
    s.step(item("a", [], (0, 4), [0, 1]))
    s.step(item("a", [], (0, 3), [2, 3]))
    s.step(item("a", [], (3, 4), [2, 3] if right else [0, 3]))


def a_cancel_without_its_inverse(right):
    """The plan moved a block and was cancelled; the books have the old place."""
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]))
    s.step(item("b", B, (0, 2), [1]), ops=[("move", (1, 4))])
    if right:
        s.memory.take_back(s.plans[-1])
    s.step(item("a", A, (4, 5), [0, 1, 2]))


def a_cancel_that_lost_what_was_overwritten(right):
    """`a` was preempted for `b`, which wrote to its block; cancelled, `a` runs again and needs it."""
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]))
    s.step(item("b", B, (0, 2), [1]), overwritten=[1] if right else [])
    s.memory.take_back(s.plans[-1])
    s.step(item("a", A, (4, 5), [0, 1, 2]))


FAULTS = {
    wrong_table_entry: "slot 0 of block 3, which holds token 2 of b, written in step 1",
    tables_out_of_order: "reads token 0 .* holds token 2 of a",
    a_table_too_short: "no block for token 4",
    tokens_never_computed: "reads token 2 .* holds nothing",
    a_prefix_taken_for_another: "b reads token 0 .* holds token 0 of a",
    the_same_tokens_after_others: "b reads token 2 .* holds token 2 of a",
    missing_copy_on_write: "holds token 3 of a, written in step 3",
    two_writers_of_one_slot: "both written to slot 0 of block 0",
    a_block_reused_too_early: "step 3: a reads token 2 .* holds token 0 of b, written in step 2",
    a_block_reused_in_the_same_step: "step 2: a reads token 0 .* holds token 0 of b, written in step 2",
    a_freed_block_still_read: "reads token 2 .* holds nothing",
    a_stale_swap: "a reads token 0 .* holds token 0 of b",
    a_swap_in_of_nothing: "host slot 1 holds nothing",
    a_swap_in_left_out: "reads token 0 .* holds nothing",
    a_swap_out_after_the_block_was_overwritten: "a reads token 0 .* holds token 0 of b",
    wrong_order_of_moves: "reads token 0 .* holds token 2 of a",
    a_move_left_out: "reads token 0 .* holds nothing",
    the_source_of_a_move_still_read: "reads token 0 .* holds nothing",
    the_copy_after_the_write: "b reads token 2 .* holds nothing",
    a_pool_made_too_small: "reads token 2 .* holds nothing",
    rejected_drafts_taken_for_tokens: "reads token 3 .* holds token 3 of a, written in step 1",
    a_window_that_keeps_too_little: r"no block for token 3 \(group 1\)",
    groups_mixed_up: r"reads token 2 \(group 0\) .* holds token 2 of a",
    lengths_share_nothing: "b reads token 0 .* holds token 0 of a",
    an_id_that_comes_again: "reads token 0 .* holds token 0 of a, written in step 1",
    a_cancel_without_its_inverse: "reads token 2 .* holds token 0 of b",
    a_cancel_that_lost_what_was_overwritten: "reads token 2 .* holds token 0 of b",
}


@pytest.mark.parametrize("story", FAULTS, ids=lambda story: story.__name__)
def test_a_planted_fault_is_noticed_and_its_right_twin_is_not(story):
    story(True)
    with pytest.raises(ShadowFault, match=FAULTS[story]):
        story(False)


@pytest.mark.parametrize(
    ("op", "what"),
    [
        (BlockOp("copy", ((0, 8),)), "no block 8, 8 exist"),
        (BlockOp("swap_out", ((0, 3),)), "no host slot 3, 3 exist"),
        (BlockOp("swap_in", ((-1, 0),)), "no host slot -1"),
        (BlockOp("teleport", ((0, 1),)), "no such block operation"),
    ],
)
def test_operations_that_cannot_be_are_faults_and_none_of_them_is_done(op, what):
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]))
    with pytest.raises(ShadowFault, match=what):
        s.memory.run_ops([BlockOp("move", ((1, 2),)), op])
    s.step(item("a", A, (4, 5), [0, 1, 3]))


def test_more_tokens_than_there_are_is_a_fault():
    with pytest.raises(ShadowFault, match="computes up to 9, it has 8"):
        Story().step(item("a", A, (0, 9), [0, 1, 2, 3, 4], drafts=[1]))


def test_accepted_drafts_are_tokens():
    s = Story()
    s.step(item("a", A[:3], (0, 5), [0, 1, 2], drafts=A[3:5]))
    s.step(item("a", A[:6], (5, 6), [0, 1, 2]))


def test_a_swapped_block_may_still_be_shared():
    """A swap-out leaves the block as it is: another request, or the prefix cache, may hold it too."""
    s = Story()
    s.step(item("a", A, (0, 4), [0, 1]))
    s.step(item("b", [*A[:2], 90], (2, 3), [0, 2]), ops=[("swap_out", (0, 0), (1, 1))])
    s.step(item("a", A, (4, 5), [5, 6, 7]), ops=[("swap_in", (0, 5), (1, 6))])


# -- as a runner ------------------------------------------------------------------------------------------------------


def test_it_is_a_runner_with_the_tokens_of_the_simulated_one():
    shadow = ShadowRunner(16, 4, 2, bytes_per_block=10)
    assert isinstance(shadow, Runner)
    outputs = []
    for runner in (shadow, SimulatedRunner()):
        with Engine(EngineConfig(num_blocks=16, block_size=4), runner) as engine:
            engine.add_request([1, 2, 3, 4, 5], SamplingParams(max_tokens=9))
            while engine.has_unfinished():
                outputs += [list(output.outputs[0].token_ids) for output in engine.step() if output.finished]
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 9
    assert shadow.num_steps == 9
    assert shadow.run_ops([BlockOp("swap_out", ((0, 0), (1, 1)))]) == (20, 0.0)
    result = shadow.execute(StepPlan(1, 0.0, 9, ops=[BlockOp("swap_in", ((0, 3),))]))
    assert (result.op_bytes, result.op_seconds) == (10, 0.0)


def test_the_shadow_follows_another_runner():
    runner, memory = SimulatedRunner(bytes_per_block=10), ShadowMemory(8, 2, 1)
    memory.watch(runner)
    plan = StepPlan(1, 0.0, 9, [item("a", A, (0, 4), [0, 1])])
    assert list(runner.execute(plan).tokens) == ["a"]
    assert runner.run_ops([BlockOp("swap_out", ((1, 0),))]) == (10, 0.0)
    runner.resize(1)
    runner.resize(8)
    moving = StepPlan(2, 0.0, 9, [item("b", B, (0, 2), [0])], ops=[BlockOp("move", ((0, 3),))])
    runner.execute(moving)
    runner.take_back(moving)
    back = [BlockOp("swap_in", ((0, 5),))]
    runner.execute(StepPlan(3, 0.0, 9, [item("a", A, (4, 5), [0, 5, 1])], ops=back))
    with pytest.raises(ShadowFault, match="reads token 4"):
        runner.execute(StepPlan(4, 0.0, 9, [item("a", A, (5, 6), [0, 5, 7])]))
    assert runner.num_steps == 4


def test_a_fault_in_the_engine_costs_the_step_and_shows():
    """A block manager that hands out a block in use."""
    engine = Engine(EngineConfig(num_blocks=16, block_size=2), ShadowRunner(16, 2))
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))
    engine.add_request([4, 5, 6], SamplingParams(max_tokens=4))
    engine.step()
    engine.scheduler.blocks.table("r1")[0] = engine.scheduler.blocks.table("r0")[0]
    before = engine.scheduler.requests["r0"].num_computed_tokens
    with pytest.raises(ShadowFault, match=r"r1 reads token 0 .* holds token 0 of r0"):
        engine.step()
    assert engine.scheduler.requests["r0"].num_computed_tokens == before


def traffic(seed, steps):
    """The real scheduler: growth, chunks, preemption, aborts, plans cancelled before and after they ran."""
    draw = random.Random(seed)
    block_size, num_blocks = draw.choice([1, 2, 3, 4]), draw.choice([6, 10, 20])
    config = EngineConfig(
        num_blocks=num_blocks, block_size=block_size, max_num_batched_tokens=draw.choice([3, 8, 16]),
        max_num_seqs=draw.choice([2, 4, 8]), max_model_len=num_blocks * block_size,
    )  # fmt: skip
    scheduler, runner = Scheduler(config), ShadowRunner(num_blocks, block_size)
    for _ in range(steps):
        if draw.random() < 0.4 and len(scheduler.waiting) < 3:
            length, number = (
                draw.randint(1, min(8, num_blocks * block_size - 1)),
                scheduler.queues.num_submitted,
            )
            token_ids = [draw.randrange(2) for _ in range(length)] if draw.random() < 0.7 else []
            request = Request(f"r{number}", length, draw.randint(1, 12), token_ids=token_ids, seed=number)
            scheduler.submit(request, scheduler.step)
        if draw.random() < 0.05 and scheduler.requests:
            scheduler.abort(draw.choice(list(scheduler.requests)))
        if draw.random() < 0.1:
            scheduler.cancel(scheduler.schedule(scheduler.step))
        plan = scheduler.schedule(scheduler.step)
        result = runner.execute(plan)
        if draw.random() < 0.15:
            runner.take_back(plan)
            scheduler.cancel(plan)
        else:
            scheduler.commit(plan, result)
        runner.memory.poison(scheduler.snapshot()["free"])
    return scheduler


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_scheduler_under_random_traffic_is_without_fault(seed):
    traffic(seed, 60)


def test_the_traffic_has_preemptions():
    assert sum(traffic(seed, 60).queues.num_preemptions for seed in range(10)) > 10


def test_a_victim_whose_plan_is_cancelled_after_it_ran_goes_on_with_its_own_data():
    scheduler = Scheduler(EngineConfig(num_blocks=4, block_size=2, max_num_batched_tokens=8))
    runner = ShadowRunner(4, 2)
    for rid, ids in [("r0", [1, 2, 3]), ("r1", [7, 8, 9])]:
        scheduler.submit(Request(rid, 3, 8, token_ids=ids), 0)
    for _ in range(2):
        plan = scheduler.schedule(0)
        scheduler.commit(plan, runner.execute(plan))
    plan = scheduler.schedule(0)
    assert plan.preempted == ["r1"]  # and r0 takes one of its blocks
    assert plan.overwritten == list(plan.scheduled[0].new_block_ids)
    runner.execute(plan)
    runner.take_back(plan)
    scheduler.cancel(plan)
    scheduler.abort("r0")
    plan = scheduler.schedule(0)
    assert [item.start for item in plan.scheduled] == [4]
    runner.execute(plan)  # r1 reads its own tokens
