"""The free blocks in the order in which they are taken: doubly linked lists over block ids, one per lane.

Lane 0 holds blocks without content worth keeping. Lane 1 + p holds cached blocks of retention priority p; they are
evicted when lane 0 is empty, lowest lane first, the least recently used of a lane first. Not deques, because a block
must leave the middle in O(1) when it is hit again, and come back to the same place when that is taken back. The same
reason and structure as vLLM's `FreeKVCacheBlockQueue`, with TensorRT-LLM's retention priorities as lanes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import pairwise

__all__ = ["NUM_LANES", "FreeQueue"]

NUM_LANES = 103
"""Plain, priorities 0 to 100, and pinned."""

_OUT = -(2**40)


class FreeQueue:
    """Free block ids, first in, first out within a lane. All operations are O(1); links are two int lists.

    The lists end with one sentinel per lane, reached by negative indices: lane 0 is -1. A sentinel's `next` is the
    lane's first block, its `prev` the last.
    """

    def __init__(self, num_blocks: int, block_ids: Iterable[int] | None = None) -> None:
        sentinels = list(range(-NUM_LANES, 0))
        self._next = [_OUT] * num_blocks + sentinels
        self._prev = [_OUT] * num_blocks + sentinels
        self._lanes = [0]  # those ever used, ascending
        self._size = 0
        for block_id in range(num_blocks) if block_ids is None else block_ids:
            self.push_back(block_id)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block_id: int) -> bool:
        return self._next[block_id] != _OUT

    def __iter__(self) -> Iterator[int]:
        for lane in self._lanes:
            yield from self.lane(lane)

    def lane(self, lane: int) -> Iterator[int]:
        """The blocks of one lane, in order."""
        sentinel = -1 - lane
        block_id = self._next[sentinel]
        while block_id != sentinel:
            yield block_id
            block_id = self._next[block_id]

    def lanes(self) -> dict[int, list[int]]:
        """The blocks of each lane above 0 that has any."""
        found = {lane: list(self.lane(lane)) for lane in self._lanes if lane}
        return {lane: blocks for lane, blocks in found.items() if blocks}

    def first(self) -> tuple[int, int]:
        """The next block to take, and its lane."""
        for lane in self._lanes:
            block_id = self._next[-1 - lane]
            if block_id >= 0:
                return block_id, lane
        raise AssertionError("the caller checks that a block is free")

    def pop_front(self) -> int:
        """Take the next block."""
        block_id, _ = self.first()
        self.remove(block_id)
        return block_id

    def push_back(self, block_id: int, lane: int = 0) -> None:
        """Free a block: it will be taken last of its lane."""
        if lane not in self._lanes:
            insort(self._lanes, lane)
        sentinel = -1 - lane
        self._link(self._prev[sentinel], block_id, sentinel)

    def push_front(self, block_id: int) -> None:
        """Free a block that will be taken first."""
        self._link(-1, block_id, self._next[-1])

    def remove(self, block_id: int) -> int:
        """Take a block out from wherever it stands. Returns its place, for `restore`."""
        before, after = self._prev[block_id], self._next[block_id]
        assert after != _OUT and 0 <= block_id < len(self._next) - NUM_LANES, f"block {block_id} is not free"
        self._next[before], self._prev[after] = after, before
        self._next[block_id] = self._prev[block_id] = _OUT
        self._size -= 1
        return before

    def restore(self, block_id: int, place: int) -> None:
        """Take back a `remove`, after everything since has been taken back."""
        self._link(place, block_id, self._next[place])

    def resize(self, num_blocks: int) -> None:
        """Add blocks (all free) or drop the last ones (all free) of the pool."""
        old = len(self._next) - NUM_LANES
        for block_id in range(num_blocks, old):
            self.remove(block_id)
        for links in (self._next, self._prev):
            links[min(old, num_blocks) : old] = [_OUT] * max(0, num_blocks - old)
        for block_id in range(old, num_blocks):
            self.push_back(block_id)

    def copy(self) -> FreeQueue:
        """An independent queue."""
        twin = FreeQueue(0)
        twin._next, twin._prev, twin._lanes, twin._size = (
            list(self._next), list(self._prev), list(self._lanes), self._size,
        )  # fmt: skip
        return twin

    def _link(self, before: int, block_id: int, after: int) -> None:
        assert self._next[block_id] == _OUT, f"block {block_id} is already free"
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = before, after
        self._size += 1

    def check(self) -> None:
        """Assert that the links form one ring per lane, and that each free block is in one of them. O(num_blocks)."""
        seen = list(self)
        assert len(seen) == len(set(seen)) == self._size, "free list: a block twice, or a wrong count"
        for lane in self._lanes:
            ring = [-1 - lane, *self.lane(lane), -1 - lane]
            for before, after in pairwise(ring):
                assert self._prev[after] == before, (
                    f"free list: block {after} does not point back to {before}"
                )
        linked = sum(1 for block_id in range(len(self._next) - NUM_LANES) if block_id in self)
        assert linked == self._size, "free list: a linked block is not reachable"
