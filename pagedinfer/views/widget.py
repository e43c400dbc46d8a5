"""The live view: one anywidget that holds the panes, one cursor and one selection.

The browser has the whole film and scrubs without asking. Stepping past its end asks the kernel (`ask`), which runs
the engine and sends the lines that are new (`tail`) with the outcome (`answer`) in one message: one message per
frame, none queued, whatever the engine's speed. Callbacks come on the main thread or on a subshell's, hence
the locks: `_driving` for one advance at a time, `POSTING` for one message at a time, the film's own for reading it.
An engine runs under `_driving` alone, so that a subscriber (which holds the engine's lock) can read this view; and no
message waits for `_driving`, so that who listens to this view's traits (and is called under `POSTING`) can step it.

Other views of the recording go where this one goes, see `views.link`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anywidget
import traitlets

from pagedinfer.errors import ConfigError, describe_error, readable
from pagedinfer.trace.recording import Recording
from pagedinfer.views.assets import esm, style
from pagedinfer.views.breaks import Breaks, Stop, Watching
from pagedinfer.views.driver import drive
from pagedinfer.views.film import film_of
from pagedinfer.views.link import FOLLOW, POSTING, chosen, link_of
from pagedinfer.views.output import publish
from pagedinfer.views.picture import PANES, check_panes
from pagedinfer.views.shown import Shown
from pagedinfer.views.told import MAX_STEPS, take_in, whole

__all__ = ["EngineView"]

PATIENCE = 1.0
"""Seconds after which a frame is sent although no browser has said that it drew the last one (there may be none)."""

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class EngineView(Shown, anywidget.AnyWidget):  # type: ignore[misc]
    """Linked panes over a recording; with `advance`, over an engine that runs while you look.

    Left and Right step, Shift for ten, Home and End, Space plays; click a block or a request to see its relatives
    in all panes. Stepping right at the end of a live recording steps the engine.

    Args:
        recording: what to show; it may grow.
        advance: runs one engine step and returns whether there may be more. One call at a time, on the thread that
            asks: a widget callback's, the caller's of `step` or `play`, or a worker's in `run_async`.
        panes: some of "blocks", "budget", "queues", "timeline", "memory", "chains", "details".
        step: the step to open at, -1 is the last; by default the newest, and of a run that is over the fullest.
        request: a request to select; with `advance` it may be one that is yet to come.
        title: the view's name for screen readers.
        frames_per_second: the most frames that `play` and `run_async` send.
        watch: who takes the conditions typed into the view's box (`Watching`; a session's breakpoints). Without one
            they are looked for in the recording, where that can find them (`find_all`).
        stops: a list that gets each stop of the run; `advance` returns False when it added one.

    Attributes:
        tier: "anywidget".
        cursor: the step shown. selected: {"request": id}, {"block": number} or {}.
        linked: whether other views of the recording share both; not where it was opened at a step of its own.
        error: the message of the last `advance` that failed, "" when none did.
    """

    tier = "anywidget"
    _display_id = ""
    _kept: object = None  # what the picture in the output shows
    _esm = esm()
    _css = style()
    film = traitlets.Bytes(b"").tag(sync=True)
    tail = traitlets.Bytes(b"").tag(sync=True)
    title = traitlets.Unicode("").tag(sync=True)
    links = traitlets.Unicode("").tag(sync=True)  # names of the links that it is a member of
    panes = traitlets.List(traitlets.Unicode()).tag(sync=True)
    live = traitlets.Bool(False).tag(sync=True)
    driving = traitlets.Bool(False).tag(sync=True)
    cursor = traitlets.Int(0).tag(sync=True, echo_update=False)
    selected = traitlets.Dict().tag(sync=True, echo_update=False)
    ask = traitlets.Dict().tag(sync=True, echo_update=False)
    answer = traitlets.Dict().tag(sync=True)
    watching = traitlets.Bool(False).tag(sync=True)
    breaks = traitlets.List().tag(sync=True)
    seen = traitlets.Int(-1).tag(sync=True, echo_update=False)  # the last step a browser has drawn in a run

    def __init__(
        self,
        recording: Recording,
        advance: Callable[[], bool] | None = None,
        panes: Sequence[str] = PANES,
        *,
        step: int | None = None,
        request: str | None = None,
        title: str = "Inside the engine",
        frames_per_second: float = 10.0,
        watch: Watching | None = None,
        stops: Sequence[Stop] = (),
    ) -> None:
        if not (isinstance(frames_per_second, int | float) and 0 < frames_per_second <= 1000):
            raise ConfigError(
                f"frames_per_second={frames_per_second!r}: it must be a number above 0, up to 1000."
            )
        self.recording = recording
        self.error = ""
        film = film_of(recording)
        self._driving, self._link, self.linked, self._quiet = (
            film.driving,
            link_of(recording),
            step is None,
            False,
        )
        self._advance = advance
        self._sent = film.last_step
        self._pause_asked = False
        self._frame_seconds = 1 / frames_per_second
        self._breaks = Breaks(watch, getattr(recording, "find_all", None), stops)
        self._stop: list[Any] | None = None
        super().__init__(
            film=film.encode(), title=title, links=self._link.name, panes=list(check_panes(panes)),
            live=advance is not None, cursor=film.opening(step, advance is not None),
            selected=film.selection(request, may_come=advance is not None),
            watching=self._breaks.is_possible, breaks=self._breaks.data(),
        )  # fmt: skip
        self.observe(lambda change: self.hear(change["new"]), "ask")
        self.observe(self._on_move, ["cursor", "selected"])
        self._link.join(self)
        self.on_msg(lambda _, content, __: take_in(self, content))

    @traitlets.validate("cursor")  # type: ignore[untyped-decorator]
    def _nearest(self, proposal: Any) -> int:
        """The step of this number, or the nearest there is; negative numbers are counted from the end."""
        film, step = film_of(self.recording), int(proposal["value"])
        return min(max(step + film.last_step + 1 if step < 0 else step, film.first_step), film.last_step)

    @traitlets.validate("selected")  # type: ignore[untyped-decorator]
    def _chosen(self, proposal: Any) -> dict[str, Any]:
        return chosen(proposal["value"])

    # -- driving ------------------------------------------------------------------------------------------------

    def step(self, steps: int = 1) -> bool:
        """Run up to `steps` engine steps and show the newest. Returns whether there may be more."""
        try:
            return self.go_on(steps)
        finally:
            self.keep_picture()

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
                    self._show(rest=False)
                    shown = time.monotonic()
        finally:
            self._show()
            self.keep_picture()
        return more

    async def run_async(self, steps: int | None = None) -> bool:
        """`play` for `await`: each step runs in a worker thread, so the notebook stays responsive and Pause works."""
        return await drive(self._run_locked, [self], steps)

    # What `drive` asks of a view.

    def begin(self) -> None:
        """A run begins."""
        self._pause_asked, self.driving, self.seen = False, True, -1
        self._shown_at, self._shown_step = -PATIENCE, -1

    def follow(self) -> bool:
        """Show the newest step if a frame is due: not too soon, and none while the browser still draws the last.

        Returns:
            Whether the run may go on: False once Pause was pressed.
        """
        waited = time.monotonic() - self._shown_at
        drawn = self.seen >= self._shown_step or waited >= PATIENCE
        if waited >= self._frame_seconds and drawn:
            self._show(rest=False)
            self._shown_at, self._shown_step = time.monotonic(), self._sent
        return not self._pause_asked

    def end(self) -> None:
        """The run has ended."""
        self.driving = False
        self._show()
        self.keep_picture()

    def go_on(self, steps: int) -> bool:
        """`step` for a view that is linked: the picture of a saved notebook comes later."""
        try:
            with self._driving:
                return self._run(steps)
        finally:
            self._show()

    def pause(self) -> None:
        """Stop `run_async` after the step it is in."""
        self._pause_asked = True

    def refresh(self) -> None:
        """Go to the newest step, whoever has run it (`session.run()` in a cell)."""
        self._show()
        self.cursor = self._sent
        self.keep_picture()

    def close(self) -> None:
        """Let go of the engine. On the page the last picture takes the view's place."""
        self._advance, self.live = None, False
        self._link.leave(self)
        self.keep_picture(live=False)
        self._display_id = ""
        super().close()

    def __del__(self) -> None:
        super().close()  # nothing is published from wherever the garbage is collected

    def _run_locked(self) -> bool:
        with self._driving:
            return self._run(1)

    def _run(self, steps: int) -> bool:
        more = self._advance is not None
        for _ in range(steps):
            if not more or self._advance is None:
                break
            known = self._breaks.count()
            try:
                more = bool(self._advance())
            except Exception as error:
                self.error = readable(describe_error(error))
                raise
            self.error = ""
            if stop := self._breaks.newest(known):
                self._stop = stop
                return False
        return more

    # -- the front end ------------------------------------------------------------------------------------------

    def _show(self, rest: bool = True) -> None:
        self._post(self._sent, rest=rest)

    # What a link asks of a view.

    def go_along(self, step: int | None, selected: Mapping[str, Any] | None) -> None:
        """Another view shows this step or has this selection now."""
        with self.hold_sync():
            if step is not None:
                film = film_of(self.recording)
                if film.last_step > self._sent:
                    self._post(self._sent, follow=False)
                self.cursor = min(max(step, film.first_step), film.last_step)
            if selected is not None:
                self.selected = dict(selected)

    def grow(self, step: int | None) -> None:
        """Take in what other hands have added, see `link.Member`; a run of this view's shows itself."""
        if self.driving:
            return
        with self.hold_sync():
            self._post(self._sent, follow=step == FOLLOW)
            if step is not None and step != FOLLOW:
                self.cursor = min(max(step, film_of(self.recording).first_step), self._sent)

    def _on_move(self, change: Any) -> None:
        if not self._quiet:
            name = "step" if change["name"] == "cursor" else "selected"
            self._link.tell(self, **{name: change["new"]})

    def _post(
        self, have: int, answer: dict[str, Any] | None = None, rest: bool = True, follow: bool = True
    ) -> None:
        """One message: the lines after step `have` (that one again, it may have changed), cursor and outcome."""
        film = film_of(self.recording)
        with POSTING, self.hold_sync():
            following = follow and self.cursor >= min(have, self._sent)
            with film.lock:  # both of the same moment
                tail, last = film.encode(have), film.last_step
            self.tail, self._sent = tail, last
            if following:
                self._quiet = True  # other views follow by themselves
                try:
                    self.cursor = last
                finally:
                    self._quiet = False
            stop, self._stop = self._stop, None
            self.breaks = self._breaks.data()
            self.answer = (answer or {"error": self.error}) | ({"stop": stop} if stop else {})
        self._link.grew(self, last if following else None, rest)

    def hear(self, ask: Mapping[str, Any]) -> None:
        """Run steps, pause, take in a condition or keep the picture, as a page asks."""
        if ask.get("pause"):
            self._pause_asked = True
        told = self._hear(ask)
        more = self._advance is not None
        try:
            with self._driving, suppress(Exception):  # `_run` has put its message into `error`: it is shown
                more = self._run(whole(ask.get("steps"), 0, MAX_STEPS, 0))
        finally:
            answer = {"id": ask.get("id"), "more": more, "error": self.error}
            self._post(whole(ask.get("have"), -1, self._sent, -1), answer | told)
        if ask.get("keep"):
            self.keep_picture()

    def _hear(self, ask: Mapping[str, Any]) -> dict[str, Any]:
        """Take in what was done with the box of conditions; what to say of it."""
        if "watch" in ask:
            ok, message = self._breaks.add(str(ask["watch"]))
            return {"watch": {"text": ask["watch"], "ok": ok, "message": message}}
        if "unwatch" in ask:
            ok, message = self._breaks.remove(str(ask["unwatch"]))
            return {"watch": {"text": "", "ok": ok, "message": message}}
        return {}

    # -- static -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None, **kwargs: object
    ) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {WIDGET_VIEW: view} | self._static()

    def _ipython_display_(self, **kwargs: object) -> None:
        """Put the view on the page in an output of its own, which `keep_picture` can change later.

        The same for ipywidgets 7, whose own method would leave the picture out, and 8.
        """
        self._display_id = self._display_id or f"pagedinfer-{self.model_id}"
        publish(self._repr_mimebundle_(), self._display_id)
        self._kept = self._state()

    def keep_picture(self, live: bool = True) -> None:
        """Put the picture of now into the output that the view was shown in: what a saved notebook will show.

        Runs do it when they pause or end. With `live=False` only the picture stays.
        """
        is_news = not live or (not self.driving and self._state() != self._kept)  # a run's comes at its end
        if self._display_id and is_news:
            publish(self._repr_mimebundle_() if live else self._static(), self._display_id, update=True)
            self._kept = self._state()
        if live:
            self._link.keep(self)

    def _state(self) -> object:
        """What the picture depends on."""
        return self.cursor, self.selected, film_of(self.recording).version
