"""The address space of a pool at a step: who holds which stretch of blocks, and the holes between them."""

from __future__ import annotations

from dataclasses import dataclass

from pagedinfer.trace.events import Compact, Move
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State
from pagedinfer.views.marks import block_names, runs_of, share

__all__ = ["Extent", "Layout", "external_fragmentation", "is_contiguous", "layout_of"]


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive physical blocks that hold consecutive logical blocks of one request; `tokens` are written in them."""

    rid: str
    part: int
    first: int
    count: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The address space at the end of a step.

    Attributes:
        extents, holes: what is allocated, by request, and what is free: (first block, blocks), by address.
        moves: (request, (from, to) of each block) in this step. causes: why, and who waits why.
    """

    num_blocks: int
    block_size: int
    contiguous: bool
    extents: list[Extent]
    holes: list[tuple[int, int]]
    moves: list[tuple[str, tuple[tuple[int, int], ...]]]
    causes: list[str]

    @property
    def free(self) -> int:
        """Free blocks."""
        return sum(count for _, count in self.holes)

    @property
    def largest_hole(self) -> tuple[int, int]:
        """First block and blocks of the largest hole, the lowest of equal ones; (0, 0) when nothing is free."""
        return max(self.holes, key=lambda hole: (hole[1], -hole[0]), default=(0, 0))

    @property
    def largest(self) -> int:
        """Blocks of the largest hole."""
        return self.largest_hole[1]

    @property
    def fragmentation(self) -> float:
        """External fragmentation: 1 - largest hole / free blocks; 0 when nothing is free."""
        return 1 - self.largest / self.free if self.free else 0.0

    @property
    def unwritten(self) -> int:
        """Token slots that are allocated and hold no token."""
        return sum(extent.count * self.block_size - extent.tokens for extent in self.extents)

    def words(self) -> str:
        """The numbers in one line."""
        used = self.num_blocks - self.free
        holes = f"{len(self.holes)} hole{'' if len(self.holes) == 1 else 's'}"
        words = f"{used} of {self.num_blocks} blocks in use, {self.unwritten} token slots of them empty; "
        words += f"{self.free} free in {holes}, largest {self.largest}; " if self.free else "nothing free; "
        if not self.contiguous:
            return words + "no external fragmentation: any free block will do"
        return words + f"external fragmentation {share(self.fragmentation, 1)}"


def external_fragmentation(state: State) -> float:
    """1 - largest hole / free blocks of a state; 0 when nothing is free."""
    holes = [count for _, count in _holes(state)]
    return 1 - max(holes) / sum(holes) if holes else 0.0


def is_contiguous(recording: Recording) -> bool:
    """Whether a request's blocks are neighbours in this run, by its `allocator` setting."""
    return bool(recording.config.get("allocator", "paged") != "paged")


def layout_of(recording: Recording, step: int, state: State | None = None) -> Layout:
    """The address space of a recording at the end of a step; `state` is that step's, where somebody has it."""
    state = state or recording.at(step)
    moves, causes = [], []
    for event in recording.step_events(step) if not state.last.cancelled else ():
        if isinstance(event, Move):
            moves.append((event.rid, event.pairs))
            causes.append(
                f"{event.rid} moved to blocks {block_names(to for _, to in event.pairs)}: {event.why}"
            )
        elif isinstance(event, Compact):
            causes.append(f"compaction: {event.why}")
    waits = [(rid, why) for rid, why in state.last.reasons.items() if rid in state.waiting]
    causes += [f"{rid} waits: {why}" for rid, why in waits]
    sizes = state.num_blocks, state.block_size, is_contiguous(recording)
    return Layout(*sizes, _extents(state), _holes(state), moves, causes)


def _holes(state: State) -> list[tuple[int, int]]:
    return runs_of(block_id for block_id in range(state.num_blocks) if block_id not in state.ref_counts)


def _extents(state: State) -> list[Extent]:
    """By address; a block that several requests share belongs to the one that came first."""
    found: list[Extent] = []
    taken: set[int] = set()
    for rid in sorted(state.requests, key=lambda rid: state.requests[rid].arrival):
        fill, part = state.fill(rid), 0
        for table in state.requests[rid].tables():
            fills = {
                block_id: fill[i]
                for i, block_id in enumerate(table)
                if block_id >= 0 and block_id not in taken
            }
            taken.update(fills)
            for first, count in runs_of(fills):
                tokens = sum(max(0, fills[block_id]) for block_id in range(first, first + count))
                found.append(Extent(rid, part, first, count, tokens))
                part += 1
    return sorted(found, key=lambda extent: extent.first)
