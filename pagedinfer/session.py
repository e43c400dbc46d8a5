"""A session: an engine, its recording, and a view, wired together for a notebook.

session = pagedinfer.Session(llm)
session.submit("Once upon a time", max_tokens=32)
session.view()            # step, play and scrub in the browser
session.run(until="free blocks < 4")
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, overload

from pagedinfer.checks import check_int, check_names
from pagedinfer.config import SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.intake import Prompt
from pagedinfer.engine.options import RequestOptions
from pagedinfer.engine.output import RequestOutput
from pagedinfer.errors import ConfigError, kind_of
from pagedinfer.model_fork import Asked, fork_session, own_policy
from pagedinfer.sim.fork import Branch
from pagedinfer.sim.report import Report
from pagedinfer.sim.why import why
from pagedinfer.trace.breakpoints import Breakpoints
from pagedinfer.trace.recorder import Recorder
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.watch import Stop, Watch
from pagedinfer.views.link import link_of

if TYPE_CHECKING:
    from pagedinfer.runner.taps import Tap

__all__ = ["Session"]


class _HasEngine(Protocol):
    engine: Engine


def engine_of(engine: Engine | _HasEngine) -> Engine:
    """The engine itself, whether it or what holds it was given.

    Raises:
        ConfigError: it is neither.
    """
    found = engine if isinstance(engine, Engine) else getattr(engine, "engine", None)
    if not isinstance(found, Engine):
        raise ConfigError(f"A session watches an Engine or an LLM, not {kind_of(engine)}; make one first.")
    return found


class Session:
    """Records an engine from now on and steps it for a view.

    Attributes:
        engine: the engine.
        recording: everything since the session began.
        outputs: the newest output of every request seen, by request id.
        breakpoints: watches at which `run`, `advance` and so the view's Play stop: `breakpoints.add("r3 preempted")`.
        stops: every stop so far, with its step and cause.
    """

    def __init__(self, engine: Engine | _HasEngine) -> None:
        self.engine = engine_of(engine)
        self._recorder = Recorder(self.engine)
        self.recording: Recording = self._recorder.start()
        self.outputs: dict[str, RequestOutput] = {}
        self.breakpoints = Breakpoints(self.recording)
        self.stops: list[Stop] = []
        self._asked: dict[str, Asked] = {}
        self._advancing, self._closed = threading.RLock(), False
        self._views: weakref.WeakSet[Any] = weakref.WeakSet()
        self._link = link_of(self.recording)
        self._link.driven_by(self.advance)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> str:
        """Queue a prompt; `options` are fields of `SamplingParams` and `RequestOptions`. Returns the request id.

        Raises:
            ConfigError: both `params` and options for it were given. UnknownOption: there is no such option.
        """
        known = RequestOptions.__dataclass_fields__
        wishes = {name: options.pop(name) for name in known if name in options}
        if options:
            if params is not None:
                raise ConfigError(
                    f"Both params and {', '.join(options)} were given; put all into one of them."
                )
            check_names("A request", options, (*SamplingParams.__dataclass_fields__, *known))
            params = SamplingParams(**options)
        request_id = self.engine.add_request(prompt, params, **wishes)
        self._asked[request_id] = Asked.of(prompt, params, wishes)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step, whatever the breakpoints say, and keep its outputs."""
        try:
            return self._step()
        finally:
            self._link.grew()

    def _step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.outputs.update((output.request_id, output) for output in outputs)
        return outputs

    def advance(self) -> bool:
        """Run one step if there is work. Returns whether to go on: what a live view calls.

        False when nothing is left or a breakpoint was reached; the latter is then in `stops`, and the next call goes
        on from there. Calls from several threads (`play`, and a button of a view) come one after the other.

        Raises:
            WatchError: a predicate raised. The step was run and nothing is lost.
        """
        with self._advancing:
            self.breakpoints.skip()
            if self.engine.has_unfinished():
                self._step()
            more = self.engine.has_unfinished()
            reached = self.breakpoints.check(rest=not more)
            self.stops += reached
            return more and not reached

    @overload
    def run(self, max_steps: int = ..., *, until: None = ...) -> Recording: ...
    @overload
    def run(self, max_steps: int = ..., *, until: Watch | str | Callable[..., Any]) -> Stop | None: ...
    def run(
        self, max_steps: int = 10_000, *, until: Watch | str | Callable[..., Any] | None = None
    ) -> Recording | Stop | None:
        """Step until nothing is left, a breakpoint is reached, or `max_steps`. Ctrl-C stops between steps.

        `until` is a breakpoint for this call: a condition ("any preempted", "free blocks < 4", see `trace.watch`) or
        a predicate. What is true already does not stop the run; its becoming true again does.

        Returns:
            The recording; with `until` the stop, None when the run ended or `max_steps` came first.

        Raises:
            WatchError: `until` cannot be read, or a predicate raised. Every step run is in the recording.
            ConfigError: `max_steps` is no integer, or below 0.
        """
        check_int("max_steps", max_steps, 0)
        mine = None if until is None else self.breakpoints.add(until)
        known = len(self.stops)
        try:
            for _ in range(max_steps):
                if not self.advance():
                    break
        finally:
            if mine is not None:
                self.breakpoints.remove(mine)
            self._link.grew()  # views learn of the steps, and stay where they are
        if mine is None:
            return self.recording
        reached = self.stops[known:]
        return next((stop for stop in reached if stop.watch is mine), reached[0] if reached else None)

    def fork(self, step: int, *, model: bool | None = None, **changes: Any) -> Branch:
        """What would have happened from the end of `step` on with other settings. The engine goes on untouched.

        Changes are fields of `EngineConfig`; `policy` is a policy of your own, or its class. With `model` the requests
        run again in a fresh engine over the same model (`model_fork`); without it the branch is simulated with the
        lengths that each request has had here (`sim.fork`). The default is the model where it can, and where it cannot
        `Branch.way` says why.

        Raises:
            RecordingError, ConfigError: as those say.
        """
        return fork_session(self.engine, self.recording, self._asked, step, model=model, **changes)

    def why(self, request_id: str) -> Report:
        """Where a request's time went, whom it waited for, and what would have helped, see `sim.why`."""
        own = own_policy(self.engine, self.engine.config)
        return why(self.recording, request_id, recorded_policy=None if own is None else type(own))

    async def play(self, steps: int | None = None) -> bool:
        """`await session.play()` in a cell: run `steps` steps, or until nothing is left, while the views follow.

        Each step runs in a worker thread, so the notebook stays responsive, and Pause in any view works. It ends when
        the session is closed.

        Returns:
            Whether there may be more.
        """
        from pagedinfer.views.driver import drive

        views = [view for view in self._views if hasattr(view, "follow")]
        return await drive(lambda: not self._closed and self.advance(), [*views, self._link], steps)

    @property
    def texts(self) -> dict[str, str]:
        """The text of every request so far, by request id."""
        return {rid: output.outputs[0].text for rid, output in self.outputs.items()}

    def view(self, **options: Any) -> Any:
        """The live view, with a box for breakpoints. `options` go to `views.EngineView`."""
        from pagedinfer.views import EngineView

        seams: dict[str, Any] = {"watch": self.breakpoints, "stops": self.stops}
        view = EngineView(self.recording, advance=self.advance, **seams | options)
        self._views.add(view)
        return view

    def tap(self, **options: Any) -> Tap:
        """Watch attention and sampling from now on; `options` are those of `runner.taps.Tap`.

        Raises:
            ConfigError: the engine's runner has no tensors, or no such layer or head.
        """
        from pagedinfer.runner.taps import Tap

        tap = Tap(**options).attach(self.engine.runner)
        tap.recording = self.recording
        self._views.add(tap)
        return tap

    def close(self) -> None:
        """Stop recording and detach views and taps. The engine lives on. Harmless when called twice."""
        self._closed = True
        self._recorder.stop()
        for view in list(self._views):
            view.close()
        self._link.driven_by(None)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({self.engine!r}, {self.recording!r})"
