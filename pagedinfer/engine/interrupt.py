"""Ctrl-C at the right moment: the first one waits for the end of the step, a second one stops the forward pass."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["DeferredInterrupt", "GuestInterrupt", "interruptible"]


class GuestInterrupt(KeyboardInterrupt):
    """A second Ctrl-C in `interruptible` code. Whoever asked it may swallow this: the first is still remembered."""


_guest = threading.local()


@contextmanager
def interruptible() -> Iterator[None]:
    """Around code of others that is asked in the middle of a step (a policy): a second Ctrl-C raises `GuestInterrupt`
    in it, at once. The interrupt itself still waits for the step's end.
    """
    _guest.asked = True
    try:
        yield
    finally:
        _guest.asked = False


class DeferredInterrupt:
    """`with DeferredInterrupt() as interrupt:` around one step, in the main thread; does nothing in others.

    Inside, an interrupt is remembered and raised when the block ends, also when an error ends it. While
    `interrupt.forward` is True (the runner works; its plan can be cancelled) a second one raises at once. Bookkeeping
    is never cut in the middle, but `interruptible` code is. Blocks may be nested: the outermost one raises.
    """

    def __init__(self) -> None:
        self.pending = False
        self.forward = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            # A program that ignores interrupts, or handles them in C, keeps doing so.
            if callable(self._previous):
                signal.signal(signal.SIGINT, self._on_signal)
                self._installed = True
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.pending and self.forward:
            self.pending = False
            raise KeyboardInterrupt
        if self.pending and getattr(_guest, "asked", False):
            raise GuestInterrupt("a second Ctrl-C")
        self.pending = True

    def __exit__(self, *exc: object) -> None:
        if not self._installed:
            return
        signal.signal(signal.SIGINT, self._previous)
        if self.pending:
            self._previous(signal.SIGINT, None)
