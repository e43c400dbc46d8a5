"""The contiguous allocators: literal block ids for each strategy, and random traffic beside bits and real contents."""

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

from pagedinfer.errors import ConfigError, OutOfBlocks
from pagedinfer.memory.allocator import KVAllocator
from pagedinfer.memory.contiguous import STRATEGIES, ContiguousAllocator
from pagedinfer.memory.journal import Journal
from pagedinfer.memory.ops import BlockOp
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.events import Alloc, Error, Free, Move, Refuse, Resize, Trim


def make(strategy, num_blocks, block_size=4, max_model_len=32, **options):
    """An allocator and the list in which its events gather."""
    bus, events = EventBus(), []
    bus.subscribe(events.append)
    return ContiguousAllocator(strategy, num_blocks, block_size, max_model_len, bus, **options), events


def told(events):
    """Events without the stamps of a bus."""
    return [(event.kind, *(getattr(event, name) for name in event.__slots__)) for event in events]


def compact(blocks, why="a lesson"):
    """What an engine does: the copies first, then the books."""
    before, ops = blocks.snapshot(), blocks.plan_compact()
    assert blocks.snapshot() == before
    blocks.compact(ops, why)
    return ops


def resize(blocks, num_blocks):
    before, ops = blocks.snapshot(), blocks.plan_resize(num_blocks)
    assert blocks.snapshot() == before
    blocks.resize(num_blocks, ops)
    return ops


def hold(blocks, *sizes):
    """Requests a, b, c... of so many blocks, full."""
    for rid, size in zip("abcdefgh", sizes, strict=False):
        tokens = size * blocks.block_size
        blocks.allocate(rid, tokens, max_total_tokens=tokens)


def test_it_is_a_kv_allocator():
    blocks: KVAllocator = make("first-fit", 8)[0]  # mypy holds the protocol against it
    names = [name for name in dir(KVAllocator) if not name.startswith("_")] + list(
        KVAllocator.__annotations__
    )
    assert all(hasattr(blocks, name) for name in names)
    assert len(names) > 15


# -- the strategies, by block ids ---------------------------------------------------------------------------------


def test_reserve_max_gives_everybody_the_maximum():
    blocks, events = make("reserve-max", 20, max_model_len=30)  # 8 blocks
    assert blocks.allocate("a", 5, max_total_tokens=6) == tuple(range(8))
    assert blocks.allocate("b", 1, max_total_tokens=2) == tuple(range(8, 16))
    assert blocks.table("a") == list(range(8))
    assert blocks.allocate("a", 30) == ()  # grows within its extent
    assert (blocks.num_free, blocks.kv_usage) == (4, 0.8)
    assert blocks.shortage((), 5, 6, 0) == "needs 8 blocks in a row, 4 free, the largest hole has 4"
    assert blocks.free("a", "finish") == tuple(range(7, -1, -1))
    assert blocks.shortage((), 5, 6, 0) is None
    assert told(events) == told(
        [Alloc("a", 0, 0, tuple(range(8))), Alloc("b", 0, 0, tuple(range(8, 16))),
         Free("a", tuple(range(7, -1, -1)), "finish")]
    )  # fmt: skip
    blocks.check()


def _with_holes(strategy):
    """Holes (0, 5), (7, 2), (11, 4) between b, d and f; the last one placed is f."""
    blocks, events = make(strategy, 16)
    hold(blocks, 5, 2, 2, 2, 4, 1)  # a 0-4, b 5-6, c 7-8, d 9-10, e 11-14, f 15
    for rid in "ace":
        blocks.free(rid, "finish")
    assert blocks.holes == [(0, 5), (7, 2), (11, 4)]
    return blocks, events


@pytest.mark.parametrize(
    ("strategy", "first", "second"),
    [("first-fit", (0, 1), (2, 3)), ("best-fit", (7, 8), (11, 12)), ("next-fit", (0, 1), (2, 3))],
)
def test_where_two_blocks_go(strategy, first, second):
    blocks, _ = _with_holes(strategy)
    assert blocks.allocate("x", 3, max_total_tokens=8) == first  # prompt and max_tokens: 2 blocks
    assert blocks.allocate("y", 8, max_total_tokens=8) == second
    blocks.check()


