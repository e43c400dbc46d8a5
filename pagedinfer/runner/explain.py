"""How one token was chosen, told by the sampler's own stages: shares after each, and what dropped whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pagedinfer.config import SamplingParams
from pagedinfer.runner.sampler import stages
from pagedinfer.trace.tap_records import Candidate, Stage, TokenChoice

__all__ = ["explain"]

Named = tuple[str, torch.Tensor]


def explain(
    shaped: Sequence[Named],
    params: SamplingParams,
    *,
    output_index: int,
    uniform: float,
    token_id: int,
    top: int,
    text: Callable[[int], str],
) -> TokenChoice:
    """Tell how a token came.

    Args:
        shaped: the row's logits [vocab_size], first "model", then after each change, named after it.
        params: how it was sampled.
        output_index: which output token.
        uniform: the number drawn.
        token_id: what came of it.
        top: how many of the likeliest tokens, before and after the logits were changed, become candidates.
        text: of a token id.
    """
    logits, last = shaped[0][1], shaped[-1][1]
    shares = [(name, row.double().softmax(0)) for name, row in shaped]
    if params.is_greedy:
        shares.append(("greedy", torch.zeros_like(shares[0][1])))
        shares[-1][1][token_id] = 1.0
    else:
        shares += [
            (name, weights.double() / weights.double().sum()) for name, weights in stages(last, params)
        ]
    ids = _candidates(logits, last, token_id, top)
    starts = shares[-1][1].cumsum(0) - shares[-1][1]
    return TokenChoice(
        output_index=output_index,
        uniform=uniform,
        token_id=token_id,
        stages=tuple(_stage(name, row, params, ids) for name, row in shares),
        candidates=tuple(
            Candidate(
                token_id=token,
                text=text(token),
                logit=value if (value := logits[token].item()) > -torch.inf else None,
                shares=tuple(row[token].item() for _, row in shares),
                start=starts[token].item(),
                why=_why(token, shares, params, last),
            )
            for token in ids
        ),
    )


def _candidates(logits: torch.Tensor, shaped: torch.Tensor, token_id: int, top: int) -> list[int]:
    """The likeliest tokens of both rows and the one that came, likeliest under the model first, then by id."""
    wanted = {token_id}
    for row in (logits, shaped):
        values, order = row.sort(descending=True, stable=True)
        wanted.update(order[: min(top, int((values > -torch.inf).sum()))].tolist())
    return sorted(wanted, key=lambda token: (-logits[token].item(), token))


def _stage(name: str, shares: torch.Tensor, params: SamplingParams, ids: Sequence[int]) -> Stage:
    value = (
        getattr(params, name) if name in ("temperature", "min_p", "top_k", "top_p", "logit_bias") else None
    )
    others = shares.clone()
    others[list(ids)] = 0.0
    left, rest = int((shares > 0).sum()), others.sum().item()
    return Stage(name, value, left, rest)


def _why(token: int, shares: Sequence[Named], params: SamplingParams, shaped: torch.Tensor) -> str:
    """The sentence for the first stage after which nothing of the token was left."""
    place = next((place for place, (_, row) in enumerate(shares) if not row[token] > 0), None)
    if place is None:
        return ""
    name, row = shares[place]
    before = shares[place - 1][1]
    if name == "min_p":
        of_best = (before[token] / before.max()).item()
        return f"dropped by min-p: {of_best:.3g} of the best, below {params.min_p:g}"
    if name == "top_k":
        rank = 1 + int((shaped > shaped[token]).sum() + (shaped[:token] == shaped[token]).sum())
        return f"dropped by top-k: rank {rank}, {params.top_k} stay"
    if name == "top_p":
        reached = before[row > 0].sum().item()
        return f"dropped by top-p: cumulative {reached:.2f} before it reached {params.top_p:g}"
    if name == "greedy":
        return "not the most likely: temperature 0 takes only that"
    if name == "temperature":
        return f"too unlikely: its share rounds to 0 at {params.temperature:g}"
    return "impossible for the model" if name == "model" else f"ruled out by {name}"
