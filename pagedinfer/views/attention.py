"""Attention over blocks: where the newest token of a request looks, drawn along its block table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedinfer.errors import ConfigError, count
from pagedinfer.trace.tap_records import LayerAttention, TapRecord
from pagedinfer.views.look import Look
from pagedinfer.views.marks import SMALL, hatched
from pagedinfer.views.stepped import Sheet
from pagedinfer.views.svg import number, path, rect, text, translate
from pagedinfer.views.tap_view import (
    NARROWEST_WIDE,
    TapView,
    cut,
    legend_rows,
    percent,
    titled,
)  # fmt: skip

__all__ = ["AttentionView", "attention_svg"]

MIN_COLUMN = 6
"""Pixels of a strip's column at least; where there are more blocks, a column stands for several neighbours."""
STRIP = 26
NUM = "pi-ink pi-num"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where things stand at a width: right ends of the numbers, the bars, the text of tokens."""

    logical: int
    physical: int
    left: int
    bar: float
    line: int
    under: bool
    """Whether the tokens' text stands under the bar."""

    @classmethod
    def at(cls, width: int, has_text: bool) -> _Place:
        """The places at a width."""
        if width >= NARROWEST_WIDE:
            return cls(62, 130, 148, 220, 22, False)
        return cls(50, 112, 122, width - 122 - 64, 38 if has_text else 22, True)


class AttentionView(TapView):
    """Attention mass per block of one layer at each step; one head, or the mean of those that were kept.

    Args:
        given: a tap, which may go on keeping, a record, or records in a sequence.
        layer: the layer's number; None: the last one kept.
        head: the query head's number; None: the mean.
        request: whose records; None: of the selected request where it has any, else of the first one in the step,
            by id.
        step: the step to open at. A step without a record shows the newest one before.

    Raises:
        ConfigError: no record has attention, or not of this layer, head or request.
    """

    name = "Attention over blocks"

    def __init__(
        self,
        given: Any,
        layer: int | None = None,
        head: int | None = None,
        *,
        request: str | None = None,
        step: int = -1,
        title: str = "Attention over blocks",
    ) -> None:
        self.layer, self.head = layer, head
        super().__init__(given, request, step, title)

    def _check(self, records: Sequence[TapRecord]) -> None:
        lacks = [self._lack(record) for record in records]
        if all(lacks):
            raise ConfigError(f"{lacks[-1]}.")

    def _lack(self, record: TapRecord) -> str:
        if not record.attention:
            return "This record holds no attention; tap with attention=True and layers of the model"
        layers = [each.layer for each in record.attention]
        if self.layer is not None and self.layer not in layers:
            return f"layer={self.layer!r}: this record has {', '.join(map(str, layers))}"
        heads = self._layer_of(record).heads
        if self.head is not None and self.head not in heads:
            return f"head={self.head!r}: this record has {', '.join(map(str, heads))}"
        return ""

    def _layer_of(self, record: TapRecord) -> LayerAttention:
        return next(each for each in reversed(record.attention) if self.layer in (None, each.layer))

    def _look(self, record: TapRecord) -> Look:
        return Look(record, self._layer_of(record), self.head)

    def _words(self, record: TapRecord) -> str:
        return self._look(record).words

    # -- drawn --------------------------------------------------------------------------------------------------

    def _draw(self, sheet: Sheet, record: TapRecord) -> None:
        """The block table with a bar per block; below, each head's own strip."""
        look = self._look(record)
        sheet.notes = [look.note(span) for span in look.rows]
        tops = (
            f"head {head} logical {i} ({percent(most)})"
            for head in look.layer.heads
            for i, most in [look.top(head)]
        )
        sheet.notes.append(f"most of each head: {', '.join(tops)}")
        place, has_text = _Place.at(sheet.width, bool(record.tokens)), bool(record.tokens)
        names = [
            text(place.logical, 12, "logical", SMALL, "end"),
            text(place.physical, 12, "physical", SMALL, "end"),
        ]
        beside = has_text and not place.under
        also = ", over the tokens' text" if has_text and place.under else ""
        names.append(text(place.left, 12, f"share of attention, %{also}", SMALL))
        sheet.add(names + [text(place.left + place.bar + 74, 12, "tokens", SMALL)] * beside, 32)
        top, most = sheet.height, max(look.shares)
        rows = [
            (
                translate(0, i * place.line, _still(look, span, place, sheet.width)),
                translate(0, i * place.line, _bar(look, span, place, most)),
            )
            for i, span in enumerate(look.rows)
        ]
        sheet.add([still for still, _ in rows], len(rows) * place.line)
        sheet.over(top, [bar for _, bar in rows])
        legend, tall = legend_rows(_MARKS, sheet.width - place.left * beside)
        sheet.add([translate(place.left * beside, 0, "".join(legend))], tall + 16)
        _strips(sheet, look, place)


def _still(look: Look, span: range, place: _Place, width: int) -> str:
    """A row without its share: the same at the next step."""
    many = len(span) > 1
    logical = f"{span.start}–{span.stop - 1}" if many else str(span.start)
    small = " pi-small" if many and place.under else ""
    out = [
        text(place.logical, 0, logical, NUM + small, "end"),
        text(place.physical, 0, look.physical(span), NUM + small, "end"),
    ]
    out.append(rect("pi-free", place.left, -10, place.bar, 13, 2))
    if words := look.text(span):
        x, y, size = (place.left, 17, 11) if place.under else (place.left + place.bar + 74, 0, 12)
        out.append(text(x, y, cut(words, width - x, size), "pi-muted" + " pi-small" * place.under))
    about = look.name(span) + (f": {words}" if words else "")
    return titled(about, "".join(out), look.ids(span))


