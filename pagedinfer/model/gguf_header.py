"""The header of a GGUF file: metadata, and where the tensors lie.

The layout is that of the GGUF specification (ggml-org/ggml, docs/gguf.md). It is read here, with the standard
library alone: the `gguf` package's reader builds three arrays per vocabulary entry, which takes 2 s and 160 MB
for SmolLM2 (this one 0.1 s and 12 MB). Every count and length is a claim: it is compared with the bytes that are
left, and with what the largest models need, before anything is made of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pagedinfer.errors import ModelError
from pagedinfer.model.checked import check_regular, printable, shown

__all__ = ["GgufHeader", "GgufTensor", "damaged", "read_header"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)

# What a header may claim. The arrays of a vocabulary of 262,144 (Gemma 3) have 1.3 million entries together.
_MAX_HEADER = 1 << 28  # bytes
_MAX_KEYS = 1 << 16
_MAX_ENTRIES = 1 << 21  # of all arrays together
_MAX_TENSORS = 1 << 18
_MAX_NAME = (1 << 16) - 1  # bytes of a key, by the specification
_MAX_DIMS = 4  # by the specification
_MAX_ALIGNMENT = 1 << 24


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` is in torch's order (rows first); the file has it reversed."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """All of a GGUF file but the tensors' contents."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Reader:
    """Little-endian values from a file, never beyond its end; `where` is the field being read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size
        self.at = 0
        self.entries = 0
        self.where = "the header"

    def bytes(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise ValueError(f"{count} bytes expected, {self.size - self.at} left")
        self.at += count
        if self.at > _MAX_HEADER:
            raise ValueError(f"{count} bytes make the header longer than {_MAX_HEADER >> 20} MB")
        return self.file.read(count)

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize("<" + code)))

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def count(self, code: str, most: int) -> int:
        """Read how many of something follow."""
        value = int(self.number(code))
        if value > most:
            raise ValueError(f"claims {value}, at most {most} are read")
        return value

    def string(self) -> str:
        return self.bytes(int.from_bytes(self.bytes(8), "little")).decode("utf-8")

    def name(self) -> str:
        """A metadata key or a tensor's name."""
        return self.bytes(self.count("Q", _MAX_NAME)).decode("utf-8")

    def value(self) -> Any:
        """One metadata value, after its type: a number, a string, or a list of either."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self.string() if kind == _STRING else self.number(_scalar(kind))
        kind, count = self.number("I"), self.count("Q", _MAX_ENTRIES - self.entries)
        self.entries += count
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return list(self.numbers(_scalar(kind), count))


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError("an array of arrays" if kind == _ARRAY else f"value type {kind} is unknown")
    return _SCALARS[kind]


def read_header(path: Path) -> GgufHeader:
    """Read metadata and the table of tensors.

    Raises:
        ModelError: the file is not GGUF, has a version that is not read, ends too early, or contradicts itself;
            the message names the field.

    """
    check_regular(path)
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size)
        try:
            _check_version(path, reader)
            reader.where = "number of tensors"
            num_tensors = reader.count("Q", _MAX_TENSORS)
            metadata = _read_metadata(reader)
            table = [
                _read_tensor(reader, f"tensor {index + 1} of {num_tensors}") for index in range(num_tensors)
            ]
        except (ValueError, struct.error) as error:
            raise damaged(path, f"{reader.where}: {error}") from error
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or not 1 <= align <= _MAX_ALIGNMENT or align & (align - 1):
        raise ModelError(
            f'"{path}" has general.alignment {shown(align)}; it must be a power of two up to {_MAX_ALIGNMENT}'
        )
    start = -(-reader.at // align) * align
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in table:
        if name in tensors:
            raise damaged(path, f"the tensor {shown(name)} stands there twice")
        if offset % align:
            raise damaged(path, f"the tensor {shown(name)} has offset {offset}, no multiple of {align}")
        tensors[name] = GgufTensor(name, shape, kind, start + offset)
    return GgufHeader(metadata, tensors)


def _check_version(path: Path, reader: _Reader) -> None:
    if reader.bytes(min(4, reader.size)) != b"GGUF":
        raise ModelError(f'"{path}" is not a GGUF file (it does not start with "GGUF")')
    reader.where = "version"
    version = reader.number("I")
    if version in _VERSIONS:
        return
    what = f"GGUF version {version}"
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        what = "a big-endian GGUF file"
    raise ModelError(f'"{path}" is {what}; little-endian files of version 2 and 3 are read')


def _read_metadata(reader: _Reader) -> dict[str, Any]:
    reader.where = "number of metadata keys"
    metadata: dict[str, Any] = {}
    num_keys = reader.count("Q", _MAX_KEYS)
    for index in range(num_keys):
        reader.where = f"metadata key {index + 1} of {num_keys}"
        key = reader.name()
        if key in metadata:
            raise ValueError(f"{shown(key)} stands there twice")
        reader.where = printable(key) or "the value of the key without a name"
        metadata[key] = reader.value()
    return metadata


def _read_tensor(reader: _Reader, where: str) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset from the start of the data."""
    reader.where = where
    name = reader.name()
    reader.where = f"the tensor {shown(name)}"
    shape = reader.numbers("Q", reader.count("I", _MAX_DIMS))[::-1]
    if not shape or 0 in shape:
        raise ValueError(f"its shape is {list(shape)}; each dimension must be 1 or more")
    return name, shape, reader.number("I"), reader.number("Q")


def damaged(path: Path, detail: str) -> ModelError:
    """Make the error of a file whose parts contradict each other."""
    return ModelError(f'"{path}" is damaged or incomplete ({detail}); delete it and fetch it again')
