"""From logits to tokens, the whole batch at once.

A token is chosen by inverse CDF: one uniform number u, which is a function of the request's seed and the
number of the output token and of nothing else, and the first token id at which the running sum of the kept
weights passes u times their total. The sum runs in the order of ids whatever the filters, so a request draws
the same tokens with any neighbours, in any order, after any preemption.

What penalties, biases and masks do to the logits before is `runner.logits`'s part; log-probabilities are of the
logits before that. The weight of a token is exp((logit - best logit) / temperature), in float32; the best
token's is 1. The filters, in vLLM's order:

1. min-p keeps weights of at least min_p.
2. top-k keeps the k largest logits.
3. top-p keeps the smallest set of the largest weights whose share of what the others left is at least top_p; 1
   keeps all.

A share or weight that misses its bound by one part in a million counts as reaching it, since float32 logits
cannot say it better: probabilities .5 .3 .1 .1 with top_p .8 keep two. Where a filter must cut through equal
logits, lower ids stay. The best token always stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedinfer.config import SamplingParams
from pagedinfer.engine.plan import TokenLogprobs
from pagedinfer.randomness import mix, scramble
from pagedinfer.runner.logprobs import token_logprobs

__all__ = ["Sampled", "sample", "sample_reference", "stages", "uniform"]

_CANDIDATES = 64
"""A row's largest logits that top-k and top-p look at first; where they keep more, 16 times as many."""
_SLACK = 1.0 - 1e-6
"""Factor on top_p and min_p: float32 logits of probabilities .5 and .3 need not add up to .8."""
_INF = float("inf")


@dataclass(slots=True)
class Sampled:
    """What came of a batch of rows.

    Attributes:
        tokens: one id per row; -1 where the row failed.
        errors: row -> sentence, for rows without a finite best logit.
        logprobs: row -> token id -> (log-probability, rank) under the raw logits, most likely first.
    """

    tokens: list[int]
    errors: dict[int, str]
    logprobs: dict[int, TokenLogprobs]


def uniform(seed: int, index: int) -> float:
    """The uniform number in [0, 1) for output token `index` of a request seeded with `seed`.

    The mixed seed starts a row of its own (`pagedinfer.randomness`); the top 53 bits of its `index`-th number.
    """
    return (mix(scramble(seed), index) >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    raw: Mapping[int, torch.Tensor] | None = None,
) -> Sampled:
    """Choose a token for each row.

    Args:
        logits: [S, vocab_size], any float dtype.
        params: how, per row.
        uniforms: a number in [0, 1) per row; greedy rows ignore theirs.
        raw: rows [vocab_size] as the model gave them, where they were changed since and have log-probabilities.

    A row whose logits hold NaN or +inf, or nothing above -inf, becomes an error; the other rows are not
    touched.
    """
    logits, raw = logits.float(), raw or {}
    best, tokens = logits.max(dim=-1)  # the first of equal maxima: lower ids win
    finite = best.isfinite().tolist()
    drawn = [row for row, how in enumerate(params) if finite[row] and not how.is_greedy]
    ranked = [row for row in drawn if _is_ranked(params[row], logits.shape[1])]
    if plain := sorted(set(drawn) - set(ranked)):
        tokens[plain] = _draw(_Rows.of(plain, logits, params, uniforms))
    num_candidates = _CANDIDATES
    while ranked:
        tokens[ranked], settled = _draw_ranked(_Rows.of(ranked, logits, params, uniforms), num_candidates)
        ranked = [row for row, done in zip(ranked, settled.tolist(), strict=True) if not done]
        num_candidates *= 16
    out = [token if finite[row] else -1 for row, token in enumerate(tokens.tolist())]
    errors = {row: _why_nothing(best[row].item()) for row, good in enumerate(finite) if not good}
    asked = {row: num for row, how in enumerate(params) if (num := how.logprobs) is not None and finite[row]}
    logprobs: dict[int, TokenLogprobs] = {}
    if asked:
        rows = torch.stack([raw.get(row, logits[row]) for row in asked])
        found = token_logprobs(rows, list(asked.values()), [out[row] for row in asked])
        logprobs = dict(zip(asked, found, strict=True))
    return Sampled(out, errors, logprobs)


def _is_ranked(how: SamplingParams, vocab_size: int) -> bool:
    return how.top_p < 1.0 or 0 < how.top_k < vocab_size


def _why_nothing(best: float) -> str:
    if best == -_INF:
        return "masks, allowed ids, bad words and min_tokens (or the model) rule out every token: none to choose."
    return f"the model's logits are not finite (their maximum is {best}): no token to choose."


