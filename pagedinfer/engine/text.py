"""Text as it grows: decoding token by token, stop strings, and the end of an output.

Decoding each token alone loses spaces and splits characters; decoding everything each time costs the square of the
length. So a window of the newest tokens is decoded, with one settled token before them for context, and nothing is
let out that a later token could still change (the same window idea as in vLLM and text-generation-inference).

Two things change later. Trailing replacement marks may be the first half of a character. And where characters are
spelled as byte tokens (byte fallback), one bad byte turns the whole run of them into marks: é is text until a byte
follows that does not fit. To see how far such text is settled, it is decoded once more with a bad byte behind it.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from pagedinfer.config import SamplingParams
from pagedinfer.engine.protocols import Tokenizer

__all__ = ["OutputText", "find_end"]

REPLACEMENT = "\ufffd"


class OutputText:
    """The text of one output.

    Attributes:
        text: all that is settled, stop string cut; concatenated increments equal the decode of the whole output.
            A stop string is met as soon as its last character is there, settled or not: nothing comes after it.
        stopped_by: the stop string that was met, None before.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skip_special = params.skip_special_tokens
        self._stops: tuple[str, ...] = tuple(params.stop or ())
        self._keep_stop = params.include_stop_str_in_output
        self._token_ids: list[int] = []
        self._probe: int | None = getattr(tokenizer, "bad_byte_id", None)
        self._context = 0  # first token of the window
        self._settled = 0  # first token whose text is not fully out
        self._base = 0  # characters that the tokens from _context to _settled decode to
        self._sent = 0  # characters of the window's text that are out
        self._looked = (
            0  # characters, settled or not, that the token before ended with: stops in them are known
        )
        self.text = ""
        self.stopped_by: str | None = None

    def append(self, token_id: int, *, look_for_stops: bool = True) -> bool:
        """Add a token. Returns whether a stop string is complete; the text then ends before (or after) it."""
        self._token_ids.append(token_id)
        window = self._decode(self._context)
        fresh = window.rstrip(REPLACEMENT)[self._sent :]
        if look_for_stops and self._stops and self._cut_at_stop(self.text + fresh):
            return True
        self._looked = len(self.text) + len(fresh)
        ready = self._settled_part(window)
        self.text += ready[self._sent :]
        self._sent = max(self._sent, len(ready))
        if len(ready) == len(window) > self._base:  # nothing held back: the window moves on
            self._context, self._settled = self._settled, len(self._token_ids)
            self._base = self._sent = len(self._decode(self._context))
        return False

    def finish(self) -> None:
        """No more tokens: let out what was held back, replacement marks for bytes that never became a character.

        Harmless when called again.
        """
        if self.stopped_by is None:
            window = self._decode(self._context)
            self.text += window[self._sent :]
            self._sent = max(self._sent, len(window))

    @property
    def visible(self) -> str:
        """The text less what may yet become a stop string: what a stream may show before the end."""
        if self.stopped_by is not None or not self._stops:
            return self.text
        longest = max(map(len, self._stops)) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return self.text[:-size]
        return self.text

    def _decode(self, start: int, *more: int) -> str:
        ids = [*self._token_ids[start:], *more]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special) if ids else ""

    def _settled_part(self, window: str) -> str:
        """The start of the window's text that no later token changes."""
        if self._probe is not None:
            longer = self._decode(self._context, self._probe)
            window = os.path.commonprefix([window, longer])  # noqa: RUF071, characters are meant
        return window.rstrip(REPLACEMENT)

    def _cut_at_stop(self, whole: str) -> bool:
        """Find the earliest stop string that the newest token completed, and end the text there."""
        found: tuple[int, str] | None = None
        for stop in self._stops:
            at = whole.find(stop, max(0, self._looked - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return False
        at, self.stopped_by = found
        self.text = whole[: at + len(self.stopped_by) if self._keep_stop else at]
        return True


def find_end(
    new_token_ids: Sequence[int],
    *,
    num_output_tokens: int,
    params: SamplingParams,
    end_token_ids: Sequence[int],
    text: OutputText | None,
) -> tuple[int, int | str | None]:
    """Add new tokens to the text and look for the end of the output.

    `num_output_tokens` counts the tokens before these. Returns how many of the new tokens to keep, and the end id or
    stop string that was met (None: the output goes on). Nothing ends an output before `params.min_tokens`.
    """
    for kept, token_id in enumerate(new_token_ids, 1):
        may_end = num_output_tokens + kept >= max(1, params.min_tokens)
        if may_end and token_id in end_token_ids:
            return kept, token_id  # the end id is no part of the text
        if text is not None and text.append(token_id, look_for_stops=may_end):
            return kept, text.stopped_by
    return len(new_token_ids), None