def test_next_fit_goes_on_behind_the_last_one_placed():
    blocks, _ = make("next-fit", 10)
    hold(blocks, 2, 3, 1)  # a 0-1, b 2-4, c 5
    blocks.free("a", "finish")
    assert blocks._last == 6
    assert blocks.allocate("d", 8) == (6, 7)
    assert blocks.allocate("e", 8) == (8, 9)
    assert blocks.allocate("f", 8) == (0, 1)  # around
    assert blocks._last == 2


def test_exact_reservation_covers_prompt_and_max_tokens():
    blocks, _ = make("first-fit", 16)
    assert blocks.allocate("a", 5, max_total_tokens=17) == (0, 1, 2, 3, 4)
    assert blocks.num_missing("a", 17) == 0
    assert blocks.num_missing("a", 21) == 1
    assert [blocks.allocate("a", n) for n in (6, 12, 17)] == [(), (), ()]
    blocks.trim("a", 5)  # reserved blocks stay
    assert blocks.table("a") == [0, 1, 2, 3, 4]


def test_buddy_rounds_up_splits_and_joins():
    blocks, _ = make("buddy", 16)
    assert blocks.allocate("a", 9, max_total_tokens=9) == (0, 1, 2, 3)  # 3 blocks: 4
    assert blocks.allocate("b", 4) == (4,)
    assert blocks.allocate("c", 8) == (6, 7)  # 4 and 5 are buddies, 6 and 7 are free together
    assert blocks.allocate("d", 5 * 4) == tuple(range(8, 16))
    assert blocks.holes == [(5, 1)]
    assert blocks.shortage((), 4, 8, 0) == "needs 2 blocks in a row, 1 free, the largest piece has 1"
    blocks.free("a", "finish")
    blocks.free("c", "finish")
    assert blocks.holes == [(0, 4), (5, 3)]
    assert blocks.largest_hole == 4
    assert blocks.shortage((), 1, 20, 0) == "needs 8 blocks in a row, 7 free, the largest piece has 4"
    blocks.free("b", "finish")
    assert blocks.largest_hole == 8
    assert blocks.allocate("e", 20) == tuple(range(8))
    blocks.check()


def test_a_buddy_that_outgrows_its_piece_gets_one_of_twice_the_size():
    blocks, events = make("buddy", 8)
    blocks.allocate("a", 8)
    assert blocks.allocate("a", 9) == (2, 3)  # in place: its buddy is free
    blocks.allocate("b", 4)
    assert blocks.table("b") == [4]
    blocks.free("a", "finish")
    blocks.allocate("c", 4)
    assert blocks.table("c") == [5]
    assert blocks.allocate("c", 8) == (7,)
    assert blocks.table("c") == [6, 7]
    assert blocks.take_ops() == [BlockOp("move", ((5, 6),))]
    assert told(events)[-2:] == told(
        [Move("c", 0, ((5, 6),), "c grows to 2 blocks, the next ones are taken"), Alloc("c", 0, 1, (7,))]
    )
    blocks.check()


def test_grow_by_move_takes_what_it_needs_now_and_moves_when_its_neighbour_is_taken():
    blocks, events = make("grow-by-move", 12)
    assert blocks.allocate("a", 5, max_total_tokens=40) == (0, 1)
    assert blocks.allocate("b", 4) == (2,)
    assert blocks.allocate("b", 5) == (3,)  # in place
    assert blocks.take_ops() == []
    table = blocks.table("a")
    assert blocks.allocate("a", 9) == (6,)  # 0-1 move to 4-5
    assert blocks.table("a") == [4, 5, 6]
    assert table == [0, 1]  # an open plan may still hold the old one
    assert blocks.take_ops() == [BlockOp("move", ((1, 5), (0, 4)))]  # upwards: the last one first
    assert blocks.take_ops() == []
    assert told(events)[3:] == told(
        [
            Move("a", 0, ((0, 4), (1, 5)), "a grows to 3 blocks, the next ones are taken"),
            Alloc("a", 0, 2, (6,)),
        ]
    )
    blocks.trim("a", 4)
    assert blocks.table("a") == [4]
    assert told(events)[5:] == told([Trim("a", 0, (5, 6))])
    blocks.trim("a", 4)
    assert len(events) == 6
    assert blocks.allocate("b", 8) == ()
    assert blocks.holes == [(0, 2), (5, 7)]
    blocks.check()


