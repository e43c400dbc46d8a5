"""Beam search over forked requests: beams share the blocks of what they have in common, and copy when they part.

Each beam is a greedy request that also reports the log-probabilities of the likeliest next tokens. After a step the
best `beam_width` continuations of all beams are chosen. A beam whose own token is chosen goes on; another token is a
fork with that last token; a beam without a chosen continuation is aborted. Which candidates finish, and when the
search may stop, is as in transformers (early_stopping="never"): an end counts where it is among the `beam_width` best
candidates of its step, and the search ends when no beam can beat the worst sequence kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from pagedinfer.config import BeamSearchParams, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.intake import Prompt
from pagedinfer.engine.interrupt import DeferredInterrupt
from pagedinfer.engine.output import Logprob, RequestOutput
from pagedinfer.errors import ConfigError, RequestError, UnknownRequest

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "beam_search"]

Row = Mapping[int, Logprob]


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence, with vLLM's names.

    Attributes:
        tokens: the prompt's ids and the output's, an end id included.
        cum_logprob: sum of the output tokens' log-probabilities.
        score: what sequences are compared by; see `BeamSearchParams.length_penalty`.
        logprobs: per output token the likeliest ones and it itself.
        text: text of all `tokens`; None without a tokenizer.
        finish_reason: "stop" for an end id, "length".
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    logprobs: list[Row] = field(repr=False)
    text: str | None = None
    finish_reason: str = "length"


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first; none, and the sentence why, where it could not be searched."""

    sequences: list[BeamSearchSequence]
    error: str | None = None


@dataclass(slots=True)
class _Beam:
    """A sequence that goes on. `request_id` is "" once its request is gone; `row` is None until it is computed."""

    tokens: list[int]
    cum_logprob: float
    logprobs: list[Row]
    request_id: str = ""
    num_before: int = 0  # output tokens that were part of its request's prompt
    newest: int = -1
    row: Row | None = None


class _Search:
    """The search of one prompt."""

    def __init__(self, engine: Engine, params: BeamSearchParams, box: deque[RequestOutput]) -> None:
        self._engine = engine
        self._params = params
        self._box = box
        self._ends = frozenset() if params.ignore_eos else frozenset(engine.eos_token_ids)
        # Every beam may end in each of the ends; as many candidates again go on.
        self._num_candidates = (1 + max(1, len(self._ends))) * params.beam_width
        self._max_tokens = params.max_tokens
        self.beams: list[_Beam] = []
        self.finished: list[BeamSearchSequence] = []
        self.prompt: list[int] = []
        self.error: str | None = None

    def begin(self, prompt: Prompt) -> None:
        """Submit the prompt. Raises RequestError when it cannot be used."""
        beam = _Beam([], 0.0, [])
        beam.request_id = self._engine.add_request(prompt, self._sampling(0), outbox=self._box)
        request = self._engine.request(beam.request_id)
        self.prompt = list(request.token_ids)
        self._max_tokens = request.max_tokens  # cut to the context's end
        self.beams = [beam]

    def _sampling(self, num_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.0,
            max_tokens=self._max_tokens - num_tokens,
            logprobs=min(self._num_candidates, self._engine.runner.vocab_size),
            ignore_eos=True,
            detokenize=False,
        )

    def take(self, beam: _Beam, output: RequestOutput) -> None:
        """A beam's request has computed: keep what may follow, if it got so far."""
        completion = output.outputs[0]
        if len(completion.token_ids) > len(beam.tokens) - beam.num_before and completion.logprobs:
            beam.newest, beam.row = completion.token_ids[-1], completion.logprobs[-1]
        if output.finished:
            beam.request_id = ""
            if beam.row is None:
                self.error = f"A beam ended before its time: {output.detail}."

    def advance(self) -> None:
        """Once every beam has its row, choose how they go on. Until then those ahead give their blocks up.

        They come back through the prefix cache: a request cannot stand still, and what it computes beyond its beam
        would be lost anyway.
        """
        if self.error is not None:
            self._give_up(self.beams)
            self.beams = []
        elif all(beam.row is not None for beam in self.beams):
            going_on = self._choose()
            if self._may_stop(going_on):
                going_on = []
            self._replace(going_on)
        elif any(beam.row is not None for beam in self.beams):
            self._give_up([beam for beam in self.beams if beam.row is not None])

    def _choose(self) -> list[tuple[_Beam, int, float]]:
        """(beam, next token, sum of log-probabilities) of the best continuations; ends among them are finished."""
        width = self._params.beam_width
        found = [
            (beam, token, beam.cum_logprob + entry.logprob)
            for beam in self.beams
            for token, entry in (beam.row or {}).items()
        ]
        found.sort(key=lambda candidate: -candidate[2])
        is_last = len(self.beams[0].tokens) + 1 == self._max_tokens
        going_on: list[tuple[_Beam, int, float]] = []
        for rank, (beam, token, total) in enumerate(found[: self._num_candidates]):
            if token in self._ends or is_last:
                if rank < width:
                    self._finish(beam, token, total)
            elif len(going_on) < width:
                going_on.append((beam, token, total))
        return going_on

    def _finish(self, beam: _Beam, token: int, total: float) -> None:
        tokens = [*beam.tokens, token]
        score = self._params.score(total, len(tokens))
        reason = "stop" if token in self._ends else "length"
        rows = [*beam.logprobs, beam.row or {}]
        self.finished.append(
            BeamSearchSequence([*self.prompt, *tokens], total, score, rows, finish_reason=reason)
        )
        self.finished.sort(key=lambda sequence: -sequence.score)
        del self.finished[self._params.beam_width :]

    def _may_stop(self, going_on: list[tuple[_Beam, int, float]]) -> bool:
        """Whether no beam can come to beat the worst sequence kept: a sum of log-probabilities only falls."""
        if len(self.finished) < self._params.beam_width or not going_on:
            return not going_on
        length = self._max_tokens if self._params.length_penalty > 0 else len(going_on[0][0].tokens) + 1
        return self._params.score(going_on[0][2], length) <= self.finished[-1].score

    def _replace(self, going_on: list[tuple[_Beam, int, float]]) -> None:
        """Make the chosen continuations the beams: forks first, while their parents hold the blocks."""
        kept: set[str] = set()
        beams = []
        for beam, token, total in going_on:
            twin = _Beam([*beam.tokens, token], total, [*beam.logprobs, beam.row or {}])
            twin.request_id, twin.num_before = beam.request_id, beam.num_before
            if beam.request_id and token == beam.newest:
                kept.add(beam.request_id)
            elif beam.request_id:
                twin.request_id = self._engine.fork(beam.request_id, last_token_id=token, outbox=self._box)
            else:
                twin.num_before = len(twin.tokens)
                again = [*self.prompt, *twin.tokens]
                twin.request_id = self._engine.add_request(
                    again, self._sampling(len(twin.tokens)), outbox=self._box
                )
            beams.append(twin)
        self._give_up([beam for beam in self.beams if beam.request_id not in kept])
        self.beams = beams

    def _give_up(self, beams: Sequence[_Beam]) -> None:
        for beam in beams:
            request_id, beam.request_id = beam.request_id, ""
            if request_id:
                with suppress(UnknownRequest):  # somebody else has aborted it
                    self._engine.abort(request_id)

    def close(self) -> None:
        """Leave nothing behind."""
        self._give_up(self.beams)


