"""Checks at the door: what a caller gives becomes token ids and sound parameters, or one clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from pagedinfer.config import SamplingParams
from pagedinfer.engine.protocols import Tokenizer
from pagedinfer.errors import ConfigError, RequestError

__all__ = ["Prompt", "check_params", "read_prompt"]

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or a dict with "prompt" (text) or "prompt_token_ids"."""

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
            raise RequestError(f'"prompt" is a {type(given).__name__}, it must be text. {HOW}')
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
        raise RequestError(f"The prompt is a {type(ids).__name__}. {HOW}")
    listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)  # arrays and tensors give Python ints
    if not isinstance(listed, list) or not listed:
        raise RequestError("The prompt has no tokens; give at least one.")
    for token_id in listed:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"Token id {token_id!r} is a {type(token_id).__name__}; ids are integers.")
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"Token id {token_id} is outside the vocabulary (0 to {vocab_size - 1}).")
    return listed


def check_params(
    params: SamplingParams | None, tokenizer: Tokenizer | None, vocab_size: int
) -> SamplingParams:
    """The parameters (defaults for None), checked against the model.

    Raises:
        ConfigError: not a `SamplingParams`, ids outside the vocabulary, or text asked of an engine without tokenizer.
    """
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params is a {type(params).__name__}; give SamplingParams(...).")
    for token_id in params.stop_token_ids or ():
        if token_id >= vocab_size:
            raise ConfigError(
                f"stop_token_ids has {token_id}, outside the vocabulary (0 to {vocab_size - 1})."
            )
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ConfigError(f"logprobs={params.logprobs}: the vocabulary has {vocab_size} tokens.")
    if params.stop and tokenizer is None:
        raise ConfigError("stop strings need text and this engine has no tokenizer; use stop_token_ids.")
    return params
