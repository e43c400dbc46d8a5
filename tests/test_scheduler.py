"""The scheduler, story by story: literal plans, exact block ids, the sentences it gives, and named known faults."""

import pytest

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.plan import ScheduledRequest, StepPlan, StepResult
from pagedinfer.engine.request import Request, Status
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import DuplicateRequest, RequestError, RequestTooLong, UnknownRequest
from pagedinfer.sim.simulated import SimulatedRunner, counting_rule

RUNNER = SimulatedRunner()
BOUND = 500


def make(*, blocks=8, size=4, budget=16, seats=4, length=100, watermark=0.0):
    """Without a prefix cache: block ids are literal here. Stories of sharing are in files of their own."""
    config = EngineConfig(
        num_blocks=blocks, block_size=size, max_num_batched_tokens=budget, max_num_seqs=seats, max_model_len=length,
        watermark=watermark, enable_prefix_caching=False,
    )  # fmt: skip
    return Scheduler(config)


def submit(scheduler, rid, prompt, max_tokens, seed=0):
    request = Request(rid, prompt, max_tokens, token_ids=list(range(prompt)), seed=seed)
    scheduler.submit(request, scheduler.step)
    return request


def step(scheduler):
    """One whole step: the plan and what its commit changed."""
    plan = scheduler.schedule(scheduler.step)
    scheduler.check()
    updates = scheduler.commit(plan, RUNNER.execute(plan))
    scheduler.check()
    return plan, updates


def drain(scheduler):
    """Step until nothing is left; returns {request: (finish reason, sentence)}."""
    ends = {}
    for _ in range(BOUND):
        if not scheduler.requests:
            assert_no_leak(scheduler)
            return ends
        _, updates = step(scheduler)
        ends |= {u.request.request_id: (u.finish_reason, u.detail) for u in updates if u.finish_reason}
    raise AssertionError(f"not done after {BOUND} steps: {scheduler.snapshot()}")


def assert_no_leak(scheduler):
    """LEAK: all blocks free, no table, no queue, nothing waiting to end."""
    scheduler.check()
    snapshot = scheduler.snapshot()
    assert snapshot["waiting"] == snapshot["running"] == []
    assert snapshot["requests"] == snapshot["block_tables"] == snapshot["ref_counts"] == {}
    assert sorted(snapshot["free"]) == list(range(scheduler.config.num_blocks))
    assert not scheduler.ending
    assert not scheduler._open


def work(rid, start, num_tokens, output_index=None, *, prefill=False, new=()):
    """A row of a plan, as far as plans are compared; `output_index` None for a chunk that does not sample."""
    return ScheduledRequest(
        rid, start, num_tokens, output_index is not None, output_index or 0, prefill, new,
        block_table=(), token_ids=(), params=SamplingParams(), seed=0,
    )  # fmt: skip


def output(request):
    return request.token_ids[request.num_prompt_tokens :]


# -- plans, step by step ------------------------------------------------------------------------------------------


def test_a_prompt_in_one_piece_then_a_token_a_step():
    scheduler = make()
    submit(scheduler, "a", 6, 3)
    plan, updates = step(scheduler)
    assert plan == StepPlan(1, 0, 16, [work("a", 0, 6, 0, prefill=True, new=(0, 1))])
    assert [(u.request.request_id, len(u.new_token_ids), u.finish_reason) for u in updates] == [
        ("a", 1, None)
    ]
    assert step(scheduler)[0] == StepPlan(2, 1, 16, [work("a", 6, 1, 1)])
    plan, updates = step(scheduler)
    assert plan == StepPlan(3, 2, 16, [work("a", 7, 1, 2)])
    assert [(u.finish_reason, u.detail) for u in updates] == [("length", "3 tokens produced")]
    assert_no_leak(scheduler)


def test_a_prompt_in_chunks_of_the_budget():
    scheduler = make(budget=7)
    submit(scheduler, "a", 17, 2)
    assert step(scheduler)[0] == StepPlan(1, 0, 7, [work("a", 0, 7, prefill=True, new=(0, 1))])
    assert step(scheduler)[0] == StepPlan(2, 1, 7, [work("a", 7, 7, prefill=True, new=(2, 3))])
    assert step(scheduler)[0] == StepPlan(3, 2, 7, [work("a", 14, 3, 0, prefill=True, new=(4,))])
    assert step(scheduler)[0] == StepPlan(4, 3, 7, [work("a", 17, 1, 1)])
    assert_no_leak(scheduler)


