"""Batch composition: who sits in the batch's slots at each step, under static and under continuous batching."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count, groupby

from pagedinfer.errors import ConfigError
from pagedinfer.trace.recording import Recording, recording_of
from pagedinfer.views.lives import DECODE, PREFILL, RECOMPUTE, STALL, Life, lives_of
from pagedinfer.views.marks import PATTERNS, SMALL, cursor, hatched, heading, plain, share, step_axis
from pagedinfer.views.palette import colour_of, texture_of
from pagedinfer.views.stepped import Sheet, SteppedView
from pagedinfer.views.svg import GUTTER, Scale, rect, text, textures, translate

__all__ = ["Bar", "BatchComposition", "Batching", "continuous_batching", "static_batching"]

MAX_SLOTS = 64
COMPUTING = (PREFILL, DECODE, RECOMPUTE)
DONE = "done"


@dataclass(frozen=True, slots=True)
class Bar:
    """Steps that a request spends in a slot in one way.

    `did` is "prefill", "decode" or "recompute" (tokens are computed for it), "stall" (it has its place and gets no
    tokens in these steps) or "done" (it has ended, and its slot waits for the batch's longest).
    """

    slot: int
    number: int
    rid: str
    did: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Batching:
    """A run as slots by step. A slot without a bar is empty in that step.

    Attributes:
        how: "static" or "continuous".
        bars: of all slots, by first step.
        tokens: output tokens.
    """

    how: str
    num_slots: int
    tokens: int
    bars: list[Bar] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The first step with anything in a slot."""
        return min((bar.first for bar in self.bars), default=0)

    @property
    def last(self) -> int:
        """The last step with anything in a slot."""
        return max((bar.last for bar in self.bars), default=-1)

    @property
    def num_steps(self) -> int:
        """Steps from the first to the last with anything in a slot."""
        return self.last - self.first + 1

    @property
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
        return (
            f"{self.num_steps} steps, {self.busy} of {whole} slot-steps computing ({share(self.busy, whole)}), "
            f"{self.idle} idle, {plain(rate)} tokens per step"
        )


def _worked(recording: Recording) -> list[Life]:
    """The requests that were computed at all."""
    return [life for life in lives_of(recording) if any(map(life.steps, COMPUTING))]


def continuous_batching(recording: Recording, num_slots: int) -> Batching:
    """The recording itself: a request takes the lowest free slot when it joins the batch, and leaves it at once."""
    lives = _worked(recording)
    stays = sorted(
        (stay for life in lives for stay in _stays(life)), key=lambda stay: (stay[1][0][1], stay[0].number)
    )
    bars: list[Bar] = []
    until: dict[int, int] = {}  # slot -> last step of who sits there
    for life, runs in stays:
        slot = next(s for s in count() if until.get(s, -1) < runs[0][1])
        until[slot] = runs[-1][2]
        bars += [Bar(slot, life.number, life.rid, phase, a, b) for phase, a, b in runs]
    tokens = sum(len(life.token_steps) for life in lives)
    return Batching("continuous", num_slots, tokens, sorted(bars, key=lambda bar: (bar.first, bar.slot)))


def _stays(life: Life) -> Iterable[tuple[Life, list[tuple[str, int, int]]]]:
    """The stretches that a request spent in the batch: each as its runs."""
    for inside, runs in groupby(life.runs, key=lambda run: run[0] in (*COMPUTING, STALL)):
        if inside:
            yield life, list(runs)


def static_batching(recording: Recording, num_slots: int) -> Batching:
    """The recording's requests in static batches, computed from their prompt and output lengths.

    A batch takes up to `num_slots` requests that have come when the one before ends, in order of submission; if none
    has, it waits for the next. Its prompts are computed first, `max_num_batched_tokens` a step; the last of these steps
    brings each request's first token, every step after it one more, until the longest request has ended. Requests that
    the recording never computed are left out; the others have as many output tokens as they had there.
    """
    budget = int(recording.config.get("max_num_batched_tokens", 0))
    queue = _worked(recording)
    tokens = sum(len(life.token_steps) for life in queue)
    bars: list[Bar] = []
    end = recording.first_step
    while queue:
        end = max(end, queue[0].submitted)
        batch = [life for life in queue[:num_slots] if life.submitted <= end]
        queue = queue[len(batch) :]
        prompts = sum(life.num_prompt_tokens for life in batch)
        prefill = end + max(1, -(-prompts // budget) if budget else 1)
        last = prefill + max(0, max(len(life.token_steps) for life in batch) - 1)
        for slot, life in enumerate(batch):
            done = prefill + max(0, len(life.token_steps) - 1)
            runs = ((PREFILL, end + 1, prefill), (DECODE, prefill + 1, done), (DONE, done + 1, last))
            bars += [Bar(slot, life.number, life.rid, did, a, b) for did, a, b in runs if a <= b]
        end = last
    return Batching("static", num_slots, tokens, sorted(bars, key=lambda bar: (bar.first, bar.slot)))


class BatchComposition(SteppedView):
    """The same requests in static batches and as the engine ran them: slots by step, idle ones hatched.

    Args:
        recording: the run. What static batching would have done is computed from it: see `static_batching`.
        num_slots: requests in a static batch, and slots of both charts; by default the most that the engine had in its
            batch at once.
        step: the step to open at.

    Raises:
        ConfigError: num_slots is not from 1 to 64, or fewer than the engine used.
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
        self.recording = recording = recording_of(recording)
        used = 1 + max((bar.slot for bar in continuous_batching(recording, 1).bars), default=0)
        num_slots = used if num_slots is None else num_slots
        if (
            isinstance(num_slots, bool)
            or not isinstance(num_slots, int)
            or not used <= num_slots <= MAX_SLOTS
        ):
            raise ConfigError(
                f"num_slots={num_slots!r}: it must be an integer from {used}, which this run used, to {MAX_SLOTS}."
            )
        self.num_slots = num_slots
        super().__init__(title, [recording], step)

    def read(self) -> tuple[int, int]:
        """Both ways to batch."""
        self.static = static_batching(self.recording, self.num_slots)
        self.continuous = continuous_batching(self.recording, self.num_slots)
        last = max(self.static.last, self.continuous.last, self.recording.last_step)
        return self.recording.first_step, last

    def sheet(self, step: int, width: int) -> Sheet:
        """Both charts over one axis of steps."""
        both = (self.static, self.continuous)
        sheet = Sheet(width, self._words(step))
        sheet.notes = [f"{batching.how}: {batching.words()}" for batching in both]
        sheet.notes += [f"{b.how} slots at step {step}: {_seats(b.at(step)) or 'all empty'}" for b in both]
        sheet.notes.append("static batches are computed from the recording's prompt and output lengths")
        lanes = {bar.number for batching in both for bar in batching.bars}
        sheet.add([PATTERNS, f"<defs>{textures(lanes)}</defs>"], 0)
        sheet.add(*heading(self.title, sheet.words, width))
        sheet.height += 8
        first = self.first_step + 1
        steps = max(1, self.last_step - first + 1)
        scale = Scale(first, first + steps - 1, GUTTER, min(28.0, (width - GUTTER - 14) / steps))
        names = ("Static batching (computed)", "Continuous batching (the recording)")
        for batching, name in zip(both, names, strict=True):
            self._chart(sheet, batching, name, scale, step)
        sheet.add(_legend(width), 60 if width < 640 else 36)
        return sheet

    def _words(self, step: int) -> str:
        counts = [
            f"{batching.how} {sum(bar.did in COMPUTING for bar in batching.at(step))}"
            for batching in (self.static, self.continuous)
        ]
        return f"step {step}: slots computing, of {self.num_slots}: {', '.join(counts)}"

    def _chart(self, sheet: Sheet, batching: Batching, name: str, scale: Scale, step: int) -> None:
        row = max(5, min(20, 240 // self.num_slots))
        sheet.add(*heading(name, batching.words(), sheet.width))
        top, high = sheet.height + 4, row * self.num_slots
        back = []
        for bar in self._empty(batching):
            box = (scale.x(bar.first), bar.slot * row, scale.x(bar.last + 1) - scale.x(bar.first), row - 1)
            back.append(rect("pi-free", *box) + hatched("idle", *box))
        labels = [
            text(GUTTER - 8, s * row + row / 2 + 4, f"slot {s}", SMALL, "end")
            for s in range(0, self.num_slots, 1 if row >= 13 else -(-14 // row))
        ]
        sheet.add([*labels, *back, *(_bar(bar, scale, row) for bar in batching.bars)], high + 4)
        if step >= scale.first:
            sheet.over(top - 4, [cursor(scale, step, high)])
        sheet.add(step_axis(scale, 14), 40)

    def _empty(self, batching: Batching) -> Iterable[Bar]:
        """The steps in which a slot holds nobody, as bars."""
        for slot in range(self.num_slots):
            at = batching.first
            for bar in [b for b in batching.bars if b.slot == slot]:
                if bar.first > at:
                    yield Bar(slot, -1, "", "", at, bar.first - 1)
                at = bar.last + 1
            if at <= batching.last:
                yield Bar(slot, -1, "", "", at, batching.last)


def _seats(bars: Sequence[Bar]) -> str:
    return ", ".join(f"{bar.slot} {bar.rid} {bar.did}" for bar in bars)


def _bar(bar: Bar, scale: Scale, row: int) -> str:
    """A bar with its name, and what it is where the mouse rests."""
    x, w, high = scale.x(bar.first), scale.x(bar.last + 1) - scale.x(bar.first), row - 1
    y, colour = bar.slot * row, colour_of(bar.number)
    words = f"{bar.rid} {bar.did}, steps {bar.first} to {bar.last}, slot {bar.slot}"
    if bar.did in (DONE, STALL):
        tone, hatch = ("pi-page pi-s-alarm", "lost") if bar.did == DONE else ("pi-page pi-s-muted", "idle")
        body = rect(tone, x, y + 0.5, w, high - 1, 0, 'stroke-width=".75"') + hatched(hatch, x, y, w, high)
        return f"<g><title>{escape(words)}</title>{body}</g>"
    body = rect(f"pi-c{colour}", x, y, w, high)
    if texture := texture_of(bar.number):
        body += rect("", x, y, w, high, 0, f'fill="url(#pi-x{colour}-{texture})"')
    if bar.did != DECODE:
        body += rect("pi-ink", x, y, w, max(2, high / 5))
    if high >= 13 and w >= 7 * len(bar.rid) + 6 and bar.did == DECODE:
        body += text(x + w / 2, y + high / 2 + 4, bar.rid, f"pi-o{colour} pi-small pi-strong", "middle")
    return f"<g><title>{escape(words)}</title>{body}</g>"


def _legend(width: float) -> list[str]:
    box = (0, -11, 20, 13)
    marks = {
        "decode": rect("pi-c0", *box),
        "prefill or recompute": rect("pi-c0", *box) + rect("pi-ink", 0, -11, 20, 3),
        "ended, waits for the batch's longest": rect("pi-page pi-s-alarm", *box) + hatched("lost", *box),
        "empty slot": rect("pi-free", *box) + hatched("idle", *box),
    }
    x, y, out = 0.0, 14.0, []
    for name, mark in marks.items():
        wide = 44 + 5.8 * len(name)
        if x and x + wide > width:
            x, y = 0.0, y + 22
        out += [translate(x, y, mark), text(x + 28, y, name, SMALL)]
        x += wide
    return out
