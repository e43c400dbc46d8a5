"""What two runs differ in, from their states alone: the first difference, the blocks, the requests."""

from __future__ import annotations

from collections.abc import Sequence

from pagedinfer.errors import count
from pagedinfer.trace.differences import Facts, amount_apart, deed_apart, ended_apart, not_ended, quoted
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State
from pagedinfer.views.walk import Walk

__all__ = ["BlockUse", "Lockstep", "blocks_of", "difference_of", "request_lines"]

BlockUse = tuple[tuple[tuple[str, int], ...], int]
"""Owners of a block as (request, logical block), and the tokens written in it."""

DEEDS = {"preempts": "preempted", "resumes": "resumed", "admits": "admitted", "ends": "finished"}
"""What a run can do to a request and the other not -> where its state has it."""


def difference_of(first: State, second: State, names: Sequence[str]) -> str:
    """What two states at the end of a step differ in, in a sentence; "" if they are the same to a viewer.

    Told is what a run did and the other did not (preempted, resumed, admitted, ended), else the first difference in
    what was scheduled, in the queues, in the block tables or in the tokens.
    """
    reasons = first.last.reasons, second.last.reasons
    for verb, attribute in DEEDS.items():
        ours, theirs = getattr(first.last, attribute), getattr(second.last, attribute)
        if ours != theirs:
            facts = _causes(first, ours), _causes(second, theirs)
            if said := deed_apart(verb, facts, names, reasons):
                return said
    scheduled = first.last.scheduled, second.last.scheduled
    if said := amount_apart("computes", "of", "token", scheduled, names, reasons):
        return said
    one, two = map(quoted, names)
    for queue in ("running", "waiting", "swapped"):
        if getattr(first, queue) != getattr(second, queue):
            who = [", ".join(getattr(state, queue)[:6]) or "nobody" for state in (first, second)]
            return f"{queue}: {who[0]} in {one}, {who[1]} in {two}"
    for rid, request in first.requests.items():
        if request.block_table != (table := second.requests[rid].block_table):
            start = _same(request.block_table, table)
            held = [_ids(ids, start) for ids in (request.block_table, table)]
            return f"{rid} holds blocks {held[0]} in {one}, {held[1]} in {two}"
        if request.num_tokens != (number := second.requests[rid].num_tokens):
            return f"{rid} has {count(request.num_tokens, 'token')} in {one}, {number} in {two}"
    return ""


def _causes(state: State, rids: Sequence[str]) -> Facts:
    return {rid: state.last.causes.get(rid, "") for rid in rids}


def _same(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids are the same from the start."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _ids(table: Sequence[int], start: int) -> str:
    """The block ids from logical block `start` on."""
    ids = " ".join(map(str, table[start : start + 8])) + (" …" if len(table) > start + 8 else "")
    return f"… {ids or 'and no more'}" if start else ids or "none"


class Lockstep:
    """Two runs step by step, also while they grow.

    Attributes:
        last: the last step that both have. states: of both at its end; not to be changed.
        differs: for each step from the first to `last`, whether the runs differ at its end.
        divergence: (step, sentence) of the first difference, None if there is none. Where the shorter run has nobody
            left, it has ended, and what the other does from then on is a difference, too.
    """

    def __init__(self, first: Recording, second: Recording, names: Sequence[str]) -> None:
        self._runs, self._names, self._walk = (first, second), names, Walk(first, second)
        self.differs: list[bool] = []
        self.divergence: tuple[int, str] | None = None
        self._parted: tuple[int, str] | None = None

    def read(self) -> None:
        """Go along with the recordings."""
        start = self._walk.step
        del self.differs[start - self._runs[0].first_step :]
        if self._parted is not None and self._parted[0] >= start:
            self._parted = None
        for step, states in self._walk.news():
            words = difference_of(states[0], states[1], self._names)
            self.differs.append(bool(words))
            if words and self._parted is None:
                self._parted = step, words
        self.last, self.states = step, self._walk.newest
        self.divergence = self._parted
        if self.divergence is None and (ended := self.ended) is not None:
            self.divergence = step + 1, ended_apart(self._names[ended], self._names[1 - ended])

    @property
    def shorter(self) -> int | None:
        """Which run, 0 or 1, has fewer steps; None where they have the same."""
        first, second = (run.last_step for run in self._runs)
        return None if first == second else int(second < first)

    @property
    def ended(self) -> int | None:
        """Which run has fewer steps and nobody left."""
        shorter = self.shorter
        return None if shorter is None or self.states[shorter].requests else shorter

    @property
    def unended(self) -> str:
        """That the run with fewer steps has not ended, in a sentence; "" where it has or there is none."""
        shorter = self.shorter
        return "" if shorter is None or self.ended is not None else not_ended(self._names[shorter], self.last)

    def differ(self, step: int) -> bool:
        """Whether the runs differ at the end of a step."""
        return self.ended is not None if step > self.last else self.differs[step - self._runs[0].first_step]


def blocks_of(state: State) -> dict[int, BlockUse]:
    """The blocks in use."""
    found = {}
    fills = {rid: state.fill(rid) for rid in state.requests}
    for block_id, owners in state.owners().items():
        fill = max(max(0, fills[rid][logical]) for rid, logical in owners)
        found[block_id] = (tuple(sorted(owners)), fill)
    return found


def request_lines(states: Sequence[State], names: Sequence[str]) -> dict[str, str]:
    """A line for each live request that is not the same in both runs."""
    lines = {}
    for rid in [*states[0].requests, *(rid for rid in states[1].requests if rid not in states[0].requests)]:
        said = [_request_words(state, rid) for state in states]
        if said[0] != said[1]:
            lines[rid] = f"{rid}: {names[0]}: {said[0]}; {names[1]}: {said[1]}"
    return lines


def _request_words(state: State, rid: str) -> str:
    request = state.requests.get(rid)
    if request is None:
        return f"ended ({state.finished[rid][0]})" if rid in state.finished else "not there"
    why = state.last.reasons.get(rid, "") if request.status != "running" else ""
    words = f"{request.status}, {request.num_computed_tokens} of {request.num_tokens} tokens, "
    return words + count(len(request.block_table), "block") + (f" ({why})" if why else "")
