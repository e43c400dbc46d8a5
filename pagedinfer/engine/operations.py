"""Calls into an engine that come in the middle of another call, in the same thread.

A lock keeps other threads out. It does not keep out what Python runs between two lines of the thread that holds it:
a signal handler, or the garbage collector closing a generator that somebody left half way. What such code asks for
waits until the books are whole again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from pagedinfer.engine.interrupt import DeferredInterrupt
from pagedinfer.errors import UnknownRequest

__all__ = ["Operations"]


class Operations:
    """The lock of an engine, and what waits for the end of the outermost call.

    Attributes:
        lock: held by each call; a thread may take it again.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._depth = 0
        self._later: list[Callable[[], object]] = []

    @property
    def inside(self) -> bool:
        """Whether a call is under way; to be asked with the lock held, so it is a call of this thread."""
        return self._depth > 0

    def later(self, job: Callable[[], object]) -> None:
        """Do `job` when the outermost call ends. One for a request that has ended by then does nothing."""
        self._later.append(job)

    @contextmanager
    def run(self) -> Iterator[DeferredInterrupt]:
        """Around a call that changes anything: the lock, Ctrl-C deferred, and at the end what had to wait."""
        with self.lock, DeferredInterrupt() as interrupt:
            self._depth += 1
            try:
                yield interrupt
            finally:
                self._depth -= 1
                while self._later and not self._depth:
                    with suppress(UnknownRequest):
                        self._later.pop(0)()
