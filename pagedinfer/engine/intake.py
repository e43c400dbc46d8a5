"""Checks at the door: what a caller gives becomes token ids and sound parameters, or one clear error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from pagedinfer.config import SamplingParams, StructuredOutputsParams, TokenMask
from pagedinfer.engine.plan import TokenRules
from pagedinfer.engine.protocols import Tokenizer
from pagedinfer.errors import ConfigError, RequestError, kind_of

__all__ = ["MakeMask", "Prompt", "check_params", "make_rules", "read_prompt"]

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or a dict with "prompt" (text) or "prompt_token_ids"."""

MakeMask: TypeAlias = Callable[[StructuredOutputsParams], TokenMask]
"""Makes the mask of one output."""

HOW = 'Give text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.'


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[str | None, list[int]]:
    """The prompt's text (None when it came as ids) and its token ids.

    Raises:
        RequestError: it is none of the forms, empty, or holds an id that the model does not have.
    """
    text: str | None = None
    ids: object = prompt
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown or not prompt:
            raise RequestError(f"A prompt dict has keys {sorted(map(str, prompt))}. {HOW}")
        given = prompt.get("prompt")
        if given is not None and not isinstance(given, str):
            raise RequestError(f'"prompt" is {kind_of(given)}, it must be text. {HOW}')
        text, ids = given, prompt.get("prompt_token_ids")
    elif isinstance(prompt, str):
        text, ids = prompt, None
    if ids is None:
        if text is None:
            raise RequestError(f"The prompt is empty. {HOW}")
        if tokenizer is None:
            raise RequestError("The prompt is text and this engine has no tokenizer; give token ids.")
        ids = tokenizer.encode(_check_text(text))
    return text, _check_ids(ids, vocab_size)


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"Character {error.start} of the prompt is {text[error.start]!r}, half of a pair; decode the text anew."
        ) from None
    return text


def _check_ids(ids: object, vocab_size: int) -> list[int]:
    if isinstance(ids, bytes | str) or not hasattr(ids, "__iter__"):
        raise RequestError(f"The prompt is {kind_of(ids)}. {HOW}")
    listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)  # arrays and tensors give Python ints
    if not isinstance(listed, list) or not listed:
        raise RequestError("The prompt has no tokens; give at least one.")
    for token_id in listed:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"Token id {token_id!r} is {kind_of(token_id)}; ids are integers.")
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"Token id {token_id} is outside the vocabulary (0 to {vocab_size - 1}).")
    return listed


def check_params(
    params: SamplingParams | None, tokenizer: Tokenizer | None, vocab_size: int, has_logits: bool = True
) -> SamplingParams:
    """The parameters (defaults for None), checked against the model.

    Raises:
        ConfigError: not a `SamplingParams`, ids outside the vocabulary, text asked of an engine without tokenizer, or
            something that only logits can give asked of a runner that has none.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params is {kind_of(params)}; give SamplingParams(...).")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        for token_id in getattr(params, name) or ():
            if token_id >= vocab_size:
                raise ConfigError(f"{name} has {token_id}, outside the vocabulary (0 to {vocab_size - 1}).")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab_size:
            raise ConfigError(f"{name}={getattr(params, name)}: the vocabulary has {vocab_size} tokens.")
    if params.stop and tokenizer is None:
        raise ConfigError("stop strings need text and this engine has no tokenizer; use stop_token_ids.")
    if params.bad_words and tokenizer is None:
        raise ConfigError("bad_words need a tokenizer and this engine has none; use logit_bias.")
    if not has_logits:
        _check_without_logits(params)
    return params


def _check_without_logits(params: SamplingParams) -> None:
    """Refuse what promises something about the output that tokens by a rule cannot keep."""
    promises = ("logprobs", "prompt_logprobs", "allowed_token_ids", "bad_words", "token_mask", "logits_processors",
                "structured_outputs")  # fmt: skip
    if params.num_children > params.n:
        raise ConfigError(f"best_of={params.best_of} ranks by logits and this engine simulates without any.")
    for name in promises:
        if (value := getattr(params, name)) not in (None, ()):
            raise ConfigError(
                f"{name}={value!r} needs logits and this engine simulates without any; leave it out."
            )


def make_rules(
    params: SamplingParams, tokenizer: Tokenizer | None, make_mask: MakeMask | None
) -> TokenRules | None:
    """What the sampler needs beyond the parameters, None for nothing. Each output has masks of its own.

    Raises:
        ConfigError: a structured output that cannot be used, or an engine that has none.
    """
    masks = [] if params.token_mask is None else [params.token_mask]
    if params.structured_outputs is not None:
        if make_mask is None:
            raise ConfigError(
                "structured_outputs: this engine has none; use LLM, or give Engine a make_mask."
            )
        masks.append(make_mask(params.structured_outputs))
    words: dict[tuple[int, ...], None] = {}
    if params.bad_words and tokenizer is not None:
        forms = [form for text in params.bad_words for form in (text, " " + text.lstrip())]
        words = dict.fromkeys(tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms)
        words.pop((), None)
    return TokenRules(tuple(masks), tuple(words)) if masks or words else None
