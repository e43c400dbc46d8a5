"""Running requests in a plan: their tokens, the blocks for these, and who gives way when there are none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedinfer.engine.open_plan import OpenPlan
from pagedinfer.engine.plan import ScheduledRequest
from pagedinfer.engine.request import Request, Status
from pagedinfer.errors import OutOfBlocks

if TYPE_CHECKING:
    from pagedinfer.engine.scheduler import Scheduler

__all__ = ["RunningPlanner"]


class RunningPlanner:
    """Puts rows into a plan: the half of a `Planner` that serves those who run. Each change is journaled."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._queues = scheduler.queues
        self._admission = scheduler.admission
        self._guard = scheduler.guard
        self._tables = scheduler.blocks.tables
        self._is_grouped = len(scheduler.config.group_windows) > 1

    def _schedule_running(self, opened: OpenPlan, least: int | None = None) -> None:
        """Give running requests their tokens, preempting from the end if blocks run out.

        With `least` only those that are at least so urgent.
        """
        ending, placed = self._scheduler.ending, opened.placed
        due = []
        total = 0
        for request in self._queues.running:
            if least is not None and request.priority > least:
                break
            # Nothing pending: its newest token is still being computed in an open plan.
            pending = request.num_tokens - request.num_computed_tokens
            if request.draft_token_ids:
                pending += len(request.draft_token_ids)
            if pending and request.request_id not in placed and request.request_id not in ending:
                due.append((request, pending))
                total += pending
        if due and (self._guard.chunks or total > opened.budget):
            shares = self._guard.chunk([request for request, _ in due], opened.budget)
            due = [(request, shares.get(request.request_id, 0)) for request, _ in due]
        running, is_covered = Status.RUNNING, self._blocks.is_covered
        for request, num_tokens in due:
            if request.status is running:
                if num_tokens == 1 and is_covered(request.request_id, request.num_computed_tokens):
                    self._place(opened, request, 1, ())
                else:
                    self._serve(opened, request, num_tokens)

    def _serve(self, opened: OpenPlan, request: Request, num_tokens: int) -> None:
        plan, rid = opened.plan, request.request_id
        if num_tokens == 0:
            left = opened.budget
            plan.reasons[rid] = (
                f"token budget of {plan.token_budget} used up" if not left else "no chunk for it"
            )
            return
        start = request.num_computed_tokens
        opened.touched.add(rid)  # also when it gets no block: a window may have left some
        while True:
            try:
                new = self._blocks.allocate(rid, start + num_tokens, start=start)
                break
            except OutOfBlocks as error:
                if not self._make_room(opened, request, error):
                    return
        self._place(opened, request, num_tokens, new)

    def _make_room(self, opened: OpenPlan, request: Request, error: OutOfBlocks) -> bool:
        """Preempt somebody. False: the request itself gave way, or has to wait for an open step."""
        rid = request.request_id
        if why := self._admission.why_never(request):
            self._exhaust(opened, request, why)
            return False
        victim = self._guard.victim(request, self._candidates(request))
        if any(victim.request_id in other.touched for other in self._scheduler.open_plans[:-1]):
            opened.plan.reasons[rid] = f"{error}; {victim.request_id} is in an open step"
            return False
        if victim is request and len(self._queues.running) == 1 and self._blocks.release_pins():
            return True
        why = "gives way itself" if victim is request else f"{victim.request_id} gives way"
        self._preempt(opened, victim, f"{rid} {error}; {why}")
        return victim is not request

    def _candidates(self, request: Request) -> list[Request]:
        """Who may be preempted for a running request: nobody more urgent.

        Nor the first of all, so that something always goes on; it gives way only when it is alone.
        """
        running = self._queues.running
        if self._scheduler.config.order != "priority":
            return running[1:] or [request]
        first = min(running, key=_rank)
        below = [r for r in running if r is not first and r.order_key >= request.order_key]
        return below or [request]

    def _preempt(self, opened: OpenPlan, victim: Request, why: str) -> None:
        item = opened.placed.pop(victim.request_id, None)
        if item is not None:  # it leaves this step's batch, and its tokens return to the budget
            opened.plan.scheduled.remove(item)
            victim.num_computed_tokens -= item.num_tokens
            opened.budget += item.num_tokens
            if victim.tenant:
                self._count_served(opened, victim.tenant, -item.num_tokens)
        mode = self._guard.preempt_mode(victim)
        self._queues.preempt(victim, mode, why)
        opened.touched.add(victim.request_id)
        opened.plan.preempted.append(victim.request_id)
        opened.promised = None

    # -- the plan's entries -------------------------------------------------------------------------------------

    def _exhaust(self, opened: OpenPlan, request: Request, why: str) -> None:
        opened.touched.add(request.request_id)
        opened.plan.exhausted[request.request_id] = why

    def _place(
        self, opened: OpenPlan, request: Request, num_tokens: int, new_block_ids: tuple[int, ...]
    ) -> None:
        """Put the request's next `num_tokens` tokens into the plan; they count as computed until a cancel."""
        rid, start, params = request.request_id, request.num_computed_tokens, request.params
        known, end = request.num_tokens, start + num_tokens
        index = known - request.num_prompt_tokens
        request.num_computed_tokens = end
        drafts = request.draft_token_ids
        if drafts and len(drafts) != end - known:  # guesses beyond the chunk are dropped
            opened.journal.record(partial(setattr, request, "draft_token_ids", drafts))
            drafts = request.draft_token_ids = drafts[: max(0, end - known)]
        item = ScheduledRequest(
            rid, start, num_tokens, end >= known, index, start == 0 or known - start > 1, new_block_ids,
            self._tables[rid], request.token_ids, params, request.seed,
            request.end_token_ids if index < params.min_tokens else (),
            request.num_prompt_tokens, request.rules, drafts, self._group_tables(rid),
        )  # fmt: skip
        opened.touched.add(rid)
        opened.placed[rid] = item
        opened.plan.scheduled.append(item)
        if opened.plan.reasons:  # it may have waited in an earlier pass
            opened.plan.reasons.pop(rid, None)
        opened.budget -= num_tokens
        if request.tenant:
            self._count_served(opened, request.tenant, num_tokens)

    def _count_served(self, opened: OpenPlan, tenant: str, num_tokens: int) -> None:
        served = self._scheduler.served
        served[tenant] = served.get(tenant, 0) + num_tokens
        opened.journal.record(lambda: served.update({tenant: served[tenant] - num_tokens}))

    def _group_tables(self, rid: str) -> Sequence[list[int]]:
        return self._blocks.group_tables(rid) if self._is_grouped else ()


def _rank(request: Request) -> tuple[Any, int]:
    return request.order_key, request.arrival
