"""The pool's accounts, kept while a film is made: what each slot is used for, at the cost of what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedinfer.views.frame import Memory

__all__ = ["Pool", "equal_start"]


class Pool:
    """Who holds which block, and sums over all blocks that `memory` needs; `hold` and `mark` keep them up to date.

    Attributes:
        holders: block -> {lane: tokens written in it, as that lane sees it}, for blocks in a table.
        touched: blocks whose holders changed since `touched` was last cleared.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.holders: dict[int, dict[int, int]] = {}
        self.touched: set[int] = set()
        self._tables: dict[int, tuple[list[int], int]] = {}  # lane -> (table, computed tokens) as last told
        self._idle: set[int] = set()
        self._live = self._shared = self._empty = 0

    def hold(self, lane: int, table: Sequence[int], computed: int) -> None:
        """Lane `lane` has this table and so many computed tokens now; an empty table where it is gone."""
        old, was = self._tables.get(lane, ([], 0))
        keep = len(old) if len(old) <= len(table) and table[: len(old)] == old else equal_start(old, table)
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

    def compute(self, lane: int, computed: int) -> None:
        """Lane `lane` has the table that it had, and so many computed tokens now."""
        table, was = self._tables.get(lane, ([], 0))
        size = self.block_size
        for logical in range(min(was, computed) // size, min(len(table), -(-max(was, computed) // size))):
            if table[logical] >= 0:
                self._fill(self.holders[table[logical]], lane, min(size, max(0, computed - logical * size)))
        if table:
            self._tables[lane] = (table, computed)

    def _fill(self, held: dict[int, int], lane: int, fill: int) -> None:
        if len(held) > 1:
            self._count(held, -1)
            held[lane] = fill
            self._count(held, 1)
        else:
            self._live += fill - held[lane]
            self._empty += (not fill) - (not held[lane])
            held[lane] = fill

    def _change(self, block_id: int, lane: int, fill: int | None) -> None:
        if block_id < 0:
            return
        self.touched.add(block_id)
        held = self.holders.setdefault(block_id, {})
        self._count(held, -1)
        if fill is None:
            held.pop(lane, None)
        else:
            held[lane] = fill
        self._count(held, 1)
        if not held:
            del self.holders[block_id]

    def _count(self, held: Mapping[int, int], by: int) -> None:
        if not held:
            return
        fill = max(held.values())
        self._live += by * fill
        self._shared += by * fill * (len(held) > 1)
        self._empty += by * (fill == 0)

    def mark(self, block_id: int, idle: bool) -> None:
        """Say whether only the prefix cache keeps the block."""
        (self._idle.add if idle else self._idle.discard)(block_id)

    def memory(self, num_blocks: int, used: int, reserves: bool, host: int) -> Memory:
        """The accounts now. `used`: blocks in use; `reserves`: blocks without a token are reserved, not slack."""
        size = self.block_size
        reserved = self._empty * size if reserves else 0
        cached = len(self._idle) * size
        slack = len(self.holders) * size - self._live - reserved
        pinned = (used - len(self.holders)) * size  # full blocks that no table holds: live by their pins
        live = self._live + pinned
        return Memory(live, slack, num_blocks * size - live - slack - reserved - cached, used, self._shared, cached,
                      reserved, host)  # fmt: skip


def equal_start(old: Sequence[int], new: Sequence[int]) -> int:
    """How many items two lists have in common at their start."""
    differ = (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return next(differ, min(len(old), len(new)))
