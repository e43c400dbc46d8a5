"""How many blocks the KV pool gets: asked for in blocks, in bytes, or as a share of memory."""

from __future__ import annotations

from pathlib import Path

import torch

from pagedinfer.errors import ConfigError

__all__ = ["check_pool_size", "choose_num_blocks", "memory_limit_bytes"]

DEFAULT_SHARE = 0.1
"""Of the memory, for the pool, when nothing is asked for and the requests could use that much."""


def memory_limit_bytes(device: torch.device) -> int:
    """Memory that this process may use: of the GPU, or of the container (cgroup v2 or v1) or machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [_read_int(Path("/sys/fs/cgroup/memory.max"))]
    limits.append(_read_int(Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")))
    limits.append(_machine_bytes())
    return min(limit for limit in limits if limit)


def _read_int(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit
        return 0


def _machine_bytes() -> int:
    try:
        import os

        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return 4 << 30


def check_pool_size(
    *,
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    memory_share: float | None = None,
) -> None:
    """Check what is asked of the pool; needs no model.

    Raises:
        ConfigError: two sizes were given, or one is out of range.
    """
    given = {
        "num_blocks": num_blocks,
        "kv_cache_bytes": kv_cache_bytes,
        "gpu_memory_utilization": memory_share,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} both size the KV pool; give one of them.")
    for name, value in given.items():
        if value is None:
            continue
        if name == "gpu_memory_utilization":
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
                raise ConfigError(f"{name}={value!r}: it must be above 0 and at most 1.")
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}: it must be an integer of at least 1.")


def choose_num_blocks(
    *,
    bytes_per_block: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    weight_bytes: int,
    device: torch.device,
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    memory_share: float | None = None,
) -> int:
    """Blocks in the pool. At most one of the last three may be given; by default what all seats could fill,
    but no more than a tenth of the memory.

    `memory_share` counts weights and pool together, as vLLM's `gpu_memory_utilization` does.

    Raises:
        ConfigError: two sizes were given, or the size is less than one block.
    """
    check_pool_size(num_blocks=num_blocks, kv_cache_bytes=kv_cache_bytes, memory_share=memory_share)
    if num_blocks is not None:
        return num_blocks
    if kv_cache_bytes is not None:
        budget, what = kv_cache_bytes, f"kv_cache_bytes={kv_cache_bytes}"
    elif memory_share is not None:
        budget = int(memory_share * memory_limit_bytes(device)) - weight_bytes
        what = (
            f"gpu_memory_utilization={memory_share} leaves {budget} bytes beside the weights' {weight_bytes}"
        )
    else:
        wanted = max_num_seqs * -(-max_model_len // block_size)
        budget = int(DEFAULT_SHARE * memory_limit_bytes(device))
        return max(1, min(wanted, budget // bytes_per_block))
    if budget < bytes_per_block:
        raise ConfigError(
            f"{what}: one block of {block_size} tokens takes {bytes_per_block} bytes; give more."
        )
    return budget // bytes_per_block
