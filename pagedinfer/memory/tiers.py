"""Tiers: places beside the pool where the blocks of a swapped request wait. Bookkeeping only, no tensors.

A tier has slots of one block each. While a plan is made, a swap-in frees the slots that it reads, but nobody may
overwrite them before the plan is committed: cancelled, it must find them as they were. So slots freed under a
journal are *released* first, and `settle`, called by the commit, makes them free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from pagedinfer.memory.journal import Journal

__all__ = ["HostTier", "Tier"]


class Tier(Protocol):
    """Slots for blocks outside the pool. Every method either does all of its work or changes nothing.

    While `journal` is set each change records its inverse there.
    """

    name: str
    num_slots: int
    journal: Journal | None

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can hand out now."""
        ...

    def allocate(self, num_slots: int) -> tuple[int, ...] | None:
        """Take `num_slots` slots; None when fewer are free. Asking for none gives an empty tuple."""
        ...

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. With a journal they stay out of reach until `settle(journal)`."""
        ...

    def settle(self, journal: Journal) -> None:
        """The plan with this journal was committed: what it freed may be handed out."""
        ...

    def snapshot(self) -> dict[str, object]:
        """The whole state as plain data."""
        ...

    def check(self) -> None:
        """Assert every invariant."""
        ...


class HostTier:
    """Implements `Tier`: slots in the host's memory, first freed, first handed out. It may have none at all.

    Attributes:
        name: "host".
        num_slots: slots of one block each.
        journal: where inverses of changes go while a plan is being made; None outside.
    """

    name = "host"

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.journal: Journal | None = None
        self._free = deque(range(num_slots))
        self._used: set[int] = set()
        self._released: dict[Journal, list[int]] = {}  # by the plan that freed them

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can hand out now."""
        return len(self._free)

    def allocate(self, num_slots: int) -> tuple[int, ...] | None:
        """Take `num_slots` slots; None when fewer are free. Asking for none gives an empty tuple."""
        if num_slots > len(self._free):
            return None
        slots = tuple(self._free.popleft() for _ in range(num_slots))
        self._used.update(slots)
        if self.journal is not None:
            self.journal.record(lambda: self._unallocate(slots))
        return slots

    def free(self, slots: Sequence[int]) -> None:
        """Give slots back. With a journal they stay out of reach until `settle(journal)`."""
        slots, journal = tuple(slots), self.journal
        assert len(set(slots)) == len(slots) and self._used.issuperset(slots), (
            f"host slots {slots} are freed, {sorted(self._used)} are used"
        )
        self._used.difference_update(slots)
        if journal is None:
            self._free.extend(slots)
        else:
            self._released.setdefault(journal, []).extend(slots)
            journal.record(lambda: self._unfree(slots, journal))

    def settle(self, journal: Journal) -> None:
        """The plan with this journal was committed: what it freed may be handed out."""
        self._free.extend(self._released.pop(journal, ()))

    def _unallocate(self, slots: tuple[int, ...]) -> None:
        self._used.difference_update(slots)
        self._free.extendleft(reversed(slots))

    def _unfree(self, slots: tuple[int, ...], journal: Journal) -> None:
        batch = self._released[journal]
        del batch[len(batch) - len(slots) :]
        if not batch:
            del self._released[journal]
        self._used.update(slots)

    def snapshot(self) -> dict[str, object]:
        """The free list in order, and the slots that wait for a commit, as plain data."""
        return {"free": list(self._free), "released": [s for batch in self._released.values() for s in batch]}

    def check(self) -> None:
        """Assert that each slot is free, released or used, and only one of these."""
        released = [slot for batch in self._released.values() for slot in batch]
        everywhere = sorted([*self._free, *released, *self._used])
        assert everywhere == list(range(self.num_slots)), (
            f"of {self.num_slots} host slots {list(self._free)} are free, {released} released and "
            f"{sorted(self._used)} used"
        )

    def __repr__(self) -> str:
        return f"HostTier({self.num_slots - self.num_free} of {self.num_slots} slots used)"
