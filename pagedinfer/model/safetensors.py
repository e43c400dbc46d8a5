"""One safetensors file: its header, checked, and its tensors, read in chunks.

The format is eight bytes of length, a JSON header, and the tensors' bytes without gaps (huggingface/safetensors,
README). It is read here, not by the package of that name, for three reasons: errors name the tensor; pages of a
mapped file count as memory of this process; and a mapped file that becomes shorter kills it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedinfer.errors import ModelError
from pagedinfer.model.checked import check_regular, parse_json, printable, read_into, shown, text_of, whole

if TYPE_CHECKING:
    import torch

__all__ = ["StoredTensor", "read_tensor", "tensors_of"]

_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MAX_DIMS = 8
_MAX_OFFSET = 2**63 - 1
_TYPES = {"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2)}
_CHUNK = 1 << 20  # elements read at a time


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    storage: str
    file: Path
    start: int
    """Bytes from the start of the file."""


def tensors_of(file: Path) -> list[StoredTensor]:
    """Read the header: one entry per tensor, in the order of their bytes.

    Raises:
        ModelError: the header lies about its length, or a tensor about its place, size or shape.

    """
    check_regular(file)
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise _damaged(file, f"its header claims {length} bytes, the file has {size}")
        header = parse_json(opened.read(length), f'the header of "{file}"', _unique)
    header.pop("__metadata__", None)
    found = sorted((*_extent(file, name, entry), name, entry) for name, entry in header.items())
    at, tensors = 0, []
    for begin, end, name, entry in found:
        if begin != at:
            what = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            raise _damaged(file, f"the tensor {shown(name)} begins at byte {begin} and {what}")
        at = end
        tensors.append(StoredTensor(name, tuple(entry["shape"]), entry["dtype"], file, 8 + length + begin))
    if at != size - 8 - length:
        last = f"the tensor {shown(found[-1][2])} ends" if found else "no tensor is there, so they end"
        raise _damaged(file, f"{last} at byte {at} of {size - 8 - length}")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} stands there twice")
        found[key] = value
    return found


def _extent(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Check one entry of the header; first byte and end, counted from the first tensor."""
    what = f'the tensor {shown(name)} in "{file}"'
    text_of(name, f'a tensor name in "{file}"')
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{what} is described as {shown(entry)}; it must have dtype, shape and data_offsets")
    dtype = text_of(entry["dtype"], f"the dtype of {what}")
    for key, longest in (("shape", _MAX_DIMS), ("data_offsets", 2)):
        if not isinstance(entry[key], list) or len(entry[key]) > longest:
            raise ModelError(f"{what} has {key} {shown(entry[key])}; it must be a list of up to {longest}")
    shape = [whole(dim, f"a dimension of {what}", low=1, high=_MAX_OFFSET) for dim in entry["shape"]]
    offsets = [whole(at, f"a data offset of {what}", high=_MAX_OFFSET) for at in entry["data_offsets"]]
    if len(offsets) != 2 or offsets[0] >= offsets[1]:
        raise ModelError(f"{what} has data_offsets {shown(offsets)}; they must be its first byte and its end")
    entry["shape"] = shape
    claimed = math.prod(shape) * _TYPES[dtype][1] if dtype in _TYPES else None
    if claimed not in (None, offsets[1] - offsets[0]):
        raise ModelError(
            f"{what} has shape {shape} of {dtype}, {claimed} bytes, but {offsets[1] - offsets[0]} in the file"
        )
    return offsets[0], offsets[1]


def read_tensor(tensor: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    """One tensor, converted to `dtype`; beyond the result it takes a few megabytes.

    Raises:
        ModelError: it is not stored as plain floating point, or the file has changed.

    """
    import torch

    what = f'the tensor "{printable(tensor.name)}"'
    if tensor.storage not in _TYPES:
        raise ModelError(
            f'{what} in "{tensor.file}" is stored as {printable(tensor.storage)}; '
            f"supported in safetensors: {', '.join(_TYPES)}"
        )
    stored, size = _TYPES[tensor.storage]
    out = torch.empty(tensor.shape, dtype=dtype)
    flat = out.view(-1)
    chunk = torch.empty(min(_CHUNK, len(flat)), dtype=getattr(torch, stored))
    view = memoryview(chunk.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy says no Buffer
    check_regular(tensor.file)
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.start)
        for first in range(0, len(flat), _CHUNK):
            part = flat[first : first + _CHUNK]
            read_into(file, view[: len(part) * size], what)
            part.copy_(chunk[: len(part)])
    return out


def _damaged(file: Path, detail: str) -> ModelError:
    return ModelError(f'"{file}" is damaged or incomplete ({detail}); download it again')
