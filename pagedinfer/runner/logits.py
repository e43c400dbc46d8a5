"""What sampling parameters do to logits before a token is drawn, row by row; rows that ask for nothing cost nothing.

The order:

1. logits processors, in theirs;
2. what is ruled out goes to -inf: masks (structured outputs among them), all but the allowed ids, end ids before
   `min_tokens`, ends of bad words;
3. logit bias;
4. repetition penalty, over prompt and output; frequency and presence penalty, over the output.

vLLM's order, but for the processors: they come first, so that none can bring back what is ruled out.

All of it is a function of the request's token ids, of which the first `num_prompt_tokens` are the prompt: a
preemption, which computes output tokens anew as if they were prompt, cannot change it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from pagedinfer.config import SamplingParams
from pagedinfer.engine.plan import ScheduledRequest

__all__ = ["Watch", "shape", "shape_reference"]

_INF = float("inf")

Watch: TypeAlias = Callable[[int, str, torch.Tensor], None]
"""Is told a row's number, what was just done to it, and the row [vocab_size], which it must not change."""


def shape(
    logits: torch.Tensor, items: Sequence[ScheduledRequest], watch: Watch | None = None
) -> tuple[dict[int, torch.Tensor], dict[int, str]]:
    """Change the rows of `logits` [S, vocab_size], float32, in place, each as its request asks.

    Returns:
        by row, copies of rows as they were, where log-probabilities are wanted of them; and, for rows that failed (a
        hook raised, or gave something that is no mask), the sentence why.
    """
    raw: dict[int, torch.Tensor] = {}
    errors: dict[int, str] = {}
    for row, item in enumerate(items):
        if _asks(item):
            if item.params.logprobs is not None:
                raw[row] = logits[row].clone()
            try:
                _shape_row(logits[row], item, partial(watch, row) if watch is not None else _nobody)
            except BaseException as error:  # a caller's hook: its request ends, no other
                # A panic of Rust code is no Exception, but neither are Ctrl-C and exit, which must go on.
                if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                    raise
                errors[row] = f"{type(error).__name__} in a mask or logits processor: {error}"
    return raw, errors


def _asks(item: ScheduledRequest) -> bool:
    how = item.params
    return bool(
        item.forbidden_token_ids
        or item.rules is not None
        or how.has_penalties
        or how.logit_bias
        or how.allowed_token_ids is not None
        or how.logits_processors
    )


def _nobody(what: str, logits: torch.Tensor) -> None:
    """Nobody watches."""


def _shape_row(
    logits: torch.Tensor, item: ScheduledRequest, watch: Callable[[str, torch.Tensor], None]
) -> None:
    how, prompt_ids, output_ids = item.params, *_split(item)
    for processor in how.logits_processors or ():
        given = (prompt_ids, output_ids) if _num_arguments(processor) >= 3 else (output_ids,)
        logits.copy_(_as_logits(processor(*given, logits.clone()), logits))
        watch("logits processor", logits)
    _rule_out(logits, item, output_ids, watch)
    if how.logit_bias:
        _add_bias(logits, how)
        watch("logit_bias", logits)
    if how.has_penalties:
        _penalize(logits, how, prompt_ids, output_ids)
        watch("penalties", logits)


def _split(item: ScheduledRequest) -> tuple[list[int], list[int]]:
    known = item.token_ids
    return list(known[: item.num_prompt_tokens]), list(known[item.num_prompt_tokens : item.end])


def _num_arguments(processor: Any) -> int:
    return len(inspect.signature(processor).parameters)


def _as_logits(value: Any, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape:
        what = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"a logits processor returned {what}; it must be a tensor {tuple(like.shape)}")
    return value


