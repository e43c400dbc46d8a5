"""Density map: a huge pool, a cell for many blocks, filled as high as its token slots are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedinfer.views.film import Film
from pagedinfer.views.frame import Frame
from pagedinfer.views.grid import ID_ROOM, TOP, grid_of, pool_words, row_numbers
from pagedinfer.views.marks import captioned
from pagedinfer.views.svg import CROSSED, Drawing, legend, number, path, rect, translate

__all__ = ["Density", "density_of", "density_words", "draw_density"]

MOST_DENSITY_CELLS = 2048


@dataclass(frozen=True, slots=True)
class Density:
    """Sums over `each` blocks at a time: token slots live, slots of cached-idle blocks, all slots."""

    each: int
    live: Sequence[int]
    cached: Sequence[int]
    slots: Sequence[int]
    marked: frozenset[int]

    def shares(self) -> list[float]:
        """Live slots / slots of each cell, 0 to 1."""
        return [live / slots for live, slots in zip(self.live, self.slots, strict=True)]


def density_of(film: Film, frame: Frame, lane: int) -> Density:
    """The pool in at most 2,048 cells; marked are those with blocks of `lane`. Twin of `static/density.js`."""
    each, size = 1, film.block_size
    while film.num_blocks > each * MOST_DENSITY_CELLS:
        each *= 2
    count = -(-film.num_blocks // each)
    live, cached = [0] * count, [0] * count
    fills: dict[int, int] = {}
    for row in frame.rows.values():
        for logical, block_id in (pair for table in row.tables() for pair in enumerate(table)):
            fills[block_id] = max(fills.get(block_id, 0), row.fill(logical, size))
    for block_id in frame.cached.keys() - fills.keys() - frame.pins.keys():
        cached[block_id // each] += size
    for block_id, fill in (fills | dict.fromkeys(frame.pins.keys() - fills.keys(), size)).items():
        if block_id >= 0:  # -1: a sliding window has left it
            live[block_id // each] += fill
    slots = [size * min(each, film.num_blocks - i * each) for i in range(count)]
    table = frame.rows[lane].block_table if lane in frame.rows else ()
    return Density(
        each, live, cached, slots, frozenset(block_id // each for block_id in table if block_id >= 0)
    )


def density_words(density: Density) -> str:
    """In words: "512 blocks a cell, live slots in a cell: least 0 %, mean 43 %, most 100 %"."""
    shares = density.shares()
    least, mean, most = (round(100 * x) for x in (min(shares), sum(shares) / len(shares), max(shares)))
    return (
        f"{density.each} blocks a cell, live slots in a cell: least {least} %, mean {mean} %, most {most} %"
    )


def draw_density(film: Film, frame: Frame, lane: int, width: int) -> Drawing:
    """The density map with heading and legend; cells with blocks of `lane` are ringed."""
    density = density_of(film, frame, lane)
    count = len(density.live)
    columns, w, h = grid_of(count, width - ID_ROOM)
    rows = -(-count // columns)
    words = f"{pool_words(film, frame)}; {density_words(density)}"
    out, more = captioned(f"Block map, step {frame.step}", words, width)
    grid = [*row_numbers(columns, h, rows, density.each), f"<defs>{CROSSED}</defs>"]
    grid.append(translate(ID_ROOM, TOP, "".join(_cells(density, columns, w, h))))
    key, below = _legend(width - ID_ROOM)
    grid.append(translate(ID_ROOM, TOP + rows * h + 22, key))
    out.append(translate(0, more, "".join(grid)))
    return Drawing("".join(out), width, TOP + rows * h + 24 + more + below, f"{frame.sentence}. {words}.")


def _cells(density: Density, columns: int, w: int, h: int) -> list[str]:
    free, live, idle, rings = [], [], [], []
    a, b = w - 1, h - 1
    for i, (used, cached, slots) in enumerate(zip(density.live, density.cached, density.slots, strict=True)):
        x, y = i % columns * w, i // columns * h
        free.append(_bar(x, y, a, b))
        tall, more = b * used / slots, b * cached / slots
        live += [_bar(x, y + b - tall, a, tall)] if used else []
        idle += [_bar(x, y + b - tall - more, a, more)] if cached else []
        rings += [_bar(x, y, a, b)] if i in density.marked else []
    layers = (
        ("pi-free pi-s-line", free, 'stroke-width=".5"'), ("pi-live", live, ""), ("pi-cached", idle, ""),
        ("", idle, 'fill="url(#pi-crossed)"'), ("pi-s-accent", rings, 'fill="none" stroke-width="2"'),
    )  # fmt: skip
    return [path(tone, "".join(parts), more) for tone, parts, more in layers if parts]


def _bar(x: float, y: float, w: float, h: float) -> str:
    return f"M{number(x)} {number(y)}h{number(w)}v{number(h)}h{number(-w)}z"


def _legend(width: float) -> tuple[str, int]:
    def box(tone: str) -> str:
        return rect(tone, 0, -11, 14, 14)

    some = box("pi-free pi-s-line") + path("pi-live", "M0 -2h14v5h-14z")
    items = [("none in use", box("pi-free pi-s-line")), ("some", some), ("all in use", box("pi-live"))]
    return legend(items, width)
