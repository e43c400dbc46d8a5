"""How one request's tokens are chosen and when it ends: `SamplingParams`, with vLLM's names and meanings."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from pagedinfer.checks import MAX_FLOAT, check_flags, check_int, check_real, options_by_name
from pagedinfer.errors import ConfigError

__all__ = ["BeamSearchParams", "LogitsProcessor", "SamplingParams", "StructuredOutputsParams", "TokenMask"]

MAX_OUTPUTS = 16_384
"""The most outputs of one prompt: each is a request of its own from the start (vLLM has the same bound for n)."""

LogitsProcessor = Callable[..., Any]
"""`processor(output_token_ids, logits) -> logits`, or with the prompt's ids as a first argument more."""


@runtime_checkable
class TokenMask(Protocol):
    """Says which tokens may follow: the hook behind structured outputs, open to everybody."""

    def allowed(self, token_ids: Sequence[int]) -> Any:
        """The mask over the vocabulary for the token that follows these output tokens (the prompt is left out).

        A bool array or tensor [vocab_size], True for allowed, or 32 tokens packed into each int32, lowest bit first
        (the layout that grammar libraries share). It should be a function of `token_ids` alone: then preemption and
        a shared mask cannot change it. One that raises ends its request with `finish_reason="error"`, no other.
        """
        ...


