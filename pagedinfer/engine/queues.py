"""The two queues and the moves between them. Each move records its inverse, so that a plan can be taken back."""

from __future__ import annotations

from bisect import insort
from collections import deque

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request, Status
from pagedinfer.errors import count
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus

__all__ = ["Queues"]


class Queues:
    """Every live request, in `waiting` or in `running`, both in order of arrival.

    Attributes:
        requests: live requests by id.
        waiting: requests without a place in the batch; a preempted one stands before all that came later.
        running: requests with a place.
        num_submitted, num_preemptions, num_finished: counts since the start.
    """

    def __init__(self, config: EngineConfig, blocks: BlockManager, bus: EventBus) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_submitted = 0
        self.num_preemptions = 0
        self.num_finished = 0
        self._config = config
        self._blocks = blocks
        self._bus = bus

    def add(self, request: Request) -> None:
        """A new request joins the end of `waiting`."""
        request.arrival = self.num_submitted
        self.num_submitted += 1
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def admit(self, request: Request) -> None:
        """Move a request from `waiting` to `running`."""
        was = request.status
        self.waiting.remove(request)
        request.status = Status.RUNNING
        insort(self.running, request, key=_arrival)
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
        self._insert_waiting(request)

    def preempt(self, request: Request, why: str) -> None:
        """Move a request back to `waiting`, before all that came later, and free its blocks.

        Its keys and values are gone: it recomputes them when it comes back (mode `recompute`).
        """
        computed = request.num_computed_tokens
        if self._bus.subs:
            self._bus.emit(ev.Preempt(request.request_id, "recompute", why))
        self._blocks.free(request.request_id, "preempt")
        self.running.remove(request)
        self._insert_waiting(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        if self._blocks.journal is not None:
            self._blocks.journal.record(lambda: self._unpreempt(request, computed))

    def _unpreempt(self, request: Request, computed: int) -> None:
        self.waiting.remove(request)
        insort(self.running, request, key=_arrival)
        request.status = Status.RUNNING
        request.num_computed_tokens = computed
        request.num_preemptions -= 1
        self.num_preemptions -= 1

    def _insert_waiting(self, request: Request) -> None:
        later = (i for i, other in enumerate(self.waiting) if other.arrival > request.arrival)
        self.waiting.insert(next(later, len(self.waiting)), request)

    def end(self, request: Request, reason: str, detail: str) -> None:
        """A request leaves for good; its blocks are free again."""
        del self.requests[request.request_id]
        self._blocks.free(request.request_id, "finish")
        (self.running if request.status == Status.RUNNING else self.waiting).remove(request)
        request.status = Status.FINISHED
        self.num_finished += 1
        if self._bus.subs:
            self._bus.emit(ev.Finish(request.request_id, reason, detail))

    def snapshot(self) -> dict[str, object]:
        """Queues, requests and counts as plain data."""
        return {
            "waiting": [request.request_id for request in self.waiting],
            "running": [request.request_id for request in self.running],
            "requests": {rid: request.state() for rid, request in self.requests.items()},
            "num_submitted": self.num_submitted,
            "num_preemptions": self.num_preemptions,
            "num_finished": self.num_finished,
        }

    def check(self) -> None:
        """Assert that each live request is in one queue, in order, with exactly the blocks that it needs."""
        queued = [*self.waiting, *self.running]
        assert len(queued) == len(self.requests), "a request is in both queues, or in none"
        assert all(self.requests.get(r.request_id) is r for r in queued), (
            "a queued request is not in the table"
        )
        assert len(self.running) <= self._config.max_num_seqs, "more requests run than max_num_seqs"
        for queue in (list(self.waiting), self.running):
            assert [r.arrival for r in queue] == sorted(r.arrival for r in queue), "a queue is out of order"
        for request in queued:
            held, covered = len(self._blocks.table(request.request_id)), request.num_computed_tokens
            runs = request.status == Status.RUNNING
            assert runs == (request in self.running), f"{request} stands in the wrong queue"
            assert 0 <= covered <= request.num_tokens, f"{request} computed tokens that it does not have"
            assert held == self._blocks.blocks_for(covered), (
                f"{request} holds {held} blocks for {covered} tokens"
            )
            assert runs or not held, f"{request} waits and holds blocks"
            assert request.num_output_tokens <= request.max_tokens, f"{request} went past max_tokens"
        holders = self._blocks.snapshot()["block_tables"]
        assert isinstance(holders, dict)
        assert holders.keys() <= self.requests.keys(), "a request that has ended holds blocks"


def _arrival(request: Request) -> int:
    return request.arrival
