"""A run looked at once a step: what happened in it, and the state when it ended. What breakpoints and reports see.

What comes in between two steps (submissions, aborts) belongs to the later one: it is seen when that has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedinfer.errors import RecordingError
from pagedinfer.trace import events as ev
from pagedinfer.trace.metrics import Ledger, Life, kept_events
from pagedinfer.trace.replay import State

if TYPE_CHECKING:
    from pagedinfer.trace.recording import Recording

__all__ = ["Follower", "Moment", "moments"]

_ENDING = (ev.Cache, ev.Error, ev.Finish, ev.Free, ev.Gap, ev.Retain, ev.Slide, ev.Trim)
"""Kinds that may follow a `commit` and belong to its step; anything else begins what the next step gets."""


@dataclass(slots=True)
class Moment:
    """The end of a step.

    Attributes:
        step: its number.
        state: the engine's state. One object that goes on changing: read it, change nothing.
        events: what happened since the moment before; plans that were cancelled are left out.
        spans: request -> (first, end) positions of the tokens that this step computed.
        written: block -> (request, first, end) of those tokens in it.
        lives: requests that live or have ended in this step, by id.
        is_done: False for what came in after the last step of a recording.
    """

    step: int
    state: State
    events: list[ev.Event]
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    written: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    lives: dict[str, Life] = field(default_factory=dict)
    is_done: bool = True


class Follower:
    """Goes along a recording, also while it grows.

    Attributes:
        ledger: the lives of all requests so far.
        now: the newest moment, None before the first step.
    """

    def __init__(self, recording: Recording) -> None:
        self.ledger = Ledger()
        self.now: Moment | None = None
        self._recording = recording
        self._state = State()
        self._next = 0  # index of the first event not seen
        self._plans: dict[int, ev.Step] = {}  # open ones, by step

    @property
    def num_read(self) -> int:
        """Events taken in so far."""
        return self._next

    def catch_up(self, *, rest: bool = False, upto: int | None = None) -> Iterator[Moment]:
        """The moments since the last call, each as it is reached. Between steps only.

        With `rest` what came in after the last step is a moment of its own, if there is anything. `upto` is how many
        events are looked at, by default those there are now: another thread may add more.
        """
        events = self._recording.events
        upto = len(events) if upto is None else upto
        while (end := self._end_of_step(upto)) is not None:
            group, self._next = events[self._next : end], end
            yield self._moment(group, is_done=True)
        if rest and self._next < upto:
            group, self._next = events[self._next : upto], upto
            yield self._moment(group, is_done=False)

    def _end_of_step(self, upto: int) -> int | None:
        """Index after the last event of the next step that has ended; None when none has."""
        events, closed = self._recording.events, False
        for index in range(self._next, upto):
            if closed and not isinstance(events[index], _ENDING):
                return index
            closed = closed or isinstance(events[index], ev.Commit)
        return upto if closed else None

    def _moment(self, group: list[ev.Event], *, is_done: bool) -> Moment:
        moment = Moment(self._state.step, self._state, kept_events(group), is_done=is_done)
        kept = set(map(id, moment.events))
        here = moment.lives = dict(self.ledger.live)
        for event in group:
            if isinstance(event, ev.Step):
                self._plans[event.i] = event
            elif isinstance(event, ev.Cancel):
                self._plans.pop(event.step, None)
            elif isinstance(event, ev.Commit):
                self._look_at_tokens(event, moment)
            self._state.apply(event)
            if id(event) in kept:
                self.ledger.add(event)
                if isinstance(event, ev.Submit | ev.Fork) and event.rid in self.ledger.live:
                    here[event.rid] = self.ledger.live[event.rid]
        if not is_done:
            moment.step = self._state.step
        self.now = moment
        return moment

    def _is_imported(self) -> bool:
        return "imported_from" in self._recording.info

    def _look_at_tokens(self, commit: ev.Commit, moment: Moment) -> None:
        """Which positions and blocks the step wrote: its plan is carried out and nothing has been freed yet."""
        moment.step = commit.step
        plan, size = self._plans.pop(commit.step, None), self._state.block_size
        for rid, n in (plan.scheduled if plan else {}).items():
            request = self._state.requests.get(rid)
            ahead = sum(later.scheduled.get(rid, 0) for later in self._plans.values()) if self._plans else 0
            end = (request.num_computed_tokens if request else 0) - ahead
            start, last = end - n, (end - 1) // size
            if request is None or start < 0 or last >= len(request.block_table):
                if request is None or start < 0 or request.block_table or not self._is_imported():
                    raise RecordingError(
                        f"step {commit.step} computes {n} tokens of {rid!r} outside its block table."
                    )
                moment.spans[rid] = start, end  # another engine's events, which name no request's blocks
                continue
            moment.spans[rid] = start, end
            for logical in range(start // size, last + 1):
                written = rid, max(start, logical * size), min(end, (logical + 1) * size)
                moment.written[request.block_table[logical]] = written


def moments(recording: Recording) -> Iterator[Moment]:
    """Every step of a recording in turn, then what came in after the last one, if anything did.

    `state` is one object that changes, so read it before going on.
    """
    follower = Follower(recording)
    yield from follower.catch_up(rest=True)
