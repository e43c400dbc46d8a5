"""Block tables: which physical block holds which tokens of which request, shared, copied, grown and given back.

A table maps logical block `i` of a request to a physical `block_id`; there is one for each group of layers. This is
the lower half of the block manager: each method does one change, tells it, and records its inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pagedinfer.memory.journal import Journal
from pagedinfer.memory.ops import BlockOp
from pagedinfer.memory.pool import BlockPool
from pagedinfer.memory.prefix import first_in_window
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus

__all__ = ["GONE", "BlockTables"]

GONE = -1
"""In a table: a block that the group's sliding window has left."""


class BlockTables:
    """The tables of all requests over one pool.

    Attributes:
        block_size: tokens per block.
        windows: for each group of layers, the tokens that a query sees; None for all. One group in most models.
        pool: free blocks, reference counts, the prefix cache.
        ops: block operations asked for since the last `take_ops`.
        tables: those of group 0, by request id; read-only.
    """

    def __init__(
        self, num_blocks: int, block_size: int, bus: EventBus, windows: Sequence[int | None]
    ) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self.pool = BlockPool(num_blocks, block_size, self.windows, bus)
        self.ops: list[BlockOp] = []
        self._bus = bus
        self._tables: list[dict[str, list[int]]] = [{} for _ in self.windows]
        self.tables = self._tables[0]
        self._slides = any(window is not None for window in self.windows)
        self._forked: set[str] = set()  # whose last block others may hold too
        self._num_published: dict[str, int] = {}

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def journal(self) -> Journal | None:
        """Where inverses of changes go while a plan is being made; None outside."""
        return self.pool.journal

    @journal.setter
    def journal(self, journal: Journal | None) -> None:
        self.pool.journal = journal

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def is_covered(self, rid: str, position: int) -> bool:
        """Whether `position` can be written without any change of tables: in the middle of a block of its own."""
        return bool(position % self.block_size) and rid not in self._forked and not self._slides

    def num_missing(self, rid: str, num_tokens: int) -> int:
        """Blocks to add, over all groups, so that the request's tables cover `num_tokens` tokens."""
        covered = self.blocks_for(num_tokens)
        return sum(max(0, covered - len(tables.get(rid, ()))) for tables in self._tables)

    def table(self, rid: str, group: int = 0) -> list[int]:
        """The request's block table, read-only; empty when it holds nothing."""
        return self._tables[group].get(rid, [])

    def group_tables(self, rid: str) -> Sequence[list[int]]:
        """The tables of groups 1 and on; nothing in most models."""
        return () if len(self.windows) == 1 else [self.table(rid, g) for g in range(1, len(self.windows))]

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold this block."""
        return self.pool.ref_count(block_id)

    def kept_blocks(self, rid: str, num_tokens: int) -> list[int]:
        """The blocks, group by group, that the token after the first `num_tokens` sees: what a swap has to keep."""
        end = self.blocks_for(num_tokens)
        return [
            block_id
            for window, tables in zip(self.windows, self._tables, strict=True)
            for block_id in tables.get(rid, ())[first_in_window(window, num_tokens, self.block_size) : end]
        ]

    def reaches(self, rid: str, position: int) -> bool:
        """Whether the request holds all blocks that a query at `position` sees, as far as it has come."""
        return not self._slides or all(
            GONE not in tables.get(rid, ())[first_in_window(window, position, self.block_size) :]
            for window, tables in zip(self.windows, self._tables, strict=True)
        )

    def num_freed_with(self, rid: str) -> int:
        """Blocks that nobody else holds."""
        return sum(1 for ts in self._tables for b in ts.get(rid, ()) if b != GONE and self.ref_count(b) == 1)

    # -- sharing --------------------------------------------------------------------------------------------------

    def _share(self, rid: str, rows: Sequence[list[int]], num_published: int, num_tokens: int) -> None:
        """The request's tables begin with these blocks, which hold their tokens already."""
        self._num_published[rid] = num_published
        for group, (tables, row) in enumerate(zip(self._tables, rows, strict=True)):
            assert rid not in tables, f"{rid} holds blocks already"
            taken = [block_id for block_id in row if block_id != GONE]
            for block_id in taken:
                self.pool.take(block_id)
            tables[rid] = list(row)
            if self._bus.subs:
                self._bus.emit(ev.Share(rid, group, len(row) - len(taken), tuple(taken), num_tokens))
        if self.journal is not None:
            self.journal.record(lambda: self._unshare(rid))

    def _unshare(self, rid: str) -> None:
        del self._num_published[rid]
        for tables in self._tables:
            del tables[rid]

    def _shared_at(self, rid: str, start: int) -> Sequence[tuple[int, int]]:
        """(group, logical block) of the block of position `start`, where somebody else reads it or may come to."""
        logical = start // self.block_size
        return [
            (group, logical)
            for group, tables in enumerate(self._tables)
            if logical < len(table := tables.get(rid, ())) and self.pool.is_shared(table[logical])
        ]

    def _copy_on_write(self, rid: str, group: int, logical: int, new: int) -> None:
        """Put a copy of a shared block into the table; the others keep theirs."""
        table = self._tables[group][rid]
        old, table[logical] = table[logical], new
        if self.journal is not None:
            self.journal.record(lambda: table.__setitem__(logical, old))
        self.ops.append(BlockOp("copy", ((old, new),)))
        if self._bus.subs:
            self._bus.emit(ev.Copy(rid, group, logical, ((old, new),)))
        self.pool.drop(old)

    # -- growing and shrinking ------------------------------------------------------------------------------------

    def _append(self, rid: str, group: int, new: tuple[int, ...], first: int = 0) -> None:
        """Add blocks at a table's end; what is missing before logical block `first`, a window has left."""
        tables = self._tables[group]
        table = tables.setdefault(rid, [])
        before = len(table)
        table += [GONE] * (first - before)
        first = len(table)
        table += new
        if self.journal is not None:
            self.journal.record(lambda: _cut(tables, rid, before))
        if self._bus.subs:
            self._bus.emit(ev.Alloc(rid, group, first, new))

    def free(self, rid: str, why: str) -> tuple[int, ...]:
        """Take the request's tables back, last block first, so that its tail is reused before its head.

        Returns the blocks that nobody holds any more, in the order in which they joined the free queue.
        """
        held = [tables.pop(rid, []) for tables in self._tables]
        published = self._num_published.pop(rid, None)
        if self.journal is None:
            self._forked.discard(rid)
        if not any(held):
            return ()
        if self.journal is not None:
            self.journal.record(lambda: self._unfree(rid, held, published))
        freed = [b for table in held for b in reversed(table) if b != GONE and self.pool.drop(b)]
        if self._bus.subs:
            self._bus.emit(ev.Free(rid, tuple(freed), why))
        return tuple(freed)

    def _unfree(self, rid: str, held: list[list[int]], published: int | None) -> None:
        for tables, table in zip(self._tables, held, strict=True):
            tables[rid] = table
        if published is not None:
            self._num_published[rid] = published

    def trim(self, rid: str, num_tokens: int) -> None:
        """Give back the blocks at the tables' ends that `num_tokens` tokens do not need; they are taken again first."""
        keep = self.blocks_for(num_tokens)
        for group, tables in enumerate(self._tables):
            gone = tuple(tables.get(rid, ())[keep:])
            if not gone:
                continue
            _cut(tables, rid, keep)
            for block_id in reversed(gone):
                self.pool.put_first(block_id)
            if self._bus.subs:
                self._bus.emit(ev.Trim(rid, group, gone))

    def _slide(self, rid: str, start: int) -> None:
        """Give back the blocks that no query at `start` or later sees.

        The tables become new lists: a plan that is still to run keeps the ones that it knows.
        """
        for group, (window, tables) in enumerate(zip(self.windows, self._tables, strict=True)):
            table = tables.get(rid)
            if window is None or not table:
                continue
            first = end = min(first_in_window(window, start, self.block_size), len(table))
            while first and table[first - 1] != GONE:
                first -= 1
            gone = tuple(table[first:end])
            if not gone:
                continue
            tables[rid] = [*table[:first], *[GONE] * len(gone), *table[end:]]
            if self.journal is not None:
                self.journal.record(partial(tables.__setitem__, rid, table))
            for block_id in gone:
                self.pool.drop(block_id)
            if self._bus.subs:
                self._bus.emit(ev.Slide(rid, group, first, gone))

    def _move(self, moves: dict[int, int], why: str) -> None:
        """Blocks have moved (from -> to): the tables follow."""
        for group, tables in enumerate(self._tables):
            for rid, table in tables.items():
                pairs = tuple((block_id, moves[block_id]) for block_id in table if block_id in moves)
                table[:] = [moves.get(block_id, block_id) for block_id in table]
                if pairs and self._bus.subs:
                    self._bus.emit(ev.Move(rid, group, pairs, why))

    # -- whole state ----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, object]:
        """Tables and pool as plain data. `group_tables` holds those of groups 1 and on."""
        first, *others = [{rid: list(table) for rid, table in tables.items()} for tables in self._tables]
        more = {"group_tables": others} if others else {}
        return {"block_tables": first, **more, **self.pool.snapshot()}

    def check(self) -> None:
        """Assert every invariant of tables and pool. O(num_blocks)."""
        self.pool.check()
        counts = [0] * self.pool.num_blocks
        for tables in self._tables:
            assert tables.keys() == self._tables[0].keys(), "a request holds blocks in some groups only"
            for rid, table in tables.items():
                held = [block_id for block_id in table if block_id != GONE]
                assert table, f"{rid} has an empty block table"
                assert len(set(held)) == len(held), f"{rid} holds a block twice: {table}"
                for block_id in held:
                    counts[block_id] += 1
        for block_id, number in enumerate(counts):
            assert self.ref_count(block_id) == number, (
                f"block {block_id}: ref count {self.ref_count(block_id)}, {number} tables hold it"
            )
        assert self._num_published.keys() <= self._tables[0].keys(), (
            "published blocks of a request without any"
        )


def _cut(tables: dict[str, list[int]], rid: str, keep: int) -> None:
    """Shorten a table; one without blocks goes."""
    del tables[rid][keep:]
    if not keep:
        del tables[rid]
