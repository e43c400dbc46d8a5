"""What two runs differ in, from their states alone: the first difference, the blocks, the requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State

__all__ = ["BlockUse", "blocks_of", "difference_of", "divergence_of", "request_lines"]

BlockUse = tuple[tuple[tuple[str, int], ...], int]
"""Owners of a block as (request, logical block), and the tokens written in it."""


def difference_of(first: State, second: State, names: Sequence[str]) -> str:
    """What two states at the end of a step differ in, in a sentence; "" if they are the same to a viewer.

    Told is what a run did and the other did not (preempted, resumed, admitted, ended), else the first difference in
    what was scheduled, in the queues, in the block tables or in the tokens.
    """
    deeds = {"preempts": "preempted", "resumes": "resumed", "admits": "admitted", "ends": "finished"}
    for verb, attribute in deeds.items():
        ours, theirs = getattr(first.last, attribute), getattr(second.last, attribute)
        for i, (mine, other) in enumerate(((ours, theirs), (theirs, ours))):
            if rid := next((rid for rid in mine if rid not in other), ""):
                why = (first, second)[i].last.causes.get(rid, "")
                return f"{names[i]} {verb} {rid}{f' ({why})' if why else ''}, {names[1 - i]} does not"
    for rid in [*first.last.scheduled, *second.last.scheduled]:
        a, b = first.last.scheduled.get(rid, 0), second.last.scheduled.get(rid, 0)
        if a != b:
            return f"{names[0]} computes {a} token{'' if a == 1 else 's'} of {rid}, {names[1]} {b}"
    for queue in ("running", "waiting"):
        if getattr(first, queue) != getattr(second, queue):
            who = [", ".join(getattr(state, queue)[:6]) or "nobody" for state in (first, second)]
            return f"{queue}: {who[0]} in {names[0]}, {who[1]} in {names[1]}"
    for rid, request in first.requests.items():
        if request.block_table != (table := second.requests[rid].block_table):
            return (
                f"{rid} holds blocks {_ids(request.block_table)} in {names[0]}, {_ids(table)} in {names[1]}"
            )
        if request.num_tokens != (count := second.requests[rid].num_tokens):
            return f"{rid} has {request.num_tokens} tokens in {names[0]}, {count} in {names[1]}"
    return ""


def _ids(table: Sequence[int]) -> str:
    return (" ".join(map(str, table[:8])) + (" …" if len(table) > 8 else "")) or "none"


def divergence_of(first: Recording, second: Recording, names: Sequence[str]) -> tuple[int, str] | None:
    """(step, sentence) of the first difference of two runs, None if there is none."""
    states = zip_longest(first.states(), second.states())
    for step, (ours, theirs) in enumerate(states, first.first_step):
        if ours is None or theirs is None:
            ended, other = names if ours is None else (names[1], names[0])
            return step, f"{ended} has ended, {other} goes on"
        if words := difference_of(ours, theirs, names):
            return step, words
    return None


def blocks_of(state: State) -> dict[int, BlockUse]:
    """The blocks in use."""
    found = {}
    fills = {rid: state.fill(rid) for rid in state.requests}
    for block_id, owners in state.owners().items():
        fill = max(max(0, fills[rid][logical]) for rid, logical in owners)
        found[block_id] = (tuple(sorted(owners)), fill)
    return found


def request_lines(states: Sequence[State], names: Sequence[str]) -> list[str]:
    """A line for each live request that is not the same in both runs."""
    lines = []
    for rid in [*states[0].requests, *(rid for rid in states[1].requests if rid not in states[0].requests)]:
        said = [_request_words(state, rid) for state in states]
        if said[0] != said[1]:
            lines.append(f"{rid}: {names[0]}: {said[0]}; {names[1]}: {said[1]}")
    return lines


def _request_words(state: State, rid: str) -> str:
    request = state.requests.get(rid)
    if request is None:
        return f"ended ({state.finished[rid][0]})" if rid in state.finished else "not there"
    why = state.last.reasons.get(rid, "") if request.status != "running" else ""
    words = f"{request.status}, {request.num_computed_tokens} of {request.num_tokens} tokens, "
    return words + f"{len(request.block_table)} blocks" + (f" ({why})" if why else "")
