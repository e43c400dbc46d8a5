"""The block manager: literal block ids, and random traffic against a shadow model."""

import contextlib
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedinfer.errors import OutOfBlocks
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.journal import Journal
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.events import Alloc, Free, Refuse


def make(num_blocks, block_size):
    """A block manager and the list in which its events gather."""
    bus, events = EventBus(), []
    bus.subscribe(events.append)
    return BlockManager(num_blocks, block_size, bus), events


# -- stories with exact block ids ---------------------------------------------------------------------------------


def test_blocks_are_handed_out_in_order_and_only_when_needed():
    blocks, events = make(8, 4)
    assert blocks.allocate("a", 6) == (0, 1)
    assert blocks.allocate("b", 4) == (2,)
    assert blocks.allocate("a", 7) == ()  # fits what it has
    assert blocks.allocate("a", 8) == ()
    assert blocks.allocate("a", 9) == (3,)
    assert blocks.table("a") == [0, 1, 3]
    assert blocks.table("b") == [2]
    assert blocks.num_free == 4
    assert blocks.kv_usage == 0.5
    assert events == _at_step_0(Alloc("a", 0, 0, (0, 1)), Alloc("b", 0, 0, (2,)), Alloc("a", 0, 2, (3,)))
    blocks.check()


def test_the_tail_of_a_freed_table_is_reused_before_its_head():
    blocks, events = make(5, 2)
    blocks.allocate("a", 6)  # 0 1 2
    blocks.allocate("b", 4)  # 3 4
    assert blocks.free("a", "finish") == (2, 1, 0)
    assert blocks.allocate("c", 2) == (2,)
    assert blocks.free("b", "preempt") == (4, 3)
    assert blocks.allocate("c", 9) == (1, 0, 4, 3)  # freed the longest first
    assert events[2:4] == _at_step_0(Free("a", (2, 1, 0), "finish"), Alloc("c", 0, 0, (2,)))
    blocks.check()


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 256])
def test_ceil_of_tokens_over_block_size(block_size):
    blocks, _ = make(10, block_size)
    assert blocks.blocks_for(0) == 0
    for num_blocks in (1, 2, 7):
        assert blocks.blocks_for(num_blocks * block_size) == num_blocks
        assert blocks.blocks_for(num_blocks * block_size + 1) == num_blocks + 1
    assert blocks.num_missing("nobody", 2 * block_size) == 2


def test_a_token_at_a_time_takes_one_block_at_each_boundary():
    blocks, _ = make(4, 3)
    taken = [len(blocks.allocate("a", n)) for n in range(1, 13)]
    assert taken == [1, 0, 0] * 4
    assert blocks.num_free == 0


def test_out_of_blocks_changes_nothing():
    blocks, events = make(3, 4)
    blocks.allocate("a", 5)
    before, told = blocks.snapshot(), list(events)
    with pytest.raises(OutOfBlocks, match="needs 2 blocks, 1 free") as caught:
        blocks.allocate("a", 16)
    assert (caught.value.needed, caught.value.free) == (2, 1)
    with pytest.raises(OutOfBlocks, match="needs 3 blocks, 1 free"):
        blocks.allocate("new", 9)
    assert blocks.snapshot() == before
    assert events == told
    assert blocks.table("new") == []
    blocks.check()


def test_one_block_is_written_in_the_singular():
    assert str(OutOfBlocks(1, 0)) == "needs 1 block, 0 free"


def test_freeing_what_holds_nothing_does_nothing():
    blocks, events = make(2, 4)
    assert blocks.free("nobody", "finish") == ()
    assert events == []
    blocks.allocate("a", 1)
    blocks.free("a", "finish")
    assert blocks.free("a", "finish") == ()
    assert len(events) == 2
    blocks.check()


def test_a_told_call_is_refused_once_and_changes_nothing():
    blocks, events = make(4, 4)
    blocks.refuse_calls = {1}
    blocks.allocate("a", 4)  # call 0
    assert blocks.allocate("a", 3) == ()  # asks for nothing: no call
    with pytest.raises(OutOfBlocks, match="needs 1 block, 3 free"):
        blocks.allocate("a", 5)  # call 1
    assert events[-1] == _at_step_0(Refuse(1, 1))[0]
    assert blocks.allocate("a", 5) == (1,)  # call 2
    blocks.check()


def test_undo_restores_tables_and_the_order_of_the_free_list():
    blocks, _ = make(6, 2)
    for rid, tokens in (("a", 4), ("b", 4), ("c", 3)):
        blocks.allocate(rid, tokens)
    blocks.free("a", "finish")
    before = blocks.snapshot()
    journal = blocks.journal = Journal()
    blocks.free("c", "preempt")
    blocks.allocate("b", 9)
    blocks.allocate("new", 1)
    blocks.journal = None
    assert blocks.snapshot() != before
    journal.undo()
    assert blocks.snapshot() == before
    assert list(before["block_tables"]["b"]) == [2, 3]
    assert blocks.allocate("d", 4) == (1, 0)
    blocks.check()


