"""The views where no widget can be had: the same pictures, standing still."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedinfer.trace.recording import Recording
from pagedinfer.views.bundle import alt_texts
from pagedinfer.views.driver import Driven
from pagedinfer.views.film import film_of
from pagedinfer.views.link import chosen
from pagedinfer.views.picture import PANES, check_panes
from pagedinfer.views.shown import Shown

__all__ = ["StaticView"]


class StaticView(Driven, Shown):
    """A view without a widget. Same arguments and methods as `EngineView`; each look draws the cursor's step anew.

    Attributes:
        cursor: the step shown. selected: {"request": id}, {"block": number} or {}.
        tier: "static". why: a sentence that says why this is not a widget, shown with the text.
    """

    tier = called = "static"

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
        self.panes = check_panes(panes)
        self.recording, self.title, self.why = recording, title, why
        self._cursor = film_of(recording).opening(step, advance is not None)
        self._selected = film_of(recording).selection(request, may_come=advance is not None)
        self._advance = advance

    # -- time and selection -------------------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """The step shown."""
        return self._cursor

    @cursor.setter
    def cursor(self, step: int) -> None:
        self.moved(film_of(self.recording).clamp(step))

    @property
    def selected(self) -> dict[str, Any]:
        """{"request": id}, {"block": number} or {}."""
        return self._selected

    @selected.setter
    def selected(self, selected: Mapping[str, Any]) -> None:
        self.moved(selected=selected)

    def moved(self, step: int | None = None, selected: Mapping[str, Any] | None = None) -> None:
        """Go to this step, or the nearest there is, and select; None is as before."""
        film = film_of(self.recording)
        if step is not None:
            self._cursor = min(max(step, film.first_step), film.last_step)
        if selected is not None:
            self._selected = chosen(selected)

    # -- driving ------------------------------------------------------------------------------------------------

    def go_on(self, steps: int) -> bool:
        """`step`, without keeping the picture."""
        more = self._advance is not None
        try:
            with film_of(self.recording).driving:
                for _ in range(steps):
                    more = more and self._advance is not None and bool(self._advance())
        finally:
            self.refresh()
        return more

    def refresh(self) -> None:
        """Show the recording's newest step."""
        self._cursor = film_of(self.recording).last_step

    def close(self) -> None:
        """Let go of the engine."""
        self._advance = None

    # -- static -------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{self.text()}\n  {self.called}: {self.why}" if self.why else self.text()

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None, **kwargs: object
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = self._static()
        return bundle, alt_texts(bundle)

    def _static(self) -> dict[str, Any]:
        return super()._static() | {"text/plain": repr(self)}
