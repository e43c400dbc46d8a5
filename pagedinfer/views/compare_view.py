"""Two runs in lockstep: where they part, and what differs at each step in the block map and in the numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import zip_longest
from typing import Any

from pagedinfer.errors import ConfigError
from pagedinfer.trace.events import Commit, Fork, Submit
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State
from pagedinfer.views.divergence import BlockUse, blocks_of, difference_of, divergence_of, request_lines
from pagedinfer.views.grid import grid_of
from pagedinfer.views.marks import (
    PATTERNS,
    SMALL,
    cursor,
    flow,
    hatched,
    heading,
    plain,
    share,
    step_axis,
    wrapped,
)
from pagedinfer.views.palette import colour_of, texture_of
from pagedinfer.views.stepped import Sheet, SteppedView
from pagedinfer.views.svg import GUTTER, Scale, fit, number, path, rect, text, textures, translate

__all__ = ["RunComparison"]

MAX_CELLS = 1024
"""Blocks of a pool up to which each block is a part of its own, with its request's label."""

MAX_REQUESTS = 8
Numbers = dict[str, tuple[float, str]]
"""Name -> (value, as it is written)."""


@dataclass(slots=True)
class _Run:
    """A recording with what it has done so far by step: output tokens."""

    name: str
    recording: Recording
    output: list[int] = field(default_factory=list)

    def at(self, step: int) -> State:
        return self.recording.at(min(step, self.recording.last_step))

    def numbers(self, step: int) -> Numbers:
        state = self.at(step)
        usage, ended = state.usage(), step > self.recording.last_step
        counts = {
            "running": len(state.running),
            "waiting": len(state.waiting),
            "tokens in this step": 0 if ended else sum(state.last.scheduled.values()),
            "blocks in use": len(state.ref_counts),
            "output tokens so far": self.output[
                min(step, self.recording.last_step) - self.recording.first_step
            ],
            "requests ended so far": state.num_finished,
            "preemptions so far": state.num_preemptions,
        }
        found: Numbers = {name: (value, str(value)) for name, value in counts.items()}
        for name, key in (("KV usage", "kv_usage"), ("KV waste", "kv_waste")):
            found[name] = (float(usage[key]), share(float(usage[key]), 1))
        return found