def test_a_failed_call_leaves_nothing_in_the_journal():
    blocks, _ = make(2, 2)
    blocks.journal = Journal()
    with pytest.raises(OutOfBlocks):
        blocks.allocate("a", 9)
    assert len(blocks.journal) == 0


@pytest.mark.parametrize("fault", ["ref count", "free and in use", "twice", "empty"])
def test_check_notices(fault):
    blocks, _ = make(4, 2)
    blocks.allocate("a", 4)
    if fault == "ref count":
        blocks.pool._ref_counts[0] = 2
    elif fault == "free and in use":
        blocks.pool._free.push_back(1)
    elif fault == "twice":
        blocks._tables[0]["a"][1] = 0
    else:
        blocks._tables[0]["b"] = []
    with pytest.raises(AssertionError, match=fault):
        blocks.check()


def test_it_says_what_it_holds():
    blocks, _ = make(4, 16)
    blocks.allocate("a", 17)
    assert repr(blocks) == "BlockManager(2 of 4 blocks used, block_size=16)"


def _at_step_0(*events):
    for event in events:
        event.step = 0
    return list(events)


# -- known faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_bm_10_free_list_is_the_set_of_blocks_with_ref_count_0(seed):
    draw = random.Random(seed)
    blocks, _ = make(7, 2)
    journal = None
    for turn in range(400):
        rid = draw.choice("abc")
        action = draw.random()
        if action < 0.45:
            with contextlib.suppress(OutOfBlocks):
                blocks.allocate(rid, draw.randint(1, 12))
        elif action < 0.8:
            blocks.free(rid, "preempt")
        elif journal is None:
            journal = blocks.journal = Journal()
        else:
            if action < 0.9:
                journal.undo()
            journal = blocks.journal = None
        free = blocks.snapshot()["free"]
        assert len(free) == len(set(free)), f"seed {seed}, turn {turn}: a block is free twice"
        assert set(free) == {b for b in range(7) if blocks.ref_count(b) == 0}, f"seed {seed}, turn {turn}"
        blocks.check()


# -- random traffic -----------------------------------------------------------------------------------------------


class BlockMachine(RuleBasedStateMachine):
    """Every call, in any order, beside a model made of one list and one dict."""

    @initialize(num_blocks=st.integers(1, 8), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.blocks, self.events = make(num_blocks, block_size)
        self.size = block_size
        self.free_ids = list(range(num_blocks))
        self.tables = {}
        self.saved = None  # the model when the open journal began

    @rule(
        rid=st.sampled_from("abcd"),
        num_tokens=st.integers(1, 24),
        refused=st.sampled_from([False] * 4 + [True]),
    )
    def allocate(self, rid, num_tokens, refused):
        table = self.tables.get(rid, [])
        needed = max(0, (num_tokens + self.size - 1) // self.size - len(table))
        assert self.blocks.num_missing(rid, num_tokens) == needed
        if refused:
            self.blocks.refuse_calls.add(self.blocks.num_calls)
        if needed > len(self.free_ids) or (refused and needed):
            with pytest.raises(OutOfBlocks) as caught:
                self.blocks.allocate(rid, num_tokens)
            assert (caught.value.needed, caught.value.free) == (needed, len(self.free_ids))
        else:
            assert self.blocks.allocate(rid, num_tokens) == tuple(self.free_ids[:needed])
            if needed:
                self.tables[rid] = table + self.free_ids[:needed]
                del self.free_ids[:needed]
        self.blocks.refuse_calls.clear()

    @rule(rid=st.sampled_from("abcd"))
    def free(self, rid):
        table = self.tables.pop(rid, [])
        assert self.blocks.free(rid, "finish") == tuple(reversed(table))
        self.free_ids += reversed(table)

    @precondition(lambda self: self.saved is None)
    @rule()
    def open_journal(self):
        self.blocks.journal = Journal()
        self.saved = (list(self.free_ids), {rid: list(table) for rid, table in self.tables.items()})

    @precondition(lambda self: self.saved is not None)
    @rule(undo=st.booleans())
    def close_journal(self, undo):
        journal, self.blocks.journal = self.blocks.journal, None
        if undo:
            journal.undo()
            self.free_ids, self.tables = self.saved
        self.saved = None

    @invariant()
    def equals_the_model(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check()
        assert self.blocks.snapshot() == {
            "block_tables": self.tables,
            "ref_counts": {str(b): 1 for b in sorted(b for table in self.tables.values() for b in table)},
            "free": self.free_ids,
            "idle": {},
            "cached": {},
            "retained": {},
        }
        assert self.blocks.num_free == len(self.free_ids)

    def teardown(self):
        if hasattr(self, "blocks"):
            for rid in list(self.tables):
                self.blocks.free(rid, "finish")
            assert self.blocks.num_free == self.blocks.num_blocks
            self.blocks.check()


@pytest.mark.parametrize(
    ("examples", "steps"), [(100, 40), pytest.param(1000, 100, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_random_traffic(examples, steps):
    run_state_machine_as_test(
        BlockMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            print_blob=True,
        ),
    )
