"""Each named policy, on a workload that shows what it does, step by step; and learners' policies that fail."""

from collections import Counter

import pytest
from scheduling import Story

from pagedinfer.config import EngineConfig
from pagedinfer.engine.policies import POLICIES, make_policy
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import ConfigError

# -- waiting order ----------------------------------------------------------------------------------------------------


def order_of(order, **config):
    """Three requests wait for the only seat; who gets it when?"""
    story = Story(max_num_seqs=1, num_blocks=16, order=order, enable_prefix_caching=True, **config)
    ranks = {"a": 5, "b": 0, "c": 5} if order == "priority" else {}
    story.submit("busy", 0, 2, tokens=[9] * 8 + [8], tenant="x")
    story.step()
    story.submit("a", 12, tenant="x", deadline=30.0, priority=ranks.get("a", 0))
    story.submit("b", 3, tenant="x", deadline=None, priority=ranks.get("b", 0))
    story.submit("c", 0, tokens=[9] * 8, tenant="y", deadline=20.0, priority=ranks.get("c", 0))
    story.run()
    return story.first_steps()[1:]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", ["a", "b", "c"]),
        ("priority", ["b", "a", "c"]),  # 0, then the two of 5 by arrival
        ("shortest-prefill", ["b", "c", "a"]),  # 3, 8, 12 tokens
        (
            "longest-prefix",
            ["c", "a", "b"],
        ),  # busy has left c's first block; the others have none and come by arrival
        ("fair-share", ["c", "a", "b"]),  # x had 10 tokens computed, y none
        ("deadline", ["c", "a", "b"]),  # 20, 30, none
    ],
)
def test_who_waits_in_front(order, expected):
    assert order_of(order) == expected


def test_fair_share_counts_what_was_served():
    """Two tenants, one seat: the one that sends more does not get more, until the other has nothing left to ask."""
    story = Story(max_num_seqs=1, order="fair-share")
    for number in range(4):
        story.submit(f"greedy{number}", 4, tenant="x")
    story.submit("modest0", 4, tenant="y")
    story.submit("modest1", 4, tenant="y")
    story.run()
    assert story.first_steps() == ["greedy0", "modest0", "greedy1", "modest1", "greedy2", "greedy3"]
    assert story.scheduler.served == {"x": 16, "y": 8}


def test_what_a_victim_or_a_cancelled_plan_had_counted_is_taken_back():
    """c's new block comes from b, which has its token in this step already: the tenant of b was not served it."""
    story = Story(num_blocks=7, order="fair-share", victim="largest", max_num_batched_tokens=32)
    for rid, prompt in (("a", 4), ("b", 9), ("c", 7)):
        story.submit(rid, prompt, 8, tenant=rid)
    story.run(2)
    assert story.scheduler.served == {"a": 5, "b": 10, "c": 8}
    plan = story.scheduler.schedule(2.0)
    assert plan.preempted == ["b"]
    assert story.scheduler.served == {"a": 6, "b": 10, "c": 9}
    story.scheduler.cancel(plan)
    assert story.scheduler.served == {"a": 5, "b": 10, "c": 8}
    story.run()
    assert story.scheduler.served == sum(map(Counter, story.steps), Counter())


def starvation(aging, steps):
    """An urgent request comes in every step and takes the only seat for a step; a background one has waited from 0."""
    story = Story(max_num_seqs=1, order="priority", aging=aging)
    story.submit("old", 4, 3, priority=10)
    for number in range(steps):
        story.submit(f"n{number}", 2)
        story.step()
    return story


def test_without_aging_a_background_request_may_starve():
    story = starvation(None, 120)
    assert "old" not in story.first_steps()


@pytest.mark.parametrize("aging", [0.5, 1.0, 3.0])
def test_aging_bounds_the_wait(aging):
    """It is overtaken by nobody who comes more than 10 levels x `aging` after it; those before it take a step each.

    So it starts by step 10 x aging + 2, and having started it ends: nobody who comes later takes its seat.
    """
    bound = int(10 * aging) + 2
    story = starvation(aging, bound + 3)
    first = next(number for number, scheduled in enumerate(story.steps, 1) if "old" in scheduled)
    assert 10 * aging <= first <= bound
    assert story.ends["old"] == "length"
    assert story.num_preemptions == 0


