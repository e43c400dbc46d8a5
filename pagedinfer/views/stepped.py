"""Views with a cursor, drawn once: the same SVG parts as a still picture, a PNG, a widget and an offline page.

A view gives its drawing of a step as layers of small SVG parts (`Sheet`). `encode` writes the drawings of many steps
with each part once, so that a browser scrubs without Python and shows the very drawing that the tests read.
"""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from pagedinfer.errors import ConfigError, RecordingError
from pagedinfer.views.raster import png_of
from pagedinfer.views.svg import Drawing, document, translate

__all__ = ["NARROW", "WIDE", "Sheet", "Source", "SteppedView", "check_width"]

WIDE, NARROW = 920, 430
"""Widths in pixels that a page and a widget choose from: a projector's and a phone's."""

MAX_FRAMES = 400
"""Most steps that a page or a widget holds; longer runs are shown at evenly spaced steps, and say so."""


@dataclass(slots=True)
class Sheet:
    """The drawing of one step: layers of SVG parts, each layer at its height, from top to bottom.

    Attributes:
        words: what it shows, in a sentence. notes: further lines of text with the numbers.
    """

    width: int
    words: str = ""
    notes: list[str] = field(default_factory=list)
    height: float = 0
    layers: list[tuple[float, list[str]]] = field(default_factory=list)

    def add(self, parts: list[str], height: float) -> None:
        """A layer below those that are there."""
        self.layers.append((self.height, parts))
        self.height += height

    def over(self, y: float, parts: list[str]) -> None:
        """A layer over those that are there, at the height `y`."""
        self.layers.append((y, parts))

    def drawing(self) -> Drawing:
        """All layers as one drawing."""
        body = "".join(translate(0, y, "".join(parts)) for y, parts in self.layers)
        return Drawing(body, self.width, round(self.height), self.words)


def check_width(width: int) -> int:
    """The width.

    Raises:
        ConfigError: it is no integer from 320 to 4000.
    """
    if isinstance(width, bool) or not isinstance(width, int) or not 320 <= width <= 4000:
        raise ConfigError(f"width={width!r}: it must be an integer from 320 to 4000, in pixels.")
    return width


class Source(Protocol):
    """What a view reads: a recording, or what a tap has kept. It may grow."""

    @property
    def last_step(self) -> int:
        """Number of the last step in it."""

    def __len__(self) -> int:
        """How much is in it."""


