"""What the KV pool is used for: waste and its parts, fragmentation, sharing, and how long blocks stay.

Units: slots are places for one token in a block, shares go from 0 to 1, times are in steps. A slot that several
requests read counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from pagedinfer.trace import events as ev

__all__ = [
    "Residency",
    "Slots",
    "external_fragmentation",
    "free_extents",
    "residency",
    "slots_of",
]


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the allocated token slots are.

    Attributes:
        live: slots that hold a token.
        tail_slack: empty slots of blocks that hold some tokens.
        reserved: slots of blocks in a table that hold none yet (contiguous memory reserves ahead).
        cached_idle: slots of cached blocks that nobody uses.
        logical: tokens that requests hold, each counted for each of them.
        shared: live slots of blocks that several tables hold.
    """

    live: int = 0
    tail_slack: int = 0
    reserved: int = 0
    cached_idle: int = 0
    logical: int = 0
    shared: int = 0

    @property
    def allocated(self) -> int:
        """Slots of all blocks that are not plainly free."""
        return self.live + self.tail_slack + self.reserved + self.cached_idle

    @property
    def kv_waste(self) -> float:
        """1 - live / allocated; 0 for an empty pool. The three parts below add up to it."""
        return 1 - self.live / self.allocated if self.allocated else 0.0

    @property
    def tail_slack_share(self) -> float:
        """The part of `kv_waste` that is tail slack."""
        return self._share(self.tail_slack)

    @property
    def reserved_share(self) -> float:
        """The part of `kv_waste` that is reserved and unused."""
        return self._share(self.reserved)

    @property
    def cached_idle_share(self) -> float:
        """The part of `kv_waste` that is cached and idle: a later request may hit it."""
        return self._share(self.cached_idle)

    @property
    def sharing_ratio(self) -> float:
        """Logical tokens / live slots: above 1 with sharing, 1 without."""
        return self.logical / self.live if self.live else 1.0

    def _share(self, slots: int) -> float:
        return slots / self.allocated if self.allocated else 0.0


Holder = TypeVar("Holder")


def slots_of(
    tables: Mapping[Holder, Sequence[int]],
    written: Mapping[Holder, int],
    block_size: int,
    num_cached_idle: int = 0,
) -> Slots:
    """Count the slots of these block tables. O(blocks in tables).

    `written` says how many tokens of each request have keys and values. -1 in a table is a block that a sliding
    window has left. `num_cached_idle` blocks are cached and in no table.
    """
    fills: dict[int, int] = {}
    several: set[int] = set()
    logical = 0
    for rid, table in tables.items():
        for i, block_id in enumerate(table):
            if block_id >= 0:
                fill = min(block_size, max(0, written[rid] - i * block_size))
                if block_id in fills:
                    several.add(block_id)
                fills[block_id] = max(fill, fills.get(block_id, 0))
                logical += fill
    live, begun = sum(fills.values()), sum(1 for fill in fills.values() if fill)
    return Slots(
        live,
        begun * block_size - live,
        (len(fills) - begun) * block_size,
        num_cached_idle * block_size,
        logical,
        sum(fills[block_id] for block_id in several),
    )


# -- holes ------------------------------------------------------------------------------------------------------------


def free_extents(free: Iterable[int]) -> list[tuple[int, int]]:
    """Free block ids, in any order, as runs (first block, number of blocks) by address."""
    runs: list[tuple[int, int]] = []
    for block_id in sorted(free):
        start, length = runs[-1] if runs else (-1, 0)
        if length and start + length == block_id:
            runs[-1] = (start, length + 1)
        else:
            runs.append((block_id, 1))
    return runs


def external_fragmentation(holes: Iterable[tuple[int, int]]) -> float:
    """1 - largest hole / free space, 0 when nothing is free: how much of it no single request could get."""
    lengths = [length for _, length in holes]
    return 1 - max(lengths) / sum(lengths) if lengths else 0.0


# -- how long blocks stay ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Residency:
    """How long contents stay in blocks, in steps, one number per case.

    Attributes:
        life_times: from being handed out to losing the content (freed and not cached, or evicted).
        idle_before_eviction: from the last use to the eviction: what the cache kept in vain at the end.
        reuse_gaps: from the last use to the next hit: how long a cached block had to be kept to be of use.
    """

    life_times: list[int] = field(default_factory=list)
    idle_before_eviction: list[int] = field(default_factory=list)
    reuse_gaps: list[int] = field(default_factory=list)


def residency(events: Iterable[ev.Event]) -> Residency:
    """Residency of every block in a recording. What belongs to cancelled plans does not count.

    A cached block is idle from the `free`, `trim` or `slide` that names it; one left by a copy-on-write is not noticed.
    """
    found = Residency()
    born: dict[int, int] = {}  # block -> the step in which it was handed out
    idle: dict[int, int] = {}  # cached block that nobody uses -> the step of its last use
    cached: set[int] = set()

    def lose(block_id: int, step: int) -> None:
        cached.discard(block_id)
        if block_id in idle:
            found.idle_before_eviction.append(step - idle.pop(block_id))
        if block_id in born:
            found.life_times.append(step - born.pop(block_id))

    for event in _kept(events):
        step = event.step
        if isinstance(event, ev.Alloc):
            born.update(dict.fromkeys(event.pblks, step))
        elif isinstance(event, ev.Copy):
            born.update((to, step) for _, to in event.pairs)
        elif isinstance(event, ev.Move):
            gone = [born.pop(source, None) for source, _ in event.pairs]
            born.update({to: at for (_, to), at in zip(event.pairs, gone, strict=True) if at is not None})
        elif isinstance(event, ev.Cache):
            cached.update(event.pblks)
        elif isinstance(event, ev.Share):
            found.reuse_gaps += [step - idle.pop(b) for b in event.pblks if b in idle]
        elif isinstance(event, ev.Free | ev.Trim | ev.Slide):
            for block_id in event.pblks:
                if block_id in cached:
                    idle[block_id] = step
                else:
                    lose(block_id, step)
        elif isinstance(event, ev.Evict | ev.Reset):
            for block_id in event.pblks:
                lose(block_id, step)
    return found


_OUTSIDE = (ev.Submit, ev.Reject, ev.Abort, ev.Fork, ev.Finish, ev.Error, ev.Cache, ev.Trim)
"""Kinds that no plan brings with it: a cancel does not take them back."""


def _kept(events: Iterable[ev.Event]) -> list[ev.Event]:
    """The events without those that a cancelled plan brought with it."""
    kept: list[ev.Event | None] = []
    open_plans: list[list[int]] = []  # for each open plan, where its events are
    for event in events:
        if isinstance(event, ev.Step):
            open_plans.append([])
        elif isinstance(event, ev.Commit):
            del open_plans[:1]
        elif isinstance(event, ev.Cancel):
            for where in open_plans.pop() if open_plans else ():
                kept[where] = None
        elif open_plans and not isinstance(event, _OUTSIDE) and getattr(event, "why", "") != "finish":
            open_plans[-1].append(len(kept))
        kept.append(event)
    return [event for event in kept if event is not None]
