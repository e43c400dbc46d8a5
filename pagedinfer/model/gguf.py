"""GGUF files: header, names, and tensors decoded in chunks of rows.

The layout is that of the GGUF specification (ggml-org/ggml, docs/gguf.md). The header is read here, with the
standard library alone: the `gguf` package's reader builds three arrays per vocabulary entry, which takes 2 s
and 160 MB for SmolLM2 (this one 0.1 s and 12 MB). Block types are decoded by the `gguf` package. Tensors come
with plain file reads: pages of a mapped file would count as memory of this process.
"""

from __future__ import annotations

import re
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pagedinfer.errors import ModelError
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.weights import OUTPUT, CheckpointFile, WeightInfo

if TYPE_CHECKING:
    import torch

__all__ = ["GgufHeader", "GgufTensor", "GgufWeights", "read_header"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CHUNK = 1 << 20  # elements decoded at a time: 4 MB of float32

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


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
    """Little-endian values from a file, never beyond its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        self.size = size

    def bytes(self, count: int) -> bytes:
        data = self.file.read(count) if count <= self.size else b""
        if len(data) != count:
            raise ValueError(f"{count} bytes expected, {len(data)} left")
        return data

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.bytes(count * struct.calcsize("<" + code)))

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def string(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        """One metadata value: a number, a string, or a list of either."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        kind, count = self.numbers("I")[0], self.number("Q")
        if count > self.size:
            raise ValueError(f"an array of {count} entries")
        if kind in _SCALARS:
            return list(self.numbers(_SCALARS[kind], count))
        return [self.value(kind) for _ in range(count)]


def read_header(path: Path) -> GgufHeader:
    """Read metadata and the table of tensors.

    Raises:
        ModelError: the file is not GGUF, has a version that is not read, or ends too early.

    """
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size)
        try:
            if reader.bytes(4) != b"GGUF":
                raise ModelError(f'"{path}" is not a GGUF file (it does not start with "GGUF")')
            version = reader.number("I")
            if version not in (2, 3):
                raise ModelError(f'"{path}" is GGUF version {version}; little-endian 2 and 3 are read')
            num_tensors, num_keys = reader.numbers("Q", 2)
            metadata = {}
            for _ in range(num_keys):
                key = reader.string()
                metadata[key] = reader.value(reader.number("I"))
            table = []
            for _ in range(num_tensors):
                name = reader.string()
                dims = reader.numbers("Q", reader.number("I"))
                table.append((name, dims[::-1], *reader.numbers("I"), *reader.numbers("Q")))
        except (ValueError, KeyError, struct.error) as error:
            raise _damaged(path, f"header: {error}") from error
        align = int(metadata.get("general.alignment", 32))
        start = -(-file.tell() // align) * align
    return GgufHeader(
        metadata, {name: GgufTensor(name, shape, kind, start + at) for name, shape, kind, at in table}
    )


class GgufWeights(CheckpointFile):
    """A `.gguf` file of the Llama family, under Hugging Face's names and row order.

    Raises:
        ModelError: the file is damaged, or asks for what the decoder does not compute.

    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._tensors = {_hf_name(tensor.name): tensor for tensor in header.tensors.values()}
        self._types = {name: _storage(path, tensor) for name, tensor in self._tensors.items()}
        infos = [
            WeightInfo(name, tensor.shape, self._types[name].name) for name, tensor in self._tensors.items()
        ]
        config = ModelConfig.from_gguf(
            header.metadata, tie_word_embeddings=OUTPUT not in self._tensors, dtype=_dtype(infos)
        )
        super().__init__(path, config, infos)
        self._lock = threading.Lock()  # seek and read belong together
        self._file = path.open("rb", buffering=0)

    def close(self) -> None:
        """Close the file. Harmless when called twice."""
        self._file.close()

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, decoded to `dtype`; beyond the result it takes a few megabytes.

        Raises:
            ModelError: no such tensor, its type cannot be decoded, or the file is closed.

        """
        import torch

        self.info(name)
        if self._file.closed:
            raise ModelError(f'"{self.path}" is closed; open the weights again to read "{name}"')
        tensor = self._tensors[name]
        out = torch.empty(tensor.shape, dtype=dtype)
        rows = out.view(-1, tensor.shape[-1])
        step = max(1, _CHUNK // tensor.shape[-1])
        for first in range(0, len(rows), step):
            chunk = rows[first : first + step]
            chunk.copy_(self._decode(name, first, chunk.shape))
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(name.split(".")[-2])
        return _unpermute(out, heads) if heads else out

    def _decode(self, name: str, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Rows `first` and following as float32."""
        import gguf
        import numpy as np
        import torch

        tensor, kind = self._tensors[name], self._types[name]
        row_bytes = _num_bytes(kind, shape[-1])
        data = bytearray(shape[0] * row_bytes)
        with self._lock:
            self._file.seek(tensor.offset + first * row_bytes)
            _read_into(self._file, memoryview(data))
        raw = np.frombuffer(data, dtype=np.uint8).reshape(shape[0], row_bytes)
        try:
            values = gguf.dequantize(raw, kind)
        except NotImplementedError as error:
            raise ModelError(
                f'the tensor "{tensor.name}" in "{self.path}" has type {kind.name}, which the gguf package '
                "does not decode; use a file with another quantization"
            ) from error
        return torch.from_numpy(values)


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo the row order of llama.cpp's converter, head by head.

    GGUF keeps the two members of a rotary pair in neighbouring rows (2i, 2i + 1); Hugging Face keeps them
    half a head apart (i, i + head_dim / 2). With grouped heads, keys have fewer heads: `num_kv_heads`.
    """
    split = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return split.transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """Translate a name; an unknown one stays as it is, and `check_weights` will report it."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if not match or match[2] not in _NAMES:
        return name
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_NAMES[match[2]]}.weight"


def _storage(path: Path, tensor: GgufTensor) -> Any:
    """Look up the `gguf` type of a tensor, after checking that its rows are whole blocks inside the file."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        block, _ = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ModelError(
            f'the tensor "{tensor.name}" in "{path}" has type number {tensor.type_id}, which gguf '
            "does not know; a newer gguf package may"
        ) from error
    if not tensor.shape or tensor.shape[-1] % block:
        raise ModelError(
            f'the tensor "{tensor.name}" in "{path}" has shape {list(tensor.shape)}; '
            f"rows of type {kind.name} must be a multiple of {block} long"
        )
    rows = 1
    for size in tensor.shape[:-1]:
        rows *= size
    end = tensor.offset + rows * _num_bytes(kind, tensor.shape[-1])
    if end > path.stat().st_size:
        raise _damaged(path, f'"{tensor.name}" ends at byte {end}, the file at {path.stat().st_size}')
    return kind


def _num_bytes(kind: Any, row: int) -> int:
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    return int(row // block * size)


def _dtype(infos: list[WeightInfo]) -> str:
    """Name the dtype of the matrices if they are all plain; else bfloat16, in which such models are made."""
    matrices = {info.storage for info in infos if len(info.shape) > 1}
    for storage, dtype in (("F32", "float32"), ("F16", "float16")):
        if matrices == {storage}:
            return dtype
    return "bfloat16"


def _read_into(file: Any, view: memoryview) -> None:
    """Fill `view`; a raw read may return less than asked for."""
    while view:
        count = file.readinto(view)
        if not count:
            raise ModelError("the file became shorter while it was read; download it again")
        view = view[count:]


def _damaged(path: Path, detail: str) -> ModelError:
    return ModelError(f'"{path}" is damaged or incomplete ({detail}); delete it and fetch it again')
