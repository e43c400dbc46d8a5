"""The queues and the moves between them. Each move records its inverse, so that a plan can be taken back."""

from __future__ import annotations

from bisect import insort
from heapq import heappop, heappush

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request, Status
from pagedinfer.engine.waiting import WaitingQueue, by_arrival
from pagedinfer.errors import count
from pagedinfer.memory.allocator import KVAllocator
from pagedinfer.memory.journal import Journal
from pagedinfer.memory.ops import BlockOp
from pagedinfer.memory.tiers import HostTier
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus

__all__ = ["Queues"]


class Queues:
    """Every live request: in `waiting`, in `running`, or in `swapped`; shown by priority and arrival.

    Attributes:
        requests: live requests by id.
        waiting: requests without a place in the batch and without blocks; a preempted one among them.
        running: requests with a place.
        swapped: requests whose blocks are in the host pool. host_tables: their slots there.
        host: the host pool's slots.
        num_submitted, num_preemptions, num_finished: counts since the start.
        num_queried_tokens, num_hit_tokens: prompt tokens that first admissions looked up in the cache, and found there.
            What a resumed request finds of its own does not count.
    """

    def __init__(
        self, config: EngineConfig, blocks: KVAllocator, waiting: WaitingQueue, bus: EventBus
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = waiting
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.host = HostTier(config.num_host_blocks)
        self.host_tables: dict[str, tuple[int, ...]] = {}
        self.num_submitted = 0
        self.num_preemptions = 0
        self.num_finished = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._config = config
        self._blocks = blocks
        self._bus = bus
        self._expiry: list[tuple[float, int, Request]] = []

    def add(self, request: Request, now: float) -> None:
        """A new request waits."""
        request.arrival, request.arrived_at = self.num_submitted, now
        self.num_submitted += 1
        self.requests[request.request_id] = request
        self.waiting.add(request)
        if request.expires is not None:
            heappush(self._expiry, (request.expires, request.arrival, request))

    def count_look_up(self, request: Request, asked: bool, journal: Journal) -> None:
        """A request looked its prompt up when it was first admitted, or (`asked` False) shares another's."""
        if asked:
            queried, hit = request.num_prompt_tokens, request.num_cached_tokens
            self.num_queried_tokens += queried
            self.num_hit_tokens += hit
            journal.record(lambda: self._uncount(queried, hit))

    def _uncount(self, queried: int, hit: int) -> None:
        self.num_queried_tokens -= queried
        self.num_hit_tokens -= hit

    def overdue(self, now: float) -> list[str]:
        """Take the ids of the live requests whose time is up. O(log n) each."""
        found = []
        while self._expiry and self._expiry[0][0] <= now:
            request = heappop(self._expiry)[2]
            if self.requests.get(request.request_id) is request:
                found.append(request.request_id)
        return found

    def reconfigure(self, config: EngineConfig, waiting: WaitingQueue) -> None:
        """Other limits, and those who wait in another order."""
        for request in self.waiting:
            waiting.add(request)
        self.waiting, self._config = waiting, config

    # -- into the batch -----------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Move a request from `waiting` to `running`."""
        was = request.status
        self.waiting.remove(request)
        request.status = Status.RUNNING
        insort(self.running, request, key=by_arrival)
        if self._blocks.journal is not None:
            self._blocks.journal.record(lambda: self._unadmit(request, was))
        if self._bus.subs:
            needed, tokens = self._blocks.blocks_for(request.num_tokens), request.num_tokens
            why = f"{count(needed, 'block')} for {count(tokens, 'token')}, {self._blocks.num_free} free"
            kind = ev.Resume if was == Status.PREEMPTED else ev.Admit
            self._bus.emit(kind(request.request_id, why))

    def _unadmit(self, request: Request, was: Status) -> None:
        self.running.remove(request)
        request.status = was
        self.waiting.put_back(request)

    def swap_in(self, request: Request, block_ids: list[int]) -> None:
        """Move a request from `swapped` to `running`; `block_ids`, just restored, get their contents back."""
        rid = request.request_id
        slots = self.host_tables.pop(rid)
        self.swapped.remove(request)
        self.host.free(slots)
        request.status = Status.RUNNING
        insort(self.running, request, key=by_arrival)
        pairs = tuple(zip(slots, block_ids, strict=True))
        self._blocks.ops.append(BlockOp("swap_in", pairs))
        if self._blocks.journal is not None:
            self._blocks.journal.record(lambda: self._unswap_in(request, slots))
        if self._bus.subs:
            self._bus.emit(ev.Swap(rid, "in", pairs))
            self._bus.emit(ev.Resume(rid, f"{count(len(pairs), 'block')} back from the host"))

    def _unswap_in(self, request: Request, slots: tuple[int, ...]) -> None:
        self.running.remove(request)
        request.status = Status.SWAPPED
        insort(self.swapped, request, key=by_arrival)
        self.host_tables[request.request_id] = slots

    # -- out of the batch ---------------------------------------------------------------------------------------

    def preempt(self, request: Request, mode: str, why: str) -> None:
        """Take a running request's place and blocks.

        Mode `recompute`: its keys and values are gone; it computes them again when it comes back. Mode `swap`: they
        wait in the host pool; where that has no room, recompute.
        """
        rid, computed, drafts = request.request_id, request.num_computed_tokens, request.draft_token_ids
        held: list[int] = []
        slots = None
        if mode == "swap":
            held = self._blocks.kept_blocks(rid, computed)
            slots = self.host.allocate(len(held)) if held else None
            if slots is None:
                mode = "recompute"
                why += f"; {self.host.num_free} host slots free for {count(len(held), 'block')}"
        if self._bus.subs:
            self._bus.emit(ev.Preempt(rid, mode, why))
        if slots is not None:
            self._swap_out(request, held, slots)
        self._blocks.free(rid, "preempt")
        self.running.remove(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.draft_token_ids = ()
        if slots is None:
            request.status, request.num_computed_tokens = Status.PREEMPTED, 0
            self.waiting.add(request)
        else:
            request.status = Status.SWAPPED
            insort(self.swapped, request, key=by_arrival)
        if self._blocks.journal is not None:
            self._blocks.journal.record(lambda: self._unpreempt(request, computed, drafts))

    def _swap_out(self, request: Request, held: list[int], slots: tuple[int, ...]) -> None:
        rid, pairs = request.request_id, tuple(zip(held, slots, strict=True))
        self._blocks.ops.append(BlockOp("swap_out", pairs))
        self.host_tables[rid] = slots
        if self._bus.subs:
            self._bus.emit(ev.Swap(rid, "out", pairs))

    def _unpreempt(self, request: Request, computed: int, drafts: object) -> None:
        if request.status == Status.SWAPPED:
            self.swapped.remove(request)
            del self.host_tables[request.request_id]
        else:
            self.waiting.remove(request)
        insort(self.running, request, key=by_arrival)
        request.status = Status.RUNNING
        request.num_computed_tokens = computed
        request.draft_token_ids = drafts  # type: ignore[assignment]
        request.num_preemptions -= 1
        self.num_preemptions -= 1

    def end(self, request: Request, reason: str, detail: str) -> None:
        """A request leaves for good; its blocks are free again."""
        rid = request.request_id
        del self.requests[rid]
        self._blocks.free(rid, "finish")
        if request.status == Status.RUNNING:
            self.running.remove(request)
        elif request.status == Status.SWAPPED:
            self.swapped.remove(request)
            self.host.free(self.host_tables.pop(rid))
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        request.keys = []  # now, not when the garbage collector comes by: a key that nobody holds gets a new id
        self.num_finished += 1
        if self._bus.subs:
            self._bus.emit(ev.Finish(rid, reason, detail))

    # -- whole state --------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, object]:
        """Queues, requests and counts as plain data."""
        return {
            "waiting": [request.request_id for request in self.waiting],
            "running": [request.request_id for request in self.running],
            "swapped": [request.request_id for request in self.swapped],
            "host_tables": {rid: list(slots) for rid, slots in self.host_tables.items()},
            "host_free": self.host.snapshot()["free"],
            "requests": {rid: request.state() for rid, request in self.requests.items()},
            "num_submitted": self.num_submitted,
            "num_preemptions": self.num_preemptions,
            "num_finished": self.num_finished,
        }

    def check(self) -> None:
        """Assert that each live request is in one queue, in order, with exactly the blocks that it needs."""
        queued = [*self.waiting, *self.running, *self.swapped]
        assert len(queued) == len(self.requests), "a request is in two queues, or in none"
        assert all(self.requests.get(r.request_id) is r for r in queued), (
            "a queued request is not in the table"
        )
        assert len(self.running) <= self._config.max_num_seqs, "more requests run than max_num_seqs"
        for queue in (self.running, self.swapped):
            assert queue == sorted(queue, key=by_arrival), "a queue is out of order"
        for request in queued:
            self._check_request(request)
        holders = self._blocks.snapshot()["block_tables"]
        assert isinstance(holders, dict)
        assert holders.keys() <= self.requests.keys(), "a request that has ended holds blocks"
        assert self.host_tables.keys() == {r.request_id for r in self.swapped}, (
            "host tables without a request"
        )
        self.host.check()

    def _check_request(self, request: Request) -> None:
        held, covered = len(self._blocks.table(request.request_id)), request.num_computed_tokens
        known = request.num_tokens + len(request.draft_token_ids)
        runs = request.status == Status.RUNNING
        assert runs == (request in self.running), f"{request} stands in the wrong queue"
        assert 0 <= covered <= known, f"{request} computed tokens that it does not have"
        needed = self._blocks.blocks_for(covered) if runs else 0
        assert held == needed or (held > needed and self._config.allocator != "paged" and runs), (
            f"{request} holds {held} blocks for {covered} tokens"
        )
        if request.status == Status.SWAPPED:
            slots, most = len(self.host_tables[request.request_id]), self._blocks.blocks_for(covered)
            assert 0 < slots <= most * len(self._config.group_windows), f"{request} has {slots} host slots"
            assert slots == most or self._config.group_windows != (None,), f"{request} has {slots} host slots"
        assert request.num_output_tokens <= request.max_tokens, f"{request} went past max_tokens"
