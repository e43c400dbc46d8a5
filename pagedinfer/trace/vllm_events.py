"""A recording from what a vLLM server leaves behind, so that the views and tables serve a production engine too.

What the lines say is kept: which blocks entered and left the prefix cache and when, and each request's arrival, first
token, end and counts. What they do not say is filled in by the plainest assumption:

- vLLM's KV-cache events name no physical block: a stored block takes the lowest block id that is free. They name no
  request either: each `BlockStored` becomes a request of its own, "store 1" and so on, that writes its blocks and ends.
- Spans know no steps: time is cut into steps of equal length (by default the shortest mean gap between two tokens of a
  request, so that a step holds about a token of each), idle ones left out. Prefill is spread evenly from admission to
  the first token, output from there to the end. Spans name no blocks: their requests hold none.

The recording can be folded, shown and exported; it cannot be re-run, for it is of another engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from pagedinfer.errors import ConfigError, RecordingError, count
from pagedinfer.trace import events as ev
from pagedinfer.trace.foreign_cache import ForeignCache, Run
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.schema import MAX_NUM_BLOCKS
from pagedinfer.trace.vllm_lines import Batch, Cleared, Lines, Removed, RequestSpan, Stored, read_lines

__all__ = ["from_vllm", "load_vllm"]

MAX_STEPS = 10_000
"""Steps are made longer rather than more than this."""

QUEUED = "in vLLM's queue; its spans say how long, not why"
WRITTEN = "its blocks are written; KV-cache events do not say which request they belong to"


def load_vllm(*paths: str | PathLike[str], **options: Any) -> Recording:
    """The recording that files of KV-cache events and of spans tell of together; options as for `from_vllm`.

    Raises:
        RecordingError: a file cannot be read, or a line of it is neither.
    """
    lines = Lines()
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise RecordingError(f"Cannot read {path}: {error.strerror or error}.") from error
        read_lines(text.split("\n"), str(path), lines)
    return from_vllm(lines, **options)


def from_vllm(
    lines: Lines | Iterable[str],
    *,
    num_blocks: int | None = None,
    seconds_per_step: float | None = None,
    rank: int | None = None,
) -> Recording:
    """The recording that JSON lines of KV-cache events and of spans tell of.

    Args:
        lines: the lines, or what `read_lines` made of them.
        num_blocks: blocks of the pool; by default as many as were ever cached at once.
        seconds_per_step: length of a step, for spans.
        rank: which data-parallel engine's KV-cache events to take; needed when there are several.

    Raises:
        RecordingError: the lines tell of nothing, or of something that a recording cannot hold.
        ConfigError: an option is out of its range.
    """
    if seconds_per_step is not None and not seconds_per_step > 0:
        raise ConfigError(f"seconds_per_step={seconds_per_step!r}: it must be above 0.")
    found = lines if isinstance(lines, Lines) else read_lines(lines)
    batches, spans = _one_rank(found.batches, rank), sorted(found.spans, key=lambda span: span.arrival)
    if not batches and not spans:
        raise RecordingError("These lines hold neither KV-cache events nor spans of requests.")
    skipped = Counter[str]()
    origin = min([*(batch.ts for batch in batches), *(span.arrival for span in spans)])
    writer = _Writer(ForeignCache(skipped), origin)
    if spans:
        _write_windows(writer, spans, batches, seconds_per_step or _step_length(spans))
    else:
        for batch in batches:
            writer.batch(batch)
    if found.num_other_spans:
        skipped["spans that are no request"] = found.num_other_spans
    return writer.recording(num_blocks, dict(skipped), next((s.model for s in spans if s.model), "vLLM"))


def _one_rank(batches: Sequence[Batch], rank: int | None) -> list[Batch]:
    ranks = sorted({batch.rank for batch in batches})
    if rank is None and len(ranks) > 1:
        raise RecordingError(f"The KV-cache events come from the engines {ranks}; choose one with rank=.")
    return sorted((b for b in batches if rank in (None, b.rank)), key=lambda batch: batch.ts)


# -- time in steps ------------------------------------------------------------------------------------------------


def _step_length(spans: Sequence[RequestSpan]) -> float:
    """Seconds: the shortest mean gap between tokens, or what cuts the time in which anybody is there into MAX_STEPS."""
    gaps = [(s.end - s.first_token) / (s.num_output_tokens - 1) for s in spans if s.num_output_tokens > 1]
    busy, until = 0.0, spans[0].arrival
    for span in spans:  # in order of arrival
        busy += max(0.0, span.end - max(until, span.arrival))
        until = max(until, span.end)
    return max(min(filter(None, gaps), default=busy), busy / MAX_STEPS) or 1.0


@dataclass(slots=True)
class _Progress:
    """A span in numbers of windows, and how far the recording has taken it. `computed` and `produced` count tokens."""

    span: RequestSpan
    rid: str
    arrival: int
    admitted: int
    first_token: int
    end: int
    computed: int = 0
    produced: int = 0

    def targets(self, window: int) -> tuple[int, int]:
        """Tokens computed and produced by the end of a window."""
        prompt, output = self.span.num_prompt_tokens, self.span.num_output_tokens
        if window < self.first_token:
            return prompt * (window - self.admitted + 1) // (self.first_token - self.admitted + 1), 0
        if window < self.end:
            output = min(
                output, 1 + (output - 1) * (window - self.first_token) // (self.end - self.first_token)
            )
        return prompt + max(0, output - 1), output


def _write_windows(
    writer: _Writer, spans: Sequence[RequestSpan], batches: Sequence[Batch], length: float
) -> None:
    """A step for each stretch of `length` seconds in which a request is there or the cache changes."""

    def window_of(at: float) -> int:
        return int((at - writer.origin) // length)

    here: dict[int, list[Batch]] = {}
    for batch in batches:
        here.setdefault(window_of(batch.ts), []).append(batch)
    coming = [
        _Progress(span, rid, *map(window_of, (span.arrival, span.admitted, span.first_token, span.end)))
        for span, rid in zip(spans, _own_ids(spans), strict=True)
    ]
    windows = set(here).union(*(range(p.arrival, p.end + 1) for p in coming))
    coming.reverse()
    live: list[_Progress] = []
    for window in sorted(windows):
        at = writer.origin + window * length
        while coming and coming[-1].arrival <= window:
            live.append(coming.pop())
            writer.submit(live[-1])
        writer.window(window, at, at + length, live, here.get(window, ()))
        live = [progress for progress in live if progress.end > window]


def _own_ids(spans: Sequence[RequestSpan]) -> Iterator[str]:
    """An id for each span: its own, with a number behind it where several requests say the same (`n` above 1)."""
    seen = Counter[str]()
    for span in spans:
        seen[span.rid] += 1
        yield span.rid if seen[span.rid] == 1 else f"{span.rid} #{seen[span.rid]}"


@dataclass(slots=True)
class _Change:
    """What happens to the cache in one plan: first losses and resets (`before`), then evictions, then stores.

    `stored` holds (tokens, blocks) of each `BlockStored`.
    """

    t: float
    before: list[ev.Event] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    stored: list[tuple[int, list[Run]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.before or self.evicted or self.stored)


# -- writing ------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes events in the order in which an engine says them. Times are seconds since the epoch."""

    def __init__(self, cache: ForeignCache, origin: float) -> None:
        self.origin = origin
        self._cache = cache
        self._events: list[ev.Event] = []
        self._step = self._num_stores = 0
        self._seq: int | None = None
        self._waiting: dict[str, None] = {}

    def _emit(self, event: ev.Event, t: float) -> None:
        event.seq, event.step, event.t = len(self._events), self._step, t
        self._events.append(event)

    def submit(self, progress: _Progress) -> None:
        """A request of a span comes."""
        span = progress.span
        now = span.arrival - self.origin
        self._emit(ev.Submit(progress.rid, span.num_prompt_tokens, span.max_tokens, 0, now), span.arrival)
        self._waiting[progress.rid] = None

    def batch(self, batch: Batch) -> None:
        """A step for each change of the cache that a batch tells of."""
        for change in self._changes(batch):
            self._write(change.t, change.t, change)

    def window(
        self, window: int, at: float, until: float, live: Sequence[_Progress], batches: Sequence[Batch]
    ) -> None:
        """The step of a window. The cache's last change in it is part of that step; each one before has its own."""
        changes = [change for batch in batches for change in self._changes(batch)]
        last = changes.pop() if changes else _Change(at)
        for change in changes:
            self._write(change.t, change.t, change)
        self._write(last.t, until, last, live, window)

    def _changes(self, batch: Batch) -> list[_Change]:
        changes, change = [], _Change(batch.ts)
        if self._seq is not None and batch.seq is not None and batch.seq > self._seq + 1:
            change.before.append(ev.Gap(batch.seq - self._seq - 1))
        self._seq = batch.seq if batch.seq is not None else self._seq
        for event in batch.events:
            if not isinstance(event, Cleared) and not self._cache.takes(event):
                continue
            late = change.stored and not isinstance(event, Stored)  # an order that one plan cannot have
            if late or (change.evicted and isinstance(event, Cleared)):
                changes.append(change)
                change = _Change(batch.ts)
            match event:
                case Cleared():
                    change.before.append(
                        ev.Reset(tuple(self._cache.clear()), "vLLM emptied its prefix cache")
                    )
                case Stored():
                    change.stored.append((len(event.hashes) * event.block_size, self._cache.store(event)))
                case Removed():
                    change.evicted += self._cache.remove(event)
        return [*changes, change] if change else changes

    def _write(
        self, at: float, until: float, change: _Change, live: Sequence[_Progress] = (), window: int = 0
    ) -> None:
        """One step: its plan (evictions, writers' blocks, admissions), its result, what is cached, who ends."""
        for event in change.before:
            self._emit(event, at)
        stores = self._submit_stores(change, at)
        work, tokens = _progress(live, window)
        scheduled = {rid: n for rid, n, _ in stores} | work
        self._step += 1
        head = next((rid for rid in self._waiting if rid not in work), None)
        reasons = {} if head is None else {head: QUEUED}
        budget = sum(scheduled.values())
        self._emit(ev.Step(self._step, at - self.origin, budget, scheduled, reasons), at)
        if change.evicted:
            self._emit(ev.Evict(tuple(change.evicted), "vLLM removed them from its cache"), at)
        for rid, _, runs in stores:
            pblks = tuple(block_id for run in runs for block_id in run.pblks)
            if pblks:
                self._emit(ev.Alloc(rid, 0, 0, pblks), at)
            self._emit(ev.Admit(rid, f"stores {count(len(pblks), 'block')}"), at)
        for rid in work:
            if rid in self._waiting:
                del self._waiting[rid]
                self._emit(ev.Admit(rid, "vLLM took it out of its queue"), at)
        self._emit(ev.Commit(tokens), until)
        self._end_stores(stores, until)
        for progress in live:
            if progress.end == window:
                self._waiting.pop(progress.rid, None)
                self._emit(ev.Finish(progress.rid, progress.span.why, progress.span.detail), until)

    def _submit_stores(self, change: _Change, at: float) -> list[tuple[str, int, list[Run]]]:
        """A request for each `BlockStored`: its id, its tokens, its blocks."""
        stores = []
        for num_tokens, runs in change.stored:
            self._num_stores += 1
            stores.append((f"store {self._num_stores}", num_tokens, runs))
            self._emit(ev.Submit(stores[-1][0], num_tokens, 1, 0, at - self.origin), at)
        return stores

    def _end_stores(self, stores: Sequence[tuple[str, int, list[Run]]], until: float) -> None:
        for rid, _, runs in stores:
            for run in runs:
                self._emit(ev.Cache(rid, tuple(run.pblks), tuple(run.keys), run.parent), until)
        for rid, _, runs in stores:
            pblks = [block_id for run in runs for block_id in run.pblks]
            if pblks:
                self._emit(ev.Free(rid, tuple(reversed(pblks)), "finish"), until)
            self._emit(ev.Finish(rid, "stop", WRITTEN), until)

    def recording(self, num_blocks: int | None, skipped: dict[str, int], model: str) -> Recording:
        """What was written, behind a `meta` event."""
        peak = self._cache.peak
        if num_blocks is not None and num_blocks < peak:
            raise ConfigError(
                f"num_blocks={num_blocks}: {peak} blocks were cached at once; give at least that."
            )
        if max(peak, num_blocks or 1) > MAX_NUM_BLOCKS:
            raise RecordingError(
                f"{peak} blocks were cached at once; a recording holds {MAX_NUM_BLOCKS} at most."
            )
        config = {"num_blocks": num_blocks or max(1, peak), "block_size": self._cache.block_size or 16}
        meta = ev.Meta(ev.SCHEMA, config, {"model": model, "imported_from": "vLLM", "skipped": skipped})
        meta.step = 0
        return Recording([meta, *self._events])


def _progress(live: Sequence[_Progress], window: int) -> tuple[dict[str, int], dict[str, int]]:
    """Take the requests to the end of a window: tokens computed and tokens produced in it, for those with any."""
    work: dict[str, int] = {}
    tokens: dict[str, int] = {}
    for progress in live:
        if progress.admitted > window:
            continue
        computed, produced = progress.targets(window)
        if computed > progress.computed:
            work[progress.rid] = computed - progress.computed
        if produced > progress.produced:
            tokens[progress.rid] = produced - progress.produced
        progress.computed, progress.produced = max(computed, progress.computed), produced
    return work, tokens
