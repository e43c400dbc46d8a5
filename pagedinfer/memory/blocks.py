"""The block manager: ref counts, block tables, allocation. The heart of paged memory, without a single tensor.

A request's tokens live in fixed-size blocks anywhere in the pool; its block table maps logical block `i` to a
physical `block_id` (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023). Only the last block of a request can be partly empty.
"""

from __future__ import annotations

from pagedinfer.errors import OutOfBlocks
from pagedinfer.memory.free_queue import FreeQueue
from pagedinfer.memory.journal import Journal
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.events import Alloc, Free, Refuse

__all__ = ["BlockManager"]


class BlockManager:
    """Hands out blocks and takes them back. Every method either does all of its work or changes nothing.

    Attributes:
        num_blocks: physical blocks in the pool.
        block_size: tokens per block.
        journal: where inverses of changes go while a plan is being made; None outside.
        refuse_calls: fault injection: numbers of `allocate` calls (counted from 0) that are refused.
        num_calls: `allocate` calls so far that asked for at least one block.
    """

    def __init__(self, num_blocks: int, block_size: int, bus: EventBus) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.journal: Journal | None = None
        self.refuse_calls: set[int] = set()
        self.num_calls = 0
        self._bus = bus
        self._free = FreeQueue(num_blocks)
        self._ref_counts = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses."""
        return len(self._free)

    @property
    def kv_usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, rid: str, num_tokens: int) -> int:
        """Blocks to add so that the request's table covers `num_tokens` tokens; 0 when it does already."""
        return max(0, self.blocks_for(num_tokens) - len(self._tables.get(rid, ())))

    def table(self, rid: str) -> list[int]:
        """The request's block table, read-only; empty when it holds nothing."""
        return self._tables.get(rid, [])

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold this block."""
        return self._ref_counts[block_id]

    # -- changes ------------------------------------------------------------------------------------------------

    def allocate(self, rid: str, num_tokens: int) -> tuple[int, ...]:
        """Grow the request's table until it covers `num_tokens` tokens. Returns the new block ids.

        Raises:
            OutOfBlocks: fewer blocks are free than needed (or the call was refused by fault injection).
        """
        needed = self.num_missing(rid, num_tokens)
        if not needed:
            return ()
        self._refuse_if_told(needed)
        if needed > self.num_free:
            raise OutOfBlocks(needed, self.num_free)
        table = self._tables.setdefault(rid, [])
        first = len(table)
        new = tuple(self._free.pop_front() for _ in range(needed))
        for block_id in new:
            self._ref_counts[block_id] = 1
        table.extend(new)
        if self.journal is not None:
            self.journal.record(lambda: self._unallocate(rid, needed))
        if self._bus.subs:
            self._bus.emit(Alloc(rid, 0, first, new))
        return new

    def free(self, rid: str, why: str) -> tuple[int, ...]:
        """Take the request's table back, last block first, so that its tail is reused before its head.

        Returns the blocks whose ref count fell to 0, in the order in which they joined the free list.
        """
        table = self._tables.pop(rid, None)
        if table is None:
            return ()
        freed = []
        for block_id in reversed(table):
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                self._free.push_back(block_id)
                freed.append(block_id)
        if self.journal is not None:
            self.journal.record(lambda: self._unfree(rid, table, freed))
        if self._bus.subs:
            self._bus.emit(Free(rid, tuple(freed), why))
        return tuple(freed)

    def _unallocate(self, rid: str, count: int) -> None:
        table = self._tables[rid]
        for _ in range(count):
            block_id = table.pop()
            self._ref_counts[block_id] = 0
            self._free.push_front(block_id)
        if not table:
            del self._tables[rid]

    def _unfree(self, rid: str, table: list[int], freed: list[int]) -> None:
        for block_id in reversed(freed):
            self._free.remove(block_id)
        for block_id in table:
            self._ref_counts[block_id] += 1
        self._tables[rid] = table

    def _refuse_if_told(self, needed: int) -> None:
        call = self.num_calls
        self.num_calls += 1
        if call in self.refuse_calls:
            self.refuse_calls.discard(call)
            if self._bus.subs:
                self._bus.emit(Refuse(call, needed))
            raise OutOfBlocks(needed, self.num_free)

    # -- whole state --------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, object]:
        """Tables, ref counts above 0 and the free list in order, as plain data."""
        return {
            "block_tables": {rid: list(table) for rid, table in self._tables.items()},
            "ref_counts": {str(i): count for i, count in enumerate(self._ref_counts) if count},
            "free": list(self._free),
        }

    def check(self) -> None:
        """Assert every invariant of the pool. O(num_blocks).

        A block is free or referenced, never both; its ref count equals its occurrences in live tables; no table
        holds a block twice; free and used add up to the pool.
        """
        self._free.check()
        counts = [0] * self.num_blocks
        for rid, table in self._tables.items():
            assert table, f"{rid} has an empty block table"
            assert len(set(table)) == len(table), f"{rid} holds a block twice: {table}"
            for block_id in table:
                counts[block_id] += 1
        for block_id, count in enumerate(counts):
            assert self._ref_counts[block_id] == count, (
                f"block {block_id}: ref count {self._ref_counts[block_id]}, {count} tables hold it"
            )
            assert (block_id in self._free) == (count == 0), (
                f"block {block_id} is free and in use, or neither"
            )

    def __repr__(self) -> str:
        used = self.num_blocks - self.num_free
        return f"BlockManager({used} of {self.num_blocks} blocks used, block_size={self.block_size})"
