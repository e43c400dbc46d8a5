"""Our own SVG pictures as PNG, by the standard library: rectangles, straight lines, stripes and plain capitals.

A notebook that is not trusted shows no SVG; this is what it shows instead. It knows the few shapes that our views
use, not SVG at large; round corners are cut.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import pairwise

from pagedinfer.views.palette import LIGHT, TINT, ink_on, mix
from pagedinfer.views.png import encode_png

__all__ = ["png_of"]

_NAMES = ("page", "card", "ink", "muted", "line", "free", "accent", "live", "slack", "alarm", "cached")
_MOVE = re.compile(r"translate\((-?[\d.]+) (-?[\d.]+)\)")
_COMMAND = re.compile(r"([A-Za-z])([^A-Za-z]*)")

# Glyphs of 3 by 5 pixels, a row an octal digit.
_GLYPHS = (
    "0 75557|1 26227|2 71747|3 71717|4 55711|5 74717|6 74757|7 71111|8 75757|9 75717|A 25755|B 65656|C 34443|"
    "D 65556|E 74647|F 74644|G 34553|H 55755|I 72227|J 11152|K 55655|L 44447|M 57755|N 75555|O 25552|P 65644|"
    "Q 25563|R 65655|S 34216|T 72222|U 55557|V 55552|W 55775|X 55255|Y 55222|Z 71247|. 00002|, 00024|: 02020|"
    "; 02024|- 00700|+ 02720|≤ 12470|≥ 42170|% 51245|( 12221|) 42224|/ 11244|= 07070|× 05250|· 00200|… 00005|"
    "< 12421|> 42124|_ 00007|? 71202|# 57575|' 22000|→ 02720"
)
_FONT = dict(part.split(" ") for part in _GLYPHS.split("|")) | {"|": "22222"}

_ZOOM = 1.3
"""Capitals are wider than the text that they stand for: so much larger the picture is."""

_DOT = 2
_ADVANCE = {"pi-small": 7.4, "": 8.2}
"""Pixels of a glyph's dot, and from one glyph to the next by size of text."""

Point = tuple[float, float]


def png_of(svg: str) -> bytes:
    """The picture that `views.svg.document` made, in the light theme, as a PNG file."""
    root = ET.fromstring(svg)
    _, _, width, height = (round(float(part) * _ZOOM) for part in root.attrib["viewBox"].split())
    canvas = _Canvas(width, height)
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


class _Canvas:
    """Rows of palette places; colours are added as they are met."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.colours: dict[str, int] = {LIGHT.page: 0}
        self.lines = [bytearray(width) for _ in range(height)]

    def draw(self, node: ET.Element, x: float, y: float) -> None:
        """A node and those in it, moved by (x, y)."""
        tag = node.tag.rpartition("}")[2]
        if tag in ("defs", "style", "title", "desc"):
            return
        if found := _MOVE.search(node.get("transform", "")):
            x, y = x + float(found[1]), y + float(found[2])
        if tag == "rect":
            left, top = x + float(node.get("x", 0)), y + float(node.get("y", 0))
            right, bottom = left + float(node.get("width", 0)), top + float(node.get("height", 0))
            self._shape(node, [[(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]])
        elif tag == "path":
            self._shape(node, list(_outlines(node.get("d", ""), x, y)))
        elif tag == "text":
            self._write(node, x, y)
        for child in node:
            self.draw(child, x, y)

    def _place(self, colour: str, opacity: float = 1) -> int:
        colour = mix(colour, LIGHT.page, opacity) if opacity < 1 else colour
        return self.colours.setdefault(colour, len(self.colours) if len(self.colours) < 256 else 0)

    def _shape(self, node: ET.Element, outlines: list[list[Point]]) -> None:
        outlines = [[(a * _ZOOM, b * _ZOOM) for a, b in line] for line in outlines]
        fill, stroke = None, None
        for name in node.get("class", "").split():
            if name.startswith("pi-s-"):
                stroke = _tone(name[5:])
            else:
                fill = _tone(name[3:]) or fill
        paint, opacity = node.get("fill", ""), float(node.get("fill-opacity", 1))
        if paint.startswith("url"):
            for outline in outlines:
                self._fill(
                    [outline], self._place(LIGHT.alarm if "lost" in paint else LIGHT.page), striped=True
                )
        elif fill is not None and paint != "none":
            for outline in outlines:
                self._fill([outline], self._place(fill, opacity))
        if stroke is not None:
            dashed = "stroke-dasharray" in node.attrib
            for outline in outlines:
                for a, b in pairwise(outline):
                    self._line(a, b, self._place(stroke), dashed)

    def _fill(self, outlines: list[list[Point]], place: int, striped: bool = False) -> None:
        edges = [(a, b) for line in outlines for a, b in zip(line, [*line[1:], line[0]], strict=True)]
        ys = [a[1] for a, _ in edges] or [0.0]
        for row in range(max(0, round(min(ys))), min(self.height, round(max(ys)))):
            middle = row + 0.5
            cuts = sorted(
                a[0] + (middle - a[1]) / (b[1] - a[1]) * (b[0] - a[0])
                for a, b in edges
                if (a[1] <= middle) != (b[1] <= middle)
            )
            for left, right in zip(cuts[::2], cuts[1::2], strict=False):
                start, end = max(0, round(left)), min(self.width, max(round(right), round(left) + 1))
                for column in range(start, end) if striped else ():
                    if (column + row) % 6 == 0:
                        self.lines[row][column] = place
                if not striped and end > start:
                    self.lines[row][start:end] = bytes([place]) * (end - start)

    def _line(self, a: Point, b: Point, place: int, dashed: bool) -> None:
        steps = max(1, round(max(abs(a[0] - b[0]), abs(a[1] - b[1]))))
        for i in range(steps + 1):
            column, row = int(a[0] + (b[0] - a[0]) * i / steps), int(a[1] + (b[1] - a[1]) * i / steps)
            if 0 <= row < self.height and 0 <= column < self.width and not (dashed and i % 6 > 3):
                self.lines[row][column] = place

    def _write(self, node: ET.Element, x: float, y: float) -> None:
        content = (node.text or "").upper()
        names = node.get("class", "").split()
        place = self._place(next((tone for name in names if (tone := _tone(name[3:]))), LIGHT.ink))
        x, y = (x + float(node.get("x", 0))) * _ZOOM, (y + float(node.get("y", 0))) * _ZOOM - 5 * _DOT
        advance = _ADVANCE["pi-small" if "pi-small" in names else ""]
        x -= {"middle": 0.5, "end": 1.0}.get(node.get("text-anchor", ""), 0) * len(content) * advance
        for i, letter in enumerate(content):
            for j, bits in enumerate(_FONT.get(letter, "00000")):
                for k in range(3):
                    if int(bits) >> (2 - k) & 1:
                        self._dot(round(x + i * advance) + k * _DOT, round(y) + j * _DOT, place)

    def _dot(self, column: int, row: int, place: int) -> None:
        for line in self.lines[max(0, row) : max(0, row + _DOT)]:
            for c in range(max(0, column), min(self.width, column + _DOT)):
                line[c] = place


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
