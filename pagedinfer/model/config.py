"""What a checkpoint says about its own shape, read from Hugging Face files or from GGUF metadata.

A feature that the decoder does not compute is an error that names the field, never ignored: a model that runs
with half of its config produces fluent nonsense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedinfer.model.blueprint import Blueprint
from pagedinfer.model.checked import shown
from pagedinfer.model.config_fields import config_error, eos_ids, gguf_fields, hf_fields, refuse_architecture

__all__ = ["ModelConfig"]

_DTYPES = ("bfloat16", "float16", "float32")

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model. `head_dim` is a number of its own, not `hidden_size // num_heads`.

    Raises:
        ModelError: a size is not positive, heads don't divide into groups, or the architecture is unknown.

    """

    architecture: str
    """The family: "llama", "qwen3", ... (`model/families.py`)."""
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends a text, from all the files that name one; sorted."""
    dtype: str
    """Storage type: "bfloat16", "float16" or "float32"; a block-quantized file says "bfloat16"."""
    blueprint: Blueprint = field(default_factory=Blueprint)
    """How the family's block is built; the default is Llama's."""

    def __post_init__(self) -> None:
        refuse_architecture(self.name, self.architecture)
        for size in _POSITIVE:
            if not getattr(self, size) > 0:
                raise config_error(self.name, f"has {size} {getattr(self, size)}; it must be positive")
        if self.num_heads % self.num_kv_heads:
            raise config_error(
                self.name,
                f"has {self.num_heads} query heads and {self.num_kv_heads} KV heads; "
                "each KV head must serve the same number of query heads",
            )
        rotary = self.blueprint.rotary
        turning = int(self.head_dim * rotary.share) if rotary else 2
        if turning < 2 or turning % 2:
            raise config_error(
                self.name,
                f"has head_dim {self.head_dim}, of which {turning} turn; rotary positions need an even number",
            )
        if self.dtype not in _DTYPES:
            raise config_error(
                self.name, f"is stored as {shown(self.dtype)}; supported: {', '.join(_DTYPES)}"
            )
        for token_id in eos_ids(self.bos_token_id, self.eos_token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise config_error(
                    self.name, f"names special token {token_id}, outside its vocabulary of {self.vocab_size}"
                )

    @property
    def usual_max_len(self) -> int:
        """The most tokens of a request where nobody asks for more: up to here longrope leaves its angles alone."""
        rotary = self.blueprint.rotary
        if rotary is None or rotary.scaling != "longrope":
            return self.max_position_embeddings
        return min(rotary.original_length, self.max_position_embeddings)

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> ModelConfig:
        """Read `config.json` (and `generation_config.json`), in the styles of transformers 4 and 5.

        Args:
            config: the parsed `config.json`.
            generation_config: the parsed `generation_config.json`, where there is one.
            name: what to call the model; by default the config's own `_name_or_path`.
            eos_token_ids: end ids known from elsewhere (the tokenizer's), added to the union.

        Raises:
            ModelError: a field is missing, or names a feature that the decoder does not compute.

        """
        return cls(**hf_fields(config, generation_config, name=name, eos_token_ids=eos_token_ids))

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], *, tie_word_embeddings: bool = True, dtype: str = "bfloat16"
    ) -> ModelConfig:
        """Read the metadata of a GGUF file.

        Args:
            metadata: key to value, as `model.gguf.read_header` gives them.
            tie_word_embeddings: GGUF says it only by the absence of `output.weight`, so the caller does.
            dtype: storage type, which the caller knows from the tensors.

        Raises:
            ModelError: a key is missing, or names a feature that the decoder does not compute.

        """
        return cls(**gguf_fields(metadata, tie_word_embeddings=tie_word_embeddings, dtype=dtype))
