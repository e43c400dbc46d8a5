"""The event bus: one per engine, synchronous, free when nobody listens.

A publisher writes two lines, and builds the event inside the guard:

    if bus.subs:
        bus.emit(Alloc(rid, 0, first, pblks))
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pagedinfer.errors import describe_error
from pagedinfer.trace.events import Error, Event

__all__ = ["EventBus", "Subscription", "warn"]

Subscriber = Callable[[Event], None]


class Subscription:
    """A subscriber's place on a bus; closes once, or at the end of its `with` block."""

    def __init__(self, bus: EventBus, fn: Subscriber) -> None:
        self._bus, self._fn = bus, fn

    def close(self) -> None:
        """Stop receiving events. Harmless when called twice."""
        self._bus.subs = tuple(sub for sub in self._bus.subs if sub is not self)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Hand `event` to the subscriber."""
        self._fn(event)

    def __repr__(self) -> str:
        return f"Subscription({getattr(self._fn, '__qualname__', type(self._fn).__qualname__)})"


class EventBus:
    """Carries events from the core to its subscribers, in program order.

    While the core changes its state it holds the bus (`with bus.hold()`): events queue up and go out when the
    state is whole again, so a subscriber never sees, or breaks, a half-made change.

    Attributes:
        subs: the subscribers. A tuple, so that the guard `if bus.subs` costs one look.
        step: the step stamped on events.
        wall_clock: returns seconds for the `t` column, or None for no wall time.
    """

    def __init__(self, wall_clock: Callable[[], float] | None = None) -> None:
        self.subs: tuple[Subscription, ...] = ()
        self.step = 0
        self.wall_clock = wall_clock
        self._seq = 0
        self._holds = 0
        self._queue: list[Event] = []
        self._delivering = False

    def subscribe(self, fn: Callable[[Event], None]) -> Subscription:
        """Call `fn(event)` for each event from now on. A subscriber that raises is warned about and detached."""
        subscription = Subscription(self, fn)
        self.subs = (*self.subs, subscription)
        return subscription

    def emit(self, event: Event, at: int | None = None) -> None:
        """Publish `event`: at once, or when the bus is released; `at` is its place among the queued events."""
        if event.step < 0:
            event.step = self.step
        if self.wall_clock is not None:
            event.t = self.wall_clock()
        self._queue.insert(len(self._queue) if at is None else at, event)
        if not self._holds:
            self._deliver()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Queue events until the block ends (the outermost one, when nested)."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds and self._queue:
                self._deliver()

    @property
    def is_delivering(self) -> bool:
        """Whether a subscriber is being called right now, perhaps in the middle of a step."""
        return self._delivering

    @property
    def num_queued(self) -> int:
        """Events held back so far: the place of the next one, for `emit(event, at=...)`."""
        return len(self._queue)

    def _deliver(self) -> None:
        if self._delivering:  # a subscriber emitted: the loop below will come to it
            return
        self._delivering = True
        try:
            for event in iter(lambda: self._queue.pop(0) if self._queue else None, None):
                event.seq = self._seq
                self._seq += 1
                for sub in self.subs:
                    self._call(sub, event)
        finally:
            self._delivering = False

    def _call(self, sub: Subscription, event: Event) -> None:
        try:
            sub(event)
        except BaseException as error:  # whatever it is, the step that it happens in must go on
            sub.close()
            what = describe_error(error)
            self.emit(Error("subscriber", f"{sub!r}: {what}"))
            warn(f"{sub!r} raised {what}. It is detached; the run goes on.")


def warn(message: str) -> None:
    """Warn, also where warnings are errors: raised here, one would end the step that it only tells of."""
    try:
        warnings.warn(message, stacklevel=3)
    except Exception:
        sys.stderr.write(f"{message}\n")