def test_chunks_of_one_token_are_prefill_until_the_last():
    scheduler = make(budget=1)
    submit(scheduler, "a", 3, 2)
    plans = [step(scheduler)[0].scheduled[0] for _ in range(4)]
    assert [(p.start, p.samples, p.is_prefill) for p in plans] == [
        (0, False, True), (1, False, True), (2, True, False), (3, True, False),
    ]  # fmt: skip


def test_a_one_token_prompt_is_a_prefill():
    scheduler = make()
    submit(scheduler, "a", 1, 1)
    assert step(scheduler)[0].scheduled == [work("a", 0, 1, 0, prefill=True, new=(0,))]


def test_prefill_and_decode_share_a_step():
    scheduler = make(budget=8)
    submit(scheduler, "a", 4, 5)
    step(scheduler)
    submit(scheduler, "b", 10, 1)
    assert step(scheduler)[0] == StepPlan(
        2, 1, 8, [work("a", 4, 1, 1, new=(1,)), work("b", 0, 7, prefill=True, new=(2, 3))]
    )
    assert step(scheduler)[0] == StepPlan(
        3, 2, 8, [work("a", 5, 1, 2), work("b", 7, 3, 0, prefill=True, new=(4,))]
    )


def test_two_prompts_split_a_budget_in_order_of_arrival():
    scheduler = make(budget=10)
    for rid in "abc":
        submit(scheduler, rid, 6, 1)
    plan, _ = step(scheduler)
    assert plan == StepPlan(
        1, 0, 10,
        [work("a", 0, 6, 0, prefill=True, new=(0, 1)), work("b", 0, 4, prefill=True, new=(2,))],
        reasons={"c": "token budget of 10 used up"},
    )  # fmt: skip
    plan, _ = step(scheduler)  # a has ended: its blocks 1, 0 stand last in the free list
    assert plan == StepPlan(
        2, 1, 10, [work("b", 4, 2, 0, prefill=True, new=(3,)), work("c", 0, 6, 0, prefill=True, new=(4, 5))]
    )


def test_freed_blocks_are_reused_least_recently_freed_first():
    scheduler = make(blocks=5, size=2)
    submit(scheduler, "a", 5, 1)  # 0 1 2
    submit(scheduler, "b", 3, 9)  # 3 4
    step(scheduler)
    assert scheduler.snapshot()["free"] == [2, 1, 0]
    submit(scheduler, "c", 3, 1)
    plan, _ = step(scheduler)
    assert plan.scheduled == [work("b", 3, 1, 1), work("c", 0, 3, 0, prefill=True, new=(2, 1))]
    assert scheduler.snapshot()["free"] == [0, 1, 2]  # c has ended: 1, its tail, stands before 2


def test_preemption_and_resumption_with_exact_blocks():
    scheduler = make(blocks=4, size=2)
    a, b = submit(scheduler, "a", 3, 4), submit(scheduler, "b", 3, 4)
    plan, _ = step(scheduler)
    assert plan.scheduled == [
        work("a", 0, 3, 0, prefill=True, new=(0, 1)),
        work("b", 0, 3, 0, prefill=True, new=(2, 3)),
    ]
    assert step(scheduler)[0].scheduled == [work("a", 3, 1, 1), work("b", 3, 1, 1)]

    plan, _ = step(scheduler)  # both hold 2 full blocks and 5 tokens: the older takes from the younger
    assert plan == StepPlan(
        3,
        2,
        16,
        [work("a", 4, 1, 2, new=(3,))],
        preempted=["b"],
        reasons={"b": "b was preempted in this step"},
        overwritten=[3],
    )
    assert (b.status, b.num_computed_tokens, b.num_tokens, b.num_preemptions) == (Status.PREEMPTED, 0, 5, 1)
    assert scheduler.blocks.table("a") == [0, 1, 3]
    assert scheduler.blocks.table("b") == []
    assert scheduler.snapshot()["free"] == [2]

    plan, updates = step(scheduler)
    assert plan == StepPlan(4, 3, 16, [work("a", 5, 1, 3)], reasons={"b": "needs 3 blocks, 1 free"})
    assert [u.finish_reason for u in updates] == ["length"]
    assert scheduler.snapshot()["free"] == [2, 3, 1, 0]

    plan, _ = step(scheduler)  # prompt and output in one piece, then on with the third token
    assert plan == StepPlan(5, 4, 16, [work("b", 0, 5, 2, prefill=True, new=(2, 3, 1))])
    assert drain(scheduler) == {"b": ("length", "4 tokens produced")}
    assert output(a) == output(b) == [counting_rule(256)(work("", 0, 1, i)) for i in range(4)]


