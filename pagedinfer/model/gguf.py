"""The tensors of GGUF files under Hugging Face's names, decoded in chunks of rows.

Block types are decoded by the `gguf` package. Tensors come with plain file reads: pages of a mapped file would
count as memory of this process.
"""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedinfer.errors import ModelError
from pagedinfer.model.checked import read_into, shown
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.gguf_header import GgufTensor, damaged, read_header
from pagedinfer.model.weights import OUTPUT, CheckpointFile, WeightInfo

if TYPE_CHECKING:
    import torch

__all__ = ["GgufWeights"]

_CHUNK = 1 << 20  # elements decoded at a time: 4 MB of float32

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufWeights(CheckpointFile):
    """A `.gguf` file of Llama, Qwen2 or Qwen3, under Hugging Face's names and row order.

    Raises:
        ModelError: the file is damaged, or asks for what the decoder does not compute.

    """

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._tensors: dict[str, GgufTensor] = {}
        for tensor in header.tensors.values():
            other = self._tensors.setdefault(_hf_name(tensor.name), tensor)
            if other is not tensor:
                raise damaged(path, f"{shown(other.name)} and {shown(tensor.name)} are the same tensor")
        self._types = {name: _storage(path, tensor) for name, tensor in self._tensors.items()}
        _check_places(path, [(self._tensors[name], self._types[name]) for name in self._tensors])
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
        heads = {"q": self.config.num_heads, "k": self.config.num_kv_heads}
        match = re.fullmatch(r".*\.self_attn\.([qk])_proj\.weight", name)
        # llama.cpp's converter turns the rows of its first architecture only.
        return (
            _unpermute(out, heads[match[1]], name) if match and self.config.architecture == "llama" else out
        )

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
            read_into(self._file, memoryview(data), f"the tensor {shown(name)}")
        raw = np.frombuffer(data, dtype=np.uint8).reshape(shape[0], row_bytes)
        try:
            values = gguf.dequantize(raw, kind)
        except NotImplementedError as error:
            raise ModelError(
                f'the tensor {shown(tensor.name)} in "{self.path}" has type {kind.name}, which the gguf package '
                "does not decode; use a file with another quantization"
            ) from error
        return torch.from_numpy(values)


def _unpermute(weight: torch.Tensor, heads: int, name: str) -> torch.Tensor:
    """Undo the row order of llama.cpp's converter, head by head.

    GGUF keeps the two members of a rotary pair in neighbouring rows (2i, 2i + 1); Hugging Face keeps them
    half a head apart (i, i + head_dim / 2). With grouped heads, keys have fewer heads: `num_kv_heads`.
    """
    if weight.shape[0] % (2 * heads):
        raise ModelError(f"{name} has {weight.shape[0]} rows, which are no pairs in each of {heads} heads")
    split = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return split.transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """Translate a name; an unknown one stays as it is, and `check_weights` will report it."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if not match or match[2] not in _NAMES:
        return name
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{_NAMES[match[2]]}.{match[3]}"


def _storage(path: Path, tensor: GgufTensor) -> Any:
    """Look up the `gguf` type of a tensor, after checking that its rows are whole blocks."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(tensor.type_id)
        block, _ = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise ModelError(
            f'the tensor {shown(tensor.name)} in "{path}" has type number {tensor.type_id}, which gguf '
            "does not know; a newer gguf package may"
        ) from error
    if tensor.shape[-1] % block:
        raise ModelError(
            f'the tensor {shown(tensor.name)} in "{path}" has shape {list(tensor.shape)}; '
            f"rows of type {kind.name} must be a multiple of {block} long"
        )
    return kind


def _check_places(path: Path, tensors: list[tuple[GgufTensor, Any]]) -> None:
    """Check that every tensor is inside the file and no two share a byte."""
    size, free, before = path.stat().st_size, 0, ""
    for tensor, kind in sorted(tensors, key=lambda item: item[0].offset):
        end = tensor.offset + math.prod(tensor.shape[:-1]) * _num_bytes(kind, tensor.shape[-1])
        if end > size:
            raise damaged(path, f"the tensor {shown(tensor.name)} ends at byte {end}, the file at {size}")
        if tensor.offset < free:
            raise damaged(path, f"the tensors {shown(before)} and {shown(tensor.name)} overlap")
        free, before = end, tensor.name


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
