"""Small parts of static SVG, and the scale that timeline and memory chart share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from pagedinfer.errors import readable
from pagedinfer.views.palette import colour_of, static_css, texture_of

__all__ = [
    "CROSSED", "DOTTED", "FONT", "GUTTER", "TAIL", "UPRIGHT", "Drawing", "Scale", "document", "fit", "legend", "number",
    "path", "rect", "short", "swatch", "text", "textures", "translate",
]  # fmt: skip

GUTTER = 96
"""Room left of the plots, for row and axis labels: the same in timeline and memory chart, so that steps align."""

MARGIN = 22
"""Room right of the plots."""

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_STYLE = (
    f".pi-static text{{font-family:{FONT};font-size:12px;stroke:none}}"
    ".pi-static .pi-h{font-size:14px;font-weight:600}.pi-static .pi-small{font-size:11px}"
    ".pi-static .pi-strong{font-weight:600}.pi-static .pi-num{font-variant-numeric:tabular-nums}"
)


def _pattern(name: str, size: int, d: str, stroke: str, width: float, more: str = "") -> str:
    return (
        f'<pattern id="pi-{name}" width="{size}" height="{size}" patternUnits="userSpaceOnUse">'
        f'<path class="pi-s-{stroke}" fill="none" stroke-width="{width}"{more} d="{d}"/></pattern>'
    )


CROSSED = _pattern("crossed", 8, "M-1 9L9 -1M-1 1L1 -1M7 9L9 7", "muted", 1.2)
"""Blocks that only the prefix cache keeps."""

DOTTED = _pattern("dotted", 6, "M3 3h.01", "page", 2.2, ' stroke-linecap="round"')
"""Live slots that several requests share."""

UPRIGHT = _pattern("upright", 5, "M2.5 0v5", "slack", 1.2)
"""Slots reserved for tokens to come."""

TAIL = _pattern("tail", 6, "M-1 7L7 -1M2 10L10 2M-4 4L4 -4", "page", 1.4, ' stroke-opacity=".7"')
"""Tail slack: allocated, holds no token."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """Part of a picture: SVG source drawn from (0, 0), its size in pixels, and what it shows in words."""

    body: str
    width: int
    height: int
    words: str


def document(title: str, drawing: Drawing) -> str:
    """A whole SVG file: scales to its container, paints its own background, has a name and a description.

    Characters that XML does not allow (ids may have any) are left out, half of a surrogate pair is shown as its escape:
    one of them would spoil the whole picture.
    """
    pad, width, height = 16, drawing.width + 32, drawing.height + 32
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pi-static" role="img" viewBox="0 0 {width} {height}" '
        f'width="{width}" style="max-width:100%;height:auto" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(drawing.words)}</desc>"
        f"<style>{_STYLE}{static_css()}</style>"
        f'<rect class="pi-page" width="{width}" height="{height}"/>{translate(pad, pad, drawing.body)}</svg>'
    )
    return _NOT_XML.sub("", readable(svg))


def translate(x: float, y: float, body: str) -> str:
    """`body`, moved."""
    return f'<g transform="translate({number(x)} {number(y)})">{body}</g>'


def number(value: float) -> str:
    """At most one decimal."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def short(n: int) -> str:
    """A count short enough for an axis: 950, 28.7k, 16M; as `static/dom.js` writes it."""
    if n < 10_000:
        return str(n)
    if n < 1_000_000:
        return f"{number(n / 1000)}k" if n < 100_000 else f"{round(n / 1000)}k"
    return f"{number(n / 1_000_000)}M"


def text(x: float, y: float, content: str, classes: str = "pi-ink", anchor: str = "") -> str:
    """A line of text; `anchor` is "middle" or "end"."""
    at = f' text-anchor="{anchor}"' if anchor else ""
    return (
        f'<text x="{number(x)}" y="{number(y)}" class="{classes}"{at}>{escape(content, quote=False)}</text>'
    )


def rect(classes: str, x: float, y: float, w: float, h: float, rx: float = 0, more: str = "") -> str:
    """A rectangle; `more` is further attributes."""
    round_ = f' rx="{number(rx)}"' if rx else ""
    box = f'x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}"{round_}'
    return f'<rect class="{classes}" {box}{" " + more if more else ""}/>'