class RunComparison(SteppedView):
    """Two runs step by step: the steps in which they differ, both block maps, numbers and requests.

    Blocks that the runs use differently (another owner, or another fill) are ringed in both maps. A run that has ended
    stays as it ended.

    Args:
        first: a recording, anything with a `.recording` (a branch), or a comparison with `names`, `recordings` and
            `divergences` (`sim.compare`): of that, its first run and number `run` are shown.
        second: the other recording; not with a comparison.
        names: of both runs.
        run: which run of a comparison, counted from 0, stands against its first.
        step: the step to open at; by default the one in which they part.

    Raises:
        ConfigError: no second run, no such run, or not two different names; runs that begin at different steps.
    """

    name = "Compare"

    def __init__(
        self,
        first: Any,
        second: Any = None,
        *,
        names: Sequence[str] | None = None,
        run: int = 1,
        step: int | None = None,
        title: str = "Two runs compared",
    ) -> None:
        if second is None and hasattr(first, "recordings"):
            if not 0 < run < len(first.recordings):
                raise ConfigError(f"run={run!r}: the comparison has runs 1 to {len(first.recordings) - 1}.")
            names = names or [first.names[0], first.names[run]]
            first, second = first.recordings[0], first.recordings[run]
        pair = [getattr(one, "recording", one) for one in (first, second)]
        if not all(isinstance(one, Recording) for one in pair):
            raise ConfigError(
                f"Compare two recordings; {type(first).__name__} and {type(second).__name__} came."
            )
        self.names = list(names or ("A", "B"))
        if len(self.names) != 2 or self.names[0] == self.names[1]:
            raise ConfigError(f"names={names!r}: two runs need two different names.")
        if pair[0].first_step != pair[1].first_step:
            starts = f"{pair[0].first_step} and {pair[1].first_step}"
            raise ConfigError(f"The runs begin after steps {starts}; compare runs that begin together.")
        self.runs = [_Run(name, recording) for name, recording in zip(self.names, pair, strict=True)]
        super().__init__(title, pair, -1)
        if step is not None:
            self.cursor = step
        elif self.divergence is not None:
            self.cursor = self.divergence[0]

    def read(self) -> tuple[int, int]:
        """Where the runs differ, and what each has put out by when."""
        self._numbers: dict[str, int] = {}
        for run in self.runs:
            self._look_through(run)
        first, second = (run.recording for run in self.runs)
        self.divergence = divergence_of(first, second, self.names)
        self._differs = self._different_steps()
        return first.first_step, max(first.last_step, second.last_step)

    def _look_through(self, run: _Run) -> None:
        for event in run.recording.events:
            if isinstance(event, Submit | Fork):
                self._numbers.setdefault(event.rid, len(self._numbers))
        total, run.output = 0, []
        for step in range(run.recording.first_step, run.recording.last_step + 1):
            for event in run.recording.step_events(step):
                total += sum(event.tokens.values()) if isinstance(event, Commit) else 0
            run.output.append(total)

    def _different_steps(self) -> list[bool]:
        states = zip_longest(*(run.recording.states() for run in self.runs))
        return [a is None or b is None or bool(difference_of(a, b, self.names)) for a, b in states]

    def different_blocks(self, step: int | None = None) -> list[int]:
        """The blocks that the runs use differently at the end of a step: owners or fill."""
        first, second = (blocks_of(run.at(self.clamp(step))) for run in self.runs)
        return sorted(b for b in first.keys() | second.keys() if first.get(b) != second.get(b))

    # -- drawing --------------------------------------------------------------------------------------------------

    def sheet(self, step: int, width: int) -> Sheet:
        """Where they part, the two block maps, the numbers, the requests."""
        states, different = [run.at(step) for run in self.runs], self.different_blocks(step)
        requests = request_lines(states, self.names)
        now = difference_of(states[0], states[1], self.names) if self._differs[step - self.first_step] else ""
        sheet = Sheet(width, self._words(step, different, requests))
        sheet.add([PATTERNS, f"<defs>{textures(range(min(32, len(self._numbers))))}</defs>"], 0)
        sheet.add(*heading(self.title, sheet.words, width))
        for line in [f"settings: {words}" for words in [self._settings()] if words] + (
            [f"now: {now}"] if now else []
        ):
            sheet.notes.append(line)
            sheet.add(*wrapped(line, 8, width))
        self._steps(sheet, step)
        self._maps(sheet, states, set(different))
        self._table(sheet, step)
        sheet.notes += requests[:MAX_REQUESTS]
        if requests:
            sheet.add([text(0, 12, "Requests that differ", "pi-ink pi-h")], 18)
            more = [f"and {len(requests) - MAX_REQUESTS} more"] if len(requests) > MAX_REQUESTS else []
            for line in [*requests[:MAX_REQUESTS], *more]:
                sheet.add(*wrapped(line, 14, width))
        sheet.height += 16
        return sheet

    def _words(self, step: int, different: Sequence[int], requests: Sequence[str]) -> str:
        if self.divergence is None:
            return f"step {step}: {self.names[0]} and {self.names[1]} do the same in every step"
        parted, why = self.divergence
        here = (
            f"{len(different)} blocks and {len(requests)} requests differ"
            if different or requests
            else "no difference"
        )
        return f"step {step}: {here}; they part at step {parted}: {why}"

    def _settings(self) -> str:
        first, second = (run.recording.config for run in self.runs)
        names = [name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)]
        return ", ".join(f"{name} {first.get(name)} | {second.get(name)}" for name in names)

    def _steps(self, sheet: Sheet, step: int) -> None:
        """A strip of all steps: hatched where the runs differ, with the place where they part."""
        steps = self.last_step - self.first_step + 1
        scale = Scale(self.first_step, self.last_step, GUTTER, min(28.0, (sheet.width - GUTTER - 14) / steps))
        parts = [
            text(GUTTER - 8, 33, "differ", SMALL, "end"),
            rect("pi-free pi-s-line", scale.left, 22, scale.right - scale.left, 16),
        ]
        start = None
        for i, differs in enumerate([*self._differs, False]):
            if differs and start is None:
                start = i
            elif not differs and start is not None:
                x = scale.x(self.first_step + start)
                parts.append(hatched("lost", x, 22, scale.x(self.first_step + i) - x, 16))
                start = None
        if self.divergence:
            x = scale.x(self.divergence[0])
            label, right = f"part at step {self.divergence[0]}", x > sheet.width - 130
            parts.append(path("pi-s-alarm", f"M{number(x)} 6V40", 'fill="none" stroke-width="2"'))
            parts.append(
                text(
                    x - 5 if right else x + 5,
                    15,
                    label,
                    "pi-alarm pi-small pi-strong",
                    "end" if right else "",
                )
            )
        top = sheet.height + 4
        sheet.over(top, parts)
        sheet.over(top + 20, [cursor(scale, step, 20)])
        sheet.height = top + 40
        sheet.add(step_axis(scale, 16), 34)

    def _maps(self, sheet: Sheet, states: Sequence[State], different: set[int]) -> None:
        side = sheet.width >= 640
        room = (sheet.width - 30) / 2 if side else sheet.width
        tall = 0.0
        for i, (state, name) in enumerate(zip(states, self.names, strict=True)):
            x = i * (room + 30) if side else 0
            head = f"{len(state.ref_counts)} of {state.num_blocks} blocks in use"
            out = [text(0, 12, fit(name, room - 10, 14), "pi-ink pi-h"), text(0, 30, head, "pi-muted")]
            cells, height = self._cells(state, different, room)
            parts = [translate(x, 0, part) for part in out] + [translate(x, 40, part) for part in cells]
            if side:
                sheet.over(sheet.height, parts)
                tall = max(tall, height + 48)
            else:
                sheet.add(parts, height + 48)
        sheet.height += tall
        ring = rect("pi-page", 0, -11, 16, 13) + rect(
            "pi-s-alarm", 1, -10, 14, 11, 0, 'fill="none" stroke-width="2.4"'
        )
        sheet.add([translate(0, 14, ring), text(24, 14, "another owner or fill in the other run", SMALL)], 34)

    def _cells(self, state: State, different: set[int], room: float) -> tuple[list[str], float]:
        columns, w, h = grid_of(state.num_blocks, room)
        h = min(h, 30)
        blocks, small = blocks_of(state), state.num_blocks <= MAX_CELLS
        cells: list[str] = []
        layers: dict[tuple[str, str], list[str]] = defaultdict(list)
        gap = 2 if min(w, h) >= 12 else 1
        for block_id in range(state.num_blocks):
            x, y = block_id % columns * w, block_id // columns * h
            shapes = self._shapes(
                blocks.get(block_id), block_id in different, state.block_size, x, y, w - gap, h - gap
            )
            if not small:
                for tone, d, more in shapes:
                    layers[tone, more].append(d)
                continue
            body = "".join(path(tone, d, more) for tone, d, more in shapes)
            label, words = "", f"block {block_id}: free"
            if block_id in blocks:
                owners, fill = blocks[block_id]
                names = ", ".join(rid for rid, _ in owners)
                words = f"block {block_id}: {names}, {fill} of {state.block_size} tokens"
                label = self._label(owners[0][0], fill / state.block_size, x, y, w - gap, h - gap)
            words += ", not so in the other run" if block_id in different else ""
            cells.append(f"<g><title>{escape(words)}</title>{body}{label}</g>")
        cells += [path(tone, "".join(parts), more) for (tone, more), parts in layers.items()]
        return cells, -(-state.num_blocks // columns) * h

    def _shapes(
        self, block: BlockUse | None, differs: bool, size: int, x: float, y: float, w: float, h: float
    ) -> list[tuple[str, str, str]]:
        """(classes, path, more attributes) of one cell, from bottom to top."""
        out = [("pi-free", _box(x, y, w, h), "")]
        if block is not None:
            (owners, fill), high = block, h * block[1] / size
            lane = self._numbers[owners[0][0]]
            colour, texture = colour_of(lane), texture_of(lane)
            out = [(f"pi-t{colour}", _box(x, y, w, h), "")]
            if fill:
                out.append((f"pi-c{colour}", _box(x, y + h - high, w, high), ""))
                if texture:
                    out.append(("", _box(x, y + h - high, w, high), f'fill="url(#pi-x{colour}-{texture})"'))
        if differs:
            ring = _box(x + 1, y + 1, w - 2, h - 2)  # with an edge of the page's colour: it may lie on red
            out.append(("pi-s-page", ring, 'fill="none" stroke-width="4.6"'))
            out.append(("pi-s-alarm", ring, 'fill="none" stroke-width="2.2"'))
        return out

    def _label(self, rid: str, full: float, x: float, y: float, w: float, h: float) -> str:
        if h < 18 or fit(rid, w - 4, 11) != rid or 0.4 < full < 0.75:
            return ""
        ink = f"pi-o{colour_of(self._numbers[rid])}" if full >= 0.75 else "pi-ink"
        place = y + h / 2 + 4 if full >= 0.75 else y + 13
        return text(x + w / 2, place, rid, f"{ink} pi-small pi-strong", "middle")

    def _table(self, sheet: Sheet, step: int) -> None:
        """Numbers of both runs, and the second less the first."""
        first, second = (run.numbers(step) for run in self.runs)
        wide = min(sheet.width, 620)
        at = (wide * 0.56, wide * 0.76, wide)
        heads = [*(fit(name, wide * 0.2 - 6) for name in self.names), "difference"]
        sheet.add([text(0, 12, f"Numbers at step {step}", "pi-ink pi-h")], 24)
        sheet.add(
            [text(x, 10, head, "pi-muted pi-small", "end") for x, head in zip(at, heads, strict=True)], 16
        )
        for name, (value, words) in first.items():
            other, other_words = second[name]
            change = _change(value, other, name.startswith("KV"))
            tone = "pi-ink pi-num pi-strong" if change else "pi-ink pi-num"
            cells = zip(at, (words, other_words, change or "="), strict=True)
            row = [text(x, 14, cell, tone, "end") for x, cell in cells]
            rule = path("pi-s-line", f"M0 20H{number(wide)}", 'stroke-width=".75"')
            sheet.add(
                [
                    text(0, 14, flow(name, wide * 0.4)[0] if wide > 400 else fit(name, wide * 0.4), tone),
                    *row,
                    rule,
                ],
                22,
            )
            sheet.notes.append(f"{name}: {words} | {other_words}{f' ({change})' if change else ''}")
        sheet.height += 14


def _change(first: float, second: float, is_share: bool) -> str:
    """The second less the first, with its sign; "" for none. Shares in points of a per cent."""
    if is_share:
        points = round(100 * (second - first), 1)
        return f"{points:+.1f} points" if points else ""
    return f"{'+' if second > first else '-'}{plain(abs(second - first))}" if second != first else ""


def _box(x: float, y: float, w: float, h: float) -> str:
    return f"M{number(x)} {number(y)}h{number(w)}v{number(h)}h{number(-w)}z"
