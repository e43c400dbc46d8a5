"""Log-probabilities under the model's own logits, before any sampling parameter: of new tokens and of prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from pagedinfer.engine.plan import ScheduledRequest, TokenLogprobs

__all__ = ["prompt_logprobs", "scored_span", "token_logprobs", "token_logprobs_reference"]

_ROWS = 64
"""Prompt rows projected at a time: the whole chunk's logits over a large vocabulary would take hundreds of MB."""

TopLogprobs = dict[int, tuple[float, int]]


def token_logprobs(logits: torch.Tensor, nums: Sequence[int], token_ids: Sequence[int]) -> list[TopLogprobs]:
    """Per row its most likely tokens and the one that came.

    Args:
        logits: [R, vocab_size].
        nums: how many of the most likely; -1 for all.
        token_ids: the token that came.

    Returns:
        per row, token id -> (log-probability, rank), most likely first. A rank is 1 for the most likely token; for
        one outside those asked for it is one more than the number of likelier tokens.
    """
    logprobs = logits.float().log_softmax(-1)
    vocab = logprobs.shape[1]
    wanted = [vocab if num < 0 else min(num, vocab) for num in nums]
    values, ids = logprobs.topk(max(wanted, default=0))
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = ((logprobs > chosen).sum(-1) + 1).tolist()
    found = []
    for row, num in enumerate(wanted):
        tops = zip(ids[row, :num].tolist(), values[row, :num].tolist(), strict=True)
        entry = {token: (value, rank) for rank, (token, value) in enumerate(tops, 1)}
        if token_ids[row] not in entry:
            entry[token_ids[row]] = (chosen[row].item(), max(ranks[row], num + 1))
        found.append(entry)
    return found


def scored_span(item: ScheduledRequest) -> range:
    """Positions of the chunk whose logits score a prompt token: the next one.

    Empty when not asked for, and after a preemption that came when the whole prompt had been scored.
    """
    asked = item.params.prompt_logprobs is not None and item.output_index == 0
    return range(item.start, min(item.end, item.num_prompt_tokens - 1) if asked else item.start)


def prompt_logprobs(
    project: Callable[[torch.Tensor], torch.Tensor], first_row: int, item: ScheduledRequest
) -> tuple[int, list[TokenLogprobs]]:
    """Score the prompt tokens that follow the chunk's positions.

    Args:
        project: rows [R] of the batch to their logits [R, vocab_size].
        first_row: the batch's row of the chunk's first token.
        item: the chunk.

    Returns:
        the position of the first token scored, and one entry per token, as `token_logprobs`.
    """
    span, num = scored_span(item), item.params.prompt_logprobs or 0
    scored: list[TokenLogprobs] = []
    for some in (span[i : i + _ROWS] for i in range(0, len(span), _ROWS)):
        rows = torch.arange(some.start, some.stop) + (first_row - item.start)
        next_ids = list(item.token_ids[some.start + 1 : some.stop + 1])
        scored += token_logprobs(project(rows), [num] * len(some), next_ids)
    return item.start + 1, scored


def token_logprobs_reference(logits: Sequence[float], num: int, token_id: int) -> TopLogprobs:
    """The slow twin of `token_logprobs` for one row; of equal logits the lower id ranks first."""
    best = max(logits)
    log_total = best + math.log(sum(math.exp(logit - best) for logit in logits))
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    entry = {
        token: (logits[token] - log_total, rank)
        for rank, token in enumerate(order[: len(logits) if num < 0 else num], 1)
    }
    if token_id not in entry:
        likelier = sum(logit > logits[token_id] for logit in logits)
        entry[token_id] = (logits[token_id] - log_total, max(likelier + 1, num + 1))
    return entry