def test_growth_may_slide_over_its_own_place():
    blocks, _ = make("grow-by-move", 7)
    hold(blocks, 2, 3, 2)  # a 0-1, b 2-4, c 5-6
    blocks.free("a", "finish")
    assert blocks.allocate("b", 16) == (3,)  # 2-4 to 0-2, then one more
    assert blocks.take_ops() == [BlockOp("move", ((2, 0), (3, 1), (4, 2)))]
    assert blocks.table("b") == [0, 1, 2, 3]
    with pytest.raises(OutOfBlocks) as caught:
        blocks.allocate("c", 16)  # one is free, before it
    assert str(caught.value) == "needs 4 blocks in a row (it has 2), 1 free, the largest hole has 1"
    assert blocks.allocate("c", 9) == (6,)
    assert blocks.table("c") == [4, 5, 6]


# -- compaction ---------------------------------------------------------------------------------------------------


def test_compaction_slides_extents_until_the_request_fits():
    blocks, events = make("first-fit", 12, compaction=True)
    hold(blocks, 2, 2, 3, 2, 1)  # a 0-1, b 2-3, c 4-6, d 7-8, e 9
    blocks.free("a", "finish")
    blocks.free("d", "finish")
    assert blocks.holes == [(0, 2), (7, 2), (10, 2)]
    assert blocks.shortage((), 20, 20, 0) is None
    assert (
        blocks.shortage((), 20, 20, 2)
        == "needs 5 blocks in a row, 6 free (2 to be kept), the largest hole has 2"
    )
    del events[:]
    assert blocks.allocate("f", 16) == (5, 6, 7, 8)  # e stays
    assert blocks.take_ops() == [
        BlockOp("move", ((2, 0), (3, 1))),
        BlockOp("move", ((4, 2), (5, 3), (6, 4))),  # overlaps itself: ascending
    ]
    why = "f needs 4 blocks in a row"
    assert told(events) == told(
        [Move("b", 0, ((2, 0), (3, 1)), why), Move("c", 0, ((4, 2), (5, 3), (6, 4)), why),
         Alloc("f", 0, 0, (5, 6, 7, 8))]
    )  # fmt: skip
    blocks.check()


def test_without_compaction_the_same_request_waits():
    blocks, _ = make("first-fit", 12)
    hold(blocks, 2, 2, 3, 2, 1)
    blocks.free("a", "finish")
    blocks.free("d", "finish")
    why = "needs 4 blocks in a row, 6 free, the largest hole has 2"
    assert blocks.shortage((), 16, 16, 0) == why
    with pytest.raises(OutOfBlocks) as caught:
        blocks.allocate("f", 16)
    assert (caught.value.needed, caught.value.free, str(caught.value)) == (4, 6, why)


def test_growth_with_compaction_pushes_the_others_away():
    blocks, events = make("grow-by-move", 9, compaction=True)
    hold(blocks, 3, 2, 2)  # a 0-2, b 3-4, c 5-6, free 7-8
    assert blocks.allocate("a", 20) == (3, 4)
    assert blocks.take_ops() == [BlockOp("move", ((6, 8), (5, 7))), BlockOp("move", ((4, 6), (3, 5)))]
    assert told(events)[3:5] == told(  # events name pairs in the order of the table
        [Move("c", 0, ((5, 7), (6, 8)), "a grows to 5 blocks, the next ones are taken"),
         Move("b", 0, ((3, 5), (4, 6)), "a grows to 5 blocks, the next ones are taken")]
    )  # fmt: skip
    with pytest.raises(OutOfBlocks, match="0 free"):
        blocks.allocate("a", 21)
    blocks.check()


