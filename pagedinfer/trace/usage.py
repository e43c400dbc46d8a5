"""Where the pool's token slots are: what holds tokens, what is allocated and holds none, what is free.

Cheap enough for every step: the cost grows with the requests that hold blocks, not with the pool or the queues. Every
block in use is full but those at the end of a table, from the token on that is computed next, so only these are looked
at. What cannot be seen from there (shared and cached blocks) the rules of `State` count as they go.
`measures.slots_of` says the same slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pagedinfer.trace.measures import Slots, external_fragmentation

if TYPE_CHECKING:
    from pagedinfer.trace.replay import State

__all__ = ["slots_in", "usage"]


def usage(state: State) -> dict[str, int | float]:
    """Token slots and shares of a state. O(requests that hold blocks).

    Slots: `live_slots` hold tokens of live requests (a shared slot counted once), `shared_slots` are those of them
    that several requests hold, `cached_slots` hold tokens that only the prefix cache keeps, `tail_slack_slots` are
    the empty ends of last blocks, `reserved_slots` are in whole blocks without a token (contiguous allocators only),
    `free_slots` hold nothing worth keeping. They add up to the pool.

    `logical_tokens` counts every request's tokens, shared or not; `sharing_ratio` is that by live slots.
    `kv_usage` is the share of the pool in use, cached blocks counted as free. `kv_waste` = 1 - live slots / allocated
    slots, where cached blocks count as allocated. `external_fragmentation` = 1 - largest free extent / free space.
    """
    slots = slots_in(state)
    paged = state.config.get("allocator", "paged") == "paged"  # where any free block is as good as another
    return {
        "live_slots": slots.live,
        "shared_slots": slots.shared,
        "cached_slots": slots.cached_idle,
        "tail_slack_slots": slots.tail_slack,
        "reserved_slots": slots.reserved,
        "free_slots": (len(state.free) - state.num_idle) * state.block_size,
        "logical_tokens": slots.logical,
        "sharing_ratio": slots.sharing_ratio,
        "kv_usage": len(state.ref_counts) / state.num_blocks if state.num_blocks else 0.0,
        "kv_waste": slots.kv_waste,
        "external_fragmentation": 0.0 if paged else external_fragmentation(_holes(state)),
    }


def slots_in(state: State) -> Slots:
    """Where the allocated token slots of a state are."""
    size, windowed = state.block_size, any(state.config.get("group_windows", ()))
    # Open blocks are not full; those of them with a token are begun. `live` counts the tokens in them.
    logical = num_open = num_begun = live = shared = 0
    ends: dict[int, list[int]] = {}  # open block -> tokens in it, for each table
    for rid in state.holders:
        request = state.requests[rid]
        for table in request.tables():
            num_full, rest = divmod(min(request.num_computed_tokens, len(table) * size), size)
            logical += num_full * size + rest
            if windowed:
                logical -= table[:num_full].count(-1) * size  # full once, until the window left them
            if state.num_shared or windowed:
                for place, block_id in enumerate(table[num_full:]):
                    ends.setdefault(block_id, []).append(0 if place else rest)
            else:
                num_open += len(table) - num_full
                num_begun += rest > 0
                live += rest
    # In the middle of a step's events a table may be longer than what is computed.
    logical -= sum(ends.pop(-1, ()))
    num_shared_full = state.num_shared
    for block_id, fills in ends.items():
        holders, fill = state.ref_counts[block_id], max(fills)
        if len(fills) == holders:  # else it is full in another table
            num_open += 1
            num_begun += fill > 0
            live += fill
            num_shared_full -= holders > 1
            shared += fill if holders > 1 else 0
    tail_slack, reserved = num_begun * size - live, (num_open - num_begun) * size
    live += (len(state.ref_counts) - num_open) * size
    shared += num_shared_full * size
    return Slots(live, tail_slack, reserved, state.num_idle * size, logical, shared)


def _holes(state: State) -> Iterator[tuple[int, int]]:
    """Free extents of contiguous memory: what lies between the requests'."""
    end = 0
    for table in sorted(filter(None, (state.requests[rid].block_table for rid in state.holders))):
        if table[0] > end:
            yield end, table[0] - end
        end = table[0] + len(table)
    if end < state.num_blocks:
        yield end, state.num_blocks - end