def _bar(look: Look, span: range, place: _Place, most: float) -> str:
    """A row's share."""
    share, out = sum(look.shares[i] for i in span), []
    if look.is_gone(span):
        out.append(hatched("idle", place.left, -10, place.bar, 13))
        out.append(text(place.left + place.bar + 62, 0, "not seen", SMALL, "end"))
    else:
        if len(span) > 1:
            out.append(text(place.left + 6, 0, "together", SMALL))
        else:
            out.append(rect("pi-live", place.left, -10, place.bar * share / most, 13, 2))
        out.append(text(place.left + place.bar + 62, 0, percent(share), NUM, "end"))
    if look.last in span:
        x = place.left + place.bar - 7
        out.append(path("pi-ink pi-s-page", f"M{number(x)} -10h7v7z", 'stroke-width=".8"'))
    return titled(f"{look.name(span)}: {look.share(span)}", "".join(out), look.ids(span))


_BOX = (0, 0, 14, 12)
_MARKS = [
    ("share of attention (longest bar: the largest share)", rect("pi-live", *_BOX, 2)),
    ("holds the newest token", rect("pi-free", *_BOX, 2) + path("pi-ink pi-s-page", "M8 0h6v6z")),
    ("outside the window", rect("pi-free", *_BOX, 2) + hatched("idle", *_BOX)),
]


def _strips(sheet: Sheet, look: Look, place: _Place) -> None:
    """A strip per head: its bars rise over the logical blocks, all heads to the same scale."""
    heads, left = look.shown_heads(), 64 if place.under else place.left
    room, blocks = sheet.width - left - (106 if place.under else 160), look.last + 1
    each = -(-blocks // int(room / MIN_COLUMN))
    spans = [range(i, min(i + each, blocks)) for i in range(0, blocks, each)]
    wide = min(room / len(spans), 40.0)
    mass = [look.layer.mass[look.layer.heads.index(head)] for head in heads]
    full = max(sum(row[span.start : span.stop]) for row in mass for span in spans)
    size = f", {each} blocks a column" if each > 1 else ""
    caption = ["By head: share of attention over logical blocks", f"{size}; a full bar is {percent(full)}"]
    lines = [caption[0] + caption[1]] if not place.under else [caption[0], caption[1].lstrip(",; ")]
    sheet.add([text(0, 12 + 16 * i, line, "pi-muted") for i, line in enumerate(lines)], 8 + 16 * len(lines))
    top, still, tops = sheet.height, [], []
    for i, head in enumerate(heads):
        strong = head == look.head
        still += [rect("pi-accent", 0, i * STRIP, 4, STRIP - 4, 1)] * strong
        still.append(text(left - 12, i * STRIP + 15, f"head {head}", NUM + " pi-strong" * strong, "end"))
        still.append(rect("pi-free", left, i * STRIP, wide * len(spans), STRIP - 4))
        where, most = look.top(head)
        words = f"logical {where}: {percent(most)}"
        tops.append(text(left + wide * len(spans) + 8, i * STRIP + 15, words, f"{SMALL} pi-num"))
    sheet.add(still, len(heads) * STRIP)
    columns = [
        _column(look, span, heads, mass, (left + i * wide, wide, full)) for i, span in enumerate(spans)
    ]
    sheet.over(top, columns)
    sheet.over(top, tops)
    sheet.add(_axis(blocks, each, left, wide), 16)
    if (hidden := len(look.layer.heads) - len(heads)) > 0:
        sheet.add([text(left, 14, f"and {count(hidden, 'more head')}", SMALL)], 18)


def _column(
    look: Look,
    span: range,
    heads: Sequence[int],
    mass: Sequence[Sequence[float]],
    scale: tuple[float, float, float],
) -> str:
    """A column of all strips: x, width and the share of a full bar are in `scale`."""
    x, wide, full = scale
    plain, strong, said = "", "", []
    for i, (head, row) in enumerate(zip(heads, mass, strict=True)):
        share = sum(row[span.start : span.stop])
        said.append(f"head {head} {percent(share)}")
        if share > 0:
            tall = (STRIP - 4) * share / full
            bar = f"M{number(x)} {(i + 1) * STRIP - 4}v-{number(tall)}h{number(wide - 1)}v{number(tall)}z"
            plain, strong = (plain, strong + bar) if head == look.head else (plain + bar, strong)
    body = rect("", x, 0, wide, len(heads) * STRIP, 0, 'fill="none" pointer-events="all"')
    body += path("pi-live", plain) if plain else ""
    body += path("pi-accent", strong) if strong else ""
    return titled(f"{look.name(span)}: {', '.join(said)}", body, look.ids(span))


def _axis(blocks: int, each: int, left: float, wide: float) -> list[str]:
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if n * wide / each >= 26)
    return [
        text(left + (i // each + 0.5) * wide, 10, str(i), f"{SMALL} pi-num", "middle")
        for i in range(0, blocks, every)
    ]


def attention_svg(record: Any, layer: int | None = None, head: int | None = None) -> str:
    """Attention over blocks as an SVG file; see `AttentionView`."""
    return AttentionView(record, layer, head).svg()
