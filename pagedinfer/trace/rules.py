"""The rule book: for each kind of event, what it changes in a `State`, and how to take that back.

A rule gets the state and the event, and returns the inverse when the event may be part of an open plan. Together
the rules say what every event means; folding them gives the engine's own snapshot. Those of requests and plans are
here, those of memory in `trace.memory_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pagedinfer.trace import events as ev
from pagedinfer.trace.memory_rules import MEMORY_RULES, Inverse

if TYPE_CHECKING:
    from pagedinfer.trace.replay import State

__all__ = ["RULES", "Inverse"]


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
    state.holders = {rid for rid, request in state.requests.items() if any(request.tables())}
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
    state.holders.discard(event.rid)
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


RULES: dict[str, Callable[[State, Any], Inverse | None]] = {
    "keyframe": _keyframe, "submit": _submit, "fork": _fork, "finish": _finish,
    "step": _step, "commit": _commit, "cancel": _cancel,
    "admit": _admit, "resume": _admit, "hit": _hit, "preempt": _preempt,
    **MEMORY_RULES,
}  # fmt: skip
