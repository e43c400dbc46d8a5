"""A small model that needs no download: seeded random weights, the same on every machine, and a byte
tokenizer.

It is shaped so that faults show. Its logits have a standard deviation above 2 and its attention moves them,
so a wrong position, mask or head changes the greedy text; at the usual initialisation of 0.02 they would
hide.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pagedinfer.errors import ModelError
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.layout import EMBEDDING, OUTPUT, expected_shapes
from pagedinfer.model.weights import WeightInfo

__all__ = ["ByteTokenizer", "TinyWeights", "tiny_config"]

BOS, EOS, PAD = 256, 257, 258
_SPECIAL = {BOS: b"<bos>", EOS: b"<eos>", PAD: b"<pad>"}


def tiny_config(**overrides: Any) -> ModelConfig:
    """The tiny model's shape: 2 layers, 4 query and 2 KV heads of size 16, float32; any field may be
    replaced.

    With a vocabulary too small for the byte tokenizer's special tokens there are none.
    """
    special = overrides.get("vocab_size", PAD) >= PAD
    fields: dict[str, Any] = {
        "architecture": "llama",
        "name": "tiny",
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": BOS if special else None,
        "eos_token_ids": (EOS,) if special else (),
        "dtype": "float32",
    }
    return ModelConfig(**(fields | overrides))


class TinyWeights:
    """A `WeightSource` of seeded random weights.

    Every number is an integer hash of (seed, tensor name, position) scaled once, so that all machines and
    versions agree to the last bit; `torch.randn` promises that on no two of them.
    """

    def __init__(self, config: ModelConfig | None = None, seed: int = 0) -> None:
        self.config = config or tiny_config()
        self.seed = seed
        self._shapes = expected_shapes(self.config)

    def names(self) -> tuple[str, ...]:
        """All tensors of the model."""
        return tuple(self._shapes)

    def info(self, name: str) -> WeightInfo:
        """Shape of one tensor.

        Raises:
            ModelError: the model has no such tensor.
        """
        if name not in self._shapes:
            raise ModelError(f'the tiny model has no tensor "{name}"')
        return WeightInfo(name, self._shapes[name], "F32")

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, made anew at each call."""
        shape = self.info(name).shape
        noise = _noise(self.seed, name, shape)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.25 * noise
        else:
            values = noise * np.float32(self._gain(name) / shape[-1] ** 0.5)
            if name in (EMBEDDING, OUTPUT) and self.config.vocab_size > 127:
                values[_unlikely(shape[0])] *= np.float32(0.25)
        return torch.from_numpy(values.astype(np.float32)).to(dtype)

    def close(self) -> None:
        """Nothing to close."""

    def _gain(self, name: str) -> float:
        """The standard deviation of a matrix's outputs for inputs of 1: sharp attention and wide logits."""
        if name in (EMBEDDING, OUTPUT):
            return 5.0
        return 2.0 if ".q_proj" in name or ".k_proj" in name else 2.5


def _unlikely(vocab_size: int) -> list[int]:
    """All but printable ASCII and the end: their logits are made small, so that a demo shows letters."""
    return [token for token in range(vocab_size) if not (32 <= token < 127 or token == EOS)]


def _noise(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Uniform numbers of mean 0 and standard deviation 1, by SplitMix64's mixer over a counter."""
    stream = (seed * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode()) * 0xD1B54A32D192ED03) % 2**64
    z = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        stream
    )
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    unit = (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    return (unit * np.float32(3.0**0.5)).reshape(shape)


class ByteTokenizer:
    """One id per byte, then begin, end and padding. Implements `engine.protocols.Tokenizer`."""

    vocab_size = 259
    bos_token_id: int | None = BOS
    eos_token_ids: tuple[int, ...] = (EOS,)
    special_token_ids: frozenset[int] = frozenset(_SPECIAL)
    chat_template = "{role}: {content}\\n"
    """How `apply_chat_template` writes one message; for show."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's UTF-8 bytes, after a begin token unless told not to."""
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the bytes; what is no UTF-8 becomes U+FFFD, ids beyond the vocabulary an error."""
        pieces = (
            bytes([token]) if token < BOS else b"" if skip_special_tokens else _SPECIAL[token]
            for token in token_ids
        )
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; special ones are named in angle brackets."""
        return bytes([token_id]) if token_id < BOS else _SPECIAL[token_id]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
    ) -> list[int] | str:
        """One line per message, `role: content`, and `assistant: ` to be continued.

        Returns:
            ids with one begin token, or the text without it where `tokenize` is False.
        """
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        text += "assistant: " if add_generation_prompt else ""
        return self.encode(text) if tokenize else text
