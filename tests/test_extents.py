"""The address space of contiguous memory: policies by literal holes, and everything against a list of bits."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedinfer.memory.extents import (
    Extents,
    best_fit,
    buddy_fit,
    buddy_lowest,
    buddy_pieces,
    first_fit,
    guarded,
    next_fit,
    power_of_two,
)
from pagedinfer.memory.sliding import fit_below, gather, make_room, pack

HOLES = [(0, 2), (5, 6), (14, 3), (20, 6)]
FAST = settings(max_examples=200, deadline=None, derandomize=True, database=None)


class Bits:
    """The slow twin: one flag per block, and the definitions word for word."""

    def __init__(self, num_blocks):
        self.free = [True] * num_blocks

    def take(self, start, size):
        assert self.fits(start, size)
        self.free[start : start + size] = [False] * size

    def give(self, start, size):
        assert not any(self.free[start : start + size])
        self.free[start : start + size] = [True] * size

    def holes(self):
        found, start = [], None
        for block_id, free in enumerate([*self.free, False]):
            if free and start is None:
                start = block_id
            if not free and start is not None:
                found.append((start, block_id - start))
                start = None
        return found

    def fits(self, start, size):
        return start + size <= len(self.free) and all(self.free[start : start + size])

    def first_fit(self, size, last=0):
        return next((i for i in range(len(self.free)) if self.fits(i, size)), None)

    def next_fit(self, size, last):
        order = [*range(last, len(self.free)), *range(last)]
        return next((i for i in order if self.fits(i, size)), None)

    def best_fit(self, size, last=0):
        rooms = sorted((length, start) for start, length in self.holes() if length >= size)
        return rooms[0][1] if rooms else None


class Buddies:
    """The slow twin of the buddy policy: free lists by size, pieces split in halves and joined again."""

    def __init__(self, num_blocks):
        self.lists = {}
        start = 0
        while start < num_blocks:  # a pool that is no power of two begins as several trees
            size = 1 << (num_blocks - start).bit_length() - 1
            self.lists.setdefault(size, []).append(start)
            start += size

    def allocate(self, size):
        sizes = [s for s, starts in sorted(self.lists.items()) if s >= size and starts]
        if not sizes:
            return None
        start = min(self.lists[sizes[0]])
        self.lists[sizes[0]].remove(start)
        half = sizes[0] // 2
        while half >= size:
            self.lists.setdefault(half, []).append(start + half)
            half //= 2
        return start

    def free(self, start, size):
        while start ^ size in self.lists.get(size, []):
            self.lists[size].remove(start ^ size)
            start, size = min(start, start ^ size), size * 2
        self.lists.setdefault(size, []).append(start)

    def pieces(self):
        return sorted((start, size) for size, starts in self.lists.items() for start in starts)


# -- policies by hand -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "first", "best"), [(1, 0, 0), (2, 0, 0), (3, 5, 14), (4, 5, 5), (6, 5, 5), (7, None, None)]
)
def test_first_fit_takes_the_lowest_and_best_fit_the_tightest(size, first, best):
    assert first_fit(HOLES, size) == first
    assert best_fit(HOLES, size) == best


@pytest.mark.parametrize(
    ("size", "last", "place"),
    [
        (2, 0, 0),
        (2, 1, 5),  # one block is left of the first hole
        (3, 7, 7),  # within the hole where the search ended
        (4, 8, 20),
        (3, 17, 20),
        (3, 24, 5),  # around the end, from the beginning
        (6, 6, 20),
        (6, 21, 5),
        (7, 3, None),
        (1, 99, 0),  # the pool was shrunk meanwhile
    ],
)
def test_next_fit_goes_on_where_it_ended(size, last, place):
    assert next_fit(HOLES, size, last) == place


def test_holes_as_buddies():
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 9, 64, 65)] == [1, 2, 4, 4, 8, 16, 64, 128]
    assert list(buddy_pieces([(0, 12)])) == [(0, 8), (8, 4)]
    assert list(buddy_pieces([(3, 8)])) == [(3, 1), (4, 4), (8, 2), (10, 1)]
    assert list(buddy_pieces(HOLES)) == [
        (0, 2), (5, 1), (6, 2), (8, 2), (10, 1), (14, 2), (16, 1), (20, 4), (24, 2),
    ]  # fmt: skip
    assert buddy_fit(HOLES, 1) == 5  # the smallest piece, not the lowest
    assert buddy_lowest(HOLES, 1) == 0
    assert buddy_fit(HOLES, 2) == buddy_lowest(HOLES, 2) == 0
    assert buddy_fit(HOLES, 4) == 20  # the hole of 6 at 5 has no aligned four
    assert buddy_fit(HOLES, 8) is None


# -- against the twins ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", ["first_fit", "best_fit", "next_fit"])
def test_random_traffic_equals_a_list_of_bits(name, seed):
    draw = random.Random(seed)
    size = draw.choice([1, 7, 16, 33])
    space, bits, held, last = Extents(size), Bits(size), [], 0
    fit = {"first_fit": first_fit, "best_fit": best_fit, "next_fit": next_fit}[name]
    for _ in range(150):
        if draw.random() < 0.6:
            want = draw.randint(1, max(1, size // 3))
            place = fit(space.holes, want, last)
            assert place == getattr(bits, name)(want, last)
            if place is not None:
                space.take(place, want)
                bits.take(place, want)
                held.append((place, want))
                last = place + want
        elif held:
            extent = held.pop(draw.randrange(len(held)))
            space.give(*extent)
            bits.give(*extent)
        space.check()
        assert space.holes == bits.holes()
        assert space.num_free == sum(bits.free)
        assert space.largest == max((length for _, length in bits.holes()), default=0)
        assert space.free_ids() == [i for i, free in enumerate(bits.free) if free]
        for block_id in range(size + 1):
            run = next((n for n in range(size + 1) if not bits.fits(block_id, n + 1)), 0)
            assert space.free_from(block_id) == run


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_blocks", [1, 8, 12, 32, 45])
def test_buddies_without_lists_equal_buddies_with_lists(num_blocks, seed):
    draw = random.Random(seed)
    space, buddies, held = Extents(num_blocks), Buddies(num_blocks), []
    for _ in range(120):
        if draw.random() < 0.6:
            want = 1 << draw.randint(0, 3)
            place = buddy_fit(space.holes, want)
            assert place == buddies.allocate(want)
            if place is not None:
                assert place % want == 0
                space.take(place, want)
                held.append((place, want))
        elif held:
            extent = held.pop(draw.randrange(len(held)))
            space.give(*extent)
            buddies.free(*extent)
        assert list(buddy_pieces(space.holes)) == buddies.pieces()


def test_resize():
    space = Extents(6)
    space.take(0, 2)
    space.resize(9)
    assert space.holes == [(2, 7)]
    space.take(8, 1)
    space.resize(12)
    assert space.holes == [(2, 6), (9, 3)]
    space.resize(9)
    assert (space.holes, space.num_free) == ([(2, 6)], 6)
    with pytest.raises(AssertionError, match="not free"):
        space.resize(8)
    space.check()


def test_misuse_is_noticed():
    space = Extents(8)
    space.take(2, 3)
    for start, size in ((1, 2), (2, 1), (4, 2), (7, 2), (5, 4), (9, 1)):
        with pytest.raises(AssertionError, match="not free"):
            space.take(start, size)
    for start, size in ((1, 2), (0, 1), (4, 2), (7, 1)):
        with pytest.raises(AssertionError, match="free already"):
            space.give(start, size)
    assert space.holes == [(0, 2), (5, 3)]


@pytest.mark.parametrize("holes", [[(0, 2), (2, 1)], [(3, 1), (0, 1)], [(0, 0)], [(3, 2)]])
def test_check_notices(holes):
    with pytest.raises(AssertionError):
        Extents(4, holes).check()


# -- a learner's function ---------------------------------------------------------------------------------------------


class Liar:
    """Says something else than a number, and not even that without trouble."""

    def __repr__(self):
        raise RuntimeError("no repr")


class Numpyish:
    """An integer of another kind, as numpy has them."""

    def __index__(self):
        return 6


def _raises(holes, size):
    raise ValueError("oh")


def _leaves(holes, size):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("fit", "said"),
    [
        (_raises, "_raises raised ValueError: oh; first-fit decides: block 5"),
        (_leaves, "_leaves raised SystemExit: 3"),
        (
            lambda holes, size: None,
            "answered None for 3 blocks, though the hole at 5 has 6; first-fit decides",
        ),
        (lambda holes, size: 3, "answered 3 for 3 blocks, which is in no hole"),
        (lambda holes, size: -1, "answered -1 for 3 blocks, which is in no hole"),
        (lambda holes, size: 26, "which is in no hole"),
        (lambda holes, size: 0, "answered 0 for 3 blocks, but that hole has only 2 from there"),
        (lambda holes, size: 9, "but that hole has only 2 from there"),
        (lambda holes, size: True, "answered True for 3 blocks, which is no block id"),
        (lambda holes, size: 5.0, "answered 5.0 for 3 blocks, which is no block id"),
        (lambda holes, size: "5", "answered '5' for 3 blocks, which is no block id"),
        (lambda holes, size: (5, 6), "which is no block id"),
        (lambda holes, size: Liar(), "raised RuntimeError: no repr"),
        (lambda: 5, "raised TypeError"),
    ],
)
def test_a_wrong_answer_is_said_and_first_fit_decides(fit, said):
    errors = []
    assert guarded(fit, errors.append)(HOLES, 3, 0) == 5
    assert len(errors) == 1
    assert said in errors[0]


def test_a_right_answer_is_taken():
    errors, seen = [], []

    def mine(holes, size):
        seen.append((holes, size))
        return 21

    assert guarded(mine, errors.append)(HOLES, 3, 0) == 21
    assert seen == [(tuple(HOLES), 3)]  # a copy that it cannot change
    assert guarded(lambda holes, size: Numpyish(), errors.append)(HOLES, 3, 0) == 6
    assert type(guarded(lambda holes, size: Numpyish(), errors.append)(HOLES, 3, 0)) is int
    assert errors == []


def test_nobody_is_asked_when_nothing_fits():
    errors = []
    assert guarded(_raises, errors.append)(HOLES, 7, 0) is None
    assert errors == []


# -- making room ------------------------------------------------------------------------------------------------------


def _space(num_blocks, extents):
    space = Extents(num_blocks)
    for start, size in extents.values():
        space.take(start, size)
    return space


def _play(num_blocks, extents, moves):
    """Make the moves one after the other; each must go to free blocks (its own included). Returns the extents."""
    at, space = dict(extents), _space(num_blocks, extents)
    for name, to in moves:
        start, size = at[name]
        space.give(start, size)
        space.take(to, size)
        at[name] = (to, size)
    space.check()
    return at, space


def test_pack_by_hand():
    extents = {"a": (1, 2), "b": (5, 3), "c": (9, 1)}
    space = _space(12, extents)
    assert pack(space.copy(), extents, first_fit) == [("a", 0), ("b", 2), ("c", 5)]
    assert space.holes == [(0, 1), (3, 2), (8, 1), (10, 2)]  # untouched
    assert gather(space, extents, first_fit, 3) == [("a", 0)]  # enough: the others stay
    assert gather(space, extents, first_fit, 7) is None
    assert gather(space, extents, first_fit, 2) == []


def test_pack_keeps_buddies_aligned():
    extents = {"a": (1, 1), "b": (4, 4), "c": (8, 1), "d": (12, 4)}
    space = _space(16, extents)
    assert pack(space.copy(), extents, buddy_lowest) == [("a", 0), ("c", 1), ("d", 8)]
    assert gather(space, extents, buddy_lowest, 4) == [("a", 0), ("c", 1)]


def test_make_room_by_hand():
    extents = {"a": (1, 2), "r": (4, 2), "b": (6, 2), "c": (9, 1)}
    space = _space(12, extents)
    assert make_room(space, extents, "r", 2) == [("c", 11), ("b", 9)]  # holes above are enough: r stays
    assert make_room(space, extents, "r", 3) == [("c", 11), ("b", 9)]
    assert make_room(space, extents, "r", 4) == [("a", 0), ("r", 2), ("c", 11), ("b", 9)]
    assert make_room(space, extents, "c", 2) == []


def test_fit_below_by_hand():
    extents = {"a": (1, 2), "b": (5, 3), "c": (9, 2)}
    space = _space(12, extents)
    assert fit_below(space, extents, first_fit, 12) == []
    assert fit_below(space, extents, first_fit, 10) == [("c", 3)]
    assert fit_below(space, extents, first_fit, 8) == [("c", 3)]
    assert fit_below(space, extents, first_fit, 7) == [("a", 0), ("b", 2), ("c", 5)]
    assert fit_below(space, extents, first_fit, 6) is None


@st.composite
def _layouts(draw, aligned=False):
    num_blocks = draw(st.integers(1, 40))
    space, extents = Extents(num_blocks), {}
    for i in range(draw(st.integers(0, 12))):
        size = 1 << draw(st.integers(0, 3)) if aligned else draw(st.integers(1, 8))
        step = size if aligned else 1
        start = draw(st.integers(0, 39)) // step * step
        if space.free_from(start) >= size:
            space.take(start, size)
            extents[f"r{i}"] = (start, size)
    return num_blocks, extents


@FAST
@given(_layouts(), st.integers(1, 41))
def test_gather_does_whatever_the_free_space_would_do(layout, size):
    num_blocks, extents = layout
    space = _space(num_blocks, extents)
    moves = gather(space, extents, first_fit, size)
    assert (moves is not None) == (size <= space.num_free)
    if moves is not None:
        after, space = _play(num_blocks, extents, moves)
        assert space.largest >= size
        assert {name: n for name, (_, n) in after.items()} == {name: n for name, (_, n) in extents.items()}


@FAST
@given(_layouts())
def test_pack_leaves_one_hole_and_the_order(layout):
    num_blocks, extents = layout
    after, space = _play(num_blocks, extents, pack(_space(num_blocks, extents), extents, first_fit))
    assert len(space.holes) <= 1
    assert sorted(after, key=after.get) == sorted(extents, key=extents.get)


@FAST
@given(_layouts(aligned=True), st.integers(0, 4))
def test_gather_of_buddies(layout, order):
    num_blocks, extents = layout
    space = _space(num_blocks, extents)
    moves = gather(space, extents, buddy_lowest, 1 << order)
    if moves is None:  # pieces of a pool that is a power of two can always be joined
        assert num_blocks & (num_blocks - 1) or space.num_free < 1 << order
        return
    after, space = _play(num_blocks, extents, moves)
    assert buddy_fit(space.holes, 1 << order) is not None
    assert all(start % size == 0 for start, size in after.values())


@FAST
@given(_layouts(), st.data())
def test_make_room_gathers_all_that_is_free(layout, data):
    num_blocks, extents = layout
    if not extents:
        return
    space, name = _space(num_blocks, extents), data.draw(st.sampled_from(sorted(extents)))
    missing = data.draw(st.integers(0, space.num_free))
    after, space = _play(num_blocks, extents, make_room(space, extents, name, missing))
    start, size = after[name]
    assert space.free_from(start + size) >= missing


@FAST
@given(_layouts(), st.integers(1, 40))
def test_fit_below_empties_the_end(layout, end):
    num_blocks, extents = layout
    space = _space(num_blocks, extents)
    moves = fit_below(space, extents, first_fit, end)
    assert (moves is not None) == (sum(size for _, size in extents.values()) <= end)
    if moves is not None:
        after, _ = _play(num_blocks, extents, moves)
        assert all(start + size <= end for start, size in after.values())
