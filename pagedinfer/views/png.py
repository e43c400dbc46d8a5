"""The block grid as a PNG file, by the standard library: what a notebook shows where even SVG is not trusted."""

from __future__ import annotations

import struct
import zlib

from pagedinfer.trace.recording import Recording
from pagedinfer.views.density import density_of
from pagedinfer.views.film import Film, film_of
from pagedinfer.views.frame import Frame
from pagedinfer.views.grid import MOST_CELLS, grid_of
from pagedinfer.views.palette import LIGHT, NUM_COLOURS, TINT, colour_of, mix

__all__ = ["block_map_png"]

PAGE, FREE, FULL, EMPTY = 0, 1, 2, 2 + NUM_COLOURS
"""Palette places: background, a free block, the filled and the empty part of a block (plus its colour's number)."""

LIVE, CACHED, MARK = EMPTY + NUM_COLOURS, EMPTY + NUM_COLOURS + 1, EMPTY + NUM_COLOURS + 2

Bar = tuple[
    int, int, float, float
]  # tone of the cell, tone of its filled part, share filled, share cached on top


def block_map_png(recording: Recording, step: int = -1) -> bytes:
    """The blocks of the pool at a step, in the light theme, without labels; of a huge pool its density."""
    film = film_of(recording)
    frame = film.frame(step)
    bars = _density(film, frame) if film.num_blocks > MOST_CELLS else _blocks(film, frame)
    columns, w, h = grid_of(len(bars), 560)
    lines = [bytearray(columns * w) for _ in range(-(-len(bars) // columns) * h)]
    for i, (back, tone, share, cached) in enumerate(bars):
        x, y = i % columns * w, i // columns * h
        empty, idle = h - 1 - round((h - 1) * share), round((h - 1) * cached)
        for dy in range(h - 1):
            part = tone if dy >= empty else CACHED if dy >= empty - idle else back
            lines[y + dy][x : x + w - 1] = bytes([part]) * (w - 1)
            if part == CACHED and w > 4:  # a falling line: grey alone would say too little
                lines[y + dy][x + (w - 2) * dy // (h - 1)] = MARK
    tints = [mix(colour, LIGHT.card, TINT) for colour in LIGHT.lanes]
    return _encode(
        lines, [LIGHT.page, LIGHT.line, *LIGHT.lanes, *tints, LIGHT.live, LIGHT.cached, LIGHT.muted]
    )


def _blocks(film: Film, frame: Frame) -> list[Bar]:
    bars: list[Bar] = [(FREE, FREE, 0, 0)] * film.num_blocks
    for block_id, block in frame.blocks(film.block_size).items():
        if block.owners:
            colour = colour_of(block.owners[0][0])
            bars[block_id] = (EMPTY + colour, FULL + colour, block.fill / film.block_size, 0)
        else:
            bars[block_id] = (FREE, FREE, 0, 1)
    return bars


def _density(film: Film, frame: Frame) -> list[Bar]:
    density = density_of(film, frame, -1)
    idle = (cached / slots for cached, slots in zip(density.cached, density.slots, strict=True))
    return [(FREE, LIVE, share, cached) for share, cached in zip(density.shares(), idle, strict=True)]


def _encode(lines: list[bytearray], colours: list[str]) -> bytes:
    """Rows of palette indices as a PNG file of 8 bits per pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", len(lines[0]), len(lines), 8, 3, 0, 0, 0)
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in colours)
    pixels = zlib.compress(b"".join(b"\0" + line for line in lines), 9)
    parts = chunk(b"IHDR", head) + chunk(b"PLTE", palette) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts
