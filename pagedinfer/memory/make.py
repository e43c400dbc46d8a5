"""Which allocator a config names."""

from __future__ import annotations

from collections.abc import Callable

from pagedinfer.config import EngineConfig
from pagedinfer.memory.allocator import KVAllocator
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.contiguous import ContiguousAllocator
from pagedinfer.trace.bus import EventBus

__all__ = ["MakeAllocator", "make_allocator"]

MakeAllocator = Callable[[EngineConfig, EventBus], KVAllocator]
"""`allocator(config, bus)`: what an engine takes in place of `make_allocator`, for an allocator of one's own."""


def make_allocator(config: EngineConfig, bus: EventBus) -> KVAllocator:
    """Paged memory, or a contiguous strategy."""
    if config.allocator != "paged":
        return ContiguousAllocator(
            config.allocator,
            config.num_blocks,
            config.block_size,
            config.max_model_len,
            bus,
            compaction=config.compaction,
        )
    return BlockManager(
        config.num_blocks,
        config.block_size,
        bus,
        windows=config.group_windows,
        max_step_tokens=config.max_num_batched_tokens,
    )
