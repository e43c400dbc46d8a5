"""What a request has already when it joins the batch: cached blocks, or those of a request with the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedinfer.engine.open_plan import OpenPlan
from pagedinfer.engine.request import Request, Status
from pagedinfer.trace import events as ev

if TYPE_CHECKING:
    from pagedinfer.engine.scheduler import Scheduler

__all__ = ["Sharing"]


class Sharing:
    """For the planner: finds what a request shares, and gives it to the request."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._config = scheduler.config
        self._bus = scheduler.bus
        self._blocks = scheduler.blocks
        self._queues = scheduler.queues
        self._admission = scheduler.admission
        self._caches = scheduler.caches

    def why_not_yet(self, opened: OpenPlan, request: Request) -> str | None:
        """Why a waiting request is passed over: it will share the blocks of another one, which is not so far yet."""
        parent = self.parent(request)
        if parent is None or self._can_fork(opened, parent, request):
            return None
        return f"waits for {parent.request_id}, which computes their prompt"

    def begin(self, opened: OpenPlan, request: Request) -> int:
        """Give the request the blocks that hold its first tokens already. Returns their tokens."""
        parent, rid, cached, note = self.parent(request), request.request_id, 0, ""
        if parent is not None:
            cached, note = request.num_prompt_tokens - 1, f"shares the prompt of {parent.request_id}"
            self._blocks.fork(parent.request_id, rid, cached)
        elif request.keys or self._caches:
            cached, note = self._blocks.attach(rid, request.keys, request.num_tokens)
            if self._bus.subs:
                self._bus.emit(ev.Hit(rid, cached, note))
        before = request.num_computed_tokens, request.num_cached_tokens, request.cache_note
        if request.num_cached_tokens < 0:
            request.num_cached_tokens, request.cache_note = (0 if parent is not None else cached), note
            self._queues.count_look_up(request, parent is None, opened.journal)
        request.num_computed_tokens, request.publish_at = cached, 0
        opened.journal.record(lambda: _restore(request, before))
        return cached

    def parent(self, request: Request) -> Request | None:
        """The live request whose prompt this one waits to share, unless windows have left what it needs of it."""
        parent, position = request.shares_with, request.num_prompt_tokens - 1
        if parent is None or request.status != Status.WAITING or parent.status == Status.FINISHED:
            return None
        return parent if position and self._blocks.reaches(parent.request_id, position) else None

    def _can_fork(self, opened: OpenPlan, parent: Request, request: Request) -> bool:
        """Whether all of the prompt but its last token is written, in steps before this one."""
        item = opened.placed.get(parent.request_id)
        written = parent.num_computed_tokens - (item.num_tokens if item is not None else 0)
        return parent.status == Status.RUNNING and written >= request.num_prompt_tokens - 1

    def start_fork(self, parent: Request, request: Request) -> None:
        """A copy of a running request runs at once if a seat is free, sharing its blocks; otherwise it waits."""
        seats = self._config.max_num_seqs - len(self._queues.running)
        if parent.status != Status.RUNNING or seats < 1 or not self._blocks.can_share:
            return
        if self._admission.why_skipped(request):
            return
        if parent.num_computed_tokens:
            self._blocks.fork(parent.request_id, request.request_id, parent.num_computed_tokens)
        request.num_computed_tokens, request.num_cached_tokens = parent.num_computed_tokens, 0
        request.cache_note = f"a copy of {parent.request_id}"
        self._queues.admit(request)

    def shortage(self, request: Request, spare: int) -> str | None:
        """Why a waiting request cannot come in now, leaving `spare` blocks free."""
        if (parent := self.parent(request)) is not None and parent.status == Status.RUNNING:
            needed, free = 2 * len(self._config.group_windows), self._blocks.num_free
            return (
                None if needed + spare <= free else f"needs {needed} blocks beside shared ones, {free} free"
            )
        return self._blocks.shortage(request.keys, request.num_tokens, request.max_total_tokens, spare)


def _restore(request: Request, before: tuple[int, int, str]) -> None:
    request.num_computed_tokens, request.num_cached_tokens, request.cache_note = before
