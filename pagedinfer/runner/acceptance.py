"""From a step's logits to its answer: tokens, log-probabilities and errors by request; which drafts are accepted.

A request with k drafts has k + 1 rows: the last known token's and each draft's. Every row is sampled as if there were
no drafts: row i from the target's own filtered distribution there, with the uniform number of output token
`output_index + i`. Row i was asked the right question only if the drafts before it are what was sampled before it. So
tokens are taken from the first row on while each equals the draft in its place; the first that differs is taken too,
and after k accepted drafts the last row's, which has no draft to equal. A step brings 1 to k + 1 tokens.

This is speculative sampling (Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023;
Chen et al., "Accelerating large language model decoding with speculative sampling", 2023) for a proposal that puts all
its probability on one token d, as prompt look-up does (Saxena, "Prompt lookup decoding", 2023). There d is to be
accepted with probability min(1, p(d) / 1), and a token sampled from p is d with probability p(d). On rejection the
output is to follow p without d, scaled to sum to 1, and a token sampled from p does so, given that it is not d. So the
output has the target's distribution, at any temperature and with any drafts.

It has the very tokens of the run without speculation, too, since the uniform numbers are the same. That holds as far as
rows computed together have the logits of rows computed one by one: but for rounding, as between chunks of a prefill.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedinfer.engine.plan import ScheduledRequest, StepResult, TokenLogprobs
from pagedinfer.runner.logits import shape
from pagedinfer.runner.sampler import sample, uniform
from pagedinfer.runner.taps import StepWatch

__all__ = ["choose", "num_to_take"]


def choose(
    logits: torch.Tensor, items: Sequence[ScheduledRequest], watch: StepWatch | None = None
) -> StepResult:
    """The tokens that `logits` [S, vocab_size] give to the requests that sample, in the order of their rows.

    A row that failed (its logits are not finite, a hook raised) ends its request if it is the first to count. With
    tokens accepted before it the request gets those; if it goes on, the next step begins at that row.
    """
    rows = [(item, i) for item in items for i in range(1 + len(item.draft_token_ids))]
    per_row = [item for item, _ in rows]
    logits = logits.float()
    if watch is not None:
        watch.rows(logits, per_row)
    raw, failed = shape(logits, per_row, None if watch is None else watch.shaped)
    uniforms = [uniform(item.seed, item.output_index + i) for item, i in rows]
    sampled = sample(logits, [item.params for item in per_row], uniforms, raw)
    errors = sampled.errors | failed
    tokens: dict[str, tuple[int, ...]] = {}
    problems: dict[str, str] = {}
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
    unused = set(errors)
    first = 0
    for item in items:
        rid, drafts = item.request_id, item.draft_token_ids
        good = next((i for i in range(len(drafts) + 1) if first + i in errors), len(drafts) + 1)
        if good:
            last = first + num_to_take(sampled.tokens[first : first + good], drafts)
            tokens[rid] = tuple(sampled.tokens[first:last])
            if first in sampled.logprobs:
                logprobs[rid] = tuple(sampled.logprobs[row] for row in range(first, last))
            unused.update(range(last, first + len(drafts) + 1))
        else:
            problems[rid] = errors[first]
        first += len(drafts) + 1
    if watch is not None:
        watch.chosen(per_row, uniforms, sampled.tokens, unused)
    return StepResult(tokens, problems, logprobs)


def num_to_take(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of `tokens`, sampled each as if the drafts before its place were right, are the request's: those up to
    and with the first that is not the draft in its place.
    """
    for place, (token, draft) in enumerate(zip(tokens, drafts, strict=False)):
        if token != draft:
            return place + 1
    return len(tokens)
