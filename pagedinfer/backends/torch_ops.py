"""The decoder's ops in plain torch: the readable twin that every faster backend is compared with.

Shapes: T tokens in the step, H query heads and K key-value heads of size D, hidden size C, intermediate size I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from pagedinfer.backends.attention import AttentionRule, Span, attend, make_spans
from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.layer_groups import LayerGroups
from pagedinfer.backends.model_inputs import ModelInputs

__all__ = ["BiasedLinear", "DenseLinear", "Linear", "StepContext", "TorchOps", "rope_frequencies"]


class Linear(Protocol):
    """A matrix that decides for itself how it is held: dense, and later packed, quantized or streamed."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] times the transposed matrix: [T, out_features]."""
        ...


class DenseLinear:
    """The weight as it is, [out_features, in_features]."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: [T, in_features] to [T, out_features]."""
        return F.linear(x, self.weight)


class BiasedLinear:
    """A matrix, however it is held, and a bias [out_features] that is added to its product."""

    __slots__ = ("bias", "linear")

    def __init__(self, linear: Linear, bias: torch.Tensor) -> None:
        self.linear = linear
        self.bias = bias

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.linear.nbytes + self.bias.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply and add: [T, in_features] to [T, out_features]."""
        return self.linear(x).add_(self.bias)


@dataclass(slots=True)
class StepContext:
    """What all layers of one kind share in a step, computed once.

    Attributes:
        slot_mapping: [T], where keys and values go.
        cos, sin: [T, 1, R], the rotary factors of the R dimensions that turn, in the model's dtype, `sin` negative
            in its first half; None where none turns.
        spans: who attends to what; together they cover the T tokens.
        rule: how they attend.
    """

    slot_mapping: torch.Tensor
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    spans: list[Span]
    rule: AttentionRule


def rope_frequencies(head_dim: int, theta: float, device: torch.device | str = "cpu") -> torch.Tensor:
    """Angle per position of each pair of dimensions, [head_dim // 2] float32 (RoFormer, arXiv 2104.09864)."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)


class TorchOps:
    """The ops. They keep no state, so one instance serves any number of models."""

    def new_kv(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        groups: LayerGroups | None = None,
    ) -> KVStorage:
        """Allocate the KV pool in the layout that these ops read."""
        return KVStorage(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            groups=groups,
        )

    def prepare(self, inputs: ModelInputs, kv: KVStorage, num_heads: int, rule: AttentionRule) -> StepContext:
        """Compute once per step what every layer of a kind needs: rotary factors, gather indices, masks."""
        cos, sin = None, None
        if rule.frequencies is not None:
            angles = inputs.positions[:, None].float() * rule.frequencies
            cos, sin = angles.cos() * rule.magnitude, angles.sin() * rule.magnitude
            cos = torch.cat((cos, cos), -1).to(kv.dtype).unsqueeze(1)
            sin = torch.cat((-sin, sin), -1).to(kv.dtype).unsqueeze(1)
        spans = make_spans(inputs, kv, num_heads // kv.num_kv_heads, rule.window)
        return StepContext(inputs.slot_mapping, cos, sin, spans, rule)

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table, [T, C]."""
        return table.index_select(0, token_ids)

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """Apply a matrix, however it is held."""
        return linear(x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Divide rows by their root mean square, in float32; `weight` [C] may be float32 beside a smaller `x`."""
        if weight.dtype == x.dtype:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)

    def rms_norm_add(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual stream, in place, and normalize the sum as `rms_norm` does.

        Returns:
            the normalized [T, C] and the residual stream [T, C].
        """
        residual = x if residual is None else residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def layer_norm_add(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do what `rms_norm_add` does with a norm that takes the mean away and adds a bias."""
        residual = x if residual is None else residual.add_(x)
        return F.layer_norm(residual, weight.shape, weight, bias, eps), residual

    def qk_norm(
        self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, sizes: list[int], eps: float
    ) -> torch.Tensor:
        """Normalize, in place, the queries and keys of qkv [T, sum(sizes)] over as many as the weights have."""
        total, (q, k, _) = qkv.shape[0], sizes
        for part, weight in ((qkv[:, :q], q_weight), (qkv[:, q : q + k], k_weight)):
            part.copy_(self.rms_norm(part.view(total, -1, len(weight)), weight, eps).flatten(1))
        return qkv

    def rope_and_cache(
        self, qkv: torch.Tensor, layer: int, kv: KVStorage, context: StepContext
    ) -> torch.Tensor:
        """Rotate queries and keys [T, (H + 2K) * D] by their positions and store keys and values.

        Returns:
            the rotated queries, [T, H, D].
        """
        total, size, num_kv_heads = qkv.shape[0], kv.head_dim, kv.num_kv_heads
        heads = qkv.view(total, -1, size)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        if context.cos is not None and context.sin is not None:
            turning = context.cos.shape[-1]
            rotated = heads[:, : num_heads + num_kv_heads, :turning]
            swapped = rotated.reshape(total, -1, 2, turning // 2).flip(2).view(rotated.shape)
            torch.addcmul(rotated * context.cos, swapped, context.sin, out=rotated)
        kv.write(layer, context.slot_mapping, heads[:, num_heads:].view(total, 2, num_kv_heads, size))
        return heads[:, :num_heads]

    def attention(self, q: torch.Tensor, layer: int, kv: KVStorage, context: StepContext) -> torch.Tensor:
        """Causal attention of q [T, H, D] over each request's own blocks; a group of heads shares a KV head.

        Returns:
            [T, H * D].
        """
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        heads = kv.heads(layer)
        for span in context.spans:
            gathered = heads.index_select(0, span.heads).view(2, -1, span.length, kv.head_dim)
            keys, values = gathered.unbind(0)
            for tile in span.tiles:
                out[tile.tokens] = attend(
                    q[tile.tokens],
                    keys[:, tile.seen],
                    values[:, tile.seen],
                    tile.mask,
                    kv.num_kv_heads,
                    context.rule,
                )
        return out.flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [T, 2 * I], gate first: [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gelu(gate) * up of [T, 2 * I], gate first, by the tanh formula: [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """GELU by the tanh formula."""
        return F.gelu(x, approximate="tanh")

    def route(self, scores: torch.Tensor, used: int, normalized: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts by router scores [T, E].

        Returns:
            the weights [T, used] of the chosen, shares of all E or of the chosen only; and which they are, [T, used].
        """
        weights, chosen = scores.float().softmax(-1).topk(used, -1)
        if normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(scores.dtype), chosen

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        each: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    ) -> torch.Tensor:
        """Sum, for each token of x [T, C], the outputs of its chosen experts times their weights: [T, C].

        An expert runs once per step, on the tokens that chose it.
        """
        out = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, tokens, each[expert](x[tokens]) * weights[tokens, place, None])
        return out

    def head(self, x: torch.Tensor, logits_indices: torch.Tensor, linear: Linear) -> torch.Tensor:
        """Logits [S, vocab_size] of the wanted rows only."""
        return linear(x.index_select(0, logits_indices))