class SteppedView(ABC):
    """A view of one or more recordings with a cursor.

    In a notebook it is a widget where the extra "view" is installed (Left and Right step, Shift for ten, Home and
    End, Space plays), and a picture elsewhere. Where what it shows grows, it goes along.

    Attributes:
        title: the view's name, for headings and screen readers.
        sources: what it reads.
        first_step, last_step: the steps it can show.
    """

    name = "view"

    def __init__(self, title: str, sources: Sequence[Source], step: int | None) -> None:
        self.title, self.sources = title, tuple(sources)
        self._widget: Any = None
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

    # -- growing --------------------------------------------------------------------------------------------------

    def _lengths(self) -> list[tuple[int, int]]:
        return [(source.last_step, len(source)) for source in self.sources]

    def update(self) -> bool:
        """Take in what the sources have got since; a view that showed the last step shows the new last one.

        Returns:
            Whether there was anything.
        """
        now = self._lengths()
        if now == self._known:
            return False
        at_end = self.cursor == self.last_step
        self._known = now
        self.first_step, self.last_step = self.read()
        if at_end:
            self.cursor = self.last_step
        return True

    # -- time -----------------------------------------------------------------------------------------------------

    @property
    def cursor(self) -> int:
        """The step shown."""
        return int(self._widget.cursor) if self._widget is not None else self._cursor

    @cursor.setter
    def cursor(self, step: int) -> None:
        self._cursor = self.clamp(step)
        if self._widget is not None:
            self._widget.cursor = self._cursor

    def clamp(self, step: int | None) -> int:
        """`step`, negative numbers counted from the end; None is the cursor.

        Raises:
            RecordingError: there is no such step.
        """
        if step is None:
            return self.cursor
        if not isinstance(step, bool) and hasattr(step, "__index__"):
            number = index(step)
            number += self.last_step + 1 if number < 0 else 0
            if self.first_step <= number <= self.last_step:
                return number
        raise RecordingError(f"No step {step!r}: this view has {self.first_step} to {self.last_step}.")

    # -- showing --------------------------------------------------------------------------------------------------

    def svg(self, step: int | None = None, width: int = WIDE) -> str:
        """The drawing of a step (default: the cursor's) as an SVG file, `width` pixels wide and its margin."""
        return document(self.title, self.sheet(self.clamp(step), check_width(width)).drawing())

    to_svg = svg

    def png(self, step: int | None = None, width: int = WIDE) -> bytes:
        """The drawing of a step as a PNG file in the light theme; its text is drawn in plain capitals."""
        return png_of(self.svg(step, width))

    def text(self, step: int | None = None) -> str:
        """The view in words and numbers: equal for equal runs."""
        sheet = self.sheet(self.clamp(step), WIDE)
        return "\n".join([f"{self.name}: {sheet.words}", *(f"  {line}" for line in sheet.notes)])

    def html(self, path: str | PathLike[str], *, summary: Mapping[str, str] | None = None) -> Path:
        """Write the view with its slider as one page that needs no network, and return its path.

        Args:
            path: the file to write.
            summary: name -> number with unit, shown on top.
        """
        from pagedinfer.views.sheet_page import write_page

        return write_page(self, Path(path), summary or {})

    def frames(self) -> list[int]:
        """The steps that a page or a widget shows: all of them, up to `MAX_FRAMES`; the cursor's is among them."""
        steps = range(self.first_step, self.last_step + 1)
        if len(steps) <= MAX_FRAMES:
            return list(steps)
        chosen = {steps[i * (len(steps) - 1) // (MAX_FRAMES - 1)] for i in range(MAX_FRAMES)}
        return sorted(chosen | {self.cursor})

    def encode(self, widths: Sequence[int] = (WIDE, NARROW)) -> bytes:
        """The drawings of `frames()` in each width, as JSON for `static/sheet.js`.

        `parts` holds each SVG part once. A frame is [height, layers]; a layer is [y, part numbers], or 0 where it
        equals the same layer of the frame before.
        """
        numbers: dict[str, int] = {}
        steps, say, sizes = self.frames(), [], []
        for width in widths:
            frames: list[list[Any]] = []
            before: list[list[Any]] = []
            for step in steps:
                sheet = self.sheet(step, width)
                if width == widths[0]:
                    say.append(sheet.words)
                now = [[y, [numbers.setdefault(p, len(numbers)) for p in parts]] for y, parts in sheet.layers]
                kept = [0 if i < len(before) and layer == before[i] else layer for i, layer in enumerate(now)]
                frames.append([round(sheet.height), kept])
                before = now
            sizes.append({"width": width, "frames": frames})
        skipped = self.last_step - self.first_step + 1 - len(steps)
        note = f"{len(steps)} of {len(steps) + skipped} steps are shown, evenly spaced." if skipped else ""
        data = {"steps": steps, "say": say, "parts": list(numbers), "sizes": sizes, "note": note}
        return json.dumps(data, separators=(",", ":"), ensure_ascii=True).encode()

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
        try:
            from pagedinfer.views.sheet_widget import widget_of
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in ("anywidget", "ipywidgets", "traitlets"):
                raise
            why = f'the live view needs {error.name}; pip install "pagedinfer[view]" brings it.'
            bundle["text/plain"] += f"\n  static: {why}"
            return bundle
        if self._widget is None:
            self._widget = widget_of(self)
        return dict(self._widget.view_reference()) | bundle