@dataclass(slots=True)
class _Rows:
    """Some rows: logits [R, vocab_size], and settings as columns [R, 1]."""

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    @classmethod
    def of(
        cls,
        rows: list[int],
        logits: torch.Tensor,
        params: Sequence[SamplingParams],
        uniforms: Sequence[float],
    ) -> _Rows:
        vocab, some = logits.shape[1], [params[row] for row in rows]

        def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

        return cls(
            logits=logits if len(rows) == len(logits) else logits[rows],
            temperature=column([how.temperature for how in some], torch.float32).clamp_min_(1e-30),
            top_k=column([how.top_k if 0 < how.top_k < vocab else vocab for how in some], torch.int64),
            top_p=column([how.top_p * _SLACK if how.top_p < 1.0 else _INF for how in some], torch.float64),
            min_p=column([how.min_p * _SLACK for how in some], torch.float32),
            uniform=column([uniforms[row] for row in rows], torch.float64),
        )

    def weights(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """exp((logits - best) / temperature), 0 below min-p."""
        weights = logits.sub(best).div_(self.temperature).exp_()
        return weights.masked_fill_(weights < self.min_p, 0.0) if self.min_p.any() else weights


def _draw(rows: _Rows) -> torch.Tensor:
    """Tokens [R] of rows without top-k and top-p."""
    weights = rows.weights(rows.logits, rows.logits.amax(-1, keepdim=True))
    return _inverse_cdf(weights, rows.uniform)[:, 0]


def _draw_ranked(rows: _Rows, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [R], looking only at each row's `num_candidates` largest logits, and [R] whether those were enough."""
    left = _filter(rows, num_candidates)
    return left.ids.gather(1, _inverse_cdf(left.weights, rows.uniform))[:, 0], left.settled


@dataclass(slots=True)
class _Left:
    """What top-k and top-p left of the candidates of some rows.

    Attributes:
        ids: [R, n], rising.
        weights: [R, n], 0 where dropped.
        settled: [R], whether the filters cut well inside the candidates: only there is all this right.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    settled: torch.Tensor


def _filter(rows: _Rows, num_candidates: int) -> _Left:
    """Apply min-p, top-k and top-p to each row's `num_candidates` largest logits."""
    vocab = rows.logits.shape[1]
    num = min(num_candidates, vocab)
    values, ids = torch.topk(rows.logits, num)
    weights = rows.weights(values, values[:, :1])
    sums = weights.cumsum(-1, dtype=torch.float64)
    whole = sums[:, -1:] if num == vocab else _whole(rows)
    total = torch.where(rows.top_k == vocab, whole, sums.gather(1, rows.top_k.clamp_max(num) - 1))
    count = torch.minimum(rows.top_k, 1 + (sums < rows.top_p * total).sum(-1, keepdim=True))
    cut = values.gather(1, count.clamp_max(num) - 1)
    known = (rows.top_k <= num) | (rows.top_k == vocab)
    settled = known & (count < num) & (cut > values[:, -1:]) if num < vocab else torch.ones_like(known)

    order = ids.argsort(-1)
    values, weights, ids = (each.gather(1, order) for each in (values, weights, ids))
    ties, above = values == cut, values > cut
    kept = above | (ties & (ties.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    return _Left(ids, weights.masked_fill_(~kept, 0.0), settled[:, 0])


def _whole(rows: _Rows) -> torch.Tensor:
    """The sum of all weights [R, 1], where top-p alone needs it."""
    whole = torch.zeros_like(rows.top_p)
    if (needed := (rows.top_k == rows.logits.shape[1])).any():
        weights = rows.weights(rows.logits, rows.logits.amax(-1, keepdim=True))
        whole = torch.where(needed, weights.sum(-1, keepdim=True, dtype=torch.float64), whole)
    return whole


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Where [R, 1] the running sum of weights [R, n] first passes u times their total."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    # u * total may round up to the total, beyond the last weight
    aim = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, aim, right=True)


def stages(logits: torch.Tensor, params: SamplingParams) -> list[tuple[str, torch.Tensor]]:
    """How `sample` narrows one row [vocab_size] of finite best logit that is not greedy.

    Returns:
        the weights [vocab_size], 0 where dropped, after "temperature" and after each filter that `params` has
        ("min_p", "top_k", "top_p"); `sample` draws from the last ones.
    """
    logits = logits.float()[None]
    given: dict[str, Any] = {"temperature": params.temperature}
    found = [("temperature", _weights(logits, SamplingParams(**given)))]
    for name, is_on in (
        ("min_p", params.min_p > 0.0),
        ("top_k", 0 < params.top_k < logits.shape[1]),
        ("top_p", params.top_p < 1.0),
    ):
        if is_on:
            given[name] = getattr(params, name)
            found.append((name, _weights(logits, SamplingParams(**given))))
    return found


def _weights(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What `sample` draws one row from, by the same functions."""
    rows = _Rows.of([0], logits, [params], [0.0])
    if not _is_ranked(params, logits.shape[1]):
        return rows.weights(logits, logits.amax(-1, keepdim=True))[0]
    num_candidates = _CANDIDATES
    while not (left := _filter(rows, num_candidates)).settled:
        num_candidates *= 16
    return torch.zeros_like(logits[0]).scatter_(0, left.ids[0], left.weights[0])


def sample_reference(logits: Sequence[float], params: SamplingParams, u: float) -> tuple[int, set[int]]:
    """The slow twin of `sample` for one row of finite logits: the token, and all that it was drawn from."""
    best = max(logits)
    if params.is_greedy:
        token = logits.index(best)
        return token, {token}
    weight = [math.exp((logit - best) / params.temperature) for logit in logits]
    weight = [share if share >= params.min_p * _SLACK else 0.0 for share in weight]
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        enough = params.top_p * _SLACK * sum(weight[token] for token in ranked)
        share, count = 0.0, 0
        while count == 0 or share < enough:
            share += weight[ranked[count]]
            count += 1
        ranked = ranked[:count]
    kept = sorted(token for token in ranked if weight[token] > 0.0)
    aim = u * sum(weight[token] for token in kept)
    share = 0.0
    for token in kept:
        share += weight[token]
        if share > aim:
            return token, set(kept)
    return kept[-1], set(kept)