def test_a_preempted_request_resumes_before_new_ones():
    scheduler = make(blocks=4, size=2)
    submit(scheduler, "a", 3, 4)
    submit(scheduler, "b", 3, 4)
    step(scheduler)
    submit(scheduler, "c", 1, 4)
    step(scheduler)
    step(scheduler)
    assert scheduler.snapshot()["waiting"] == ["b", "c"]
    plan, _ = step(scheduler)  # c's one block is free, but b comes first
    assert plan.reasons == {"b": "needs 3 blocks, 1 free"}
    plan, _ = step(scheduler)
    assert [s.request_id for s in plan.scheduled] == ["b", "c"]


def test_sc_10_victims_leave_the_batch_and_several_may_go_for_one():
    scheduler = make(blocks=4, size=2)
    for rid, prompt in (("a", 4), ("b", 2), ("c", 2)):
        submit(scheduler, rid, prompt, 4)
    plan = scheduler.schedule(0)
    assert [item.new_block_ids for item in plan.scheduled] == [(0, 1), (2,), (3,)]
    scheduler.commit(plan, StepResult({"a": (1, 2, 3), "b": (4,), "c": (5,)}))
    plan, _ = step(scheduler)  # a's three new tokens need two blocks: the youngest goes first
    assert plan == StepPlan(
        2, 1, 16, [work("a", 4, 3, 3, prefill=True, new=(3, 2))],
        preempted=["c", "b"], reasons={"b": "c, b were preempted in this step"},
        overwritten=[3, 2],
    )  # fmt: skip
    assert scheduler.snapshot()["waiting"] == ["b", "c"]
    assert drain(scheduler).keys() == {"b", "c"}


def test_first_come_first_served_nobody_overtakes():
    scheduler = make(blocks=4, size=4)
    submit(scheduler, "a", 8, 9)
    step(scheduler)
    submit(scheduler, "big", 13, 1)
    submit(scheduler, "small", 1, 1)
    plan, _ = step(scheduler)
    assert [s.request_id for s in plan.scheduled] == ["a"]
    assert plan.reasons == {"big": "needs 4 blocks, 1 free"}
    assert list(drain(scheduler)) == ["a", "big", "small"]


# -- the sentences ------------------------------------------------------------------------------------------------


def test_seats():
    scheduler = make(seats=2)
    for rid in "abc":
        submit(scheduler, rid, 2, 2)
    plan, _ = step(scheduler)
    assert plan.reasons == {"c": "all 2 seats (max_num_seqs) are taken"}
    step(scheduler)
    assert [s.request_id for s in step(scheduler)[0].scheduled] == ["c"]


def test_watermark_keeps_room_for_those_who_run():
    scheduler = make(blocks=10, watermark=0.2, budget=64)
    submit(scheduler, "a", 16, 1 + 4)
    submit(scheduler, "b", 17, 1)
    plan, _ = step(scheduler)
    assert plan.reasons == {"b": "needs 5 blocks, 6 free, watermark 2"}
    assert drain(scheduler).keys() == {"a", "b"}


def test_no_watermark_when_nobody_runs():
    scheduler = make(blocks=10, watermark=0.5, budget=64)
    submit(scheduler, "a", 40, 1)
    assert [s.request_id for s in step(scheduler)[0].scheduled] == ["a"]


