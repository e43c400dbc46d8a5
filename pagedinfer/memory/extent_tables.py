"""Who holds which extent: contiguous block tables, the moves between places, and how each change is taken back."""

from __future__ import annotations

from collections.abc import Sequence

from pagedinfer.memory.extents import Extents, Hole
from pagedinfer.memory.journal import Journal
from pagedinfer.memory.ops import BlockOp
from pagedinfer.memory.sliding import Moves
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus

__all__ = ["ExtentTables"]


class ExtentTables:
    """Block tables that are runs of consecutive ids. Places extents where it is told; it chooses nothing.

    A move replaces the request's table and never changes the list: an open plan keeps the one it knows. Requests may
    end, unjournaled, while a plan is open, and the plan be taken back after that.

    Attributes:
        num_blocks: physical blocks in the pool.
        block_size: tokens per block.
        journal: where inverses of changes go while a plan is being made; None outside.
        ops: block operations asked for since the last `take_ops`.
        tables: the block tables by request id, read-only for others.
    """

    def __init__(self, num_blocks: int, block_size: int, bus: EventBus) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.journal: Journal | None = None
        self._bus = bus
        self._space = Extents(num_blocks)
        self._last = 0  # end of the extent that was placed last, for next-fit
        self.tables: dict[str, list[int]] = {}
        self._num_filled: dict[str, int] = {}  # blocks of each table that may hold tokens: what a move copies
        self.ops: list[BlockOp] = []
        self._given_up: set[int] = set()  # freed since the plan began
        self._overwritten: list[int] = []

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks in no extent; reserved ones do not count."""
        return self._space.num_free

    @property
    def kv_usage(self) -> float:
        """Share of the pool in extents, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    @property
    def holes(self) -> list[Hole]:
        """The free runs (first block, number of blocks) by address."""
        return list(self._space.holes)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, rid: str, num_tokens: int) -> int:
        """Blocks to add so that the request's extent covers `num_tokens` tokens; 0 when it does already."""
        return max(0, self.blocks_for(num_tokens) - len(self.tables.get(rid, ())))

    def table(self, rid: str, group: int = 0) -> list[int]:
        """The request's block table, its whole extent; read-only, empty when it holds nothing."""
        return self.tables.get(rid, [])

    def kept_blocks(self, rid: str, num_tokens: int) -> list[int]:
        """The blocks of the request's first `num_tokens` tokens."""
        return self.tables.get(rid, [])[: self.blocks_for(num_tokens)]

    def ref_count(self, block_id: int) -> int:
        """1 for a block in an extent, 0 for a free one."""
        return 0 if self._space.free_from(block_id) else 1

    def is_covered(self, rid: str, position: int) -> bool:
        """Whether `position` is in a block that counts as filled: neither the table nor what moves copy will change."""
        return position < self._num_filled.get(rid, 0) * self.block_size

    def num_freed_with(self, rid: str) -> int:
        """Blocks that nobody else holds: all of the request's extent."""
        return len(self.tables.get(rid, ()))

    def _extents(self) -> dict[str, Hole]:
        """Each request's extent: (first block, number of blocks)."""
        return {rid: (table[0], len(table)) for rid, table in self.tables.items()}

    # -- changes ------------------------------------------------------------------------------------------------

    def _extend(self, rid: str, first: int, size: int) -> tuple[int, ...]:
        """Append free blocks to the request's extent, or begin it with them."""
        new = tuple(range(first, first + size))
        table = self.tables.setdefault(rid, [])
        logical, last = len(table), self._last
        self._space.take(first, size)
        self._note_overwritten(new)
        table.extend(new)
        if not logical:
            self._num_filled[rid], self._last = 0, first + size
        if self.journal is not None:
            self.journal.record(lambda: self._unextend(rid, first, size, last))
        if self._bus.subs:
            self._bus.emit(ev.Alloc(rid, 0, logical, new))
        return new

    def _unextend(self, rid: str, first: int, size: int, last: int) -> None:
        table = self.tables[rid]
        del table[len(table) - size :]
        self._space.give(first, size)
        self._last = last
        if not table:
            del self.tables[rid], self._num_filled[rid]

    def _fill(self, rid: str, num_blocks: int) -> None:
        """The request's first `num_blocks` blocks are about to hold tokens."""
        before = self._num_filled.get(rid, num_blocks)
        if num_blocks > before:
            self._num_filled[rid] = num_blocks
            if self.journal is not None:
                self.journal.record(lambda: self._num_filled.update({rid: before}))

    def _apply(self, moves: Moves, why: str) -> None:
        for rid, to in moves:
            self._move(rid, to, why)

    def _move(self, rid: str, to: int, why: str) -> None:
        """Put the request's extent elsewhere; the two places may overlap, so the order of the copies matters."""
        old = self.tables[rid]
        first, size = old[0], len(old)
        self._space.give(first, size)
        self._space.take(to, size)
        new = self.tables[rid] = list(range(to, to + size))
        self._note_overwritten(new)
        op = self._copies(rid, first, to)
        if op.pairs:
            self.ops.append(op)
        if self.journal is not None:
            self.journal.record(lambda: self._unmove(rid, old, new, op))
        if self._bus.subs:
            self._bus.emit(ev.Move(rid, 0, tuple(zip(old, new, strict=True)), why))

    def _copies(self, rid: str, first: int, to: int) -> BlockOp:
        """The copies of a move: what may hold tokens, from the side towards which it goes."""
        pairs = [(first + i, to + i) for i in range(self._num_filled[rid])]
        return BlockOp("move", tuple(pairs if to < first else reversed(pairs)))

    def _ops_of(self, moves: Moves) -> list[BlockOp]:
        """The copies of moves that are not made yet."""
        at, ops = {rid: table[0] for rid, table in self.tables.items()}, []
        for rid, to in moves:
            ops.append(self._copies(rid, at[rid], to))
            at[rid] = to
        return [op for op in ops if op.pairs]

    def _unmove(self, rid: str, old: list[int], new: list[int], op: BlockOp) -> None:
        if self.ops and self.ops[-1] is op:
            self.ops.pop()
        if self.tables.get(rid) is new:  # otherwise it ended while the plan was open
            size = len(new)  # less when guessed tokens were given back meanwhile
            self._space.give(new[0], size)
            self._space.take(old[0], size)
            del old[size:]
            self.tables[rid] = old

    def _cut(self, rid: str, keep: int) -> None:
        """Give back all but the extent's first `keep` blocks."""
        table = self.tables.get(rid, [])
        gone = tuple(table[keep:])
        if not gone:
            return
        filled = self._num_filled[rid]
        del table[keep:]
        self._space.give(gone[0], len(gone))
        self._note_given_up(gone)
        self._num_filled[rid] = min(filled, keep)
        if not table:
            del self.tables[rid], self._num_filled[rid]
        if self.journal is not None:
            self.journal.record(lambda: self._uncut(rid, table, gone, filled))
        if self._bus.subs:
            self._bus.emit(ev.Trim(rid, 0, gone))

    def _uncut(self, rid: str, table: list[int], gone: tuple[int, ...], filled: int) -> None:
        self._space.take(gone[0], len(gone))
        table.extend(gone)
        self.tables[rid], self._num_filled[rid] = table, filled

    def free(self, rid: str, why: str) -> tuple[int, ...]:
        """Take the request's extent back. Returns its blocks, the last first."""
        table = self.tables.pop(rid, None)
        if table is None:
            return ()
        filled = self._num_filled.pop(rid)
        self._space.give(table[0], len(table))
        freed = tuple(reversed(table))
        self._note_given_up(freed)
        if self.journal is not None:
            self.journal.record(lambda: self._unfree(rid, table, filled))
        if self._bus.subs:
            self._bus.emit(ev.Free(rid, freed, why))
        return freed

    def _unfree(self, rid: str, table: list[int], filled: int) -> None:
        self._space.take(table[0], len(table))
        self.tables[rid], self._num_filled[rid] = table, filled

    # -- what a cancel wants back -------------------------------------------------------------------------------

    def _note_given_up(self, block_ids: Sequence[int]) -> None:
        if self.journal is not None:
            self._given_up.update(block_ids)

    def _note_overwritten(self, block_ids: Sequence[int]) -> None:
        """These blocks get other contents; a move's source is none of them, its inverse fills it again."""
        if self._given_up:
            self._overwritten += [block_id for block_id in block_ids if block_id in self._given_up]

    def take_overwritten(self) -> list[int]:
        """Blocks that the plan just made hands out though a cancel would want their contents back."""
        overwritten, self._overwritten = self._overwritten, []
        self._given_up.clear()
        return overwritten

    # -- whole state --------------------------------------------------------------------------------------------

    def take_ops(self) -> list[BlockOp]:
        """The block operations asked for since the last call, in order."""
        ops, self.ops = self.ops, []
        return ops

    def snapshot(self) -> dict[str, object]:
        """Tables, ref counts above 0 and the free blocks by address, as plain data."""
        held = sorted(block_id for table in self.tables.values() for block_id in table)
        return {
            "block_tables": {rid: list(table) for rid, table in self.tables.items()},
            "ref_counts": {str(block_id): 1 for block_id in held},
            "free": self._space.free_ids(),
        }

    def check(self) -> None:
        """Assert every invariant of the pool. O(num_blocks).

        Extents are consecutive ids and do not overlap; holes are joined; both add up to the pool.
        """
        self._space.check()
        assert self._space.num_blocks == self.num_blocks, "the pool and its address space differ in size"
        seen = dict.fromkeys(self._space.free_ids(), "")
        for rid, table in self.tables.items():
            assert table, f"{rid} has an empty block table"
            first, size = table[0], len(table)
            assert table == list(range(first, first + size)), f"{rid} is not contiguous: {table}"
            for block_id in table:
                other = seen.setdefault(block_id, rid)
                assert other == rid, f"block {block_id} of {rid} is also {other or 'free'}"
            assert 0 <= self._num_filled[rid] <= size, f"{rid} has tokens beyond its extent"
        assert seen.keys() == set(range(self.num_blocks)), (
            "a block is neither free nor held, or beyond the pool"
        )
        assert self._num_filled.keys() == self.tables.keys(), "a request that has ended is remembered"
