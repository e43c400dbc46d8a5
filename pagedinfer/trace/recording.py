"""A recording: the events of a run, the state at any step, and tables of its steps, requests and blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from pagedinfer.errors import ConfigError, RecordingError, kind_of, readable
from pagedinfer.trace.breakpoints import hits
from pagedinfer.trace.events import (
    SCHEMA,
    Error,
    Event,
    Gap,
    Meta,
    Step,
    event_from_dict,
    json_line,
)
from pagedinfer.trace.measures import Residency, residency
from pagedinfer.trace.perfetto import to_perfetto
from pagedinfer.trace.replay import State
from pagedinfer.trace.tables import Table, block_table, event_table, request_table, step_table
from pagedinfer.trace.watch import Stop, Watch

__all__ = ["Recording", "RecordingError", "recording_of"]

KEYFRAME_STEPS = 64
"""Every so many steps a folded state is kept, so that going back costs at most this many steps of folding."""


class Recording:
    """The events of a run, in order.

    Attributes:
        events: all of them; the first is `meta`.
        truncated: True when a loaded file broke off in the middle of its last line.
    """

    def __init__(self, events: Iterable[Event] = (), *, max_events: int | None = None) -> None:
        if max_events is not None and (
            isinstance(max_events, bool) or not isinstance(max_events, int) or max_events < 1
        ):
            raise ConfigError(f"max_events={max_events!r}: it must be None or an integer of at least 1.")
        self.events: list[Event] = []
        self.truncated = False
        self._max_events = max_events
        self._dropped = 0
        self._starts: list[int] = [0]  # index of the first event of each step; step k is at k - first_step
        self._first_step = 0
        self._keyframes: dict[int, State] = {}
        for event in events:
            self.add(event)

    # -- growing ------------------------------------------------------------------------------------------------

    def add(self, event: Event) -> None:
        """Append an event. Past `max_events` it is dropped, and one `gap` counts what is missing.

        Raises:
            RecordingError: a step that does not follow the last one. A `gap` marks the place.
        """
        if self._max_events is not None and len(self.events) >= self._max_events:
            self._dropped += 1
            if self._dropped == 1:
                self.events.append(Gap(0))
            gap = self.events[-1]
            assert isinstance(gap, Gap)
            gap.dropped = self._dropped
            return
        if not self.events:
            self._first_step = event.step
        if isinstance(event, Step):
            index = event.i - self._first_step
            if not 0 <= index <= len(self._starts):
                missing = max(1, event.seq - self.events[-1].seq - 1)
                self.events.append(Gap(missing))  # what is kept says that it is not all
                raise RecordingError(
                    f"Step {event.i} does not follow step {self.last_step}: {missing} or more events in between are "
                    "missing. Make a new recording."
                )
            if index == len(self._starts):
                self._starts.append(len(self.events))
            else:  # the number of a cancelled plan again: the events of both belong to one step
                del self._starts[index + 1 :]
        self.events.append(event)

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The engine's settings."""
        return dict(self.events[0].config) if self.events and isinstance(self.events[0], Meta) else {}

    @property
    def info(self) -> dict[str, Any]:
        """Free facts about the model and machine."""
        return dict(self.events[0].info) if self.events and isinstance(self.events[0], Meta) else {}

    @property
    def first_step(self) -> int:
        """Number of the step after which the recording begins; 0 on a fresh engine."""
        return self._first_step

    @property
    def last_step(self) -> int:
        """Number of the last step in it."""
        return self._first_step + len(self._starts) - 1

    @property
    def num_steps(self) -> int:
        """Steps in it."""
        return len(self._starts) - 1

    @property
    def errors(self) -> list[Error]:
        """What failed outside the core during the run."""
        return [event for event in self.events if isinstance(event, Error)]

    def step_events(self, step: int) -> list[Event]:
        """The events of one step, from its plan to what came in before the next; step 0: before the first plan."""
        self._check_step(step)
        index = step - self._first_step
        end = len(self.events)  # before the look at the next step: another thread may just begin it
        end = self._starts[index + 1] if index + 1 < len(self._starts) else end
        return self.events[self._starts[index] : end]

    def at(self, step: int) -> State:
        """The state at the end of a step: an independent copy. Negative numbers count from the end."""
        if isinstance(step, int) and -len(self._starts) <= step < 0:
            step += self.last_step + 1
        self._check_step(step)
        last = self.last_step  # of this moment: another thread may add steps, and this one may be half told
        known = max((s for s in list(self._keyframes) if s <= step), default=None)
        state = State() if known is None else self._keyframes[known].copy()
        for s in range(self._first_step if known is None else known + 1, step + 1):
            for event in self.step_events(s):
                state.apply(event)
            if s % KEYFRAME_STEPS == 0 and s < last and not state.has_open_plan:
                self._keyframes[s] = state.copy()
        return state

    def until(self, step: int) -> Recording:
        """The recording as it stood at the end of a step: what comes later is not in it."""
        last = self.step_events(step)
        end = next(i for i in range(len(self.events), 0, -1) if self.events[i - 1] is last[-1]) if last else 1
        return Recording(self.events[:end])

    def states(self) -> Iterator[State]:
        """The state at the end of every step in turn: one object that changes, so read it before going on."""
        state = State()
        for step in range(self._first_step, self.last_step + 1):
            for event in self.step_events(step):
                state.apply(event)
            yield state

    def find(self, what: Watch | str | Callable[..., Any], start: int = 0) -> int | None:
        """The first step from `start` on at which a condition fires ("r3 preempted", `trace.watch`), None if none.

        Raises:
            WatchError: the condition cannot be read, or the predicate raised.
        """
        return next((stop.step for stop in hits(self, what, start)), None)

    def find_all(self, what: Watch | str | Callable[..., Any], start: int = 0) -> list[Stop]:
        """Every step from `start` on at which a condition fires, each with its cause."""
        return list(hits(self, what, start))

    def _check_step(self, step: int) -> None:
        if not self.events:
            raise RecordingError("The recording is empty; record an engine first.")
        if (
            isinstance(step, bool)
            or not isinstance(step, int)
            or not self._first_step <= step <= self.last_step
        ):
            raise RecordingError(
                f"No step {step!r}: the recording has {self._first_step} to {self.last_step}."
            )

    @property
    def steps(self) -> Table:
        """One row a step: tokens, batch, pool, waste, sharing, fragmentation."""
        return step_table(self)

    @property
    def requests(self) -> Table:
        """One row a request: lengths, steps of its life, latency in steps, preemptions, end."""
        return request_table(self)

    @property
    def blocks(self) -> Table:
        """One row an allocation: block, request, step it was taken and given back, and why."""
        return block_table(self)

    def residency(self) -> Residency:
        """How long contents stayed in blocks, in steps: life times, idle before eviction, gaps to the next use."""
        return residency(self.events)

    def events_table(self) -> Table:
        """One row an event: its number, step, wall time, kind and request, and its other fields as JSON."""
        return event_table(self)

    # -- files --------------------------------------------------------------------------------------------------

    def to_jsonl(self, *, wall: bool = True) -> str:
        """JSON lines, one event each. `wall=False` leaves wall time out: equal runs give equal bytes."""
        return "".join(json_line(event.to_dict(wall=wall)) + "\n" for event in self.events)

    def save(self, path: str | PathLike[str], *, wall: bool = True) -> Path:
        """Write JSON lines to `path`, whole or not at all."""
        return _write(path, self.to_jsonl(wall=wall).encode())

    def to_perfetto(self, path: str | PathLike[str]) -> Path:
        """Write a Perfetto trace to `path`, whole or not at all; what is in it: `pagedinfer.trace.perfetto`."""
        return _write(path, to_perfetto(self))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Recording:
        """Read a file that `save` wrote. Unknown kinds are skipped; a cut-off last line ends the recording."""
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise RecordingError(f"Cannot read {path}: {error.strerror or error}.") from error
        return cls.from_jsonl(text, str(path))

    @classmethod
    def from_jsonl(cls, text: str, name: str = "the text") -> Recording:
        """The recording that `to_jsonl` wrote.

        Raises:
            RecordingError: it is no recording, of another major schema version, or broken before its last line.
        """
        recording = cls()
        lines = [line for line in text.split("\n") if line.strip()]
        for number, line in enumerate(lines, 1):
            try:
                data = json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                if number == len(lines) > 1:
                    recording.truncated = True
                    break
                raise RecordingError(f"{name}, line {number} is not an event: {error}.") from error
            try:
                event = event_from_dict(data) if isinstance(data, dict) else None
            except ValueError as error:
                raise RecordingError(f"{name}, line {number} is not an event: {error}") from error
            if number == 1 and not isinstance(event, Meta):
                raise RecordingError(f"{name} is not a recording: its first line is not a meta event.")
            if isinstance(event, Meta) and str(event.schema).split(".")[0] != SCHEMA.split(".")[0]:
                raise RecordingError(f"{name} has schema {event.schema}; this version reads {SCHEMA}.")
            if event is not None:
                recording.add(event)
        if not recording.events:
            raise RecordingError(f"{name} is not a recording: it is empty.")
        return recording

    # -- showing ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.events)

    def __repr__(self) -> str:
        return f"Recording({self.num_steps} steps, {len(self.requests)} requests, {len(self.events)} events)"

    def _repr_html_(self) -> str:
        config = ", ".join(f"{name}={value}" for name, value in self.config.items())
        return f"<p>{escape(readable(f'{self!r}; {config}'))}</p>{self.requests._repr_html_()}"


def _write(path: str | PathLike[str], data: bytes) -> Path:
    """Write a file whole or not at all."""
    target = Path(path)
    partial = target.with_name(target.name + ".part")
    partial.write_bytes(data)
    partial.replace(target)
    return target


def recording_of(given: Any) -> Recording:
    """The recording itself, or that of a session, a branch or whatever else has one as `recording`.

    Raises:
        ConfigError: it is nothing of the kind.
    """
    found = given if isinstance(given, Recording) else getattr(given, "recording", None)
    if not isinstance(found, Recording):
        raise ConfigError(f"A view shows a Recording, not {kind_of(given)}; record an engine first.")
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of a recording")
