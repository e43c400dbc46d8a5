"""The free list against the plainest model there is: a Python list."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedinfer.memory.free_queue import FreeQueue


def test_starts_with_all_blocks_in_order():
    queue = FreeQueue(4)
    assert list(queue) == [0, 1, 2, 3]
    assert len(queue) == 4
    queue.check()


def test_first_in_first_out():
    queue = FreeQueue(3)
    assert [queue.pop_front(), queue.pop_front()] == [0, 1]
    queue.push_back(1)
    queue.push_back(0)
    assert [queue.pop_front() for _ in range(3)] == [2, 1, 0]
    assert len(queue) == 0
    assert list(queue) == []
    queue.check()


def test_a_block_leaves_from_the_middle_and_from_both_ends():
    queue = FreeQueue(5)
    for block_id, left in ((2, [0, 1, 3, 4]), (0, [1, 3, 4]), (4, [1, 3])):
        queue.remove(block_id)
        assert list(queue) == left
        assert block_id not in queue
        queue.check()


def test_push_front_takes_back_pop_front():
    queue = FreeQueue(3)
    queue.push_front(queue.pop_front())
    assert list(queue) == [0, 1, 2]


def test_only_some_blocks_may_be_free_at_the_start():
    queue = FreeQueue(4, [3, 1])
    assert list(queue) == [3, 1]
    assert 0 not in queue
    queue.check()


def test_misuse_is_noticed():
    queue = FreeQueue(2)
    with pytest.raises(AssertionError, match="block 1 is already free"):
        queue.push_back(1)
    queue.remove(0)
    with pytest.raises(AssertionError, match="block 0 is not free"):
        queue.remove(0)
    queue.pop_front()
    with pytest.raises(AssertionError, match="the caller checks"):
        queue.pop_front()


def test_check_notices_a_broken_link():
    queue = FreeQueue(4)
    queue._prev[2] = 0
    with pytest.raises(AssertionError, match="does not point back"):
        queue.check()


@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.sampled_from(["pop", "back", "front", "remove"]), st.integers(0, 5))),
)
@settings(max_examples=200, derandomize=True, database=None, deadline=None)
def test_behaves_like_a_list(num_blocks, operations):
    queue, model = FreeQueue(num_blocks), list(range(num_blocks))
    for name, block_id in operations:
        if name == "pop" and model:
            assert queue.pop_front() == model.pop(0)
        elif name == "remove" and block_id in model:
            queue.remove(block_id)
            model.remove(block_id)
        elif name in ("back", "front") and block_id < num_blocks and block_id not in model:
            (queue.push_back if name == "back" else queue.push_front)(block_id)
            model.insert(len(model) if name == "back" else 0, block_id)
        queue.check()
        assert list(queue) == model
        assert len(queue) == len(model)
        assert [block_id in queue for block_id in range(num_blocks)] == [
            b in model for b in range(num_blocks)
        ]


def test_lanes_are_taken_lowest_first_each_in_its_order():
    queue = FreeQueue(6, [0])
    for block_id, lane in ((1, 51), (2, 51), (3, 1), (4, 102)):
        queue.push_back(block_id, lane)
    assert list(queue) == [0, 3, 1, 2, 4]
    assert queue.lanes() == {51: [1, 2], 1: [3], 102: [4]}
    assert [queue.pop_front() for _ in range(3)] == [0, 3, 1]
    queue.push_back(5)  # without content: before all cached ones
    assert list(queue) == [5, 2, 4]
    queue.check()


def test_restore_takes_a_remove_back_wherever_the_block_stood():
    queue = FreeQueue(6, [0, 1])
    for block_id in (2, 3, 4):
        queue.push_back(block_id, 51)
    places = [(block_id, queue.remove(block_id)) for block_id in (3, 0, 4, 2, 1)]
    assert list(queue) == []
    for block_id, place in reversed(places):
        queue.restore(block_id, place)
    assert list(queue) == [0, 1, 2, 3, 4]
    assert queue.lanes() == {51: [2, 3, 4]}
    queue.check()


@pytest.mark.parametrize("block_id", [4, 99, -1])
def test_only_blocks_of_the_pool_can_be_removed(block_id):
    queue = FreeQueue(4)
    with pytest.raises(AssertionError, match=f"block {block_id} is not free"):
        queue.remove(block_id)
    queue.check()
