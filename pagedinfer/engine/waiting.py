"""The waiting requests, in the policy's order: a heap with lazy deletion, O(log n) a change whatever its length."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from pagedinfer.engine.request import Request

__all__ = ["WaitingQueue"]

Entry = tuple[Any, int, int, Request]


class WaitingQueue:
    """Requests without a place in the batch. Iterating goes by priority and arrival, whatever the policy.

    Args:
        key: gives a request's place; smaller comes first, equal ones by arrival.
        moving: keys change while requests wait, so `refresh` asks for them again before each step.
        by_tenant: each tenant has a heap of its own, so that `in_order` can leave a tenant out at no cost.
    """

    def __init__(self, key: Callable[[Request], Any], moving: bool = False, by_tenant: bool = False) -> None:
        self._key = key
        self._moving = moving
        self._by_tenant = by_tenant
        self._heaps: dict[str, list[Entry]] = {}
        self._entries: dict[str, Entry] = {}
        self._next = 0
        self._num_dead = 0  # entries in heaps whose requests wait no longer

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted((entry[3] for entry in self._entries.values()), key=by_arrival))

    def __contains__(self, request: object) -> bool:
        return isinstance(request, Request) and request.request_id in self._entries

    def __getitem__(self, index: int) -> Request:
        return list(self)[index]

    def add(self, request: Request) -> None:
        """A request waits, again perhaps."""
        request.order_key = self._key(request)
        self._push(request)

    def put_back(self, request: Request) -> None:
        """A request waits at the place that it had: what took it out is taken back."""
        self._push(request)

    def _push(self, request: Request) -> None:
        entry = (request.order_key, request.arrival, self._next, request)
        self._next += 1
        self._entries[request.request_id] = entry
        heappush(self._heaps.setdefault(self._lane(request), []), entry)

    def _lane(self, request: Request) -> str:
        return request.tenant if self._by_tenant else ""

    def remove(self, request: Request) -> None:
        """A request waits no longer; its entry goes when it comes up, or when most entries are of that kind."""
        del self._entries[request.request_id]
        self._num_dead += 1

    def _rebuild(self) -> None:
        self._num_dead = 0
        self._heaps = {}
        for entry in self._entries.values():
            self._heaps.setdefault(self._lane(entry[3]), []).append(entry)
        for heap in self._heaps.values():
            heapify(heap)

    def refresh(self) -> None:
        """Ask for all keys again if they move: O(n log n)."""
        if self._moving:
            for rid, (_, arrival, number, request) in list(self._entries.items()):
                request.order_key = self._key(request)
                self._entries[rid] = (request.order_key, arrival, number, request)
            self._rebuild()

    def front(self) -> Request | None:
        """The request in front; None when nobody waits."""
        heap = self._front(())
        return None if heap is None else heap[0][3]

    def in_order(self, closed: Container[str] = ()) -> Generator[Request, None, None]:
        """The waiting requests from the front, as long as the caller asks. Those who still wait afterwards stay.

        Tenants that the caller puts into `closed` meanwhile are left out from then on.
        """
        if self._num_dead > len(self._entries) + 16:
            self._rebuild()
        passed: list[tuple[list[Entry], Entry]] = []
        try:
            while (heap := self._front(closed)) is not None:
                passed.append((heap, heappop(heap)))
                yield passed[-1][1][3]
        finally:
            for heap, entry in passed:
                if self._is_live(entry):
                    heappush(heap, entry)
                else:
                    self._num_dead -= 1

    def _front(self, closed: Container[str]) -> list[Entry] | None:
        """The heap whose first entry is the next one."""
        best: list[Entry] | None = None
        for tenant, heap in self._heaps.items():
            while heap and not self._is_live(heap[0]):
                heappop(heap)
                self._num_dead -= 1
            if heap and tenant not in closed and (best is None or heap[0] < best[0]):
                best = heap
        return best

    def _is_live(self, entry: Entry) -> bool:
        return self._entries.get(entry[3].request_id) is entry


def by_arrival(request: Request) -> tuple[int, int]:
    """The order in which queues are shown and running requests are served: priority, then arrival."""
    return request.priority, request.arrival