def path(classes: str, d: str, more: str = "") -> str:
    """A path; `more` is further attributes."""
    return f'<path class="{classes}" d="{d}"{" " + more if more else ""}/>'


def legend(items: Iterable[tuple[str, str]], width: float, room: float = 20) -> tuple[str, int]:
    """Marks (SVG, drawn above the baseline) with their names, in rows; and the height of the rows below the first."""
    x, y, out = 0.0, 0, []
    for name, mark in items:
        at = room if mark else 0
        if x and x + at + 6 * len(name) > width:
            x, y = 0.0, y + 22
        out.append(translate(x, y, mark) + text(x + at, y, name, "pi-muted pi-small"))
        x += at + 18 + 5.6 * len(name)
    return "".join(out), y


def fit(content: str, width: float, size: float = 12) -> str:
    """`content` cut to about `width` pixels. SVG text does not wrap; 0.54 em is a safe mean for system fonts."""
    room = max(1, int(width / (size * 0.54)))
    return content if len(content) <= room else content[: room - 1].rstrip() + "…"


def textures(lanes: Iterable[int]) -> str:
    """Definitions of the textures that these lanes need; `url(#pi-x{colour}-{texture})` names one."""
    pairs = sorted({(colour_of(lane), texture_of(lane)) for lane in lanes if texture_of(lane)})
    shapes = {1: "M-1 7L7 -1M2 10L10 2M-4 4L4 -4", 2: "M2 2h.01M6 6h.01", 3: "M-1 1L7 9M2 -2L10 6M-4 4L4 12"}
    wide = {1: 1.6, 2: 2.2, 3: 1.6}
    return "".join(
        f'<pattern id="pi-x{c}-{t}" width="8" height="8" patternUnits="userSpaceOnUse">'
        + path(f"pi-h{c}", shapes[t], f'fill="none" stroke-width="{wide[t]}" stroke-linecap="round"')
        + "</pattern>"
        for c, t in pairs
    )


def swatch(lane: int, x: float, y: float, size: float = 12) -> str:
    """A request's colour and texture as a small square."""
    c, t = colour_of(lane), texture_of(lane)
    box = (x, y, size, size, 3)
    return rect(f"pi-c{c}", *box) + (rect("", *box, f'fill="url(#pi-x{c}-{t})"') if t else "")


@dataclass(frozen=True, slots=True)
class Scale:
    """Steps to pixels: columns of equal width from `first` to `last`, the first one at `left`."""

    first: int
    last: int
    left: float
    column: float

    @classmethod
    def around(cls, first: int, last: int, cursor: int, width: float) -> Scale:
        """All steps if a column gets 7 pixels or more (28 at most); otherwise a window that holds `cursor`.

        The window moves by half its length, so that stepping moves the cursor, not the picture.
        """
        room = width - GUTTER - MARGIN
        fitting = max(1, int(room // 7))
        if last - first + 1 > fitting:
            half = max(1, fitting // 2)
            start = max(first, min(last - fitting + 1, first + ((cursor - first) // half - 1) * half))
            first, last = start, start + fitting - 1
        return cls(first, last, GUTTER, min(28.0, room / (last - first + 1)))

    def x(self, step: float) -> float:
        """Left edge of a step's column."""
        return self.left + (step - self.first) * self.column

    @property
    def right(self) -> float:
        """Right edge of the last column."""
        return self.x(self.last + 1)

    def cursor(self, step: int, top: float, bottom: float) -> str:
        """The column of the current step."""
        return rect("pi-accent", self.x(step), top, self.column, bottom - top, 0, 'fill-opacity=".16"')

    def ticks(self) -> list[int]:
        """Steps to name on the axis: round numbers at least 44 pixels apart."""
        sizes = (a * 10**b for b in range(7) for a in (1, 2, 5))
        size = next(s for s in sizes if s * self.column >= 44)
        return [s for s in range(self.first, self.last + 1) if s % size == 0]
