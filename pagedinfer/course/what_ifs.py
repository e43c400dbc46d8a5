"""Exercises of notebook 07: predict a stop, write a predicate, fork with another policy, find the smallest pool."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pagedinfer.course.bundled import bundled_recording
from pagedinfer.course.exercise import Exercise, NotStarted, NotYet, call, shown
from pagedinfer.course.incidents import crowd
from pagedinfer.course.sixty_seconds import simulated_recording
from pagedinfer.errors import count
from pagedinfer.sim.fork import fork
from pagedinfer.trace.events import Preempt
from pagedinfer.trace.moments import moments
from pagedinfer.trace.recording import Recording

__all__ = ["CONDITION", "EXERCISES", "FORK_STEP", "FORK_VICTIM"]

CONDITION = "free blocks < 4"
"""Notebook 07 asks where its run stops for this."""

FORK_STEP, FORK_VICTIM = 15, "fewest-tokens-lost"
"""Where it is forked, and with which victim policy."""

SEEDS = (0, 1, 3, 6, 9)
"""Simulated runs for the learner's functions: with several preemptions, and with none."""


PREDICATE = """
def lost_again(state, events):
    for event in events:
        if event.kind == "preempt" and state.requests[event.rid].num_preemptions >= 2:
            return f"{event.rid} lost its place again"
    return False
"""

SMALLEST = """
def smallest_pool(recording):
    num_blocks = recording.config["num_blocks"]
    while True:
        branch = fork(recording, recording.first_step, num_blocks=num_blocks)
        if branch.recording.find("any preempted") is None:
            return num_blocks
        num_blocks += 1
"""


# -- 07.1: where it stops -------------------------------------------------------------------------------------------


def judge_stop(prediction: Any, session: Any) -> str:
    """The step at which `CONDITION` stops the learner's run."""
    recording = _run_of(session)
    step = recording.find(CONDITION)
    if step is None:
        raise NotStarted(f"The run has not come to {CONDITION!r} yet: run it first.")
    if prediction == step:
        state = recording.at(step)
        return f"After step {step} the requests hold {len(state.ref_counts)} of {state.num_blocks} blocks."
    if isinstance(prediction, bool) or not isinstance(prediction, int):
        raise NotYet(f"A step is a number, like 12; yours is {shown(prediction)}.")
    if not recording.first_step <= prediction <= recording.last_step:
        raise NotYet(f"The run has no step {shown(prediction)}.")
    state = recording.at(prediction)
    free = state.num_blocks - len(state.ref_counts)
    raise NotYet(
        f"After step {prediction} there are {free} free blocks. "
        + ("That is not fewer than 4." if free >= 4 else "They became fewer than 4 before that.")
    )


def _run_of(session: Any) -> Recording:
    recording: Any = getattr(session, "recording", session)
    if not isinstance(recording, Recording):
        raise NotYet(f"The check wants your session, which holds the run; it got {shown(session)}.")
    return recording


# -- 07.2: a predicate ----------------------------------------------------------------------------------------------


def judge_predicate(lost_again: Any) -> str:
    """The learner's predicate at every step of unseen runs, beside a count of preemptions by request."""
    stops = 0
    for recording in _runs():
        for step, wanted, state, events in _losses(recording):
            said = bool(call(lost_again, state, events))
            if said != bool(wanted):
                raise NotYet(
                    f"At step {step} of an unseen run yours says {said}. "
                    + (f"There {_and(wanted)} lost a place for the second time or more." if wanted else
                       f"Nobody lost a place there for the second time{_but(events)}.")
                )  # fmt: skip
            stops += bool(wanted)
    assert stops, "some of the runs should have a request that is preempted twice"
    return f"Right at every step of {len(_runs())} unseen runs; it stops {stops} times."


@cache
def _runs() -> tuple[Recording, ...]:
    return (*(simulated_recording(seed) for seed in SEEDS), crowd(0))


def _losses(recording: Recording) -> Iterator[tuple[int, list[str], Any, Any]]:
    """Each step: who lost a place again, and a copy of the state with the events, for the predicate."""
    lost: dict[str, int] = {}
    for moment in moments(recording):
        again = []
        for event in moment.events:
            if isinstance(event, Preempt):
                lost[event.rid] = lost.get(event.rid, 0) + 1
                if lost[event.rid] > 1:
                    again.append(event.rid)
        yield moment.step, again, moment.state.copy(), list(moment.events)


def _and(names: list[str]) -> str:
    return " and ".join(names)


def _but(events: list[Any]) -> str:
    first = [event.rid for event in events if isinstance(event, Preempt)]
    return f"; {_and(first)} did for the first time" if first else ""


# -- 07.3: another victim -------------------------------------------------------------------------------------------


