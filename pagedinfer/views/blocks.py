"""Block map: every physical block of the pool, whose it is and how full; beside it a block table, or the queues."""

from __future__ import annotations

from collections import defaultdict

from pagedinfer.trace.recording import Recording
from pagedinfer.views.density import draw_density
from pagedinfer.views.film import Film, film_of
from pagedinfer.views.frame import Block, Frame
from pagedinfer.views.grid import ID_ROOM, MOST_DRAWN, TOP, grid_of, pool_words, row_numbers
from pagedinfer.views.marks import captioned
from pagedinfer.views.palette import colour_of, texture_of
from pagedinfer.views.panels import draw_queues, draw_table
from pagedinfer.views.svg import (
    CROSSED,
    Drawing,
    document,
    legend,
    number,
    path,
    rect,
    text,
    textures,
    translate,
)

__all__ = ["block_map_svg", "draw_blocks", "draw_pool"]

SIDE = 300


def draw_blocks(film: Film, frame: Frame, lane: int, width: int) -> Drawing:
    """The pool's grid with heading and legend; beside it the block table of `lane`, or the queues if it is -1."""
    side = SIDE if width >= 700 else 0
    pool = draw_pool(film, frame, lane, width - side)
    if not side:
        return pool
    panel = draw_table(film, frame, lane, SIDE) if lane in frame.rows else draw_queues(film, frame, SIDE - 28)
    body = pool.body + translate(width - side + 28, 0, panel.body)
    return Drawing(body, width, max(pool.height, panel.height), pool.words)


