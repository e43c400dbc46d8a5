"""Paged attention in plain torch: how a step's tokens are grouped, the calls, and the slow twin.

Single tokens attend together, up to a split where contexts are too unlike; a chunk attends in tiles. A window
leaves out the keys before it, so a long context costs no more than the window.

Shapes: N requests, L positions, H query heads and K key-value heads of size D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.model_inputs import ModelInputs

__all__ = [
    "PADDING", "TILE", "AttentionRule", "Span", "Tile", "attend", "attention_reference", "attention_weights",
    "gather_seen", "make_spans",
]  # fmt: skip

TILE = 64
"""Neighbouring tokens of a chunk that attend in one call."""
PADDING = 512
"""Positions of padding that cost as much as one more call: where more can be saved, single tokens are split."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """How one kind of layer attends; a model has one, or two where windows alternate.

    Attributes:
        frequencies: angle per position of each pair of dimensions that turns, float32; None: no pair does.
        magnitude: what cosines and sines are multiplied with.
        window: how many tokens a token sees, itself included; None: all before it.
        scale: what scores are multiplied with; None: 1 / sqrt(D).
        softcap: scores become cap * tanh(score / cap); None: they stay.
    """

    frequencies: torch.Tensor | None = None
    magnitude: float = 1.0
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


@dataclass(slots=True)
class Tile:
    """Tokens that attend in one call: one of each of N requests, or up to `TILE` neighbours of one.

    Attributes:
        tokens: their rows of the T tokens, N requests times n tokens.
        seen: which of the span's L positions are looked at.
        mask: [N * K or 1, H / K * n or 1, positions seen], 0 where a token may look and -inf where not.
    """

    tokens: slice
    seen: slice
    mask: torch.Tensor


@dataclass(slots=True)
class Span:
    """Requests whose keys and values are gathered in one call: some with a single token, or one with a chunk.

    Attributes:
        heads: [2 * N * K * L], where keys and then values of N requests and L positions lie in `KVStorage.heads`.
            A position beyond a request's own context names a token of its own again, so nothing is ever read that
            the request did not write.
        length: L.
        tiles: what attends to them.
    """

    heads: torch.Tensor
    length: int
    tiles: list[Tile]


def make_spans(inputs: ModelInputs, kv: KVStorage, group: int, window: int | None = None) -> list[Span]:
    """Group a step's tokens; `group` query heads share a KV head."""
    single = inputs.num_single
    lengths = inputs.ends if window is None else [min(end, window) for end in inputs.ends]
    cuts = _cuts(lengths, 0, single) if single else []
    spans = [_single_tokens(inputs, kv, first, last, window) for first, last in cuts]
    first = single
    for row in range(single, len(inputs.query_lens)):
        spans.append(_chunk(inputs, kv, group, row, first, window))
        first += inputs.query_lens[row]
    return spans


def _cuts(lengths: list[int], first: int, last: int) -> list[tuple[int, int]]:
    """Split single-token requests `first` to `last`, in order of context, where padding would cost too much."""
    saved, cut = max(
        ((row - first) * (lengths[last - 1] - lengths[row - 1]), row) for row in range(first + 1, last + 1)
    )
    if saved < PADDING:
        return [(first, last)]
    return _cuts(lengths, first, cut) + _cuts(lengths, cut, last)


def _single_tokens(inputs: ModelInputs, kv: KVStorage, first: int, last: int, window: int | None) -> Span:
    ends = inputs.context_lens[first:last, None]
    longest = max(inputs.ends[first:last])
    where = torch.arange(longest if window is None else min(longest, window), device=ends.device)
    starts = 0 if window is None else (ends - window).clamp_(min=0)
    positions = where + starts
    beyond = positions >= ends
    heads = _head_indices(inputs.block_tables[first:last], positions.where(~beyond, starts), kv)
    mask = torch.zeros(beyond.shape, dtype=kv.dtype, device=ends.device).masked_fill_(beyond, float("-inf"))
    mask = mask.repeat_interleave(kv.num_kv_heads, 0).unsqueeze(1)
    return Span(heads, len(where), [Tile(slice(first, last), slice(len(where)), mask)])