def test_blocks_promised_to_a_running_prefill():
    scheduler = make(blocks=10, budget=8)
    submit(scheduler, "a", 30, 1)
    for _ in range(3):
        step(scheduler)
    submit(scheduler, "b", 9, 1)  # a computes its last 6 tokens; 2 of the budget are left
    plan, _ = step(scheduler)
    assert plan.reasons == {"b": "needs 3 blocks, 2 free"}

    scheduler = make(blocks=8, budget=8)
    first, second = submit(scheduler, "a", 5, 20), submit(scheduler, "b", 20, 1)
    step(scheduler)  # a whole, 3 tokens of b
    assert (first.num_computed_tokens, second.num_computed_tokens) == (5, 3)
    submit(scheduler, "c", 1, 1)
    plan, _ = step(scheduler)
    assert plan.reasons == {"c": "token budget of 8 used up"}


def test_promised_blocks_are_named_when_a_refused_prefill_waits():
    scheduler = make(blocks=6, budget=4, seats=3)
    submit(scheduler, "a", 12, 1)
    first = scheduler.schedule(0)  # open: a holds one block and needs two more
    submit(scheduler, "b", 13, 1)
    scheduler.blocks.refuse_calls = {scheduler.blocks.num_calls}
    plan = scheduler.schedule(1)
    assert plan.scheduled == []
    assert plan.reasons == {
        "a": "needs 1 block, 5 free; a is in an open step",
        "b": "needs 4 blocks, 5 free, 2 promised to running requests",
    }
    scheduler.commit(first, RUNNER.execute(first))
    scheduler.commit(plan, StepResult({}))
    assert drain(scheduler).keys() == {"a", "b"}


def test_the_budget_may_leave_a_running_request_out():
    scheduler = make(budget=2)
    for rid in "abc":
        submit(scheduler, rid, 1, 3)
    step(scheduler)
    plan, _ = step(scheduler)
    assert [s.request_id for s in plan.scheduled] == ["a", "b"]
    assert plan.reasons == {"c": "token budget of 2 used up"}


def test_each_preemption_has_its_cause():
    scheduler = make(blocks=3, size=2)
    told = []
    scheduler.bus.subscribe(
        lambda event: told.append(event) if event.kind in ("preempt", "admit", "resume") else None
    )
    submit(scheduler, "a", 2, 4)
    submit(scheduler, "b", 2, 4)
    for _ in range(2):
        step(scheduler)
    drain(scheduler)
    assert [(event.kind, event.rid, event.why) for event in told] == [
        ("admit", "a", "1 block for 2 tokens, 2 free"),
        ("admit", "b", "1 block for 2 tokens, 1 free"),
        ("preempt", "b", "b needs 1 block, 0 free; gives way itself"),
        ("resume", "b", "2 blocks for 3 tokens, 1 free"),
    ]


# -- ends ---------------------------------------------------------------------------------------------------------


def test_a_lone_request_that_outgrows_the_pool_ends_with_the_numbers():
    scheduler = make(blocks=2, size=2)
    a = submit(scheduler, "a", 3, 10)
    step(scheduler)
    step(scheduler)
    plan = scheduler.schedule(2)
    why = "its 5 tokens need 3 blocks of 2, the whole pool has 2"
    assert plan == StepPlan(3, 2, 16, exhausted={"a": why})
    assert plan
    updates = scheduler.commit(plan, StepResult({}))
    assert [(u.request, u.new_token_ids, u.finish_reason, u.detail) for u in updates] == [
        (a, (), "length", why)
    ]
    assert len(output(a)) == 2
    assert_no_leak(scheduler)


def test_a_request_that_exactly_fills_the_pool_runs_to_its_end():
    scheduler = make(blocks=2, size=2)
    a = submit(scheduler, "a", 3, 2)  # the second new token is never computed: 4 slots are enough
    assert drain(scheduler) == {"a": ("length", "2 tokens produced")}
    assert len(output(a)) == 2

    scheduler = make(blocks=2, size=2)
    submit(scheduler, "a", 4, 1)
    assert drain(scheduler) == {"a": ("length", "1 token produced")}


def test_an_outgrown_request_that_waits_ends_too():
    scheduler = make(blocks=2, size=2)
    submit(scheduler, "a", 4, 10)
    step(scheduler)
    scheduler.preempt("a", "forced")
    submit(scheduler, "b", 1, 1)
    plan, updates = step(scheduler)
    assert plan.exhausted == {"a": "its 5 tokens need 3 blocks of 2, the whole pool has 2"}
    assert [s.request_id for s in plan.scheduled] == ["b"]
    assert {u.request.request_id: u.finish_reason for u in updates} == {"a": "length", "b": "length"}
    assert_no_leak(scheduler)


