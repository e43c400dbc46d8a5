"""The pool between two steps, in the scheduler's books: another size, no holes, no cached content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pagedinfer.engine.open_plan import OpenPlan
from pagedinfer.engine.queues import Queues
from pagedinfer.errors import RequestError
from pagedinfer.memory.allocator import KVAllocator
from pagedinfer.memory.ops import BlockOp
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus

__all__ = ["PoolBooks"]


class PoolBooks:
    """What a scheduler does to its pool while no plan is open. `Scheduler` fills the attributes."""

    bus: EventBus
    blocks: KVAllocator
    queues: Queues
    is_changing: bool
    _open: list[OpenPlan]

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Around each change: events go out at its end, when the books are whole and subscribers may change more."""
        with self.bus.hold():
            outer, self.is_changing = self.is_changing, True
            try:
                yield
            finally:
                self.is_changing = outer

    def reset_prefix_cache(self, why: str = "asked for") -> bool:
        """Forget everything cached. False, and nothing changes, while a block is in use, here or on the host, or a plan
        is open.
        """
        if self._open or self.is_changing or self.queues.swapped:
            return False
        with self._change():
            return self.blocks.reset_prefix_cache(why)

    def plan_resize(self, num_blocks: int) -> list[BlockOp]:
        """The moves that a pool of another size needs first; for the runner, before `resize`.

        Raises:
            RequestError: a plan is open, or a request swapped out since the last step still has to be copied.
            OutOfBlocks: more blocks are in use.
        """
        self._check_at_rest("resized")
        return self.blocks.plan_resize(num_blocks)

    def resize(self, num_blocks: int, ops: Sequence[BlockOp]) -> None:
        """The runner has done the moves of `plan_resize` and has the new size: the books follow."""
        with self._change():
            self.blocks.resize(num_blocks, ops)
            if self.bus.subs:
                self.bus.emit(ev.Resize(num_blocks))

    def plan_compact(self) -> list[BlockOp]:
        """The moves that close the holes of a contiguous pool; for the runner, before `compact`.

        Raises:
            RequestError: as `plan_resize`.
        """
        self._check_at_rest("compacted")
        return self.blocks.plan_compact()

    def compact(self, ops: Sequence[BlockOp], why: str) -> None:
        """The runner has done the moves of `plan_compact`: the books follow."""
        with self._change():
            if self.bus.subs:
                self.bus.emit(ev.Compact(why))
            self.blocks.compact(ops, why)

    def _check_at_rest(self, doing: str) -> None:
        if self._open or self.is_changing:
            raise RequestError(f"The pool cannot be {doing} while a step is open.")
        if self.blocks.ops:
            raise RequestError(f"The pool cannot be {doing} before the next step: it copies swapped blocks.")
