"""A line that says how far something has come, where somebody may be waiting: on a terminal and in a notebook.

It appears when the work has taken two seconds, changes a few times a second, and goes when the work ends, also when
Ctrl-C or an error ends it. Nothing is written to logs, pipes and tests.
"""

from __future__ import annotations

import sys
import time

__all__ = ["Progress"]

PATIENCE, PAUSE = 2.0, 0.3
"""Seconds before the line appears, and between its changes."""


class Progress:
    """`with Progress("Comparing runs", "run", 4) as progress:` and then `progress(done)` as often as one likes.

    Attributes:
        what: what is being done, shown in front; may be changed on the way.
    """

    def __init__(self, what: str, unit: str, total: int | None = None) -> None:
        """`total` units in all; None: nobody knows."""
        self.what = what
        self._unit, self._total = unit, total
        self._out = sys.stderr if is_watched() else None
        self._next = time.monotonic() + PATIENCE
        self._length = 0
        self._done = 0

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int) -> None:
        """So much is done. Cheap enough for every step."""
        if self._out is None or (now := time.monotonic()) < self._next:
            return
        self._next = now + PAUSE
        of = "" if self._total is None else f" of {self._total:,}"
        self._write(f"{self.what}: {self._unit} {done:,}{of}; Ctrl-C stops it")

    def step(self) -> None:
        """One more is done."""
        self._done += 1
        self(self._done)

    def __exit__(self, *exc: object) -> None:
        if self._length:
            self._write("")
            self._length = 0

    def _write(self, line: str) -> None:
        if self._out is not None:
            self._out.write(f"\r{line.ljust(self._length)}\r{line}")
            self._out.flush()
            self._length = len(line)


def is_watched() -> bool:
    """Whether somebody may be reading along: a terminal, or the output of a notebook's cell."""
    return sys.stderr is not None and (
        sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")
    )
