"""A request as the caller sees it while it runs: text, tokens and log-probabilities gathered step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pagedinfer.engine.output import CompletionOutput, Logprob, RequestOutput
from pagedinfer.engine.plan import TokenLogprobs
from pagedinfer.engine.protocols import Tokenizer
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Update
from pagedinfer.engine.text import OutputText, find_end
from pagedinfer.errors import RequestError, describe_error

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
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None]  # nothing comes before the first token
        )
        self._cumulative = 0.0
        self._stop_reason: int | str | None = None

    def fork(self, request: Request, outbox: deque[RequestOutput] | None) -> LiveRequest:
        """The same for a copy of the request, whose last output token may be another.

        Raises:
            RequestError: the other token ends the output, or log-probabilities are asked for and it has none.
        """
        twin = LiveRequest(request, self._prompt, self._tokenizer, outbox)
        ids = request.token_ids[request.num_prompt_tokens :]
        if (text := twin._text) is not None:
            for token_id in ids[:-1]:
                text.append(token_id, look_for_stops=False)  # they have ended nothing
        before = len(ids) - 1
        _, stop = find_end(
            ids[-1:], num_output_tokens=before, params=request.params, end_token_ids=request.end_token_ids,
            text=text,
        )  # fmt: skip
        if stop is not None:
            raise RequestError(
                f"Token {ids[-1]} ends the output ({stop!r}); a copy would have nothing to do."
            )
        if self._prompt_logprobs is not None:
            twin._prompt_logprobs = list(self._prompt_logprobs)
        if self._logprobs is not None:
            twin._logprobs, twin._cumulative = list(self._logprobs), self._cumulative
            if ids:
                twin._choose(self.request.token_ids[-1], ids[-1])
        return twin

    def _choose(self, old: int, new: int) -> None:
        """The newest token is `new` in place of `old`: its log-probability counts."""
        assert self._logprobs is not None
        row, asked = self._logprobs[-1], self.request.params.logprobs or 0
        if new not in row:
            raise RequestError(
                f"Token {new} is not among the log-probabilities kept ({sorted(row)}); ask for more of them."
            )
        self._cumulative += row[new].logprob - row[old].logprob
        self._logprobs[-1] = {
            token: entry
            for token, entry in row.items()
            if token == new or asked < 0 or (entry.rank or 0) <= asked
        }

    def take(self, new_token_ids: Sequence[int]) -> tuple[Sequence[int], tuple[str, str] | None]:
        """Look at the step's new tokens before they are committed. More than `max_tokens` allows are left out.

        Returns those to keep and, when the output ends with them, (finish reason, sentence).
        """
        request = self.request
        new_token_ids = new_token_ids[: request.max_tokens - request.num_output_tokens]
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

    def add_logprobs(self, rows: Sequence[TokenLogprobs], token_ids: Sequence[int]) -> None:
        """Keep one row per new token."""
        if self._logprobs is None:
            return
        for row, chosen in zip(rows, token_ids, strict=True):
            self._cumulative += row[chosen][0]
            self._logprobs.append(self._entry(row))

    def add_prompt_logprobs(self, first: int, rows: Sequence[TokenLogprobs]) -> None:
        """Keep the rows of prompt tokens `first` and on, but for those known from before a preemption."""
        known = self._prompt_logprobs
        assert known is not None and first <= len(known), (
            f"prompt log-probabilities have a hole before {first}"
        )
        known += [self._entry(row) for row in rows[len(known) - first :]]

    def _entry(self, row: TokenLogprobs) -> dict[int, Logprob]:
        return {
            token_id: Logprob(logprob, rank, self._piece(token_id))
            for token_id, (logprob, rank) in row.items()
        }

    def _piece(self, token_id: int) -> str | None:
        return (
            None if self._tokenizer is None else self._tokenizer.decode([token_id], skip_special_tokens=False)
        )

    def output(self, update: Update | None = None) -> RequestOutput:
        """Everything so far, as an independent value."""
        request, completion = self.request, self.completion(update)
        reason, detail = completion.finish_reason, update.detail if update else ""
        known = self._prompt_logprobs
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=request.token_ids[: request.num_prompt_tokens],
            outputs=[completion],
            finished=reason is not None,
            error=detail if reason == "error" else None,
            detail=detail,
            prompt_logprobs=None if known is None else list(known),
            num_cached_tokens=None if request.num_cached_tokens < 0 else request.num_cached_tokens,
            cache_note=request.cache_note,
        )

    def completion(self, update: Update | None = None) -> CompletionOutput:
        """The sequence so far, as an independent value."""
        if update is not None:
            self._finish_text(update)
        request, reason = self.request, update.finish_reason if update else None
        text = "" if self._text is None else self._text.text if reason is not None else self._text.visible
        return CompletionOutput(
            index=0,
            text=text,
            token_ids=request.token_ids[request.num_prompt_tokens :],
            logprobs=None if self._logprobs is None else list(self._logprobs),
            cumulative_logprob=None if self._logprobs is None else self._cumulative,
            finish_reason=reason,
            stop_reason=self._stop_reason if reason == "stop" else None,
        )

    def _finish_text(self, update: Update) -> None:
        """Let the held back end of the text out. If that fails the settled text stays and the end is an error."""
        if self._text is None or update.finish_reason in (
            None,
            "error",
        ):  # the error may be that decoding fails
            return
        try:
            self._text.finish()
        except Exception as error:
            update.finish_reason, update.detail = "error", describe_error(error, "making text")