def test_a_move_copies_only_what_may_hold_tokens():
    blocks, events = make("reserve-max", 16, max_model_len=20, compaction=True)  # 5 blocks each
    blocks.allocate("a", 3)
    blocks.allocate("b", 3)
    blocks.allocate("b", 9)
    blocks.free("a", "finish")
    assert compact(blocks) == [BlockOp("move", ((5, 0), (6, 1), (7, 2)))]
    pairs = tuple((i + 5, i) for i in range(5))
    assert told(events)[-2:] == told(
        [Free("a", (4, 3, 2, 1, 0), "finish"), Move("b", 0, pairs, "compaction: a lesson")]
    )
    assert compact(blocks) == []
    assert blocks.holes == [(5, 11)]


def test_resize_moves_extents_out_of_what_goes_away():
    blocks, events = make("best-fit", 12)
    hold(blocks, 2, 3, 2, 3)  # a 0-1, b 2-4, c 5-6, d 7-9
    blocks.free("b", "finish")
    del events[:]
    assert resize(blocks, 14) == []
    assert blocks.holes == [(2, 3), (10, 4)]
    assert resize(blocks, 8) == [BlockOp("move", ((7, 2), (8, 3), (9, 4)))]
    assert (blocks.num_blocks, blocks.holes) == (8, [(7, 1)])
    with pytest.raises(OutOfBlocks) as caught:
        blocks.plan_resize(6)
    assert (caught.value.needed, caught.value.free) == (7, 6)
    assert str(caught.value) == (
        "The pool cannot shrink from 8 to 6 blocks: 7 are held by 3 requests (best-fit), which do not fit. "
        "Wait until some end, or preempt them."
    )
    with pytest.raises(AssertionError, match="the books need"):
        blocks.resize(7, [BlockOp("move", ((1, 7),))])
    why = "the pool shrinks to 8 blocks"
    assert told(events) == told([Move("d", 0, ((7, 2), (8, 3), (9, 4)), why)])
    assert blocks.why_never(36, 36) == (
        "36 tokens (prompt and max_tokens) need 9 blocks of 4 in a row, the whole pool has 8"
    )
    blocks.check()


# -- sentences and refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        ("reserve-max", "40 tokens (max_model_len, reserved for each request) need 10 blocks of 4 in a row, "
                        "the whole pool has 7"),
        ("first-fit", "30 tokens (prompt and max_tokens) need 8 blocks of 4 in a row, the whole pool has 7"),
        ("buddy", "30 tokens (prompt and max_tokens) need 8 blocks of 4 in a row, the whole pool has 7, "
                  "its largest power of two is 4"),
        ("grow-by-move", None),
    ],
)  # fmt: skip
def test_why_never(strategy, sentence):
    blocks, _ = make(strategy, 7, max_model_len=40)
    assert blocks.why_never(9, 30) == sentence


def test_why_never_of_known_tokens_and_of_what_is_rounded_up():
    assert (
        make("grow-by-move", 7)[0].why_never(29, 30)
        == "29 tokens need 8 blocks of 4 in a row, the whole pool has 7"
    )
    assert make("buddy", 7)[0].why_never(1, 17) == (
        "17 tokens (prompt and max_tokens) need 5 blocks of 4 in a row (as a power of two 8), "
        "the whole pool has 7, its largest power of two is 4"
    )
    assert make("buddy", 7)[0].why_never(1, 16) is None
    assert make("first-fit", 7)[0].why_never(1, 28) is None


def test_nothing_is_shared():
    blocks, events = make("first-fit", 4)
    assert blocks.attach("a", (), 5) == (0, "contiguous memory shares nothing")
    blocks.allocate("a", 8)
    blocks.publish("a", (), 8)
    assert blocks.num_cached((), 8) == 0
    assert [blocks.ref_count(i) for i in range(4)] == [1, 1, 0, 0]
    assert len(events) == 1
    assert blocks.free("nobody", "finish") == ()


