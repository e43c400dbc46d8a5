"""Latency: where each request's time went, and how TTFT, TPOT and ITL are distributed against their limits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from html import escape
from itertools import chain
from typing import Any

from pagedinfer.errors import ConfigError
from pagedinfer.trace.metrics import percentile
from pagedinfer.trace.phases import PHASES
from pagedinfer.trace.recording import Recording, recording_of
from pagedinfer.views.histogram import bins, draw_histogram
from pagedinfer.views.lives import DECODE, PREFILL, QUEUE, RECOMPUTE, STALL, Life, Lives
from pagedinfer.views.marks import (
    PATTERNS,
    SMALL,
    cursor,
    hatched,
    heading,
    part_of,
    plain,
    scale_around,
    share,
    step_axis,
)
from pagedinfer.views.stepped import Sheet, SteppedView
from pagedinfer.views.svg import GUTTER, Scale, fit, number, path, rect, text, translate

__all__ = ["SERIES", "Latency"]

SERIES = {"TTFT": "time to first token", "TPOT": "mean gap after the first token", "ITL": "each gap"}
PERCENTILES = (50, 90, 99)
ROW, MAX_ROWS, SIDE = 20, 24, 232


class Latency(SteppedView):
    """The waterfall of a recording's requests (queue, prefill, decode, recompute, stall, preempted), with latencies.

    In steps, a request that comes after step 3 and has its first token in step 5 has a TTFT of 2. Percentiles are
    linear between neighbours. See `pagedinfer.trace.metrics` and `trace.phases`.

    Args:
        recording: the run.
        slo: limits by name, "TTFT", "TPOT", "ITL", in `unit`. A request is within them when it ended by itself (stop or
            length) and its TTFT, its TPOT and each of its gaps are; goodput is the share of those.
        unit: of the latencies, "steps" or "seconds" (of the recording's wall time). The waterfall is in steps.
        step: the step to open at; what came later is not counted. -1 is the last.

    Raises:
        ConfigError: a limit of another name, or not above 0; another unit; seconds of a recording without wall time.
    """

    name = "Latency"

    def __init__(
        self,
        recording: Recording,
        *,
        slo: Mapping[str, float] | None = None,
        unit: str = "steps",
        step: int = -1,
        title: str = "Latency",
    ) -> None:
        self.slo = {str(name).upper(): value for name, value in (slo or {}).items()}
        for name, value in self.slo.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in SERIES or not is_number or not value > 0:
                raise ConfigError(f"slo {name}={value!r}: give TTFT, TPOT or ITL a number of {unit} above 0.")
        if unit not in ("steps", "seconds"):
            raise ConfigError(f'unit={unit!r}: it must be "steps" or "seconds".')
        self.unit, self.recording = unit, recording_of(recording)
        self._lives = Lives(self.recording, unit)
        super().__init__(title, [self.recording], step)
        if self._no_time():
            raise ConfigError('The recording has no wall time; use unit="steps".')

    def read(self) -> tuple[int, int]:
        """The lives of all requests."""
        self.lives = self._lives.read()
        return self.recording.first_step, self.recording.last_step

    def _no_time(self) -> bool:
        return any(life.times.submitted is None for life in self.lives)

    # -- numbers --------------------------------------------------------------------------------------------------

    def known(self, step: int | None = None) -> list[Life]:
        """The lives of the requests submitted by the end of a step, as they stood then."""
        step = self.clamp(step)
        if step == self.last_step:
            return list(self.lives)
        return [life.until(step) for life in self.lives if life.submitted <= step]

    def values(self, name: str, step: int | None = None) -> list[float]:
        """All values of "TTFT", "TPOT" or "ITL" known at the end of a step, in the view's unit."""
        return _values(self.known(step), name)

    def within(self, life: Life) -> bool:
        """Whether a request ended by itself and kept all limits."""
        if life.why not in ("stop", "length"):
            return False
        times = life.times
        reached = {"TTFT": times.ttft, "TPOT": times.tpot, "ITL": life.longest_gap}
        return all((reached[name] or 0) <= limit for name, limit in self.slo.items())

    def say(self, value: float) -> str:
        """A latency as it is written: two decimals in steps, three digits in seconds."""
        return plain(value) if self.unit == "steps" else f"{value:.3g}"

    # -- drawing --------------------------------------------------------------------------------------------------

    def sheet(self, step: int, width: int) -> Sheet:
        """Waterfall over histograms, three in a row where they fit."""
        lives = self.known(step)
        values = {name: sorted(_values(lives, name)) for name in SERIES}
        sheet = Sheet(width, self._words(lives, step), self._notes(lives, values))
        sheet.add([PATTERNS], 0)
        sheet.add(*heading(self.title, sheet.words, width))
        self._waterfall(sheet, lives, step)
        columns = 3 if width >= 640 else 1
        room = (width - 24 * (columns - 1)) / columns
        parts = [self._distribution(name, values[name], room) for name in SERIES]
        tall = max(height for _, height in parts)
        for i in range(0, 3, columns):
            row = [
                translate(k * (room + 24), 0, "".join(part))
                for k, (part, _) in enumerate(parts[i : i + columns])
            ]
            sheet.add(row, tall + 18)
        return sheet

    def _words(self, lives: Sequence[Life], step: int) -> str:
        ended = sum(life.finished is not None for life in lives)
        words = f"step {step}: {len(lives)} requests, {ended} ended; latencies in {self.unit}"
        if self._no_time():
            words += ", which the recording does not have"
        if self.slo and not ended:
            words += "; none has ended yet"
        elif self.slo:
            met = sum(map(self.within, lives))
            limits = ", ".join(f"{name} ≤ {self.say(limit)}" for name, limit in self.slo.items())
            words += f"; {met} of {len(lives)} ended within {limits} (goodput {share(met, len(lives))})"
        return words

    def _notes(self, lives: Sequence[Life], values: Mapping[str, Sequence[float]]) -> list[str]:
        notes = [f"{name} ({what}): {self._summary(name, values[name])}" for name, what in SERIES.items()]
        for life in lives[:MAX_ROWS]:
            spent = ", ".join(f"{phase} {n}" for phase in PHASES if (n := life.steps(phase)))
            notes.append(f"{life.rid}: {self._times(life)}; steps: {spent or 'none yet'}")
        if (hidden := len(lives) - MAX_ROWS) > 0:
            notes.append(f"and {hidden} more requests")
        return notes

    def _summary(self, name: str, values: Sequence[float]) -> str:
        """Percentiles of sorted values, and how many of them are within the limit."""
        if not values:
            return "no value yet"
        marks = [f"p{p} {self.say(percentile(values, p) or 0)}" for p in PERCENTILES]
        words = " · ".join([f"{len(values)} values", *marks, f"max {self.say(values[-1])}"])
        if name in self.slo:
            within = bisect_right(values, self.slo[name])
            words += f" · {share(within, len(values))} within {self.say(self.slo[name])}"
        return words

    def _times(self, life: Life) -> str:
        times = life.times
        known = [("TTFT", times.ttft), ("TPOT", times.tpot), ("E2E", times.e2e)]
        words = [f"{name} {self.say(value)}" for name, value in known if value is not None]
        words += [life.why] if life.why not in ("", "stop", "length") else []
        return " · ".join(words) or "no token yet"

    def _waterfall(self, sheet: Sheet, lives: Sequence[Life], step: int) -> None:
        side = SIDE if sheet.width >= 700 else 0
        first = self.first_step + 1
        scale = scale_around(first, self.last_step, step, sheet.width - GUTTER - 8 - side)
        near = sorted(lives, key=lambda life: step - (step if life.finished is None else life.finished))
        shown, hidden = sorted(near[:MAX_ROWS], key=lambda life: life.number), near[MAX_ROWS:]
        sheet.add(step_axis(scale, 12), 18)
        top = sheet.height
        for life in shown:
            sheet.add(self._row(life, scale, sheet.width, side), ROW)
        if hidden:
            live = sum(life.finished is None for life in hidden)
            rest = f"{live} of them not ended" if live else "which ended before"
            sheet.add([text(GUTTER, 14, f"and {len(hidden)} more requests, {rest}", SMALL)], ROW)
        if first <= step:
            sheet.over(top, [cursor(scale, step, sheet.height - top)])
        legend, tall = _legend(sheet.width - 20)
        sheet.add(legend, tall + 16)

    def _row(self, life: Life, scale: Scale, width: int, side: int) -> list[str]:
        """What stays as it is, and apart from it the newest: its last run, and the line of its times."""
        runs = []
        for phase, a, b in life.runs:
            words = f"{life.rid} {phase}, steps {a} to {b}" if b > a else f"{life.rid} {phase}, step {a}"
            left, right = max(a, scale.first), min(b, scale.last) + 1
            if left < right:
                mark = _mark(phase, scale.x(left), scale.x(right) - scale.x(left))
                runs.append(f"<g><title>{escape(words)}</title>{mark}</g>")
        before, last = "".join(runs[:-1]), "".join(runs[-1:])
        if life.token_steps and scale.first <= life.token_steps[0] <= scale.last:
            x = number(scale.x(life.token_steps[0] + 1))
            last += path("pi-s-ink", f"M{x} 1V19", 'stroke-width="1.8"')
        if side:
            late = self.slo and life.finished is not None and not self.within(life)
            tone = "pi-alarm pi-small pi-strong pi-num" if late else f"{SMALL} pi-num"
            last += text(width - side + 12, 14, fit(self._times(life), side - 12, 11), tone)
        name = text(0, 14, fit(life.rid, GUTTER - 12), "pi-ink pi-strong")
        return [part_of(name + before, life.rid), part_of(last, life.rid)]

    def _distribution(self, name: str, values: Sequence[float], width: float) -> tuple[list[str], float]:
        lines = self._summary(name, values).split(" · ")
        rows = (" · ".join(part) for part in (lines[:5], lines[5:]) if part)
        bars, tall = draw_histogram(values, self.slo.get(name), self.unit, self.say, width)
        return [
            text(0, 12, name, "pi-ink pi-h"),
            text(52, 12, f"{SERIES[name]}, {self.unit}", SMALL),
            *(text(0, 30 + 15 * i, row, f"{SMALL} pi-num") for i, row in enumerate(rows)),
            translate(0, 50, "".join(bars)),
        ], 50 + tall

    def plotly(self, step: int | None = None) -> Any:
        """The distributions as a plain plotly figure (extra "lab"): a histogram each, the limit as a dashed line.

        Raises:
            ConfigError: plotly is not installed.
        """
        try:
            from pagedinfer.views.latency_plotly import histograms
        except ModuleNotFoundError as error:
            raise ConfigError('This figure needs plotly; pip install "pagedinfer[lab]" brings it.') from error
        series = {}
        for name, what in SERIES.items():
            size, _ = bins(values := self.values(name, step), self.slo.get(name))
            series[f"{name}: {what}"] = (values, size, self.slo.get(name))
        return histograms(self.title, self.unit, series)


def _values(lives: Sequence[Life], name: str) -> list[float]:
    if name == "ITL":
        return list(chain.from_iterable(life.gaps for life in lives))
    if name not in SERIES:
        raise ConfigError(f"No latency {name!r}: there are {', '.join(SERIES)}.")
    found = (life.times.ttft if name == "TTFT" else life.times.tpot for life in lives)
    return [value for value in found if value is not None]


def _mark(phase: str, x: float, w: float) -> str:
    """A run of steps, each phase with a height and texture of its own."""
    if phase == QUEUE:
        line = f"M{number(x)} 10H{number(x + w)}"
        return path("pi-s-muted", line, 'fill="none" stroke-width="2" stroke-dasharray="2 3"')
    if phase == DECODE:
        return rect("pi-live", x, 6, w, 8)
    if phase == PREFILL:
        return rect("pi-slack", x, 2, w, 16) + hatched("tail", x, 2, w, 16)
    if phase == RECOMPUTE:
        return rect("pi-c3", x, 2, w, 16)
    if phase == STALL:
        return rect("pi-free pi-s-muted", x, 6, w, 8, 0, 'stroke-dasharray="2 2"')
    return rect("pi-free pi-s-alarm", x, 6, w, 8) + hatched("lost", x, 6, w, 8)


def _legend(width: float) -> tuple[list[str], float]:
    names = {phase: phase for phase in PHASES}
    names |= {
        RECOMPUTE: "recompute after a preemption",
        STALL: "stall: left out of the step",
        "": "first token",
    }
    x, y, out = 0.0, 10.0, []
    for phase, name in names.items():
        wide = 44 + 5.8 * len(name)
        if x and x + wide > width:
            x, y = 0.0, y + 22
        token = path("pi-s-ink", f"M{number(x + 11)} 2V18", 'stroke-width="1.8"')
        out += [
            translate(0, y - 6, _mark(phase, x, 22) if phase else token),
            text(x + 28, y + 8, name, SMALL),
        ]
        x += wide
    return out, y + 18
