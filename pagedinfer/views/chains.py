"""Prefix chains: the blocks that the prefix cache knows, as they follow each other; a branch begins a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from pagedinfer.trace.recording import Recording
from pagedinfer.views.film import Film, film_of
from pagedinfer.views.frame import Block, Frame
from pagedinfer.views.palette import colour_of
from pagedinfer.views.svg import CROSSED, Drawing, document, path, rect, text, textures, translate

__all__ = ["chain_rows", "chains_svg", "draw_chains"]

CELL, TALL, GAP, TOP, MAX_ROWS = 46, 24, 6, 44, 14


def chain_rows(cached: Mapping[int, tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """Rows of (depth, blocks): the trie of `Frame.cached`, the first child in line with its parent, others below.

    The browser's twin is `chainRows` in `static/chains.js`.
    """
    holder: dict[int, int] = {}  # key -> block; of several blocks with one key the first
    children: dict[int, list[int]] = defaultdict(list)
    for block_id in sorted(cached):
        holder.setdefault(cached[block_id][0], block_id)
    roots: list[int] = []
    for key, block_id in holder.items():
        parent = cached[block_id][1]
        (children[parent] if parent in holder and parent != key else roots).append(block_id)
    rows, waiting = [], [(0, block_id) for block_id in sorted(roots, reverse=True)]
    while waiting:
        depth, block_id = waiting.pop()
        row, branches = [block_id], []
        while followers := sorted(children[cached[row[-1]][0]]):
            branches += [(depth + len(row), other) for other in followers[1:]]
            row.append(followers[0])
        waiting += branches
        rows.append((depth, row))
    return rows


def draw_chains(film: Film, frame: Frame, lane: int, width: int) -> Drawing:
    """The first chains, a cell per block with its users; cells of `lane` are ringed."""
    rows, blocks = chain_rows(frame.cached), frame.blocks(film.block_size)
    words = (
        f"{len(frame.cached)} cached blocks in {len(rows)} chains"
        if rows
        else "no block is cached at this step"
    )
    out = [text(0, 12, f"Prefix chains, step {frame.step}", "pi-ink pi-h"), text(0, 31, words, "pi-muted")]
    shown = rows[:MAX_ROWS]
    owners = (block.owners[0][0] for block in blocks.values() if block.owners)
    out.append(f"<defs>{textures(owners)}{CROSSED}</defs>")
    longest = max((len(_name(blocks[b])) for _, row in shown for b in row), default=0)
    cell = max(CELL, 20 + 8 * longest)
    fits = max(3, int(width // cell))
    for i, (depth, row) in enumerate(shown):
        y, start = TOP + i * (TALL + GAP), min(depth, fits - 2)
        room = fits - start
        part = row if len(row) <= room else row[: room - 1]
        if depth:  # from the last row that begins before it
            parent = max(j for j in range(i) if shown[j][0] < depth)
            tall = (i - parent) * (TALL + GAP) - TALL / 2
            out.append(
                path("pi-s-muted", f"M{start * cell - 10} {y + TALL / 2 - tall}v{tall}h10", 'fill="none"')
            )
        out += [
            translate((start + j) * cell, y, _cell(blocks[b], lane, cell - 4)) for j, b in enumerate(part)
        ]
        if len(part) < len(row):
            more = f"+{len(row) - len(part)}"
            out.append(text((start + len(part)) * cell + 4, y + 16, more, "pi-muted pi-small"))
    height = TOP + len(shown) * (TALL + GAP)
    if len(rows) > len(shown):
        height += 18
        out.append(text(0, height - 2, f"and {len(rows) - len(shown)} more chains", "pi-muted pi-small"))
    return Drawing("".join(out), width, height, f"Prefix chains: {words}.")


def _name(block: Block) -> str:
    return f"{block.block_id}×{block.ref_count}" if block.ref_count > 1 else str(block.block_id)


def _cell(block: Block, lane: int, w: int) -> str:
    out = []
    if block.owners:
        colour = colour_of(block.owners[0][0])
        out += [rect(f"pi-t{colour}", 0, 0, w, TALL, 3), rect(f"pi-c{colour}", 0, 0, 8, TALL, 3)]
    else:
        out += [rect("pi-cached", 0, 0, w, TALL, 3), rect("", 0, 0, w, TALL, 3, 'fill="url(#pi-crossed)"')]
        out.append(rect("pi-page", 4, 4, w - 8, TALL - 8, 2))
    if any(owner == lane for owner, _ in block.owners):
        out.append(rect("pi-s-accent", 0, 0, w, TALL, 3, 'fill="none" stroke-width="2.2"'))
    x = w / 2 + (4 if block.owners else 0)
    return "".join([*out, text(x, 16, _name(block), "pi-ink pi-small pi-strong", "middle")])


def chains_svg(recording: Recording, step: int = -1, request: str | None = None) -> str:
    """The prefix chains at a step as an SVG file."""
    film = film_of(recording)
    return document("Prefix chains", draw_chains(film, film.frame(step), film.lane(request), 940))
