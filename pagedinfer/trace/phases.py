"""Where each request's time went: one phase for each step from its submission to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedinfer.trace import events as ev
from pagedinfer.trace.metrics import Ledger, Life
from pagedinfer.trace.moments import Follower, Moment

if TYPE_CHECKING:
    from pagedinfer.trace.recording import Recording

__all__ = ["PHASES", "PhaseBook", "Phases", "phases"]

PHASES = {
    "queue": "it waited, never admitted so far",
    "prefill": "its prompt was computed, up to its first token",
    "decode": "it got a further token",
    "recompute": "tokens that a preemption had cost it were computed again",
    "stall": "it had a place in the batch and was left out",
    "preempted": "it had lost its place",
}
"""Every phase and what it means. A step in which the first token comes is prefill, one of a preemption preempted."""


@dataclass(slots=True)
class Phases:
    """A request's steps by phase.

    Attributes:
        life: the request.
        recomputed: step -> tokens computed again in it, because a preemption had thrown them away.
    """

    life: Life
    recomputed: dict[int, int] = field(default_factory=dict)
    _runs: list[tuple[str, int, int]] = field(default_factory=list)
    _high: int = 0  # tokens computed at least once
    _was_admitted: bool = False
    _has_place: bool = False

    @property
    def by_step(self) -> dict[int, str]:
        """Step -> phase, from the step after its submission to its last; made anew each time."""
        return {step: phase for phase, first, last in self._runs for step in range(first, last + 1)}

    @property
    def counts(self) -> dict[str, int]:
        """Steps of each phase, every phase named."""
        found = dict.fromkeys(PHASES, 0)
        for phase, first, last in self._runs:
            found[phase] += last + 1 - first
        return found

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed again, in all steps."""
        return sum(self.recomputed.values())

    def runs(self) -> list[tuple[str, int, int]]:
        """(phase, first step, last step) of each stretch, in order."""
        return list(self._runs)

    def steps(self, *wanted: str) -> list[int]:
        """The steps spent in any of the phases."""
        return [s for phase, first, last in self._runs if phase in wanted for s in range(first, last + 1)]

    def moved(self, event: ev.Admit | ev.Resume | ev.Preempt, step: int) -> None:
        """In this step it got a place in the batch, or lost it."""
        self.rest(step - 1)
        self._was_admitted |= isinstance(event, ev.Admit)
        self._has_place = not isinstance(event, ev.Preempt)

    def computed(self, step: int, start: int, end: int, got_token: bool) -> None:
        """In this step its tokens from `start` to `end` were computed."""
        self.rest(step - 1)
        again = max(0, min(end, self._high) - start)
        if again:
            self.recomputed[step] = again
        self._high = max(self._high, end)
        tokens = self.life.steps.tokens
        first = not tokens or tokens[0] == step
        self._add("recompute" if again and not got_token else "prefill" if first else "decode", step)

    def rest(self, last: float) -> None:
        """Nothing of it was computed from its newest step on, up to step `last`."""
        if last > (self._runs[-1][2] if self._runs else self.life.steps.submitted or 0):
            phase = "stall" if self._has_place else "preempted"
            self._add(phase if self._was_admitted else "queue", int(last))

    def _add(self, phase: str, last: int) -> None:
        """The steps after the newest one, up to `last`, were spent in this phase."""
        if self._runs and self._runs[-1][0] == phase:
            self._runs[-1] = phase, self._runs[-1][1], last
        else:
            before = self._runs[-1][2] if self._runs else int(self.life.steps.submitted or 0)
            self._runs.append((phase, before + 1, last))


class PhaseBook:
    """The phases of all requests, written moment by moment. O(what happens): those that only wait cost nothing.

    Args:
        ledger: that of the follower whose moments come.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._everyone: list[Phases] = []
        self._ledger = ledger
        self._live: dict[str, Phases] = {}
        self._step = 0

    def add(self, moment: Moment) -> None:
        """Write down the step that `moment` ends."""
        for life in self._ledger.lives[len(self._everyone) :]:
            self._end(life.rid)  # the id's life before, where it ended since the last step
            self._live[life.rid] = one = Phases(life)
            self._everyone.append(one)
        tokens: dict[str, int] = {}
        for event in moment.events:
            if isinstance(event, ev.Admit | ev.Resume | ev.Preempt):
                if event.rid in self._live:
                    self._live[event.rid].moved(event, moment.step)
            elif isinstance(event, ev.Commit):
                tokens = event.tokens
        if not moment.is_done:
            return
        self._step = moment.step
        for rid, (start, end) in moment.spans.items():
            if rid in self._live:
                self._live[rid].computed(moment.step, start, end, rid in tokens)
        for event in moment.events:
            if isinstance(event, ev.Finish):
                self._end(event.rid)

    def _end(self, rid: str) -> None:
        one = self._live.get(rid)
        if one is not None and one.life.steps.finished is not None:
            one.rest(one.life.steps.finished)
            del self._live[rid]

    def read(self) -> list[Phases]:
        """Everyone up to the newest step, in order of submission. More may be added afterwards."""
        for one in self._live.values():
            ended = one.life.steps.finished
            one.rest(self._step if ended is None else min(ended, self._step))
        return self._everyone


def phases(recording: Recording) -> list[Phases]:
    """The phases of every request that was submitted while the recording ran, in order of submission."""
    follower = Follower(recording)
    book = PhaseBook(follower.ledger)
    for moment in follower.catch_up(rest=True):
        book.add(moment)
    return book.read()
