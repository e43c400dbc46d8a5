"""What the steps and each request of a recording did from when to when, as nested slices: the base of exports.

Everything comes from the events and their fold (`trace.replay`); cancelled plans are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedinfer.trace import events as ev
from pagedinfer.trace.clock import StepClock
from pagedinfer.trace.replay import RequestState, State

__all__ = ["Lives", "Mark"]

NO_PLAN_YET = "no step has been planned since it came"
BEHIND = "behind others in the queue"


@dataclass(slots=True)
class Mark:
    """Something at a time: the begin or end of a slice (the newest open one of its track), or an instant.

    Attributes:
        at: nanoseconds. request: number of the request, None for the track of steps.
        kind: "begin", "end" or "instant". name: of the slice or instant, "" at an end. facts: its numbers and causes.
    """

    at: int
    request: int | None
    kind: str
    name: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Plan:
    """A plan not committed yet, and what its requests compute: (first token, tokens, whether that is prefill)."""

    step: ev.Step
    work: dict[str, tuple[int, int, bool]]


class _Life:
    """The slices of one request: its life, in it a phase, in that (while it waits) the cause."""

    def __init__(self, number: int, at: int, request: RequestState) -> None:
        self.marks: list[Mark] = []
        self._number, self._at = number, at
        self._phase = self._why = ""
        self._facts: dict[str, Any] = {}
        facts = {"prompt_tokens": request.num_prompt_tokens, "max_tokens": request.max_tokens}
        self._begin(at, request.rid, facts | {"priority": request.priority})

    def _begin(self, at: int, name: str, facts: Mapping[str, Any]) -> None:
        self._at = max(self._at, at)
        self.marks.append(Mark(self._at, self._number, "begin", name, facts))

    def _end(self, at: int, facts: Mapping[str, Any] | None = None) -> None:
        self._at = max(self._at, at)
        self.marks.append(Mark(self._at, self._number, "end", "", facts or {}))

    def _end_rest(self, at: int) -> None:
        """End a slice in which nothing was computed; one that took no time was none."""
        last = self.marks[-1]
        if last.kind == "begin" and last.at == max(self._at, at):
            self.marks.pop()
        else:
            self._end(at)

    def rest(self, phase: str, why: str, at: int, facts: Mapping[str, Any]) -> None:
        """From `at` on the request gets no tokens, because of `why`."""
        if self._phase != phase:
            self._close_phase(at)
            self._phase = phase
            self._begin(at, phase, facts)
        if self._why != why:
            if self._why:
                self._end_rest(at)
            self._why = why
            if why:
                self._begin(at, why, {})

    def prefill(self, start: int, end: int, facts: Mapping[str, Any]) -> None:
        """A chunk: tokens of the prompt, or several at once."""
        self._close_phase(start)
        self._begin(start, "prefill", facts)
        self._end(end)

    def decode(self, start: int, end: int, facts: Mapping[str, Any]) -> None:
        """A token of decode; steps in a row make one slice."""
        if self._phase != "decode":
            self._close_phase(start)
            self._phase, self._facts = "decode", {"tokens": 0, "steps": 0}
            self._begin(start, "decode", {"first_step": facts["step"], "from": facts["from"]})
        self._facts["tokens"] += facts["tokens"]
        self._facts["steps"] += 1
        self._facts |= {"last_step": facts["step"], "blocks": facts["blocks"]}
        self._at = max(self._at, end)

    def _close_phase(self, at: int) -> None:
        """End what is open below the life: a rest at `at`, decode where its last step ended."""
        if self._why:
            self._end_rest(at)
        if self._phase == "decode":
            self._end(self._at, self._facts)
        elif self._phase:
            self._end_rest(at)
        self._phase = self._why = ""

    def close(self, at: int, facts: Mapping[str, Any]) -> None:
        """End the life and whatever is open in it."""
        self._close_phase(at)
        self._end(at, facts)


class Lives:
    """The slices of a whole recording.

    Attributes:
        clock: the time of each step.
        requests: ids in order of submission; an id used again is there again. Those alive at a keyframe come first.
        marks: begins, ends and instants; in order of time on each track, not over all.
    """

    def __init__(self, events: Sequence[ev.Event], first_step: int) -> None:
        self.clock = StepClock(events, first_step)
        self.requests: list[str] = []
        self.marks: list[Mark] = []
        self._state, self._now = State(), self.clock.start
        self._plans: list[_Plan] = []
        self._live: dict[str, _Life] = {}
        self._lives: list[_Life] = []
        # Those whose phase the next plan may change: a queue may be long, and mostly rests.
        self._touched: set[str] = set()
        for event in events:
            self._now = max(self._now, self.clock.at(event))
            ended = self._state.requests.get(event.rid) if isinstance(event, ev.Finish) else None
            self._state.apply(event)
            self._take(event, ended)
        for plan in self._plans:  # the recording ends before they do
            self._commit(plan, {"committed": False})
        self._now = max(self._now, self.clock.end)
        for rid, life in self._live.items():
            counts = self._counts(self._state.requests[rid])
            life.close(self._now, counts | {"ended": "not in this recording"})
        self.marks += (mark for life in self._lives for mark in life.marks)

    def _take(self, event: ev.Event, ended: RequestState | None) -> None:
        if rid := getattr(event, "rid", ""):
            self._touched.add(rid)
        match event:
            case ev.Keyframe():
                self._born(sorted(self._state.requests.values(), key=lambda r: r.arrival))
            case ev.Submit() | ev.Fork():
                if event.rid in self._state.requests:
                    self._born([self._state.requests[event.rid]])
            case ev.Step():
                requests = self._state.requests
                self._plans.append(
                    _Plan(event, {rid: _work(requests[rid], n) for rid, n in event.scheduled.items()})
                )
            case ev.Commit() if self._plans:
                self._commit(self._plans.pop(0), {"new_tokens": sum(event.tokens.values())})
            case ev.Cancel() if self._plans:
                self._instant(f"step {self._plans.pop().step.i} cancelled", {"why": event.why})
            case ev.Finish() if event.rid in self._live and ended is not None:
                facts = self._counts(ended) | {"ended": event.why, "why": event.detail}
                self._live.pop(event.rid).close(self._now, facts)
            case ev.Reject():
                self._instant(f"{event.rid} rejected", {"why": event.why})
            case ev.Error():
                self._instant(f"error in {event.where}", {"what": event.what})
            case ev.Gap():
                self._instant("gap", {"dropped": event.dropped})

    def _instant(self, name: str, facts: Mapping[str, Any]) -> None:
        self.marks.append(Mark(self._now, None, "instant", name, facts))

    def _born(self, requests: Iterable[RequestState]) -> None:
        for request in requests:
            life = _Life(len(self.requests), self._now, request)
            self._lives.append(life)
            life.rest(_resting(request), NO_PLAN_YET, self._now, {})
            self._live[request.rid] = life
            self._touched.add(request.rid)
            self.requests.append(request.rid)

    def _commit(self, plan: _Plan, result: Mapping[str, Any]) -> None:
        """A plan has run: a slice for the step, and what each live request did in it."""
        step, (start, end) = plan.step, self.clock.steps[plan.step.i]
        self._now = max(self._now, end)
        facts = {
            "tokens": sum(step.scheduled.values()),
            "budget": step.budget,
            "requests": len(step.scheduled),
        }
        self.marks.append(Mark(start, None, "begin", f"step {step.i}", facts | {"now": step.now}))
        self.marks.append(Mark(end, None, "end", "", result))
        looked_at = plan.work.keys() | plan.step.reasons.keys()
        for rid in sorted((self._touched | looked_at) & self._live.keys()):
            self._live_through(rid, plan, start, end)
        self._touched = looked_at

    def _live_through(self, rid: str, plan: _Plan, start: int, end: int) -> None:
        """What a live request did from `start` to `end` of a plan."""
        life, request = self._live[rid], self._state.requests[rid]
        facts = {"step": plan.step.i, "blocks": len(request.block_table)}
        if rid not in plan.work:
            life.rest(_resting(request), self._why(rid, plan), start, facts)
            return
        first, n, is_prefill = plan.work[rid]
        (life.prefill if is_prefill else life.decode)(start, end, facts | {"tokens": n, "from": first})

    def _why(self, rid: str, plan: _Plan) -> str:
        """The sentence why a live request got no tokens in the plan."""
        if rid in self._state.last.preempted:
            return self._state.last.causes.get(rid, "")
        if rid in plan.step.reasons:
            return plan.step.reasons[rid]
        if self._state.requests[rid].status == "running":
            return ""
        return BEHIND if plan.step.reasons else NO_PLAN_YET

    def _counts(self, request: RequestState) -> dict[str, Any]:
        return {
            "output_tokens": request.num_tokens - request.num_prompt_tokens,
            "preemptions": request.num_preemptions,
        }


def _work(request: RequestState, n: int) -> tuple[int, int, bool]:
    """What the `n` tokens that a plan just added are: prefill, or decode, also of guesses beyond the known tokens."""
    guesses = max(0, request.num_computed_tokens - request.num_tokens)
    first = request.num_computed_tokens - n
    return first, n, n > 1 + guesses or first < request.num_prompt_tokens


def _resting(request: RequestState) -> str:
    """The phase of a request that gets no tokens: its status, or `held` when it has a place in the batch."""
    return "held" if request.status == "running" else request.status
