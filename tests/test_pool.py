"""The pool and its prefix cache by hand: reference counts, lanes, eviction, pins, and how each is taken back."""

import pytest

from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.journal import Journal
from pagedinfer.memory.keys import KeyTable
from pagedinfer.memory.pool import BlockPool
from pagedinfer.memory.prefix import PINNED, PrefixCache, first_in_window
from pagedinfer.trace.bus import EventBus


def keys_of(number, start=0):
    """A chain of keys, blocks of one token."""
    chain = []
    KeyTable().extend(chain, None, list(range(start, start + number)), 1)
    return chain


def make(num_blocks=6, windows=(None,)):
    bus, told = EventBus(), []
    bus.subscribe(told.append)
    return BlockPool(num_blocks, 1, windows, bus), told


def cached(pool, number, start=0):
    """Blocks taken, published under a chain of keys, and dropped, the last one first."""
    keys, blocks = keys_of(number, start), pool.pop(number, "x")
    for block_id, key in zip(blocks, keys, strict=True):
        assert pool.publish(block_id, 0, key)
    for block_id in reversed(blocks):
        assert pool.drop(block_id)
    return blocks, keys


# -- the prefix cache, a look-up --------------------------------------------------------------------------------------


def test_the_longest_prefix_up_to_the_limit():
    cache, keys = PrefixCache(1, (None,)), keys_of(4)
    for block_id, key in ((5, keys[0]), (3, keys[1]), (8, keys[3])):
        cache.add(block_id, 0, key)
    assert cache.find(keys, 4) == [[5, 3]]  # the third is not there, so the fourth is of no use
    assert cache.find(keys, 1) == [[5]]
    assert cache.find(keys[1:], 9) == [[3]]
    assert cache.find([], 9) == [[]]
    cache.check()


def test_a_twin_is_not_published():
    cache, (key,) = PrefixCache(1, (None,)), keys_of(1)
    assert cache.add(2, 0, key)
    assert not cache.add(4, 0, key)
    assert cache.block(0, key) == 2
    assert len(cache) == 1


def test_why_a_look_up_ended():
    cache, keys = PrefixCache(4, (None,)), keys_of(3)
    assert cache.why_no_more(keys, 0, 0) == "no full block before the last token"
    assert cache.why_no_more(keys, 1, 3) == "block 1 (tokens 4 to 7) is new"
    cache.add(0, 0, keys[1])
    cache.forget(0, "evicted in step 7", limit=2)
    assert cache.why_no_more(keys, 1, 3) == "block 1 (tokens 4 to 7) was evicted in step 7"
    assert cache.why_no_more(keys, 2, 2) == "the last token is always computed"
    assert cache.why_no_more(keys, 3, 5) == "no more full blocks"
    for number, key in enumerate(keys_of(2, start=50)):  # the memory of what was evicted is bounded
        cache.add(number, 0, key)
        cache.forget(number, "evicted in step 8", limit=2)
    assert cache.why_no_more(keys, 1, 3) == "block 1 (tokens 4 to 7) is new"


def test_forgetting_is_taken_back_with_key_and_priority():
    cache, (key,) = PrefixCache(1, (None,)), keys_of(1)
    cache.add(2, 0, key)
    cache.retain(2, 80, -1)
    known = cache.forget(2, "evicted in step 1", limit=9)
    assert (cache.lane(2), len(cache), cache.retained) == (0, 0, {})
    cache.recall(2, *known)
    assert (cache.lane(2), cache.block(0, key)) == (81, 2)
    cache.check()


@pytest.mark.parametrize(
    ("window", "position", "first"),
    [(None, 99, 0), (4, 0, 0), (4, 4, 0), (4, 5, 1), (4, 6, 1), (4, 7, 2), (4, 9, 3), (1, 9, 4)],
)
def test_the_first_block_that_a_window_sees(window, position, first):
    """By hand, blocks of 2: a window of 4 at position 6 sees 3, 4, 5, 6, of which 3 is in block 1."""
    assert first_in_window(window, position, 2) == first
    seen = range(max(0, position - window + 1), position + 1) if window else range(position + 1)
    assert first == seen[0] // 2


def test_a_group_with_a_window_needs_only_what_the_next_token_sees():
    cache, keys = PrefixCache(2, (None, 4)), keys_of(3)
    for block_id, key in zip((0, 1, 2), keys, strict=True):
        cache.add(block_id, 0, key)
    assert cache.find(keys, 3) == [[], []]  # nothing of group 1
    cache.add(5, 1, keys[1])
    cache.add(6, 1, keys[2])
    assert cache.find(keys, 3) == [[0, 1, 2], [-1, 5, 6]]  # token 6 sees 3 to 6
    assert cache.find(keys, 2) == [[], []]  # token 4 would see 1 to 4, so block 0 of group 1


def test_retention_ends_once_and_only_as_last_said():
    cache, keys = PrefixCache(1, (None,)), keys_of(3)
    for block_id, key in enumerate(keys):
        cache.add(block_id, 0, key)
    cache.retain(0, 80, 5.0)
    cache.retain(1, 80, 3.0)
    cache.retain(2, 80, -1)
    cache.retain(1, 90, 8.0)
    assert cache.take_expired(2.0) == []
    assert cache.take_expired(6.0) == [0]
    cache.retained.pop(0)
    assert cache.take_expired(100.0) == [1]


# -- the pool ---------------------------------------------------------------------------------------------------------


