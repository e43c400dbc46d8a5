"""Views with a cursor, drawn once: the same SVG parts as a still picture, a PNG, a widget and an offline page.

A view gives its drawing of a step as layers of small SVG parts (`Sheet`). `encode` writes the drawings of many steps
with each part once, so that a browser scrubs without Python and shows the very drawing that the tests read.
"""

from __future__ import annotations

import base64
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import import_module
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from pagedinfer.errors import RecordingError, readable
from pagedinfer.trace.recording import Recording
from pagedinfer.views.film import film_of
from pagedinfer.views.link import FOLLOW, POSTING, Link, chosen, link_of
from pagedinfer.views.page import write_page
from pagedinfer.views.raster import png_of
from pagedinfer.views.sheet import NARROW, WIDE, Sheet, check_width, encode_sheets
from pagedinfer.views.svg import document

__all__ = ["MAX_FRAMES", "NARROW", "WIDE", "Front", "Sheet", "Source", "SteppedView"]

MAX_FRAMES = 400
"""Most steps that a page or a widget holds; longer runs are shown at evenly spaced steps, and say so."""


FRONTS = (("pagedinfer.views.sheet_widget", "widget_of"), ("pagedinfer.views.core_sheet", "core_of"))
"""What can show a view in a notebook, the best first: anywidget, core ipywidgets."""


class Source(Protocol):
    """What a view reads: a recording, or what a tap has kept. It may grow."""

    @property
    def last_step(self) -> int:
        """Number of the last step in it."""

    def __len__(self) -> int:
        """How much is in it."""


class Front(Protocol):
    """What shows a view in a notebook; it calls `SteppedView.moved` when its user does something."""

    tier: str

    def view_reference(self) -> dict[str, Any]:
        """The part of a MIME bundle that shows it."""

    def show(self, view: SteppedView) -> None:
        """Draw the view's cursor, selection and newest steps."""

    def close(self) -> None:
        """Take it off the page."""


