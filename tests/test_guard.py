"""A policy that raises or answers nonsense: it is told, the default decides, and the run goes on as without it."""

import math

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.engine.policy import Policy
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.simulated import SimulatedRunner

CONFIG = EngineConfig(
    num_blocks=8, block_size=2, max_num_batched_tokens=6, max_num_seqs=4, max_model_len=20, num_host_blocks=4,
    enable_prefix_caching=False,
)  # fmt: skip
METHODS = ("order", "admit", "chunk", "victim", "preempt_mode")
SOUND = {
    "order": 3.5,
    "admit": "not today",  # nobody runs, so whoever fits comes in all the same
    "chunk": {"r0": 1},
    "preempt_mode": "swap",
}
"""Answers that can be done."""


def run(policy_class):
    """A crowd in a small pool, stepped to the end. Returns the events."""
    scheduler, told = Scheduler(CONFIG, policy=policy_class(CONFIG)), []
    scheduler.bus.subscribe(told.append)
    for number in range(5):
        scheduler.submit(Request(f"r{number}", 3 + number % 2, 6), 0)
    for _ in range(200):
        if not scheduler.requests:
            return told
        plan = scheduler.schedule(scheduler.step)
        scheduler.commit(plan, SimulatedRunner().execute(plan))
        scheduler.check()
    raise AssertionError(f"not done: {scheduler.snapshot()}")


def with_answer(name, answer):
    """A policy of which one method gives this answer, or raises it."""

    def method(self, *args):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return type("Learner", (Policy,), {name: method})


def decisions(events):
    """All but the errors, which shift the numbers."""
    return [
        (event.kind, event.step, {k: v for k, v in vars_of(event).items() if k not in ("seq", "step", "t")})
        for event in events
        if event.kind != "error"
    ]


def vars_of(event):
    return {name: getattr(event, name) for name in event.__dataclass_fields__}


@pytest.fixture(scope="module")
def default():
    events = run(Policy)
    kinds = {event.kind for event in events}
    assert {"preempt", "resume"} <= kinds  # every method is asked
    assert "error" not in kinds
    return decisions(events)


@pytest.mark.parametrize("name", METHODS)
def test_what_it_raises_is_told_and_the_default_decides(name, default):
    events = run(with_answer(name, RuntimeError("my first try")))
    errors = [event for event in events if event.kind == "error"]
    assert errors
    assert {event.where for event in errors} == {f"policy.{name}"}
    assert {event.what for event in errors} == {"Learner: RuntimeError: my first try; the default decides"}
    assert decisions(events) == default


NONSENSE = [
    ("order", None, "order() answered None; it must be a number or a tuple of numbers"),
    ("order", "high", "order() answered 'high'; it must be a number or a tuple of numbers"),
    ("order", math.nan, "order() answered nan; it must be a number"),
    ("order", (1, "x"), "it must be a number or a tuple of numbers"),
    ("order", (), "it must be a number or a tuple of numbers"),
    ("admit", True, "admit() answered True; None says yes, a sentence says why not"),
    ("admit", "", "admit() answered ''; None says yes, a sentence says why not"),
    ("admit", 0, "admit() answered 0; None says yes, a sentence says why not"),
    ("chunk", None, "chunk() answered a NoneType; it must be a mapping from request id to tokens"),
    ("chunk", [1, 2], "chunk() answered a list; it must be a mapping"),
    ("chunk", {"nobody": 1}, "chunk() gave tokens to 'nobody', which was not among the requests"),
    ("chunk", {}, "chunk() gave nobody a token; a step that computes nothing helps nobody"),
    ("victim", None, "victim() answered None; it must be one of the candidates (r"),
    ("victim", "r0", "victim() answered 'r0'; it must be one of the candidates (r"),
    ("preempt_mode", "offload", "preempt_mode() answered 'offload'; it must be 'recompute' or 'swap'"),
    ("preempt_mode", None, "preempt_mode() answered None; it must be 'recompute' or 'swap'"),
    ("preempt_mode", [], "preempt_mode() answered []; it must be 'recompute' or 'swap'"),
]


@pytest.mark.parametrize(("name", "answer", "said"), NONSENSE)
def test_nonsense_is_told_and_the_default_decides(name, answer, said, default):
    events = run(with_answer(name, answer))
    errors = [event for event in events if event.kind == "error"]
    assert errors
    assert {event.where for event in errors} == {f"policy.{name}"}
    assert all(event.what.startswith("Learner: ") for event in errors)
    assert all(event.what.endswith("; the default decides") for event in errors)
    assert all(said in event.what for event in errors)
    assert decisions(events) == default


def test_shares_beyond_what_there_is(default):
    class Greedy(Policy):
        def chunk(self, requests, budget, view):
            return {request.request_id: request.num_pending_tokens for request in requests}

    class Eager(Policy):
        def chunk(self, requests, budget, view):
            return {requests[0].request_id: requests[0].num_pending_tokens + 1}

    class Halves(Policy):
        def chunk(self, requests, budget, view):
            return {requests[0].request_id: 0.5}

    for policy, said in (
        (Greedy, "the budget is "), (Eager, " to compute; the default"), (Halves, "gave r0 0.5 tokens"),
    ):  # fmt: skip
        events = run(policy)
        errors = [event.what for event in events if event.kind == "error"]
        assert any(said in what for what in errors), errors
        assert decisions(events) == default


def test_a_yes_without_room_is_told(default):
    events = run(with_answer("admit", None))
    errors = [event.what for event in events if event.kind == "error"]
    assert errors
    assert all(
        what.startswith("Learner: admit() answered None, which says yes, but the request needs")
        for what in errors
    )
    assert not {event.kind for event in events} - {kind for kind, *_ in default} - {"error"}


@pytest.mark.parametrize("name", SOUND)
def test_what_can_be_done_is_done(name, default):
    events = run(with_answer(name, SOUND[name]))
    assert not [event for event in events if event.kind == "error" and "chunk" not in event.where]
    if name != "order":  # a constant leaves it to the order of arrival
        assert decisions(events) != default


def test_a_policy_looks_and_changes_nothing(default):
    class Meddler(Policy):
        def victim(self, request, candidates, view):
            request.priority = -1

        def admit(self, request, view):
            return request.token_ids

    events = run(Meddler)
    said = {event.what for event in events if event.kind == "error"}
    assert any(
        "priority cannot be set: a policy looks at requests and changes nothing" in what for what in said
    )
    assert any("a policy sees no 'token_ids' of a request" in what for what in said)
    assert decisions(events) == default


def test_ctrl_c_in_a_policy_is_no_wrong_answer():
    with pytest.raises(KeyboardInterrupt):
        run(type("Slow", (Policy,), {"chunk": lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)}))