def test_a_swapped_request_that_outgrew_the_pool_ends_too():
    scheduler = Scheduler(EngineConfig(num_blocks=2, block_size=2, num_host_blocks=2))
    submit(scheduler, "a", 4, 10)
    step(scheduler)
    scheduler.preempt("a", "forced", "swap")
    plan, updates = step(scheduler)
    assert plan.exhausted == {"a": "its 5 tokens need 3 blocks of 2, the whole pool has 2"}
    assert [u.finish_reason for u in updates] == ["length"]
    assert scheduler.queues.host.num_free == 2
    assert not scheduler.requests


def test_an_end_from_outside_and_an_error_of_one_row():
    scheduler = make()
    for rid in "abc":
        submit(scheduler, rid, 2, 9)
    plan = scheduler.schedule(0)
    result = StepResult({"a": (7,), "c": (7,)}, errors={"b": "logits are NaN"})
    updates = scheduler.commit(plan, result, {"a": ("stop", "end id 7")})
    assert [(u.request.request_id, u.new_token_ids, u.finish_reason, u.detail) for u in updates] == [
        ("a", (7,), "stop", "end id 7"), ("b", (), "error", "logits are NaN"), ("c", (7,), None, ""),
    ]  # fmt: skip
    assert drain(scheduler) == {"c": ("length", "9 tokens produced")}


def test_what_a_failed_row_wrote_is_shared_with_nobody():
    scheduler = Scheduler(EngineConfig(num_blocks=8, block_size=2))
    for rid in "ab":
        submit(scheduler, rid, 5 if rid == "a" else 3, 9)
    plan = scheduler.schedule(0)
    scheduler.commit(plan, StepResult({"b": (7,)}, errors={"a": "logits are NaN"}))
    assert scheduler.snapshot()["cached"] == {"3": [0, 0]}  # b's first block; a's two are not
    submit(scheduler, "c", 5, 9)
    assert step(scheduler)[0].scheduled[1].start == 2


def test_several_new_tokens_at_once():
    scheduler = make()
    a = submit(scheduler, "a", 2, 5)
    plan = scheduler.schedule(0)
    scheduler.commit(plan, StepResult({"a": (1, 2, 3)}))
    assert (a.num_tokens, output(a)) == (5, [1, 2, 3])
    assert step(scheduler)[0].scheduled == [work("a", 2, 3, 3, prefill=True, new=(1,))]


def test_the_commit_tells_tokens_in_the_order_of_the_plan():
    scheduler, told = make(), []
    for rid in "abc":
        submit(scheduler, rid, 2, 5)
    scheduler.bus.subscribe(told.append)
    plan = scheduler.schedule(0)
    scheduler.commit(plan, StepResult({"c": (1,), "a": (2, 3), "b": (4,)}))
    (event,) = (event for event in told if event.kind == "commit")
    assert list(event.tokens.items()) == [("a", 2), ("b", 1), ("c", 1)]


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (StepResult({}), "neither a token nor an end"),
        (StepResult({"a": ()}), "neither a token nor an end"),
        (StepResult({"a": (1,), "b": (1,)}), "did not sample"),
        (StepResult({"a": (1,)}, errors={"zz": "?"}), "ends of requests outside"),
    ],
)
def test_a_result_that_does_not_answer_the_plan_is_refused_whole(result, what):
    scheduler = make(budget=4)
    submit(scheduler, "a", 2, 5)
    submit(scheduler, "b", 5, 5)
    plan = scheduler.schedule(0)
    before = scheduler.snapshot()
    with pytest.raises(AssertionError, match=what):
        scheduler.commit(plan, result)
    assert scheduler.snapshot() == before
    scheduler.cancel(plan)
    assert drain(scheduler).keys() == {"a", "b"}


# -- transactions -------------------------------------------------------------------------------------------------


def test_cancel_restores_everything_even_after_preemption():
    scheduler = make(blocks=4, size=2)
    submit(scheduler, "a", 3, 4)
    submit(scheduler, "b", 3, 4)
    submit(scheduler, "c", 3, 4)
    step(scheduler)
    step(scheduler)
    before = scheduler.snapshot()
    plan = scheduler.schedule(2)
    assert plan.preempted == ["b"]
    assert scheduler.snapshot() != before
    assert scheduler.cancel(plan, "the runner failed") == []
    assert scheduler.snapshot() == before
    again = scheduler.schedule(2)
    assert again == plan


