"""Measures of the pool: small pools by hand, residency by stories."""

import pytest

from pagedinfer.memory.contiguous import ContiguousAllocator
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.measures import (
    Residency,
    Slots,
    external_fragmentation,
    free_extents,
    residency,
    slots_of,
)

# -- slots --------------------------------------------------------------------------------------------------------


def test_parts_by_hand():
    slots = slots_of({"a": [0, 1, 2], "b": [5]}, {"a": 6, "b": 1}, block_size=4, num_cached_idle=2)
    assert slots == Slots(live=7, tail_slack=2 + 3, reserved=4, cached_idle=8, logical=7)
    assert slots.allocated == 24
    assert slots.kv_waste == 1 - 7 / 24
    assert slots.sharing_ratio == 1.0
    parts = slots.tail_slack_share + slots.reserved_share + slots.cached_idle_share
    assert parts == pytest.approx(slots.kv_waste)
    assert (slots.tail_slack_share, slots.reserved_share, slots.cached_idle_share) == (5 / 24, 4 / 24, 8 / 24)


def test_a_shared_slot_counts_once():
    tables, written = {"a": [0, 1], "b": [0, 1], "c": [0, 2]}, {"a": 7, "b": 6, "c": 5}
    slots = slots_of(tables, written, block_size=4)
    assert slots == Slots(live=4 + 3 + 1, tail_slack=1 + 3, logical=18, shared=4 + 3)
    assert slots.sharing_ratio == 18 / 8


def test_blocks_that_a_window_has_left_hold_nothing():
    assert slots_of({"a": [-1, -1, 7]}, {"a": 10}, block_size=4) == Slots(live=2, tail_slack=2, logical=2)


def test_an_empty_pool_wastes_nothing():
    assert (Slots().kv_waste, Slots().sharing_ratio, Slots().reserved_share) == (0.0, 1.0, 0.0)
    assert slots_of({}, {}, 16) == Slots()
    assert slots_of({"a": [3]}, {"a": 0}, 4) == Slots(reserved=4)


def test_what_reserving_the_maximum_wastes():
    """The picture of the PagedAttention paper in four numbers: reserved ahead, little of it used."""
    blocks = ContiguousAllocator("reserve-max", 64, 16, 256, EventBus())
    for rid in "abcd":
        blocks.allocate(rid, 40, max_total_tokens=60)
    slots = slots_of({rid: blocks.table(rid) for rid in "abcd"}, dict.fromkeys("abcd", 40), 16)
    assert (slots.live, slots.tail_slack, slots.reserved) == (160, 4 * 8, 4 * 13 * 16)
    assert slots.kv_waste == 1 - 160 / 1024


# -- holes --------------------------------------------------------------------------------------------------------


def test_external_fragmentation():
    assert free_extents([7, 2, 1, 3, 9, 8]) == [(1, 3), (7, 3)]
    assert free_extents([]) == []
    assert external_fragmentation([]) == 0.0
    assert external_fragmentation([(4, 10)]) == 0.0
    assert external_fragmentation([(0, 5), (7, 2), (11, 3)]) == 0.5
    blocks = ContiguousAllocator("first-fit", 12, 4, 48, EventBus())
    for rid in "abc":
        blocks.allocate(rid, 8)
    blocks.free("b", "finish")
    assert blocks.holes == free_extents(blocks.snapshot()["free"]) == [(2, 2), (6, 6)]
    assert external_fragmentation(blocks.holes) == 0.25


# -- residency ----------------------------------------------------------------------------------------------------


def _at(step, *events):
    for event in events:
        event.step = step
    return list(events)


def _plan(step, *events, end=None):
    return [
        *_at(step, ev.Step(step, float(step), 16, {}, {}), *events),
        *_at(step, end or ev.Commit({})),
    ]


def test_life_time_without_a_cache():
    events = [
        *_plan(1, ev.Alloc("a", 0, 0, (0, 1))),
        *_plan(4, ev.Alloc("a", 0, 2, (2,))),
        *_at(6, ev.Free("a", (2, 1, 0), "finish")),
    ]
    assert residency(events) == Residency(life_times=[2, 5, 5])


def test_reuse_and_eviction():
    events = [
        *_plan(1, ev.Alloc("a", 0, 0, (0, 1))),
        *_at(2, ev.Cache("a", (0, 1), (7, 8), -1), ev.Free("a", (1, 0), "finish")),
        *_plan(5, ev.Hit("b", 4, ""), ev.Share("b", 0, 0, (0,), 4), ev.Evict((1,), ""), ev.Alloc("b", 0, 1, (1,))),
        *_at(9, ev.Free("b", (1, 0), "finish")),
        *_at(12, ev.Reset((0,), "asked for")),
    ]  # fmt: skip
    assert residency(events) == Residency(life_times=[4, 4, 11], idle_before_eviction=[3, 3], reuse_gaps=[3])


def test_a_block_shared_while_in_use_was_never_idle():
    events = [
        *_plan(1, ev.Alloc("a", 0, 0, (0,))),
        *_at(1, ev.Cache("a", (0,), (7,), -1)),
        *_plan(3, ev.Share("b", 0, 0, (0,), 4)),
        *_at(4, ev.Free("a", (), "finish")),
        *_at(5, ev.Free("b", (0,), "finish")),
        *_plan(8, ev.Evict((0,), "")),
    ]
    assert residency(events) == Residency([7], [3], [])


def test_contents_move_with_their_age():
    events = [
        *_plan(1, ev.Alloc("a", 0, 0, (3, 4, 5))),
        *_plan(3, ev.Move("a", 0, ((3, 2), (4, 3), (5, 4)), "overlapping"), ev.Copy("a", 0, 0, ((2, 8),))),
        *_at(7, ev.Trim("a", 0, (4,))),
        *_at(8, ev.Free("a", (3, 8), "finish")),
    ]
    assert residency(events).life_times == [6, 7, 5]


def test_what_a_cancelled_plan_did_never_happened():
    cancelled = [ev.Free("a", (0,), "preempt"), ev.Alloc("b", 0, 0, (0,))]
    start = _plan(1, ev.Alloc("a", 0, 0, (0,)))
    events = [*start, *_plan(2, *cancelled, end=ev.Cancel("no")), *_at(5, ev.Free("a", (0,), "finish"))]
    assert residency(events) == Residency(life_times=[4])


def test_the_newest_of_two_open_plans_is_cancelled_and_ends_count_all_the_same():
    events = [
        *_at(1, ev.Step(1, 1.0, 16, {}, {}), ev.Alloc("a", 0, 0, (0,))),
        *_at(2, ev.Step(2, 2.0, 16, {}, {}), ev.Alloc("b", 0, 0, (1,))),
        *_at(1, ev.Commit({}), ev.Free("a", (0,), "finish")),
        *_at(2, ev.Cancel("no")),
        *_plan(2, ev.Alloc("c", 0, 0, (1,))),
        *_at(4, ev.Free("c", (1,), "finish")),
    ]
    assert residency(events) == Residency(life_times=[0, 2])
