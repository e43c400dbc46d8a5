"""Going along recordings that grow: what nothing can change any more is read once, the newest steps again and again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagedinfer.trace.events import Cancel, Commit, Event, Fork, Keyframe, Step, Submit
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State

__all__ = ["Arrivals", "Walk", "is_told"]


def is_told(events: Sequence[Event]) -> bool:
    """Whether the events of a step leave no plan open. While they do, a later step may still be taken back."""
    begun = sum(isinstance(event, Step) for event in events)
    return begun == sum(isinstance(event, Commit | Cancel) for event in events)


class Walk:
    """The states of recordings that begin at the same step, in lockstep up to the end of the shortest.

    The newest step is folded into a copy, because it may be half told.

    Attributes:
        step: the first step that `news` gives the next time.
        newest: the states at the last step that it gave. Not to be changed.
    """

    def __init__(self, *recordings: Recording) -> None:
        self._recordings = recordings
        self._states = [State() for _ in recordings]
        self.step = recordings[0].first_step
        self.newest: list[State] = []

    def news(self) -> Iterator[tuple[int, list[State]]]:
        """The steps from `step` on, each with its states. They change: read them before going on, and go to the end."""
        last = min(recording.last_step for recording in self._recordings)
        while self.step < last and all(is_told(events) for events in self._events(self.step)):
            yield self._fold(self.step, self._states)
            self.step += 1
        self.newest = [state.copy() for state in self._states]
        for step in range(self.step, last + 1):
            yield self._fold(step, self.newest)

    def _events(self, step: int) -> list[list[Event]]:
        return [recording.step_events(step) for recording in self._recordings]

    def _fold(self, step: int, states: list[State]) -> tuple[int, list[State]]:
        for state, events in zip(states, self._events(step), strict=True):
            for event in events:
                state.apply(event)
        return step, states


class Arrivals:
    """The requests of a recording, numbered from 0 as they came: a number is a colour.

    Attributes:
        numbers: request -> number, of its first coming.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording, self._num_read = recording, 0
        self.numbers: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """Take in what has come since, and return `numbers`."""
        events, upto = self._recording.events, len(self._recording.events)
        for index in range(self._num_read, upto):
            event = events[index]
            if isinstance(event, Submit | Fork):
                self.numbers.setdefault(event.rid, len(self.numbers))
            elif isinstance(event, Keyframe):
                for rid in event.snapshot["requests"]:
                    self.numbers.setdefault(rid, len(self.numbers))
        self._num_read = upto
        return self.numbers
