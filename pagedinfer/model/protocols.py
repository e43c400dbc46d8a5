"""What the runner and `LLM` need of a model, whoever computes it: our decoder, or modules of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pagedinfer.backends.kv_storage import KVStorage
    from pagedinfer.backends.layer_groups import LayerGroups
    from pagedinfer.backends.model_inputs import ModelInputs

__all__ = ["CausalModel", "ModelInfo"]


class ModelInfo(Protocol):
    """What is known of a model before its weights are read."""

    @property
    def name(self) -> str:
        """What it is called."""

    @property
    def vocab_size(self) -> int:
        """How many logits a token gets."""

    @property
    def max_position_embeddings(self) -> int:
        """The most tokens of a request."""

    @property
    def usual_max_len(self) -> int:
        """The most tokens of a request where nobody asks for more."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""

    @property
    def dtype(self) -> str:
        """Storage type: "bfloat16", "float16" or "float32"."""


class CausalModel(Protocol):
    """A model with its weights, computing over a paged KV pool."""

    @property
    def config(self) -> ModelInfo:
        """What is known of it."""

    dtype: torch.dtype
    device: torch.device
    nbytes: int
    """Bytes of all weights."""

    @property
    def layer_groups(self) -> LayerGroups:
        """The groups in which layers with windows can let go of blocks; one if there is nothing to let go."""

    def new_kv(self, num_blocks: int, block_size: int, groups: LayerGroups | None = None) -> KVStorage:
        """Make a KV pool for this model; with `groups` (the model's own) requests have a block table per group."""

    def forward(self, inputs: ModelInputs, kv: KVStorage) -> torch.Tensor:
        """Compute the step's tokens, writing their keys and values, and return logits [S, vocab_size]."""

    def hidden(self, inputs: ModelInputs, kv: KVStorage) -> torch.Tensor:
        """Compute the step's T tokens up to where `logits` goes on, one row each."""

    def logits(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return logits [len(rows), vocab_size] of some rows of what `hidden` gave."""
