"""Exercises of notebook 10: diagnose four recorded incidents, prove the cure by re-simulation, write a detector.

Nothing here compares settings: a change counts when the run that it makes no longer has the symptom. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from pagedinfer.course.bundled import bundled_recording
from pagedinfer.course.exercise import Exercise, NotYet, call, integers, shown
from pagedinfer.course.incidents import INCIDENTS, quiet_day
from pagedinfer.course.symptoms import (
    EVIDENCE,
    blocked_steps,
    eviction_steps,
    late_wait,
    longest_wait,
    num_hit_tokens,
    preemption_steps,
    shared_evictions,
    waiting_steps,
)
from pagedinfer.errors import ConfigError
from pagedinfer.sim.advice import GROWS
from pagedinfer.sim.fork import fork
from pagedinfer.trace.events import Reject
from pagedinfer.trace.metrics import Life, lives
from pagedinfer.trace.recording import Recording

__all__ = ["CASES", "EXERCISES"]

SLACK_STEPS, SLACK_SHARE = 1, 0.1
"""How far the ends of a step range may be off: steps, or a share of its length."""

UNSEEN = (1, 2, 3)
"""Seeds of the runs that a learner's detector must get right."""


DIAGNOSE = '''
def diagnose(recording):
    """Name what went wrong in a run, None when nothing did."""
    preemptions, shared, lost = 0, set(), 0
    for event in recording.events:
        if event.kind == "preempt":
            preemptions += 1
        elif event.kind == "share":
            shared.update(event.pblks)
        elif event.kind == "evict":
            lost += len(shared.intersection(event.pblks))
            shared.difference_update(event.pblks)

    rows = [row for row in recording.requests.rows() if row["admitted"] is not None]
    longest = max(rows, key=lambda row: row["admitted"] - row["submitted"])
    overtaken = sum(
        row["submitted"] > longest["submitted"] and row["admitted"] < longest["admitted"] for row in rows
    )

    if preemptions > 10:
        return "preemption storm"
    if lost > 10:
        return "cache wipe"
    if longest["admitted"] - longest["submitted"] > 20:
        return "starvation" if overtaken > 5 else "head-of-line blocking"
    return None
'''