def test_aging_protects_a_running_request_from_losing_its_blocks_too():
    """Urgent requests grow beside it and the pool is too small for all: it loses nothing to those that came later."""
    story = Story(num_blocks=8, max_num_seqs=3, order="priority", aging=1.0)
    old = story.submit("old", 8, 16, priority=10)
    for number in range(11):
        story.step() if story.scheduler.requests else None
        story.submit(f"n{number}", 4, 12)
    for _ in range(60):
        story.submit(f"later{len(story.steps)}", 4, 12)
        story.step()
    assert story.ends["old"] == "length"
    late = [event for event in story.told("preempt") if event.rid == "old" and event.why.startswith("later")]
    assert not late
    assert old.num_preemptions < 12


# -- victims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "order", "expected"),
    [
        ("newest", "fcfs", "d"),
        ("lowest-priority", "priority", "c"),
        ("fewest-tokens-lost", "fcfs", "c"),  # 2 tokens computed, b has 8, d 4
        ("largest", "fcfs", "b"),  # 2 blocks, c and d have 1
    ],
)
def test_who_gives_way(victim, order, expected):
    story = Story(num_blocks=6, order=order, victim=victim, max_num_batched_tokens=32)
    urgent = order == "priority"
    story.submit("a", 8, 8)
    story.submit("b", 7, 8, priority=2 if urgent else 0)
    story.submit("c", 1, 8, priority=3 if urgent else 0)
    story.submit("d", 3, 8, priority=1 if urgent else 0)
    story.step()
    assert story.step().preempted == [expected]  # a's ninth token needs a third block, and none is free
    story.run()
    assert set(story.ends.values()) == {"length"}


# -- how they go ------------------------------------------------------------------------------------------------------


def modes_of(mode, **config):
    """b has few tokens in its block, c many: copying a block out and back costs as much as 3 tokens."""
    story = Story(
        num_blocks=6, num_host_blocks=8, preempt_mode=mode, swap_cost_tokens=3.0, max_num_batched_tokens=32, **config
    )  # fmt: skip
    story.submit("a", 12, 13)
    story.submit("b", 8, 8)
    story.submit("c", 2, 4)
    story.run()
    return [(event.rid, event.mode) for event in story.told("preempt")], story.outputs()


def test_each_preempt_mode_on_one_workload():
    recomputed, outputs = modes_of("recompute")
    swapped, same = modes_of("swap", enable_prefix_caching=True)
    cheaper, again = modes_of("cheaper")
    assert {mode for _, mode in recomputed} == {"recompute"}
    assert {mode for _, mode in swapped} == {"swap"}
    # c has 2 tokens in 1 block: computing them again costs 2, copying the block 3. b has 8 or more in 2 blocks.
    assert {("c", "recompute"), ("b", "swap")} <= set(cheaper)
    assert outputs == same == again


# -- admission --------------------------------------------------------------------------------------------------------


def admission_of(admission, **config):
    story = Story(num_blocks=12, max_num_seqs=8, max_num_batched_tokens=64, admission=admission, **config)
    for rid in "abcdef":
        story.submit(rid, 8, 12)
    first = story.step()
    story.run()
    return len(first.scheduled), story.num_preemptions, len(story.steps)


def test_when_the_first_of_the_queue_may_come_in():
    """Six requests of 8 prompt and 12 output tokens, 12 blocks of 4: how many come in at once, what does it cost?

    At its end each holds 5 blocks (its last token is never computed): two fit, six come in at 2 blocks each.
    """
    assert admission_of("fits-now")[0] == 6
    assert (
        admission_of("watermark", watermark=0.25)[0] == 4
    )  # 12 blocks less 3 hold four of 2, with one to spare
    assert admission_of("full-reservation")[:2] == (2, 0)
    assert admission_of("expected-length", expected_output_tokens=4)[0] == 4  # 3 blocks each
    assert admission_of("pressure", pressure=0.5)[0] == 3  # half of the pool in use is the end of it
    preemptions = {name: admission_of(name)[1] for name in ("fits-now", "watermark", "full-reservation")}
    assert preemptions["fits-now"] == preemptions["watermark"] > 0 == preemptions["full-reservation"]


