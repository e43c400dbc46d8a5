"""The block manager: who gets which blocks, what can be shared. The heart of paged memory, without a single tensor.

A request's tokens live in fixed-size blocks anywhere in the pool; its block table maps logical block `i` to a
physical `block_id` (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023). Only the last block of a request can be partly empty. Several tables may hold a block;
who writes to such a block gets a copy first.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedinfer.errors import OutOfBlocks, count
from pagedinfer.memory.keys import BlockKey
from pagedinfer.memory.ops import BlockOp
from pagedinfer.memory.prefix import first_in_window
from pagedinfer.memory.refusals import Refusals
from pagedinfer.memory.tables import GONE, BlockTables
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus

__all__ = ["BlockManager"]


class BlockManager(BlockTables, Refusals):
    """Hands out blocks and takes them back: the paged `KVAllocator`. Each method does all of its work or nothing.

    Attributes:
        refuse_calls: fault injection: numbers of `allocate` calls (counted from 0) that are refused.
        num_calls: `allocate` calls so far that asked for at least one block.
    """

    can_share = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        bus: EventBus,
        *,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int = 1,
    ) -> None:
        super().__init__(num_blocks, block_size, bus, windows)
        self.refuse_calls: set[int] = set()
        self.num_calls = 0
        self._max_step_tokens = max_step_tokens

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Physical blocks in the pool."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: unused ones, cached or not."""
        return self.pool.num_free

    @property
    def kv_usage(self) -> float:
        """Share of the pool in use, 0 to 1. Cached blocks that nobody uses count as free."""
        return 1.0 - self.pool.num_unused / self.pool.num_blocks

    def peak_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens holds at once: a window needs no more than itself."""
        if not self._slides:
            return self.blocks_for(num_tokens) * len(self.windows)
        most = 0
        for window in self.windows:
            seen = num_tokens if window is None else min(num_tokens, window + self._max_step_tokens)
            most += self.blocks_for(seen) + (seen < num_tokens)
        return most

    def num_needed(self, num_tokens: int, max_total_tokens: int) -> int:
        """`peak_blocks`: nothing is reserved for tokens to come."""
        return self.peak_blocks(num_tokens)

    def why_never(self, num_tokens: int, max_total_tokens: int) -> str | None:
        """Why even the empty pool could not hold the request's `num_tokens` tokens."""
        needed = self.peak_blocks(num_tokens)
        if needed <= self.num_blocks:
            return None
        return f"{num_tokens} tokens need {needed} blocks of {self.block_size}, the whole pool has {self.num_blocks}"

    def shortage(
        self, keys: Sequence[BlockKey], num_tokens: int, max_total_tokens: int, spare: int
    ) -> str | None:
        """Why a request cannot come in now, leaving `spare` blocks free: "needs 3 blocks, 1 free"."""
        needed, free = self.peak_blocks(num_tokens), self.num_free
        if needed + spare <= free:
            return None
        shared = idle = 0
        if keys and len(self.pool.cache):
            for row in self.pool.cache.find(keys, (num_tokens - 1) // self.block_size):
                held = [block_id for block_id in row if block_id != GONE]
                shared += len(held)
                idle += sum(map(self.pool.is_for_hire, held))
        if needed - shared + spare <= free - idle:
            return None
        cached = f" beside {shared} cached" if shared else ""
        return f"needs {count(needed - shared, 'block')}{cached}, {free - idle} free"

    def num_cached(self, keys: Sequence[BlockKey], num_tokens: int) -> int:
        """Tokens of a request that `attach` would find now."""
        limit = (num_tokens - 1) // self.block_size
        return len(self.pool.cache.find(keys, limit)[0]) * self.block_size if keys else 0

    # -- a request's blocks ---------------------------------------------------------------------------------------

    def attach(self, rid: str, keys: Sequence[BlockKey], num_tokens: int) -> tuple[int, str]:
        """Share the longest cached prefix of a request without tables. Returns its tokens, and why it is no more.

        The last token is always computed, whatever is cached: its logits are wanted.
        """
        limit = (num_tokens - 1) // self.block_size
        rows = self.pool.cache.find(keys, limit)
        length = len(rows[0])
        why = self.pool.cache.why_no_more(keys, length, limit)
        if length:
            self._share(rid, rows, length, length * self.block_size)
        return length * self.block_size, why

    def fork(self, parent: str, rid: str, num_tokens: int) -> None:
        """Give a request without tables the first `num_tokens` tokens of `parent`, the last block perhaps partly."""
        rows = [tables[parent][: self.blocks_for(num_tokens)] for tables in self._tables]
        published = min(self._num_published.get(parent, 0), num_tokens // self.block_size)
        self._share(rid, rows, published, num_tokens)
        self._forked |= {parent, rid}

    def allocate(
        self,
        rid: str,
        num_tokens: int,
        *,
        start: int | None = None,
        max_total_tokens: int | None = None,
        asked: bool = False,
    ) -> tuple[int, ...]:
        """Grow the request's tables until they cover `num_tokens` tokens. Returns the new block ids.

        `start` is the first position that will be written: a block there that others read too is copied first, and
        blocks that a window has left are given back. Without it only new blocks are written. `asked`: `ask` was called.

        Raises:
            OutOfBlocks: fewer blocks are free than needed (or the call was refused by fault injection).
        """
        if self._slides and start is not None:
            self._slide(rid, start)
        shared = () if start is None else self._shared_at(rid, start)
        missing = max(0, self.blocks_for(num_tokens) - len(self._tables[0].get(rid, ())))
        if not missing and not shared:
            return ()
        needed = missing * len(self._tables) + len(shared)
        if not asked:
            self.ask(needed)
        if needed > self.num_free:
            raise OutOfBlocks(needed, self.num_free)
        new = self.pool.pop(needed, rid)
        for (group, logical), block_id in zip(shared, new, strict=False):
            self._copy_on_write(rid, group, logical, block_id)
        if missing:
            for group in range(len(self._tables)):
                first = len(shared) + group * missing
                self._append(rid, group, tuple(new[first : first + missing]))
        return tuple(new)

    def restore(self, rid: str, num_tokens: int, max_total_tokens: int) -> list[int]:
        """Blocks for a request that comes back with `num_tokens` tokens, in the order of `kept_blocks`.

        Raises:
            OutOfBlocks: as `allocate`.
        """
        end = self.blocks_for(num_tokens)
        firsts = [min(first_in_window(w, num_tokens, self.block_size), end) for w in self.windows]
        needed = sum(end - first for first in firsts)
        self.ask(needed)
        if needed > self.num_free:
            raise OutOfBlocks(needed, self.num_free)
        new = self.pool.pop(needed, rid)
        taken = 0
        for group, first in enumerate(firsts):
            self._append(rid, group, tuple(new[taken : taken + end - first]), first)
            taken += end - first
        return new

    # -- the prefix cache -----------------------------------------------------------------------------------------

    def publish(
        self,
        rid: str,
        keys: Sequence[BlockKey],
        num_tokens: int,
        retain: Sequence[tuple[int, int, int, float]] = (),
        *,
        is_first: bool = False,
    ) -> None:
        """The first `num_tokens` tokens of the request are written: their full blocks may be shared from now on.

        `retain` holds (first token, end, priority, until) of ranges that shall stay longer than others, or less long.
        With `is_first` that counts for the blocks that the request has found, too, where it makes them stay longer.
        A block whose key is cached already stays private.
        """
        first, end = self._num_published.get(rid, 0), min(num_tokens // self.block_size, len(keys))
        if end <= first and not (retain and is_first):
            return
        self._num_published[rid] = max(first, end)
        for group, tables in enumerate(self._tables):
            table = tables[rid]
            run = [
                i
                for i in range(first, end)
                if table[i] != GONE and self.pool.cache.add(table[i], group, keys[i])
            ]
            if self._bus.subs:
                for start, stop in _stretches(run):
                    parent = keys[start - 1].id if start else -1
                    ids = tuple(key.id for key in keys[start:stop])
                    self._bus.emit(ev.Cache(rid, tuple(table[start:stop]), ids, parent, group))
            if retain:
                self._retain([*range(first if is_first else 0), *run], table, set(run), retain)

    def _retain(
        self,
        chosen: Sequence[int],
        table: Sequence[int],
        new: set[int],
        retain: Sequence[tuple[int, int, int, float]],
    ) -> None:
        """Wishes for logical blocks: new ones get what is asked, others are not to be evicted sooner than before."""
        is_more = self.pool.cache.is_more
        for start, stop, priority, until in retain:
            inside = [i for i in chosen if start <= i * self.block_size < stop]
            blocks = [table[i] for i in inside if i in new or is_more(table[i], priority, until)]
            self.pool.retain(blocks, priority, until)

    def expire(self, now: float) -> None:
        """Retention that has run out by `now` ends."""
        self.pool.expire(now)

    def release_pins(self) -> bool:
        """Make pinned blocks ordinary ones: otherwise nobody could run. Returns whether there were any."""
        return self.pool.release_pins()

    def reset_prefix_cache(self, why: str) -> bool:
        """Forget everything cached. Refused (False) while any block is in use: its reader may share it."""
        return self.pool.reset(why)

    # -- moving ---------------------------------------------------------------------------------------------------

    def plan_resize(self, num_blocks: int) -> list[BlockOp]:
        """The moves that a pool of `num_blocks` blocks needs first.

        Raises:
            OutOfBlocks: more blocks are in use.
        """
        held = self.num_blocks - self.pool.num_unused
        if held > num_blocks:
            raise OutOfBlocks(held, num_blocks)
        moves = self.pool.plan_resize(num_blocks)
        return [BlockOp("move", tuple(moves))] if moves else []

    def resize(self, num_blocks: int, ops: Sequence[BlockOp]) -> None:
        """The runner has run what `plan_resize` asked for: take the new places and the new size."""
        moves = dict(pair for op in ops for pair in op.pairs)
        self.pool.resize(num_blocks, list(moves.items()))
        self._move(moves, f"the pool shrinks to {num_blocks} blocks")

    def plan_compact(self) -> list[BlockOp]:
        """None: any free block is as good as another."""
        return []

    def compact(self, ops: Sequence[BlockOp], why: str) -> None:
        """Nothing to do."""

    # -- the plan being made --------------------------------------------------------------------------------------

    def take_overwritten(self) -> list[int]:
        """Blocks that the plan just made hands out though a cancel would want their contents back."""
        return self.pool.take_overwritten()

    def take_ops(self) -> list[BlockOp]:
        """The block operations asked for since the last call, in order."""
        ops, self.ops = self.ops, []
        return ops

    def __repr__(self) -> str:
        used = self.num_blocks - self.pool.num_unused
        return f"BlockManager({used} of {self.num_blocks} blocks used, block_size={self.block_size})"


def _stretches(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """(first, end) of the runs of consecutive numbers: a twin in the middle of a chain stays private."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found
