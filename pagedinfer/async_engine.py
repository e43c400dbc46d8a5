"""The engine for `async` code: many streams over one engine, and an event loop that a forward pass never blocks.

One worker thread owns the engine while streams live. Submissions and aborts queue up for it and take effect between
two steps; outputs come back through `call_soon_threadsafe`, so it works with any number of loops: a script's, a
notebook's, a server's.

Backpressure without a queue: an output holds everything so far, so a slow reader is given the newest one and skips
those between. Memory stays bounded, nothing is lost, and no reader slows another.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from pagedinfer.config import SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.intake import Prompt
from pagedinfer.engine.output import RequestOutput

__all__ = ["AsyncEngine"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Stream:
    """A reader's mailbox: the newest output that it has not seen, or the error that ended its request."""

    loop: asyncio.AbstractEventLoop
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    newest: RequestOutput | None = None
    error: BaseException | None = None

    def put(self, output: RequestOutput | None, error: BaseException | None = None) -> None:
        """Called in the reader's loop."""
        self.newest = output or self.newest
        self.error = error
        self.ready.set()

    def send(self, output: RequestOutput | None, error: BaseException | None = None) -> None:
        """Called in the worker. A reader whose loop has ended reads no more."""
        with suppress(RuntimeError):  # the loop is closed, perhaps just now
            self.loop.call_soon_threadsafe(self.put, output, error)


class AsyncEngine:
    """Streams over an engine. Other code may submit to the engine, and step it, at the same time.

    Attributes:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._outbox: deque[RequestOutput] = deque()
        self._guard = threading.Lock()
        self._worker: threading.Thread | None = None

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come, each holding everything so far; the last one is `finished`.

        Leaving the loop over it, or cancelling the task, aborts the request.

        Raises:
            RequestError, ConfigError: as `Engine.add_request`.
        """
        stream = _Stream(asyncio.get_running_loop())
        submitted = self._call(lambda: self._submit(prompt, params, stream))
        try:
            request_id = await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(self._abort_when_submitted)
            raise
        finished = False
        try:
            while not finished:
                await stream.ready.wait()
                stream.ready.clear()
                if stream.error is not None:
                    raise stream.error
                output = stream.newest
                assert output is not None
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._call(lambda: self._abort(request_id))

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """The finished output of one prompt.

        Raises:
            RequestError, ConfigError: as `Engine.add_request`.
        """
        last: RequestOutput | None = None
        async for output in self.stream(prompt, params):
            last = output
        assert last is not None
        return last

    # -- in the worker ------------------------------------------------------------------------------------------

    def _submit(self, prompt: Prompt, params: SamplingParams | None, stream: _Stream) -> str:
        request_id = self.engine.add_request(prompt, params, outbox=self._outbox)
        self._streams[request_id] = stream
        return request_id

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None and self.engine.is_live(request_id):
            self.engine.abort(request_id)

    def _abort_when_submitted(self, submitted: Future[str]) -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            request_id = submitted.result()
            self._call(lambda: self._abort(request_id))

    def _work(self) -> None:
        """Run jobs and steps until nobody streams any more."""
        while True:
            while not self._jobs.empty():
                self._jobs.get()()
            if self._streams:
                self._step()
                continue
            with self._guard:
                if self._jobs.empty():  # nothing can be added while we hold the guard
                    self._worker = None
                    return

    def _step(self) -> None:
        try:
            others = self.engine.step()
        except BaseException as error:  # whatever it is, the readers must hear of it
            streams, self._streams = self._streams, {}
            for stream in streams.values():  # first of all: an abort may fail as well
                stream.send(None, error)
            for request_id in streams:
                with suppress(
                    Exception
                ):  # an engine that cannot even abort; the readers know the first error
                    if self.engine.is_live(request_id):
                        self.engine.abort(request_id)
            return
        self.engine.hand_back([output for output in others if output.finished])
        while self._outbox:
            output = self._outbox.popleft()
            if reader := self._streams.get(output.request_id):
                reader.send(output)
                if output.finished:
                    del self._streams[output.request_id]

    def _call(self, job: Callable[[], T]) -> Future[T]:
        """Let the worker do a job between two steps; starts it when it sleeps."""
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(job())
            except BaseException as error:
                done.set_exception(error)

        with self._guard:
            self._jobs.put(run)
            if self._worker is None or not self._worker.is_alive():
                self._worker = threading.Thread(target=self._work, name="pagedinfer-steps", daemon=True)
                self._worker.start()
        return done
