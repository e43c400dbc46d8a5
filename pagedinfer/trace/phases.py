"""Where each request's time went: one phase for each step from its submission to its end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagedinfer.trace import events as ev
from pagedinfer.trace.metrics import Life
from pagedinfer.trace.moments import Moment, moments

if TYPE_CHECKING:
    from pagedinfer.trace.recording import Recording

__all__ = ["PHASES", "Phases", "phases", "take_moment"]

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
    _has_place: bool = False

    @property
    def by_step(self) -> dict[int, str]:
        """Step -> phase, from the step after its submission to its last."""
        return {step: phase for phase, first, last in self._runs for step in range(first, last + 1)}

    @property
    def counts(self) -> dict[str, int]:
        """Steps of each phase, every phase named."""
        found = Counter[str]()
        for phase, first, last in self._runs:
            found[phase] += last + 1 - first
        return {phase: found[phase] for phase in PHASES}

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

    def moved(self, event: ev.Admit | ev.Resume | ev.Preempt) -> None:
        """It got a place in the batch, or lost it."""
        self._has_place = not isinstance(event, ev.Preempt)

    def look(self, moment: Moment, got_token: bool) -> None:
        """Add the step that `moment` ends."""
        rid, life = self.life.rid, self.life
        start, end = moment.spans.get(rid, (0, 0))
        again = max(0, min(end, self._high) - start)
        if again:
            self.recomputed[moment.step] = again
        self._high = max(self._high, end)
        if rid in moment.spans:
            first = not life.steps.tokens or life.steps.tokens[0] == moment.step
            phase = "recompute" if again and not got_token else "prefill" if first else "decode"
        elif life.steps.admitted is None:
            phase = "queue"
        else:
            phase = "stall" if self._has_place else "preempted"
        if self._runs and (newest := self._runs[-1])[::2] == (phase, moment.step - 1):
            self._runs[-1] = phase, newest[1], moment.step
        else:
            self._runs.append((phase, moment.step, moment.step))


def take_moment(found: dict[int, Phases], moment: Moment) -> None:
    """Add what a moment says. `found` has the phases of each life under its `id`, in order of submission."""
    here = {rid: found.setdefault(id(life), Phases(life)) for rid, life in moment.lives.items()}
    tokens: dict[str, int] = {}
    for event in moment.events:
        if isinstance(event, ev.Admit | ev.Resume | ev.Preempt) and event.rid in here:
            here[event.rid].moved(event)
        elif isinstance(event, ev.Commit):
            tokens = event.tokens
    for rid, one in here.items():
        times = one.life.steps
        came, ended = times.submitted or 0, times.finished
        if moment.is_done and came < moment.step and (ended is None or ended >= moment.step):
            one.look(moment, rid in tokens)


def phases(recording: Recording) -> list[Phases]:
    """The phases of every request that was submitted while the recording ran, in order of submission."""
    found: dict[int, Phases] = {}
    for moment in moments(recording):
        take_moment(found, moment)
    return list(found.values())
