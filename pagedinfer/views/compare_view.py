"""Two runs in lockstep: where they part, and what differs at each step in the block map and in the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedinfer.errors import ConfigError, count
from pagedinfer.trace.differences import quoted
from pagedinfer.trace.events import Commit
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State
from pagedinfer.views.compare_map import draw_blocks
from pagedinfer.views.divergence import Lockstep, blocks_of, difference_of, request_lines
from pagedinfer.views.marks import (
    PATTERNS,
    SMALL,
    cursor,
    flow,
    hatched,
    heading,
    part_of,
    plain,
    scale_of,
    share,
    step_axis,
    wrapped,
)
from pagedinfer.views.stepped import Sheet, SteppedView
from pagedinfer.views.svg import GUTTER, fit, number, path, rect, text, textures, translate
from pagedinfer.views.walk import Arrivals, is_told

__all__ = ["RunComparison"]

MAX_REQUESTS = 8
Numbers = dict[str, tuple[float, str]]
"""Name -> (value, as it is written)."""


class _Run:
    """A recording with what it has done so far by step: output tokens."""

    def __init__(self, name: str, recording: Recording) -> None:
        self.name, self.recording, self.arrivals = name, recording, Arrivals(recording)
        self._output: list[int] = []
        self._num_told = 0

    def read(self) -> dict[str, int]:
        """Go along with the recording. Returns the numbers of its requests."""
        first, last = self.recording.first_step, self.recording.last_step
        del self._output[self._num_told :]
        for step in range(first + self._num_told, last + 1):
            events = self.recording.step_events(step)
            new = sum(sum(event.tokens.values()) for event in events if isinstance(event, Commit))
            self._output.append(new + (self._output[-1] if self._output else 0))
            if step < last and self._num_told == step - first and is_told(events):
                self._num_told += 1
        return self.arrivals.read()

    def numbers(self, step: int, state: State) -> Numbers:
        last = self.recording.first_step + len(self._output) - 1  # as far as was read
        usage = state.usage()
        counts = {
            "running": len(state.running),
            "waiting": len(state.waiting),
            "tokens in this step": 0 if step > last else sum(state.last.scheduled.values()),
            "blocks in use": len(state.ref_counts),
            "output tokens so far": self._output[min(step, last) - self.recording.first_step],
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
        self._lockstep = Lockstep(pair[0], pair[1], self.names)
        super().__init__(title, pair, -1)
        if step is not None or self.divergence is not None:
            self._cursor = self.clamp(self.divergence[0] if step is None and self.divergence else step)

    def read(self) -> tuple[int, int]:
        """Where the runs differ, and what each has put out by when."""
        first, second = (run.read() for run in self.runs)
        self._numbers = second | first
        self._lockstep.read()
        self._shown: tuple[int, list[State]] | None = None
        recordings = [run.recording for run in self.runs]
        return recordings[0].first_step, max(recording.last_step for recording in recordings)

    @property
    def divergence(self) -> tuple[int, str] | None:
        """(step, sentence) of the first difference; None if there is none so far."""
        return self._lockstep.divergence

    def states(self, step: int | None = None) -> list[State]:
        """The states of both runs at the end of a step, or at their own end. Not to be changed."""
        step = self.clamp(step)
        if self._shown is None or self._shown[0] != step:
            newest, both = self._lockstep.last, self._lockstep.states
            ends = [min(step, run.recording.last_step) for run in self.runs]
            found = [
                state if end == newest else run.recording.at(end)
                for end, state, run in zip(ends, both, self.runs, strict=True)
            ]
            self._shown = step, found
        return self._shown[1]

    def different_blocks(self, step: int | None = None) -> list[int]:
        """The blocks that the runs use differently at the end of a step: owners or fill."""
        first, second = map(blocks_of, self.states(step))
        return sorted(b for b in first.keys() | second.keys() if first.get(b) != second.get(b))

    # -- drawing --------------------------------------------------------------------------------------------------

    def sheet(self, step: int, width: int) -> Sheet:
        """Where they part, the two block maps, the numbers, the requests."""
        states, different = self.states(step), self.different_blocks(step)
        requests = request_lines(states, self.names)
        now = difference_of(states[0], states[1], self.names) if self._lockstep.differ(step) else ""
        sheet = Sheet(width, self._words(step, different, requests))
        sheet.add([PATTERNS, f"<defs>{textures(range(min(32, len(self._numbers))))}</defs>"], 0)
        sheet.add(*heading(self.title, sheet.words, width))
        for line in [f"settings: {words}" for words in [self._settings()] if words] + (
            [f"now: {now}"] if now else []
        ):
            sheet.notes.append(line)
            sheet.add(*wrapped(line, 8, width))
        self._steps(sheet, step)
        self._maps(sheet, step, states, set(different))
        self._table(sheet, step, states)
        told = list(requests.items())[:MAX_REQUESTS]
        sheet.notes += [line for _, line in told]
        if requests:
            sheet.add([text(0, 12, "Requests that differ", "pi-ink pi-h")], 18)
            for rid, line in told:
                lines, tall = wrapped(line, 14, width)
                sheet.add([part_of("".join(lines), rid)], tall)
            if len(requests) > MAX_REQUESTS:
                sheet.add(*wrapped(f"and {len(requests) - MAX_REQUESTS} more", 14, width))
        sheet.height += 16
        return sheet

    def _words(self, step: int, different: Sequence[int], requests: Mapping[str, str]) -> str:
        unended = f"; {self._lockstep.unended}" if self._lockstep.unended else ""
        if self.divergence is None:
            first, second = map(quoted, self.names)
            return f"step {step}: {first} and {second} do the same in every step{unended}"
        parted, why = self.divergence
        here = (
            f"{count(len(different), 'block')} and {count(len(requests), 'request')} differ"
            if different or requests
            else "no difference"
        )
        return f"step {step}: {here}; they part at step {parted}: {why}{unended}"

    def _settings(self) -> str:
        first, second = (run.recording.config for run in self.runs)
        names = [name for name in sorted(first.keys() | second.keys()) if first.get(name) != second.get(name)]
        return ", ".join(f"{name} {first.get(name)} | {second.get(name)}" for name in names)

    def _steps(self, sheet: Sheet, step: int) -> None:
        """A strip of all steps: hatched where the runs differ, with the place where they part."""
        scale = scale_of(self.first_step, self.last_step, sheet.width - GUTTER - 14)
        parts = [
            text(GUTTER - 8, 33, "differ", SMALL, "end"),
            rect("pi-free pi-s-line", scale.left, 22, scale.right - scale.left, 16),
        ]
        beyond = [self._lockstep.ended is not None] * (self.last_step - self._lockstep.last)
        start = None
        for i, differs in enumerate([*self._lockstep.differs, *beyond, False]):
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

    def _maps(self, sheet: Sheet, step: int, states: Sequence[State], different: set[int]) -> None:
        side = sheet.width >= 640
        room = (sheet.width - 30) / 2 if side else sheet.width
        tall, most = 0.0, max(state.num_blocks for state in states)
        for i, (state, run) in enumerate(zip(states, self.runs, strict=True)):
            x = i * (room + 30) if side else 0
            head = f"{len(state.ref_counts)} of {state.num_blocks} blocks in use"
            if step > (last := run.recording.last_step):
                head += f" at step {last}, its last"
            out = [text(0, 12, fit(run.name, room - 10, 14), "pi-ink pi-h"), text(0, 30, head, "pi-muted")]
            cells, height = draw_blocks(state, different, self._numbers, most, room)
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

    def _table(self, sheet: Sheet, step: int, states: Sequence[State]) -> None:
        """Numbers of both runs, and the second less the first."""
        first, second = (run.numbers(step, state) for run, state in zip(self.runs, states, strict=True))
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