class SteppedView(ABC):
    """A view of one or more recordings with a cursor.

    In a notebook it is a widget where the extra "view" is installed (Left and Right step, Shift for ten, Home and
    End, Space plays, a click selects), one of core ipywidgets without anywidget, and a picture elsewhere. What it shows
    may grow. Go to a step or select something in one view of a recording, and the others go along, but for those that
    are not `linked`.

    Attributes:
        title: the view's name, for headings and screen readers.
        sources: what it reads.
        first_step, last_step: the steps it can show.
        version: how often what it reads had grown when it last looked.
        linked: whether it shares step and selection with the other views; not where it was opened at a step of its own.
        tier: how it is shown: "anywidget", "ipywidgets" or "static". why: a sentence that says why not by anywidget.
    """

    name = "view"

    def __init__(self, title: str, sources: Sequence[Source], step: int | None) -> None:
        self.title, self.sources, self.linked = title, tuple(sources), step in (None, -1)
        self.version, self._selected = 0, dict[str, Any]()
        self._front: Front | None = None
        self._display_id, self.why = "", ""
        self._kept: object = None  # what the picture in the output shows
        # A cell may read the view while a button's thread moves it and a worker's adds to what it shows. Nothing is
        # waited for with this lock held.
        self._reading = threading.RLock()
        self._known = self._lengths()
        self.first_step, self.last_step = self.read()
        self._cursor = self.last_step
        self._cursor = self.clamp(step)

    # -- what a view says -----------------------------------------------------------------------------------------

    @abstractmethod
    def read(self) -> tuple[int, int]:
        """Take in the sources as they are now. Returns the first and the last step that the view can show."""

    @abstractmethod
    def sheet(self, step: int, width: int) -> Sheet:
        """The drawing of a step."""

    def related(self, step: int, width: int) -> Sheet:
        """The drawing of a step with the block tables of that step, where it is of one recording."""
        sheet = self.sheet(step, width)
        if len(self.sources) == 1 and (recordings := self._recordings()):
            film = film_of(recordings[0])
            frame = film.frame(min(max(step, film.first_step), film.last_step))
            rows = ((film.lanes[lane].rid, row.block_table) for lane, row in frame.rows.items())
            sheet.tables = {rid: table for rid, table in rows if table}
        return sheet

    # -- growing --------------------------------------------------------------------------------------------------

    def _lengths(self) -> list[tuple[int, int]]:
        return [(source.last_step, len(source)) for source in self.sources]

    def update(self) -> bool:
        """Take in what the sources have got since. A view on no page that showed the last step shows the new one.

        Returns:
            Whether there was anything.
        """
        with self._reading:
            now = self._lengths()
            if now == self._known:
                return False
            at_end = self._cursor == self.last_step and self._front is None
            self.first_step, self.last_step = self.read()
            self._known = now
            self.version += 1
            if at_end:
                self._cursor = self.last_step
            return True

    # -- time and selection ---------------------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """The step shown."""
        return self._cursor

    @cursor.setter
    def cursor(self, step: int) -> None:
        self.moved(self.clamp(step))

    @property
    def selected(self) -> dict[str, Any]:
        """{"request": id}, {"block": number} or {}."""
        return self._selected

    @selected.setter
    def selected(self, selected: Mapping[str, Any]) -> None:
        self.moved(selected=selected)

    def moved(self, step: int | None = None, selected: Mapping[str, Any] | None = None) -> None:
        """Go to a step or select, here and in the views that are linked; None is as before."""
        selected = None if selected is None else chosen(selected)
        with POSTING:
            self.go_along(step, selected)
            for link in self.links():
                link.tell(self, step, selected)

    def clamp(self, step: int | None) -> int:
        """`step`, negative numbers counted from the end; None is the cursor.

        Raises:
            RecordingError: there is no such step.
        """
        self.update()
        if step is None:
            return self.cursor
        if not isinstance(step, bool) and hasattr(step, "__index__"):
            number = index(step)
            number += self.last_step + 1 if number < 0 else 0
            if self.first_step <= number <= self.last_step:
                return number
        raise RecordingError(f"No step {step!r}: this view has {self.first_step} to {self.last_step}.")

    @property
    def tier(self) -> str:
        """How it is shown: "anywidget", "ipywidgets" or "static", which it is until it was shown."""
        return "static" if self._front is None else self._front.tier

    # -- as a member of links, see `views.link` ---------------------------------------------------------------------

    def _recordings(self) -> list[Recording]:
        found = (getattr(source, "recording", source) for source in self.sources)
        return [one for one in found if isinstance(one, Recording)]

    def links(self) -> list[Link]:
        """The links of what it shows."""
        return [link_of(recording) for recording in dict.fromkeys(self._recordings())]

    def go_along(self, step: int | None, selected: Mapping[str, Any] | None) -> None:
        """Show this step, or the nearest there is, and this selection."""
        self.update()
        with self._reading:
            if step is not None:
                self._cursor = min(max(step, self.first_step), self.last_step)
            if selected is not None:
                self._selected = dict(selected)
        if self._front is not None:
            self._front.show(self)

    def grow(self, step: int | None) -> None:
        """Take in what the sources have got since, also where a cell has read the view and so taken it in."""
        at_end = self._cursor == self.last_step
        self.update()
        self.go_along((self.last_step if at_end else None) if step == FOLLOW else step, None)

    def refresh(self) -> None:
        """Go to the newest step."""
        self.update()
        self.moved(self.last_step)

    def keep_picture(self) -> None:
        """Put the picture of now into the output that the view was shown in: what a saved notebook will show."""
        if self._display_id and self._state() != self._kept:
            from pagedinfer.views.output import publish

            publish(self._repr_mimebundle_(), self._display_id, update=True)
            self._kept = self._state()

    def _state(self) -> object:
        """What the picture depends on."""
        self.update()
        return self._cursor, self._selected, self._known

    def advance(self, steps: int) -> bool:
        """Run up to `steps` engine steps, where the recording's engine can be driven from here, shown in all views.

        Returns:
            Whether there may be more.
        """
        before = self._cursor
        more = [link.step(steps) for link in self.links() if link.is_live]  # all of them
        if self._cursor == before:  # no other view has taken it along
            self.moved(max(recording.last_step for recording in self._recordings()))
        return any(more)

    @property
    def is_live(self) -> bool:
        """Whether `advance` does anything."""
        return any(link.is_live for link in self.links())

    def close(self) -> None:
        """Take the view off the page."""
        for link in self.links():
            link.leave(self)
        if self._front is not None:
            self._front.close()
            self._front, self._display_id = None, ""

    # -- showing --------------------------------------------------------------------------------------------------

    def svg(self, step: int | None = None, width: int = WIDE) -> str:
        """The drawing of a step (default: the cursor's) as an SVG file, `width` pixels wide and its margin."""
        with self._reading:
            sheet = self.related(self.clamp(step), check_width(width))
            return document(self.title, sheet.drawing(self._selected))

    def png(self, step: int | None = None, width: int = WIDE) -> bytes:
        """The drawing of a step as a PNG file in the light theme; its text is drawn in letters of pixels."""
        return png_of(self.svg(step, width))

    def text(self, step: int | None = None) -> str:
        """The view in words and numbers: equal for equal runs."""
        with self._reading:
            sheet = self.sheet(self.clamp(step), WIDE)
        return readable("\n".join([f"{self.name}: {sheet.words}", *(f"  {line}" for line in sheet.notes)]))

    def html(self, path: str | PathLike[str], *, summary: Mapping[str, str] | None = None) -> Path:
        """Write the view with its slider as one page that needs no network, and return its path.

        Args:
            path: the file to write.
            summary: name -> number with unit, shown on top.
        """
        from pagedinfer.views.sheet_page import page_view

        return write_page(Path(path), self.title, [page_view(self)], summary or {})

    def frames(self, most: int = MAX_FRAMES) -> list[int]:
        """The steps that a page or a widget holds: all of them, up to `most`; the cursor's is among them."""
        steps = range(self.first_step, self.last_step + 1)
        if len(steps) <= most:
            return list(steps)
        spaced = {steps[i * (len(steps) - 1) // (most - 1)] for i in range(most)}
        return sorted(spaced | {self.cursor})

    def encode(
        self,
        widths: Sequence[int] = (WIDE, NARROW),
        step: int | None = None,
        number: int = 0,
        most: int = MAX_FRAMES,
    ) -> bytes:
        """The drawings of `frames(most)`, or of one step, as JSON for `static/sheet.js`; `number` counts those."""
        with self._reading:
            self.update()
            steps = self.frames(most) if step is None else [step]
            count = self.last_step - self.first_step + 1
            note = f"{len(steps)} of {count} steps are held, evenly spaced." if len(steps) < count else ""
            facts = {"range": [self.first_step, self.last_step], "version": self.version, "note": note}
            facts |= {"number": number} if number else {}
            return encode_sheets(self.related, steps, widths, **facts)

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None, **kwargs: object
    ) -> dict[str, Any]:
        """Widget, SVG, PNG and text; no HTML, which sanitizers would break (see `views.widget`)."""
        svg = self.svg()
        bundle: dict[str, Any] = {
            "image/svg+xml": svg,
            "image/png": base64.b64encode(png_of(svg)).decode(),
            "text/plain": self.text(),
        }
        self._open()
        if self.why:
            bundle["text/plain"] += f"\n  {'static' if self._front is None else 'core widgets'}: {self.why}"
        return (self._front.view_reference() if self._front is not None else {}) | bundle

    def _open(self) -> None:
        """Make the best front that the installed packages allow, and take part in the links from now on."""
        for module, maker in FRONTS if self._front is None else ():
            try:
                self._front = getattr(import_module(module), maker)(self)
            except ModuleNotFoundError as error:
                if (error.name or "").split(".")[0] not in ("anywidget", "ipywidgets", "traitlets"):
                    raise
                self.why = (
                    self.why or f'the live view needs {error.name}; pip install "pagedinfer[view]" brings it.'
                )
                continue
            for link in self.links():
                link.join(self)
            return

    def _ipython_display_(self, **kwargs: object) -> None:
        """Put the view on the page in an output of its own, which `keep_picture` can change later."""
        from pagedinfer.views.output import publish

        self._display_id = self._display_id or f"pagedinfer-{id(self):x}"
        publish(self._repr_mimebundle_(), self._display_id)
        self._kept = self._state()
