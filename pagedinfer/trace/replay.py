"""Folding events into state: what the engine looked like at any point, from its events alone.

`State.apply` is the whole rule book. Folding a recording up to an event gives exactly what `Engine.snapshot()` gave
at that point (a property test compares them on random traffic), so a picture drawn from a `State` is a picture of
the engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pagedinfer.errors import RecordingError
from pagedinfer.trace import events as ev

__all__ = ["RequestState", "State", "fold"]

Inverse = Callable[[], object]


@dataclass(slots=True)
class RequestState:
    """One live request, as the events tell it. Counts as in `pagedinfer.engine.request.Request`."""

    rid: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    arrival: int
    status: str = "waiting"
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    block_table: list[int] = field(default_factory=list)

    def counts(self) -> dict[str, int | str]:
        """The counts as `Request.state()` gives them."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("rid", "block_table")}


@dataclass(slots=True)
class StepState:
    """What the newest plan did; reset by each step.

    Attributes:
        scheduled: tokens computed by request. prefill_tokens: those of them that are no decode: more than one at
            once, or part of the prompt. reasons: why others were left out.
        tokens: new tokens by request. admitted, resumed, preempted, finished: request ids.
        causes: for each request admitted, resumed, preempted or finished, the sentence why.
    """

    now: float = 0.0
    budget: int = 0
    scheduled: dict[str, int] = field(default_factory=dict)
    prefill_tokens: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    admitted: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)
    cancelled: bool = False


