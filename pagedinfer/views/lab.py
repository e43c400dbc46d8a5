"""Fragmentation lab: the address space under several allocation strategies, side by side, with its holes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pagedinfer.errors import ConfigError
from pagedinfer.trace.recording import Recording, recording_of
from pagedinfer.views.address_space import Extent, Layout, external_fragmentation, is_contiguous, layout_of
from pagedinfer.views.marks import (
    PATTERNS,
    SMALL,
    attribute,
    cursor,
    heading,
    part_of,
    scale_of,
    share,
    step_axis,
    wrapped,
)
from pagedinfer.views.palette import colour_of, texture_of
from pagedinfer.views.stepped import Sheet, SteppedView
from pagedinfer.views.svg import GUTTER, Scale, number, path, rect, text, textures, translate
from pagedinfer.views.walk import Arrivals, Walk

__all__ = ["FragmentationLab", "named_recordings"]

MAX_RECORDINGS = 8
STRIP, ARROWS, CHART = 34, 26, 90
MAX_MOVES = 6
MAX_NAMED = 4096
"""Blocks of a pool up to which the stretches say which blocks they are."""

DASHES = ("", "7 3", "2 3", "10 3 2 3", "4 4", "1 2", "12 4", "6 2 1 2")


def named_recordings(recordings: Mapping[str, Recording] | Sequence[Recording]) -> dict[str, Recording]:
    """The recordings (or what has one) by name; without names by their allocator, equal ones numbered.

    Raises:
        ConfigError: none, or more than 8.
    """
    if isinstance(recordings, Recording) or hasattr(recordings, "recording"):
        recordings = [recording_of(recordings)]
    if not isinstance(recordings, Mapping):
        named: dict[str, Recording] = {}
        for recording in map(recording_of, recordings):
            name = str(recording.config.get("allocator", "paged"))
            same = sum(other == name or other.startswith(f"{name} (") for other in named)
            named[f"{name} ({same + 1})" if same else name] = recording
        recordings = named
    if not 1 <= len(recordings) <= MAX_RECORDINGS:
        raise ConfigError(f"{len(recordings)} recordings: give 1 to {MAX_RECORDINGS}, one for each strategy.")
    return {str(name): recording_of(recording) for name, recording in recordings.items()}


class FragmentationLab(SteppedView):
    """One strip of the address space per recording, in lockstep: who holds which blocks, the holes, their sizes.

    The same request has the same colour and texture in all strips; the empty part of what it holds is pale. Moves of a
    step are drawn as arrows, and glide where the view is alive. Below, external fragmentation by step.

    Args:
        recordings: name -> recording, one for each allocation strategy, best of the same traffic; or a plain list,
            named by their `allocator` setting.
        step: the step to open at. A recording that ended before is shown as it ended.

    Raises:
        ConfigError: none, or more than 8 recordings. RecordingError: an empty one.
    """

    name = "Fragmentation lab"

    def __init__(
        self,
        recordings: Mapping[str, Recording] | Sequence[Recording],
        *,
        step: int = -1,
        title: str = "Fragmentation lab",
    ) -> None:
        self.recordings = named_recordings(recordings)
        for recording in self.recordings.values():
            recording.at(recording.first_step)  # says so if it is empty
        self._walks = {name: Walk(recording) for name, recording in self.recordings.items()}
        self._arrivals = [Arrivals(recording) for recording in self.recordings.values()]
        self.fragmentation: dict[str, dict[int, float]] = {
            name: {} for name, recording in self.recordings.items() if is_contiguous(recording)
        }
        super().__init__(title, list(self.recordings.values()), step)

    def read(self) -> tuple[int, int]:
        """The requests' colours and the chart's lines."""
        self._layouts: dict[tuple[str, int], Layout] = {}
        self._numbers: dict[str, int] = {}
        for arrivals in reversed(self._arrivals):
            self._numbers |= arrivals.read()
        for name, walk in self._walks.items():
            if (values := self.fragmentation.get(name)) is None:
                continue
            for late in [step for step in reversed(values) if step >= walk.step]:
                del values[late]
            for step, (state,) in walk.news():
                values[step] = external_fragmentation(state)
        first = min(recording.first_step for recording in self.recordings.values())
        return first, max(recording.last_step for recording in self.recordings.values())

    def layout(self, name: str, step: int | None = None) -> Layout:
        """The address space of one recording at a step."""
        recording = self.recordings[name]
        step = max(recording.first_step, min(recording.last_step, self.clamp(step)))
        if (name, step) not in self._layouts:
            walk = self._walks[name]
            newest = walk.newest[0] if walk.newest and step == recording.last_step else None
            self._layouts[name, step] = layout_of(recording, step, newest)
        return self._layouts[name, step]

    # -- drawing --------------------------------------------------------------------------------------------------

    def sheet(self, step: int, width: int) -> Sheet:
        """Strips below each other, then the chart of external fragmentation."""
        sheet = Sheet(width, self._words(step))
        sheet.add([PATTERNS, f"<defs>{textures(range(min(32, len(self._numbers))))}</defs>"], 0)
        sheet.add(*heading(self.title, sheet.words, width))
        for i, name in enumerate(self.recordings):
            layout = self.layout(name, step)
            last = self.recordings[name].last_step
            late = f" (at step {last}, its last)" if last < step else ""
            sheet.notes += [f"{name}{late}: {layout.words()}", *(f"  {cause}" for cause in layout.causes)]
            sheet.height += 10
            sheet.add(*heading(name + late, layout.words(), width))
            self._strip(sheet, layout, f"{i}", last >= step)
        if self.fragmentation:
            self._chart(sheet, step)
        sheet.add(_legend(), 30)
        return sheet

    def _words(self, step: int) -> str:
        parts = [
            f"{name} {share(self.layout(name, step).fragmentation, 1)}" for name in self.fragmentation
        ]  # fmt: skip
        words = (
            f"external fragmentation: {', '.join(parts)}" if parts else "no contiguous strategy among them"
        )
        return f"step {step}; {words}"

    def _strip(self, sheet: Sheet, layout: Layout, key: str, now: bool) -> None:
        scale = (sheet.width - 2) / max(1, layout.num_blocks)
        moves = layout.moves[:MAX_MOVES] if now else []
        if moves:
            sheet.add([_arrow(pairs, scale, i) for i, (_, pairs) in enumerate(moves)], ARROWS)
        sheet.height += 4
        if len(layout.extents) + len(layout.holes) > sheet.width / 3:
            parts = _density(layout, sheet.width)
        else:
            parts = [self._hole(hole, layout, scale) for hole in layout.holes]
            parts += [self._extent(extent, layout, scale, key) for extent in layout.extents]
        sheet.add(parts, STRIP + 2)
        sheet.add(_ruler(layout, scale), 30)
        if now and layout.causes:
            shown = layout.causes[:3] + (
                [f"and {len(layout.causes) - 3} more"] if len(layout.causes) > 3 else []
            )
            for cause in shown:
                sheet.add(*wrapped(cause, 8, sheet.width, SMALL))

    def _hole(self, hole: tuple[int, int], layout: Layout, scale: float) -> str:
        first, count = hole
        x, w, most = first * scale + 1, count * scale, hole == layout.largest_hole
        name = f"largest hole: {count}" if w >= 100 and most else str(count)
        tone, edge = (
            ("pi-s-accent", 'style="stroke-width:2.2px"')
            if most
            else ("pi-s-muted", 'stroke-dasharray="3 2"')
        )
        body = rect(f"pi-free {tone}", x + 1, 1, max(1, w - 2), STRIP - 2, 0, edge)
        if w >= 6 * len(name) + 4:
            body += text(
                x + w / 2, STRIP / 2 + 4, name, "pi-ink pi-small pi-num" + " pi-strong" * most, "middle"
            )
        words = f"{'largest hole' if most else 'hole'}, blocks {first} to {first + count - 1}: {count} free"
        return f"<g><title>{words}</title>{body}</g>"

    def _extent(self, extent: Extent, layout: Layout, scale: float, key: str) -> str:
        lane = self._numbers[extent.rid]
        x, w, colour = extent.first * scale + 1, extent.count * scale, colour_of(lane)
        full = w * extent.tokens / (extent.count * layout.block_size)
        body = rect(
            f"pi-t{colour} pi-s-muted", x + 0.5, 0.5, max(1, w - 1), STRIP - 1, 0, 'stroke-width=".75"'
        )
        body += rect(f"pi-c{colour}", x + 0.5, 1, max(0, min(w - 1, full)), STRIP - 2)
        if texture := texture_of(lane):
            paint = f'fill="url(#pi-x{colour}-{texture})"'
            body += rect("", x + 0.5, 1, max(0, min(w - 1, full)), STRIP - 2, 0, paint)
        label = 6.4 * len(extent.rid) + 6
        if full >= label:
            body += text(
                x + full / 2, STRIP / 2 + 4, extent.rid, f"pi-o{colour} pi-small pi-strong", "middle"
            )
        elif w - full >= label:
            body += text(x + (full + w) / 2, STRIP / 2 + 4, extent.rid, "pi-ink pi-small pi-strong", "middle")
        words = (
            f"{extent.rid}: blocks {extent.first} to {extent.first + extent.count - 1}, "
            f"{extent.tokens} of {extent.count * layout.block_size} token slots written"
        )
        blocks = range(extent.first, extent.first + extent.count) if layout.num_blocks <= MAX_NAMED else ()
        at = f'data-k="{key}/{attribute(extent.rid)}/{extent.part}" data-x="{number(x)}"'
        return part_of(body, extent.rid, blocks, title=words, more=at)

    def _chart(self, sheet: Sheet, step: int) -> None:
        scale = scale_of(self.first_step, self.last_step, sheet.width - GUTTER - 14)
        sheet.height += 14
        sheet.add([text(0, 12, "External fragmentation by step", "pi-ink pi-h")], 24)
        x, y, names = 0.0, 10.0, []
        for i, name in enumerate(self.fragmentation):
            wide = 46 + 6.2 * len(name)
            x, y = (x, y) if x + wide <= sheet.width else (0.0, y + 20)
            names += [translate(x, y, _line("M0 -4H28", i)), text(x + 34, y, name, SMALL)]
            x += wide
        sheet.add(names, y + 14)
        lines = [_line(_stairs(scale, values), i) for i, values in enumerate(self.fragmentation.values())]
        rules = []
        for level in (0, 0.5, 1):
            y = CHART * (1 - level)
            rules.append(
                path("pi-s-line", f"M{GUTTER} {number(y)}H{number(scale.right)}", 'stroke-width=".75"')
            )
            rules.append(text(GUTTER - 8, y + 4, f"{round(100 * level)} %", f"{SMALL} pi-num", "end"))
        top = sheet.height + 6
        sheet.over(top, [*rules, *lines])
        sheet.over(top, [cursor(scale, step, CHART)])
        sheet.height = top + CHART
        sheet.add(step_axis(scale, 16), 34)


def _arrow(pairs: Sequence[tuple[int, int]], scale: float, row: int) -> str:
    """From the middle of where the blocks were to the middle of where they are, over the strip."""
    start, end = ((sum(ids) / len(ids) + 0.5) * scale + 1 for ids in zip(*pairs, strict=True))
    y = 4 + 3 * row
    line = f"M{number(start)} {ARROWS + 2}V{y}H{number(end)}V{ARROWS - 3}"
    head = f"M{number(end - 4)} {ARROWS - 4}L{number(end + 4)} {ARROWS - 4}L{number(end)} {ARROWS + 3}Z"
    return path("pi-s-accent", line, 'fill="none" stroke-width="1.6"') + path("pi-accent", head)


def _density(layout: Layout, width: int) -> list[str]:
    """More pieces than pixels: columns of blocks, filled by the share in use."""
    columns, size = min((width - 2) // 2, layout.num_blocks), layout.num_blocks
    used = [0] * columns
    for extent in layout.extents:
        for block_id in range(extent.first, extent.first + extent.count):
            used[block_id * columns // size] += 1
    wide = (width - 2) / columns
    out = [rect("pi-free pi-s-line", 1, 0, width - 2, STRIP)]
    for i, count in enumerate(used):
        if count:
            high = (
                STRIP * count / (-(-(i + 1) * size // columns) + -i * size // columns)
            )  # of the column's blocks
            out.append(rect("pi-live", 1 + wide * i, STRIP - high, wide, high))
    return out


def _ruler(layout: Layout, scale: float) -> list[str]:
    """Block numbers under the strip, at least 40 pixels apart."""
    size = next(a * 10**b for b in range(9) for a in (1, 2, 5) if a * 10**b * scale >= 40)
    marks = range(0, layout.num_blocks, size)
    ticks = "".join(f"M{number(i * scale + 1)} 0V4" for i in marks)
    out = [path("pi-s-muted", ticks, 'stroke-width="1"')] if ticks else []
    out.append(text(1, 16, "block 0", f"{SMALL} pi-num"))
    return out + [text(i * scale + 1, 16, str(i), f"{SMALL} pi-num") for i in marks if i * scale >= 54]


def _line(d: str, i: int) -> str:
    dash = f' stroke-dasharray="{DASHES[i]}"' if DASHES[i] else ""
    tone = ("pi-s-ink", "pi-s-alarm", "pi-s-slack", "pi-s-muted")[i % 4]  # the cursor has the accent
    return path(tone, d, f'fill="none" stroke-width="1.8"{dash}')


def _stairs(scale: Scale, values: Mapping[int, float]) -> str:
    first, *rest = values.items()
    d = f"M{number(scale.x(first[0]))} {number(CHART * (1 - first[1]))}"
    for (_, before), (step, value) in pairwise([first, *rest]):
        if value != before:
            d += f"H{number(scale.x(step))}V{number(CHART * (1 - value))}"
    return d + f"H{number(scale.x(max(values) + 1))}"


def _legend() -> list[str]:
    written = rect("pi-t0 pi-s-muted", 0, -11, 24, 13) + rect("pi-c0", 0, -11, 13, 13)
    hole = rect("pi-free pi-s-muted", 0, -11, 20, 13, 0, 'stroke-dasharray="3 2"')
    marks = (("written, and allocated but empty", written), ("hole, with its blocks", hole))
    x, out = 0.0, []
    for name, mark in marks:
        out += [translate(x, 14, mark), text(x + 30, 14, name, SMALL)]
        x += 50 + 5.8 * len(name)
    return out
