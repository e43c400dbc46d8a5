"""The decoder of all families, written once over a backend's ops and driven by a model's blueprint.

One layer, with x the output of the part before it and r the residual stream:

    r += x;  x = o_proj(attention(rope(qkv_proj(norm(r)))))
    r += x;  x = mlp(norm(r))

Queries, keys and values are one matrix, gate and up another: two calls instead of five. A family may also norm x
before it is added, or only there; its MLP may be a mixture of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch

from pagedinfer.backends.attention import AttentionRule
from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.layer_groups import LayerGroups
from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.backends.torch_ops import DenseLinear, Linear, TorchOps
from pagedinfer.model.blueprint import Rotary
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.layers import Layer, LayerReader, MakeLinear, Norm, dense_linear
from pagedinfer.model.layout import EMBEDDING, OUTPUT, POSITIONS
from pagedinfer.model.rotary import scaled_frequencies
from pagedinfer.model.weights import WeightSource, check_weights

__all__ = ["Decoder"]


class Decoder:
    """A decoder-only transformer with its weights; `max_len` is the most tokens that its caller gives a request.

    Attributes:
        config: the model's shape and blueprint.
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
        max_len: int | None = None,
    ) -> None:
        self.config = config
        self._max_len = config.usual_max_len if max_len is None else max_len
        self.ops = ops or TorchOps()
        self.dtype = dtype
        self.device = torch.device(device)
        self.layers: list[Layer] = []
        self.nbytes = 0
        # As Gemma does it: the factor is rounded to the model's dtype.
        self._embedding_scale = torch.tensor(config.blueprint.embedding_scale, dtype=dtype).item()
        heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._qkv_sizes = [heads, kv_heads, kv_heads]

    @torch.inference_mode()
    def load(self, source: WeightSource, make_linear: MakeLinear = dense_linear) -> Self:
        """Read all weights, one tensor after the other, so that the peak is the model plus one tensor.

        Raises:
            ModelError: a tensor is missing, unexpected or misshapen; the message names it.
        """
        check_weights(source)
        config = self.config
        reader = LayerReader(source, config, self.ops, make_linear, self.dtype, self.device)
        self.embedding = reader.tensor(EMBEDDING)
        self.positions = reader.tensor(POSITIONS) if config.blueprint.rotary is None else None
        kinds = self._kinds()
        self.rules = [self._rule(window) for window in kinds]
        self.layers = [
            reader.layer(index, kinds.index(config.blueprint.window(index)))
            for index in range(config.num_layers)
        ]
        self.final_norm = reader.norm("model.norm")
        self.head: Linear = (
            DenseLinear(self.embedding)
            if config.tie_word_embeddings
            else reader.linear(OUTPUT.removesuffix(".weight"))
        )
        self.nbytes = reader.nbytes
        return self

    def _kinds(self) -> list[int | None]:
        """The windows that occur, each once: layers of one kind share a step's context."""
        windows = [self.config.blueprint.window(layer) for layer in range(self.config.num_layers)]
        return list(dict.fromkeys(windows))

    def _rule(self, window: int | None) -> AttentionRule:
        plan, theta = self.config.blueprint, self.config.rope_theta
        rotary = plan.rotary
        if rotary is not None and window is not None and plan.local_theta is not None:
            rotary, theta = Rotary(), plan.local_theta
        rule = AttentionRule(window=window, scale=plan.attention_scale, softcap=plan.attention_softcap)
        if rotary is None:
            return rule
        frequencies = scaled_frequencies(
            rotary, self.config.head_dim, theta, self.device, max_len=self._max_len
        )
        return replace(rule, frequencies=frequencies, magnitude=rotary.magnitude)

    @property
    def layer_groups(self) -> LayerGroups:
        """The groups in which layers with windows can let go of blocks."""
        plan = self.config.blueprint
        return LayerGroups.by_window([plan.window(layer) for layer in range(self.config.num_layers)])

    def new_kv(self, num_blocks: int, block_size: int, groups: LayerGroups | None = None) -> KVStorage:
        """A KV pool for this model, in its backend's layout and the model's dtype."""
        return self.ops.new_kv(
            num_layers=self.config.num_layers if groups is None else groups.num_rows,
            groups=groups,
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
        return self.logits(self.hidden(inputs, kv), inputs.logits_indices)

    @torch.inference_mode()
    def logits(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab_size] of some rows of `hidden`'s output."""
        return self._softcapped(self.ops.head(x, rows, self.head))

    @torch.inference_mode()
    def hidden(self, inputs: ModelInputs, kv: KVStorage) -> torch.Tensor:
        """Compute the step's T tokens up to the head [T, hidden_size], writing their keys and values."""
        ops, eps, clip = self.ops, self.config.rms_norm_eps, self.config.blueprint.qkv_clip
        kinds = [(layer.rule, group) for layer, group in zip(self.layers, kv.groups.group, strict=True)]
        contexts = {
            (rule, group): ops.prepare(inputs.of_group(group), kv, self.config.num_heads, self.rules[rule])
            for rule, group in dict.fromkeys(kinds)
        }
        x = self._embed(inputs)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            context = contexts[kinds[index]]
            x, residual = self._add(x, residual, layer.attention_norm)
            qkv = ops.linear(x, layer.qkv)
            if layer.qk_norm is not None:
                qkv = ops.qk_norm(qkv, *layer.qk_norm, self._qkv_sizes, eps)
            if clip is not None:
                qkv = qkv.clamp_(-clip, clip)
            q = ops.rope_and_cache(qkv, index, kv, context)
            if inputs.watch is not None:
                inputs.watch(index, q, context.rule)
            x = ops.linear(ops.attention(q, index, kv, context), layer.output)
            x = self._after(x, layer.after_attention)
            x, residual = self._add(x, residual, layer.mlp_norm)
            x = self._after(layer.mlp(x), layer.after_mlp)
        x, _ = self._add(x, residual, self.final_norm)
        return x

    def _embed(self, inputs: ModelInputs) -> torch.Tensor:
        x = self.ops.embed(inputs.token_ids, self.embedding)
        if self.positions is not None:
            x += self.ops.embed(inputs.positions, self.positions)
        return x if self._embedding_scale == 1 else x.mul_(self._embedding_scale)

    def _add(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to the residual stream; the next part's input, normed where the family does so, and the stream."""
        if norm is None:
            residual = x if residual is None else residual.add_(x)
            return residual, residual
        eps = self.config.rms_norm_eps
        if norm.bias is not None:
            return self.ops.layer_norm_add(x, residual, norm.weight, norm.bias, eps)
        return self.ops.rms_norm_add(x, residual, norm.weight, eps)

    def _after(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return x if norm is None else self.ops.rms_norm(x, norm.weight, self.config.rms_norm_eps)

    def _softcapped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.blueprint.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
