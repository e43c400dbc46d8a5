"""What the prefix cache holds, folded from a recording's events: cached blocks, hits, last use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from pagedinfer.trace import events as ev
from pagedinfer.trace.metrics import kept_events
from pagedinfer.trace.recording import Recording
from pagedinfer.views.marks import block_names
from pagedinfer.views.walk import is_told

__all__ = ["CachedPrefix", "PrefixCache", "PrefixCaches", "prefix_caches"]

KEPT_STEPS = 64
"""Every so many steps a folded cache is kept, so that going back is quick."""


@dataclass(slots=True)
class CachedPrefix:
    """One cached block: the tokens that `key` stands for, after those of `parent` (-1: at the start of a prompt).

    Attributes:
        published, used: steps in which it was cached, and last cached or hit. hits: lookups that took it.
        priority: how long it stays: 0 goes first, 101 is pinned; None where nobody said.
    """

    key: int
    parent: int
    block_id: int
    published: int
    used: int
    hits: int = 0
    priority: int | None = None


@dataclass(slots=True)
class PrefixCache:
    """The prefix cache at the end of a step, folded from its events. Of several groups of layers it is the first one's.

    Attributes:
        prefixes: cached blocks by key, in order of publication.
        lookups, hits: requests that asked when they were first admitted, and those of them that found something.
        num_cached_tokens, asked_tokens: what they found, of the tokens of their prompts; the engine's
            `prefix_hit_rate`. (Who comes back after a preemption asks again, often for its own blocks; that is no hit.)
        causes: what happened in this step: hits and evictions, in words.
    """

    block_size: int = 1
    step: int = 0
    prefixes: dict[int, CachedPrefix] = field(default_factory=dict)
    lookups: int = 0
    hits: int = 0
    num_cached_tokens: int = 0
    asked_tokens: int = 0
    causes: list[str] = field(default_factory=list)
    _keys: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _new: dict[str, int] = field(default_factory=dict)  # prompt lengths of those that were not admitted yet
    _admitted: list[str] = field(default_factory=list)  # since the last commit
    _seen: set[int] = field(default_factory=set)  # keys that were cached once
    _at: dict[int, int] = field(default_factory=dict)  # block -> key

    def copy(self) -> PrefixCache:
        """An independent one."""
        prefixes = {key: replace(prefix) for key, prefix in self.prefixes.items()}
        return replace(
            self, prefixes=prefixes, causes=list(self.causes), _keys=dict(self._keys), _new=dict(self._new),
            _admitted=list(self._admitted), _seen=set(self._seen), _at=dict(self._at),
        )  # fmt: skip

    def begin(self, step: int) -> None:
        """Open a step."""
        self.step, self.causes = step, []

    def apply(self, event: ev.Event) -> None:
        """Take in an event; those of cancelled plans must not come here."""
        match event:
            case ev.Meta():
                self.block_size = int(event.config.get("block_size", 1))
            case ev.Submit():
                self._keys[event.rid], self._new[event.rid] = tuple(event.keys), event.num_prompt_tokens
            case ev.Fork():
                self._keys[event.rid] = tuple(event.keys)
            case ev.Admit():
                self._admitted.append(event.rid)
            case ev.Commit():
                while self._admitted:  # who has not asked by now shares a prompt, and never will
                    self._new.pop(self._admitted.pop(), None)
                for rid, keys in event.keys.items():
                    self._keys[rid] = (*self._keys.get(rid, ()), *keys)
            case ev.Cache() if event.group == 0:
                self._publish(event)
            case ev.Hit():
                self._hit(event)
            case ev.Evict() | ev.Reset():
                gone = [block_id for block_id in event.pblks if self._drop(block_id)]
                if gone:
                    what = "evicted" if isinstance(event, ev.Evict) else "emptied"
                    self.causes.append(
                        f"{what}: block{'s'[: len(gone) > 1]} {block_names(gone)}: {event.why}"
                    )
            case ev.Move():
                moved = {to: self._at.pop(old) for old, to in event.pairs if old in self._at}
                for block_id, key in moved.items():
                    self._at[block_id], self.prefixes[key].block_id = key, block_id
            case ev.Retain() | ev.Expire():
                for block_id in event.pblks:
                    if block_id in self._at:
                        kept = event.priority if isinstance(event, ev.Retain) else None
                        self.prefixes[self._at[block_id]].priority = kept

    def _publish(self, event: ev.Cache) -> None:
        chain, parent = self._keys.get(event.rid, ()), event.parent
        before = dict(zip(chain[1:], chain, strict=False))  # blocks between may be cached as another's
        for block_id, key in zip(event.pblks, event.keys, strict=True):
            parent = before.get(key, parent)
            self._seen.add(key)
            if (known := self.prefixes.get(key)) is not None:
                self._at.pop(known.block_id, None)
                known.block_id, known.used = block_id, self.step
            else:
                self.prefixes[key] = CachedPrefix(key, parent, block_id, self.step, self.step)
            self._at[block_id], parent = key, key

    def _hit(self, event: ev.Hit) -> None:
        if (asked := self._new.pop(event.rid, None)) is not None:
            self.lookups += 1
            self.hits += event.n > 0
            self.asked_tokens += asked
            self.num_cached_tokens += event.n
        if not event.n:
            return
        for key in self._keys.get(event.rid, ())[: -(-event.n // self.block_size)]:
            if key in self.prefixes:
                self.prefixes[key].hits += 1
                self.prefixes[key].used = self.step
        self.causes.append(
            f"{event.rid} found {event.n} cached tokens{f' and computes the rest: {event.why}' if event.why else ''}"
        )

    def _drop(self, block_id: int) -> bool:
        key = self._at.pop(block_id, None)
        return key is not None and self.prefixes.pop(key, None) is not None

    def is_orphan(self, prefix: CachedPrefix) -> bool:
        """Whether what came before it was cached and is no more: no lookup finds it until that is back."""
        return prefix.parent in self._seen and prefix.parent not in self.prefixes

    def children(self) -> dict[int, list[CachedPrefix]]:
        """Parent key -> those after it. A prefix whose parent is gone stands under -1 with those that start prompts."""
        found: dict[int, list[CachedPrefix]] = {}
        for prefix in self.prefixes.values():
            found.setdefault(prefix.parent if prefix.parent in self.prefixes else -1, []).append(prefix)
        return found


class PrefixCaches:
    """The cache at the end of any step of a recording, also while it grows."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._now: PrefixCache | None = None
        self._kept: dict[int, PrefixCache] = {}

    def forget(self) -> None:
        """The recording has grown: what was folded last may have been half told."""
        self._now = None

    def at(self, step: int) -> PrefixCache:
        """The cache at a step: read it before you ask for another. Asking for later steps in turn is quick."""
        first, last = self._recording.first_step, self._recording.last_step
        if self._now is None or self._now.step > step:
            known = max((s for s in self._kept if s <= step), default=None)
            self._now = PrefixCache(step=first - 1) if known is None else self._kept[known].copy()
        for number in range(self._now.step + 1, step + 1):
            events = self._recording.step_events(number)
            self._now.begin(number)
            for event in kept_events(events):
                self._now.apply(event)
            if number % KEPT_STEPS == 0 and number < last and is_told(events) and number not in self._kept:
                self._kept[number] = self._now.copy()
        return self._now


def prefix_caches(recording: Recording) -> Iterator[PrefixCache]:
    """The cache at the end of every step in turn: one object that changes, so read it before going on."""
    caches = PrefixCaches(recording)
    for step in range(recording.first_step, recording.last_step + 1):
        yield caches.at(step)
