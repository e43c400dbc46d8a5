"""The rule book's part on memory: block tables, reference counts, the free list, the prefix cache, host slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pagedinfer.trace import events as ev

if TYPE_CHECKING:
    from pagedinfer.trace.replay import RequestState, State

__all__ = ["MEMORY_RULES", "Inverse"]

Inverse = Callable[[], object]
"""Takes an event back whose plan was cancelled."""


# -- block tables ----------------------------------------------------------------------------------------------------


def _append(state: State, event: ev.Alloc | ev.Share, first: int) -> Inverse:
    request = state.requests[event.rid]
    table = _table(request, event.group)
    gone = first - len(table)  # blocks that a window has left before the shared ones
    places = [(block_id, state.take(block_id)) for block_id in event.pblks]
    table += [-1] * max(0, gone)
    table += event.pblks
    state.holders.add(event.rid)

    def undo() -> None:
        del table[len(table) - len(event.pblks) - max(0, gone) :]
        for block_id, place in reversed(places):
            state.untake(block_id, place)

    return undo


def _alloc(state: State, event: ev.Alloc) -> Inverse:
    table = _table(state.requests[event.rid], event.group)
    if event.first != len(table) and (table or event.first < 0):
        raise ValueError(f"the table of {event.rid} has {len(table)} blocks, not {event.first}")
    return _append(state, event, event.first)


def _share(state: State, event: ev.Share) -> Inverse:
    request = state.requests[event.rid]
    undo = _append(state, event, event.first)
    found = 0 if event.group else event.num_tokens  # each group has an event
    request.num_computed_tokens += found  # its step has counted the tokens to be computed already

    def both() -> None:
        request.num_computed_tokens -= found
        undo()

    return both


def _copy(state: State, event: ev.Copy) -> Inverse:
    ((old, new),) = event.pairs
    table, first = _table(state.requests[event.rid], event.group), event.first
    if table[first] != old:
        raise ValueError(f"logical block {first} of {event.rid} is {table[first]}, not {old}")
    place = state.take(new)
    table[first] = new
    state.drop(old)

    def undo() -> None:
        state.undrop(old)
        table[first] = old
        state.untake(new, place)

    return undo


def _free(state: State, event: ev.Free) -> Inverse | None:
    request = state.requests[event.rid]
    tables = request.tables()
    held = [block_id for table in tables for block_id in reversed(table) if block_id >= 0]
    freed = [block_id for block_id in held if state.drop(block_id)]
    if tuple(freed) != event.pblks:
        raise ValueError(f"{event.rid} frees {freed}, not {list(event.pblks)}")
    request.block_table, request.group_tables = [], [[] for _ in request.group_tables]
    state.holders.discard(event.rid)

    def undo() -> None:
        state.holders.add(event.rid)
        for block_id in reversed(held):
            state.undrop(block_id)
        request.block_table, request.group_tables = tables[0], tables[1:]

    # A request that ends while a plan is open does not come back when that plan is cancelled.
    return undo if event.why == "preempt" else None


def _trim(state: State, event: ev.Trim) -> None:
    table = _table(state.requests[event.rid], event.group)
    del table[len(table) - len(event.pblks) :]
    for block_id in reversed(event.pblks):
        state.let_go(block_id)
        state.free.push_front(block_id)


def _slide(state: State, event: ev.Slide) -> Inverse:
    table, first = _table(state.requests[event.rid], event.group), event.first
    table[first : first + len(event.pblks)] = [-1] * len(event.pblks)
    for block_id in event.pblks:
        state.drop(block_id)

    def undo() -> None:
        for block_id in reversed(event.pblks):
            state.undrop(block_id)
        table[first : first + len(event.pblks)] = event.pblks

    return undo


def _table(request: RequestState, group: int) -> list[int]:
    return request.block_table if not group else request.group_tables[group - 1]


# -- the prefix cache ------------------------------------------------------------------------------------------------


def _cache(state: State, event: ev.Cache) -> None:
    parent = event.parent
    for block_id, key in zip(event.pblks, event.keys, strict=True):
        state.num_idle += block_id not in state.cached and block_id not in state.ref_counts
        state.cached[block_id] = (event.group, key)
        state.parents[key] = parent
        parent = key


def _retain(state: State, event: ev.Retain) -> None:
    for block_id in event.pblks:
        state.retained[block_id] = (event.priority, event.until)


def _expire(state: State, event: ev.Expire) -> Inverse:
    undone = []
    for block_id in event.pblks:
        known, place = state.retained.pop(block_id), None
        if block_id in state.free:
            place = state.free.remove(block_id)
            state.free.push_back(block_id, state.lane(block_id))
        undone.append((block_id, known, place))

    def undo() -> None:
        for block_id, known, place in reversed(undone):
            state.retained[block_id] = known
            if block_id not in state.free:
                continue
            state.free.remove(block_id)
            if place is not None:
                state.free.restore(block_id, place)
            else:  # who held it then has ended
                state.free.push_back(block_id, state.lane(block_id))

    return undo


def _evict(state: State, event: ev.Evict) -> Inverse:
    undone = []
    for block_id in event.pblks:
        known = state.cached.pop(block_id), state.retained.pop(block_id, None)
        place = state.free.remove(block_id)
        state.free.push_back(block_id)
        undone.append((block_id, known, place))
    state.num_idle -= len(undone)

    def undo() -> None:
        for block_id, (key, retained), place in reversed(undone):
            state.free.remove(block_id)
            if key in state.cached.values():  # another block has been published under its key
                state.free.push_back(block_id)
                continue
            state.free.restore(block_id, place)
            state.cached[block_id] = key
            state.num_idle += 1
            if retained is not None:
                state.retained[block_id] = retained

    return undo


# -- other places ----------------------------------------------------------------------------------------------------


def _move(state: State, event: ev.Move) -> Inverse:
    table = _table(state.requests[event.rid], event.group)

    def put(pairs: list[tuple[int, int]]) -> None:
        to = dict(pairs)
        # A block that several tables hold has moved with the first of them.
        held = {source: state.ref_counts.pop(source) for source in to if source in state.ref_counts}
        kept = {b: (state.cached.pop(b, None), state.retained.pop(b, None)) for b in held}
        for source in held:
            state.free.push_back(source)
        for source, number in held.items():
            state.free.remove(to[source])
            state.ref_counts[to[source]] = number
            key, retained = kept[source]
            if key is not None:
                state.cached[to[source]] = key
            if retained is not None:
                state.retained[to[source]] = retained
        table[:] = [to.get(block_id, block_id) for block_id in table]

    put(list(event.pairs))
    return lambda: put([(to, source) for source, to in event.pairs])


def _swap(state: State, event: ev.Swap) -> Inverse:
    rid = event.rid
    if event.dir == "out":
        slots = tuple(slot for _, slot in event.pairs)
        before = list(state.host_free)
        state.host_free = [slot for slot in before if slot not in slots]
        state.host_tables[rid] = slots

        def undo() -> None:
            del state.host_tables[rid]
            state.host_free = [*slots, *state.host_free]

        return undo
    slots = state.host_tables.pop(rid)
    unrelease = state.release(slots)

    def undo_in() -> None:
        state.host_tables[rid] = slots
        if unrelease is not None:
            unrelease()

    return undo_in


def _resize(state: State, event: ev.Resize) -> None:
    state.free.resize(event.num_blocks)
    state.num_blocks = event.num_blocks


MEMORY_RULES: dict[str, Callable[[State, Any], Inverse | None]] = {
    "alloc": _alloc, "share": _share, "copy": _copy, "free": _free, "trim": _trim, "slide": _slide,
    "cache": _cache, "retain": _retain, "expire": _expire, "evict": _evict, "reset": _evict,
    "move": _move, "swap": _swap, "resize": _resize,
}  # fmt: skip
