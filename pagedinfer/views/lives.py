"""The lives of a recording's requests as a view needs them: phases, times, and how they stood at any step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from pagedinfer.errors import ConfigError
from pagedinfer.trace.events import Event
from pagedinfer.trace.metrics import Ledger, Times, kept_events
from pagedinfer.trace.metrics import Life as Told
from pagedinfer.trace.moments import Follower
from pagedinfer.trace.phases import PhaseBook
from pagedinfer.trace.recording import Recording

__all__ = ["DECODE", "PREEMPTED", "PREFILL", "QUEUE", "RECOMPUTE", "STALL", "Life", "Lives", "lives_of"]

QUEUE, PREFILL, DECODE, RECOMPUTE, STALL, PREEMPTED = (
    "queue", "prefill", "decode", "recompute", "stall", "preempted",
)  # fmt: skip
"""Names of `trace.phases.PHASES`."""

SEATED = (PREFILL, DECODE, RECOMPUTE, STALL)
"""Phases in which a request has a place in the batch."""


@dataclass(frozen=True)
class Life:
    """One request, from its submission to its end or the last step.

    Attributes:
        number: by submission, from 0: the request's colour.
        submitted: the step after which it came. finished: the step in which it ended, None if it lives.
        why: its finish reason, "" while it lives.
        token_steps: the step of each of its new tokens.
        runs: (phase, first step, last step), without gaps from the step after `submitted`.
        times: the same moments in the unit that was asked for.
    """

    rid: str
    number: int
    num_prompt_tokens: int
    submitted: int
    finished: int | None
    why: str
    token_steps: list[int]
    runs: list[tuple[str, int, int]] = field(default_factory=list)
    times: Times = field(default_factory=Times)

    @cached_property
    def gaps(self) -> list[float]:
        """Its inter-token latencies."""
        return self.times.itl

    @cached_property
    def longest_gap(self) -> float:
        """The longest of `gaps`, 0 of none."""
        return max(self.gaps, default=0.0)

    @cached_property
    def stays(self) -> list[list[tuple[str, int, int]]]:
        """The stretches that it spent in the batch: each as its runs."""
        groups = groupby(self.runs, key=lambda run: run[0] in SEATED)
        return [list(runs) for seated, runs in groups if seated]

    def until(self, step: int) -> Life:
        """The life as it stood at the end of a step; itself, if it had ended."""
        if self.finished is not None and self.finished <= step:
            return self
        tokens = [s for s in self.token_steps if s <= step]
        return replace(
            self,
            finished=None,
            why="",
            token_steps=tokens,
            runs=[(phase, a, min(b, step)) for phase, a, b in self.runs if a <= step],
            times=replace(self.times, tokens=self.times.tokens[: len(tokens)], finished=None),
        )

    def steps(self, phase: str) -> int:
        """Steps spent in a phase."""
        return sum(last - first + 1 for name, first, last in self.runs if name == phase)


class Lives:
    """The lives of the requests that were submitted in a recording, also while it grows: who has ended is kept.

    Args:
        recording: the run.
        unit: of `Life.times`, "steps" or "seconds".
    """

    def __init__(self, recording: Recording, unit: str = "steps") -> None:
        self._recording, self._unit = recording, unit
        self._follower = Follower(recording)
        self._book = PhaseBook(self._follower.ledger)
        self._ended: dict[int, Life] = {}

    def read(self) -> list[Life]:
        """All lives in order of submission. A step that is not committed yet is in no phase.

        Raises:
            ConfigError: another unit.
        """
        upto = len(self._recording.events)  # another thread may add more meanwhile
        for moment in self._follower.catch_up(upto=upto):
            self._book.add(moment)
        rest = kept_events(self._recording.events[self._follower.num_read : upto])
        late, new = self._look_ahead(rest) if rest else ({}, [])
        lives: list[Life] = []
        for number, entry in enumerate(self._book.read()):
            life = self._ended.get(number)
            if life is None:
                life = self._life(late.get(id(entry.life), entry.life), number, entry.runs())
                if entry.life.finish_reason is not None:
                    self._ended[number] = life
            lives.append(life)
        return lives + [self._life(told, number, []) for number, told in enumerate(new, len(lives))]

    def _look_ahead(self, rest: list[Event]) -> tuple[dict[int, Told], list[Told]]:
        """What the events that may still be taken back say: the lives as they stand then, and new ones."""
        ledger, late = Ledger(), {}
        for rid, told in self._follower.ledger.live.items():
            steps, seconds = (
                replace(times, tokens=list(times.tokens)) for times in (told.steps, told.seconds)
            )
            twin = replace(told, steps=steps, seconds=seconds)
            late[id(told)] = ledger.live[rid] = twin
        for event in rest:
            ledger.add(event)
        return late, ledger.lives

    def _life(self, told: Told, number: int, runs: list[tuple[str, int, int]]) -> Life:
        times, submitted, finished = told.times(self._unit), told.steps.submitted, told.steps.finished
        return Life(
            told.rid, number, told.num_prompt_tokens, int(submitted or 0), None if finished is None else int(finished),
            told.finish_reason or "", [int(step) for step in told.steps.tokens], runs,
            replace(times, tokens=list(times.tokens)),
        )  # fmt: skip


def lives_of(recording: Recording, unit: str = "steps") -> list[Life]:
    """The lives of all requests that were submitted in the recording, in that order; `times` in steps or seconds.

    Raises:
        ConfigError: another unit, or seconds of a recording without wall time.
    """
    lives = Lives(recording, unit).read()
    if any(life.times.submitted is None for life in lives):
        raise ConfigError('The recording has no wall time; use unit="steps".')
    return lives
