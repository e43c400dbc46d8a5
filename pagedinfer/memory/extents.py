"""The address space of contiguous memory: which runs of blocks are free, where to place a request, how to make room.

A *hole* is a free run `(start, length)` with no free neighbour. Requests hold *extents* between them. How to choose a
hole is the oldest question of storage allocation (Knuth, The Art of Computer Programming, volume 1, section 2.5).
A policy is one small function over the holes, so that it can be read, and written, on its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import index, itemgetter

from pagedinfer.errors import count, describe_error

__all__ = [
    "Extents",
    "Fit",
    "Hole",
    "LearnerFit",
    "best_fit",
    "buddy_fit",
    "buddy_lowest",
    "buddy_pieces",
    "first_fit",
    "guarded",
    "next_fit",
    "power_of_two",
]

Hole = tuple[int, int]
"""(first block, number of blocks)."""

Fit = Callable[[Sequence[Hole], int, int], int | None]
"""(holes by address, size, end of the last extent placed) -> first block of the new extent, None where none fits."""

LearnerFit = Callable[[Sequence[Hole], int], int | None]
"""The same without the third argument: what a learner writes."""


# -- where to place an extent -----------------------------------------------------------------------------------------


def first_fit(holes: Sequence[Hole], size: int, last: int = 0) -> int | None:
    """The start of the lowest hole that is large enough."""
    return next((start for start, length in holes if length >= size), None)


def best_fit(holes: Sequence[Hole], size: int, last: int = 0) -> int | None:
    """The start of the smallest hole that is large enough, the lowest among equals: it leaves the least over."""
    fitting = [(length, start) for start, length in holes if length >= size]
    return min(fitting)[1] if fitting else None


def next_fit(holes: Sequence[Hole], size: int, last: int = 0) -> int | None:
    """The lowest place at `last` or after, where the search ended before; from the beginning when there is none."""
    for start, length in holes:
        place = max(start, last)
        if start + length - place >= size:
            return place
    return first_fit(holes, size)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size` (1 or more)."""
    return 1 << (size - 1).bit_length()


def buddy_pieces(holes: Sequence[Hole]) -> Iterator[Hole]:
    """The free pieces of a buddy system, by address: powers of two long, each at a multiple of its length.

    A buddy system splits a piece in halves until one is small enough, and joins two halves as soon as both are free.
    What that leaves free is a matter of which blocks are free alone: the largest aligned pieces that fit the holes.
    So there are no lists of free pieces to keep, and nothing to join.
    """
    for start, length in holes:
        while length:
            piece = 1 << (length.bit_length() - 1)
            if start:
                piece = min(piece, start & -start)  # the largest power of two that divides `start`
            yield start, piece
            start, length = start + piece, length - piece


def buddy_fit(holes: Sequence[Hole], size: int, last: int = 0) -> int | None:
    """The start of the smallest piece that holds `size` blocks (a power of two), the lowest among equals.

    The buddy system (Knowlton, "A fast storage allocator", CACM 8(10), 1965).
    """
    return best_fit(list(buddy_pieces(holes)), size)


def buddy_lowest(holes: Sequence[Hole], size: int, last: int = 0) -> int | None:
    """The start of the lowest piece that holds `size` blocks (a power of two): where compaction puts an extent."""
    return first_fit(list(buddy_pieces(holes)), size)


def guarded(fit: LearnerFit, on_error: Callable[[str], object]) -> Fit:
    """A learner's function as a policy that cannot do harm.

    It is asked only when some hole is large enough. Whatever is no place within a hole, and whatever it raises, goes
    to `on_error` as a sentence, and first-fit decides.
    """
    name = getattr(fit, "__name__", type(fit).__name__)

    def ask(holes: Sequence[Hole], size: int, last: int = 0) -> int | None:
        default = first_fit(holes, size)
        if default is None:
            return None
        try:
            place, wrong = _judge(fit(tuple(holes), size), holes, size)
        except BaseException as error:  # whatever it is, the step that it happens in must go on
            place, wrong = None, f"raised {describe_error(error)}"
        if wrong:
            on_error(f"{name} {wrong}; first-fit decides: block {default}")
            return default
        return place

    return ask


