"""Making room in contiguous memory: which extents go where, so that what is free comes together.

Functions from an address space and the extents in it to a list of moves. An extent may move
to a place that overlaps its old one: its blocks are then to be copied from the side towards which it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pagedinfer.memory.extents import Extents, Fit, Hole, first_fit

__all__ = ["Moves", "fit_below", "gather", "make_room", "pack"]

Moves = list[tuple[str, int]]
"""(whose extent, its new start), in the order in which they must be made."""


def pack(space: Extents, extents: Mapping[str, Hole], place: Fit) -> Moves:
    """Slide all extents down as far as they go. Changes `space` alone: give it a copy."""
    return _slide(space, extents, place, lambda _: False)


def gather(space: Extents, extents: Mapping[str, Hole], place: Fit, size: int) -> Moves | None:
    """Slide extents down until a new one of `size` blocks has a place; None when even all of them do not do it."""
    if size > space.num_free:
        return None

    def enough(space: Extents) -> bool:
        return place(space.holes, size, 0) is not None

    after = space.copy()
    moves = _slide(after, extents, place, enough)
    return moves if enough(after) else None


def fit_below(space: Extents, extents: Mapping[str, Hole], place: Fit, end: int) -> Moves | None:
    """Move what reaches beyond block `end - 1` into holes below, or slide extents down where that is not enough.

    None when it does not fit there.
    """
    after = space.copy()
    moves: Moves = []
    for name in sorted(extents, key=extents.__getitem__):
        start, size = extents[name]
        if start + size > end:
            after.give(start, size)
            holes = [(hole, min(length, end - hole)) for hole, length in after.holes if hole < end]
            to = place(holes, size, 0)
            if to is None:
                return _slide_below(space.copy(), extents, place, end)
            after.take(to, size)
            moves.append((name, to))
    return moves


def _slide_below(space: Extents, extents: Mapping[str, Hole], place: Fit, end: int) -> Moves | None:
    def enough(space: Extents) -> bool:
        return space.free_from(end) == space.num_blocks - end

    moves = _slide(space, extents, place, enough)
    return moves if enough(space) else None


def _slide(
    space: Extents, extents: Mapping[str, Hole], place: Fit, enough: Callable[[Extents], bool]
) -> Moves:
    """Slide extents down, the lowest first, until `enough(space)`; changes `space`.

    `place` says how low an extent may go: `first_fit` packs them tightly in one pass; under alignment (`buddy_lowest`)
    passes go on until none moves. Each move lowers an extent, so they end.
    """
    at, moved = dict(extents), True
    moves: Moves = []
    while moved:
        moved = False
        for name in sorted(at, key=at.__getitem__):
            if enough(space):
                return moves
            start, size = at[name]
            space.give(start, size)
            to = place(space.holes, size, 0)
            assert to is not None and to <= start, "its old place is free and large enough"
            space.take(to, size)
            if to < start:
                at[name], moved = (to, size), True
                moves.append((name, to))
    return moves


def make_room(space: Extents, extents: Mapping[str, Hole], name: str, missing: int) -> Moves:
    """Slide extents until `missing` free blocks follow the extent `name`; that many must be free somewhere.

    Those above it go up, the highest first (their blocks to be copied in descending order). Where the holes up there
    are not enough, it and those below go down before that, so that all that is free gathers behind it.
    """
    space = space.copy()
    below = {other: extent for other, extent in extents.items() if extent <= extents[name]}
    start, size = extents[name]

    def enough(space: Extents) -> bool:
        return space.free_from(start + size) >= missing

    above = sum(length for hole, length in space.holes if hole > start)
    moves = _slide(space, below, first_fit, lambda _: False) if above < missing else []
    start = dict(moves).get(name, start)
    for other in sorted(extents.keys() - below.keys(), key=extents.__getitem__, reverse=True):
        if enough(space):
            break
        old, length = extents[other]
        space.give(old, length)
        to = old + space.free_from(old) - length
        space.take(to, length)
        if to > old:
            moves.append((other, to))
    return moves