class State:
    """The engine's state after some event.

    Attributes:
        config: the engine's settings, from the recording's first event.
        step: number of the last plan.
        waiting, running: request ids in queue order.
        requests: live requests by id.
        ref_counts: block id -> number of tables that hold it, for blocks in use.
        free: free block ids, the next to be used first.
        finished: ended request -> (finish reason, sentence).
        last: what the newest step did.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        self.step = 0
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.requests: dict[str, RequestState] = {}
        self.ref_counts: dict[int, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self.num_submitted = self.num_preemptions = self.num_finished = 0
        self.finished: dict[str, tuple[str, str]] = {}
        self.last = StepState()
        self._open: list[tuple[int, list[Inverse]]] = []

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def has_open_plan(self) -> bool:
        """Whether a plan has been made and neither committed nor cancelled yet."""
        return bool(self._open)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return int(self.config.get("num_blocks", 0))

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.config.get("block_size", 1))

    def fill(self, rid: str) -> list[int]:
        """Tokens written in each of the request's blocks, in logical order."""
        request, size = self.requests[rid], self.block_size
        return [min(size, request.num_computed_tokens - i * size) for i in range(len(request.block_table))]

    def owners(self) -> dict[int, list[tuple[str, int]]]:
        """Block id -> (request id, logical block) of every table that holds it."""
        found: dict[int, list[tuple[str, int]]] = {}
        for rid, request in self.requests.items():
            for logical, block_id in enumerate(request.block_table):
                found.setdefault(block_id, []).append((rid, logical))
        return found

    def usage(self) -> dict[str, int | float]:
        """Where the pool's token slots are: live, tail slack, free; and `kv_usage`, `kv_waste` (shares, 0 to 1).

        KV waste = 1 - live slots / allocated slots: what is allocated and holds no token.
        """
        size, used = self.block_size, len(self.ref_counts)
        slots: dict[int, int] = {}
        for rid in self.requests:
            for block_id, tokens in zip(self.requests[rid].block_table, self.fill(rid), strict=True):
                slots[block_id] = max(tokens, slots.get(block_id, 0))
        live = sum(slots.values())
        return {
            "live_slots": live,
            "tail_slack_slots": used * size - live,
            "free_slots": len(self.free) * size,
            "kv_usage": used / self.num_blocks if self.num_blocks else 0.0,
            "kv_waste": 1 - live / (used * size) if used else 0.0,
        }

    def snapshot(self) -> dict[str, object]:
        """The state in the shape of `Engine.snapshot()`."""
        return {
            "step": self.step,
            "waiting": list(self.waiting),
            "running": list(self.running),
            "requests": {rid: request.counts() for rid, request in self.requests.items()},
            "num_submitted": self.num_submitted,
            "num_preemptions": self.num_preemptions,
            "num_finished": self.num_finished,
            "block_tables": {r.rid: list(r.block_table) for r in self.requests.values() if r.block_table},
            "ref_counts": {str(block_id): self.ref_counts[block_id] for block_id in sorted(self.ref_counts)},
            "free": list(self.free),
        }

    def copy(self) -> State:
        """An independent state, for going back quickly; only between plans."""
        assert not self._open, "a plan is open: its undo log belongs to this state"
        twin = State()
        for name, value in vars(self).items():
            if name == "requests":
                value = {rid: replace(r, block_table=list(r.block_table)) for rid, r in value.items()}
            elif name == "last":
                value = deepcopy(value)
            elif hasattr(value, "copy"):
                value = value.copy()
            setattr(twin, name, value)
        return twin

    # -- the rule book ------------------------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        """Change the state as `event` says. Kinds that say nothing about the state change nothing.

        Raises:
            RecordingError: the event does not fit what came before it; the state is then of no use.
        """
        rule: Callable[[Any], Inverse | None] | None = getattr(self, f"_on_{event.kind}", None)
        if rule is None:
            return
        try:
            inverse = rule(event)
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise RecordingError(
                f"event {event.seq} ({event.kind}) does not fit what came before it: {type(error).__name__} {error}"
            ) from error
        if inverse is not None and self._open:
            self._open[-1][1].append(inverse)

    def _on_meta(self, event: ev.Meta) -> None:
        self.__init__(event.config)  # type: ignore[misc]

    def _on_keyframe(self, event: ev.Keyframe) -> None:
        data = event.snapshot
        self.step, self.waiting, self.running = data["step"], list(data["waiting"]), list(data["running"])
        self.requests = {
            rid: RequestState(rid, **counts, block_table=list(data["block_tables"].get(rid, ())))
            for rid, counts in data["requests"].items()
        }
        self.ref_counts = {int(block_id): count for block_id, count in data["ref_counts"].items()}
        self.free = OrderedDict.fromkeys(data["free"])
        for name in ("num_submitted", "num_preemptions", "num_finished"):
            setattr(self, name, data[name])

    def _on_submit(self, event: ev.Submit) -> None:
        if event.rid in self.requests:
            raise ValueError(f"{event.rid!r} is live already")
        request = RequestState(
            event.rid, event.num_prompt_tokens, event.max_tokens, event.priority, self.num_submitted
        )
        request.num_tokens = event.num_prompt_tokens
        self.requests[event.rid] = request
        self.finished.pop(event.rid, None)  # an id may be used again
        self.waiting.append(event.rid)
        self.num_submitted += 1

    def _on_step(self, event: ev.Step) -> Inverse:
        self.step = event.i
        self.last = StepState(event.now, event.budget, event.scheduled, reasons=event.reasons)
        self._open.append((event.i, []))
        for rid, n in event.scheduled.items():
            request = self.requests[rid]
            if n > 1 or request.num_computed_tokens < request.num_prompt_tokens:
                self.last.prefill_tokens += n
            request.num_computed_tokens += n

        def undo() -> None:
            for rid, n in event.scheduled.items():
                self.requests[rid].num_computed_tokens -= n

        return undo

    def _on_admit(self, event: ev.Admit | ev.Resume) -> Inverse:
        request, was = self.requests[event.rid], self.requests[event.rid].status
        self.waiting.remove(event.rid)
        self._insert(self.running, event.rid)
        request.status = "running"
        (self.last.resumed if was == "preempted" else self.last.admitted).append(event.rid)
        self.last.causes[event.rid] = event.why

        def undo() -> None:
            self.running.remove(event.rid)
            self._insert(self.waiting, event.rid)
            request.status = was

        return undo

    _on_resume = _on_admit

    def _on_preempt(self, event: ev.Preempt) -> Inverse:
        request, computed = self.requests[event.rid], self.requests[event.rid].num_computed_tokens
        self.running.remove(event.rid)
        self._insert(self.waiting, event.rid)
        request.status, request.num_computed_tokens = "preempted", 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.last.preempted.append(event.rid)
        self.last.causes[event.rid] = event.why

        def undo() -> None:
            self.waiting.remove(event.rid)
            self._insert(self.running, event.rid)
            request.status, request.num_computed_tokens = "running", computed
            request.num_preemptions -= 1
            self.num_preemptions -= 1

        return undo

    def _on_alloc(self, event: ev.Alloc) -> Inverse:
        table = self.requests[event.rid].block_table
        for block_id in event.pblks:
            del self.free[block_id]
            self.ref_counts[block_id] = 1
        table.extend(event.pblks)

        def undo() -> None:
            for block_id in reversed(event.pblks):
                assert table.pop() == block_id
                del self.ref_counts[block_id]
                self.free[block_id] = None
                self.free.move_to_end(block_id, last=False)

        return undo

    def _on_free(self, event: ev.Free) -> Inverse | None:
        request = self.requests[event.rid]
        table = request.block_table
        for block_id in table:
            self.ref_counts[block_id] -= 1
            if not self.ref_counts[block_id]:
                del self.ref_counts[block_id]
        for block_id in event.pblks:
            self.free[block_id] = None
        request.block_table = []
        if event.why != "preempt":
            return None

        def undo() -> None:
            for block_id in event.pblks:
                del self.free[block_id]
            for block_id in table:
                self.ref_counts[block_id] = self.ref_counts.get(block_id, 0) + 1
            request.block_table = table

        return undo

    def _on_commit(self, event: ev.Commit) -> None:
        self._open.pop(0)
        self.last.tokens = event.tokens
        for rid, n in event.tokens.items():
            self.requests[rid].num_tokens += n

    def _on_cancel(self, event: ev.Cancel) -> None:
        step, inverses = self._open.pop()
        for inverse in reversed(inverses):
            inverse()
        self.step = step - 1
        self.last = StepState(self.last.now, self.last.budget, cancelled=True, causes={"": event.why})

    def _on_finish(self, event: ev.Finish) -> None:
        del self.requests[event.rid]
        (self.running if event.rid in self.running else self.waiting).remove(event.rid)
        self.finished[event.rid] = (event.why, event.detail)
        self.num_finished += 1
        self.last.finished.append(event.rid)
        self.last.causes[event.rid] = f"{event.why}: {event.detail}"

    def _insert(self, queue: list[str], rid: str) -> None:
        arrival = self.requests[rid].arrival
        later = (i for i, other in enumerate(queue) if self.requests[other].arrival > arrival)
        queue.insert(next(later, len(queue)), rid)

    def __repr__(self) -> str:
        used = len(self.ref_counts)
        return (
            f"State(step {self.step}: {len(self.running)} running, {len(self.waiting)} waiting, "
            f"{used} of {self.num_blocks} blocks used)"
        )


def fold(events: Iterable[ev.Event]) -> State:
    """The state after the last of `events`, which start with `meta`."""
    state = State()
    for event in events:
        state.apply(event)
    return state