# -- the four cases -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """An incident and how it is judged.

    Attributes:
        recording: name of the bundled recording.
        cause: its name, one of `EVIDENCE`.
        span: the first and last step of the harm, from a recording.
        symptom: how bad a run is, a number that should be small.
        limit: what the symptom may be after the change.
        told: the sentence of the symptom, with {value}, and with {s} and {are} for one and for many.
        most_steps: how many times the recorded steps a run may take after the change.
    """

    recording: str
    cause: str
    span: Callable[[Recording], tuple[int, int]]
    symptom: Callable[[Recording], float]
    limit: float
    told: str
    most_steps: float = 1.25

    def tell(self, value: float) -> str:
        """The sentence of the symptom."""
        one = value == 1
        return self.told.format(value=value, s="" if one else "s", are="is" if one else "are")


CASES = {
    "10.1": Case(
        "incident_1", "head-of-line blocking", blocked_steps, late_wait, 10,
        "of the small requests the slowest gets its first token after {value:g} step{s}",
    ),
    "10.2": Case(
        "incident_2", "preemption storm", preemption_steps, lambda r: sum(r.steps["preempted"]), 2,
        "{value:g} preemption{s}", most_steps=1.6,
    ),
    "10.3": Case(
        "incident_3", "cache wipe", eviction_steps, shared_evictions, 0,
        "{value:g} block{s} of the shared prefixes {are} evicted",
    ),
    "10.4": Case(
        "incident_4", "starvation", waiting_steps, longest_wait, 20,
        "the slowest first token comes after {value:g} step{s}",
    ),
}  # fmt: skip


def judge_incident(case: Case, cause: Any, steps: Any, change: Any) -> str:
    """Cause, step range, and the change, which is tried by re-simulation from the first step."""
    recording = bundled_recording(case.recording)
    _judge_cause(case, recording, cause)
    _judge_steps(case, recording, steps)
    before, after = case.symptom(recording), _judge_change(case, recording, change)
    return (
        f"Re-simulated with your change, {case.tell(after)}; as recorded it was {before:g}. "
        "All requests still end as they did."
    )


def _judge_cause(case: Case, recording: Recording, cause: Any) -> None:
    choice = str(cause).strip().lower()
    if choice not in EVIDENCE:
        raise NotYet(f"{shown(cause)} is not one of the choices: {', '.join(EVIDENCE)}.")
    if choice != case.cause:
        raise NotYet(f"The evidence is against {choice}: {EVIDENCE[choice](recording)}")


def _judge_steps(case: Case, recording: Recording, steps: Any) -> None:
    given = integers(steps, 3)
    if given is None or len(given) != 2:
        raise NotYet(f"The steps are a pair (first, last), like (3, 9); yours is {shown(steps)}.")
    first, last = case.span(recording)
    slack = max(SLACK_STEPS, int(SLACK_SHARE * (last - first + 1)))
    for end, ours, theirs in (("first", first, given[0]), ("last", last, given[1])):
        if abs(ours - theirs) > slack:
            side = "early" if theirs < ours else "late"
            raise NotYet(
                f"The cause is right. The {end} step of it is not {shown(theirs)}: that is too {side}.",
                "The table of causes says which steps count.",
            )


def _judge_change(case: Case, recording: Recording, change: Any) -> float:
    """The symptom after the change."""
    after = _run_with(recording, change)
    ended = {life.rid: life for life in lives(after)}
    refused = {event.rid: event.why for event in after.events if isinstance(event, Reject)}
    for life in lives(recording):
        _judge_end(life, ended.get(life.rid), refused.get(life.rid, ""))
    value = case.symptom(after)
    if value > case.limit:
        before = case.symptom(recording)
        raise NotYet(
            f"Re-simulated with {_said(change)}, {case.tell(value)}; as recorded it was {before:g}. "
            f"It should be {f'at most {case.limit:g}' if case.limit else 'none'}."
        )
    found, found_before = num_hit_tokens(after), num_hit_tokens(recording)
    if found < found_before:
        raise NotYet(
            f"With {_said(change)} {found} prompt tokens are found in the prefix cache, as recorded it was "
            f"{found_before}. The cure should not be worse than the illness."
        )
    if after.num_steps > case.most_steps * recording.num_steps:
        raise NotYet(
            f"With {_said(change)} the symptom is gone, and so is the speed: {after.num_steps} steps for what took "
            f"{recording.num_steps}. Find a milder change."
        )
    return value


def _run_with(recording: Recording, change: Any) -> Recording:
    if not isinstance(change, dict) or not change:
        raise NotYet(
            f"Cause and steps are right. The change is a dict of settings, like {{'block_size': 16}}; yours is "
            f"{shown(change)}."
        )
    if unknown := [name for name in change if name not in recording.config]:
        raise NotYet(f"There is no setting {shown(unknown[0])}; `recording.config` has them all.")
    for name in GROWS:  # a change may make them smaller, not larger
        now = recording.config[name]
        if isinstance(value := change.get(name), int) and value > now:
            raise NotYet(
                f"{name}={shown(value)} is a larger machine (it has {now}). Find a change that costs no hardware."
            )
    try:
        branch = fork(recording, recording.first_step, **change)
    except ConfigError as error:
        raise NotYet(f"The engine does not take {_said(change)}: {error}") from error
    if not branch.changes:
        raise NotYet(f"{_said(change)} is how it was recorded: nothing changes.")
    return branch.recording


def _judge_end(before: Life, after: Life | None, refusal: str) -> None:
    if after is None:
        why = f': "{refusal}"' if refusal else "."
        raise NotYet(f"With your change {before.rid} is refused{why} Everybody should still be served.")
    if (after.finish_reason, after.num_output_tokens) != (before.finish_reason, before.num_output_tokens):
        raise NotYet(
            f"With your change {before.rid} gets {after.num_output_tokens} tokens and ends with "
            f"{after.finish_reason}; it should get {before.num_output_tokens}."
        )


def _said(change: dict[Any, Any]) -> str:
    return ", ".join(f"{name}={shown(value)}" for name, value in change.items())


# -- a detector of one's own ----------------------------------------------------------------------------------------


@cache
def _unseen() -> list[tuple[str | None, Recording]]:
    causes = {case.recording: case.cause for case in CASES.values()}
    runs = [(causes[name], make(seed)) for name, make in INCIDENTS.items() for seed in UNSEEN]
    return [*runs, *((None, quiet_day(seed)) for seed in UNSEEN)]


def judge_diagnose(diagnose: Any) -> str:
    """The learner's detector on runs that it has not seen, some of them without an incident."""
    for cause, recording in _unseen():
        got = call(diagnose, recording)
        if got != cause:
            requests = len(recording.requests["request"])
            raise NotYet(
                f"In an unseen run of {recording.num_steps} steps and {requests} requests yours says {shown(got)}; "
                f"it was {cause!r}.",
                *([EVIDENCE[got](recording)] if isinstance(got, str) and got in EVIDENCE else []),
            )
    quiet = sum(cause is None for cause, _ in _unseen())
    return f"Right on {len(_unseen())} unseen runs, {quiet} of them without an incident."


