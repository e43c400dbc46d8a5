"""Settings: frozen, keyword-only, validated at once. An unknown or unsupported option is an error, never ignored."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pagedinfer.errors import ConfigError

__all__ = ["EngineConfig", "SamplingParams"]

MAX_BLOCK_SIZE = 256
MAX_FLOAT = sys.float_info.max


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    bounds = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        raise ConfigError(f"{name}={value!r}: it must be {bounds}.")


def _check_real(name: str, value: Any, low: float, high: float | None = None) -> None:
    bounds = f"a finite number of at least {low}" if high is None else f"a number from {low} to {high}"
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= (MAX_FLOAT if high is None else high):  # refuses NaN and infinity too
        raise ConfigError(f"{name}={value!r}: it must be {bounds}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The core's settings: the pool and the limits of a step.

    Attributes:
        num_blocks: physical blocks in the KV pool.
        block_size: tokens a block holds, 1 to 256.
        max_model_len: the most tokens (prompt and output) of one request.
        max_num_seqs: the most requests in one step's batch.
        max_num_batched_tokens: the most tokens computed in one step (the token budget).
        watermark: share of the pool kept free when a request is admitted beside running ones, so that they can
            grow before anybody is preempted; 0 to 0.5, rounded down to whole blocks.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    watermark: float = 0.01

    def __post_init__(self) -> None:
        _check_int("num_blocks", self.num_blocks, 1)
        _check_int("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        _check_int("max_model_len", self.max_model_len, 1)
        _check_int("max_num_seqs", self.max_num_seqs, 1)
        _check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _check_real("watermark", self.watermark, 0.0, 0.5)

    @property
    def watermark_blocks(self) -> int:
        """`watermark` in whole blocks."""
        return int(self.watermark * self.num_blocks)

    def to_dict(self) -> dict[str, int | float]:
        """Every setting by name, for a recording's first event."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


# Names of vLLM's SamplingParams that are known here but not honoured yet, with the value that means "off".
_NOT_YET: dict[str, Any] = {
    "n": 1,
    "best_of": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words": None,
    "logits_processors": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "structured_outputs": None,
    "truncate_prompt_tokens": None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Names and meanings are vLLM's.

    Filters apply in this order: temperature, top-k, top-p (on the distribution that is left), min-p.

    Attributes:
        temperature: 0 takes the most likely token (greedy); above, logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; at least one.
        min_p: keep tokens at least min_p times as likely as the most likely one.
        seed: seed of this request's draws; None derives one from the engine's seed and the request's number.
        max_tokens: the most tokens to produce; None means up to the context's end.
        min_tokens: tokens to produce before any end-of-sequence or stop condition counts.
        stop: strings that end the text; the text is cut before the earliest one.
        stop_token_ids: ids that end the output; the id stays in `token_ids`, its text is not shown.
        ignore_eos: go on after the model's own end-of-sequence ids.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: log-probabilities of this many most likely tokens (the chosen one always included); None for none.
        detokenize: False leaves text empty and works without a tokenizer.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    detokenize: bool = True
    n: int = field(default=1, repr=False)
    best_of: int | None = field(default=None, repr=False)
    presence_penalty: float = field(default=0.0, repr=False)
    frequency_penalty: float = field(default=0.0, repr=False)
    repetition_penalty: float = field(default=1.0, repr=False)
    bad_words: Any = field(default=None, repr=False)
    logits_processors: Any = field(default=None, repr=False)
    logit_bias: Any = field(default=None, repr=False)
    allowed_token_ids: Any = field(default=None, repr=False)
    prompt_logprobs: int | None = field(default=None, repr=False)
    structured_outputs: Any = field(default=None, repr=False)
    truncate_prompt_tokens: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, off in _NOT_YET.items():
            if (value := getattr(self, name)) != off:
                raise ConfigError(f"{name}={value!r} is not supported yet; leave it at {off!r}.")
        _check_real("temperature", self.temperature, 0.0)
        _check_int("top_k", self.top_k, -1)
        _check_real("top_p", self.top_p, 0.0, 1.0)
        _check_real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower one or raise the other."
            )
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0)
        for flag in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, flag), bool):
                raise ConfigError(f"{flag}={getattr(self, flag)!r}: it must be True or False.")
        self._normalise_stops()

    def _normalise_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            if not isinstance(value := getattr(self, name), Iterable | None):
                raise ConfigError(f"{name}={value!r}: it must be a list.")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(isinstance(s, str) and s for s in stop):
            raise ConfigError(f"stop={self.stop!r}: it must be a non-empty string or a list of them.")
        ids = tuple(self.stop_token_ids or ())
        for token_id in ids:
            _check_int("stop_token_ids", token_id, 0)
        if stop and not self.detokenize:
            raise ConfigError("stop strings need text; leave detokenize=True or use stop_token_ids.")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without randomness."""
        return self.temperature == 0.0
