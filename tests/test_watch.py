"""Conditions: their grammar (fuzzed), what they see (beside the scheduler's own numbers), and when they are news."""

import operator
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulated_runs import Run, random_run, randomly

from pagedinfer.config import EngineConfig
from pagedinfer.errors import ConfigError, WatchError
from pagedinfer.trace import events as ev
from pagedinfer.trace.conditions import (
    BLOCK_VERBS,
    LATENCIES,
    OPERATORS,
    QUANTITIES,
    VERBS,
    And,
    Block,
    Happened,
    Latency,
    Not,
    Or,
    Quantity,
    Who,
)
from pagedinfer.trace.grammar import MAX_DEPTH, MAX_LENGTH
from pagedinfer.trace.moments import Moment
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State
from pagedinfer.trace.watch import Watch, as_watch, parse, watch

# -- the grammar ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("R3 preempted", Happened(Who("R3"), "preempted")),
        ("r3 finishes", Happened(Who("r3"), "finished")),
        ("r3 is aborted", Happened(Who("r3"), "aborted")),
        ("ANY Preempted", Happened(Who(), "preempted")),
        ('"my \\"id\\"" failed', Happened(Who('my "id"', exact=True), "failed")),
        ('"any" admitted', Happened(Who("any", exact=True), "admitted")),
        ("chatcmpl-12:0 resumed", Happened(Who("chatcmpl-12:0"), "resumed")),
        ("анна finished", Happened(Who("анна"), "finished")),
        ("free blocks < 4", Quantity("free blocks", "<", 4)),
        ("free  blocks<4", Quantity("free blocks", "<", 4)),
        ("waiting >= 5", Quantity("waiting", ">=", 5)),
        ("running = 0", Quantity("running", "==", 0)),
        ("kv_usage > .9", Quantity("kv_usage", ">", 0.9)),
        ("step == 40", Quantity("step", "==", 40)),
        ("block 17 written", Block(17, "written")),
        ("any block evicted", Block(None, "evicted")),
        ("TTFT of any > 20 steps", Latency("TTFT", Who(), ">", 20)),
        ("ttft of r3 > 20", Latency("TTFT", Who("r3"), ">", 20)),
        ("stall of any > 5 steps", Latency("stall", Who(), ">", 5)),
        ("a resumed or b resumed and c resumed", Or((Happened(Who("a"), "resumed"), And(
            (Happened(Who("b"), "resumed"), Happened(Who("c"), "resumed")))))),
        ("(a resumed or b resumed) and not c resumed", And((Or(
            (Happened(Who("a"), "resumed"), Happened(Who("b"), "resumed"))), Not(Happened(Who("c"), "resumed"))))),
    ],
)  # fmt: skip
def test_what_a_text_means(text, condition):
    read = parse(text)
    assert read.condition == condition
    assert parse(str(read)).condition == condition


@pytest.mark.parametrize(
    ("text", "place", "allowed"),
    [
        ("", 1, "it ends there: here may stand a request"),
        ("R3 preempt", 4, 'did you mean "preempted"?'),
        ("R3", 3, "after a request comes what happens to it"),
        ("free < 4", 6, "after free comes blocks"),
        ("waiting 5", 9, "after waiting comes <, <=, >"),
        ("waiting => 5", 10, "after == comes a number"),
        ("waiting > many", 11, "after > comes a number"),
        ("waiting > 1e30", 11, "numbers are below"),
        ("block x written", 7, "after block comes its number"),
        ("block 1.5 written", 7, "whole numbers"),
        ("block 1 preempted", 9, "after a block comes what happens to it: allocated"),
        ("TTFT any > 3", 6, "after TTFT comes of and a request"),
        ("(any resumed", 13, "inside parentheses"),
        ("any resumed )", 13, "after a whole condition"),
        ("any resumed any resumed", 13, "after a whole condition"),
        ("step preempted", 6, "after step comes"),
        ("preempted r3", 1, "goes in double quotes"),
        ('"r3 resumed', 1, "second"),
        ('"\\x" resumed', 1, "inside quotes"),
        ("r3 resumed; import os", 11, "nothing here uses it"),
        ("(" * 60 + "any resumed", MAX_DEPTH + 1, f"at most {MAX_DEPTH} deep"),
        ("not " * 60 + "any resumed", 4 * MAX_DEPTH + 1, f"at most {MAX_DEPTH} deep"),
    ],
)
def test_a_fault_is_a_sentence_with_its_place(text, place, allowed):
    with pytest.raises(WatchError, match=r"^Cannot read the condition at character \d+, ") as caught:
        parse(text)
    sentence, shown, caret = str(caught.value).split("\n")
    assert allowed in sentence
    assert shown == f"  {text}"
    assert caret == " " * (place + 1) + "^"
    assert f"character {place}," in sentence


