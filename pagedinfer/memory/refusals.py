"""Fault injection at the one place where every allocator can say no: calls that ask for blocks, counted."""

from __future__ import annotations

from pagedinfer.errors import OutOfBlocks
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.events import Refuse

__all__ = ["Refusals"]


class Refusals:
    """Counts the calls that want blocks, and refuses those it was told to.

    Attributes:
        refuse_calls: numbers of calls (counted from 0) that are refused.
        num_calls: calls so far that asked for at least one block.
    """

    refuse_calls: set[int]
    num_calls: int
    _bus: EventBus

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        raise NotImplementedError

    def ask(self, needed: int) -> None:
        """Count a call that wants `needed` blocks; fault injection may refuse it.

        Raises:
            OutOfBlocks: refused.
        """
        call = self.num_calls
        self.num_calls += 1
        if call in self.refuse_calls:
            self.refuse_calls.discard(call)
            if self._bus.subs:
                self._bus.emit(Refuse(call, needed))
            raise OutOfBlocks(needed, self.num_free)
