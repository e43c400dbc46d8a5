"""Exercises of notebook 00: read a recording, find the first preemption, write the query that finds it. No torch."""

from __future__ import annotations

import random
import re
from typing import Any

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.course.bundled import bundled_recording
from pagedinfer.course.exercise import Exercise, NotYet, call, shown
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import count
from pagedinfer.session import Session
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.events import Preempt
from pagedinfer.trace.recording import Recording

__all__ = ["EXERCISES", "simulated_recording"]

CASES = 12
"""Simulated runs that a learner's query must get right; at least one of them has no preemption."""


QUERY = """
def first_preemption(recording):
    for event in recording.events:
        if event.kind == "preempt":
            return event.step, event.rid
    return None
"""


# -- judges ---------------------------------------------------------------------------------------------------------


def judge_prediction(prediction: Any) -> str:
    """Who gives way: the oldest, the newest or the largest of the running requests."""
    recording = bundled_recording()
    step, victim = _found(recording)
    before = recording.at(step - 1)
    running = before.running
    candidates = {
        "oldest": running[0],
        "newest": running[-1],
        "largest": max(running, key=lambda rid: before.requests[rid].num_tokens),
    }
    choice = str(prediction).strip().lower()
    if choice not in candidates:
        raise NotYet(f"{shown(prediction)} is not one of the choices: {', '.join(candidates)}.")
    if candidates[choice] != victim:
        raise NotYet(
            f"Not the {choice}. Scrub to the step where the pool is full and see whose blocks go away."
        )
    return f"The {choice} of the {len(running)} running requests gave way."


def judge_first_preemption(step: Any, victim: Any, cause: Any) -> str:
    """Step, victim and cause of the bundled recording's first preemption."""
    recording = bundled_recording()
    preemptions = [event for event in recording.events if isinstance(event, Preempt)]
    first = preemptions[0]
    if step != first.step:
        later = any(step == event.step for event in preemptions)
        raise NotYet(
            f"Somebody is preempted in step {step}, but not for the first time: look further left."
            if later
            else f"Nobody is preempted in step {shown(step)}. Look for the mark of a preemption in the timeline."
        )
    asker, needed, free = _facts(first)
    if victim != first.rid:
        raise NotYet(
            f"{victim} asked for the block. Somebody else lost theirs."
            if victim == asker
            else f"The step is right, the victim is not: {shown(victim)} did not lose its blocks in step {step}."
        )
    said = str(cause)
    numbers = re.findall(r"\b(\d+|zero|one|no)\b", re.sub(r"\br\d+\b", "", said.lower()))
    values = {{"zero": "0", "no": "0", "one": "1"}.get(number, number) for number in numbers}
    if not re.search(rf"\b{re.escape(asker)}\b", said):
        raise NotYet("Step and victim are right. The cause should name the request that needed a block.")
    if not {needed, free} <= values:
        raise NotYet(
            "Step and victim are right. The cause should say how many blocks were needed, and how many free."
        )
    return f'Step {step}: {victim} was preempted because "{first.why}".'


def judge_query(first_preemption: Any) -> str:
    """The learner's query, on simulated runs with and without preemptions."""
    without = 0
    for seed in range(CASES):
        recording = simulated_recording(seed)
        wanted = _truth(recording)
        without += wanted is None
        got = call(first_preemption, recording)
        if wanted is None:
            if got is not None:
                raise NotYet(f"In a run without any preemption the answer is None, yours is {shown(got)}.")
        elif not isinstance(got, tuple | list) or len(got) != 2:
            raise NotYet(f"The answer is a pair (step, victim), like (14, 'r5'); yours is {shown(got)}.")
        elif tuple(got) != wanted:
            raise NotYet(
                f"In a simulated run of {recording.num_steps} steps yours says {shown(tuple(got))}; it was {wanted!r}.",
                f"That run has {count(sum(recording.steps['preempted']), 'preemption')}.",
            )
    assert 0 < without < CASES, "the simulated runs should be of both kinds"
    return f"Right on {CASES} other runs, {without} of them without a preemption."


def _truth(recording: Recording) -> tuple[int, str] | None:
    """The same answer by another way, from the folded states: the oracle of the query."""
    for state in recording.states():
        if state.last.preempted:
            return state.step, state.last.preempted[0]
    return None


def _found(recording: Recording) -> tuple[int, str]:
    found = _truth(recording)
    assert found is not None, "the bundled recording has a preemption"
    return found


def _facts(event: Preempt) -> tuple[str, str, str]:
    """Who asked, for how many blocks, and how many were free: "r0 needs 1 block, 0 free; r0 is older"."""
    match = re.match(r"(\S+) needs (\d+) blocks?, (\d+) free", event.why)
    assert match, f"unknown cause: {event.why}"
    return match[1], match[2], match[3]


def simulated_recording(seed: int) -> Recording:
    """A short run of the real scheduler and pool, without a model: up to eight requests in a pool of random size."""
    rng = random.Random(seed)
    config = EngineConfig(
        num_blocks=rng.randint(8, 24),
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=6,
        enable_prefix_caching=False,  # every table in it is its request's alone
    )
    with Engine(config, SimulatedRunner()) as engine, Session(engine) as session:
        for _ in range(rng.randint(3, 8)):
            prompt = {"prompt_token_ids": [1] * rng.randint(2, 16)}
            session.submit(prompt, SamplingParams(max_tokens=rng.randint(1, 16), detokenize=False))
            session.advance()
        return session.run()


EXERCISES = (
    Exercise(
        id="00.1",
        title="Who gives way?",
        judge=judge_prediction,
        hints=(
            "Drag the step slider to the first moment when every block of the pool has an owner.",
            "Go on step by step. One colour leaves the block map. When did that request arrive?",
            "The engine serves first come, first served. Taking blocks from whom would break that promise least?",
        ),
        answer='prediction = "newest"',
        why="The newest request has waited least. And the oldest is never sent away for a younger one, so whatever "
        "happens, something finishes.",
    ),
    Exercise(
        id="00.2",
        title="The first preemption",
        judge=judge_first_preemption,
        hints=(
            "The timeline marks a preemption in the victim's row. Take the leftmost mark; or type `any preempted` into "
            "the box Stop when, go to the beginning, and play.",
            "Put the slider on that step. The line of text under the slider says who was preempted, and why.",
            'recording.step_events(step) lists what happened in a step; the event of kind "preempt" has `rid`, the '
            "victim, and `why`, the cause.",
        ),
        answer='step, victim, cause = 14, "r5", "r0 needs 1 block, 0 free"',
        why="A preemption has a victim and somebody who asked. The asker had filled its last block and the pool had "
        "none left.",
    ),
    Exercise(
        id="00.3",
        title="A query for it",
        judge=judge_query,
        hints=(
            "recording.events is a list in order of time. Each event has a `kind` and a `step`.",
            'Look for the first event whose kind is "preempt". Its `rid` is the victim.',
            "A run may have no preemption: after the loop, return None.",
        ),
        answer=QUERY,
        why="A recording is data: every picture in these notebooks is drawn from the events that you just searched.",
    ),
)
