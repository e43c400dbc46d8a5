"""Where the pool's token slots are: what holds tokens, what is allocated and holds none, what is free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedinfer.trace.measures import external_fragmentation, free_extents, slots_of

if TYPE_CHECKING:
    from pagedinfer.trace.replay import State

__all__ = ["usage"]


def usage(state: State) -> dict[str, int | float]:
    """Token slots and shares of a state.

    Slots: `live_slots` hold tokens of live requests (a shared slot counted once), `shared_slots` are those of them
    that several requests hold, `cached_slots` hold tokens that only the prefix cache keeps, `tail_slack_slots` are
    the empty ends of last blocks, `reserved_slots` are in whole blocks without a token (contiguous allocators only),
    `free_slots` hold nothing worth keeping. They add up to the pool.

    `logical_tokens` counts every request's tokens, shared or not; `sharing_ratio` is that by live slots.
    `kv_usage` is the share of the pool in use, cached blocks counted as free. `kv_waste` = 1 - live slots / allocated
    slots, where cached blocks count as allocated. `external_fragmentation` = 1 - largest free extent / free space.
    """
    size, idle = state.block_size, sum(1 for block_id in state.cached if block_id not in state.ref_counts)
    tables, written = {}, {}
    for rid, request in state.requests.items():
        for group, table in enumerate(request.tables()):
            tables[rid, group] = table
            written[rid, group] = request.num_computed_tokens
    slots = slots_of(tables, written, size, idle)
    paged = state.config.get("allocator", "paged") == "paged"  # where any free block is as good as another
    return {
        "live_slots": slots.live,
        "shared_slots": slots.shared,
        "cached_slots": slots.cached_idle,
        "tail_slack_slots": slots.tail_slack,
        "reserved_slots": slots.reserved,
        "free_slots": (len(state.free) - idle) * size,
        "logical_tokens": slots.logical,
        "sharing_ratio": slots.sharing_ratio,
        "kv_usage": len(state.ref_counts) / state.num_blocks if state.num_blocks else 0.0,
        "kv_waste": slots.kv_waste,
        "external_fragmentation": 0.0 if paged else external_fragmentation(free_extents(state.free)),
    }
