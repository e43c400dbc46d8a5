"""The lives of a recording's requests as a view needs them: phases, times, and how they stood at any step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pagedinfer.errors import ConfigError
from pagedinfer.trace.metrics import Times
from pagedinfer.trace.phases import phases
from pagedinfer.trace.recording import Recording

__all__ = ["DECODE", "PREEMPTED", "PREFILL", "QUEUE", "RECOMPUTE", "STALL", "Life", "lives_of"]

QUEUE, PREFILL, DECODE, RECOMPUTE, STALL, PREEMPTED = (
    "queue", "prefill", "decode", "recompute", "stall", "preempted",
)  # fmt: skip
"""Names of `trace.phases.PHASES`."""


@dataclass(frozen=True, slots=True)
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

    def until(self, step: int) -> Life:
        """The life as it stood at the end of a step."""
        ended = self.finished is not None and self.finished <= step
        tokens = [s for s in self.token_steps if s <= step]
        known = replace(self.times, tokens=self.times.tokens[: len(tokens)])
        return replace(
            self,
            finished=self.finished if ended else None,
            why=self.why if ended else "",
            token_steps=tokens,
            runs=[(phase, a, min(b, step)) for phase, a, b in self.runs if a <= step],
            times=known if ended else replace(known, finished=None),
        )

    def steps(self, phase: str) -> int:
        """Steps spent in a phase."""
        return sum(last - first + 1 for name, first, last in self.runs if name == phase)


def lives_of(recording: Recording, unit: str = "steps") -> list[Life]:
    """The lives of all requests that were submitted in the recording, in that order; `times` in steps or seconds.

    Raises:
        ConfigError: another unit, or seconds of a recording without wall time.
    """
    lives: list[Life] = []
    for entry in phases(recording):
        life, times = entry.life, entry.life.times(unit)
        if times.submitted is None:
            raise ConfigError('The recording has no wall time; use unit="steps".')
        submitted, finished = int(life.steps.submitted or 0), life.steps.finished
        tokens = [int(step) for step in life.steps.tokens]
        end = None if finished is None else int(finished)
        why = life.finish_reason or ""
        lives.append(
            Life(
                life.rid, len(lives), life.num_prompt_tokens, submitted, end, why, tokens, entry.runs(), times
            )
        )
    return lives
