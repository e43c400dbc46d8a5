"""Batch composition: who sits in the batch's slots at each step, under static and under continuous batching."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from pagedinfer.errors import ConfigError
from pagedinfer.trace.recording import Recording, recording_of
from pagedinfer.views.lives import DECODE, PREEMPTED, PREFILL, RECOMPUTE, STALL, Life, Lives, lives_of
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
    wrapped,
)
from pagedinfer.views.palette import colour_of, texture_of
from pagedinfer.views.stepped import Sheet, SteppedView
from pagedinfer.views.svg import GUTTER, Scale, legend, number, path, rect, text, textures, translate

__all__ = ["Bar", "BatchComposition", "Batching", "continuous_batching", "static_batching"]

MAX_SLOTS = 64
COMPUTING = (PREFILL, DECODE, RECOMPUTE)
DONE, OPEN = "done", "open"


class Bar(NamedTuple):
    """Steps that a request spends in a slot in one way.

    `did` is "prefill", "decode" or "recompute" (tokens are computed for it), "stall" (it has its place and gets no
    tokens in these steps), "done" (it has ended, and its slot waits for the batch's longest) or "open" (it has had all
    the tokens that it got in the recording, where it still runs: how many more it would get is not known).
    """

    slot: int
    number: int
    rid: str
    did: str
    first: int
    last: int


@dataclass(frozen=True)
class Batching:
    """A run as slots by step. A slot without a bar is empty in that step.

    Attributes:
        how: "static" or "continuous".
        bars: of all slots, by first step.
        tokens: output tokens.
        giving: slot-steps that gave a token: unlike those that computed, the same work in both ways to batch, without
            what was computed twice.
        preempted: (slot, step) of each request that had to leave its slot before it ended.
        running: requests that the recording leaves unfinished.
    """

    how: str
    num_slots: int
    tokens: int
    bars: list[Bar] = field(default_factory=list)
    giving: int = 0
    preempted: list[tuple[int, int]] = field(default_factory=list)
    running: int = 0

    @cached_property
    def first(self) -> int:
        """The first step with anything in a slot."""
        return min((bar.first for bar in self.bars), default=0)

    @cached_property
    def last(self) -> int:
        """The last step with anything in a slot."""
        return max((bar.last for bar in self.bars), default=-1)

    @property
    def num_steps(self) -> int:
        """Steps from the first to the last with anything in a slot."""
        return self.last - self.first + 1

    @cached_property
    def busy(self) -> int:
        """Slot-steps in which tokens were computed."""
        return sum(bar.last - bar.first + 1 for bar in self.bars if bar.did in COMPUTING)

    @property
    def idle(self) -> int:
        """Slot-steps in which none were, from the first to the last step."""
        return self.num_slots * self.num_steps - self.busy

    def at(self, step: int) -> list[Bar]:
        """What the slots hold in a step, by slot."""
        return sorted((b for b in self.bars if b.first <= step <= b.last), key=lambda bar: bar.slot)

    def words(self) -> str:
        """The run in one line of numbers."""
        whole = self.num_slots * self.num_steps
        rate = self.tokens / self.num_steps if self.num_steps else 0
        words = f"{self.num_steps} steps, {plain(rate)} tokens per step; {self.giving} of {whole} slot-steps "
        words += f"gave a token ({share(self.giving, whole)})"
        lost = len(self.preempted)
        return words + (f"; {lost} preemption{'s'[: lost > 1]}" if lost else "")


def _worked(lives: Iterable[Life]) -> list[Life]:
    """The requests that were computed at all."""
    return [life for life in lives if any(run[0] in COMPUTING for run in life.runs)]


def continuous_batching(recording: Recording, num_slots: int) -> Batching:
    """The recording itself: a request takes the lowest free slot when it joins the batch, and leaves it at once."""
    return _continuous(_worked(lives_of(recording)), num_slots)


def _continuous(lives: Sequence[Life], num_slots: int) -> Batching:
    stays = sorted((runs[0][1], life.number, life.rid, runs) for life in lives for runs in life.stays)
    bars: list[Bar] = []
    lost = {(life.number, first) for life in lives for did, first, _ in life.runs if did == PREEMPTED}
    preempted: list[tuple[int, int]] = []
    seated: list[tuple[int, int]] = []  # heap: last step, slot
    free: list[int] = []  # heap
    for first, life, rid, runs in stays:
        while seated and seated[0][0] < first:
            heappush(free, heappop(seated)[1])
        slot = heappop(free) if free else len(seated)
        heappush(seated, (runs[-1][2], slot))
        bars += [Bar(slot, life, rid, phase, a, b) for phase, a, b in runs]
        preempted += [(slot, runs[-1][2] + 1)] if (life, runs[-1][2] + 1) in lost else []
    used = max((bar.slot + 1 for bar in bars), default=0)
    return _batching("continuous", max(num_slots, used), lives, bars, preempted)


def static_batching(recording: Recording, num_slots: int) -> Batching:
    """The recording's requests in static batches, computed from their prompt and output lengths.

    A batch takes up to `num_slots` requests that have come when the one before ends, in order of submission; if none
    has, it waits for the next. Its prompts are computed first, `max_num_batched_tokens` a step; the last of these steps
    brings each request's first token, every step after it one more, until the longest request has ended. Requests that
    the recording never computed are left out; the others have as many output tokens as they had there. Memory has no
    part in it: a batch is as large as its slots, also where the recording's pool could not have held it.
    """
    return _static(recording, _worked(lives_of(recording)), num_slots)


def _static(recording: Recording, lives: Sequence[Life], num_slots: int) -> Batching:
    budget = int(recording.config.get("max_num_batched_tokens", 0))
    bars: list[Bar] = []
    end, at = recording.first_step, 0
    while at < len(lives):
        end = max(end, lives[at].submitted)
        batch = [life for life in lives[at : at + num_slots] if life.submitted <= end]
        at += len(batch)
        prompts = sum(life.num_prompt_tokens for life in batch)
        prefill = end + max(1, -(-prompts // budget) if budget else 1)
        last = prefill + max(0, max(len(life.token_steps) for life in batch) - 1)
        for slot, life in enumerate(batch):
            done = prefill + max(0, len(life.token_steps) - 1)
            rest = OPEN if life.finished is None else DONE
            runs = ((PREFILL, end + 1, prefill), (DECODE, prefill + 1, done), (rest, done + 1, last))
            bars += [Bar(slot, life.number, life.rid, did, a, b) for did, a, b in runs if a <= b]
        end = last
    return _batching("static", num_slots, lives, bars)


def _batching(
    how: str,
    num_slots: int,
    lives: Sequence[Life],
    bars: list[Bar],
    preempted: Sequence[tuple[int, int]] = (),
) -> Batching:
    bars.sort(key=lambda bar: (bar.first, bar.slot))
    tokens = sum(len(life.token_steps) for life in lives)
    giving = tokens if how == "static" else sum(len(set(life.token_steps)) for life in lives)
    running = sum(life.finished is None for life in lives)
    return Batching(how, num_slots, tokens, bars, giving, list(preempted), running)


class BatchComposition(SteppedView):
    """The same requests in static batches and as the engine ran them: slots by step, idle ones hatched.

    Args:
        recording: the run. What static batching would have done is computed from it: see `static_batching`.
        num_slots: requests in a static batch, and slots of both charts; by default the most that the engine had in its
            batch at once.
        step: the step to open at.

    Raises:
        ConfigError: num_slots is not from 1 to 64, or fewer than the engine has used so far. (A run that uses more
            later gets them, and the view says so.)
    """

    name = "Batch composition"

    def __init__(
        self,
        recording: Recording,
        *,
        num_slots: int | None = None,
        step: int = -1,
        title: str = "Batch composition",
    ) -> None:
        is_number = isinstance(num_slots, int) and not isinstance(num_slots, bool)
        if num_slots is not None and not (is_number and 1 <= num_slots <= MAX_SLOTS):
            raise ConfigError(f"num_slots={num_slots!r}: it must be an integer from 1 to {MAX_SLOTS}.")
        self.recording, self._asked = recording_of(recording), num_slots
        self._lives = Lives(self.recording)
        super().__init__(title, [self.recording], step)
        if num_slots is not None and self.num_slots > num_slots:
            raise ConfigError(
                f"num_slots={num_slots!r}: it must be an integer from {self.num_slots}, which this run used, to "
                f"{max(MAX_SLOTS, self.num_slots)}."
            )

    def read(self) -> tuple[int, int]:
        """Both ways to batch, with as many slots as were asked for or, where these are more, as the engine used."""
        lives = _worked(self._lives.read())
        self.continuous = _continuous(lives, self._asked or 1)
        self.num_slots = self.continuous.num_slots
        self.static = _static(self.recording, lives, self.num_slots)
        last = max(self.static.last, self.continuous.last, self.recording.last_step)
        return self.recording.first_step, last

    def sheet(self, step: int, width: int) -> Sheet:
        """Both charts over one axis of steps."""
        both = (self.static, self.continuous)
        here = [batching.at(step) for batching in both]
        sheet = Sheet(width, self._words(step, here))
        sheet.notes = [f"{batching.how}: {batching.words()}" for batching in both]
        sheet.notes += [
            f"{batching.how} slots at step {step}: {_seats(bars) or 'all empty'}"
            for batching, bars in zip(both, here, strict=True)
        ]
        caveat = self._caveat()
        sheet.notes.append(caveat)
        scale = scale_around(self.first_step + 1, self.last_step, step, width - GUTTER - 14)
        shown = [[bar for bar in b.bars if bar.first <= scale.last and bar.last >= scale.first] for b in both]
        lanes = {bar.number for bars in shown for bar in bars}
        sheet.add([PATTERNS, f"<defs>{textures(lanes)}</defs>"], 0)
        sheet.add(*heading(self.title, sheet.words, width))
        sheet.height += 8
        names = ("Static batching (computed)", "Continuous batching (the recording)")
        for batching, bars, name in zip(both, shown, names, strict=True):
            sheet.add(*heading(name, batching.words(), width))
            if batching is self.static:
                sheet.add(*wrapped(caveat, 7, width, SMALL))
            self._chart(sheet, batching, bars, scale, step)
        key, below = legend(_marks(bool(self.continuous.preempted), bool(self.static.running)), width, 28)
        sheet.add([translate(0, 14, key)], 36 + below)
        return sheet

    def _caveat(self) -> str:
        """What the static chart rests on."""
        words = "Computed from the requests' lengths, as if the pool could hold any batch"
        if n := self.static.running:
            words += f"; {n} of them still run{'s'[: n == 1]}: counted with the tokens so far"
        return words + "."

    def _words(self, step: int, here: Sequence[Sequence[Bar]]) -> str:
        static, continuous = (sum(bar.did in COMPUTING for bar in bars) for bars in here)
        words = f"step {step}: slots computing, of {self.num_slots}: static {static}, continuous {continuous}"
        if self._asked is not None and self.num_slots > self._asked:
            words += f"; {self._asked} were asked for, the engine used more"
        return words

    def _chart(self, sheet: Sheet, batching: Batching, bars: Sequence[Bar], scale: Scale, step: int) -> None:
        rows = min(self.num_slots, MAX_SLOTS)
        row = max(5, min(20, 240 // rows))
        top, high = sheet.height + 4, row * rows
        back = []
        for bar in _empty(bars, rows, max(batching.first, scale.first), min(batching.last, scale.last)):
            box = (scale.x(bar.first), bar.slot * row, scale.x(bar.last + 1) - scale.x(bar.first), row - 1)
            back.append(rect("pi-free", *box) + hatched("idle", *box))
        labels = [
            text(GUTTER - 8, s * row + row / 2 + 4, f"slot {s}", SMALL, "end")
            for s in range(0, rows, 1 if row >= 13 else -(-14 // row))
        ]
        sheet.add([*labels, *back, *(_bar(bar, scale, row) for bar in bars if bar.slot < rows)], high + 4)
        marks = [
            (slot, s) for slot, s in batching.preempted if slot < rows and scale.first <= s <= scale.last
        ]
        sheet.over(top, [_lost(scale.x(s), slot * row) for slot, s in marks])
        if scale.first <= step:
            sheet.over(top - 4, [cursor(scale, step, high)])
        if self.num_slots > rows:
            sheet.add([text(GUTTER, 12, f"and {self.num_slots - rows} more slots", SMALL)], 18)
        sheet.add(step_axis(scale, 14), 40)


def _empty(bars: Iterable[Bar], num_slots: int, first: int, last: int) -> Iterator[Bar]:
    """The steps from `first` to `last` in which a slot holds nobody, as bars."""
    free = [first] * num_slots
    for bar in bars:
        if bar.slot < num_slots:
            if bar.first > free[bar.slot]:
                yield Bar(bar.slot, -1, "", "", free[bar.slot], bar.first - 1)
            free[bar.slot] = bar.last + 1
    for slot, at in enumerate(free):
        if at <= last:
            yield Bar(slot, -1, "", "", at, last)


def _seats(bars: Sequence[Bar]) -> str:
    return ", ".join(f"{bar.slot} {bar.rid} {bar.did}" for bar in bars)


def _bar(bar: Bar, scale: Scale, row: int) -> str:
    """A bar with its name, and what it is where the mouse rests."""
    x, high = scale.x(max(bar.first, scale.first)), row - 1
    w = scale.x(min(bar.last, scale.last) + 1) - x
    y, colour = bar.slot * row, colour_of(bar.number)
    words = f"{bar.rid} {bar.did}, steps {bar.first} to {bar.last}, slot {bar.slot}"
    if bar.did == OPEN:
        tone, dashes = f"pi-t{colour} pi-s-muted", 'stroke-width=".75" stroke-dasharray="3 2"'
        return part_of(rect(tone, x, y + 0.5, w, high - 1, 0, dashes), bar.rid, title=words)
    if bar.did in (DONE, STALL):
        tone, hatch = ("pi-page pi-s-alarm", "lost") if bar.did == DONE else ("pi-page pi-s-muted", "idle")
        body = rect(tone, x, y + 0.5, w, high - 1, 0, 'stroke-width=".75"') + hatched(hatch, x, y, w, high)
        return part_of(body, bar.rid, title=words)
    body = rect(f"pi-c{colour}", x, y, w, high)
    if texture := texture_of(bar.number):
        body += rect("", x, y, w, high, 0, f'fill="url(#pi-x{colour}-{texture})"')
    if bar.did != DECODE:
        body += rect("pi-ink", x, y, w, max(2, high / 5))
    if high >= 13 and w >= 7 * len(bar.rid) + 6 and bar.did == DECODE:
        body += text(x + w / 2, y + high / 2 + 4, bar.rid, f"pi-o{colour} pi-small pi-strong", "middle")
    return part_of(body, bar.rid, title=words)


def _lost(x: float, y: float) -> str:
    """Where a request was preempted: the timeline's mark."""
    return path("pi-alarm", f"M{number(x)} {number(y)}h8l-4 5z")


def _marks(preempted: bool, running: bool) -> list[tuple[str, str]]:
    """What the legend explains: (name, mark)."""
    box = (0, -11, 20, 13)
    marks = [
        ("decode", rect("pi-c0", *box)),
        ("prefill or recompute", rect("pi-c0", *box) + rect("pi-ink", 0, -11, 20, 3)),
        ("ended, waits for the batch's longest", rect("pi-page pi-s-alarm", *box) + hatched("lost", *box)),
    ]
    dashed = rect("pi-t0 pi-s-muted", *box, 0, 'stroke-width=".75" stroke-dasharray="3 2"')
    marks += [("still runs, length not known yet", dashed)] if running else []
    marks.append(("empty slot", rect("pi-free", *box) + hatched("idle", *box)))
    return marks + ([("preempted, waits without a slot", _lost(6, -8))] if preempted else [])