def test_a_second_plan_while_the_first_is_open():
    scheduler = make(budget=4)
    submit(scheduler, "a", 10, 2)
    first, second = scheduler.schedule(0), scheduler.schedule(1)
    assert [p.scheduled for p in (first, second)] == [
        [work("a", 0, 4, prefill=True, new=(0,))], [work("a", 4, 4, prefill=True, new=(1,))],
    ]  # fmt: skip
    third = scheduler.schedule(2)
    assert third.scheduled == [work("a", 8, 2, 0, prefill=True, new=(2,))]
    fourth = scheduler.schedule(3)
    assert not fourth  # its newest token is being computed
    with pytest.raises(AssertionError, match="not the newest"):
        scheduler.cancel(first)
    with pytest.raises(AssertionError, match="not the oldest"):
        scheduler.commit(second, RUNNER.execute(second))
    scheduler.cancel(fourth)
    for plan in (first, second, third):
        scheduler.commit(plan, RUNNER.execute(plan))
        scheduler.check()
    assert drain(scheduler) == {"a": ("length", "2 tokens produced")}


def test_abort_waits_for_the_open_plan():
    scheduler = make()
    submit(scheduler, "a", 5, 9)
    plan = scheduler.schedule(0)
    assert scheduler.abort("a") == []
    assert "a" in scheduler.requests
    updates = scheduler.commit(plan, RUNNER.execute(plan))
    assert [(u.finish_reason, u.detail) for u in updates] == [("abort", "aborted by the caller")]
    assert len(updates[0].new_token_ids) == 1
    assert_no_leak(scheduler)


def test_abort_then_cancel():
    scheduler = make()
    submit(scheduler, "a", 5, 9)
    plan = scheduler.schedule(0)
    scheduler.abort("a")
    scheduler.abort("a")  # twice does no harm
    updates = scheduler.cancel(plan)
    assert [u.finish_reason for u in updates] == ["abort"]
    assert_no_leak(scheduler)


def test_abort_of_a_request_that_the_open_plan_preempted():
    for close in ("commit", "cancel"):
        scheduler = make(blocks=4, size=2)
        for rid, prompt, max_tokens in (("a", 3, 4), ("b", 3, 4), ("c", 1, 1)):
            submit(scheduler, rid, prompt, max_tokens)
        step(scheduler)
        step(scheduler)
        plan = scheduler.schedule(2)
        assert plan.preempted == ["b"]
        assert scheduler.abort("b") == []  # taking the plan back would bring its blocks back
        scheduler.check()
        updates = (
            scheduler.cancel(plan) if close == "cancel" else scheduler.commit(plan, RUNNER.execute(plan))
        )
        assert [u.request.request_id for u in updates if u.finish_reason] == ["b"]
        scheduler.check()
        assert drain(scheduler).keys() == {"a", "c"}


def test_one_that_is_about_to_end_holds_nobody_up():
    scheduler = make(blocks=4, size=2)
    for rid, prompt, max_tokens in (("a", 3, 4), ("b", 3, 4), ("c", 1, 1)):
        submit(scheduler, rid, prompt, max_tokens)
    step(scheduler)
    step(scheduler)
    first = scheduler.schedule(2)
    assert first.preempted == ["b"]
    scheduler.abort("b")  # it stands at the head of the queue until `first` closes
    second = scheduler.schedule(3)
    assert [item.request_id for item in second.scheduled] == ["c"]
    for plan in (first, second):
        scheduler.commit(plan, RUNNER.execute(plan))
        scheduler.check()
    assert drain(scheduler).keys() == {"a"}


def test_events_carry_the_step_of_their_plan():
    scheduler, told = make(budget=4), []
    scheduler.bus.subscribe(lambda event: told.append((event.kind, event.step)))
    submit(scheduler, "a", 4, 1)
    submit(scheduler, "b", 4, 1)
    first, second = scheduler.schedule(0), scheduler.schedule(1)
    scheduler.commit(first, RUNNER.execute(first))
    scheduler.cancel(second)
    submit(scheduler, "c", 1, 1)
    assert told == [
        ("submit", 0), ("submit", 0),
        ("step", 1), ("alloc", 1), ("admit", 1), ("step", 2), ("alloc", 2), ("admit", 2),
        ("commit", 1), ("free", 1), ("finish", 1),
        ("cancel", 2), ("submit", 1),
    ]  # fmt: skip


