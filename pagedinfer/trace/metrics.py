"""Latencies from a recording: queue time, TTFT, TPOT, ITL and E2E of each request, percentiles, goodput.

Step counts are exact and the same for the same seed. Seconds are there where the recording has wall time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING

from pagedinfer.errors import ConfigError
from pagedinfer.trace import events as ev

if TYPE_CHECKING:
    from pagedinfer.trace.recording import Recording

__all__ = ["Goodput", "Ledger", "Life", "Times", "goodput", "kept_events", "lives", "mean", "percentile"]


@dataclass(slots=True)
class Times:
    """When things happened to a request, in one unit: step numbers or seconds. None: not (yet), or not recorded.

    Attributes:
        submitted: the step after which it came.
        admitted: the step in which it first joined the batch.
        tokens: the step of each output token; several tokens of one step stand there several times.
        finished: the step in which it ended.
        grain: 1 for step numbers, which are those of a step's end; an admission lies at its beginning.
    """

    grain: int = 0
    submitted: float | None = None
    admitted: float | None = None
    tokens: list[float] = field(default_factory=list)
    finished: float | None = None

    @property
    def queue_time(self) -> float | None:
        """From submission to first admission. In steps: 0 when the very next step admitted it."""
        return None if self.admitted is None else _gap(self.submitted, self.admitted - self.grain)

    @property
    def ttft(self) -> float | None:
        """Time to first token, from submission. In steps: 1 when the very next step brought it."""
        return _gap(self.submitted, self.tokens[0] if self.tokens else None)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: each gap between an output token and the next; 0 within a step."""
        return [after - before for before, after in pairwise(self.tokens)]

    @property
    def tpot(self) -> float | None:
        """Time per output token: the mean gap after the first token; None below two tokens."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def e2e(self) -> float | None:
        """End to end: from submission to the end."""
        return _gap(self.submitted, self.finished)


def _gap(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(slots=True)
class Life:
    """One request from submission to end, as the events tell it.

    Attributes:
        steps: its times as step numbers.
        seconds: its times on the recording's wall clock.
        finish_reason: stop, length, abort or error; None while it lives.
        detail: the sentence that explains the end.
    """

    rid: str
    num_prompt_tokens: int
    max_tokens: int
    steps: Times = field(default_factory=lambda: Times(grain=1))
    seconds: Times = field(default_factory=Times)
    num_preemptions: int = 0
    finish_reason: str | None = None
    detail: str = ""

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced."""
        return len(self.steps.tokens)

    def times(self, unit: str) -> Times:
        """Its times in "steps" or "seconds".

        Raises:
            ConfigError: another unit.
        """
        if unit not in ("steps", "seconds"):
            raise ConfigError(f'unit={unit!r}: it must be "steps" or "seconds".')
        return self.steps if unit == "steps" else self.seconds


class Ledger:
    """Lives of requests, written event by event; events of cancelled plans must not come here.

    Attributes:
        lives: every request, in order of submission; an id that came twice has two.
        live: those that have not ended, by id.
    """

    def __init__(self) -> None:
        self.lives: list[Life] = []
        self.live: dict[str, Life] = {}

    def add(self, event: ev.Event) -> None:
        """Write down what `event` says about requests."""
        match event:
            case ev.Submit():
                self._open(Life(event.rid, event.num_prompt_tokens, event.max_tokens), event)
            case ev.Fork():
                self._fork(event)
            case ev.Admit() if life := self.live.get(event.rid):
                life.steps.admitted, life.seconds.admitted = event.step, event.t
            case ev.Preempt() if life := self.live.get(event.rid):
                life.num_preemptions += 1
            case ev.Commit():
                self._commit(event)
            case ev.Finish() if life := self.live.pop(event.rid, None):
                life.finish_reason, life.detail = event.why, event.detail
                life.steps.finished, life.seconds.finished = event.step, event.t

    def _open(self, life: Life, event: ev.Event) -> None:
        life.steps.submitted, life.seconds.submitted = event.step, event.t
        self.lives.append(life)
        self.live[life.rid] = life

    def _fork(self, event: ev.Fork) -> None:
        parent = self.live.get(event.parent)
        if parent is not None:
            self._open(Life(event.rid, parent.num_prompt_tokens, event.max_tokens), event)

    def _commit(self, event: ev.Commit) -> None:
        for rid, n in event.tokens.items():
            if life := self.live.get(rid):
                life.steps.tokens += [event.step] * n
                if event.t is not None:
                    life.seconds.tokens += [event.t] * n


