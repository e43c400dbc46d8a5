"""A step costs what it changes, not what the pool and the queue hold: counted, in executed bytecodes, not timed.

What happens inside one built-in call is not counted (a heap's push is one instruction, whatever its length): those are
O(log n), or `bench_scheduler` would show them.
"""

import sys

import pytest
from bench_scheduler import decoding, step

from pagedinfer.engine.plan import StepResult


def instructions(act):
    """Bytecodes that our own code executes in `act()`."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if event == "call":
            if "pagedinfer" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def cost(num_blocks, num_waiting, num_steps=18, **config):
    """Bytecodes of so many decode steps of four requests: block edges, publication of full blocks among them."""
    scheduler = decoding(num_blocks, num_waiting, 4, **config)
    step(scheduler)
    total = instructions(lambda: [step(scheduler) for _ in range(num_steps)])
    assert len(scheduler.waiting) == num_waiting
    return total


@pytest.mark.parametrize("caching", [True, False])
def test_a_decode_step_does_not_cost_more_in_a_larger_pool(caching):
    costs = [cost(blocks, 20, enable_prefix_caching=caching) for blocks in (1_000, 10_000, 200_000)]
    assert costs[0] == costs[1] == costs[2] > 1_000


@pytest.mark.parametrize(
    "config",
    [{}, {"order": "priority"}, {"order": "priority", "aging": 2.0}, {"order": "shortest-prefill"},
     {"order": "deadline"}, {"chunking": "prefill-first"}, {"chunking": "equal-progress"},
     {"admission": "full-reservation"},
     {"num_host_blocks": 50, "preempt_mode": "swap"}, {"tenant_max_running": 2}, {"tenant_max_blocks": 10**6}],
    ids=str,
)  # fmt: skip
def test_a_decode_step_does_not_cost_more_with_a_longer_queue(config):
    costs = [cost(1_000, waiting, **config) for waiting in (20, 200, 4_000)]
    assert costs[0] == costs[1] == costs[2] > 1_000


@pytest.mark.parametrize("config", [{}, {"tenant_max_running": 2, "max_num_seqs": 6}], ids=str)
def test_nor_when_the_head_waits_for_blocks_or_a_tenant_has_its_share(config):
    """Seats are free all the time: each step looks at the queue, and no further than it must."""

    def waits(num_waiting):
        scheduler = decoding(4, num_waiting, 4, **({"max_num_seqs": 8} | config))
        total = instructions(lambda: [step(scheduler) for _ in range(10)])
        assert len(scheduler.waiting) == num_waiting
        return total

    costs = [waits(number) for number in (20, 200, 4_000)]
    assert costs[0] == costs[1] == costs[2]


def test_who_comes_in_and_who_ends_costs_the_same_in_any_queue():
    """A request ends in each step and the next one comes in: four steps over queues of different lengths."""

    def lives(num_waiting):
        scheduler = decoding(1_000, num_waiting, 4)

        def turn():
            plan = scheduler.schedule(0.0)
            tokens = {item.request_id: (7,) for item in plan.scheduled}
            scheduler.commit(plan, StepResult(tokens), {plan.scheduled[0].request_id: ("stop", "asked for")})

        total = instructions(lambda: [turn() for _ in range(4)])
        assert len(scheduler.waiting) == num_waiting - 3
        return total

    costs = [lives(number) for number in (20, 200, 4_000)]
    assert costs[0] == costs[1] == costs[2]


@pytest.mark.parametrize("order", ["fair-share", "longest-prefix"])
def test_an_order_whose_key_moves_costs_a_look_at_everybody_who_waits(order):
    """The stated bound of moving keys: linear in the waiting requests (times the log of a sort, not counted here)."""
    small, middle, large = (cost(1_000, number, num_steps=4, order=order) for number in (100, 200, 400))
    per_request = (large - middle) / 200 / 4
    assert (middle - small) / 100 / 4 == pytest.approx(per_request, rel=0.05)
    assert per_request < 400


def test_the_count_can_grow(monkeypatch):
    """A step that looks at everybody who waits is noticed."""
    from pagedinfer.engine.waiting import WaitingQueue

    monkeypatch.setattr(WaitingQueue, "refresh", lambda self: [request.priority for request in self])
    from pagedinfer.engine import waiting

    monkeypatch.setattr(waiting, "by_arrival", lambda request: (request.priority, request.arrival))
    assert cost(1_000, 200) != cost(1_000, 20)
