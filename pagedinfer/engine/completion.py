"""Prompts in, outputs out: a generator around `Engine.step` that leaves nothing behind, however it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import suppress

from pagedinfer.config import SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.intake import Prompt
from pagedinfer.engine.interrupt import DeferredInterrupt
from pagedinfer.engine.output import CompletionOutput, RequestOutput
from pagedinfer.errors import RequestError, UnknownRequest

__all__ = ["complete", "refused"]


def complete(
    engine: Engine,
    prompts: Sequence[Prompt | RequestError],
    params: Sequence[SamplingParams | None],
    *,
    single: bool = False,
) -> Generator[tuple[int, RequestOutput], None, None]:
    """Submit prompts and step until all have ended, yielding each output with its prompt's place.

    Outputs of other requests that end meanwhile go back to the engine, for whoever steps next. Left early (an error,
    Ctrl-C, a closed generator), the requests that still live are aborted.

    Args:
        engine: others may use it at the same time, step it, and abort requests.
        prompts: what to complete; an error stands for a prompt that was refused before.
        params: one for each prompt.
        single: a prompt that cannot be used raises; otherwise it costs only itself: its output has
            `finish_reason="error"` and `error`.

    Raises:
        RequestError: with `single`. ConfigError: parameters do not suit the model; none of the prompts is run.
    """
    places: dict[str, int] = {}
    outbox: deque[RequestOutput] = deque()
    bad: list[tuple[int, RequestOutput]] = []
    others: list[RequestOutput] = []
    try:
        with DeferredInterrupt():  # no request is live that `places` does not know
            for place, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
                try:
                    if isinstance(prompt, RequestError):
                        raise prompt
                    places[engine.add_request(prompt, wanted, outbox=outbox)] = place
                except RequestError as error:
                    if single:
                        raise
                    bad.append((place, refused(prompt, place, str(error))))
        yield from bad
        while places:
            others += [output for output in engine.step() if output.finished]
            while outbox:
                output = outbox.popleft()
                place = places[output.request_id]
                if output.finished:
                    del places[output.request_id]
                yield place, output
    finally:
        with DeferredInterrupt():
            for request_id in places:
                with suppress(UnknownRequest):  # it ended in the step that was interrupted
                    engine.abort(request_id)
            engine.hand_back(others)


def refused(prompt: object, place: int, error: str) -> RequestOutput:
    """The output of a prompt that could not be submitted."""
    completion = CompletionOutput(0, "", [], finish_reason="error")
    text = prompt if isinstance(prompt, str) else None
    return RequestOutput(f"prompt {place}", text, [], [completion], finished=True, error=error, detail=error)
