"""The views where no widget can be had: the same pictures, standing still."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagedinfer.trace.recording import Recording
from pagedinfer.views.bundle import alt_texts, static_bundle, text_of
from pagedinfer.views.film import film_of
from pagedinfer.views.picture import PANES, check_panes

__all__ = ["StaticView"]


class StaticView:
    """A view without a widget. Same arguments and methods as `EngineView`; each look draws the cursor's step anew.

    Attributes:
        cursor: the step shown. selected: {"request": id}, {"block": number} or {}.
        tier: "static". why: a sentence that says why this is not a widget, shown with the text.
    """

    tier = "static"

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
        self.panes = check_panes(panes)
        self.recording, self.title, self.why = recording, title, why
        self.cursor = film_of(recording).clamp(step)
        self.selected = film_of(recording).selection(request, may_come=advance is not None)
        self._advance = advance

    def step(self, steps: int = 1) -> bool:
        """Run up to `steps` engine steps and show the newest. Returns whether there may be more."""
        more = self._advance is not None
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
        """`play`, for notebooks that also run with a widget."""
        return self.play(steps)

    def refresh(self) -> None:
        """Show the recording's newest step."""
        self.cursor = film_of(self.recording).last_step

    def close(self) -> None:
        """Let go of the engine."""
        self._advance = None

    def to_svg(self) -> str:
        """The picture as an SVG file."""
        return picture_of(self)

    def __repr__(self) -> str:
        text = text_of(self.recording, self.cursor, self.panes, "EngineView")
        return f"{text}\n  static: {self.why}" if self.why else text

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None, **kwargs: object
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = static_bundle(
            self.recording, self.cursor, self.selected.get("request"), self.panes, "EngineView"
        )
        return bundle | {"text/plain": repr(self)}, alt_texts(bundle)


def picture_of(view: Any) -> str:
    """The SVG of any view's cursor and selection."""
    return str(
        static_bundle(view.recording, view.cursor, view.selected.get("request"), view.panes, "")[
            "image/svg+xml"
        ]
    )