def _chunk(inputs: ModelInputs, kv: KVStorage, group: int, row: int, first: int, window: int | None) -> Span:
    """One request's chunk. Small tiles skip the keys that none of their tokens sees, and stay in the cache."""
    num, end = inputs.query_lens[row], inputs.ends[row]
    back = end if window is None else window - 1  # how far before itself a token looks
    start = max(0, end - num - back)
    where = torch.arange(start, end, device=inputs.block_tables.device)
    heads = _head_indices(inputs.block_tables[row, None], where[None], kv)
    tiles = []
    for token in range(0, num, TILE):
        size = min(TILE, num - token)
        own = end - num + token  # the position of the tile's first token
        left = max(0, own - back)
        seen = own + size - left
        mask = torch.full((size, seen), float("-inf"), dtype=kv.dtype, device=where.device)
        mask.triu_(seen - size + 1)
        if own + size - 1 - back > left:  # the last token does not see all that the first one does
            hidden = torch.ones_like(mask, dtype=torch.bool).tril_(own - left - back - 1)
            mask.masked_fill_(hidden, float("-inf"))
        tiles.append(
            Tile(
                slice(first + token, first + token + size),
                slice(left - start, left - start + seen),
                mask.repeat(group, 1).unsqueeze(0),
            )
        )
    return Span(heads, end - start, tiles)


def _head_indices(tables: torch.Tensor, where: torch.Tensor, kv: KVStorage) -> torch.Tensor:
    """Rows of `KVStorage.heads` for the positions `where` [N, L] of N requests, in the order [2, N, K, L]."""
    slots = tables.gather(1, where // kv.block_size) * kv.block_size + where % kv.block_size
    per_slot = 2 * kv.num_kv_heads
    each = torch.arange(per_slot, device=slots.device).view(2, 1, kv.num_kv_heads, 1)
    return (slots.unsqueeze(1) * per_slot + each).flatten()


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    num_kv_heads: int,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention of q [N * n, H, D] over keys and values [N * K, L, D]: [N * n, H, D].

    The query heads of a group stand beside the query tokens, so that a KV head serves them without a copy.
    Plain products on contiguous keys are two to four times faster on a CPU than `scaled_dot_product_attention`.
    """
    rows, size = keys.shape[0], q.shape[-1]
    num = rows // num_kv_heads
    query = q.view(num, -1, num_kv_heads, q.shape[1] // num_kv_heads, size).permute(0, 2, 3, 1, 4)
    scale = size**-0.5 if rule.scale is None else rule.scale
    flat, turned = query.reshape(rows, -1, size), keys.transpose(1, 2)
    if rule.softcap is None:
        scores = torch.baddbmm(mask, flat, turned, alpha=scale)
    else:
        scores = torch.bmm(flat, turned).mul_(scale / rule.softcap).tanh_().mul_(rule.softcap).add_(mask)
    attended = torch.bmm(scores.softmax(-1), values)
    return attended.view(query.shape).permute(0, 3, 1, 2, 4).reshape(q.shape)


def attention_weights(query: torch.Tensor, keys: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """What one query [D] gives each of the keys [L, D] that it sees: softmax weights [L], in float32."""
    scale = query.shape[-1] ** -0.5 if rule.scale is None else rule.scale
    scores = keys.float() @ query.float() * scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    return scores.softmax(0)


def gather_seen(
    layer: int, kv: KVStorage, table: Sequence[int], position: int, window: int | None
) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Copy out what the token at `position` sees, itself included; blocks left of its window are not touched.

    Returns:
        the first position seen, and keys and values from there on, each [L, K, D].
    """
    first = 0 if window is None else max(0, position + 1 - window)
    skipped = first // kv.block_size
    start = skipped * kv.block_size
    keys, values = kv.gather(layer, table[skipped:], position + 1 - start)
    return first, keys[first - start :], values[first - start :]


def attention_reference(
    q: torch.Tensor, layer: int, kv: KVStorage, inputs: ModelInputs, rule: AttentionRule | None = None
) -> torch.Tensor:
    """The slow twin of `TorchOps.attention`: one token, one query head at a time, in float32.

    Takes q [T, H, D] and returns [T, H * D], like the op.
    """
    rule = rule or AttentionRule()
    out = torch.empty_like(q)
    group = q.shape[1] // kv.num_kv_heads
    row = 0
    for request, num in enumerate(inputs.query_lens):
        table = inputs.block_tables[request].tolist()
        for position in range(inputs.ends[request] - num, inputs.ends[request]):
            _, keys, values = gather_seen(layer, kv, table, position, rule.window)
            for head in range(q.shape[1]):
                weights = attention_weights(q[row, head], keys[:, head // group], rule)
                out[row, head] = weights @ values[:, head // group].float()
            row += 1
    return out.flatten(1)