def test_blocks_without_content_go_first_then_the_tail_of_what_is_cached():
    pool, told = make(4)
    (first, second), _ = cached(pool, 2)
    assert (pool.num_free, pool.num_unused) == (4, 4)
    assert pool.pop(3, "a") == [2, 3, second]
    (event,) = (event for event in told if event.kind == "evict")
    assert (event.pblks, event.why) == ((second,), "a needs 3 blocks")
    assert pool.cache.keys.keys() == {first}
    pool.check()


def test_a_holder_takes_a_cached_block_out_of_the_queue():
    pool, _ = make(3)
    (block_id,), _ = cached(pool, 1)
    pool.take(block_id)
    pool.take(block_id)
    assert (pool.ref_count(block_id), pool.num_free, pool.is_shared(block_id)) == (2, 2, True)
    assert not pool.drop(block_id)
    assert pool.drop(block_id)
    assert pool.snapshot()["idle"] == {"50": [block_id]}
    pool.check()


def test_lower_priorities_go_first_and_pins_not_at_all():
    pool, told = make(4)
    blocks, keys = pool.pop(4, "x"), keys_of(4)
    for block_id, key in zip(blocks, keys, strict=True):
        pool.publish(block_id, 0, key)
    pool.retain([0], 80, -1.0)
    pool.retain([1], PINNED, -1.0)
    pool.retain([2], 10, -1.0)
    for block_id in blocks:
        pool.drop(block_id)
    assert (pool.num_free, pool.num_unused) == (3, 4)
    assert not pool.is_for_hire(1)
    assert pool.pop(3, "a") == [2, 3, 0]
    assert pool.num_free == 0
    assert pool.release_pins()
    assert not pool.release_pins()
    assert pool.pop(1, "a") == [1]
    pool.check()
    assert [event.kind for event in told].count("evict") == 2


def test_retention_that_ends_moves_an_idle_block_behind_the_ordinary_ones():
    pool, _ = make(2)
    blocks, keys = pool.pop(2, "x"), keys_of(2)
    for block_id, key in zip(blocks, keys, strict=True):
        pool.publish(block_id, 0, key)
    pool.retain([0], 90, 5.0)
    for block_id in blocks:
        pool.drop(block_id)
    pool.expire(4.0)
    assert pool.snapshot()["idle"] == {"50": [1], "90": [0]}
    pool.expire(5.0)
    assert pool.snapshot()["idle"] == {"50": [1, 0]}
    assert pool.snapshot()["retained"] == {}
    pool.check()


def test_everything_in_a_plan_is_taken_back_in_order():
    pool, _ = make(5)
    (a, b), _ = cached(pool, 2)
    pool.take(a)
    pool.retain([a], PINNED, 9.0)
    (held,) = pool.pop(1, "y")
    before = pool.snapshot()
    journal = pool.journal = Journal()
    pool.drop(a)
    pool.expire(9.0)
    pool.drop(held)
    pool.take(b)
    taken = pool.pop(4, "z")  # two without content, then the one just given up, then a, now an ordinary one
    assert taken == [3, 4, held, a]
    assert pool.take_overwritten() == [held, a]  # a cancel would want these contents back
    pool.journal = None
    pool.check()
    journal.undo()
    assert pool.snapshot() == before
    pool.check()


def test_a_reset_waits_until_nobody_holds_a_block():
    pool, told = make(3)
    (block_id,), _ = cached(pool, 1)
    pool.take(block_id)
    before = pool.snapshot()
    assert not pool.reset("weights changed")
    assert pool.snapshot() == before
    pool.drop(block_id)
    assert pool.reset("weights changed")
    assert sorted(pool.snapshot()["free"]) == [0, 1, 2]
    assert pool.snapshot()["cached"] == {}
    assert told[-1].pblks == (block_id,)
    pool.check()


def test_another_size_moves_what_is_held_and_evicts_what_is_not():
    pool, told = make(6)
    held = pool.pop(6, "x")
    for block_id, key in zip((4, 5), keys_of(2), strict=True):
        pool.publish(block_id, 0, key)
    for block_id in (0, 2, 4):
        pool.drop(block_id)
    assert held == [0, 1, 2, 3, 4, 5]  # held now: 1, 3 and 5, of which 5 is cached; 4 is cached and idle
    moves = pool.plan_resize(4)
    assert moves == [(5, 0)]
    pool.resize(4, moves)
    assert pool.snapshot() == {
        "ref_counts": {"0": 1, "1": 1, "3": 1},
        "free": [2],
        "idle": {},
        "cached": {"0": [0, 1]},
        "retained": {},
    }
    assert [(event.kind, event.pblks) for event in told if event.kind == "evict"] == [("evict", (4,))]
    pool.check()
    pool.resize(6, [])
    assert pool.snapshot()["free"] == [2, 4, 5]
    pool.check()


def test_a_chain_with_a_twin_in_its_middle_is_told_in_stretches():
    """The first block of a chain has been evicted, the second one lives: each event names the key before its own."""
    bus, events = EventBus(), []
    bus.subscribe(events.append)
    blocks, keys = BlockManager(5, 2, bus, windows=(3,)), []
    KeyTable().extend(keys, None, [1, 2, 3, 4, 5, 6], 2)
    blocks.allocate("a", 4)
    blocks.publish("a", keys, 4)
    blocks.allocate("a", 6, start=5)  # leaves block 0 behind
    assert blocks.allocate("b", 6) == (3, 4, 0)
    blocks.publish("b", keys, 6)
    told = [(event.rid, event.pblks, event.keys, event.parent) for event in events if event.kind == "cache"]
    assert told == [("a", (0, 1), (0, 1), -1), ("b", (3,), (0,), -1), ("b", (0,), (2,), 1)]