def test_a_told_call_is_refused_once_and_changes_nothing():
    blocks, events = make("first-fit", 8)
    blocks.refuse_calls = {1}
    blocks.allocate("a", 4, max_total_tokens=8)  # call 0
    blocks.allocate("a", 8)  # asks for nothing: no call
    before = blocks.snapshot()
    with pytest.raises(OutOfBlocks, match="needs 3 blocks, 6 free"):
        blocks.allocate("b", 4, max_total_tokens=12)  # call 1
    assert blocks.snapshot() == before
    assert told(events)[-1:] == told([Refuse(1, 3)])
    assert blocks.allocate("b", 4, max_total_tokens=12) == (2, 3, 4)
    assert blocks.num_calls == 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_failed_call_leaves_nothing_behind(strategy):
    blocks, events = make(strategy, 8, max_model_len=16, compaction=True)
    hold(blocks, 4, 2)
    blocks.journal = Journal()
    before, number = blocks.snapshot(), len(events)
    with pytest.raises(OutOfBlocks):
        blocks.allocate("x", 40, max_total_tokens=40)
    with pytest.raises(OutOfBlocks):
        blocks.allocate("a", 40)
    assert (blocks.snapshot(), len(events), len(blocks.journal)) == (before, number, 0)
    assert blocks.take_ops() == []
    blocks.check()


def test_names_are_checked():
    with pytest.raises(
        ConfigError, match="allocator is 'worst-fit'; contiguous ones are reserve-max, first-fit"
    ):
        make("worst-fit", 8)
    with pytest.raises(ConfigError, match="buddy"):
        make("buddy", 8, fit=lambda holes, size: 0)
    assert repr(make("next-fit", 8)[0]) == "ContiguousAllocator(next-fit, 0 of 8 blocks used, holes [(0, 8)])"


def test_a_learners_fit_is_asked_and_a_wrong_one_is_only_an_event():
    answers = iter([6, 99, None])

    def worst_fit(holes, size):
        return next(answers)

    blocks, events = make("first-fit", 10, fit=worst_fit)
    assert blocks.allocate("a", 8) == (6, 7)
    assert blocks.allocate("b", 8) == (0, 1)
    assert blocks.allocate("c", 8) == (2, 3)
    assert blocks.allocate("d", 8) == (4, 5)  # StopIteration
    errors = [event for event in events if isinstance(event, Error)]
    assert [event.where for event in errors] == ["fit"] * 3
    assert errors[0].what == (
        "worst_fit answered 99 for 2 blocks, which is in no hole; first-fit decides: block 0"
    )
    assert "StopIteration" in errors[2].what
    said = []
    quiet, _ = make("first-fit", 10, fit=worst_fit, on_error=said.append)
    quiet.allocate("a", 8)
    assert len(said) == 1


# -- taking back --------------------------------------------------------------------------------------------------


def test_undo_of_moves_after_a_request_has_ended():
    """Plan 2 slides a and b; a, which plan 2 does not work on, ends when plan 1 commits; then plan 2 is cancelled."""
    blocks, _ = make("first-fit", 12, compaction=True)
    hold(blocks, 2, 2, 3, 1)  # a 0-1, b 2-3, c 4-6, d 7, free 8-11
    blocks.free("a", "finish")
    before = blocks.snapshot()
    journal = blocks.journal = Journal()
    blocks.allocate("e", 20)  # b to 0-1, c to 2-4, d to 5, e at 6-10
    blocks.journal = None
    assert blocks.table("c") == [2, 3, 4]
    blocks.free("c", "finish")
    journal.undo()
    assert blocks.take_ops() == []
    blocks.check()
    del before["block_tables"]["c"]
    assert blocks.snapshot()["block_tables"] == before["block_tables"]
    assert blocks.holes == [(0, 2), (4, 3), (8, 4)]


def test_blocks_given_up_and_handed_out_in_one_plan_are_named():
    """The runner keeps their contents until the plan is committed: a cancel gives them back."""
    blocks, _ = make("grow-by-move", 8)
    hold(blocks, 2, 3, 1)  # a 0-1, b 2-4, c 5
    blocks.journal = Journal()
    blocks.free("b", "preempt")
    assert blocks.allocate("c", 8) == (6,)  # free before the plan: nothing to keep
    assert blocks.allocate("a", 12) == (2,)
    assert blocks.allocate("d", 4) == (3,)
    assert blocks.allocate("c", 16) == (6, 7)  # 5-6 move to 4-5; 5 is filled again by the move's own inverse
    assert blocks.take_overwritten() == [2, 3, 4]
    assert blocks.take_overwritten() == []
    blocks.journal = None
    blocks.free("a", "finish")
    blocks.allocate("e", 4)  # no plan is open
    assert blocks.take_overwritten() == []


