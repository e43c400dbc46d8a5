"""What the pictures of a tap's record share: standing still, one SVG, the numbers as text, and bars as a PNG."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from pagedinfer.errors import ConfigError
from pagedinfer.trace.tap_records import TapRecord
from pagedinfer.views.palette import LIGHT
from pagedinfer.views.png import _encode
from pagedinfer.views.svg import Drawing, document

__all__ = ["HATCH", "WIDTH", "TapView", "bars_png", "percent", "quoted"]

WIDTH = 940

HATCH = (
    '<pattern id="pi-gone" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path class="pi-s-muted" stroke-opacity=".55" stroke-width="1.2" d="M-1 7L7 -1M2 10L10 2M-4 4L4 -4"/></pattern>'
)
"""Definition of `url(#pi-gone)`: there is nothing here any more."""


class TapView:
    """A picture of one record; subclasses draw it."""

    title = ""
    _ipython_display_ = None  # ipywidgets 7 would bypass _repr_mimebundle_

    def __init__(self, record: TapRecord) -> None:
        if not isinstance(record, TapRecord):
            raise ConfigError(
                f"A {type(self).__name__} shows one TapRecord, not a {type(record).__name__}; give tap.last() or one "
                "of tap.records."
            )
        self.record = record

    def draw(self) -> Drawing:
        """The picture's body."""
        raise NotImplementedError

    def svg(self) -> str:
        """The picture as an SVG file."""
        return document(self.title, self.draw())

    def text(self) -> str:
        """The picture in words and numbers: equal for equal records."""
        raise NotImplementedError

    def png(self) -> bytes:
        """The picture's bars as a PNG file in the light theme, without labels."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.text()

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None, **kwargs: object
    ) -> dict[str, str]:
        return {
            "image/svg+xml": self.svg(),
            "image/png": base64.b64encode(self.png()).decode(),
            "text/plain": self.text(),
        }


def percent(share: float) -> str:
    """A share in per cent with one decimal; what is not 0 but would be written so is "<0.1 %"."""
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def quoted(content: str, token_id: int | None = None) -> str:
    """Text in quotes, with line ends and all that cannot be printed made visible; without text the token's id."""
    if not content and token_id is not None:
        return f"id {token_id}"
    marks = {"\n": "⏎", "\t": "⇥"}
    shown = (c if c.isprintable() else marks.get(c) or c.encode("unicode_escape").decode() for c in content)
    return f'"{"".join(shown)}"'


def bars_png(rows: Sequence[Sequence[float | None]], cell: tuple[int, int], marked: int = -1) -> bytes:
    """Rows of shares, 0 to 1, as bars that rise in cells of (width, height) pixels; None is no bar and no ground.

    The row `marked` has bars of the accent's colour and a line beside it.
    """
    page, ground, bar, accent = 0, 1, 2, 3
    w, h = cell
    lines = [bytearray(6 + w * max(map(len, rows))) for _ in range(h * len(rows))]
    for y, row in enumerate(rows):
        ink = accent if y == marked else bar
        for dy in range(h):
            line = lines[y * h + dy]
            line[:3] = bytes([accent if y == marked else page] * 3)
            if dy == h - 1:
                continue
            for x, share in enumerate(row):
                if share is not None:
                    tall = 0 if share <= 0 else max(1, round((h - 1) * share))
                    at = 6 + x * w
                    line[at : at + w - 1] = bytes([ink if dy >= h - 1 - tall else ground]) * (w - 1)
    return _encode(lines, [LIGHT.page, LIGHT.free, LIGHT.live, LIGHT.accent])