def draw_pool(film: Film, frame: Frame, lane: int, width: int) -> Drawing:
    """The pool's grid with heading and legend; above `MOST_DRAWN` blocks the density of many in each cell."""
    if film.num_blocks > MOST_DRAWN:
        return draw_density(film, frame, lane, width)
    columns, w, h = grid_of(film.num_blocks, width - ID_ROOM)
    rows = -(-film.num_blocks // columns)
    head = pool_words(film, frame)
    grid = _Grid(film, frame, columns, w, h)
    body, more = captioned(f"Block map, step {frame.step}", head, width)
    drawn = [*row_numbers(columns, h, rows), translate(ID_ROOM, TOP, grid.draw(lane))]
    key, below = _legend(grid.kinds, width - ID_ROOM)
    drawn.append(translate(ID_ROOM, TOP + rows * h + 22, key))
    body.append(translate(0, more, "".join(drawn)))
    return Drawing("".join(body), width, TOP + rows * h + 24 + more + below, f"{frame.sentence}. {head}.")


class _Grid:
    """Collects the cells by layer, a path each: however big the pool, a picture has few elements."""

    def __init__(self, film: Film, frame: Frame, columns: int, w: int, h: int) -> None:
        self.film, self.columns, self.w, self.h = film, columns, w, h
        self.blocks = frame.blocks(film.block_size)
        gap = 2 if min(w, h) >= 12 else 1
        self.a, self.b = w - gap, h - gap
        self.r = 4 if min(self.a, self.b) >= 18 else 2 if min(self.a, self.b) >= 9 else 0
        self.tints: dict[str, list[str]] = defaultdict(list)
        self.fills: dict[str, list[str]] = defaultdict(list)
        self.texture: dict[str, list[str]] = defaultdict(list)
        self.free: list[str] = []
        self.idle: list[str] = []
        self.reserved: list[str] = []
        self.twins: list[str] = []
        self.kinds: set[str] = set()  # that the legend explains
        self.notches: list[str] = []
        self.rings: list[str] = []
        self.labels: list[str] = []

    def draw(self, lane: int) -> str:
        """The whole grid, with the blocks of `lane` ringed."""
        for block_id in range(self.film.num_blocks):
            x, y = block_id % self.columns * self.w, block_id // self.columns * self.h
            if block := self.blocks.get(block_id):
                self._cell(block, x, y, lane)
            else:
                self.free.append(_box(x, y, self.a, self.b, self.r))
        owners = (block.owners[0][0] for block in self.blocks.values() if block.owners)
        out = [f"<defs>{textures(owners)}{CROSSED if self.idle else ''}</defs>"]
        out.append(path("pi-free pi-s-line", "".join(self.free), 'stroke-width=".75"'))
        out.append(path("pi-cached", "".join(self.idle)))
        out.append(path("", "".join(self.idle), 'fill="url(#pi-crossed)"'))
        out.append(path("pi-page pi-s-muted", "".join(self.reserved), 'stroke-dasharray="3 2"'))
        for layer in (self.tints, self.fills):
            out += [path(tone, "".join(parts)) for tone, parts in sorted(layer.items())]
        out += [path("", "".join(parts), f'fill="{paint}"') for paint, parts in sorted(self.texture.items())]
        out.append(path("pi-s-page", "".join(self.twins), 'fill="none" stroke-width="1.4"'))
        out.append(path("pi-ink pi-s-page", "".join(self.notches), 'stroke-width=".8"'))
        out += self.labels
        out.append(path("pi-s-accent", "".join(self.rings), 'fill="none" stroke-width="2.2"'))
        return "".join(part for part in out if ' d=""' not in part)

    def _cell(self, block: Block, x: int, y: int, lane: int) -> None:
        a, b, r = self.a, self.b, self.r
        if not block.owners:
            self.kinds.add("cached")
            self.idle.append(_box(x, y, a, b, r))
            if a >= 26 and b >= 20:
                word = "cache" if block.is_idle else "pin"
                self.labels.append(rect("pi-page", x + a / 2 - 19, y + b / 2 - 7, 38, 14, 2))
                self.labels.append(
                    text(x + a / 2, y + b / 2 + 4, word, "pi-ink pi-small pi-strong", "middle")
                )
            return
        owner = block.owners[0][0]
        colour, full = colour_of(owner), block.fill / self.film.block_size
        if not full:
            self.kinds.add("reserved")
            self.reserved.append(_box(x + 0.5, y + 0.5, a - 1, b - 1, r))
        elif full < 1:
            self.tints[f"pi-t{colour}"].append(_box(x, y, a, b, r))
        if full:
            part = _box(x, y + b * (1 - full), a, b * full, r)
            self.fills[f"pi-c{colour}"].append(part)
            if texture := texture_of(owner):
                self.texture[f"url(#pi-x{colour}-{texture})"].append(part)
        if block.ref_count > 1:
            self.kinds.add("shared")
            if min(a, b) >= 8:
                self.twins.append(_box(x + 3, y + 3, a - 6, b - 6, max(0, r - 2)))
        if block.written:
            n = number(max(3, min(a, b) * 0.26))
            self.notches.append(f"M{number(x + a - float(n))} {y}h{n}v{n}z")
        if any(lane == o for o, _ in block.owners):
            self.rings.append(_box(x + 0.5, y + 0.5, a - 1, b - 1, r))
        if a >= 26 and b >= 20:  # the label lies wholly on the filled or wholly on the empty part
            place = b / 2 + 4 if full >= 1 or block.ref_count > 1 else b - 5 if full >= 0.5 else 12.5
            name = label = self.film.lanes[owner].label
            if (users := block.ref_count) > 1:  # where the frame of a shared block has room for both
                names = (f"{label} ×{users}", f"{label}×{users}")
                name = next((name for name in names if 7.6 * len(name) <= a - 10), label)
            ink = f"pi-o{colour}" if full >= 0.5 else "pi-ink"
            self.labels.append(text(x + a / 2, y + place, name, f"{ink} pi-small pi-strong", "middle"))


def _box(x: float, y: float, a: float, b: float, r: float) -> str:
    r = min(r, b / 2)
    if r < 1:
        return f"M{number(x)} {number(y)}h{number(a)}v{number(b)}h{number(-a)}z"
    s, u, v = number(r), number(a - 2 * r), number(b - 2 * r)
    right, left = f"h{u}q{s} 0 {s} {s}v{v}q0 {s} -{s} {s}", f"h-{u}q-{s} 0 -{s} -{s}v-{v}q0 -{s} {s} -{s}"
    return f"M{number(x + r)} {number(y)}{right}{left}z"


def _legend(kinds: set[str], width: float) -> tuple[str, int]:
    """What each look means; what this picture does not have is not explained."""

    def box(tone: str) -> str:
        return rect(tone, 0, -11, 14, 14, 3)

    part = path("pi-c0", "M0 -4h14v4q0 3 -3 3h-8q-3 0 -3 -3z")
    corner = path("pi-ink pi-s-page", "M8 -11h6v6z")
    items = [
        ("free", box("pi-free pi-s-line")), ("filled", box("pi-c0")), ("partly filled", box("pi-t0") + part),
        ("written in this step", box("pi-c0") + corner),
    ]  # fmt: skip
    more = {
        "shared": ("shared (× users)", box("pi-c0") + rect("pi-s-page", 3, -8, 8, 8, 0, 'fill="none"')),
        "cached": ("cached, idle", box("pi-cached") + rect("", 0, -11, 14, 14, 3, 'fill="url(#pi-crossed)"')),
        "reserved": ("reserved", rect("pi-page pi-s-muted", 0.5, -10.5, 13, 13, 3, 'stroke-dasharray="3 2"')),
    }
    return legend([*items, *(more[kind] for kind in sorted(kinds))], width)


def block_map_svg(recording: Recording, step: int = -1, request: str | None = None) -> str:
    """The block map at a step as an SVG file; with `request`, that request's blocks are ringed and tabled."""
    film = film_of(recording)
    drawing = draw_blocks(film, film.frame(step), film.lane(request), 940)
    return document("Block map", drawing)