def _judge(answer: object, holes: Sequence[Hole], size: int) -> tuple[int | None, str]:
    """A learner's answer as a block id, and what is wrong with it."""
    said = f"answered {repr(answer)[:60]} for {count(size, 'block')}"
    if answer is None:
        start, length = next(hole for hole in holes if hole[1] >= size)
        return None, f"{said}, though the hole at {start} has {length}"
    if isinstance(answer, bool) or not hasattr(answer, "__index__"):
        return None, f"{said}, which is no block id"
    place = index(answer)
    ends = [start + length for start, length in holes if start <= place < start + length]
    if not ends:
        return None, f"{said}, which is in no hole"
    if place + size > ends[0]:
        return None, f"{said}, but that hole has only {ends[0] - place} from there"
    return place, ""


# -- the address space ------------------------------------------------------------------------------------------------


class Extents:
    """Which blocks are free: holes by address, no two of them neighbours.

    There are at most as many holes as extents, and one: a change costs by the requests held, never by the blocks.

    Attributes:
        num_blocks: blocks of the address space, 0 to `num_blocks - 1`.
        num_free: blocks in holes.
        holes: the holes by address; read-only for others.
    """

    def __init__(self, num_blocks: int, holes: Sequence[Hole] | None = None) -> None:
        self.num_blocks = num_blocks
        self.holes: list[Hole] = [(0, num_blocks)] if holes is None else list(holes)
        self.num_free = sum(length for _, length in self.holes)

    def copy(self) -> Extents:
        """An independent address space, to try things out."""
        return Extents(self.num_blocks, self.holes)

    @property
    def largest(self) -> int:
        """Length of the largest hole, 0 without any."""
        return max((length for _, length in self.holes), default=0)

    def take(self, start: int, size: int) -> None:
        """Cut blocks `start` to `start + size - 1` out of the hole that they are in."""
        where = self._at_or_before(start)
        assert size > 0 and where >= 0, f"blocks {start} to {start + size - 1} are not free"
        hole, length = self.holes[where]
        before, after = start - hole, hole + length - (start + size)
        assert after >= 0, f"blocks {start} to {start + size - 1} are not free"
        rest = [(hole, before)] if before else []
        self.holes[where : where + 1] = [*rest, (start + size, after)] if after else rest
        self.num_free -= size

    def give(self, start: int, size: int) -> None:
        """Free blocks `start` to `start + size - 1`, joined with the holes on both sides."""
        where, end = self._at_or_before(start), start + size
        first, last, hole = where + 1, where + 1, start
        if where >= 0:
            before, length = self.holes[where]
            assert before + length <= start, f"block {start} is free already"
            if before + length == start:
                first, hole = where, before
        if where + 1 < len(self.holes):
            after, length = self.holes[where + 1]
            assert end <= after, f"block {after} is free already"
            if end == after:
                last, end = where + 2, after + length
        self.holes[first:last] = [(hole, end - hole)]
        self.num_free += size

    def free_ids(self) -> list[int]:
        """Every free block by address."""
        return [block_id for start, length in self.holes for block_id in range(start, start + length)]

    def free_from(self, block_id: int) -> int:
        """Free blocks in a row from this one on; 0 when it is in use, or beyond the end."""
        where = self._at_or_before(block_id)
        if where < 0:
            return 0
        start, length = self.holes[where]
        return max(0, start + length - block_id)

    def resize(self, num_blocks: int) -> None:
        """Change the number of blocks; those that go away must be free."""
        if num_blocks > self.num_blocks:
            self.give(self.num_blocks, num_blocks - self.num_blocks)
        elif num_blocks < self.num_blocks:
            self.take(num_blocks, self.num_blocks - num_blocks)
        self.num_blocks = num_blocks

    def _at_or_before(self, block_id: int) -> int:
        """Position of the last hole that starts at `block_id` or before, -1 without one."""
        return bisect_right(self.holes, block_id, key=itemgetter(0)) - 1

    def check(self) -> None:
        """Assert that the holes are in order, within the pool, not empty, and joined with their neighbours."""
        end = -1
        for start, length in self.holes:
            assert length > 0, f"the hole at {start} is empty"
            assert start > end, f"the hole at {start} overlaps the one before, or should be joined with it"
            end = start + length
        assert end <= self.num_blocks, f"a hole ends at {end}, beyond the {self.num_blocks} blocks"
        assert self.num_free == sum(length for _, length in self.holes), "the number of free blocks is wrong"

    def __repr__(self) -> str:
        return f"Extents({self.num_free} of {self.num_blocks} blocks free, holes {self.holes})"