def test_undo_of_a_trim():
    blocks, _ = make("grow-by-move", 8)
    hold(blocks, 3, 1)
    before, filled = blocks.snapshot(), dict(blocks._num_filled)
    journal = blocks.journal = Journal()
    blocks.trim("a", 4)
    blocks.trim("b", 0)
    assert blocks.snapshot()["block_tables"] == {"a": [0]}
    journal.undo()
    assert (blocks.snapshot(), blocks._num_filled) == (before, filled)
    blocks.check()


def test_compaction_never_costs_the_largest_piece_of_a_buddy_system():
    blocks, _ = make("buddy", 12)
    hold(blocks, 8, 1)
    blocks.free("a", "finish")
    assert (blocks.table("b"), blocks.largest_hole) == ([8], 8)
    assert compact(blocks) == []
    assert blocks.largest_hole == 8


@pytest.mark.parametrize(
    "fault", ["not contiguous", "also", "beyond its extent", "neither", "remembered", "empty"]
)
def test_check_notices(fault):
    blocks, _ = make("first-fit", 8)
    hold(blocks, 2, 2)
    if fault == "not contiguous":
        blocks.tables["a"] = [1, 0]
    elif fault == "also":
        blocks.tables["a"] = [1, 2]
    elif fault == "beyond its extent":
        blocks._num_filled["a"] = 3
    elif fault == "neither":
        blocks.tables["b"].pop()
        blocks._num_filled["b"] = 1
    elif fault == "remembered":
        blocks._num_filled["z"] = 1
    else:
        blocks.tables["z"] = []
    with pytest.raises(AssertionError, match=fault):
        blocks.check()


def test_check_notices_a_crooked_buddy():
    blocks, _ = make("buddy", 8)
    blocks.allocate("a", 8)
    blocks._move("a", 1, "a fault")
    with pytest.raises(AssertionError, match="no piece of a buddy system"):
        blocks.check()


# -- random traffic -----------------------------------------------------------------------------------------------


