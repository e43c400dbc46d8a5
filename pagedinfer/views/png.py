"""The block grid as a PNG file, by the standard library: what a notebook shows where even SVG is not trusted."""

from __future__ import annotations

import struct
import zlib

from pagedinfer.trace.recording import Recording
from pagedinfer.views.blocks import grid_of
from pagedinfer.views.film import film_of
from pagedinfer.views.palette import LIGHT, NUM_COLOURS, TINT, colour_of, mix

__all__ = ["block_map_png"]

PAGE, FREE, FULL, EMPTY = 0, 1, 2, 2 + NUM_COLOURS
"""Palette places: background, a free block, the filled and the empty part of a block (plus its colour's number)."""


def block_map_png(recording: Recording, step: int = -1) -> bytes:
    """The blocks of the pool at a step, in the light theme, without labels."""
    film = film_of(recording)
    blocks = film.frame(step).blocks(film.block_size)
    columns, w, h = grid_of(film.num_blocks, 560)
    lines = [bytearray(columns * w) for _ in range(-(-film.num_blocks // columns) * h)]
    for block_id in range(film.num_blocks):
        x, y, block = block_id % columns * w, block_id // columns * h, blocks.get(block_id)
        colour = colour_of(block.owners[0][0]) if block else 0
        empty = h - 1 - round((h - 1) * block.fill / film.block_size) if block else 0
        for dy in range(h - 1):
            tone = FREE if block is None else (EMPTY if dy < empty else FULL) + colour
            lines[y + dy][x : x + w - 1] = bytes([tone]) * (w - 1)
    tints = [mix(colour, LIGHT.card, TINT) for colour in LIGHT.lanes]
    return _encode(lines, [LIGHT.page, LIGHT.line, *LIGHT.lanes, *tints])


def _encode(lines: list[bytearray], colours: list[str]) -> bytes:
    """Rows of palette indices as a PNG file of 8 bits per pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", len(lines[0]), len(lines), 8, 3, 0, 0, 0)
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in colours)
    pixels = zlib.compress(b"".join(b"\0" + line for line in lines), 9)
    parts = chunk(b"IHDR", head) + chunk(b"PLTE", palette) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts
