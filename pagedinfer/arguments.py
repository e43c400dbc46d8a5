"""What callers of `LLM` may give: vLLM's options, one prompt or many, one set of parameters or one each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pagedinfer.checks import nearest
from pagedinfer.config import SamplingParams
from pagedinfer.errors import ConfigError, RequestError, kind_of

__all__ = ["is_single", "no_progress", "one_each", "progress", "read_conversation", "refuse_unsupported"]

NEUTRAL: dict[str, Any] = {
    "tokenizer": None,
    "revision": None,
    "quantization": None,
    "load_format": "auto",
    "trust_remote_code": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "enforce_eager": True,
    "enable_chunked_prefill": True,
    "swap_space": 0,
    "cpu_offload_gb": 0,
    "disable_log_stats": True,
}
"""Options of vLLM's that are not supported yet, with the value that says what this engine does anyway."""


def refuse_unsupported(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse options that `LLM` does not have, each by name; `known` are those that it has.

    Raises:
        ConfigError: an option is not vLLM's either, or has a value that is not supported yet.
    """
    problems = []
    for name, value in options.items():
        if name not in NEUTRAL:
            hint = nearest(name, [*known, *NEUTRAL]) or "."
            problems.append(f"LLM does not know {name}={value!r}: it is not an option{hint}")
        elif value != NEUTRAL[name]:
            problems.append(f"{name}={value!r} is not supported yet; leave it at {NEUTRAL[name]!r}.")
    if problems:
        raise ConfigError(" ".join(problems))


def is_single(prompts: object) -> bool:
    """Whether this is one prompt (text, a dict, token ids) rather than several.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return True
    if (
        hasattr(prompts, "tolist") and getattr(prompts, "ndim", 0) > 0
    ):  # an array or tensor: ids, or rows of ids
        return bool(prompts.ndim == 1)  # type: ignore[attr-defined]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"Prompts are {kind_of(prompts)}; give text, token ids, or a list of them.")
    return bool(prompts) and isinstance(prompts[0], int) and not isinstance(prompts[0], bool)


def one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    """Parameters for each of `count` prompts.

    Raises:
        ConfigError: not parameters, or another number of them.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        raise ConfigError(
            f"sampling_params is {kind_of(params)}; give SamplingParams(...), or a list with one for each."
        )
    if len(params) != count:
        raise ConfigError(
            f"{len(params)} sampling_params for {count} prompts; give one for all, or one for each."
        )
    return list(params)


def read_conversation(conversation: object) -> list[dict[str, Any]]:
    """The messages of a conversation for a chat template, each content as one text.

    Raises:
        RequestError: it is no list of messages, empty, or a content is neither text nor text parts.
    """
    if isinstance(conversation, str | Mapping) or not isinstance(conversation, Sequence):
        raise RequestError(
            f'A conversation is {kind_of(conversation)}; give a list of {{"role", "content"}}.'
        )
    if not conversation:
        raise RequestError('A conversation has no messages; give at least one {"role", "content"}.')
    for message in conversation:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RequestError(f'A message is {message!r}; give a dict with "role" and "content".')
    return [{**message, "content": _text_of(message["content"])} for message in conversation]


def _text_of(content: object) -> str | None:
    """A content as text (None, beside tool calls, stays). Parts are joined by line ends, as vLLM joins them."""
    if content is None or isinstance(content, str):
        return content
    how = 'give text, or a list of {"type": "text", "text": ...}.'
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise RequestError(f"The content of a message is {kind_of(content)}; {how}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            what = f"a part of type {kind!r}" if kind else repr(part)
            raise RequestError(
                f"The content of a message holds {what:.80}; models here read text alone: {how}"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"A text part of a message holds {part.get('text')!r:.80}; {how}")
    return "\n".join(part["text"] for part in content)


def no_progress(done: int) -> None:
    """Show nothing."""


def progress(total: int) -> Callable[[int], None]:
    """A line on the terminal that counts prompts done; nothing elsewhere (logs, notebooks, tests)."""
    if not sys.stderr.isatty():
        return no_progress

    def show(done: int) -> None:
        sys.stderr.write(f"\r{done} of {total} prompts done" + ("\n" if done == total else ""))
        sys.stderr.flush()

    return show
