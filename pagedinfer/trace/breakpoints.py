"""Breakpoints: several watches along one recording, also while it grows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pagedinfer.errors import WatchError
from pagedinfer.trace.moments import Follower, Moment, moments
from pagedinfer.trace.watch import Stop, Watch, as_watch

if TYPE_CHECKING:
    from pagedinfer.trace.recording import Recording

__all__ = ["Breakpoints", "hits"]


class Breakpoints:
    """Watches that stop a run. What is true when one is added does not stop it; its becoming true again does."""

    def __init__(self, recording: Recording) -> None:
        self._watches: list[Watch] = []
        self._recording = recording
        self._follower: Follower | None = None  # made when first needed: without watches nothing is followed
        self._lock = threading.RLock()  # a box of a view adds while a worker thread runs steps

    def add(self, what: Watch | str | Callable[..., Any]) -> Watch:
        """Stop when this comes true: a condition ("r3 preempted"), a watch, or a predicate. Returns the watch.

        Raises:
            WatchError: the condition cannot be read.
        """
        added = as_watch(what).fresh()
        with self._lock:
            follower = self._follow()
            for moment in follower.catch_up():
                self._look(moment)
            if follower.now is not None:
                added.check(follower.now)
            self._watches.append(added)
        return added

    def remove(self, what: Watch | str) -> None:
        """Take a watch away, by itself or by its text.

        Raises:
            WatchError: it is not among them.
        """
        itself = [i for i, known in enumerate(self._watches) if known is what]
        same_text = [i for i, known in enumerate(self._watches) if str(known) == str(what)]
        if places := itself or same_text:
            del self._watches[places[0]]
            return
        there = ", ".join(map(str, self._watches)) or "none"
        raise WatchError(f"No breakpoint {what!s}; there {'are' if len(self) > 1 else 'is'} {there}.")

    def clear(self) -> None:
        """Take all away."""
        self._watches.clear()

    def skip(self) -> None:
        """Go to the present without stopping: what has happened so far is history."""
        self.check()

    def check(self, *, rest: bool = False) -> list[Stop]:
        """Every watch that fired since the last look; nothing is followed while there are no watches.

        `rest`: nothing more will come, so look at what came in after the last step too.

        Raises:
            WatchError: a predicate raised; the others have looked.
        """
        with self._lock:
            if not self._watches:
                self._follower = None
                return []
            return [stop for moment in self._follow().catch_up(rest=rest) for stop in self._look(moment)]

    def _follow(self) -> Follower:
        self._follower = self._follower or Follower(self._recording)
        return self._follower

    def _look(self, moment: Moment) -> list[Stop]:
        stops: list[Stop] = []
        failed: WatchError | None = None
        for known in list(self._watches):
            try:
                cause = known.check(moment)
            except WatchError as error:
                failed = failed or error
            else:
                stops += [Stop(moment.step, cause, known)] if cause is not None else []
        if failed is not None:
            raise failed
        return stops

    def __iter__(self) -> Iterator[Watch]:
        return iter(list(self._watches))

    def __len__(self) -> int:
        return len(self._watches)

    def __getitem__(self, index: int) -> Watch:
        return self._watches[index]

    def __repr__(self) -> str:
        return f"Breakpoints({', '.join(map(str, self._watches)) or 'none'})"


def hits(recording: Recording, what: Watch | str | Callable[..., Any], start: int = 0) -> Iterator[Stop]:
    """Every step from `start` on at which the watch fires, looking from the recording's beginning."""
    fresh = as_watch(what).fresh()
    for moment in moments(recording):
        cause = fresh.check(moment)
        if cause is not None and moment.step >= start:
            yield Stop(moment.step, cause, fresh)
