"""The block map of one of two runs: who holds each block, how full it is, and whether the other run has it so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import lru_cache

from pagedinfer.trace.replay import State
from pagedinfer.views.divergence import BlockUse, blocks_of
from pagedinfer.views.grid import grid_of
from pagedinfer.views.marks import part_of
from pagedinfer.views.palette import colour_of, texture_of
from pagedinfer.views.svg import fit, number, path, text

__all__ = ["MAX_CELLS", "draw_blocks"]

MAX_CELLS = 1024
"""Blocks of a pool up to which each block is a part of its own, with its request's label."""

Shape = tuple[str, str, str]
"""Classes, path, more attributes."""
Box = tuple[float, float, float, float]


def draw_blocks(
    state: State, different: Collection[int], numbers: Mapping[str, int], most: int, room: float
) -> tuple[list[str], float]:
    """The map, and its height; `different` blocks are ringed, `numbers` are the requests' colours.

    `most` are the blocks of the larger pool, so that a block has the same place in both maps.
    """
    columns, w, h = grid_of(most, room)
    h = min(h, 30)
    gap = 2 if min(w, h) >= 12 else 1
    blocks = blocks_of(state)
    cells: list[str] = []
    layers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for block_id in range(state.num_blocks):
        use, differs = blocks.get(block_id), block_id in different
        lane = numbers[use[0][0][0]] if use else 0
        box = (block_id % columns * w, block_id // columns * h, w - gap, h - gap)
        if most <= MAX_CELLS:
            cells.append(_cell(block_id, use, lane, differs, state.block_size, box))
        else:
            for tone, d, more in _shapes(use, lane, differs, state.block_size, box):
                layers[tone, more].append(d)
    cells += [path(tone, "".join(parts), more) for (tone, more), parts in layers.items()]
    return cells, -(-state.num_blocks // columns) * h


@lru_cache(maxsize=8 * MAX_CELLS)  # from step to step most cells stay as they are
def _cell(block_id: int, use: BlockUse | None, lane: int, differs: bool, size: int, box: Box) -> str:
    """One block, with its request's name where there is room."""
    body = "".join(path(*shape) for shape in _shapes(use, lane, differs, size, box))
    words, rid = f"block {block_id}: free", None
    if use is not None:
        owners, fill = use
        words = f"block {block_id}: {', '.join(rid for rid, _ in owners)}, {fill} of {size} tokens"
        rid = owners[0][0] if len(owners) == 1 else None
        body += _label(owners[0][0], lane, fill / size, box)
    words += ", not so in the other run" if differs else ""
    return part_of(body, rid, [block_id], title=words)


def _shapes(use: BlockUse | None, lane: int, differs: bool, size: int, box: Box) -> list[Shape]:
    """One block's shapes from bottom to top."""
    x, y, w, h = box
    out = [("pi-free", _square(box), "")]
    if use is not None:
        colour, texture, high = colour_of(lane), texture_of(lane), h * use[1] / size
        out = [(f"pi-t{colour}", _square(box), "")]
        if high:
            full = _square((x, y + h - high, w, high))
            out.append((f"pi-c{colour}", full, ""))
            if texture:
                out.append(("", full, f'fill="url(#pi-x{colour}-{texture})"'))
    if differs:
        ring = _square((x + 1, y + 1, w - 2, h - 2))  # with an edge of the page's colour: it may lie on red
        out.append(("pi-s-page", ring, 'fill="none" stroke-width="4.6"'))
        out.append(("pi-s-alarm", ring, 'fill="none" stroke-width="2.2"'))
    return out


def _label(rid: str, lane: int, full: float, box: Box) -> str:
    x, y, w, h = box
    if h < 18 or fit(rid, w - 4, 11) != rid or 0.4 < full < 0.75:
        return ""
    ink = f"pi-o{colour_of(lane)}" if full >= 0.75 else "pi-ink"
    place = y + h / 2 + 4 if full >= 0.75 else y + 13
    return text(x + w / 2, place, rid, f"{ink} pi-small pi-strong", "middle")


def _square(box: Box) -> str:
    x, y, w, h = map(number, box)
    return f"M{x} {y}h{w}v{h}h-{w}z"