def judge_victim(prediction: Any, session: Any) -> str:
    """Who is preempted first when the learner's run is forked with `FORK_VICTIM`."""
    recording = _run_of(session)
    if recording.last_step <= FORK_STEP:
        raise NotStarted(f"The run is at step {recording.last_step}; let it run on past step {FORK_STEP}.")
    branch = fork(recording, FORK_STEP, victim=FORK_VICTIM).recording
    event = next((e for e in branch.events if isinstance(e, Preempt) and e.step > FORK_STEP), None)
    if event is None:
        raise NotYet("Nobody is preempted in this run: run the cells above once more, unchanged.")
    before = recording.at(event.step - 1)
    if prediction not in before.running:
        raise NotYet(
            f"{shown(prediction)} does not run there; it should be one of {', '.join(before.running)}."
        )
    if prediction == event.rid:
        tokens = before.requests[event.rid].num_computed_tokens
        return f'{event.rid} has {tokens} tokens to lose, and goes in step {event.step}: "{event.why}".'
    if prediction == before.running[0]:
        raise NotYet(
            f"{prediction} is the first of the batch. It is never preempted: so something always goes on."
        )
    raise NotYet(
        f"{prediction} has {before.requests[prediction].num_computed_tokens} tokens to lose. Who has fewer?"
    )


# -- 07.4: the smallest pool ----------------------------------------------------------------------------------------


def judge_smallest(smallest_pool: Any) -> str:
    """The learner's search on the bundled recording and on unseen ones."""
    for recording in (*(simulated_recording(seed) for seed in SEEDS), bundled_recording()):
        got, wanted = call(smallest_pool, recording), _smallest(recording)
        if got != wanted:
            _explain_pool(recording, got, wanted)
    needed = _smallest(bundled_recording())
    return f"Right on {len(SEEDS)} unseen runs. The eight requests of notebook 00 need {needed} blocks."


@cache
def _smallest_of(key: str) -> int:
    """By its text, since recordings cannot be looked up: each is searched once."""
    recording = Recording.from_jsonl(key)
    num_blocks = int(recording.config["num_blocks"])
    while _preemptions(recording, num_blocks):
        num_blocks += 1
    return num_blocks


def _smallest(recording: Recording) -> int:
    return _smallest_of(recording.to_jsonl(wall=False))


def _preemptions(recording: Recording, num_blocks: int) -> int:
    return sum(fork(recording, recording.first_step, num_blocks=num_blocks).recording.steps["preempted"])


def _explain_pool(recording: Recording, got: Any, wanted: int) -> None:
    has = recording.config["num_blocks"]
    if isinstance(got, bool) or not isinstance(got, int):
        raise NotYet(f"smallest_pool should return a number of blocks; yours returned {shown(got)}.")
    if got < has:
        raise NotYet(
            f"The run was recorded with {has} blocks, and yours says {shown(got)}. We look for a pool that is as large "
            "or larger: in a very small one requests run one by one, or not at all."
        )
    if got > wanted:
        raise NotYet(f"Yours says {shown(got)} for a run with {has} blocks; {wanted} are enough.")
    left = count(_preemptions(recording, got), "preemption")
    raise NotYet(f"Yours says {got} for a run with {has} blocks; that leaves {left}.")


EXERCISES = (
    Exercise(
        id="07.1",
        title="Where does it stop?",
        judge=judge_stop,
        hints=(
            "16 blocks, fewer than 4 free: so the requests hold 13 or more.",
            "After step k the requests have stored 6, 5 and 9 tokens and k - 1 more each. A block holds 4.",
            "After step 8 they store 13, 12 and 16 tokens: 4 + 3 + 4 blocks. And one step later?",
        ),
        answer="prediction = 9",
        why="A condition on how things stand stops the run in the step in which it becomes true. To stop again it must "
        "have been false in between.",
    ),
    Exercise(
        id="07.2",
        title="A predicate of your own",
        judge=judge_predicate,
        hints=(
            'Two things must hold in the same step: an event of kind "preempt", and a count.',
            "state.requests[event.rid].num_preemptions counts this preemption too.",
            "Go through the events; where one is a preemption and its request has num_preemptions >= 2, return True, "
            "or a sentence. After the loop, return False.",
        ),
        answer=PREDICATE,
        why="A predicate sees the state at the end of a step and what happened in it. A sentence that it returns is "
        "the cause that the stop shows.",
    ),
    Exercise(
        id="07.3",
        title="Another victim",
        judge=judge_victim,
        hints=(
            "Whoever has stored the fewest tokens has the least to compute again. Look at step 15.",
            "The first of the batch is never preempted, whatever the policy.",
            "r1 has stored 19 tokens and r2 23.",
        ),
        answer='prediction = "r1"',
        why="A fork keeps everything as it was up to its step, and only decides anew after it. What differs then is "
        "the effect of the change and of nothing else.",
    ),
    Exercise(
        id="07.4",
        title="The smallest pool",
        judge=judge_smallest,
        hints=(
            "fork(recording, recording.first_step, num_blocks=n).recording is the run with another pool.",
            'Its find("any preempted") is None when nobody was preempted.',
            'Begin with recording.config["num_blocks"] and add one block at a time: a few more blocks may even cause '
            "more preemptions, so do not jump.",
        ),
        answer=SMALLEST,
        why="More memory does not always mean fewer preemptions: with a little more, another request is let in, and "
        "the crowd is larger. That is why one tries it.",
    ),
)
