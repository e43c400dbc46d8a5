"""What the views of a tap's records share: which record a step shows, the requests to choose from, tokens as text."""

from __future__ import annotations

import unicodedata
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol, runtime_checkable

from pagedinfer.errors import ConfigError, kind_of, readable
from pagedinfer.trace.tap_records import TapRecord
from pagedinfer.views.marks import PATTERNS, SMALL, heading
from pagedinfer.views.stepped import Sheet, Source, SteppedView
from pagedinfer.views.svg import rect, text, translate

__all__ = ["NARROWEST_WIDE", "Records", "TapView", "cut", "legend_rows", "percent", "quoted", "titled"]

NARROWEST_WIDE = 640
"""Pixels from which a drawing has room for text beside its bars; below, it stands under them."""


@runtime_checkable
class Records(Source, Protocol):
    """A source of records that may grow, as `runner.taps.Tap` is."""

    @property
    def records(self) -> Sequence[TapRecord]:
        """Those kept."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """Records in a sequence as a source."""

    records: Sequence[TapRecord]

    @property
    def last_step(self) -> int:
        return max(record.step for record in self.records)

    def __len__(self) -> int:
        return len(self.records)


class TapView(SteppedView):
    """A view of a tap's records.

    It shows the steps from the first to the last one with a record. At a step without a record of the request it shows
    the newest one before, and says so.

    Args:
        given: a tap, which may go on keeping, a record, or records in a sequence.
        request: whose records; None: of the selected request where it has any, else of the first one in the step,
            by id, with something to show.
        step: the step to open at; -1 is the last.

    Raises:
        ConfigError: `given` is nothing of the kind, or has no record of this request.
    """

    def __init__(self, given: Any, request: str | None, step: int, title: str) -> None:
        self.request, self._source = request, self._source_of(given)
        records = self._source.records
        known = dict.fromkeys(record.request_id for record in records)
        if request is not None and known and request not in known:
            raise ConfigError(f"request={request!r}: these records are of {', '.join(known)}.")
        if records:
            self._check([record for record in records if request in (None, record.request_id)])
        super().__init__(title, [self._source], step)

    def _source_of(self, given: Any) -> Records:
        if isinstance(given, TapRecord):
            given = [given]
        if isinstance(given, Sequence) and given and all(isinstance(each, TapRecord) for each in given):
            return _Listed(given)
        if isinstance(given, Records):
            return given
        what = f"an empty {type(given).__name__}" if given == [] else kind_of(given)
        raise ConfigError(
            f"A {type(self).__name__} shows a Tap, a TapRecord or several in a list, not {what}; give session.tap(), "
            "tap.last() or tap.records."
        )

    # -- what a view says -----------------------------------------------------------------------------------------

    @abstractmethod
    def _check(self, records: Sequence[TapRecord]) -> None:
        """Raise a ConfigError where none of these can be shown."""

    @abstractmethod
    def _lack(self, record: TapRecord) -> str:
        """Why this record cannot be shown, in words; "" where it can."""

    @abstractmethod
    def _draw(self, sheet: Sheet, record: TapRecord) -> None:
        """Add the drawing of a record that lacks nothing below the heading, and the notes."""

    @abstractmethod
    def _words(self, record: TapRecord) -> str:
        """What a record that lacks nothing shows, in a sentence."""

    # -- records --------------------------------------------------------------------------------------------------

    def read(self) -> tuple[int, int]:
        """The records as they are now, in order of steps; of a step that was run again the last run's."""
        newest = {(record.step, record.request_id): record for record in self._source.records}
        mine = [record for (_, rid), record in newest.items() if self.request in (None, rid)]
        self._records = sorted(mine, key=lambda each: (each.step, len(each.request_id), each.request_id))
        self._steps = [record.step for record in self._records]
        return (self._steps[0], self._steps[-1]) if self._steps else (0, 0)

    def update(self) -> bool:
        """As of every view; a cursor at a step that the tap has forgotten goes to the nearest one."""
        grown = super().update()
        self._cursor = min(max(self._cursor, self.first_step), self.last_step)
        return grown

    def go_along(self, step: int | None, selected: Mapping[str, Any] | None) -> None:
        """As of every view; a selected request's records are drawn in place of another's."""
        if selected is not None and self._wanted(selected) != self._wanted(self.selected):
            self.version += 1
        super().go_along(step, selected)

    def record(self, step: int | None = None) -> TapRecord | None:
        """What is shown at a step: see the class. None where there is nothing yet."""
        return self._at(self.clamp(step))

    def _at(self, step: int) -> TapRecord | None:
        upto = self._records[: bisect_right(self._steps, step)]
        if (wanted := self._wanted(self.selected)) is not None:
            return next((record for record in reversed(upto) if record.request_id == wanted), None)
        batch = self._batch(upto[-1].step) if upto else []
        return next((record for record in batch if not self._lack(record)), batch[0] if batch else None)

    def _batch(self, step: int) -> list[TapRecord]:
        """The records of a step, in order of ids."""
        return self._records[bisect_left(self._steps, step) : bisect_right(self._steps, step)]

    def _wanted(self, selected: Mapping[str, Any]) -> str | None:
        """The request asked for, or the selected one where it has records."""
        rids = {record.request_id for record in self._records}
        return self.request or next((rid for rid in rids if readable(rid) == selected.get("request")), None)

    # -- drawing --------------------------------------------------------------------------------------------------

    def sheet(self, step: int, width: int) -> Sheet:
        """The drawing of the step's record, or a sentence in its place."""
        record = self._at(step)
        lack = self._lack(record) if record is not None else self._nothing()
        words = lack if record is None or lack else self._words(record)
        before = f"the newest record is of step {record.step}: " if record and record.step != step else ""
        sheet = Sheet(width, f"step {step}: {before}{words}")
        sheet.add([PATTERNS], 0)
        sheet.add(*heading(self.title, sheet.words, width))
        if record is not None:
            sheet.add(self._chips(record, width), 32)
            if not lack:
                self._draw(sheet, record)
        return sheet

    def _nothing(self) -> str:
        whose = self._wanted(self.selected)
        if not self._records:
            return f"no record{f' of {whose}' if whose else ''} yet; run a step while the tap is attached"
        return f"no record of {whose} up to this step" if whose else "no record up to this step"

    def _chips(self, shown: TapRecord, width: int) -> list[str]:
        """The requests with a record in the step of the one shown, which is framed."""
        there = self._batch(shown.step)
        page, at = 8 if width >= NARROWEST_WIDE else 4, there.index(shown)
        chips, x, out = there[at - at % page :][:page], 0.0, list[str]()
        for record in chips:
            rid, mine = record.request_id, record is shown
            name = cut(rid, (width - 90) / len(chips) - 30)
            wide = 22 + 7.2 * columns_of(name)
            tone, edge = ("pi-s-accent", 'stroke-width="2"') if mine else ("pi-s-line", "")
            body = rect(f"pi-free {tone}", x + 1, 5, wide - 2, 22, 11, edge)
            body += text(x + wide / 2, 20, name, "pi-ink pi-strong" if mine else "pi-ink", "middle")
            about = f"{rid}, step {record.step}" + (", shown" if mine else "")
            out.append(titled(about, body, f'data-rid="{escape(rid)}"'))
            x += wide + 8
        if (hidden := len(there) - len(chips)) > 0:
            out.append(text(x + 4, 20, f"and {hidden} more", SMALL))
        return out


def titled(words: str, body: str, more: str = "") -> str:
    """`body` as a group that says `words` where the mouse rests; `more` is further attributes."""
    return f"<g{' ' + more if more else ''}><title>{escape(words)}</title>{body}</g>"


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


def columns_of(content: str) -> int:
    """How many letters' room a text takes: East Asian ones and emoji take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in content)


def cut(content: str, width: float, size: float = 12) -> str:
    """`content` cut to about `width` pixels, as `svg.fit` does, for texts in any script."""
    room = max(1, int(width / (size * 0.56)))
    if columns_of(content) <= room:
        return content
    while content and columns_of(content) > room - 1:
        content = content[:-1]
    return content.rstrip() + "…"


def legend_rows(items: Iterable[tuple[str, str]], width: float) -> tuple[list[str], float]:
    """Marks of 14 by 12 pixels (drawn from (0, 0)) with their names, in rows that fit, and the height of all."""
    x, y, out = 0.0, 0.0, []
    for name, mark in items:
        wide = 38 + 5.8 * len(name)
        if x and x + wide - 18 > width:
            x, y = 0.0, y + 20
        out.append(translate(x, y, mark + text(20, 11, name, SMALL)))
        x += wide
    return out, y + 20