@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 6)])
@pytest.mark.parametrize("caching", [False, True])
def test_full_reservation_never_preempts(windows, caching):
    story = Story(
        num_blocks=22, max_num_seqs=8, admission="full-reservation", enable_prefix_caching=caching,
        group_windows=windows,
    )  # fmt: skip
    for number in range(12):
        story.submit(
            f"r{number}", 3 + 5 * (number % 4), 1 + 4 * (number % 5), tokens=[7] * (3 + 5 * (number % 4))
        )
    for number in range(6):
        story.submit(f"grows{number}", 4, 13)
    story.run()
    assert story.num_preemptions == 0
    assert set(story.ends.values()) == {"length"}


def test_an_expected_length_says_its_numbers():
    story = Story(num_blocks=6, admission="expected-length", expected_output_tokens=8)
    story.submit("a", 8, 100)
    story.submit("b", 8, 100)
    assert story.step().reasons == {"b": "would need up to 4 blocks, running requests up to 2 more, 4 free"}
    pressed = Story(num_blocks=4, admission="pressure", pressure=0.5)
    pressed.submit("a", 8, 4)
    pressed.submit("b", 4, 4)
    assert pressed.step().reasons == {"b": "50% of the pool is in use, the threshold is 50%"}


# -- chunks -----------------------------------------------------------------------------------------------------------


def chunks_of(chunking, **config):
    """One decodes, a long and a short prompt come in; the first three steps after that."""
    story = Story(max_num_batched_tokens=8, chunking=chunking, **config)
    story.submit("talks", 4, 40)
    story.step()
    story.submit("long", 20, 1)
    story.submit("short", 3, 1)
    return story.run(3)


def test_who_gets_the_tokens_of_a_step():
    assert chunks_of("decode-first") == [
        {"talks": 1, "long": 7}, {"talks": 1, "long": 7}, {"talks": 1, "long": 6, "short": 1},
    ]  # fmt: skip
    assert chunks_of("decode-first", max_chunk_tokens=4) == [
        {"talks": 1, "long": 4, "short": 3}, {"talks": 1, "long": 4}, {"talks": 1, "long": 4},
    ]  # fmt: skip
    # Whoever comes in goes first, so the one that talks has to wait: early first tokens, and a stall.
    assert chunks_of("prefill-first") == [{"long": 8}, {"short": 3, "long": 5}, {"talks": 1, "long": 7}]
    assert chunks_of("equal-progress") == [
        {"talks": 1, "long": 7}, {"talks": 1, "long": 7}, {"talks": 1, "long": 6, "short": 1},
    ]  # fmt: skip


def test_equal_progress_divides_what_running_requests_ask_for():
    story = Story(max_num_batched_tokens=9, chunking="equal-progress")
    for rid, prompt in (("a", 30), ("b", 30), ("c", 4)):
        story.submit(rid, prompt, 1)
    assert story.run(1) == [{"a": 9}]  # who is admitted alone gets all
    story = Story(max_num_batched_tokens=9, chunking="equal-progress", max_chunk_tokens=4)
    for rid, prompt in (("a", 30), ("b", 30), ("c", 4)):
        story.submit(rid, prompt, 1)
    assert story.run(3) == [{"a": 4, "b": 4, "c": 1}, {"a": 3, "b": 3, "c": 3}, {"a": 4, "b": 4}]


# -- learners' policies -----------------------------------------------------------------------------------------------

METHODS = ("order", "admit", "chunk", "victim", "preempt_mode")
NONSENSE = {
    "order": [None, "first", (), float("nan"), (1, "x"), object(), [[1]], 10**400, 1j],
    "admit": [True, False, "", 7, object()],
    "chunk": [None, 3, {}, {"nobody": 1}, {"a": -1}, {"a": 10**9}, {"a": 1.0}, {"a": True}, [("a", 1)]],
    "victim": [None, "a", 0, object()],
    "preempt_mode": [None, "", "SWAP", 1, ("swap",)],
}


def learner(method, answer):
    """A policy whose one method raises (an exception class), or answers the same nonsense every time."""

    def wrong(self, *args):
        if isinstance(answer, type) and issubclass(answer, Exception):
            raise answer("not ready")
        return answer

    return type("MyPolicy", (Policy,), {method: wrong})


