"""The rule book: for each kind of event, what it changes in a `State`, and how to take that back.

A rule gets the state and the event, and returns the inverse when the event may be part of an open plan. Together
the rules say what every event means; folding them gives the engine's own snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pagedinfer.trace import events as ev

if TYPE_CHECKING:
    from pagedinfer.trace.replay import RequestState, State

__all__ = ["RULES", "Inverse"]

Inverse = Callable[[], object]


# -- whole states and requests -------------------------------------------------------------------------------------


def _keyframe(state: State, event: ev.Keyframe) -> None:
    data = event.snapshot
    state.step = data["step"]
    for name in ("waiting", "running", "swapped"):
        setattr(state, name, list(data.get(name, ())))
    others = data.get("group_tables", [])
    state.requests = {
        rid: state.new_request(rid, counts, data["block_tables"], others)
        for rid, counts in data["requests"].items()
    }
    state.host_tables = {rid: tuple(slots) for rid, slots in data.get("host_tables", {}).items()}
    state.host_free = list(data.get("host_free", ()))
    state.ref_counts = {int(block_id): count for block_id, count in data["ref_counts"].items()}
    state.set_pool(data)
    for name in ("num_submitted", "num_preemptions", "num_finished"):
        setattr(state, name, data[name])


def _submit(state: State, event: ev.Submit) -> None:
    counts = {"num_prompt_tokens": event.num_prompt_tokens, "max_tokens": event.max_tokens,
              "priority": event.priority, "tenant": event.tenant}  # fmt: skip
    _add(state, event.rid, {**counts, "num_tokens": event.num_prompt_tokens})


def _fork(state: State, event: ev.Fork) -> None:
    parent = state.requests[event.parent].counts()
    same = {name: parent[name] for name in ("num_prompt_tokens", "num_tokens", "priority", "tenant")}
    _add(state, event.rid, {**same, "max_tokens": event.max_tokens})


def _add(state: State, rid: str, counts: dict[str, Any]) -> None:
    if rid in state.requests:
        raise ValueError(f"{rid!r} is live already")
    state.requests[rid] = state.new_request(rid, {**counts, "arrival": state.num_submitted})
    state.finished.pop(rid, None)  # an id may be used again
    state.insert(state.waiting, rid)
    state.num_submitted += 1


def _finish(state: State, event: ev.Finish) -> None:
    request = state.requests[event.rid]
    queue = {"running": state.running, "swapped": state.swapped}.get(request.status, state.waiting)
    queue.remove(event.rid)
    if request.status == "swapped":
        state.host_free += state.host_tables.pop(event.rid)  # at once: an end is no part of an open plan
    del state.requests[event.rid]
    state.finished[event.rid] = (event.why, event.detail)
    state.num_finished += 1
    state.last.finished.append(event.rid)
    state.last.causes[event.rid] = f"{event.why}: {event.detail}"


# -- plans -----------------------------------------------------------------------------------------------------------


def _step(state: State, event: ev.Step) -> Inverse:
    state.step = event.i
    state.begin(event)
    state.open(event.i, event.scheduled)
    drafts = []
    for rid, n in event.scheduled.items():
        request = state.requests[rid]
        if n > 1 + request.num_draft_tokens or request.num_computed_tokens < request.num_prompt_tokens:
            state.last.prefill_tokens += n
        request.num_computed_tokens += n
        if request.num_draft_tokens:  # guesses beyond the chunk are dropped
            drafts.append((request, request.num_draft_tokens))
            request.num_draft_tokens = max(0, request.num_computed_tokens - request.num_tokens)

    def undo() -> None:
        for rid, n in event.scheduled.items():
            state.requests[rid].num_computed_tokens -= n
        for request, number in drafts:
            request.num_draft_tokens = number

    return undo


def _commit(state: State, event: ev.Commit) -> None:
    state.last.tokens = event.tokens
    scheduled = state.close()
    if strangers := event.tokens.keys() - scheduled.keys():
        raise ValueError(f"tokens for {', '.join(sorted(strangers))}, outside the plan")
    for rid in scheduled:
        request, new = state.requests[rid], event.tokens.get(rid, 0)
        if drafts := max(0, request.num_computed_tokens - request.num_tokens):
            rejected = drafts + 1 - new if new else drafts
            request.num_computed_tokens -= max(0, rejected)
            request.num_draft_tokens = 0
        if new:
            request.num_tokens += new
            request.num_draft_tokens = event.drafts.get(rid, 0)


def _cancel(state: State, event: ev.Cancel) -> None:
    state.step = state.take_back() - 1
    state.begin(None)
    state.last.cancelled, state.last.causes = True, {"": event.why}


def _admit(state: State, event: ev.Admit | ev.Resume) -> Inverse:
    request, was = state.requests[event.rid], state.requests[event.rid].status
    queue = state.swapped if was == "swapped" else state.waiting
    queue.remove(event.rid)
    state.insert(state.running, event.rid)
    request.status = "running"
    (state.last.resumed if was in ("preempted", "swapped") else state.last.admitted).append(event.rid)
    state.last.causes[event.rid] = event.why
    cached = request.num_cached_tokens
    if cached < 0:
        request.num_cached_tokens = 0

    def undo() -> None:
        state.running.remove(event.rid)
        state.insert(queue, event.rid)
        request.status, request.num_cached_tokens = was, cached

    return undo


def _hit(state: State, event: ev.Hit) -> Inverse:
    request = state.requests[event.rid]
    before = request.num_cached_tokens
    if before < 0:
        request.num_cached_tokens = event.n
    return lambda: setattr(request, "num_cached_tokens", before)


def _preempt(state: State, event: ev.Preempt) -> Inverse:
    request = state.requests[event.rid]
    before = request.num_computed_tokens, request.num_draft_tokens
    queue = state.swapped if event.mode == "swap" else state.waiting
    state.running.remove(event.rid)
    state.insert(queue, event.rid)
    request.status = "swapped" if event.mode == "swap" else "preempted"
    request.num_computed_tokens = before[0] if event.mode == "swap" else 0
    request.num_draft_tokens = 0
    request.num_preemptions += 1
    state.num_preemptions += 1
    state.last.preempted.append(event.rid)
    state.last.causes[event.rid] = event.why

    def undo() -> None:
        queue.remove(event.rid)
        state.insert(state.running, event.rid)
        request.status, (request.num_computed_tokens, request.num_draft_tokens) = "running", before
        request.num_preemptions -= 1
        state.num_preemptions -= 1

    return undo


# -- block tables ----------------------------------------------------------------------------------------------------


def _append(state: State, event: ev.Alloc | ev.Share, first: int) -> Inverse:
    request = state.requests[event.rid]
    table = _table(request, event.group)
    gone = first - len(table)  # blocks that a window has left before the shared ones
    places = [(block_id, state.take(block_id)) for block_id in event.pblks]
    table += [-1] * max(0, gone)
    table += event.pblks

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

    def undo() -> None:
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
        state.num_idle += len(undone)
        for block_id, (key, retained), place in reversed(undone):
            state.free.remove(block_id)
            if key in state.cached.values():  # another block has been published under its key
                state.free.push_back(block_id)
                continue
            state.free.restore(block_id, place)
            state.cached[block_id] = key
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


RULES: dict[str, Callable[[State, Any], Inverse | None]] = {
    "keyframe": _keyframe, "submit": _submit, "fork": _fork, "finish": _finish,
    "step": _step, "commit": _commit, "cancel": _cancel,
    "admit": _admit, "resume": _admit, "hit": _hit, "preempt": _preempt,
    "alloc": _alloc, "share": _share, "copy": _copy, "free": _free, "trim": _trim, "slide": _slide,
    "cache": _cache, "retain": _retain, "expire": _expire, "evict": _evict, "reset": _evict,
    "move": _move, "swap": _swap, "resize": _resize,
}  # fmt: skip
