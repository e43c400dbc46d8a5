"""The pool: which physical blocks are free, how often each is held, and what the free ones still hold.

Between the free queue and the block tables: it knows blocks and reference counts and no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pagedinfer.errors import count, describe_error
from pagedinfer.memory.free_queue import FreeQueue
from pagedinfer.memory.journal import Journal
from pagedinfer.memory.keys import BlockKey
from pagedinfer.memory.prefix import PINNED, PrefixCache
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus

__all__ = ["BlockPool", "EvictionRule"]

EvictionRule = Callable[[Sequence[int]], int]
"""Given cached blocks that nobody uses, least recently used first, the one to evict."""


class BlockPool:
    """Free and cached blocks with their reference counts. Each change records its inverse while a plan is made.

    Attributes:
        num_blocks: physical blocks.
        cache: the prefix cache.
        journal: where inverses go; None outside a plan.
        overwritten: blocks that the plan being made hands out though a cancel would want their contents back.
        eviction: chooses among the idle blocks of the lowest retention priority; None: the least recently used.
    """

    def __init__(
        self, num_blocks: int, block_size: int, windows: Sequence[int | None], bus: EventBus
    ) -> None:
        self.num_blocks = num_blocks
        self.cache = PrefixCache(block_size, windows)
        self.journal: Journal | None = None
        self.eviction: EvictionRule | None = None
        self._bus = bus
        self._free = FreeQueue(num_blocks)
        self._ref_counts = [0] * num_blocks
        self.overwritten: list[int] = []
        self._given_up: set[int] = set()  # freed since the plan began
        self._num_pinned = 0  # pinned blocks that nobody holds: in the free queue, not to be handed out

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out: nobody holds them, cached or not."""
        return len(self._free) - self._num_pinned

    @property
    def num_unused(self) -> int:
        """Blocks that nobody holds, pinned ones among them."""
        return len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold this block."""
        return self._ref_counts[block_id]

    def is_for_hire(self, block_id: int) -> bool:
        """Whether `num_free` counts this block."""
        return block_id in self._free and self.cache.lane(block_id) != 1 + PINNED

    def is_shared(self, block_id: int) -> bool:
        """Whether others read this block, or may come to: it must not be written."""
        return self._ref_counts[block_id] > 1 or block_id in self.cache.keys

    # -- changes ------------------------------------------------------------------------------------------------

    def pop(self, needed: int, for_whom: str) -> list[int]:
        """Take the next free blocks, one holder each; what they held is evicted. They are there, says the caller."""
        evicted, new = [], []
        for _ in range(needed):
            block_id, lane = self._free.first()
            if lane and self.eviction is not None:
                block_id = self._choose(self.eviction, list(self._free.lane(lane)))
            place = self._free.remove(block_id)
            self._ref_counts[block_id] = 1
            if self.journal is not None:
                self.journal.record(partial(self._unpop, block_id, place, lane))
            if lane or block_id in self._given_up:
                self.overwritten.append(block_id)
            if lane:
                evicted.append(block_id)
                self._forget(block_id, f"evicted in step {self._bus.step}")
            new.append(block_id)
        if evicted and self._bus.subs:
            self._bus.emit(ev.Evict(tuple(evicted), f"{for_whom} needs {count(needed, 'block')}"))
        return new

    def _choose(self, eviction: EvictionRule, idle: list[int]) -> int:
        """Ask the rule; the least recently used block goes when it raises, or names none of them."""
        try:
            chosen = eviction(tuple(idle))
            if chosen in idle:
                return idle[idle.index(chosen)]
            wrong = f"chose {chosen!r:.60}, which is no idle cached block"
        except Exception as error:
            wrong = describe_error(error)
        if self._bus.subs:
            name = getattr(eviction, "__name__", type(eviction).__name__)
            self._bus.emit(ev.Error("eviction", f"{name}: {wrong}; the least recently used block goes"))
        return idle[0]

    # A request may end, unjournaled, while a plan is open: what is taken back then goes by how things stand.

    def _unpop(self, block_id: int, place: int, lane: int) -> None:
        self._ref_counts[block_id] = 0
        if self.cache.lane(block_id) == lane:
            self._free.restore(block_id, place)
        else:  # another block has been published under its key
            self._free.push_back(block_id)

    def _forget(self, block_id: int, why: str) -> None:
        known = self.cache.forget(block_id, why, self.num_blocks)
        if self.journal is not None:
            self.journal.record(lambda: self.cache.recall(block_id, *known))

    def take(self, block_id: int) -> None:
        """One more holder; a cached block that nobody held leaves the free queue."""
        place = None
        if not self._ref_counts[block_id]:
            place = self._free.remove(block_id)
            self._num_pinned -= self.cache.lane(block_id) == 1 + PINNED
        self._ref_counts[block_id] += 1
        if self.journal is not None:
            self.journal.record(lambda: self._untake(block_id, place))

    def _untake(self, block_id: int, place: int | None) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id]:
            return
        lane = self.cache.lane(block_id)
        if place is not None:
            self._free.restore(block_id, place)
        else:  # who held it then has ended
            self._free.push_back(block_id, lane)
        self._num_pinned += lane == 1 + PINNED

    def drop(self, block_id: int) -> bool:
        """One holder less. The last one puts the block into the free queue; returns whether it was the last."""
        self._ref_counts[block_id] -= 1
        freed = not self._ref_counts[block_id]
        if freed:
            lane = self.cache.lane(block_id) if self.cache.keys else 0
            self._free.push_back(block_id, lane)
            self._num_pinned += lane == 1 + PINNED
        if self.journal is not None:
            self._given_up.add(block_id)
            self.journal.record(partial(self._undrop, block_id))
        return freed

    def take_overwritten(self) -> list[int]:
        """`overwritten` of the plan that has been made; the next one begins."""
        overwritten, self.overwritten = self.overwritten, []
        self._given_up.clear()
        return overwritten

    def _undrop(self, block_id: int) -> None:
        if block_id in self._free:
            self._free.remove(block_id)
            self._num_pinned -= self.cache.lane(block_id) == 1 + PINNED
        self._ref_counts[block_id] += 1

    def put_first(self, block_id: int) -> None:
        """The only holder gives back a block without content; it is taken again first. Never while a plan is made."""
        assert self.journal is None and self._ref_counts[block_id] == 1 and block_id not in self.cache.keys
        self._ref_counts[block_id] = 0
        self._free.push_front(block_id)

    # -- what the cache keeps, and for how long -------------------------------------------------------------------

    def publish(self, block_id: int, group: int, key: BlockKey) -> bool:
        """What the block holds may be shared from now on; False when another block holds the same already."""
        return self.cache.add(block_id, group, key)

    def retain(self, block_ids: Sequence[int], priority: int, until: float) -> None:
        """Give cached blocks that somebody holds another retention priority; it ends for the last of them first."""
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id], f"block {block_id} is in a lane of the free queue"
            self.cache.retain(block_id, priority, until)
        if block_ids and self._bus.subs:
            self._bus.emit(ev.Retain(tuple(block_ids), priority, until))

    def expire(self, now: float) -> None:
        """Retention that has run out by `now` ends."""
        self._release(self.cache.take_expired(now))

    def release_pins(self) -> bool:
        """Make pinned blocks ordinary ones: otherwise nobody could run. Returns whether there were any."""
        idle = list(self._free.lane(1 + PINNED))  # in the order of their last use, chains from the tail
        pinned = [b for b, (priority, _) in self.cache.retained.items() if priority == PINNED]
        pinned = idle + [b for b in pinned if self._ref_counts[b]]
        self._release(pinned)
        return bool(pinned)

    def _release(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            known, place = self.cache.retained.pop(block_id), None
            if block_id in self._free:
                place = self._free.remove(block_id)
                self._num_pinned -= known[0] == PINNED
                self._free.push_back(block_id, self.cache.lane(block_id))
            if self.journal is not None:
                self.journal.record(partial(self._unrelease, block_id, known, place))
        if block_ids and self._bus.subs:
            self._bus.emit(ev.Expire(tuple(block_ids)))

    def _unrelease(self, block_id: int, known: tuple[int, float], place: int | None) -> None:
        is_free = block_id in self._free
        if is_free:
            self._free.remove(block_id)
        self.cache.retain(block_id, *known)
        if not is_free:
            return
        if place is not None:
            self._free.restore(block_id, place)
        else:  # who held it then has ended
            self._free.push_back(block_id, self.cache.lane(block_id))
        self._num_pinned += known[0] == PINNED

    def reset(self, why: str) -> bool:
        """Forget everything cached. Refused (False) while any block is held: its reader may share it."""
        if len(self._free) < self.num_blocks:
            return False
        cached = sorted(self.cache.keys)
        for block_id in cached:
            self._free.remove(block_id)
            self.cache.forget(block_id, f"dropped in step {self._bus.step} ({why})", self.num_blocks)
            self._free.push_back(block_id)
        self._num_pinned = 0
        if self._bus.subs:
            self._bus.emit(ev.Reset(tuple(cached), why))
        return True

    # -- another size -------------------------------------------------------------------------------------------

    def plan_resize(self, num_blocks: int) -> list[tuple[int, int]]:
        """(from, to) for each held block of the part that would go away; free blocks of the rest take them."""
        held = [b for b in range(num_blocks, self.num_blocks) if self._ref_counts[b]]
        room = [b for b in range(min(num_blocks, self.num_blocks)) if b in self._free]
        room.sort(key=lambda b: (b in self.cache.keys, b))  # blocks without content first
        return list(zip(held, room, strict=False))

    def resize(self, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Take the moves and the new size. What is cached in blocks that go away is evicted."""
        lost = [to for _, to in moves if to in self.cache.keys]
        lost += [b for b in range(num_blocks, self.num_blocks) if b in self.cache.keys and b in self._free]
        for block_id in lost:
            self._free.remove(block_id)
            self._num_pinned -= self.cache.lane(block_id) == 1 + PINNED
            self.cache.forget(block_id, f"evicted in step {self._bus.step}", self.num_blocks)
            self._free.push_back(block_id)
        if lost and self._bus.subs:
            self._bus.emit(ev.Evict(tuple(lost), f"the pool shrinks to {num_blocks} blocks"))
        for source, to in moves:
            self._free.remove(to)
            self._ref_counts[to], self._ref_counts[source] = self._ref_counts[source], 0
            self.cache.move(source, to)
            self._free.push_back(source)
        self._free.resize(num_blocks)
        self._ref_counts[num_blocks:] = [0] * max(0, num_blocks - self.num_blocks)
        self.num_blocks = num_blocks

    # -- whole state --------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, object]:
        """Reference counts above 0, free blocks in order, cached blocks with their keys, idle ones by priority."""
        return {
            "ref_counts": {str(i): count for i, count in enumerate(self._ref_counts) if count},
            "free": list(self._free.lane(0)),
            "idle": {str(lane - 1): blocks for lane, blocks in self._free.lanes().items()},
            "cached": {str(b): [group, key.id] for b, (group, key) in sorted(self.cache.keys.items())},
            "retained": {str(b): list(how) for b, how in sorted(self.cache.retained.items())},
        }

    def check(self) -> None:
        """Assert that a block is free or held, never both, and stands in the lane of what it holds. O(num_blocks)."""
        self._free.check()
        self.cache.check()
        for block_id, held in enumerate(self._ref_counts):
            assert (block_id in self._free) == (held == 0), f"block {block_id} is free and in use, or neither"
        lanes = {block_id: lane for lane, blocks in self._free.lanes().items() for block_id in blocks}
        for block_id in self._free:
            assert lanes.get(block_id, 0) == self.cache.lane(block_id), (
                f"block {block_id} is in the wrong lane"
            )
        pinned = sum(1 for lane in lanes.values() if lane == 1 + PINNED)
        assert pinned == self._num_pinned, f"{pinned} idle blocks are pinned, {self._num_pinned} counted"
