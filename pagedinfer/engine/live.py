"""A request as the caller sees it while it runs: text, tokens and log-probabilities gathered step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from pagedinfer.engine.output import CompletionOutput, Logprob, RequestOutput
from pagedinfer.engine.protocols import Tokenizer
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Update
from pagedinfer.engine.text import OutputText, find_end

__all__ = ["LiveRequest"]


class LiveRequest:
    """Beside the scheduler's `Request`: what only callers care about.

    Attributes:
        request: the scheduler's.
        outbox: where its outputs go; None for the step's return value.
    """

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        tokenizer: Tokenizer | None,
        outbox: deque[RequestOutput] | None = None,
    ) -> None:
        self.request = request
        self.outbox = outbox
        self._prompt = prompt
        self._tokenizer = tokenizer
        params = request.params
        self._text = OutputText(tokenizer, params) if tokenizer is not None and params.detokenize else None
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative = 0.0
        self._stop_reason: int | str | None = None

    def take(self, new_token_ids: Sequence[int]) -> tuple[Sequence[int], tuple[str, str] | None]:
        """Look at the step's new tokens before they are committed.

        Returns those to keep and, when the output ends with them, (finish reason, sentence).
        """
        request = self.request
        kept, stop = find_end(
            new_token_ids,
            num_output_tokens=request.num_output_tokens,
            params=request.params,
            end_token_ids=request.end_token_ids,
            text=self._text,
        )
        if stop is None:
            return new_token_ids, None
        explicit = isinstance(stop, str) or stop in (request.params.stop_token_ids or ())
        self._stop_reason = stop if explicit else None
        what = f"stop string {stop!r}" if isinstance(stop, str) else f"end id {stop}"
        return new_token_ids[:kept], ("stop", what)

    def add_logprobs(self, rows: Sequence[Mapping[int, float]], token_ids: Sequence[int]) -> None:
        """Keep one row per new token: token id -> log-probability, most likely first, the chosen one included."""
        if self._logprobs is None:
            return
        asked = self.request.params.logprobs or 0
        for row, chosen in zip(rows, token_ids, strict=True):
            self._cumulative += row[chosen]
            ordered = sorted(row.items(), key=lambda pair: -pair[1])
            entry = {}
            for rank, (token_id, logprob) in enumerate(ordered, 1):
                entry[token_id] = Logprob(logprob, rank if rank <= asked else None, self._piece(token_id))
            self._logprobs.append(entry)

    def _piece(self, token_id: int) -> str | None:
        return (
            None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)
        )

    def output(self, update: Update | None = None) -> RequestOutput:
        """Everything so far, as an independent value."""
        request = self.request
        reason = update.finish_reason if update else None
        detail = update.detail if update else ""
        if reason not in (None, "error") and self._text is not None:  # the error may be that decoding fails
            self._text.finish()
        text = "" if self._text is None else self._text.text if reason is not None else self._text.visible
        completion = CompletionOutput(
            index=0,
            text=text,
            token_ids=request.token_ids[request.num_prompt_tokens :],
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
            finish_reason=reason,
            stop_reason=self._stop_reason if reason == "stop" else None,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            outputs=[completion],
            finished=reason is not None,
            error=detail if reason == "error" else None,
            detail=detail,
        )
