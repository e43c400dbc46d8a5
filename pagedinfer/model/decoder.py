"""The decoder of the Llama family, written once over a backend's ops.

One layer, with x the output of the part before it and r the residual stream:

    r += x;  x = o_proj(attention(rope(qkv_proj(norm(r)))))
    r += x;  x = down_proj(silu(gate) * up) with gate, up = gate_up_proj(norm(r))

Queries, keys and values are one matrix, gate and up another: two calls instead of five.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.backends.torch_ops import DenseLinear, Linear, TorchOps, rope_frequencies
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.weights import EMBEDDING, OUTPUT, WeightSource, check_weights

__all__ = ["Decoder", "Layer", "MakeLinear", "dense_linear"]

MakeLinear = Callable[[WeightSource, Sequence[str], torch.dtype, torch.device], Linear]
"""Makes one Linear of the named weights, stacked by output; decides how they are held."""


@dataclass(slots=True)
class Layer:
    """The weights of one layer."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def dense_linear(
    source: WeightSource, names: Sequence[str], dtype: torch.dtype, device: torch.device
) -> DenseLinear:
    """Read the named weights one at a time into one dense matrix; at most one of them is held beside it."""
    if len(names) == 1:
        return DenseLinear(source.read(names[0], dtype).to(device))
    rows = [source.info(name).shape[0] for name in names]
    weight = torch.empty(sum(rows), source.info(names[0]).shape[1], dtype=dtype, device=device)
    first = 0
    for name, count in zip(names, rows, strict=True):
        weight[first : first + count] = source.read(name, dtype)
        first += count
    return DenseLinear(weight)


class Decoder:
    """A decoder-only transformer with its weights.

    Attributes:
        config: the model's shape.
        ops: the backend.
        dtype, device: of weights and activations.
        nbytes: bytes of all weights, a tied output counted once.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: TorchOps | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.ops = ops or TorchOps()
        self.dtype = dtype
        self.device = torch.device(device)
        self.layers: list[Layer] = []
        self.nbytes = 0

    @torch.inference_mode()
    def load(self, source: WeightSource, make_linear: MakeLinear = dense_linear) -> Self:
        """Read all weights, one tensor after the other, so that the peak is the model plus one tensor.

        Raises:
            ModelError: a tensor is missing, unexpected or misshapen; the message names it.
        """
        check_weights(source)
        config = self.config

        def tensor(name: str) -> torch.Tensor:
            return source.read(name, self.dtype).to(self.device)

        def linear(*names: str) -> Linear:
            return make_linear(source, names, self.dtype, self.device)

        self.embedding = tensor(EMBEDDING)
        self.layers = []
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            self.layers.append(
                Layer(
                    attention_norm=tensor(prefix + "input_layernorm.weight"),
                    qkv=linear(*(f"{attention}{part}_proj.weight" for part in "qkv")),
                    output=linear(attention + "o_proj.weight"),
                    mlp_norm=tensor(prefix + "post_attention_layernorm.weight"),
                    gate_up=linear(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
                    down=linear(mlp + "down_proj.weight"),
                )
            )
        self.final_norm = tensor("model.norm.weight")
        self.head = linear(OUTPUT) if not config.tie_word_embeddings else DenseLinear(self.embedding)
        self.frequencies = rope_frequencies(config.head_dim, config.rope_theta, self.device)
        self.nbytes = self._count_bytes()
        return self

    def _count_bytes(self) -> int:
        held = [self.embedding.nbytes, self.final_norm.nbytes]
        held += [] if self.config.tie_word_embeddings else [self.head.nbytes]
        for layer in self.layers:
            held += [layer.attention_norm.nbytes, layer.qkv.nbytes, layer.output.nbytes]
            held += [layer.mlp_norm.nbytes, layer.gate_up.nbytes, layer.down.nbytes]
        return sum(held)

    def new_kv(self, num_blocks: int, block_size: int) -> KVStorage:
        """A KV pool for this model, in its backend's layout and the model's dtype."""
        return self.ops.new_kv(
            num_layers=self.config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, kv: KVStorage) -> torch.Tensor:
        """Compute the step's T tokens, writing their keys and values, and return logits [S, vocab_size]."""
        ops, eps = self.ops, self.config.rms_norm_eps
        context = ops.prepare(inputs, kv, self.config.num_heads, self.frequencies)
        x = ops.embed(inputs.token_ids, self.embedding)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = ops.rms_norm_add(x, residual, layer.attention_norm, eps)
            q = ops.rope_and_cache(ops.linear(x, layer.qkv), index, kv, context)
            x = ops.linear(ops.attention(q, index, kv, context), layer.output)
            x, residual = ops.rms_norm_add(x, residual, layer.mlp_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
        x, _ = ops.rms_norm_add(x, residual, self.final_norm, eps)
        return ops.head(x, inputs.logits_indices, self.head)
