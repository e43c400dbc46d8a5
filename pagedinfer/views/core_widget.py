"""The middle tier: the static pictures with ipywidgets' own buttons, where anywidget cannot be had."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets

from pagedinfer.trace.recording import Recording
from pagedinfer.views.bundle import alt_texts, static_bundle, text_of
from pagedinfer.views.film import film_of
from pagedinfer.views.picture import PANES, check_panes, lane_picture
from pagedinfer.views.static_view import picture_of

__all__ = ["CoreView"]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
NOBODY = "none"


class CoreView(ipywidgets.VBox):  # type: ignore[misc]
    """A view of buttons, a slider and one picture. Arguments and methods as `EngineView`; pictures come from here.

    Attributes:
        tier: "ipywidgets". why: a sentence that says why this is not the full view.
        cursor: the step shown. selected: {"request": id} or {}.
    """

    tier = "ipywidgets"
    _ipython_display_ = None  # ipywidgets 7 would bypass _repr_mimebundle_

    def __init__(
        self,
        recording: Recording,
        advance: Callable[[], bool] | None = None,
        panes: Sequence[str] = PANES,
        *,
        step: int = -1,
        request: str | None = None,
        title: str = "Inside the engine",
        why: str = "",
    ) -> None:
        self.recording, self.panes, self.why = recording, check_panes(panes), why
        self._advance, self._driving = advance, film_of(recording).driving
        film = film_of(recording)
        self._back, self._forward = _button("◀ back", "Step back"), _button("step ▶", "Step forward")
        self._play = ipywidgets.Play(min=0, max=10**6, interval=500, description="Play")
        self._slider = ipywidgets.IntSlider(
            value=film.clamp(step), min=film.first_step, max=max(film.last_step, film.first_step),
            description="Step", continuous_update=True, layout={"width": "100%"},
        )  # fmt: skip
        self._request = ipywidgets.Dropdown(options=[NOBODY], value=NOBODY, description="Request")
        self._picture, self._said = ipywidgets.HTML(), ipywidgets.HTML()
        # The request asked for is offered also before it comes.
        self._asked = film.selection(request, may_come=advance is not None).get("request", NOBODY)
        self._request.options, self._request.value = [NOBODY, self._asked], self._asked
        self._back.on_click(lambda _: self._go(self.cursor - 1))
        self._forward.on_click(lambda _: self._go(self.cursor + 1))
        self._play.observe(self._tick, "value")
        self._slider.observe(lambda _: self._draw(), "value")
        self._request.observe(lambda _: self._draw(), "value")
        self._lock = threading.RLock()
        buttons = ipywidgets.HBox([self._back, self._play, self._forward, self._request])
        super().__init__(
            [ipywidgets.HTML(f"<b>{_plain(title)}</b>"), buttons, self._slider, self._said, self._picture]
        )
        self._draw()

    @property
    def cursor(self) -> int:
        """The step shown."""
        return int(self._slider.value)

    @property
    def selected(self) -> dict[str, str]:
        """{"request": id} or {}."""
        return {} if self._request.value == NOBODY else {"request": self._request.value}

    def _tick(self, change: Any) -> None:
        if change["new"] > change["old"]:
            self._go(self.cursor + 1)

    def _go(self, step: int) -> None:
        """Show this step; past the end, run one if there is an engine."""
        with self._lock:
            film = film_of(self.recording)
            if step > film.last_step and self._advance is not None:
                self.step()
            else:
                self._slider.value = min(max(step, film.first_step), film.last_step)

    def step(self, steps: int = 1) -> bool:
        """Run up to `steps` engine steps and show the newest. Returns whether there may be more."""
        more = self._advance is not None
        with self._driving:
            for _ in range(steps):
                more = more and self._advance is not None and bool(self._advance())
        self.refresh()
        return more

    def play(self, steps: int | None = None) -> bool:
        """Run `steps` engine steps, or until the engine has nothing left to do."""
        more = True
        while more and (steps is None or steps > 0):
            more, steps = self.step(), None if steps is None else steps - 1
        return more

    async def run_async(self, steps: int | None = None) -> bool:
        """`play` for `await`, in a worker thread."""
        more = True
        while more and (steps is None or steps > 0):
            more, steps = await asyncio.to_thread(self.step), None if steps is None else steps - 1
        return more

    def refresh(self) -> None:
        """Show the recording's newest step."""
        with self._lock:
            last = film_of(self.recording).last_step
            self._slider.max = max(last, self._slider.max)
            if self._slider.value == last:
                self._draw()
            self._slider.value = last

    def close(self) -> None:
        """Take the view off the page and let go of the engine."""
        self._advance = None
        super().close()

    def _draw(self) -> None:
        with self._lock:
            film = film_of(self.recording)
            names = list(dict.fromkeys([NOBODY, *(lane.rid for lane in film.lanes), self._asked]))
            if list(self._request.options) != names:
                chosen = self._request.value
                self._request.options = names
                self._request.value = chosen if chosen in names else NOBODY
            lane = film.find(self.selected.get("request"))
            self._picture.value = lane_picture(self.recording, self.cursor, lane, self.panes)
            note = f"<br><small>{_plain(self.why)}</small>" if self.why else ""
            self._said.value = _plain(str(film.lines[self.cursor - film.first_step]["say"])) + note

    def to_svg(self) -> str:
        """The picture as an SVG file."""
        return picture_of(self)

    def __repr__(self) -> str:
        text = text_of(self.recording, self.cursor, self.panes, "EngineView")
        return f"{text}\n  core widgets: {self.why}" if self.why else text

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None, **kwargs: object
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        bundle = static_bundle(
            self.recording, self.cursor, self.selected.get("request"), self.panes, "EngineView"
        )
        return {WIDGET_VIEW: view} | bundle | {"text/plain": repr(self)}, alt_texts(bundle)


def _button(name: str, tip: str) -> Any:
    return ipywidgets.Button(description=name, tooltip=tip, layout={"width": "auto"})


def _plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
