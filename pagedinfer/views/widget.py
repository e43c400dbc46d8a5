"""The live view: one anywidget that holds the panes, one cursor and one selection.

The browser has the whole film and scrubs without asking. Stepping past its end asks the kernel (`ask`), which runs
the engine and sends the lines that are new (`tail`) with the outcome (`answer`) in one message: one message per
frame, none queued, whatever the engine's speed. Callbacks come on the main thread or on a subshell's, hence
the locks: `_driving` for one advance at a time, `_posting` for one message at a time, the film's own for reading it.
An engine runs under `_driving` alone, so that a subscriber (which holds the engine's lock) can read this view.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import anywidget
import traitlets

from pagedinfer.errors import ConfigError
from pagedinfer.trace.recording import Recording
from pagedinfer.views.assets import esm, style
from pagedinfer.views.bundle import static_bundle, text_of
from pagedinfer.views.film import film_of
from pagedinfer.views.picture import PANES, check_panes, picture_svg

__all__ = ["EngineView"]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class EngineView(anywidget.AnyWidget):  # type: ignore[misc]
    """Linked panes over a recording; with `advance`, over an engine that runs while you look.

    Left and Right step, Shift for ten, Home and End, Space plays; click a block or a request to see its relatives
    in all panes. Stepping right at the end of a live recording steps the engine.

    Args:
        recording: what to show; it may grow.
        advance: runs one engine step and returns whether there may be more. One call at a time, on the thread that
            asks: a widget callback's, the caller's of `step` or `play`, or a worker's in `run_async`.
        panes: some of "blocks", "timeline", "memory".
        step: the step to open at; -1 is the last.
        request: a request to select.
        title: the view's name for screen readers.
        frames_per_second: the most frames that `play` and `run_async` send.

    Attributes:
        cursor: the step shown. selected: {"request": id}, {"block": number} or {}.
        error: the message of the last `advance` that failed, "" when none did.
    """

    _ipython_display_ = None  # ipywidgets 7 would bypass _repr_mimebundle_
    _esm = esm()
    _css = style()
    film = traitlets.Bytes(b"").tag(sync=True)
    tail = traitlets.Bytes(b"").tag(sync=True)
    title = traitlets.Unicode("").tag(sync=True)
    panes = traitlets.List(traitlets.Unicode()).tag(sync=True)
    live = traitlets.Bool(False).tag(sync=True)
    driving = traitlets.Bool(False).tag(sync=True)
    cursor = traitlets.Int(0).tag(sync=True, echo_update=False)
    selected = traitlets.Dict().tag(sync=True, echo_update=False)
    ask = traitlets.Dict().tag(sync=True, echo_update=False)
    answer = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        recording: Recording,
        advance: Callable[[], bool] | None = None,
        panes: Sequence[str] = PANES,
        *,
        step: int = -1,
        request: str | None = None,
        title: str = "Inside the engine",
        frames_per_second: float = 10.0,
    ) -> None:
        if not (isinstance(frames_per_second, int | float) and 0 < frames_per_second <= 1000):
            raise ConfigError(
                f"frames_per_second={frames_per_second!r}: it must be a number above 0, up to 1000."
            )
        self.recording = recording
        self.error = ""
        film = film_of(recording)
        self._driving, self._posting = film.driving, threading.RLock()
        self._advance = advance
        self._sent = film.last_step
        self._pause_asked = False
        self._frame_seconds = 1 / frames_per_second
        super().__init__(
            film=film.encode(), title=title, panes=list(check_panes(panes)), live=advance is not None,
            cursor=film.clamp(step), selected={"request": request} if request else {},
        )  # fmt: skip
        self.observe(self._on_ask, "ask")

    # -- driving ------------------------------------------------------------------------------------------------

    def step(self, steps: int = 1) -> bool:
        """Run up to `steps` engine steps and show the newest. Returns whether there may be more."""
        with self._driving:
            try:
                return self._run(steps)
            finally:
                self._post(self._sent)

    def play(self, steps: int | None = None) -> bool:
        """Run `steps` engine steps, or until nothing is left to do, and show them as they come.

        A plain cell keeps the kernel busy: the Pause button acts only between cells. Use the Play button, or
        `await view.run_async()`, for a run that can be paused.
        """
        more, shown = True, 0.0
        try:
            while more and (steps is None or steps > 0):
                more = self._run_locked()
                steps = None if steps is None else steps - 1
                if time.monotonic() - shown >= self._frame_seconds:
                    self._show()
                    shown = time.monotonic()
        finally:
            self._show()
        return more

    async def run_async(self, steps: int | None = None) -> bool:
        """`play` for `await`: each step runs in a worker thread, so the notebook stays responsive and Pause works."""
        more, shown = True, 0.0
        self._pause_asked, self.driving = False, True
        try:
            while more and not self._pause_asked and (steps is None or steps > 0):
                more = await asyncio.to_thread(self._run_locked)
                steps = None if steps is None else steps - 1
                if time.monotonic() - shown >= self._frame_seconds:
                    self._show()
                    shown = time.monotonic()
        finally:
            self.driving = False
            self._show()
        return more

    def pause(self) -> None:
        """Stop `run_async` after the step it is in."""
        self._pause_asked = True

    def refresh(self) -> None:
        """Show what the recording has got by other hands (`engine.step()` in a cell)."""
        self._show()

    def close(self) -> None:
        """Take the view off the page and let go of the engine."""
        self._advance = None
        super().close()

    def _run_locked(self) -> bool:
        with self._driving:
            return self._run(1)

    def _run(self, steps: int) -> bool:
        more = self._advance is not None
        for _ in range(steps):
            if not more or self._advance is None:
                break
            try:
                more = bool(self._advance())
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                raise
            self.error = ""
        return more

    # -- the front end ------------------------------------------------------------------------------------------

    def _show(self) -> None:
        self._post(self._sent)

    def _post(self, have: int, answer: dict[str, Any] | None = None) -> None:
        """One message: the lines after step `have` (that one again, it may have changed), cursor and outcome."""
        film = film_of(self.recording)
        with self._posting, self.hold_sync():
            following = self.cursor >= min(have, self._sent)
            with film.lock:  # both of the same moment
                tail, last = film.encode(have), film.last_step
            self.tail, self._sent = tail, last
            if following:
                self.cursor = last
            self.answer = answer or {"error": self.error}

    def _on_ask(self, change: Any) -> None:
        ask = change["new"]
        if ask.get("pause"):
            self._pause_asked = True
        with self._driving:
            more = self._advance is not None
            try:
                with suppress(Exception):  # `_run` has put its message into `error`, which the view shows
                    more = self._run(int(ask.get("steps", 0)))
            finally:
                self._post(int(ask.get("have", -1)), {"id": ask.get("id"), "more": more, "error": self.error})

    # -- static -------------------------------------------------------------------------------------------------

    def to_svg(self) -> str:
        """What the view shows, as an SVG file."""
        return picture_svg(self.recording, self.cursor, self.selected.get("request"), self.panes)

    def __repr__(self) -> str:
        return text_of(self.recording, self.cursor, self.panes, "EngineView")

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None, **kwargs: object
    ) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        request = self.selected.get("request")
        return {WIDGET_VIEW: view} | static_bundle(
            self.recording, self.cursor, request, self.panes, "EngineView"
        )