def beam_search(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    *,
    single: bool = False,
    decode: Callable[[Sequence[int]], str] | None = None,
) -> list[BeamSearchOutput]:
    """Search each prompt's likeliest continuations: `params.beam_width` sequences, best first.

    Others may use the engine at the same time. As many prompts are searched at once as have seats for all their beams.

    Args:
        engine: what runs the beams.
        prompts: what to continue.
        params: how.
        single: a prompt that cannot be used raises; otherwise its output has `error`.
        decode: makes text of token ids.

    Raises:
        RequestError: with `single`. ConfigError: not `BeamSearchParams`, or more beams than `max_num_seqs`.
    """
    if not isinstance(params, BeamSearchParams):
        raise ConfigError(f"params is a {type(params).__name__}; give BeamSearchParams(...).")
    seats, width = engine.config.max_num_seqs, params.beam_width
    if width > seats:
        raise ConfigError(f"beam_width={width} is above max_num_seqs={seats}; lower one or raise the other.")
    box: deque[RequestOutput] = deque()
    searches = [_Search(engine, params, box) for _ in prompts]
    waiting = deque(zip(searches, prompts, strict=True))
    active: list[_Search] = []
    others: list[RequestOutput] = []
    try:
        while waiting or active:
            while waiting and (len(active) + 1) * width <= seats:
                active.append(waiting[0][0])
                _begin(*waiting.popleft(), single)
            others += [output for output in engine.step() if output.finished] if active else []
            beams = {beam.request_id: (s, beam) for s in active for beam in s.beams if beam.request_id}
            while box:
                output = box.popleft()
                if output.request_id in beams:  # others have been given up
                    search, beam = beams[output.request_id]
                    search.take(beam, output)
            with DeferredInterrupt():  # no request is live that its search does not know
                for search in active:
                    search.advance()
            active = [search for search in active if search.beams]
    finally:
        with DeferredInterrupt():
            for search in active:
                search.close()
            engine.hand_back(others)
    if decode is not None:
        for sequence in (sequence for search in searches for sequence in search.finished):
            sequence.text = decode(sequence.tokens)
    return [BeamSearchOutput([] if search.error else search.finished, search.error) for search in searches]


def _begin(search: _Search, prompt: Prompt, single: bool) -> None:
    try:
        with DeferredInterrupt():
            search.begin(prompt)
    except RequestError as error:
        if single:
            raise
        search.error = str(error)
