"""Protocol buffers, written by hand: the four kinds of field that a trace file needs.

A message is its fields one after the other, so a message under construction is plain `bytes` and `+` puts two parts
together. A field is a tag (its number and wire type) and a value: a varint (seven bits a byte, the low ones first),
eight bytes, or a length and that many bytes. Source: "Encoding", the protocol buffers documentation.
"""

from __future__ import annotations

import struct

__all__ = ["double", "integer", "message", "text"]

VARINT, EIGHT_BYTES, LENGTH = 0, 1, 2
"""Wire types."""


def _varint(value: int) -> bytes:
    """`value` (not negative) seven bits at a time, the low ones first; all bytes but the last have the high bit."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def integer(field: int, value: int) -> bytes:
    """A field of type int32, int64, uint32, uint64, bool or enum; a negative number is its 64-bit complement."""
    return _tag(field, VARINT) + _varint(int(value) & 0xFFFF_FFFF_FFFF_FFFF)


def double(field: int, value: float) -> bytes:
    """A field of type double."""
    return _tag(field, EIGHT_BYTES) + struct.pack("<d", value)


def text(field: int, value: str) -> bytes:
    """A field of type string; half a surrogate pair, which UTF-8 cannot hold, becomes its escape."""
    return message(field, value.encode("utf-8", "backslashreplace"))


def message(field: int, *parts: bytes) -> bytes:
    """A field that holds a message, given in parts."""
    body = b"".join(parts)
    return _tag(field, LENGTH) + _varint(len(body)) + body
