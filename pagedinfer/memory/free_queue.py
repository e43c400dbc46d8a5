"""The free blocks in least-recently-freed order: a doubly linked list over block ids.

Not a deque, because a block must leave the middle in O(1): when a plan is cancelled, and later when a cached block
is hit again. The same reason and structure as vLLM's `FreeKVCacheBlockQueue`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["FreeQueue"]

_OUT = -1


class FreeQueue:
    """Free block ids 0..num_blocks-1, first in, first out. All operations are O(1); links are two int lists.

    Index `num_blocks` is the sentinel: its `next` is the first free block, its `prev` the last.
    """

    def __init__(self, num_blocks: int, block_ids: Iterable[int] | None = None) -> None:
        self._next = [_OUT] * num_blocks + [num_blocks]
        self._prev = [_OUT] * num_blocks + [num_blocks]
        self._end = num_blocks
        self._size = 0
        for block_id in range(num_blocks) if block_ids is None else block_ids:
            self.push_back(block_id)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block_id: int) -> bool:
        return self._next[block_id] != _OUT

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[self._end]
        while block_id != self._end:
            yield block_id
            block_id = self._next[block_id]

    def pop_front(self) -> int:
        """Take the block that has been free the longest."""
        assert self._size, "the caller checks that a block is free"
        block_id = self._next[self._end]
        self.remove(block_id)
        return block_id

    def push_back(self, block_id: int) -> None:
        """Free a block: it will be reused last."""
        self._link(self._prev[self._end], block_id, self._end)

    def push_front(self, block_id: int) -> None:
        """Take back a `pop_front`."""
        self._link(self._end, block_id, self._next[self._end])

    def remove(self, block_id: int) -> None:
        """Take a block out from wherever it stands."""
        before, after = self._prev[block_id], self._next[block_id]
        assert after != _OUT, f"block {block_id} is not free"
        self._next[before], self._prev[after] = after, before
        self._next[block_id] = self._prev[block_id] = _OUT
        self._size -= 1

    def _link(self, before: int, block_id: int, after: int) -> None:
        assert self._next[block_id] == _OUT, f"block {block_id} is already free"
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = before, after
        self._size += 1

    def check(self) -> None:
        """Assert that the links form one ring that holds each free block once. O(num_blocks)."""
        seen = list(self)
        assert len(seen) == len(set(seen)) == self._size, "free list: a block twice, or a wrong count"
        for before, after in zip([self._end, *seen], [*seen, self._end], strict=True):
            assert self._prev[after] == before, f"free list: block {after} does not point back to {before}"
        linked = sum(1 for block_id in range(self._end) if block_id in self)
        assert linked == self._size, "free list: a linked block is not reachable"
