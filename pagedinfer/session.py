"""A session: an engine, its recording, and a view, wired together for a notebook.

session = pagedinfer.Session(llm)
session.submit("Once upon a time", max_tokens=32)
session.view()            # step, play and scrub in the browser
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from pagedinfer.config import SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.intake import Prompt
from pagedinfer.engine.output import RequestOutput
from pagedinfer.errors import ConfigError
from pagedinfer.trace.recorder import Recorder
from pagedinfer.trace.recording import Recording

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
        raise ConfigError(
            f"A session watches an Engine or an LLM, not a {type(engine).__name__}; make one first."
        )
    return found


class Session:
    """Records an engine from now on and steps it for a view.

    Attributes:
        engine: the engine.
        recording: everything since the session began.
        outputs: the newest output of every request seen, by request id.
    """

    def __init__(self, engine: Engine | _HasEngine) -> None:
        self.engine = engine_of(engine)
        self._recorder = Recorder(self.engine)
        self.recording: Recording = self._recorder.start()
        self.outputs: dict[str, RequestOutput] = {}
        self._views: weakref.WeakSet[Any] = weakref.WeakSet()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> str:
        """Queue a prompt; `options` are fields of `SamplingParams`. Returns the request id.

        Raises:
            ConfigError: both `params` and options were given, or an option does not exist.
        """
        if options:
            if params is not None:
                raise ConfigError(
                    f"Both params and {', '.join(options)} were given; put all into one of them."
                )
            try:
                params = SamplingParams(**options)
            except TypeError:
                known = ", ".join(name for name in SamplingParams.__dataclass_fields__)
                raise ConfigError(
                    f"Unknown option among {', '.join(options)}; SamplingParams has {known}."
                ) from None
        return self.engine.add_request(prompt, params)

    def step(self) -> list[RequestOutput]:
        """Run one step and keep its outputs."""
        outputs = self.engine.step()
        self.outputs.update((output.request_id, output) for output in outputs)
        return outputs

    def advance(self) -> bool:
        """Run one step if there is work. Returns whether there is more: what a live view calls."""
        if self.engine.has_unfinished():
            self.step()
        return self.engine.has_unfinished()

    def run(self, max_steps: int = 10_000) -> Recording:
        """Step until nothing is left, `max_steps` at most. Ctrl-C stops between steps. Returns the recording."""
        for _ in range(max_steps):
            if not self.advance():
                break
        return self.recording

    async def play(self, steps: int | None = None) -> bool:
        """`await session.play()` in a cell: run `steps` steps, or until nothing is left, while the views follow.

        Each step runs in a worker thread, so the notebook stays responsive, and Pause in any view works.

        Returns:
            Whether there may be more.
        """
        from pagedinfer.views.driver import drive

        views = [view for view in self._views if hasattr(view, "follow")]
        return await drive(self.advance, views, steps)

    @property
    def texts(self) -> dict[str, str]:
        """The text of every request so far, by request id."""
        return {rid: output.outputs[0].text for rid, output in self.outputs.items()}

    def view(self, **options: Any) -> Any:
        """The live view: block map, timeline and memory, linked. `options` go to `views.EngineView`."""
        from pagedinfer.views import EngineView

        view = EngineView(self.recording, advance=self.advance, **options)
        self._views.add(view)
        return view

    def close(self) -> None:
        """Stop recording and detach the views. The engine lives on. Harmless when called twice."""
        self._recorder.stop()
        for view in list(self._views):
            view.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Session({self.engine!r}, {self.recording!r})"
