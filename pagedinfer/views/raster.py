"""Our own SVG pictures as PNG, by the standard library: rectangles, straight lines, stripes and letters of pixels.

A notebook that is not trusted shows no SVG; this is what it shows instead. It knows the few shapes that our views
use, not SVG at large; round corners are cut.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pagedinfer.views.glyphs import CAPITAL, drawn_letter, plain_letters
from pagedinfer.views.palette import LIGHT, TINT, hatch_on, ink_on, mix
from pagedinfer.views.png import encode_png

__all__ = ["png_of"]

_NAMES = ("page", "card", "ink", "muted", "line", "free", "accent", "live", "slack", "alarm", "cached")
_MOVE = re.compile(r"translate\((-?[\d.]+) (-?[\d.]+)\)")
_COMMAND = re.compile(r"([A-Za-z])([^A-Za-z]*)")

_ZOOM = 1.3
"""Letters of pixels are wider than the text that they stand for: so much larger the picture is."""

_PERIOD = 6
"""Pixels from one stripe of a pattern to the next."""

Point = tuple[float, float]
Span = tuple[int, int, int]  # row, from column, to column


def png_of(svg: str) -> bytes:
    """The picture that `views.svg.document` made, in the light theme, as a PNG file."""
    root = ET.fromstring(svg)
    _, _, width, height = (round(float(part) * _ZOOM) for part in root.attrib["viewBox"].split())
    canvas = _Canvas(width, height)
    canvas.learn(root)
    canvas.draw(root, 0, 0)
    return encode_png(canvas.lines, list(canvas.colours))


def _tone(name: str) -> str | None:
    """Colour of a class of the static pictures, without its "pi-" or "pi-s-"."""
    if name in _NAMES:
        return str(getattr(LIGHT, name))
    if len(name) > 1 and name[0] in "cto" and name[1:].isdigit():
        lane = LIGHT.lanes[int(name[1:])]
        return {"c": lane, "t": mix(lane, LIGHT.card, TINT), "o": ink_on(lane)}[name[0]]
    return None


def _stripes(pattern: str, row: int) -> Sequence[int]:
    """The columns, of `_PERIOD`, that a pattern covers in a row; its name says how it runs."""
    name, at = pattern.removeprefix("pi-").removeprefix("v-"), row % _PERIOD
    if name == "away":
        return range(_PERIOD) if at == 0 else ()
    if name == "dotted" or name.endswith("-2"):
        return {0: (0,), 3: (3,)}.get(at, ())
    if name == "upright":
        return (0,)
    rising, falling = -at % _PERIOD, at
    return (rising, falling) if name == "crossed" else (falling,) if name.endswith("-3") else (rising,)


class _Canvas:
    """Rows of palette places; colours are added as they are met."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.colours: dict[str, int] = {LIGHT.page: 0}
        self.lines = [bytearray(width) for _ in range(height)]
        self.patterns: dict[str, tuple[str, float, int]] = {}  # colour, opacity, width of a stripe

    def learn(self, root: ET.Element) -> None:
        """Take in the patterns that the picture defines."""
        for node in root.iter():
            if node.tag.endswith("}pattern") and len(node):
                drawn = node[0].attrib
                name = drawn.get("class", "").removeprefix("pi-").removeprefix("s-")
                colour, opacity = (
                    hatch_on(LIGHT.lanes[int(name[1:])])
                    if name[:1] == "h"
                    else (_tone(name) or LIGHT.ink, 1.0)
                )
                wide = max(1, round(1.1 * float(drawn.get("stroke-width", 1))))
                share = opacity * float(drawn.get("stroke-opacity", 1))
                self.patterns[f"url(#{node.get('id')})"] = (colour, share, wide)

    def draw(self, node: ET.Element, x: float, y: float, opacity: float = 1) -> None:
        """A node and those in it, moved by (x, y)."""
        tag = node.tag.rpartition("}")[2]
        if tag in ("defs", "style", "title", "desc"):
            return
        if found := _MOVE.search(node.get("transform", "")):
            x, y = x + float(found[1]), y + float(found[2])
        opacity *= float(node.get("opacity", 1))
        if tag == "rect":
            left, top = x + float(node.get("x", 0)), y + float(node.get("y", 0))
            right, bottom = left + float(node.get("width", 0)), top + float(node.get("height", 0))
            corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
            self._shape(node, [corners], opacity)
        elif tag == "path":
            self._shape(node, list(_outlines(node.get("d", ""), x, y)), opacity)
        elif tag == "text":
            self._write(node, x, y, opacity)
        for child in node:
            self.draw(child, x, y, opacity)

    # -- colours --------------------------------------------------------------------------------------------------

    def _place(self, colour: str) -> int:
        """The colour's place in the palette; the nearest one's where it is full."""
        if colour not in self.colours and len(self.colours) == 256:
            parts = bytes.fromhex(colour[1:])
            return min(
                self.colours.values(),
                key=lambda place: sum(
                    abs(a - b)
                    for a, b in zip(parts, bytes.fromhex(list(self.colours)[place][1:]), strict=True)
                ),
            )
        return self.colours.setdefault(colour, len(self.colours))

    def _colour(self, spans: Sequence[Span], colour: str, opacity: float, each: int = 1) -> None:
        """Paint spans, or every so many pixels of them, over what is there."""
        if opacity >= 1:
            one = bytes([self._place(colour)])
            for row, start, end in spans:
                self.lines[row][start:end:each] = one * len(range(start, end, each))
            return
        below = set().union(*(self.lines[row][start:end:each] for row, start, end in spans))
        table, known = bytearray(range(256)), list(self.colours)
        for place in below:
            table[place] = self._place(mix(colour, known[place], opacity))
        for row, start, end in spans:
            self.lines[row][start:end:each] = self.lines[row][start:end:each].translate(table)

    # -- shapes ---------------------------------------------------------------------------------------------------

    def _shape(self, node: ET.Element, outlines: list[list[Point]], opacity: float) -> None:
        outlines = [[(a * _ZOOM, b * _ZOOM) for a, b in line] for line in outlines]
        fill, stroke = None, None
        for name in node.get("class", "").split():
            if name.startswith("pi-s-"):
                stroke = _tone(name[5:])
            else:
                fill = _tone(name[3:]) or fill
        paint = node.get("fill", "")
        if paint in self.patterns:
            for outline in outlines:
                self._hatch(self._inside(outline), paint, opacity)
        elif fill is not None and not paint:
            for outline in outlines:
                self._colour(self._inside(outline), fill, opacity * float(node.get("fill-opacity", 1)))
        if stroke is not None:
            thick = max(1, round(_ZOOM * float(node.get("stroke-width", 1))))
            dashes = [max(1, round(_ZOOM * float(part))) for part in node.get("stroke-dasharray", "").split()]
            spans = [
                span
                for line in outlines
                for a, b in pairwise(line)
                for span in self._line(a, b, thick, dashes)
            ]
            self._colour(spans, stroke, opacity)

    def _hatch(self, spans: Sequence[Span], paint: str, opacity: float) -> None:
        colour, share, wide = self.patterns[paint]
        name, parts = paint[5:-1], []
        for row, start, end in spans:
            columns = {(c + i) % _PERIOD for c in _stripes(name, row) for i in range(wide)}
            parts += [(row, start + (c - start) % _PERIOD, end) for c in sorted(columns)]
        self._colour(parts, colour, share * opacity, _PERIOD)

    def _inside(self, line: list[Point]) -> list[Span]:
        """The pixels that an outline encloses."""
        edges = list(zip(line, [*line[1:], line[0]], strict=True))
        ys, spans = [b for _, b in line] or [0.0], []
        for row in range(max(0, round(min(ys))), min(self.height, round(max(ys)))):
            middle = row + 0.5
            cuts = sorted(
                a[0] + (middle - a[1]) / (b[1] - a[1]) * (b[0] - a[0])
                for a, b in edges
                if (a[1] <= middle) != (b[1] <= middle)
            )
            for left, right in zip(cuts[::2], cuts[1::2], strict=False):
                start, end = max(0, round(left)), min(self.width, max(round(right), round(left) + 1))
                spans += [(row, start, end)] if end > start else []
        return spans

    def _line(self, a: Point, b: Point, thick: int, dashes: Sequence[int]) -> list[Span]:
        """The pixels of a straight line: a box where it is level or upright and whole, else dots in a row."""
        (left, right), (top, bottom) = sorted((a[0], b[0])), sorted((a[1], b[1]))
        if not dashes and (right - left < 0.5 or bottom - top < 0.5):
            return self._box(left, top, int(right) - int(left) + thick, int(bottom) - int(top) + thick, thick)
        steps = max(1, round(max(right - left, bottom - top)))
        on, whole = (dashes[0], sum(dashes) * (3 - len(dashes))) if dashes else (1, 1)
        spans = []
        for i in range(steps + 1):
            if i % whole < on:
                at = a[0] + (b[0] - a[0]) * i / steps, a[1] + (b[1] - a[1]) * i / steps
                spans += self._box(*at, thick, thick, thick)
        return spans

    def _box(self, x: float, y: float, wide: int, high: int, thick: int) -> list[Span]:
        """A box from (x, y) on, moved by half a line's width, within the picture."""
        left, top = int(x - (thick - 1) / 2), int(y - (thick - 1) / 2)
        start, end = max(0, left), min(self.width, left + wide)
        rows = range(max(0, top), min(self.height, top + high))
        return [(row, start, end) for row in rows] if end > start else []

    def _write(self, node: ET.Element, x: float, y: float, opacity: float) -> None:
        content, names = plain_letters(node.text or ""), node.get("class", "").split()
        tone = next((tone for name in names if (tone := _tone(name[3:]))), LIGHT.ink)
        bold, gap = not {"pi-strong", "pi-h"}.isdisjoint(names), 2 if "pi-small" in names else 3
        letters = [drawn_letter(letter, bold) for letter in content]
        gap -= bold
        x, y = (x + float(node.get("x", 0))) * _ZOOM, (y + float(node.get("y", 0))) * _ZOOM - CAPITAL
        long = sum(width + gap for width, _ in letters) - gap
        at, top = round(x - {"middle": 0.5, "end": 1.0}.get(node.get("text-anchor", ""), 0) * long), round(y)
        spans = []
        for width, rows in letters:
            for down, right, length in rows:
                start, end = max(0, at + right), min(self.width, at + right + length)
                if 0 <= top + down < self.height and end > start:
                    spans.append((top + down, start, end))
            at += width + gap
        self._colour(spans, tone, opacity)


def _outlines(d: str, x: float, y: float) -> Iterator[list[Point]]:
    """The lines of a path's data; a curve goes straight to its end."""
    line: list[Point] = []
    for command, numbers in _COMMAND.findall(d):
        values = [float(part) for part in numbers.replace(",", " ").replace("-", " -").split()]
        if command in "Zz":
            line.append(line[0])
            continue
        if command == "M":
            if len(line) > 1:
                yield line
            line = []
        across, down = line[-1] if command.islower() else (x, y)
        kind, size = command.upper(), {"H": 1, "V": 1, "Q": 4, "C": 6}.get(command.upper(), 2)
        for i in range(0, len(values), size):
            a, b = values[i + size - 2 : i + size] if size > 1 else (values[i], values[i])
            line.append(
                (line[-1][0] if kind == "V" else across + a, line[-1][1] if kind == "H" else down + b)
            )
            if command.islower():
                across, down = line[-1]
    if len(line) > 1:
        yield line
