"""What an engine view of any tier shows without a front end, and the files that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pagedinfer.trace.recording import Recording
from pagedinfer.views.bundle import static_bundle, text_of
from pagedinfer.views.export import export_html
from pagedinfer.views.film import film_of
from pagedinfer.views.picture import lane_picture
from pagedinfer.views.raster import png_of
from pagedinfer.views.stepped import SteppedView

__all__ = ["Shown"]


class Shown:
    """The picture of an engine view's step and selection."""

    recording: Recording
    panes: Sequence[str]
    title: str
    cursor: int
    selected: dict[str, Any]

    def svg(self, step: int | None = None) -> str:
        """The picture of a step (default: the cursor's) as an SVG file."""
        film = film_of(self.recording)
        lane = film.find(self.selected.get("request"))
        return lane_picture(self.recording, self._step(step), lane, self.panes)

    def png(self, step: int | None = None) -> bytes:
        """The picture of a step as a PNG file in the light theme; its text is drawn in letters of pixels."""
        return png_of(self.svg(step))

    def text(self, step: int | None = None) -> str:
        """The view in words and numbers: equal for equal runs."""
        return text_of(self.recording, self._step(step), self.panes, "EngineView")

    def html(self, path: str | PathLike[str], *, more: Sequence[SteppedView] = ()) -> Path:
        """Write the view with its slider as one page that needs no network, and return its path.

        Args:
            path: the file to write.
            more: further views below it, linked with it.
        """
        request = film_of(self.recording).find(self.selected.get("request"))
        rid = None if request < 0 else self.selected["request"]
        return export_html(
            self.recording, path, title=self.title, step=self.cursor, request=rid, panes=self.panes, more=more
        )

    def _step(self, step: int | None) -> int:
        return self.cursor if step is None else film_of(self.recording).clamp(step)

    def _static(self) -> dict[str, Any]:
        """The MIME bundle of the picture."""
        request = self.selected.get("request")
        return static_bundle(self.recording, self.cursor, request, self.panes, "EngineView")
