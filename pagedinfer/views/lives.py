"""Where each request's time went, step by step: in the queue, in prefill, in decode, standing still."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from pagedinfer.trace import events as ev
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State

__all__ = ["DECODE", "PHASES", "PREEMPTED", "PREFILL", "QUEUE", "RECOMPUTE", "STALL", "Life", "lives_of"]

QUEUE, PREFILL, DECODE, RECOMPUTE, STALL, PREEMPTED = PHASES = (
    "queue", "prefill", "decode", "recompute", "stall", "preempted",
)  # fmt: skip
"""What a step was to a request: not begun yet; computed before its first token; computed, after it; computed again
after a preemption, without a new token; left out of the step with a place in the batch; without its place."""


@dataclass(slots=True)
class Life:
    """One request, from its submission to its end or the last step.

    Attributes:
        submitted: the step after which it came. finished: the step in which it ended, None if it lives.
        token_steps: the step of each of its new tokens.
        runs: (phase, first step, last step), without gaps from the step after `submitted`.
        why: its finish reason, "" while it lives.
    """

    rid: str
    number: int
    num_prompt_tokens: int
    submitted: int
    finished: int | None = None
    why: str = ""
    token_steps: list[int] = field(default_factory=list)
    runs: list[tuple[str, int, int]] = field(default_factory=list)

    def until(self, step: int) -> Life:
        """The life as it stood at the end of a step."""
        ended = self.finished is not None and self.finished <= step
        return replace(
            self,
            finished=self.finished if ended else None,
            why=self.why if ended else "",
            token_steps=[s for s in self.token_steps if s <= step],
            runs=[(phase, a, min(b, step)) for phase, a, b in self.runs if a <= step],
        )

    def phase(self, step: int) -> str:
        """What a step was to it; "" before and after its life."""
        return next((phase for phase, first, last in self.runs if first <= step <= last), "")

    def steps(self, phase: str) -> int:
        """Steps spent in a phase."""
        return sum(last - first + 1 for name, first, last in self.runs if name == phase)

    @property
    def ttft(self) -> int | None:
        """Steps from submission to the first token."""
        return self.token_steps[0] - self.submitted if self.token_steps else None

    @property
    def itls(self) -> list[int]:
        """Steps between each token and the next."""
        return [b - a for a, b in pairwise(self.token_steps)]

    @property
    def tpot(self) -> float | None:
        """Mean gap in steps after the first token."""
        gaps = self.itls
        return sum(gaps) / len(gaps) if gaps else None

    @property
    def e2e(self) -> int | None:
        """Steps from submission to the end."""
        return None if self.finished is None else self.finished - self.submitted

    def _note(self, phase: str, step: int) -> None:
        if self.runs and self.runs[-1][0] == phase and self.runs[-1][2] == step - 1:
            self.runs[-1] = (phase, self.runs[-1][1], step)
        else:
            self.runs.append((phase, step, step))


def lives_of(recording: Recording) -> list[Life]:
    """The lives of all requests that were submitted in the recording, in that order. An id used again is another."""
    lives: list[Life] = []
    live: dict[str, Life] = {}
    state = State()
    for step in range(recording.first_step, recording.last_step + 1):
        present = {rid: life for rid, life in live.items() if life.finished is None}
        before = {rid: len(life.token_steps) for rid, life in present.items()}
        for event in recording.step_events(step):
            state.apply(event)
            if isinstance(event, ev.Submit | ev.Fork):
                prompt = state.requests[event.rid].num_prompt_tokens
                lives.append(Life(event.rid, len(lives), prompt, event.step))
                live[event.rid] = lives[-1]
            elif isinstance(event, ev.Commit):
                for rid in event.tokens.keys() & live.keys():
                    live[rid].token_steps += [step] * event.tokens[rid]
            elif isinstance(event, ev.Finish) and event.rid in live:
                live[event.rid].finished, live[event.rid].why = step, event.why
        for rid, life in present.items():
            if step > recording.first_step:
                running = life.finished is None and state.requests[rid].status == "running"
                life._note(_phase(life, before[rid], rid in state.last.scheduled, running), step)
    return lives


def _phase(life: Life, tokens_before: int, scheduled: bool, running: bool) -> str:
    was = life.runs[-1][0] if life.runs else QUEUE
    if scheduled and not tokens_before:
        return PREFILL
    if scheduled:
        return DECODE if len(life.token_steps) > tokens_before else RECOMPUTE
    if running or was == QUEUE:
        return STALL if running else QUEUE
    return STALL if life.finished is not None and was != PREEMPTED else PREEMPTED
