"""The middle tier of the engine view: the static pictures with ipywidgets' own buttons, where anywidget is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedinfer.trace.recording import Recording
from pagedinfer.views.bundle import alt_texts
from pagedinfer.views.core_frame import CoreFrame
from pagedinfer.views.film import film_of
from pagedinfer.views.link import FOLLOW, POSTING, link_of
from pagedinfer.views.output import publish
from pagedinfer.views.picture import PANES
from pagedinfer.views.static_view import StaticView

__all__ = ["CoreView"]


class CoreView(StaticView, CoreFrame):
    """A view of buttons, a slider and one picture. Arguments and methods as `EngineView`; pictures come from here.

    Attributes:
        tier: "ipywidgets". why: a sentence that says why this is not the full view.
        cursor: the step shown. selected: {"request": id}, {"block": number} or {}.
        linked: whether it goes where the other views of the recording go.
    """

    tier, called = "ipywidgets", "core widgets"
    _display_id = ""
    _kept: object = None  # what the picture in the output shows

    def __init__(
        self,
        recording: Recording,
        advance: Callable[[], bool] | None = None,
        panes: Sequence[str] = PANES,
        *,
        step: int | None = None,
        request: str | None = None,
        title: str = "Inside the engine",
        why: str = "",
    ) -> None:
        StaticView.__init__(self, recording, advance, panes, step=step, request=request, title=title, why=why)
        CoreFrame.__init__(self, title, why)
        self._link, self.linked = link_of(recording), step is None
        self._draw()
        self._link.join(self)

    # -- the user -----------------------------------------------------------------------------------------------

    def go(self, step: int) -> bool:
        """Show this step; past the end, run one if there is an engine."""
        if step > film_of(self.recording).last_step and self.live:
            return self.go_on(1)
        self.moved(step)
        return True

    def choose(self, selected: Mapping[str, Any]) -> None:
        """Select, here and in the linked views."""
        self.moved(selected=selected)

    def moved(self, step: int | None = None, selected: Mapping[str, Any] | None = None) -> None:
        """Go to a step or select, here and in the views that are linked; None is as before."""
        with POSTING:
            self.go_along(step, selected)
            self._link.tell(self, step, selected)

    # -- as a member of the recording's link, see `views.link` ----------------------------------------------------

    @property
    def live(self) -> bool:
        """Whether there is an engine to step."""
        return self._advance is not None

    def go_along(self, step: int | None, selected: Mapping[str, Any] | None) -> None:
        """Show this step, or the nearest there is, and this selection."""
        with POSTING:
            super().moved(step, selected)
            self._draw()

    def grow(self, step: int | None) -> None:
        """Take in what the recording has got by other hands, see `link.Member`."""
        if step == FOLLOW:
            step = film_of(self.recording).last_step if self._cursor == self._last else None
        self.go_along(step, None)

    def refresh(self) -> None:
        """Show the recording's newest step."""
        newest = film_of(self.recording).last_step
        self.go_along(newest, None)
        self._link.grew(self, newest)

    def keep_picture(self, live: bool = True) -> None:
        """Put the picture of now into the output that the view was shown in: what a saved notebook will show."""
        if self._display_id and (not live or self._state() != self._kept):
            publish(self._bundle() if live else self._static(), self._display_id, update=True)
            self._kept = self._state()
        if live:
            self._link.keep(self)

    def close(self) -> None:
        """Let go of the engine. On the page the last picture takes the view's place."""
        StaticView.close(self)
        self._link.leave(self)
        self.keep_picture(live=False)
        self._display_id = ""
        CoreFrame.close(self)

    # -- drawing ------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        film = film_of(self.recording)
        with film.lock:  # all of the same moment
            self._last = film.last_step
            rids = dict.fromkeys(lane.rid for lane in film.lanes)
            words = str(film.lines[self.cursor - film.first_step]["say"])
            picture = self.svg()
        self.draw(
            self.cursor, (film.first_step, self._last), self.live, [{"request": rid} for rid in rids],
            self.selected, words, picture,
        )  # fmt: skip

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None, **kwargs: object
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = self._bundle()
        return bundle, alt_texts(bundle)

    def _bundle(self) -> dict[str, Any]:
        return self.view_reference() | self._static()

    def _ipython_display_(self, **kwargs: object) -> None:
        """Put the view on the page in an output of its own, which `keep_picture` can change later."""
        self._display_id = self._display_id or f"pagedinfer-{self.model_id}"
        publish(self._bundle(), self._display_id)
        self._kept = self._state()

    def _state(self) -> object:
        """What the picture depends on."""
        return self.cursor, self.selected, film_of(self.recording).version
