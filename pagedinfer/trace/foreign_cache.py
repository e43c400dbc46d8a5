"""Blocks for the hashes of another engine's prefix cache, whose events name no blocks."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from pagedinfer.errors import RecordingError
from pagedinfer.trace.schema import MAX_BLOCK_SIZE
from pagedinfer.trace.vllm_lines import Hash, Removed, Stored

__all__ = ["ForeignCache", "Run"]


@dataclass(slots=True)
class Run:
    """Blocks that one event publishes: consecutive in their chain."""

    pblks: list[int]
    keys: list[int]
    parent: int


class ForeignCache:
    """Which block stands for which hash. `skipped` counts what a recording has no place for."""

    def __init__(self, skipped: Counter[str]) -> None:
        self.block_size: int | None = None
        self.peak = 0
        self.skipped = skipped
        self._keys: dict[Hash, int] = {}
        self._blocks: dict[int, int] = {}  # key -> block
        self._copies = Counter[int]()  # key -> times stored: vLLM may hold the same tokens in several blocks
        self._free: list[int] = []

    def _key(self, value: Hash) -> int:
        return self._keys.setdefault(value, len(self._keys))

    def takes(self, event: Stored | Removed) -> bool:
        """Whether the event is about the GPU's blocks of the first cache group: others have no place here."""
        if event.medium != "GPU":
            self.skipped[f"blocks of {event.medium}"] += len(event.hashes)
        elif event.group:
            self.skipped[f"blocks of cache group {event.group}"] += len(event.hashes)
        return event.medium == "GPU" and not event.group

    def store(self, event: Stored) -> list[Run]:
        """Give a block to each hash that has none."""
        self._check_block_size(event.block_size)
        runs: list[Run] = []
        parent, follows = -1 if event.parent is None else self._key(event.parent), False
        for key in map(self._key, event.hashes):
            self._copies[key] += 1
            if self._copies[key] > 1:
                follows = False
            else:
                block_id = heapq.heappop(self._free) if self._free else self.peak
                self.peak = max(self.peak, block_id + 1)
                self._blocks[key] = block_id
                if not follows:
                    runs.append(Run([], [], parent))
                runs[-1].pblks.append(block_id)
                runs[-1].keys.append(key)
                follows = True
            parent = key
        return runs

    def _check_block_size(self, block_size: int) -> None:
        if self.block_size not in (None, block_size):
            raise RecordingError(
                f"Blocks of {self.block_size} and of {block_size} tokens: a recording has one block size."
            )
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise RecordingError(
                f"block_size {block_size}: a recording holds blocks of 1 to {MAX_BLOCK_SIZE} tokens."
            )
        self.block_size = block_size

    def remove(self, event: Removed) -> list[int]:
        """Blocks whose last copy left. Unknown hashes were stored before the lines begin, or in what is missing."""
        gone = []
        for value in event.hashes:
            key = self._keys.get(value, -1)
            if not self._copies[key]:
                self.skipped["removals of unknown blocks"] += 1
                continue
            self._copies[key] -= 1
            if not self._copies[key]:
                gone.append(self._blocks.pop(key))
        for block_id in gone:
            heapq.heappush(self._free, block_id)
        return gone

    def clear(self) -> list[int]:
        """All blocks, in the order in which they came."""
        gone = list(self._blocks.values())
        self._blocks.clear()
        self._copies.clear()
        self._free = sorted([*self._free, *gone])
        return gone
