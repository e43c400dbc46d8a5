"""Structured outputs: a JSON schema, a regular expression, a choice or a grammar becomes a mask over the vocabulary.

The grammar library is llguidance (https://github.com/guidance-ai/llguidance), an extra of its own. It was chosen by
cost, measured on two cores with a vocabulary of 49,152 and a schema of five top-level fields: it compiles in 1 to 2 ms
and takes 0.02 to 0.04 ms per token, depends on nothing and brings 8 MB. xgrammar 0.2.9 takes 30 ms and 0.004 ms per
token but requires torch, transformers and Triton and 6 s to import; outlines-core 0.2.14 takes 4.1 s and 0.5 ms per
token and knows no grammars.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedinfer.config import StructuredOutputsParams, TokenMask
from pagedinfer.errors import ConfigError

__all__ = ["GrammarMask", "StructuredOutputs"]


class StructuredOutputs:
    """Makes masks for one model's vocabulary: the engine's `make_mask`.

    Args:
        tokenizer: a `TextTokenizer`, or one with `token_bytes(token_id)` and `special_token_ids`.
        vocab_size: the model's; its masks have this length.
        eos_token_ids: ids that may follow where the form is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._vocabulary: Any = None  # made at first use: 0.9 s for 49,152 tokens

    def __call__(self, form: StructuredOutputsParams) -> TokenMask:
        """A mask for one output.

        Raises:
            ConfigError: the form is not valid or not supported, or llguidance is not installed.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise ConfigError(
                f'structured_outputs need the extra `structured`: pip install "pagedinfer[structured]" ({error}).'
            ) from None
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        name, text = _form(form)
        try:
            grammar = _grammar(form)
        except Exception as error:
            raise ConfigError(f"{name}={text!r} cannot be used: {_sentence(str(error))}") from error
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"{name}={text!r} cannot be used: {_sentence(matcher.get_error())}")
        return GrammarMask(matcher, self._vocabulary.vocab_size, self._vocab_size)

    def _read_vocabulary(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        size = max(self._vocab_size, self._tokenizer.vocab_size)
        if hasattr(self._tokenizer, "token_bytes"):
            source: Any = TokenizerWrapper(_Bytes(self._tokenizer, self._eos_token_ids[0]))
        elif hasattr(self._tokenizer, "backend"):
            source = self._tokenizer.backend.to_str()
        else:
            raise ConfigError(
                f"structured_outputs cannot use a {type(self._tokenizer).__name__}; it needs `token_bytes`."
            )
        try:
            return LLTokenizer(source, n_vocab=size, eos_token=self._eos_token_ids)
        except Exception as error:
            raise ConfigError(f"structured_outputs cannot use this model's tokenizer: {error}.") from error


class GrammarMask:
    """The mask of one output: what its grammar allows next. A function of the output's ids; the parser's state is kept
    from call to call, and made anew where the ids are no continuation of those before.
    """

    def __init__(self, matcher: Any, size: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._consumed: list[int] = []
        self._bits = np.zeros((size + 31) // 32, np.int32)
        self._num_words = (vocab_size + 31) // 32

    def allowed(self, token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The next token's mask, 32 tokens packed into each int32."""
        ids, known = list(token_ids), len(self._consumed)
        if ids[:known] != self._consumed:
            self._matcher.reset()
            known = 0
        self._consumed = ids
        if not self._matcher.consume_tokens(ids[known:]):
            raise ValueError(_sentence(self._matcher.get_error()))
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise ValueError(_sentence(self._matcher.get_error()))
        return self._bits[: self._num_words].copy()


def _sentence(report: str) -> str:
    """What the library says went wrong, on one line, its dump of the parser's state left out."""
    lines = report.splitlines()
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return " ".join(" ".join(errors or lines).split())


class _Bytes:
    """A tokenizer as llguidance wants it: the bytes of each token."""

    def __init__(self, tokenizer: Any, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text, add_special_tokens=False)
        return ids


def _form(form: StructuredOutputsParams) -> tuple[str, object]:
    names = ("json", "regex", "choice", "grammar", "json_object")
    return next((name, value) for name in names if (value := getattr(form, name)) not in (None, False))


def _grammar(form: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher, grammar_from

    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    if form.grammar is not None:
        return grammar_from("grammar", form.grammar)
    schema: Any = {"type": "object"} if form.json is None else json.loads(str(form.json))
    if form.disable_additional_properties:
        _close_objects(schema)
    options: Any = {}
    if form.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if form.whitespace_pattern is not None:
        options["whitespace_pattern"] = form.whitespace_pattern
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _close_objects(schema: Any) -> None:
    """Say of each object in the schema that it has no members but those it names, unless it says otherwise."""
    if isinstance(schema, list):
        for part in schema:
            _close_objects(part)
    elif isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            _close_objects(part)
