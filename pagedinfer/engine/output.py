"""What callers get: `RequestOutput` and its parts, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagedinfer.errors import readable

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]


@dataclass(slots=True, frozen=True)
class Logprob:
    """One candidate token.

    Attributes:
        logprob: natural log of its probability, from the raw logits.
        rank: 1 for the most likely token of the vocabulary.
        decoded_token: its text, None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence.

    Attributes:
        index: number of the sequence within its request.
        text: its text so far; what may still turn out to be a stop string is held back.
        token_ids: its ids so far, the end id included.
        logprobs: per token, token id -> `Logprob`; None when not asked for.
        cumulative_logprob: sum over the chosen tokens; None when not asked for.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        stop_reason: the stop string or stop id that ended it; None otherwise.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and what it has produced.

    Attributes:
        request_id: its id.
        prompt: its text, None when it came as ids.
        prompt_token_ids: its ids.
        outputs: the generated sequences, `n` of them. With `best_of` above `n` the best so far, best first.
        finished: whether nothing more will come.
        error: the sentence, when the request could not be served; `outputs[0].finish_reason` is then "error".
        detail: why it ended, as a sentence.
        prompt_logprobs: per prompt token, token id -> `Logprob`, as far as it is computed; None for the first token,
            and None in all when not asked for.
        num_cached_tokens: prompt tokens that the prefix cache held at the first admission; None before it.
        cache_note: why they were not more.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    error: str | None = None
    detail: str = ""
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    cache_note: str = ""

    def __str__(self) -> str:
        texts = (f"{o.text!r} ({o.finish_reason or 'running'})" for o in self.outputs)
        return readable(f"{self.request_id}: {'; '.join(texts)}")

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><td>{o.index}</td><td style='text-align:left;white-space:pre-wrap'>{escape(o.text)}</td>"
            f"<td>{len(o.token_ids)}</td><td>{o.finish_reason or 'running'}</td></tr>"
            for o in self.outputs
        )
        head = "<tr><th>output</th><th>text</th><th>tokens</th><th>end</th></tr>"
        prompt = escape(self.prompt if self.prompt is not None else f"{len(self.prompt_token_ids)} token ids")
        error = f"<p>{escape(self.error)}</p>" if self.error else ""
        caption = f"<caption>{escape(self.request_id)}: {prompt}</caption>"
        return readable(f"<table>{caption}{head}{rows}</table>{error}")