def test_abort_between_steps_and_of_one_that_waits():
    scheduler = make(seats=1)
    submit(scheduler, "a", 5, 9)
    submit(scheduler, "b", 5, 9)
    step(scheduler)
    plan = scheduler.schedule(1)
    assert [u.request.request_id for u in scheduler.abort("b")] == ["b"]  # no open plan touches it
    scheduler.commit(plan, RUNNER.execute(plan))
    assert [u.finish_reason for u in scheduler.abort("a")] == ["abort"]
    assert_no_leak(scheduler)
    with pytest.raises(UnknownRequest, match="No live request 'a'"):
        scheduler.abort("a")


def test_preempt_from_outside_only_between_steps_and_only_who_runs():
    scheduler = make(seats=1)
    submit(scheduler, "a", 5, 9)
    submit(scheduler, "b", 5, 9)
    step(scheduler)
    for rid in ("b", "nobody"):
        with pytest.raises(RequestError, match=f"Request '{rid}' cannot be preempted"):
            scheduler.preempt(rid, "forced")
    plan = scheduler.schedule(1)
    with pytest.raises(RequestError, match="no plan open"):
        scheduler.preempt("a", "forced")
    scheduler.cancel(plan)
    scheduler.preempt("a", "forced")
    scheduler.check()
    assert scheduler.snapshot()["waiting"] == ["a", "b"]
    assert list(drain(scheduler)) == ["a", "b"]


def test_a_refused_allocation_costs_a_turn_and_nothing_else():
    scheduler = make()
    scheduler.blocks.refuse_calls = {0, 3}
    submit(scheduler, "a", 4, 9)
    plan, _ = step(scheduler)
    assert plan == StepPlan(1, 0, 16, reasons={"a": "needs 1 block, 8 free, refused"})
    assert not plan
    assert [s.num_tokens for s in step(scheduler)[0].scheduled] == [4]
    assert drain(scheduler) == {"a": ("length", "9 tokens produced")}


# -- submission ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "sentence"),
    [
        (0, 1, RequestError, "Request 'x' has an empty prompt; give at least one token."),
        (5, 0, RequestError, "Request 'x' asks for 0 new tokens; ask for at least one."),
        (
            20,
            1,
            RequestTooLong,
            "20 prompt tokens; max_model_len=20 leaves room for at most 19 and one new token",
        ),
        (13, 1, RequestTooLong, "its 13 tokens need 4 blocks of 4, the whole pool has 3"),
    ],
)
def test_what_can_never_run_is_refused_at_the_door(prompt, max_tokens, error, sentence):
    scheduler, told = make(blocks=3, length=20), []
    scheduler.bus.subscribe(told.append)
    before = scheduler.snapshot()
    with pytest.raises(error) as caught:
        submit(scheduler, "x", prompt, max_tokens)
    assert sentence in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert scheduler.snapshot() == before
    assert [(event.kind, event.rid, event.why) for event in told] == [("reject", "x", str(caught.value))]


# -- known faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", range(1, 10))
def test_bm_12_never_more_blocks_than_the_maximum_length(prompt):
    scheduler = make(blocks=8, length=10)
    request = submit(scheduler, "a", prompt, 50)
    widest = 0
    for _ in range(BOUND):
        plan = scheduler.schedule(scheduler.step)
        widest = max(widest, len(scheduler.blocks.table("a")))
        updates = scheduler.commit(plan, RUNNER.execute(plan))
        if updates[0].finish_reason:
            break
    assert updates[0].finish_reason == "length"
    assert widest <= 3
    assert request.num_tokens == 10
    assert_no_leak(scheduler)


def test_bm_12_a_prompt_as_long_as_the_maximum_is_refused():
    with pytest.raises(RequestTooLong, match="max_model_len=10"):
        submit(make(length=10), "a", 10, 50)