def kept_events(events: Iterable[ev.Event]) -> list[ev.Event]:
    """The events without those of cancelled plans, which changed nothing in the end.

    A plan's events come in one row right after its `step`; whatever comes in from outside ends the row.
    """
    kept: list[ev.Event] = []
    plans: dict[int, list[ev.Event]] = {}  # open ones by step
    row: list[ev.Event] | None = None
    gone: set[int] = set()
    for event in events:
        kept.append(event)
        if isinstance(event, ev.Step):
            row = plans[event.i] = [event]
        elif isinstance(event, ev.Cancel):
            gone.update(map(id, [*plans.pop(event.step, ()), event]))
            row = None
        elif event.kind in _OUTSIDE:
            row = None
            if isinstance(event, ev.Commit):
                plans.pop(event.step, None)
        elif row is not None and not isinstance(event, ev.Error | ev.Gap | ev.Refuse):
            row.append(event)
    return [event for event in kept if id(event) not in gone] if gone else kept


_OUTSIDE = frozenset(
    (
        "meta",
        "keyframe",
        "submit",
        "fork",
        "reject",
        "abort",
        "commit",
        "finish",
        "pin",
        "reset",
        "resize",
        "compact",
    )
)


def lives(recording: Recording) -> list[Life]:
    """Every request that was submitted while the recording ran, in order of submission."""
    ledger = Ledger()
    for event in kept_events(recording.events):
        ledger.add(event)
    return ledger.lives


# -- numbers about many requests --------------------------------------------------------------------------------------


def mean(values: Sequence[float]) -> float | None:
    """The arithmetic mean; None of nothing."""
    return sum(values) / len(values) if values else None


def percentile(values: Sequence[float], q: float) -> float | None:
    """The `q`-th percentile (0 to 100), linear between neighbours as numpy's default; None of nothing.

    Raises:
        ConfigError: `q` is outside 0 to 100.
    """
    if not 0 <= q <= 100:
        raise ConfigError(f"A percentile lies from 0 to 100, and {q!r} does not.")
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Goodput:
    """How much of the traffic met every objective (DistServe, OSDI 2024).

    Attributes:
        met: requests that ended well (stop or length) within every limit.
        total: requests that were submitted.
        duration: from the first submission to the last end, in `unit`; None where times are missing.
        unit: "steps" or "seconds".
    """

    met: int
    total: int
    duration: float | None
    unit: str

    @property
    def share(self) -> float:
        """`met` of `total`, 0 to 1; 0 of nothing."""
        return self.met / self.total if self.total else 0.0

    @property
    def rate(self) -> float | None:
        """Requests that met every objective per step or second."""
        return self.met / self.duration if self.duration else None

    def __str__(self) -> str:
        rate = "" if self.rate is None else f", {self.rate:.3f} per {self.unit.removesuffix('s')}"
        return f"{self.met} of {self.total} requests met every objective{rate}"


def goodput(
    recording: Recording, *, ttft: float | None = None, tpot: float | None = None, itl: float | None = None,
    e2e: float | None = None, unit: str = "steps",
) -> Goodput:  # fmt: skip
    """Requests that kept every limit given: TTFT, TPOT, each ITL, E2E, all in `unit`.

    A request of one token has no TPOT and no ITL and keeps both.

    Raises:
        ConfigError: no limit, one that is no number, another unit, or seconds of a recording without wall time.
    """
    limits = {
        name: value
        for name, value in zip(_MEASURES, (ttft, tpot, itl, e2e), strict=True)
        if value is not None
    }
    if not limits:
        raise ConfigError("Goodput needs at least one limit; give ttft, tpot, itl or e2e.")
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ConfigError(f"{name}={value!r}: a limit is a number of {unit}.")
    everyone = lives(recording)
    times = [life.times(unit) for life in everyone]
    if unit == "seconds" and any(t.submitted is None for t in times):
        raise ConfigError('The recording has no wall time; use unit="steps".')
    met = sum(
        life.finish_reason in ("stop", "length")
        and all(_MEASURES[name](t) <= limits[name] for name in limits)
        for life, t in zip(everyone, times, strict=True)
    )
    starts = [t.submitted for t in times if t.submitted is not None]
    ends = [t.finished for t in times if t.finished is not None]
    return Goodput(met, len(times), max(ends) - min(starts) if ends else None, unit)


_MEASURES: dict[str, Callable[[Times], float]] = {
    "ttft": lambda t: float("inf") if t.ttft is None else t.ttft,
    "tpot": lambda t: t.tpot or 0.0,
    "itl": lambda t: max(t.itl, default=0.0),
    "e2e": lambda t: float("inf") if t.e2e is None else t.e2e,
}
