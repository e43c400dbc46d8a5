"""Guesses at a request's next tokens, so that one step may give it several: speculation without a second model.

A draft costs a row in the step's batch and is right or wrong; the runner decides, and a wrong one changes nothing but
the time (`runner.acceptance` says why). So a drafter may guess as it likes. The one here looks for the text's newest
words further up in the text and proposes what followed them there (Saxena, "Prompt lookup decoding", 2023). It pays
where outputs repeat their prompts: summaries, code edits, answers that quote; and wherever a model repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from pagedinfer.checks import check_int
from pagedinfer.engine.request import Request
from pagedinfer.errors import ConfigError

__all__ = ["Drafter", "NgramDrafter"]


@runtime_checkable
class Drafter(Protocol):
    """Guesses tokens. One that raises, or guesses what is no token, is an `error` event and no draft."""

    def propose(self, request: Request, new_token_ids: Sequence[int], limit: int) -> Sequence[int]:
        """Guess what follows `request.token_ids` and then `new_token_ids`, this step's, which it has not yet.

        `limit`, at least 1, is the most drafts of use; more are cut.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended; it may never have been asked about."""
        ...


@dataclass(slots=True)
class _Index:
    """One request's tokens, and for each n-gram in them the position after its last occurrence but the very end."""

    tokens: list[int] = field(default_factory=list)
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Proposes what followed the most recent earlier occurrence of the longest suffix that has one.

    Where that occurrence reaches into the suffix itself, the text is in a loop and the proposal goes round in it.

    An index per request grows with its tokens, a dictionary entry for each n-gram length: with the default lengths
    under 1 microsecond and 360 bytes a token (measured: 7 ms and 3 MB for a prompt of 8,192 tokens, once). A proposal
    is a look-up per length, whatever the length of the text: 3 to 6 microseconds.

    Args:
        num_draft_tokens: the most tokens to propose, at least 1.
        max_ngram: length of the longest suffix looked for.
        min_ngram: length of the shortest.

    Raises:
        ConfigError: a number is below 1, or the shortest is longer than the longest.
    """

    def __init__(self, num_draft_tokens: int, max_ngram: int = 3, min_ngram: int = 1) -> None:
        check_int("num_draft_tokens", num_draft_tokens, 1)
        check_int("max_ngram", max_ngram, 1)
        check_int("min_ngram", min_ngram, 1)
        if min_ngram > max_ngram:
            raise ConfigError(f"min_ngram={min_ngram} is above max_ngram={max_ngram}; lower it.")
        self.num_draft_tokens = num_draft_tokens
        self._lengths = range(min_ngram, max_ngram + 1)
        self._indices: dict[str, _Index] = {}

    def propose(self, request: Request, new_token_ids: Sequence[int], limit: int) -> list[int]:
        """Up to `num_draft_tokens` and `limit` tokens; none where no suffix has come before."""
        index = self._indices.setdefault(request.request_id, _Index())
        self._add(index, request.token_ids[len(index.tokens) :])
        self._add(index, new_token_ids)
        tokens = index.tokens
        for length in reversed(self._lengths):
            position = index.after.get(tuple(tokens[-length:])) if length < len(tokens) else None
            if position is not None:
                return _continue(tokens, position, min(self.num_draft_tokens, limit))
        return []

    def _add(self, index: _Index, token_ids: Sequence[int]) -> None:
        tokens, after = index.tokens, index.after
        for token_id in token_ids:
            position = len(tokens)
            for length in self._lengths:
                if length <= position:
                    after[tuple(tokens[position - length :])] = position
            tokens.append(token_id)

    def forget(self, request_id: str) -> None:
        """Let go of a request's index."""
        self._indices.pop(request_id, None)


def _continue(tokens: Sequence[int], position: int, num_tokens: int) -> list[int]:
    """The `num_tokens` tokens from `position` on; past the end they repeat (as LZ77 copies)."""
    period = len(tokens) - position
    return [tokens[position + i % period] for i in range(num_tokens)]
