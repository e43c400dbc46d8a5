"""The pool's accounts, kept while a film is made: what each slot is used for, at the cost of what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedinfer.views.frame import Memory

__all__ = ["Pool", "equal_start"]

Holder = int | tuple[int, int]
"""A table: a lane's, or that of a lane and a group above 0."""


class Pool:
    """Who holds which block, and sums over all blocks that `memory` needs; `hold` and `mark` keep them up to date.

    Attributes:
        holders: block -> {table: tokens written in it, as that one sees it}, for blocks in a table.
        pins: block -> users beside the tables.
        touched: blocks whose holders changed since `touched` was last cleared.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.holders: dict[int, dict[Holder, int]] = {}
        self.pins: dict[int, int] = {}
        self.touched: set[int] = set()
        self._tables: dict[Holder, tuple[list[int], int]] = {}  # table and computed tokens as last told
        self._idle: set[int] = set()
        self._live = self._shared = self._empty = 0

    def hold(self, lane: Holder, table: Sequence[int], computed: int) -> None:
        """Lane `lane` has this table and so many computed tokens now; an empty table where it is gone."""
        old, was = self._tables.get(lane, ([], 0))
        keep = equal_start(old, table)
        first = min(keep, min(was, computed) // self.block_size)  # blocks before it are as they were
        for block_id in old[first:]:
            self._change(block_id, lane, None)
        for logical in range(first, len(table)):
            fill = min(self.block_size, max(0, computed - logical * self.block_size))
            self._change(table[logical], lane, fill)
        if not table:
            self._tables.pop(lane, None)
        else:
            self._tables[lane] = (old[:keep] + list(table[keep:]), computed)

    def compute(self, lane: Holder, computed: int) -> None:
        """Lane `lane` has the table that it had, and so many computed tokens now."""
        table, was = self._tables.get(lane, ([], 0))
        size = self.block_size
        for logical in range(min(was, computed) // size, min(len(table), -(-max(was, computed) // size))):
            if table[logical] >= 0:
                self._fill(table[logical], lane, min(size, max(0, computed - logical * size)))
        if table:
            self._tables[lane] = (table, computed)

    def pin(self, block_id: int, pins: int) -> None:
        """Say how many use the block beside the tables."""
        held = self.holders.get(block_id, {})
        self._count(block_id, held, -1)
        self.pins[block_id] = pins
        self._count(block_id, held, 1)
        if not pins:
            del self.pins[block_id]

    def _fill(self, block_id: int, lane: Holder, fill: int) -> None:
        held = self.holders[block_id]
        if len(held) > 1 or block_id in self.pins:
            self._count(block_id, held, -1)
            held[lane] = fill
            self._count(block_id, held, 1)
        else:
            self._live += fill - held[lane]
            self._empty += (not fill) - (not held[lane])
            held[lane] = fill

    def _change(self, block_id: int, lane: Holder, fill: int | None) -> None:
        if block_id < 0:
            return
        self.touched.add(block_id)
        held = self.holders.setdefault(block_id, {})
        self._count(block_id, held, -1)
        if fill is None:
            held.pop(lane, None)
        else:
            held[lane] = fill
        self._count(block_id, held, 1)
        if not held:
            del self.holders[block_id]

    def _count(self, block_id: int, held: Mapping[Holder, int], by: int) -> None:
        if not held:
            return
        fill = max(held.values())
        self._live += by * fill
        self._shared += by * fill * (len(held) + self.pins.get(block_id, 0) > 1)
        self._empty += by * (fill == 0)

    def mark(self, block_id: int, idle: bool) -> None:
        """Say whether only the prefix cache keeps the block."""
        (self._idle.add if idle else self._idle.discard)(block_id)

    def memory(self, num_blocks: int, used: int, host: int) -> Memory:
        """The accounts now; `used`: blocks in use, pinned ones that no table holds among them."""
        size = self.block_size
        reserved, cached = self._empty * size, len(self._idle) * size
        slack = used * size - self._live - reserved
        free = num_blocks * size - used * size - cached
        return Memory(self._live, slack, free, used, self._shared, cached, reserved, host)


def equal_start(old: Sequence[int], new: Sequence[int]) -> int:
    """How many items two lists have in common at their start."""
    if len(old) <= len(new) and new[: len(old)] == old:
        return len(old)
    differ = (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return next(differ, min(len(old), len(new)))
