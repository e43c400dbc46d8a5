"""The prefix cache: which blocks hold tokens that another request may begin with, and why a look-up missed.

A full, written block is published under its key. It stays cached when nobody uses it any more, until the pool needs
it (hash-based automatic prefix caching as in vLLM; a radix tree over the same tokens is SGLang's RadixAttention).
Freed tail first, a chain is evicted from its tail, so what is cached is always worth a look-up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush

from pagedinfer.memory.keys import BlockKey

__all__ = ["DEFAULT_PRIORITY", "PINNED", "PrefixCache"]

DEFAULT_PRIORITY, PINNED = 50, 101
"""Retention priorities are 0 to 100. A pinned block is not evicted unless otherwise nobody could run."""


class PrefixCache:
    """Keys of blocks, both ways, per group of layers. Pure look-up: it neither counts references nor frees.

    Attributes:
        keys: cached block -> (group, key).
        retained: cached block -> (priority, until) where it is not the default; until -1: no end.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None]) -> None:
        self.keys: dict[int, tuple[int, BlockKey]] = {}
        self.retained: dict[int, tuple[int, float]] = {}
        self._block_size = block_size
        self._windows = windows
        self._blocks: list[dict[BlockKey, int]] = [{} for _ in windows]
        self._ghosts: OrderedDict[BlockKey, str] = OrderedDict()
        self._ends: list[tuple[float, int, int]] = []  # (until, number of the wish, block)
        self._num_wishes = 0

    def __len__(self) -> int:
        return len(self.keys)

    def lane(self, block_id: int) -> int:
        """The lane of the free queue that the block belongs into: 0 when it is not cached."""
        if block_id not in self.keys:
            return 0
        return 1 + self.retained.get(block_id, (DEFAULT_PRIORITY, -1))[0]

    def block(self, group: int, key: BlockKey) -> int | None:
        """The block that holds what `key` stands for."""
        return self._blocks[group].get(key)

    def find(self, keys: Sequence[BlockKey], limit: int) -> list[list[int]]:
        """Blocks of the longest cached prefix, `limit` blocks at most: a row per group, -1 left of its window."""
        whole = [i for i, window in enumerate(self._windows) if window is None]
        length = min(limit, len(keys))
        for group in whole:
            found = self._blocks[group]
            length = next((i for i in range(length) if keys[i] not in found), length)
        while length and not all(self._in_window(group, keys, length) for group in range(len(self._windows))):
            length -= 1
        return [
            [
                -1 if i < self.first_needed(group, length) else self._blocks[group][keys[i]]
                for i in range(length)
            ]
            for group in range(len(self._windows))
        ]

    def first_needed(self, group: int, num_blocks: int) -> int:
        """First block that the token after `num_blocks` full blocks still sees."""
        return first_in_window(self._windows[group], num_blocks * self._block_size, self._block_size)

    def _in_window(self, group: int, keys: Sequence[BlockKey], length: int) -> bool:
        if self._windows[group] is None:
            return True  # the whole chain has been seen
        found = self._blocks[group]
        return all(keys[i] in found for i in range(self.first_needed(group, length), length))

    def why_no_more(self, keys: Sequence[BlockKey], length: int, limit: int) -> str:
        """Why a look-up of `keys` ended after `length` blocks."""
        if limit == 0:
            return "no full block before the last token"
        if not keys:  # those of a prompt that is scored are left out, so that all of it is computed
            return "it has no block keys: its prompt is scored, or it came without tokens"
        if length >= len(keys):
            return "no more full blocks"
        if length == limit:
            return "the last token is always computed"
        key, first = keys[length], length * self._block_size
        what = f"block {length} (tokens {first} to {first + self._block_size - 1})"
        if key in self._ghosts:
            return f"{what} was {self._ghosts[key]}"
        return f"{what} is new"

    def add(self, block_id: int, group: int, key: BlockKey) -> bool:
        """Publish a block; False when another block holds the same, so that this twin stays private."""
        if key in self._blocks[group]:
            return False
        self._blocks[group][key] = block_id
        self.keys[block_id] = (group, key)
        self._ghosts.pop(key, None)
        return True

    def forget(self, block_id: int, why: str, limit: int) -> tuple[int, BlockKey, tuple[int, float] | None]:
        """The block's content is gone: `why` completes "was ...". Remembers the last `limit` such keys."""
        group, key = self.keys.pop(block_id)
        assert self._blocks[group].pop(key) == block_id, (
            f"key {key.id} points to another block than {block_id}"
        )
        self._ghosts[key] = why
        while len(self._ghosts) > limit:
            self._ghosts.popitem(last=False)
        return group, key, self.retained.pop(block_id, None)

    def recall(self, block_id: int, group: int, key: BlockKey, retained: tuple[int, float] | None) -> None:
        """Take back a `forget`, unless another block has been published under the key."""
        if key in self._blocks[group]:
            return
        self.keys[block_id] = (group, key)
        self._blocks[group][key] = block_id
        self._ghosts.pop(key, None)
        if retained is not None:
            self.retain(block_id, *retained)  # its end may have come and gone meanwhile

    def move(self, source: int, to: int) -> None:
        """What `source` held is in block `to` now."""
        if source in self.keys:
            group, key = self.keys[to] = self.keys.pop(source)
            self._blocks[group][key] = to
        if source in self.retained:
            self.retain(to, *self.retained.pop(source))

    def retain(self, block_id: int, priority: int, until: float) -> None:
        """Give a cached block another priority until a time (-1: no end)."""
        self.retained[block_id] = (priority, until)
        self._num_wishes += 1
        if until >= 0:
            heappush(self._ends, (until, self._num_wishes, block_id))

    def is_more(self, block_id: int, priority: int, until: float) -> bool:
        """Whether a block is cached, and would stay longer than now, or be evicted later."""
        known, known_until = self.retained.get(block_id, (DEFAULT_PRIORITY, -1))
        longer = known_until >= 0 and not 0 <= until <= known_until
        return block_id in self.keys and (priority > known or (priority == known and longer))

    def take_expired(self, now: float) -> list[int]:
        """Blocks whose retention has ended by `now`, in the order of the wishes; they are still in `retained`."""
        found: list[int] = []
        while self._ends and self._ends[0][0] <= now:
            until, _, block_id = heappop(self._ends)
            if self.retained.get(block_id, (0, -1))[1] == until and block_id not in found:
                found.append(block_id)
        return found

    def check(self) -> None:
        """Assert that keys and blocks point at each other, and that only cached blocks are retained."""
        assert len(self.keys) == sum(map(len, self._blocks)), "a cached block without its key, or a key twice"
        for group, blocks in enumerate(self._blocks):
            for key, block_id in blocks.items():
                assert self.keys.get(block_id) == (group, key), (
                    f"key {key.id} points to block {block_id}, not back"
                )
        assert self.retained.keys() <= self.keys.keys(), "a block is retained and not cached"
        ends = {(until, block_id) for until, _, block_id in self._ends}
        for block_id, (_, until) in self.retained.items():
            assert until < 0 or (until, block_id) in ends, f"retention of block {block_id} never ends"


def first_in_window(window: int | None, position: int, block_size: int) -> int:
    """First logical block that a query at `position` or later sees."""
    return 0 if window is None else max(0, (position - window + 1) // block_size)