@options_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """A form that the output has: exactly one of the first five. The extra `structured` does the work.

    An output that ends by itself has the form, always; one that `max_tokens` cuts says "length" and may be half.

    Attributes:
        json: a JSON schema, as a dict or as text; the output is JSON that it admits.
        regex: a regular expression that the whole output matches (no look-around, no back-references).
        choice: texts, of which the output is one.
        grammar: a context-free grammar, in Lark's notation or GBNF (`root ::= ...`).
        json_object: True for any JSON object.
        disable_any_whitespace: JSON without optional white space.
        whitespace_pattern: a regular expression for optional white space in JSON.
        disable_additional_properties: objects of the schema have no members that it does not name.
        structural_tag: not supported.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False
    structural_tag: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.structural_tag is not None:
            raise ConfigError(
                f"structural_tag={self.structural_tag!r} is not supported; use json, regex, choice or grammar."
            )
        forms = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in forms if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ConfigError(
                f"structured outputs have {given or 'no form'}; give exactly one of {', '.join(forms)}."
            )
        check_flags(self, "disable_any_whitespace", "disable_additional_properties")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ConfigError(f"{name}={value!r}: it must be text.")
        if given == ["json_object"]:
            check_flags(self, "json_object")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            texts = _as_tuple("choice", self.choice, str)
            if not texts or not all(texts):
                raise ConfigError(f"choice={self.choice!r}: it must be a list of non-empty texts.")
            object.__setattr__(self, "choice", texts)


def _schema_text(schema: object) -> str:
    try:
        value = json_module.loads(schema) if isinstance(schema, str) else schema
        text = json_module.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"json={schema!r} is no JSON schema: {error}.") from None
    if not isinstance(value, Mapping | bool):
        raise ConfigError(f"json={schema!r}: a JSON schema is an object.")
    return text


# Names of vLLM's SamplingParams that are known here but not honoured yet, with the value that means "off".
_NOT_YET: dict[str, Any] = {"truncate_prompt_tokens": None}


@options_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends. Names and meanings are vLLM's.

    Log-probabilities are the model's own: they are taken before all of this. Then, in this order: logits processors;
    what is ruled out (masks, allowed ids, end ids before min_tokens, bad words); logit bias; penalties (repetition,
    frequency, presence); temperature; min-p; top-k; top-p (on the distribution that is left).

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
        logprobs: log-probabilities of this many most likely tokens (the chosen one always included); None for none,
            -1 for the whole vocabulary.
        prompt_logprobs: the same for each token of the prompt; the first has none.
        detokenize: False leaves text empty and works without a tokenizer.
        n: outputs per prompt. Each has draws of its own; the first equals that of n=1.
        best_of: produce this many and return the n with the highest cumulative log-probability.
        presence_penalty: taken off the logits of tokens that the output holds, -2 to 2.
        frequency_penalty: taken off for each time that the output holds them, -2 to 2.
        repetition_penalty: logits of tokens in prompt or output are divided by it if positive, multiplied otherwise.
        bad_words: texts whose tokens are not produced in a row, with or without a space before them. The same letters
            may come from other tokens, as in vLLM.
        logit_bias: token id -> number added to its logit.
        allowed_token_ids: no others are produced. End ids end the output only if they are among them.
        token_mask: which tokens may follow, asked at each token; see `TokenMask`. (Not in vLLM.)
        logits_processors: functions from (output ids, logits) or (prompt ids, output ids, logits) to logits, a float32
            tensor [vocab_size], in their order. One that raises ends its request.
        structured_outputs: the form that the output has.
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
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    token_mask: TokenMask | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, off in _NOT_YET.items():
            if (value := getattr(self, name)) != off:
                raise ConfigError(f"{name}={value!r} is not supported yet; leave it at {off!r}.")
        check_real("temperature", self.temperature, 0.0)
        check_int("top_k", self.top_k, -1)
        check_real("top_p", self.top_p, 0.0, 1.0)
        check_real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        self._check_lengths()
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, -1)
        check_flags(self, "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize")
        self._check_counts()
        self._check_shaping()
        self._normalise_lists()

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        changed = [f for f in fields(self) if getattr(self, f.name) not in (f.default, ())]
        return f"SamplingParams({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower one or raise the other."
            )

    def _check_counts(self) -> None:
        check_int("n", self.n, 1, MAX_OUTPUTS)
        if self.best_of is not None:
            check_int("best_of", self.best_of, 1, MAX_OUTPUTS)
            if self.best_of < self.n:
                raise ConfigError(f"best_of={self.best_of} is below n={self.n}; raise it, or leave it out.")
        if self.num_children > 1 and self.is_greedy:
            raise ConfigError(
                f"n={self.n}, best_of={self.best_of} at temperature=0 gives equal outputs; raise the temperature or "
                "leave them out."
            )

    def _check_shaping(self) -> None:
        check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_real("repetition_penalty", self.repetition_penalty, 0.0)
        if self.repetition_penalty == 0.0:
            raise ConfigError("repetition_penalty=0: it must be above 0; 1 is off.")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ConfigError(
                    f"logit_bias={self.logit_bias!r}: it must be a dict from token id to number."
                )
            for token_id, bias in self.logit_bias.items():
                check_int("logit_bias", token_id, 0)
                check_real(f"logit_bias[{token_id}]", bias, -MAX_FLOAT)
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.token_mask is not None and not callable(getattr(self.token_mask, "allowed", None)):
            raise ConfigError(f"token_mask={self.token_mask!r}: it must have a method `allowed(token_ids)`.")
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise ConfigError(
                    f"structured_outputs={self.structured_outputs!r}: give StructuredOutputsParams(...)."
                )
            if self.ignore_eos:
                raise ConfigError("structured_outputs end where their form ends; leave ignore_eos=False.")

    def _normalise_lists(self) -> None:
        ids = {"stop_token_ids": (), "allowed_token_ids": None}
        for name, nothing in ids.items():
            if (value := getattr(self, name)) is None:
                object.__setattr__(self, name, nothing)
                continue
            listed = _as_tuple(name, value)
            for token_id in listed:
                check_int(name, token_id, 0)
            object.__setattr__(self, name, listed)
        if self.allowed_token_ids == ():
            raise ConfigError("allowed_token_ids=[] allows nothing; leave it out, or name at least one id.")
        object.__setattr__(self, "stop", self._texts("stop"))
        object.__setattr__(self, "bad_words", self._texts("bad_words"))
        if self.stop and not self.detokenize:
            raise ConfigError("stop strings need text; leave detokenize=True or use stop_token_ids.")
        processors = _as_tuple("logits_processors", self.logits_processors or ())
        if not all(map(callable, processors)):
            raise ConfigError(
                f"logits_processors={self.logits_processors!r}: it must be a list of functions."
            )
        object.__setattr__(self, "logits_processors", processors)

    def _texts(self, name: str) -> tuple[str, ...]:
        value = getattr(self, name)
        texts = (value,) if isinstance(value, str) and value else _as_tuple(name, value or (), str)
        if not all(texts):
            raise ConfigError(f"{name}={value!r}: it must be a non-empty string or a list of them.")
        return texts

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without randomness."""
        return self.temperature == 0.0

    @property
    def num_children(self) -> int:
        """Outputs to produce: `best_of`, or `n` without it."""
        return self.n if self.best_of is None else self.best_of

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@options_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class BeamSearchParams:
    """How a beam search goes, with vLLM's names.

    Attributes:
        beam_width: sequences kept after each token, and returned.
        max_tokens: the most output tokens of a sequence.
        ignore_eos: end ids are tokens like others.
        length_penalty: a sequence's score is the sum of its log-probabilities divided by its number of output tokens
            to this power: above 0 long ones gain, 0 compares sums.
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check_int("beam_width", self.beam_width, 1, MAX_OUTPUTS)
        check_int("max_tokens", self.max_tokens, 1)
        check_flags(self, "ignore_eos")
        check_real("length_penalty", self.length_penalty, -MAX_FLOAT)

    def score(self, cum_logprob: float, num_output_tokens: int) -> float:
        """What sequences are compared by; the highest is the best."""
        return cum_logprob / float(num_output_tokens**self.length_penalty)


def _as_tuple(name: str, value: object, kind: type = object) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ConfigError(f"{name}={value!r}: it must be a list.")
    listed = tuple(value)
    if not all(isinstance(item, kind) for item in listed):
        raise ConfigError(f"{name}={value!r}: it must be a list of {kind.__name__}.")
    return listed
