"""The decoder's ops in plain torch: the readable twin that every faster backend is compared with.

Shapes: T tokens in the step, H query heads and K key-value heads of size D, hidden size C, intermediate size I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.model_inputs import ModelInputs

__all__ = [
    "PADDING",
    "TILE",
    "DenseLinear",
    "Linear",
    "Span",
    "StepContext",
    "Tile",
    "TorchOps",
    "attention_reference",
    "rope_frequencies",
]

TILE = 64
"""Neighbouring tokens of a chunk that attend in one call."""
PADDING = 512
"""Positions of padding that cost as much as one more call: where more can be saved, single tokens are split."""


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


@dataclass(slots=True)
class Tile:
    """Tokens that attend in one call: one of each of N requests, or up to `TILE` neighbours of one.

    Attributes:
        tokens: their rows of the T tokens, N requests times n tokens.
        end: how much of the context is looked at.
        mask: [N * K or 1, H / K * n or 1, end], 0 where a token may look and -inf where not.
    """

    tokens: slice
    end: int
    mask: torch.Tensor


@dataclass(slots=True)
class Span:
    """Requests whose keys and values are gathered in one call: some with a single token, or one with a chunk.

    Attributes:
        heads: [2 * N * K * L], where keys and then values of N requests and L positions lie in `KVStorage.heads`.
            A position beyond a request's own context names its first token again, so nothing is ever read that
            the request did not write.
        length: L.
        tiles: what attends to them.
    """

    heads: torch.Tensor
    length: int
    tiles: list[Tile]


@dataclass(slots=True)
class StepContext:
    """What all layers of a step share, computed once.

    Attributes:
        slot_mapping: [T], where keys and values go.
        cos, sin: [T, 1, D], the rotary factors in the model's dtype, `sin` negative in its first half.
        spans: who attends to what; together they cover the T tokens.
    """

    slot_mapping: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    spans: list[Span]


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
        )

    def prepare(
        self, inputs: ModelInputs, kv: KVStorage, num_heads: int, frequencies: torch.Tensor
    ) -> StepContext:
        """Compute once per step what every layer needs: rotary factors, gather indices, masks."""
        angles = inputs.positions[:, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        return StepContext(
            slot_mapping=inputs.slot_mapping,
            cos=torch.cat((cos, cos), -1).to(kv.dtype).unsqueeze(1),
            sin=torch.cat((-sin, sin), -1).to(kv.dtype).unsqueeze(1),
            spans=_spans(inputs, kv, num_heads // kv.num_kv_heads),
        )

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table, [T, C]."""
        return table.index_select(0, token_ids)

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """Apply a matrix, however it is held."""
        return linear(x)

    def rms_norm_add(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add `x` to the residual stream, in place, and divide the sum by its root mean square, in float32.

        Returns:
            the normalized [T, C] and the residual stream [T, C].
        """
        residual = x if residual is None else residual.add_(x)
        return F.rms_norm(residual, weight.shape, weight, eps), residual

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
        rotated = heads[:, : num_heads + num_kv_heads]
        swapped = rotated.view(total, -1, 2, size // 2).flip(2).view(rotated.shape)
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
                seen = slice(tile.end)
                out[tile.tokens] = _attend(
                    q[tile.tokens], keys[:, seen], values[:, seen], tile.mask, kv.num_kv_heads
                )
        return out.flatten(1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [T, 2 * I], gate first: [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def head(self, x: torch.Tensor, logits_indices: torch.Tensor, linear: Linear) -> torch.Tensor:
        """Logits [S, vocab_size] of the wanted rows only."""
        return linear(x.index_select(0, logits_indices))


def _spans(inputs: ModelInputs, kv: KVStorage, group: int) -> list[Span]:
    single = inputs.num_single
    cuts = _cuts(inputs.ends, 0, single) if single else []
    spans = [_single_tokens(inputs, kv, first, last) for first, last in cuts]
    first = single
    for row in range(single, len(inputs.query_lens)):
        spans.append(_chunk(inputs, kv, group, row, first))
        first += inputs.query_lens[row]
    return spans


def _cuts(ends: list[int], first: int, last: int) -> list[tuple[int, int]]:
    """Split single-token requests `first` to `last`, in order of context, where padding would cost too much."""
    saved, cut = max(
        ((row - first) * (ends[last - 1] - ends[row - 1]), row) for row in range(first + 1, last + 1)
    )
    return [(first, last)] if saved < PADDING else _cuts(ends, first, cut) + _cuts(ends, cut, last)


def _single_tokens(inputs: ModelInputs, kv: KVStorage, first: int, last: int) -> Span:
    longest = max(inputs.ends[first:last])
    where = torch.arange(longest, device=inputs.block_tables.device)
    beyond = where >= inputs.context_lens[first:last, None]
    heads = _head_indices(inputs.block_tables[first:last], where.where(~beyond, 0), kv)
    mask = torch.zeros(beyond.shape, dtype=kv.dtype, device=where.device).masked_fill_(beyond, float("-inf"))
    mask = mask.repeat_interleave(kv.num_kv_heads, 0).unsqueeze(1)
    return Span(heads, longest, [Tile(slice(first, last), longest, mask)])


def _chunk(inputs: ModelInputs, kv: KVStorage, group: int, row: int, first: int) -> Span:
    """One request's chunk. Small tiles skip the keys after their last token and keep the scores in the cache."""
    num, end = inputs.query_lens[row], inputs.ends[row]
    where = torch.arange(end, device=inputs.block_tables.device)
    heads = _head_indices(inputs.block_tables[row, None], where[None], kv)
    tiles = []
    for start in range(0, num, TILE):
        size = min(TILE, num - start)
        seen = end - num + start + size
        mask = torch.full((size, seen), float("-inf"), dtype=kv.dtype, device=where.device)
        mask = mask.triu_(seen - size + 1).repeat(group, 1).unsqueeze(0)
        tiles.append(Tile(slice(first + start, first + start + size), seen, mask))
    return Span(heads, end, tiles)


def _head_indices(tables: torch.Tensor, where: torch.Tensor, kv: KVStorage) -> torch.Tensor:
    """Rows of `KVStorage.heads` for the positions `where` [N, L] of N requests, in the order [2, N, K, L]."""
    slots = tables.gather(1, where // kv.block_size) * kv.block_size + where % kv.block_size
    per_slot = 2 * kv.num_kv_heads
    each = torch.arange(per_slot, device=slots.device).view(2, 1, kv.num_kv_heads, 1)
    return (slots.unsqueeze(1) * per_slot + each).flatten()


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, num_kv_heads: int
) -> torch.Tensor:
    """Attention of q [N * n, H, D] over keys and values [N * K, L, D]: [N * n, H, D].

    The query heads of a group stand beside the query tokens, so that a KV head serves them without a copy.
    Plain products on contiguous keys are two to four times faster on a CPU than `scaled_dot_product_attention`.
    """
    rows, size = keys.shape[0], q.shape[-1]
    num = rows // num_kv_heads
    query = q.view(num, -1, num_kv_heads, q.shape[1] // num_kv_heads, size).permute(0, 2, 3, 1, 4)
    scores = torch.baddbmm(mask, query.reshape(rows, -1, size), keys.transpose(1, 2), alpha=size**-0.5)
    attended = torch.bmm(scores.softmax(-1), values)
    return attended.view(query.shape).permute(0, 3, 1, 2, 4).reshape(q.shape)


def attention_reference(q: torch.Tensor, layer: int, kv: KVStorage, inputs: ModelInputs) -> torch.Tensor:
    """The slow twin of `TorchOps.attention`: one token, one query head at a time, in float32.

    Takes q [T, H, D] and returns [T, H * D], like the op.
    """
    out = torch.empty_like(q)
    group = q.shape[1] // kv.num_kv_heads
    row = 0
    for request, num in enumerate(inputs.query_lens):
        table = inputs.block_tables[request].tolist()
        for position in range(inputs.ends[request] - num, inputs.ends[request]):
            keys, values = kv.gather(layer, table, position + 1)
            for head in range(q.shape[1]):
                scores = keys[:, head // group].float() @ q[row, head].float() / kv.head_dim**0.5
                out[row, head] = scores.softmax(0) @ values[:, head // group].float()
            row += 1
    return out.flatten(1)
