"""What the scheduler asks of KV memory, however it is laid out: one protocol, paged and contiguous allocators.

The block manager (`memory.blocks`) is the paged one; `memory.contiguous` reserves extents instead. All hand out
block tables of physical ids, so kernels, views and checks are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagedinfer.memory.journal import Journal
from pagedinfer.memory.keys import BlockKey
from pagedinfer.memory.ops import BlockOp

__all__ = ["KVAllocator"]


class KVAllocator(Protocol):
    """Blocks for requests. Every method either does all of its work or changes nothing.

    While `journal` is set each change records its inverse there. `ops` are block operations asked for since the last
    `take_ops`; `can_share` says whether tables may hold the same block; `tables` are the block tables by request id
    (of group 0), read-only.
    """

    block_size: int
    journal: Journal | None
    refuse_calls: set[int]
    num_calls: int
    ops: list[BlockOp]
    can_share: bool
    tables: dict[str, list[int]]

    @property
    def num_blocks(self) -> int:
        """Physical blocks in the pool."""
        ...

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses: cached blocks that may be evicted count, reserved ones do not."""
        ...

    @property
    def kv_usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        ...

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps partly."""
        ...

    def table(self, rid: str) -> list[int]:
        """The request's block table, read-only; empty when it holds nothing."""
        ...

    def is_covered(self, rid: str, position: int) -> bool:
        """Whether `position` can be written without any change of tables: a quick look before `allocate`."""
        ...

    def num_missing(self, rid: str, num_tokens: int) -> int:
        """Blocks to add so that the request's table covers `num_tokens` tokens; 0 when it does already."""
        ...

    def num_needed(self, num_tokens: int, max_total_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` holds, and gets when it comes in."""
        ...

    def why_never(self, num_tokens: int, max_total_tokens: int) -> str | None:
        """Why even the empty pool could not hold a request of `num_tokens` that may grow to `max_total_tokens`."""
        ...

    def shortage(
        self, keys: Sequence[BlockKey], num_tokens: int, max_total_tokens: int, spare: int
    ) -> str | None:
        """Why a request without a table cannot come in now, leaving `spare` blocks free: "needs 3 blocks, 1 free"."""
        ...

    def attach(self, rid: str, keys: Sequence[BlockKey], num_tokens: int) -> tuple[int, str]:
        """Give a request without a table the cached blocks of its prefix.

        Returns the tokens that need no computing (fewer than `num_tokens`), and why it is not more.
        """
        ...

    def allocate(
        self,
        rid: str,
        num_tokens: int,
        *,
        start: int | None = None,
        max_total_tokens: int | None = None,
        asked: bool = False,
    ) -> tuple[int, ...]:
        """Grow the request's table until it covers `num_tokens` tokens. Returns the new block ids.

        `start` is the first position that will be written: a block there that others hold too is copied first
        (default: only new blocks are written). `max_total_tokens` is what the request may grow to, which allocators
        that reserve take now. `asked`: `ask` was called for it.

        Raises:
            OutOfBlocks: there is no room (or the call was refused by fault injection).
        """
        ...

    def restore(self, rid: str, num_tokens: int, max_total_tokens: int) -> list[int]:
        """Blocks for a request without a table that comes back with `num_tokens` tokens, in `kept_blocks`' order.

        Raises:
            OutOfBlocks: as `allocate`.
        """
        ...

    def kept_blocks(self, rid: str, num_tokens: int) -> list[int]:
        """The blocks, group by group, that the token after the first `num_tokens` sees: what a swap has to keep."""
        ...

    def reaches(self, rid: str, position: int) -> bool:
        """Whether the request holds all blocks that a query at `position` sees, as far as it has come."""
        ...

    def fork(self, parent: str, rid: str, num_tokens: int) -> None:
        """Give a request without a table the first `num_tokens` tokens of `parent`, sharing its blocks.

        Where these are not all that the parent has written, the next call is the `allocate` that parts them: a block
        with one holder is written in place, and a cancelled plan may give it back to the other.
        """
        ...

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

        `retain` holds (first token, end, priority, until) of ranges with another retention priority; with `is_first`,
        the first call since the request came in, for the blocks that it found there, too.
        """
        ...

    def trim(self, rid: str, num_tokens: int) -> None:
        """Give back the blocks at the table's end that `num_tokens` tokens do not need."""
        ...

    def free(self, rid: str, why: str) -> tuple[int, ...]:
        """Take the request's table back. Returns the blocks that nobody holds any more."""
        ...

    def ask(self, needed: int) -> None:
        """Count a call that wants `needed` blocks; fault injection may refuse it (OutOfBlocks)."""
        ...

    def group_tables(self, rid: str) -> Sequence[list[int]]:
        """The tables of groups 1 and on; nothing in most models."""
        ...

    def num_cached(self, keys: Sequence[BlockKey], num_tokens: int) -> int:
        """Tokens of a request that `attach` would find now."""
        ...

    def num_freed_with(self, rid: str) -> int:
        """Blocks that nobody else holds."""
        ...

    def expire(self, now: float) -> None:
        """Retention of cached blocks that has run out by `now` ends."""
        ...

    def release_pins(self) -> bool:
        """Make pinned blocks ordinary ones: otherwise nobody could run. Returns whether there were any."""
        ...

    def reset_prefix_cache(self, why: str) -> bool:
        """Forget everything cached. Refused (False) while any block is in use."""
        ...

    def plan_resize(self, num_blocks: int) -> list[BlockOp]:
        """The moves that a pool of `num_blocks` blocks needs first. Raises OutOfBlocks when more are in use."""
        ...

    def resize(self, num_blocks: int, ops: Sequence[BlockOp]) -> None:
        """The runner has run what `plan_resize` asked for: take the new places and the new size."""
        ...

    def plan_compact(self) -> list[BlockOp]:
        """The moves that slide requests together; none where memory is paged."""
        ...

    def compact(self, ops: Sequence[BlockOp], why: str) -> None:
        """The runner has run what `plan_compact` asked for: take the new places."""
        ...

    def take_overwritten(self) -> list[int]:
        """Blocks that the plan just made hands out though a cancel would want their contents back."""
        ...

    def take_ops(self) -> list[BlockOp]:
        """The block operations asked for since the last call, in order."""
        ...

    def snapshot(self) -> dict[str, object]:
        """The whole state as plain data."""
        ...

    def check(self) -> None:
        """Assert every invariant."""
        ...