def _rule_out(
    logits: torch.Tensor,
    item: ScheduledRequest,
    output_ids: list[int],
    watch: Callable[[str, torch.Tensor], None],
) -> None:
    allowed = item.params.allowed_token_ids
    if allowed is not None:
        keep = torch.zeros_like(logits, dtype=torch.bool)
        keep[list(allowed)] = True
        logits.masked_fill_(~keep, -_INF)
        watch("allowed_token_ids", logits)
    for mask in () if item.rules is None else item.rules.masks:
        logits.masked_fill_(~_as_bools(mask.allowed(output_ids), logits), -_INF)
        watch("mask", logits)
    forbidden = [*item.forbidden_token_ids, *_ends_of_bad_words(item, output_ids)]
    if forbidden:
        logits[forbidden] = -_INF
        watch("min_tokens, bad_words", logits)


def _ends_of_bad_words(item: ScheduledRequest, output_ids: list[int]) -> list[int]:
    words = () if item.rules is None else item.rules.bad_words
    return [word[-1] for word in words if len(word) == 1 or output_ids[1 - len(word) :] == list(word[:-1])]


def _as_bools(mask: Any, logits: torch.Tensor) -> torch.Tensor:
    """A hook's answer as a bool tensor [vocab_size] beside the logits."""
    vocab = len(logits)
    found = torch.as_tensor(mask)
    if found.dtype == torch.int32 and found.shape == ((vocab + 31) // 32,):
        bits = np.unpackbits(found.cpu().contiguous().numpy().view(np.uint8), bitorder="little")
        found = torch.from_numpy(bits[:vocab]).bool()
    if found.dtype != torch.bool or found.shape != (vocab,):
        raise TypeError(
            f"a mask is {str(found.dtype).removeprefix('torch.')} {tuple(found.shape)}; it must be bool [{vocab}], or "
            f"int32 [{(vocab + 31) // 32}] with a bit for each token"
        )
    return found.to(logits.device)


def _add_bias(logits: torch.Tensor, how: SamplingParams) -> None:
    bias = how.logit_bias or {}
    logits[list(bias)] += torch.tensor(list(bias.values()), dtype=torch.float32, device=logits.device)


def _penalize(
    logits: torch.Tensor, how: SamplingParams, prompt_ids: list[int], output_ids: list[int]
) -> None:
    """Repetition: Keskar et al., "CTRL" (2019); frequency and presence: as in OpenAI's interface."""
    device = logits.device
    if how.repetition_penalty != 1.0:
        seen = torch.tensor(
            prompt_ids + output_ids, device=device
        )  # an id that comes twice is written twice alike
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / how.repetition_penalty, values * how.repetition_penalty
        )
    if output_ids and (how.frequency_penalty or how.presence_penalty):
        produced, counts = np.unique(output_ids, return_counts=True)
        less = how.frequency_penalty * counts + how.presence_penalty
        logits[torch.from_numpy(produced).to(device)] -= torch.from_numpy(less).to(device, logits.dtype)


def shape_reference(logits: Sequence[float], item: ScheduledRequest) -> list[float]:
    """The slow twin of `shape` for one row, without processors; masks are sequences of bools."""
    how, shaped = item.params, list(logits)
    prompt, output = (
        item.token_ids[: item.num_prompt_tokens],
        item.token_ids[item.num_prompt_tokens : item.end],
    )
    rules = item.rules
    for token in range(len(shaped)):
        bad = rules is not None and any(
            word[-1] == token and list(output)[len(output) - len(word) + 1 :] == list(word[:-1])
            for word in rules.bad_words
            if len(word) <= len(output) + 1
        )
        ruled_out = rules is not None and not all(mask.allowed(output)[token] for mask in rules.masks)
        not_listed = how.allowed_token_ids is not None and token not in how.allowed_token_ids
        if bad or ruled_out or not_listed or token in item.forbidden_token_ids:
            shaped[token] = -math.inf
        shaped[token] += (how.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            positive = shaped[token] > 0
            shaped[token] *= 1 / how.repetition_penalty if positive else how.repetition_penalty
        if count := list(output).count(token):
            shaped[token] -= how.frequency_penalty * count + how.presence_penalty
    return shaped