def test_what_is_no_text_or_too_long():
    with pytest.raises(WatchError, match=f"at most {MAX_LENGTH}"):
        parse("x" * (MAX_LENGTH + 1))
    for what in (None, 3, b"any resumed"):
        with pytest.raises(WatchError, match="is a text such as"):
            parse(what)
    assert issubclass(WatchError, ConfigError)


NAMES = st.from_regex(r"[A-Za-z_][\w.:#@/+-]{0,8}", fullmatch=True)
NUMBERS = st.one_of(st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6)).map(float)


def _words():
    known = {
        "and",
        "or",
        "not",
        "any",
        "block",
        "blocks",
        "free",
        "used",
        "of",
        "is",
        "step",
        "steps",
        "finishes",
    }
    return known | {*VERBS, *BLOCK_VERBS, *QUANTITIES, *(name.casefold() for name in LATENCIES)}


WHO = st.one_of(
    st.just(Who()),
    NAMES.filter(lambda name: name.casefold() not in _words()).map(Who),
    st.text(max_size=8).map(lambda name: Who(re.sub(r"\s", " ", name), exact=True)),
)
FACTS = st.one_of(
    st.builds(Happened, WHO, st.sampled_from(list(VERBS))),
    st.builds(Block, st.one_of(st.none(), st.integers(0, 10**6)), st.sampled_from(BLOCK_VERBS)),
    st.builds(Quantity, st.sampled_from(list(QUANTITIES)), st.sampled_from(list(OPERATORS)), NUMBERS),
    st.builds(Latency, st.sampled_from(list(LATENCIES)), WHO, st.sampled_from(list(OPERATORS)), NUMBERS),
)
CONDITIONS = st.recursive(
    FACTS,
    lambda inner: st.one_of(
        st.builds(Not, inner),
        st.builds(And, st.lists(inner, min_size=2, max_size=3).map(tuple)),
        st.builds(Or, st.lists(inner, min_size=2, max_size=3).map(tuple)),
    ),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(CONDITIONS)
def test_a_condition_and_its_text_are_the_same(condition):
    text = str(condition)
    if len(text) <= MAX_LENGTH:
        assert parse(text).condition == condition
        assert str(parse(text)) == text
    assert Watch(condition).describe().startswith("stop when ")


@settings(max_examples=500, deadline=None)
@given(
    st.one_of(
        st.text(max_size=60),
        st.lists(
            st.one_of(
                st.sampled_from([*sorted(_words()), *OPERATORS, "=", "(", ")", '"x"', "r3", "17", "0.5"]),
                NAMES,
            ),
            max_size=12,
        ).map(" ".join),
    )
)
@example("\ud800 resumed")
@example('"\ud800" resumed')
@example("a\nresumed")
@example("\u0661 resumed")
@example("block 99999999999999999999999 written")
def test_any_text_is_a_watch_or_a_sentence(text):
    try:
        read = parse(text)
    except WatchError as error:
        read, fault = None, str(error)
    if read is not None:
        assert str(parse(str(read))) == str(read)
    else:
        assert fault.startswith("Cannot read the condition at character ")
        assert fault.count("\n") == 2


# -- what they see ----------------------------------------------------------------------------------------------------


def edges(values):
    """The first step of each row of steps in which it is true."""
    before, found = False, []
    for step, value in values:
        if value and not before:
            found.append(step)
        before = value
    return found


@pytest.mark.parametrize("seed", range(8))
def test_quantities_beside_the_schedulers_own(seed):
    run = randomly(seed)
    for name in ("waiting", "running", "free blocks", "used blocks", "kv_usage", "preemptions", "tokens"):
        values = [fact[name] for fact in run.facts]
        thresholds = (
            (0.33, 0.77) if name == "kv_usage" else {values[0], values[len(values) // 2], max(values), 1}
        )
        for threshold in thresholds:
            for op in ("<", "<=", ">", ">=", "==", "!="):
                judge = OPERATORS[op]
                want = edges((fact["step"], judge(fact[name], threshold)) for fact in run.facts)
                got = [stop.step for stop in run.recording.find_all(f"{name} {op} {threshold}")]
                assert got == want, (name, op, threshold)
    assert run.recording.find("step == 5") == 5
    assert run.recording.find("step >= 5 and step != 5") == 6


@pytest.mark.parametrize("seed", range(8))
def test_blocks_beside_the_plans(seed):
    run = randomly(seed)
    for block_id in range(run.scheduler.blocks.num_blocks):
        want = [fact["step"] for fact in run.facts if block_id in fact["written"]]
        assert [stop.step for stop in run.recording.find_all(f"block {block_id} written")] == want
        rows = [row for row in run.recording.blocks.rows() if row["block"] == block_id]
        taken = run.recording.find_all(f"block {block_id} allocated")
        assert [stop.step for stop in taken] == sorted({row["allocated"] for row in rows})
    wrote = run.recording.find_all("any block written")
    assert [stop.step for stop in wrote] == [fact["step"] for fact in run.facts if fact["written"]]


@pytest.mark.parametrize("seed", range(8))
def test_events_beside_a_plain_search(seed):
    recording = random_run(seed)
    kinds = {"preempted": "preempt", "resumed": "resume", "admitted": "admit", "finished": "finish"}
    for row in recording.requests.rows():
        assert recording.find(f"{row['request'].upper()} admitted") == row["admitted"]
        end = recording.find(f"{row['request']} finished")
        # An end between two steps is seen when the next one has ended.
        between = row["finish_reason"] == "abort"
        assert row["finished"] <= end <= row["finished"] + between
    for verb, kind in kinds.items():
        stops = recording.find_all(lambda event, kind=kind: event.kind == kind)
        assert [stop.step for stop in recording.find_all(f"any {verb}")] == [stop.step for stop in stops]
    ends = {verb: recording.find_all(f"any {verb}") for verb in ("aborted", "failed")}
    for verb, why in (("aborted", "abort"), ("failed", "error")):
        assert bool(ends[verb]) == (why in recording.requests["finish_reason"])


@pytest.mark.parametrize("seed", range(8))
def test_latencies_beside_the_table(seed):
    recording = random_run(seed)
    for row in recording.requests.rows():
        rid, ttft = row["request"], row["ttft_steps"]
        for limit in (0, 1, 3):
            end = row["first_token"] or row["finished"] + 1  # without a token: it waited until its end
            if end - row["submitted"] > limit:
                want = row["submitted"] + limit + 1
                if row["first_token"] is None and want > row["finished"]:
                    continue
                assert recording.find(f"TTFT of {rid} > {limit} steps") == want
            else:
                assert recording.find(f"TTFT of {rid} > {limit}") is None
            if ttft is not None:
                assert recording.find(f"TTFT of {rid} == {ttft}") == row["first_token"]


def story():
    """b is preempted in step 3, waits in 4 and comes back in 5; a ends in 4, b in 6."""
    run = Run(
        EngineConfig(num_blocks=4, block_size=2, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20)
    )
    run.submit("a", 3, 4)
    run.submit("b", 3, 4)
    return run.drain()


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("B preempted", [(3, "b preempted: {why}")]),
        ("free blocks < 1", [(1, "free blocks is 0 (< 1)")]),
        ("free blocks <= 1", [(1, "free blocks is 0 (<= 1)"), (5, "free blocks is 1 (<= 1)")]),
        ("block 3 allocated", [(1, "block 3 allocated to b as logical block 1"),
                               (3, "block 3 allocated to a as logical block 2"),
                               (5, "block 3 allocated to b as logical block 1")]),
        ("block 3 freed", [(3, "block 3 freed by b: preempt"), (4, "block 3 freed by a: finish"),
                           (6, "block 3 freed by b: finish")]),
        ("block 0 written", [(1, "block 0 written by a: tokens 0 to 1")]),
        ("stall of any > 1 steps", [(4, "stall of b is 2 steps (> 1)")]),
        ("ITL of b > 2", [(5, "ITL of b is 3 steps (> 2)")]),
        ("any finishes", [(4, "a finished: 4 tokens produced"), (6, "b finished: 4 tokens produced")]),
        ("any preempted and free blocks == 1", [(3, "b preempted: {why}; "
                                                    "free blocks is 1 (== 1)")]),
        ("not running >= 1", [(4, "not running >= 1"), (6, "not running >= 1")]),
        ("TTFT of any < 2", [(1, "TTFT of a is 1 steps (< 2); TTFT of b is 1 steps (< 2)")]),
        ("any block written", [(1, "block 0 written by a: tokens 0 to 1; block 1 written by a: token 2; "
                                   "block 2 written by b: tokens 0 to 1 and 1 more")]),
    ],
)  # fmt: skip
def test_a_story_and_its_causes(text, stops):
    recording = story()
    why = next(event.why for event in recording.events if event.kind == "preempt")
    stops = [(step, cause.replace("{why}", why)) for step, cause in stops]
    found = recording.find_all(text)
    assert [(stop.step, stop.cause) for stop in found][: len(stops)] == stops
    assert len(found) == len(stops) or text.startswith("any block")
    assert str(found[0]) == f"stopped at step {stops[0][0]}: {stops[0][1]}"


def test_find_starts_where_it_is_told():
    recording = story()
    assert [recording.find("any finishes", start) for start in (0, 4, 5, 6, 7)] == [4, 4, 6, 6, None]


def test_an_end_after_the_last_step_is_found():
    run = Run()
    run.submit("a", 3, 9)
    run.step()
    run.scheduler.abort("a")
    assert run.recording.find("a aborted") == 1
    assert run.recording.find_all("any finished")[0].cause == "a finished: aborted by the caller"


def test_a_cancelled_plan_is_nothing_that_happened():
    run = Run(
        EngineConfig(num_blocks=4, block_size=2, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20)
    )
    run.submit("a", 3, 4)
    run.submit("b", 3, 4)
    run.step()
    run.step()
    run.scheduler.cancel(run.scheduler.schedule(2.0))  # it preempts b
    run.scheduler.abort("a")
    run.drain()
    assert "preempt" in {event.kind for event in run.recording.events}
    assert run.recording.find("any preempted") is None


def test_two_news_of_one_joined_condition():
    """Waiting stays long; each preemption is news all the same."""
    recording = random_run(3)
    both = {stop.step for stop in recording.find_all("waiting >= 1 or any preempted")}
    assert {stop.step for stop in recording.find_all("any preempted")} <= both
    assert both >= {stop.step for stop in recording.find_all("waiting >= 1")}


# -- predicates -------------------------------------------------------------------------------------------------------


def test_predicates_on_events_and_on_the_state():
    recording = story()
    assert recording.find(lambda event: event.kind == "preempt") == 3
    assert recording.find_all(lambda event: event.kind == "commit" and "it ran")[2].cause == "it ran"
    low = recording.find_all(lambda state, events: len(state.free) <= 1)
    assert [stop.step for stop in low] == [1, 5]  # as "free blocks <= 1": news when it becomes true

    def preempted(event):
        return isinstance(event, ev.Preempt)

    (stop,) = recording.find_all(preempted)
    assert stop.cause == "preempted is true: preempt"
    assert stop.watch.describe() == "stop when the predicate preempted is true"


def test_a_predicate_that_raises_says_so():
    def broken(state, events):
        return 1 / (3 - state.step)

    with pytest.raises(
        WatchError, match="The predicate broken raised ZeroDivisionError: division by zero at step 3"
    ):
        story().find_all(broken)


class Unsure:
    def __bool__(self):
        raise RuntimeError("neither")


def test_an_answer_that_is_neither_yes_nor_no():
    with pytest.raises(WatchError, match="raised RuntimeError: neither at step 1"):
        story().find(lambda event: Unsure())


@pytest.mark.parametrize("what", [lambda: True, lambda a, b, c: True])
def test_predicates_of_other_shapes_are_refused(what):
    with pytest.raises(WatchError, match=r"takes \(event\) or \(state, events\)"):
        watch(what)


def test_only_functions_are_predicates():
    with pytest.raises(WatchError, match="not an int"):
        watch(3)
    assert as_watch(operator.truth).check(Moment(1, State(), [])) is None
    known = parse("any resumed")
    assert as_watch(known) is known
    assert repr(known) == "Watch('any resumed')"


def test_a_watch_can_look_again():
    recording, known = story(), parse("free blocks <= 1")
    assert [stop.step for stop in recording.find_all(known)] == [
        stop.step for stop in recording.find_all(known)
    ]


def test_overlapping_plans_and_a_hole():
    """Two plans open at once: each step's tokens are its own."""
    run = Run(EngineConfig(num_blocks=8, block_size=2, max_num_batched_tokens=4, max_num_seqs=4))
    scheduler = run.scheduler
    scheduler.submit(*_request("a", 14))
    first = scheduler.schedule(0)
    second = scheduler.schedule(1)
    scheduler.commit(first, run.runner.execute(first))
    third = scheduler.schedule(2)
    scheduler.commit(second, run.runner.execute(second))
    scheduler.commit(third, run.runner.execute(third))
    found = [run.recording.find_all(f"block {b} written") for b in range(6)]
    assert [[stop.step for stop in stops] for stops in found] == [[1], [1], [2], [2], [3], [3]]
    assert run.recording.find("tokens == 4") == 1
    assert Recording([run.recording.events[0]]).find("waiting == 0") == 0


def _request(rid, prompt):
    from pagedinfer.engine.request import Request

    return Request(rid, prompt, 3), 0.0


BLOCK_EVENTS = {
    "shared": "share",
    "cached": "cache",
    "evicted": "evict",
    "freed": "free",
    "allocated": "alloc",
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("verb", BLOCK_EVENTS)
def test_blocks_beside_a_search_in_the_events(seed, verb):
    recording = random_run(seed, shared=True, failures=False, num_requests=20)
    events = [event for event in recording.events if event.kind == BLOCK_EVENTS[verb]]
    for block_id in range(0, recording.config["num_blocks"], 3):
        want = [event for event in events if block_id in event.pblks]
        found = recording.find_all(f"block {block_id} {verb}")
        # An event between two steps is seen with the later one.
        assert {stop.step for stop in found} <= {event.step + between for event in want for between in (0, 1)}
        assert bool(found) == bool(want)
    causes = " ".join(stop.cause for stop in recording.find_all(f"any block {verb}"))
    assert (verb in causes) == bool(events)
    if verb == "evicted" and events:
        assert " needs " in causes


def test_swapping():
    config = EngineConfig(num_blocks=4, block_size=2, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20,
                          num_host_blocks=8, preempt_mode="swap")  # fmt: skip
    run = Run(config)
    run.submit("a", 3, 4)
    run.submit("b", 3, 4)
    recording = run.drain()
    preempted = recording.find("b preempted")
    assert recording.find("swapped >= 1") == preempted
    assert recording.find("b swapped") == preempted
    assert recording.find("swapped == 0", preempted) == recording.find("b resumed")
