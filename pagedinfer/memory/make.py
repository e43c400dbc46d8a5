"""Which allocator a config names."""

from __future__ import annotations

from collections.abc import Callable

from pagedinfer.config import EngineConfig
from pagedinfer.errors import ConfigError
from pagedinfer.memory.allocator import KVAllocator
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.contiguous import ContiguousAllocator
from pagedinfer.memory.extents import LearnerFit
from pagedinfer.trace.bus import EventBus

__all__ = ["MakeMemory", "make_allocator"]


MakeMemory = Callable[[EngineConfig, EventBus], KVAllocator]
"""What an engine may be given to make its memory with, in place of `make_allocator`."""


def make_allocator(config: EngineConfig, bus: EventBus, fit: LearnerFit | None = None) -> KVAllocator:
    """Paged memory, or a contiguous strategy; `fit(holes, size)` takes the place of its choice of a hole.

    Raises:
        ConfigError: a fit for memory that has no such choice.
    """
    if config.allocator == "paged" and fit is not None:
        raise ConfigError("fit chooses among holes and paged memory has none; name a contiguous allocator.")
    if config.allocator != "paged":
        return ContiguousAllocator(
            config.allocator,
            config.num_blocks,
            config.block_size,
            config.max_model_len,
            bus,
            compaction=config.compaction,
            fit=fit,
        )
    return BlockManager(
        config.num_blocks,
        config.block_size,
        bus,
        windows=config.group_windows,
        max_step_tokens=config.max_num_batched_tokens,
    )
