"""What the block map and its density map share: the grid's geometry, its row numbers, the pool in words."""

from __future__ import annotations

from pagedinfer.views.film import Film
from pagedinfer.views.frame import Frame
from pagedinfer.views.svg import short, text

__all__ = ["ID_ROOM", "MOST_CELLS", "MOST_DRAWN", "TOP", "grid_of", "pool_words", "row_numbers"]

ID_ROOM = 36
"""Room left of the grid for the number of each row's first block."""

TOP = 44


MOST_CELLS = 16_384
"""Above so many blocks a cell of the live map and the PNG stands for many of them."""

MOST_DRAWN = 4096
"""Above so many blocks a cell of the SVG does: a saved notebook holds the picture, and stays small."""


def grid_of(num_blocks: int, width: float) -> tuple[int, int, int]:
    """Columns, and width and height in pixels of a cell, that show the pool in `width` by at most 490 pixels."""
    columns = 8
    while True:
        cell = max(3, min(76, int(width // columns)))
        height = min(cell, 42)
        if -(-num_blocks // columns) * height <= 490 or cell == 3:
            return columns, cell, height
        columns += 8 if columns < 128 else 64


def pool_words(film: Film, frame: Frame) -> str:
    """In words: "61 of 64 blocks in use, 2 cached and idle, 16 tokens each"."""
    idle = frame.memory.cached // film.block_size
    kept = f"{idle} cached and idle, " if idle else ""
    host = f"; {frame.memory.host} in host memory" if frame.memory.host else ""
    return (
        f"{frame.memory.used} of {film.num_blocks} blocks in use, {kept}{film.block_size} tokens each{host}"
    )


def row_numbers(columns: int, h: int, rows: int, each: int = 1) -> list[str]:
    """The number of the first block of each row, or of every so many rows where they are low."""
    return [
        text(
            ID_ROOM - 8,
            TOP + 4 + (row + 0.5) * h,
            short(row * columns * each) if each > 1 else str(row * columns),
            "pi-muted pi-small pi-num",
            "end",
        )
        for row in range(0, rows, 1 if h >= 13 else -(-14 // h))
    ]
