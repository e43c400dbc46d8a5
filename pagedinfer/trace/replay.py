"""Folding events into state: what the engine looked like at any point, from its events alone.

The rule book, one rule per kind of event, is `trace.rules`. Folding a recording up to an event gives exactly what
`Engine.snapshot()` gave at that point (a property test compares them on random traffic), so a picture drawn from a
`State` is a picture of the engine.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from pagedinfer.errors import RecordingError
from pagedinfer.memory.free_queue import FreeQueue
from pagedinfer.trace import events as ev
from pagedinfer.trace.rules import RULES, Inverse
from pagedinfer.trace.usage import usage

__all__ = ["RequestState", "State", "fold"]


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
    num_cached_tokens: int = -1
    num_draft_tokens: int = 0
    tenant: str = ""
    block_table: list[int] = field(default_factory=list)
    group_tables: list[list[int]] = field(default_factory=list)

    def counts(self) -> dict[str, int | str]:
        """The counts as `Request.state()` gives them."""
        tables = ("rid", "block_table", "group_tables")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in tables}

    def copy(self) -> RequestState:
        """An independent one."""
        tables = [list(table) for table in self.group_tables]
        return replace(self, block_table=list(self.block_table), group_tables=tables)

    def tables(self) -> list[list[int]]:
        """The block table of each group."""
        return [self.block_table, *self.group_tables]


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


@dataclass(slots=True)
class OpenState:
    """An open plan: how to take its events back, and the host slots that are free once it commits."""

    step: int
    scheduled: dict[str, int]
    inverses: list[Inverse] = field(default_factory=list)
    released: list[int] = field(default_factory=list)


class State:
    """The engine's state after some event.

    Attributes:
        config: the engine's settings, from the recording's first event.
        step: number of the last plan.
        num_blocks: blocks in the pool now.
        waiting, running, swapped: request ids by priority and arrival.
        requests: live requests by id.
        ref_counts: block id -> number of tables that hold it, for blocks in use.
        free: blocks that nobody holds, the next to be used first: those without content, then cached ones.
        cached: cached block -> (group, key id). parents: key id -> key id before it, of cached blocks.
        retained: cached block -> (priority, until) where it is not the default.
        num_shared: blocks that several tables hold. num_idle: cached blocks that none holds. holders: the requests
            that hold blocks, and perhaps some that have just given them back. Kept by the rules, so that `usage`
            need not look through the pool and the queues.
        host_tables: swapped request -> host slots. host_free: free host slots, the next to be used first.
        finished: ended request -> (finish reason, sentence).
        last: what the newest step did.
    """

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        self.num_blocks = int(self.config.get("num_blocks", 0))
        self.num_groups = len(self.config.get("group_windows", (None,)))
        self.step = 0
        self.waiting: list[str] = []
        self.running: list[str] = []
        self.swapped: list[str] = []
        self.host_tables: dict[str, tuple[int, ...]] = {}
        self.host_free: list[int] = list(range(self.config.get("num_host_blocks", 0)))
        self.requests: dict[str, RequestState] = {}
        self.ref_counts: dict[int, int] = {}
        self.free = FreeQueue(self.num_blocks)
        self.cached: dict[int, tuple[int, int]] = {}
        self.parents: dict[int, int] = {}
        self.retained: dict[int, tuple[int, float]] = {}
        self.num_shared = self.num_idle = 0
        self.holders: set[str] = set()
        self.num_submitted = self.num_preemptions = self.num_finished = 0
        self.finished: dict[str, tuple[str, str]] = {}
        self.last = StepState()
        self._open: list[OpenState] = []

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def has_open_plan(self) -> bool:
        """Whether a plan has been made and neither committed nor cancelled yet."""
        return bool(self._open)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return int(self.config.get("block_size", 1))

    def fill(self, rid: str) -> list[int]:
        """Tokens written in each of the request's blocks, in logical order; 0 in blocks that are only reserved."""
        request, size = self.requests[rid], self.block_size
        computed = request.num_computed_tokens
        return [max(0, min(size, computed - i * size)) for i in range(len(request.block_table))]

    def owners(self) -> dict[int, list[tuple[str, int]]]:
        """Block id -> (request id, logical block) of every table that holds it."""
        found: dict[int, list[tuple[str, int]]] = {}
        for rid, request in self.requests.items():
            for table in request.tables():
                for logical, block_id in enumerate(table):
                    if block_id >= 0:
                        found.setdefault(block_id, []).append((rid, logical))
        return found

    def usage(self) -> dict[str, int | float]:
        """Where the pool's token slots are, in tokens, and shares; see `trace.usage`."""
        return usage(self)

    def snapshot(self) -> dict[str, object]:
        """The state in the shape of `Engine.snapshot()`."""
        held = [r for r in self.requests.values() if r.block_table]
        groups = range(self.num_groups - 1)
        paged = self.config.get("allocator", "paged") == "paged"
        return {
            "step": self.step,
            "waiting": list(self.waiting),
            "running": list(self.running),
            "swapped": list(self.swapped),
            "host_tables": {rid: list(slots) for rid, slots in self.host_tables.items()},
            "host_free": list(self.host_free),
            "requests": {rid: request.counts() for rid, request in self.requests.items()},
            "num_submitted": self.num_submitted,
            "num_preemptions": self.num_preemptions,
            "num_finished": self.num_finished,
            "block_tables": {r.rid: list(r.block_table) for r in held},
            **(
                {"group_tables": [{r.rid: list(r.group_tables[g]) for r in held} for g in groups]}
                if groups
                else {}
            ),
            "ref_counts": {str(block_id): self.ref_counts[block_id] for block_id in sorted(self.ref_counts)},
            "free": list(self.free.lane(0)) if paged else sorted(self.free),
            **(self._cache_snapshot() if paged else {}),
        }

    def _cache_snapshot(self) -> dict[str, object]:
        return {
            "idle": {str(lane - 1): blocks for lane, blocks in self.free.lanes().items()},
            "cached": {str(block_id): list(self.cached[block_id]) for block_id in sorted(self.cached)},
            "retained": {str(block_id): list(self.retained[block_id]) for block_id in sorted(self.retained)},
        }

    def copy(self) -> State:
        """An independent state, for going back quickly; only between plans."""
        assert not self._open, "a plan is open: its undo log belongs to this state"
        twin = State()
        for name, value in vars(self).items():
            if name == "requests":
                value = {rid: r.copy() for rid, r in value.items()}
            elif name == "last":
                value = deepcopy(value)
            elif hasattr(value, "copy"):
                value = value.copy()
            setattr(twin, name, value)
        return twin

    # -- changing -----------------------------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        """Change the state as `event` says. Kinds that say nothing about the state change nothing.

        Raises:
            RecordingError: the event does not fit what came before it; the state is then of no use.
        """
        if isinstance(event, ev.Meta):
            self.__init__(event.config)  # type: ignore[misc]
            return
        rule = RULES.get(event.kind)
        if rule is None:
            return
        try:
            inverse = rule(self, event)
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise RecordingError(
                f"event {event.seq} ({event.kind}) does not fit what came before it: {type(error).__name__} {error}"
            ) from error
        if inverse is not None and self._open:
            self._open[-1].inverses.append(inverse)

    # -- what the rules are made of -----------------------------------------------------------------------------

    def begin(self, event: ev.Step | None) -> None:
        """What the newest step did starts empty; without an event its time and budget stay."""
        if event is None:
            self.last = StepState(self.last.now, self.last.budget)
        else:
            self.last = StepState(event.now, event.budget, event.scheduled, reasons=event.reasons)

    def open(self, step: int, scheduled: dict[str, int]) -> None:
        """A plan begins: what follows can be taken back until it closes."""
        self._open.append(OpenState(step, scheduled))

    def close(self) -> dict[str, int]:
        """The oldest open plan was committed. Returns its tokens by request."""
        opened = self._open.pop(0)
        self.host_free += opened.released
        return opened.scheduled

    def take_back(self) -> int:
        """The newest open plan was cancelled: undo it. Returns its step."""
        opened = self._open.pop()
        for inverse in reversed(opened.inverses):
            inverse()
        return opened.step

    def release(self, slots: tuple[int, ...]) -> Inverse | None:
        """Host slots are given back: at once, or when the open plan that reads them commits."""
        if not self._open:
            self.host_free += slots
            return None
        released = self._open[-1].released
        released += slots

        def undo() -> None:
            del released[len(released) - len(slots) :]

        return undo

    def new_request(
        self,
        rid: str,
        counts: dict[str, Any],
        tables: Mapping[str, Sequence[int]] = MappingProxyType({}),
        others: Sequence[Mapping[str, Sequence[int]]] = (),
    ) -> RequestState:
        """A request with these counts and block tables; `others` are those of groups 1 and on."""
        groups = [list(table.get(rid, ())) for table in others] or [[] for _ in range(self.num_groups - 1)]
        return RequestState(rid, **counts, block_table=list(tables.get(rid, ())), group_tables=groups)

    def set_pool(self, data: Mapping[str, Any]) -> None:
        """Free blocks and cache from a snapshot; `ref_counts` are there already."""
        self.num_blocks = (
            len(self.ref_counts) + len(data["free"]) + sum(map(len, data.get("idle", {}).values()))
        )
        self.free = FreeQueue(self.num_blocks, data["free"])
        for priority, block_ids in data.get("idle", {}).items():
            for block_id in block_ids:
                self.free.push_back(block_id, 1 + int(priority))
        self.cached = {int(b): (group, key) for b, (group, key) in data.get("cached", {}).items()}
        self.retained = {
            int(b): (priority, until) for b, (priority, until) in data.get("retained", {}).items()
        }
        self.num_shared = sum(1 for holders in self.ref_counts.values() if holders > 1)
        self.num_idle = sum(1 for block_id in self.cached if block_id not in self.ref_counts)

    def insert(self, queue: list[str], rid: str) -> None:
        """Put a request into a queue, by priority and arrival."""

        def place(rid: str) -> tuple[int, int]:
            return self.requests[rid].priority, self.requests[rid].arrival

        queue.insert(bisect_right(queue, place(rid), key=place), rid)

    def lane(self, block_id: int) -> int:
        """The lane of the free list that the block belongs into."""
        return 1 + int(self.retained.get(block_id, (50, -1))[0]) if block_id in self.cached else 0

    def hold(self, block_id: int) -> None:
        """Count one holder more."""
        holders = self.ref_counts[block_id] = self.ref_counts.get(block_id, 0) + 1
        if holders == 1:
            self.num_idle -= block_id in self.cached
        elif holders == 2:
            self.num_shared += 1

    def let_go(self, block_id: int) -> bool:
        """Count one holder less. Returns whether it was the last."""
        holders = self.ref_counts[block_id] - 1
        if holders:
            self.ref_counts[block_id] = holders
            self.num_shared -= holders == 1
            return False
        del self.ref_counts[block_id]
        self.num_idle += block_id in self.cached
        return True

    def drop(self, block_id: int) -> bool:
        """One holder less; the last one frees the block. Returns whether it was the last."""
        if not self.let_go(block_id):
            return False
        self.free.push_back(block_id, self.lane(block_id))
        return True

    def undrop(self, block_id: int) -> None:
        """Take back a `drop`."""
        if block_id in self.free:
            self.free.remove(block_id)
        self.hold(block_id)

    def take(self, block_id: int) -> int | None:
        """One holder more. Returns the block's place among the free ones, None when somebody held it."""
        place = None if block_id in self.ref_counts else self.free.remove(block_id)
        self.hold(block_id)
        return place

    def untake(self, block_id: int, place: int | None) -> None:
        """Take back a `take`."""
        if not self.let_go(block_id):
            return
        if place is not None:
            self.free.restore(block_id, place)
        else:  # who held it then has ended
            self.free.push_back(block_id, self.lane(block_id))

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
