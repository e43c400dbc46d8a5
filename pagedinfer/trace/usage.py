"""Where the pool's token slots are: what holds tokens, what is allocated and holds none, what is free."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    size = state.block_size
    slots: dict[int, int] = {}
    logical = 0
    for rid, request in state.requests.items():
        fill = state.fill(rid)
        for table in request.tables():
            for logical_block, block_id in enumerate(table):
                if block_id >= 0:
                    tokens = fill[logical_block]
                    logical += tokens
                    slots[block_id] = max(tokens, slots.get(block_id, 0))
    live = sum(slots.values())
    shared = sum(tokens for block_id, tokens in slots.items() if state.ref_counts[block_id] > 1)
    reserved = sum(size for tokens in slots.values() if not tokens)
    used = len(state.ref_counts)
    idle = sum(1 for block_id in state.cached if block_id not in state.ref_counts)
    allocated = (used + idle) * size
    return {
        "live_slots": live,
        "shared_slots": shared,
        "cached_slots": idle * size,
        "tail_slack_slots": used * size - live - reserved,
        "reserved_slots": reserved,
        "free_slots": (len(state.free) - idle) * size,
        "logical_tokens": logical,
        "sharing_ratio": logical / live if live else 1.0,
        "kv_usage": used / state.num_blocks if state.num_blocks else 0.0,
        "kv_waste": 1 - live / allocated if allocated else 0.0,
        "external_fragmentation": _external_fragmentation(state),
    }


def _external_fragmentation(state: State) -> float:
    """0 for paged memory, where any free block is as good as another."""
    if state.config.get("allocator", "paged") == "paged" or not len(state.free):
        return 0.0
    largest = run = 0
    for block_id in range(state.num_blocks):
        run = run + 1 if block_id in state.free else 0
        largest = max(largest, run)
    return 1 - largest / len(state.free)
