"""PNG files by the standard library."""

from __future__ import annotations

import struct
import zlib

__all__ = ["encode_png"]


def encode_png(lines: list[bytearray], colours: list[str]) -> bytes:
    """Rows of palette indices as a PNG file of 8 bits per pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", len(lines[0]), len(lines), 8, 3, 0, 0, 0)
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in colours)
    pixels = zlib.compress(b"".join(b"\0" + line for line in lines), 9)
    parts = chunk(b"IHDR", head) + chunk(b"PLTE", palette) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts
