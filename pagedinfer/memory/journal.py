"""An undo log: the one device that makes a plan a transaction."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Journal"]


class Journal:
    """Collects how to take back each change, in order.

    A change that may be cancelled is made and, in the same breath, its inverse recorded. `undo` runs the inverses
    backwards, which restores the state before the first change exactly, free-list order included.
    """

    __slots__ = ("_inverses",)

    def __init__(self) -> None:
        self._inverses: list[Callable[[], object]] = []

    def record(self, inverse: Callable[[], object]) -> None:
        """Remember how to take back the change just made."""
        self._inverses.append(inverse)

    def undo(self) -> None:
        """Take back everything recorded, newest first. The journal is empty afterwards."""
        while self._inverses:
            self._inverses.pop()()

    def __len__(self) -> int:
        return len(self._inverses)