def crowded(policy=None, kind=None):
    """Preemptions, chunks, waiting: a workload in which every method is asked."""
    config = {"num_blocks": 6, "max_num_batched_tokens": 7, "num_host_blocks": 4}
    made = kind(EngineConfig(**config)) if kind else None
    story = Story(made, **config)
    for rid, prompt in zip("abcde", (9, 3, 12, 5, 1), strict=True):
        story.submit(rid, prompt, 9)
    story.run()
    assert set(story.ends) == set("abcde")
    assert set(story.ends.values()) == {"length"}
    return story


@pytest.mark.parametrize(
    ("method", "answer"),
    [(method, answer) for method in METHODS for answer in (ValueError, KeyError, *NONSENSE[method])],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", repr(value)[:20]),
)
def test_a_learners_policy_that_fails_costs_nothing(method, answer):
    """An `error` event names the method, the default decides, and the run is the default's run step by step."""
    story, plain = crowded(kind=learner(method, answer)), crowded()
    errors = story.told("error")
    assert errors
    assert {event.where for event in errors} == {f"policy.{method}"}
    assert all(
        event.what.startswith("MyPolicy: ") and event.what.endswith("; the default decides")
        for event in errors
    )
    assert story.steps == plain.steps
    assert story.outputs() == plain.outputs()


def test_the_error_says_what_came_and_what_is_allowed():
    def what(method, answer):
        return crowded(kind=learner(method, answer)).told("error")[0].what

    assert what("order", "first") == (
        "MyPolicy: order() answered 'first'; it must be a number or a tuple of numbers; the default decides"
    )
    assert what("victim", None) == (
        "MyPolicy: victim() answered None; it must be one of the candidates (b); the default decides"
    )
    assert what("preempt_mode", "SWAP") == (
        "MyPolicy: preempt_mode() answered 'SWAP'; it must be 'recompute' or 'swap'; the default decides"
    )
    assert (
        what("chunk", {"a": 10**9})
        == "MyPolicy: chunk() gave a 1000000000 tokens; it has 9 to compute; the default decides"
    )
    assert what("admit", True) == (
        "MyPolicy: admit() answered True; None says yes, a sentence says why not; the default decides"
    )
    assert what("admit", ValueError) == "MyPolicy: ValueError: not ready; the default decides"


class Generous(Policy):
    """Says yes to everybody, whatever is free."""

    def admit(self, request, view):
        return None


def test_a_yes_without_room_is_nonsense_too():
    story = crowded(kind=Generous)
    told = {event.what for event in story.told("error")}
    assert any("admit() answered None, which says yes, but the request needs" in what for what in told), told


class Closed(Policy):
    """Lets nobody in, ever."""

    def admit(self, request, view):
        return "come back tomorrow"


def test_a_policy_that_admits_nobody_does_not_stop_the_run():
    """Where nobody runs, nobody will give blocks back: who fits comes in, one at a time."""
    story = crowded(kind=Closed)
    assert all(len(scheduled) == 1 for scheduled in story.steps)
    assert not story.told("error")


def test_a_policy_cannot_change_what_it_looks_at():
    class Meddler(Policy):
        def order(self, request, view):
            request.num_tokens = 0

    told = [event.what for event in crowded(kind=Meddler).told("error")]
    assert "num_tokens cannot be set: a policy looks at requests and changes nothing" in told[0]


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_config_mixes_classes_by_name():
    policy = make_policy(
        EngineConfig(num_blocks=1, num_host_blocks=1, order="deadline", victim="largest", preempt_mode="cheaper",
                     admission="pressure", chunking="prefill-first")
    )  # fmt: skip
    bases = [kind.__name__ for kind in type(policy).__bases__]
    assert bases == ["EarliestDeadline", "Largest", "Cheaper", "Pressure", "PrefillFirst"]
    assert policy.waiting_first
    assert not policy.moving_key
    assert type(make_policy(EngineConfig(num_blocks=1))) is Policy


def test_every_name_in_the_config_has_a_class_or_is_the_default():
    defaults = EngineConfig(num_blocks=1)
    for decision, kinds in POLICIES.items():
        with pytest.raises(ConfigError, match="must be one of") as caught:
            EngineConfig(num_blocks=1, **{decision: "?"})
        known = str(caught.value).split("must be one of ")[1].rstrip(".").split(", ")
        assert set(known) == {*kinds, getattr(defaults, decision)}