EXERCISES = (
    Exercise(
        id="10.1",
        title="Incident 1",
        judge=partial(judge_incident, CASES["10.1"]),
        hints=(
            "Put the view on step 20. How many blocks are free? How many would r5 need?",
            "Who stands first in the queue, and what does the sentence under the queue say about it? First come, first "
            "served: nobody overtakes it.",
            "The steps are those in which r3 waits with others behind it. Another `order` of the queue would let those "
            "in that need little.",
        ),
        answer='cause = "head-of-line blocking"\nsteps = (6, 46)\nchange = {"order": "shortest-prefill"}',
        why="A fair queue may be a slow one: whoever stands in front sets the pace of all behind. Serving small ones "
        "first cures it, and could starve the large one: see incident 4.",
    ),
    Exercise(
        id="10.2",
        title="Incident 2",
        judge=partial(judge_incident, CASES["10.2"]),
        hints=(
            "Count the marks of preemption in the timeline.",
            "The pool is full nearly all the time: more requests were admitted than it can hold once they have grown.",
            'The steps go from the first preemption to the last: recording.find_all("any preempted"). Admit fewer: '
            "look at `admission`, or give the batch fewer seats.",
        ),
        answer='cause = "preemption storm"\nsteps = (10, 127)\nchange = {"admission": "full-reservation"}',
        why="Admitting by what a request needs today lets in more than can grow. The cure has a price in steps, since "
        "here a step counts the same whatever it computes; what it saves are tokens computed twice.",
    ),
    Exercise(
        id="10.3",
        title="Incident 3",
        judge=partial(judge_incident, CASES["10.3"]),
        hints=(
            "Look at the hits: how many tokens did r9 find in the cache, and how many r16?",
            "Cached blocks that nobody uses are evicted, the one unused for longest first. Who took so many blocks "
            "between r9 and r16?",
            "The steps are those in which blocks that had been shared are evicted. The crawler is one `tenant`: how "
            "many blocks may it hold at once?",
        ),
        answer='cause = "cache wipe"\nsteps = (31, 36)\nchange = {"tenant_max_blocks": 16}',
        why="A cache that evicts what was unused longest is wiped by whoever asks for much and never again. Kept to a "
        "few blocks at a time, the crawler reuses its own old ones, for the applications keep theirs in use.",
    ),
    Exercise(
        id="10.4",
        title="Incident 4",
        judge=partial(judge_incident, CASES["10.4"]),
        hints=(
            "Sort the requests by the time to their first token. What is different about the slowest?",
            "All seats are always taken, and whenever one is free somebody more urgent has come. Strict priorities "
            "promise nothing to the others.",
            'The steps are those in which r6 waits. Under order "priority" there is a setting that makes waiting '
            "count: with `aging=5.0`, five steps of waiting are worth one level. r6 is ten levels behind, so it "
            "would wait fifty: the value must be smaller.",
        ),
        answer='cause = "starvation"\nsteps = (8, 47)\nchange = {"aging": 1.0}',
        why="With aging, every so many steps of waiting are worth one level of priority. So whoever waits is served "
        "some day, and the urgent ones hardly notice.",
    ),
    Exercise(
        id="10.5",
        title="A detector",
        judge=judge_diagnose,
        hints=(
            "Which number is large in one incident and small in all others? Count preemptions; count evicted blocks "
            "that had been shared; look at the longest wait.",
            'An event "share" has the blocks that a request found in the cache, "evict" those that lost their '
            "content, both as `pblks`.",
            "Starvation and head-of-line blocking both show a long wait. Only the starved is overtaken: others came "
            "later and were admitted earlier (columns submitted and admitted of recording.requests).",
        ),
        answer=DIAGNOSE,
        why="A few counts over the events tell incidents apart. Production engines alert on just such counts.",
    ),
)