def test_sc_02_a_prompt_larger_than_the_pool_blocks_nobody():
    scheduler = make(blocks=8)
    with pytest.raises(RequestTooLong, match="its 33 tokens need 9 blocks of 4, the whole pool has 8"):
        submit(scheduler, "big", 33, 1)
    submit(scheduler, "short", 3, 4)
    for _ in range(100):
        if not scheduler.requests:
            break
        step(scheduler)
    assert_no_leak(scheduler)


def test_sc_02_a_prompt_that_fits_with_an_output_that_does_not():
    scheduler = make(blocks=8)
    big = submit(scheduler, "big", 30, 50)
    submit(scheduler, "short", 3, 4)
    assert drain(scheduler) == {
        "big": ("length", "its 33 tokens need 9 blocks of 4, the whole pool has 8"),
        "short": ("length", "4 tokens produced"),
    }
    assert len(output(big)) == 3


@pytest.mark.parametrize("budget", [2, 3, 5, 64])
@pytest.mark.parametrize("produced", [1, 2, 4])
def test_sc_04_resumed_work_is_known_by_its_pending_tokens(produced, budget):
    scheduler = make(budget=budget)
    request = submit(scheduler, "a", 6, 10, seed=3)
    reached_the_end = 0
    preempted = False
    for _ in range(BOUND):
        if not scheduler.requests:
            break
        if len(output(request)) == produced and not preempted:
            scheduler.preempt("a", "forced")
            preempted = True
            assert (request.num_tokens, request.num_computed_tokens) == (6 + produced, 0)
        plan, _ = step(scheduler)
        for item in plan.scheduled:
            pending = request.num_tokens - item.samples - item.start
            assert item.samples == (item.num_tokens == pending)
            assert item.is_prefill == (pending > 1 or item.start == 0)
            reached_the_end += item.samples
        assert request.num_tokens <= 6 + 10
    assert preempted
    assert len(output(request)) == reached_the_end == 10
    cold = make(budget=64)
    alone = submit(cold, "a", 6, 10, seed=3)
    drain(cold)
    assert output(request) == output(alone)


def test_sc_14_a_long_prefill_lets_the_decoding_one_on():
    budget = 16
    scheduler = make(blocks=200, budget=budget, length=1000)
    submit(scheduler, "talks", 4, 100)
    step(scheduler)
    submit(scheduler, "long", 10 * budget, 5)
    submit(scheduler, "short", 3, 5)
    first_token = {}
    for _ in range(14):
        plan, _ = step(scheduler)
        assert plan.scheduled[0].request_id == "talks"
        assert (plan.scheduled[0].num_tokens, plan.scheduled[0].samples) == (1, True)
        for item in plan.scheduled:
            if item.samples:
                first_token.setdefault(item.request_id, plan.step)
    # 160 tokens at 15 a step: 10 steps of 15 and one of 10, in which 5 tokens are left for the short one.
    assert first_token == {"talks": 2, "long": 12, "short": 12}


@pytest.mark.parametrize("budget", [1, 7, 16])
def test_sc_16_a_prompt_longer_than_the_step_budget_comes_in_chunks(budget):
    scheduler = make(blocks=40, budget=budget)
    requests = [submit(scheduler, rid, prompt, 3) for rid, prompt in (("a", 4), ("long", 50), ("b", 4))]
    chunks = 0
    for _ in range(BOUND):
        if not scheduler.requests:
            break
        plan, _ = step(scheduler)
        assert plan.num_tokens <= budget
        chunks += any(s.request_id == "long" and not s.samples for s in plan.scheduled)
    assert chunks >= 3
    assert [len(output(request)) for request in requests] == [3, 3, 3]
    assert_no_leak(scheduler)


def test_sc_18_two_live_requests_with_one_id():
    scheduler = make()
    first = submit(scheduler, "a", 5, 4, seed=1)
    step(scheduler)
    before = scheduler.snapshot()
    with pytest.raises(DuplicateRequest, match="'a' is still live"):
        submit(scheduler, "a", 3, 4, seed=2)
    assert scheduler.snapshot() == before
    drain(scheduler)
    cold = make()
    alone = submit(cold, "x", 5, 4, seed=1)
    drain(cold)
    assert output(first) == output(alone)
    again = submit(scheduler, "a", 3, 2, seed=2)  # the id is free again
    assert drain(scheduler) == {"a": ("length", "2 tokens produced")}
    assert len(output(again)) == 2
