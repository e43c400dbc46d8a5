"""When each step of a recording began and ended, in nanoseconds: by wall time where it has some, else by number."""

from __future__ import annotations

from collections.abc import Sequence

from pagedinfer.trace import events as ev

__all__ = ["STEP_NS", "StepClock"]

STEP_NS = 1_000_000
"""Length of a step where there is no wall time: 1 ms, and step 12 is the one that ends at 12 ms."""


class StepClock:
    """Times of the steps in `events`, a whole recording whose first step is `first_step`.

    Attributes:
        is_wall: whether the times are wall time, counted from `origin`; else step `i` lasts from `i - 1` to `i` ms.
        origin: wall time of the first event, in the recording's seconds; 0 without wall time.
        start, end: when the recording begins and ends, in ns.
        steps: step -> (start, end) in ns; cancelled plans are left out. No step begins before the one before it has
            ended: of a step that is planned while another runs, the part after that one counts.
    """

    def __init__(self, events: Sequence[ev.Event], first_step: int) -> None:
        timed = [e.t for e in events if isinstance(e, ev.Submit | ev.Step | ev.Commit | ev.Finish)]
        self.is_wall = bool(timed) and None not in timed
        self.origin = min(e.t for e in events if e.t is not None) if self.is_wall else 0.0
        self.start = self.end = 0 if self.is_wall else first_step * STEP_NS
        self.steps: dict[int, tuple[int, int]] = {}
        plans: list[tuple[int, int]] = []
        for event, after in zip(events, [*events[1:], None], strict=True):
            now = self.at(event)
            if isinstance(event, ev.Step):
                # A plan's own event is stamped when the plan is whole: later than its first decision, which follows.
                plans.append((event.i, now if after is None else min(now, self.at(after) or now)))
            elif isinstance(event, ev.Cancel) and plans:
                plans.pop()
            elif isinstance(event, ev.Commit) and plans:
                self._add(*plans.pop(0), now)
            self.end = max(self.end, now)
        for plan in plans:  # the recording ends before they do
            self._add(*plan, self.end)

    def _add(self, step: int, start: int, end: int) -> None:
        if not self.is_wall:
            start, end = (step - 1) * STEP_NS, step * STEP_NS
        last = next(reversed(self.steps.values()))[1] if self.steps else self.start
        start = max(start, last)
        self.steps[step] = (start, max(start, end))
        self.end = max(self.end, end)

    def at(self, event: ev.Event) -> int:
        """Wall time of `event` in ns; 0 where there is none, which is never later than what is known already."""
        return round((event.t - self.origin) * 1e9) if self.is_wall and event.t is not None else 0

    def __str__(self) -> str:
        if self.is_wall:
            return f"wall time; 0 is {self.origin:.6f} s of the recording's clock"
        return "steps; 1 step = 1 ms, for the recording has no wall time"
