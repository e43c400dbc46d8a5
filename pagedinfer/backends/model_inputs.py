"""What one step's tensors are: the flat batch that the runner builds and every backend's ops read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pagedinfer.backends.attention import AttentionRule

__all__ = ["ModelInputs"]


@dataclass(slots=True)
class ModelInputs:
    """A batch of B requests with T tokens in all, laid end to end; integers are int64.

    Requests that compute one token come first, in order of context: their T rows are the first `num_single`
    ones, so that decode attention is a few batched calls over slices. What counts is the number of tokens
    computed, not whether the request has produced any: a resumed request that recomputes its tokens is a chunk
    like any prefill.

    Layers may come in groups with block tables of their own (`backends.layer_groups`); `slot_mapping` and
    `block_tables` are those of group 0, and `of_group` gives the same step with those of another.

    Attributes:
        token_ids: [T], the tokens to compute.
        positions: [T], each token's position in its request.
        slot_mapping: [T], where each token's keys and values go: `block_id * block_size + offset`.
        query_start: [B + 1], request b owns rows `query_start[b]` to `query_start[b + 1]`.
        context_lens: [B], tokens with keys and values once this step's are written.
        block_tables: [B, W], -1 beyond each request's blocks, and where a window has left a block: never read there.
        logits_indices: [S], rows of the tokens whose logits are wanted.
        query_lens: per request the number of tokens computed; host integers, for loops.
        ends: `context_lens` as host integers.
        num_single: how many requests compute one token.
        groups: slot mapping [T] and block tables [B, W] of group 1 and on.
        watch: called by each layer with its number, its queries [T, H, D] as attention gets them, and its rule, once
            this step's keys and values are written; None where nobody watches.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    logits_indices: torch.Tensor
    query_lens: list[int]
    ends: list[int]
    num_single: int
    groups: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    watch: Callable[[int, torch.Tensor, AttentionRule], None] | None = None

    def of_group(self, group: int) -> ModelInputs:
        """The same step with the slot mapping and the block tables of a group."""
        if group == 0:
            return self
        slot_mapping, block_tables = self.groups[group - 1]
        return replace(self, slot_mapping=slot_mapping, block_tables=block_tables)
