"""The waiting requests, in the policy's order: a heap with lazy deletion, O(log n) a change whatever its length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """

    def __init__(self, key: Callable[[Request], Any], moving: bool = False) -> None:
        self._key = key
        self._moving = moving
        self._heap: list[Entry] = []
        self._entries: dict[str, Entry] = {}
        self._next = 0

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

    def _push(self, request: Request) -> None:
        entry = (request.order_key, request.arrival, self._next, request)
        self._next += 1
        self._entries[request.request_id] = entry
        heappush(self._heap, entry)

    def remove(self, request: Request) -> None:
        """A request waits no longer; its entry goes when it comes up."""
        del self._entries[request.request_id]
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def refresh(self) -> None:
        """Ask for all keys again if they move: O(n log n)."""
        if self._moving:
            for request in [entry[3] for entry in self._entries.values()]:
                request.order_key = self._key(request)
            self._heap = []
            for entry in list(self._entries.values()):
                self._push(entry[3])

    def first(self) -> Request | None:
        """The request in front; None when nobody waits."""
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry[3].request_id) is entry:
                return entry[3]
            heappop(self._heap)
        return None

    def in_order(self) -> Iterator[Request]:
        """The waiting requests from the front, as long as the caller asks. Those who still wait afterwards stay."""
        passed: list[Entry] = []
        try:
            while (request := self.first()) is not None:
                passed.append(heappop(self._heap))
                yield request
        finally:
            for entry in passed:
                if self._entries.get(entry[3].request_id) is entry:
                    heappush(self._heap, entry)


def by_arrival(request: Request) -> tuple[int, int]:
    """The order in which queues are shown and running requests are served: priority, then arrival."""
    return request.priority, request.arrival
