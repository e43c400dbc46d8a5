"""The drawing of one step: layers of small SVG parts, and what of it belongs to a selection."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import unescape
from typing import Any

from pagedinfer.errors import ConfigError, readable
from pagedinfer.views.svg import Drawing, translate

__all__ = ["NARROW", "WIDE", "Sheet", "check_width", "encode_sheets", "relatives"]

WIDE, NARROW = 920, 430
"""Widths in pixels that a page and a widget choose from: a projector's and a phone's."""

_PARTS = re.compile(r"<g\b([^>]*\bdata-(?:rid|blocks)=[^>]*)>")
_NAMES = re.compile(r'\bdata-(rid|blocks)="([^"]*)"')


@dataclass(slots=True)
class Sheet:
    """The drawing of one step: layers of SVG parts, each layer at its height, from top to bottom.

    Attributes:
        words: what it shows, in a sentence. notes: further lines of text with the numbers.
        tables: request -> its blocks in this step, for views of one recording: what a selected block is related to.

    A part that stands for a request has `data-rid` on its `<g>`, one that stands for blocks `data-blocks` with their
    ids, separated by spaces.
    """

    width: int
    words: str = ""
    notes: list[str] = field(default_factory=list)
    height: float = 0
    layers: list[tuple[float, list[str]]] = field(default_factory=list)
    tables: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.words, self.notes = readable(self.words), [readable(note) for note in self.notes]

    def add(self, parts: list[str], height: float) -> None:
        """A layer below those that are there."""
        self.over(self.height, parts)
        self.height += height

    def over(self, y: float, parts: list[str]) -> None:
        """A layer over those that are there, at the height `y`."""
        self.layers.append((y, [readable(part) for part in parts]))

    def selections(self) -> list[dict[str, Any]]:
        """What can be selected in it, in the order of its parts, each once."""
        found: dict[tuple[str, Any], None] = {}
        for attributes in _PARTS.findall("".join(part for _, parts in self.layers for part in parts)):
            names = dict(_NAMES.findall(attributes))
            if "rid" in names:
                found["request", unescape(names["rid"])] = None
            elif ids := names["blocks"].split():
                found["block", int(ids[0])] = None
        return [{kind: value} for kind, value in found]

    def drawing(self, selected: Mapping[str, Any] | None = None) -> Drawing:
        """All layers as one drawing; with a selection, what does not belong to it is dimmed."""
        body = "".join(translate(0, y, "".join(parts)) for y, parts in self.layers)
        return Drawing(self._marked(body, selected or {}), self.width, round(self.height), self.words)

    def _marked(self, body: str, selected: Mapping[str, Any]) -> str:
        """`static/sheet.js` does the same."""
        rids, blocks = relatives(self.tables, selected)
        by = ("rid", "blocks") if "request" in selected else ("blocks", "rid")

        def belongs(attributes: str) -> bool:
            names = dict(_NAMES.findall(attributes))
            first = next(name for name in by if name in names)
            value = unescape(names[first])
            return value in rids if first == "rid" else not blocks.isdisjoint(map(int, value.split()))

        if not any(belongs(found[1]) for found in _PARTS.finditer(body)):
            return body
        holds_none = "request" in selected and not blocks  # then blocks have no say

        def marked(part: re.Match[str]) -> str:
            if belongs(part[1]) or (holds_none and "data-rid=" not in part[1]):
                return part[0]
            return f'<g opacity=".4"{part[1]}>'

        return _PARTS.sub(marked, body)


def relatives(tables: Mapping[str, Sequence[int]], selected: Mapping[str, Any]) -> tuple[set[str], set[int]]:
    """The requests and the blocks that belong to a selection."""
    if "request" in selected:
        rid = str(selected["request"])
        return {rid}, set(tables.get(rid, ()))
    if "block" in selected:
        block_id = int(selected["block"])
        return {rid for rid, table in tables.items() if block_id in table}, {block_id}
    return set(), set()


def check_width(width: int) -> int:
    """The width.

    Raises:
        ConfigError: it is no integer from 320 to 4000.
    """
    if isinstance(width, bool) or not isinstance(width, int) or not 320 <= width <= 4000:
        raise ConfigError(f"width={width!r}: it must be an integer from 320 to 4000, in pixels.")
    return width


def encode_sheets(
    draw: Callable[[int, int], Sheet], steps: Iterable[int], widths: Sequence[int], **facts: Any
) -> bytes:
    """The drawings of some steps in each width, as JSON for `static/sheet.js`, with more facts beside them.

    `parts` holds each string once. A frame is [height, layers, tables]; a layer is [y, part numbers], or 0 where it
    equals the same layer of the frame before; tables are part numbers of "request, tab, blocks", or 0 likewise.
    """
    numbers: dict[str, int] = {}
    steps, say, sizes = list(steps), [], []
    for width in widths:
        frames: list[list[Any]] = []
        before: list[Any] = []
        for step in steps:
            sheet = draw(step, width)
            if width == widths[0]:
                say.append(sheet.words)
            tables = [f"{rid}\t{' '.join(map(str, table))}" for rid, table in sheet.tables.items()]
            now: list[Any] = [[numbers.setdefault(t, len(numbers)) for t in tables]]
            now += [[y, [numbers.setdefault(p, len(numbers)) for p in parts]] for y, parts in sheet.layers]
            held, *kept = [0 if i < len(before) and one == before[i] else one for i, one in enumerate(now)]
            frames.append([round(sheet.height), kept, held])
            before = now
        sizes.append({"width": width, "frames": frames})
    data = {"steps": steps, "say": say, "parts": list(numbers), "sizes": sizes} | facts
    return json.dumps(data, separators=(",", ":"), ensure_ascii=True).encode()