class Pool:
    """What each token slot holds: (request, its life, position), written and copied as a runner would."""

    def __init__(self, num_blocks, block_size):
        self.size = block_size
        self.blocks = [[None] * block_size for _ in range(num_blocks)]

    def run(self, ops):
        for op in ops:
            assert op.kind == "move"
            for source, to in op.pairs:
                self.blocks[to] = list(self.blocks[source])

    def write(self, table, life, start, end):
        for position in range(start, end):
            self.blocks[table[position // self.size]][position % self.size] = (*life, position)

    def check(self, table, life, num_tokens):
        for position in range(num_tokens):
            held = self.blocks[table[position // self.size]][position % self.size]
            assert held == (*life, position), f"{life} reads {held} at {position}"

    def resize(self, num_blocks):
        more = num_blocks - len(self.blocks)
        self.blocks = self.blocks[:num_blocks] + [[None] * self.size for _ in range(more)]


def fold(events, num_blocks):
    """The snapshot that the events alone give, and where the last extent that was placed ends."""
    tables, last = {}, 0
    for event in events:
        match event:
            case Alloc():
                table = tables.setdefault(event.rid, [])
                assert len(table) == event.first
                if not table:
                    last = event.pblks[-1] + 1
                table.extend(event.pblks)
            case Move():
                assert tables[event.rid] == [source for source, _ in event.pairs]
                tables[event.rid] = [to for _, to in event.pairs]
            case Trim():
                assert tuple(tables[event.rid][-len(event.pblks) :]) == event.pblks
                del tables[event.rid][-len(event.pblks) :]
            case Free():
                assert tuple(reversed(tables.pop(event.rid))) == event.pblks
            case Resize():
                num_blocks = event.num_blocks
    held = {str(block_id): 1 for table in tables.values() for block_id in table}
    free = [block_id for block_id in range(num_blocks) if str(block_id) not in held]
    return {"block_tables": tables, "ref_counts": held, "free": free}, last


class ContiguousMachine(RuleBasedStateMachine):
    """Every call in any order, beside a set of free bits and a pool with contents."""

    @initialize(
        strategy=st.sampled_from(sorted(STRATEGIES)),
        compaction=st.booleans(),
        num_blocks=st.sampled_from([16, 11, 8, 24, 5, 1]),
        block_size=st.sampled_from([2, 1, 3]),
        reserve=st.integers(2, 6),
        mine=st.sampled_from([None, None, "worst", "wrong"]),
        crowd=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 6)), min_size=3, max_size=6),
        leaves=st.sampled_from([None, "a", "b", "ac"]),
    )
    def start(self, strategy, compaction, num_blocks, block_size, reserve, mine, crowd, leaves):
        fit = None if strategy == "buddy" else {None: None, "worst": _worst_fit, "wrong": _wrong_fit}[mine]
        self.blocks, self.events = make(
            strategy, num_blocks, block_size, reserve * block_size, compaction=compaction, fit=fit
        )
        self.size, self.pool, self.first_size = block_size, Pool(num_blocks, block_size), num_blocks
        self.written = {}  # request -> tokens
        self.total = {}  # request -> the most it said it would have
        self.lives = {}  # request -> how often it came
        self.saved = None  # the model when the open journal began
        self.ops = []  # those since then
        for rid, (tokens, extra) in zip("abcdef", crowd, strict=False):
            self.allocate_for(rid, tokens, extra, False)
        for rid in leaves or ():  # holes from the start
            self.blocks.free(rid, "finish")
            self.written.pop(rid, None)

    def _life(self, rid):
        return rid, self.lives[rid]

    def _run(self, ops):
        self.pool.run(ops)
        self.ops += ops

    @rule(
        rid=st.sampled_from("abcdef"),
        step=st.integers(1, 7),
        extra=st.integers(0, 12),
        refused=st.sampled_from([False] * 5 + [True]),
    )
    def allocate(self, rid, step, extra, refused):
        self.allocate_for(rid, step, extra, refused)

    def allocate_for(self, rid, step, extra, refused):
        blocks = self.blocks
        new = not blocks.table(rid)
        num_tokens = self.written.get(rid, 0) + step
        total = num_tokens + extra if new else self.total[rid]
        before, free = blocks.snapshot(), blocks.num_free
        needed = blocks.reservation.size(num_tokens, total) if new else blocks.reservation.rounded(num_tokens)
        shortage = blocks.shortage((), num_tokens, total, 0) if new else None
        assert blocks.why_never(num_tokens, total) is None or not new or shortage
        if refused:
            blocks.refuse_calls.add(blocks.num_calls)
        got = error = None
        try:
            got = blocks.allocate(rid, num_tokens, max_total_tokens=total)
        except OutOfBlocks as caught:
            error = caught
        blocks.refuse_calls.clear()
        held = before["block_tables"].get(rid, [])
        if error:
            assert blocks.snapshot() == before
            assert error.free == free
            assert blocks.take_ops() == []
            if not refused:
                assert not new or shortage == str(error)
                self._could_not(needed, held)
            return
        assert not got or not refused
        assert shortage is None
        self._run(blocks.take_ops())
        table = blocks.table(rid)
        assert tuple(table[len(held) :]) == got
        assert len(table) == max(needed, len(held))
        if new:
            self.lives[rid] = self.lives.get(rid, 0) + 1
            self.total[rid] = total
        self.pool.write(table, self._life(rid), self.written.get(rid, 0), num_tokens)
        self.written[rid] = num_tokens

    @precondition(lambda self: self.written)
    @rule(steps=st.integers(1, 4))
    def decode(self, steps):
        for _ in range(steps):
            for rid in sorted(self.written):
                self.allocate_for(rid, 1, 0, False)

    def _could_not(self, size, own):
        """The refusal was right: no run of bits is long enough, even without the request's own extent."""
        free = sorted([*self.blocks.snapshot()["free"], *own])
        if self.blocks.compaction and not self.blocks.strategy.buddy:
            assert size > len(free)
        runs = {start for start in free if all(start + i in free for i in range(size))}
        if self.blocks.strategy.buddy:
            runs = {start for start in runs if start % size == 0}
        assert not runs

    @precondition(lambda self: self.written)
    @rule(which=st.integers(0, 5), why=st.sampled_from(["finish", "preempt"]))
    def free(self, which, why):
        rid = sorted(self.written)[which % len(self.written)]
        table = list(self.blocks.table(rid))
        assert self.blocks.free(rid, why) == tuple(reversed(table))
        self.given_up = True
        self.written.pop(rid, None)

    @precondition(lambda self: self.written)
    @rule(which=st.integers(0, 5), fewer=st.integers(0, 9))
    def trim(self, which, fewer):
        rid = sorted(self.written)[which % len(self.written)]
        keep = max(1, self.written[rid] - fewer)
        table = list(self.blocks.table(rid))
        self.blocks.trim(rid, keep)
        known = self.blocks.strategy.reserves == "known"
        assert self.blocks.table(rid) == (table[: -(-keep // self.size)] if known else table)
        self.written[rid] = keep
        self.given_up = True

    @precondition(lambda self: self.saved is None)
    @rule()
    def open_journal(self):
        self.blocks.journal = Journal()
        model = dict(self.written), dict(self.total), dict(self.lives)
        pool = [list(block) for block in self.pool.blocks]
        books = self.blocks.snapshot(), self.blocks._last, dict(self.blocks._num_filled)
        self.saved = (books, len(self.events), model, pool)
        self.ops, self.given_up = [], False

    @precondition(lambda self: self.saved is not None)
    @rule(end=st.sampled_from(["commit", "cancel", "cancel after it ran"]))
    def close_journal(self, end):
        journal, self.blocks.journal = self.blocks.journal, None
        if end != "commit":
            books, num_events, model, pool = self.saved
            journal.undo()
            assert (self.blocks.snapshot(), self.blocks._last, self.blocks._num_filled) == books
            self.written, self.total, self.lives = model
            del self.events[num_events:]
            if end == "cancel" or self.given_up:  # blocks given up may have been written to
                self.pool.blocks = pool
            else:
                self.pool.run([op.inverse for op in reversed(self.ops)])
        self.saved = None

    @precondition(lambda self: self.saved is None and self.written)
    @rule(rarely=st.integers(0, 3), num_blocks=st.one_of(st.none(), st.integers(1, 26)))
    def between_steps(self, rarely, num_blocks):
        if rarely == 3 and num_blocks is None:
            self.compact()
        elif rarely == 3:
            self.resize(num_blocks)

    def compact(self):
        before = self.blocks.largest_hole
        self._run(compact(self.blocks))
        assert self.blocks.largest_hole >= before
        if not self.blocks.strategy.buddy:
            assert len(self.blocks.holes) <= 1

    def resize(self, num_blocks):
        before = self.blocks.snapshot()
        held = self.blocks.num_blocks - self.blocks.num_free
        try:
            ops = resize(self.blocks, num_blocks)
        except OutOfBlocks:
            assert self.blocks.snapshot() == before
            assert held > num_blocks or self.blocks.strategy.buddy
        else:
            self.pool.run(ops)
            self.pool.resize(num_blocks)
            self.events.append(Resize(num_blocks))
            assert self.blocks.num_blocks == num_blocks >= held

    @invariant()
    def sound(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check()
        tables = self.blocks.snapshot()["block_tables"]
        assert tables.keys() == self.written.keys()
        for rid, num_tokens in self.written.items():
            self.pool.check(tables[rid], self._life(rid), num_tokens)

    def teardown(self):
        if not hasattr(self, "blocks"):
            return
        assert fold(self.events, self.first_size) == (self.blocks.snapshot(), self.blocks._last)
        for rid in list(self.written):
            self.blocks.free(rid, "finish")
        assert self.blocks.holes == [(0, self.blocks.num_blocks)]


def _worst_fit(holes, size):
    return max((length, start) for start, length in holes)[1]


def _wrong_fit(holes, size):
    return holes[0][0] if size % 2 else "no"


@pytest.mark.parametrize(
    ("examples", "steps"), [(300, 40), pytest.param(3000, 80, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_random_traffic(examples, steps):
    run_state_machine_as_test(
        ContiguousMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            print_blob=True,
        ),
    )
