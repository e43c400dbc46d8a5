"""How a plan is made: running requests get their tokens (`engine.running`), and then others come in."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from pagedinfer.engine.open_plan import OpenPlan
from pagedinfer.engine.request import Request
from pagedinfer.engine.running import RunningPlanner
from pagedinfer.engine.sharing import Sharing
from pagedinfer.errors import OutOfBlocks

if TYPE_CHECKING:
    from pagedinfer.engine.scheduler import Scheduler

__all__ = ["Planner"]


class Planner(RunningPlanner):
    """Fills plans for a scheduler, whose state it changes; each change is journaled.

    Attributes:
        sharing: gives a request that comes in what it shares with others.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self._plan: OpenPlan | None = None
        self.sharing = Sharing(scheduler)

    def fill(self, opened: OpenPlan) -> None:
        """Make the plan: two passes, running requests and new ones; before them, those of both that outrank others."""
        self._plan = opened
        opened.budget = opened.plan.token_budget
        self._blocks.expire(self._scheduler.now)
        self._queues.waiting.refresh()
        front, running = self._queues.waiting.front(), self._queues.running
        if front is not None and running and front.priority < (lowest := running[-1].priority):
            self._schedule_running(opened, least=front.priority)
            self._admit_waiting(opened, set(), above=lowest)
        if self._guard.policy.waiting_first:
            self._schedule_waiting(opened)
            self._schedule_running(opened)
        else:
            self._schedule_running(opened)
            self._schedule_waiting(opened)
        opened.plan.ops = self._blocks.take_ops()
        opened.plan.overwritten = self._blocks.take_overwritten()
        if any(op.kind == "move" for op in opened.plan.ops):
            # A move replaces the table: older plans keep the one they know.
            for item in opened.plan.scheduled:
                item.block_table = self._blocks.table(item.request_id)
        self._plan = None

    # -- swapped and waiting requests ---------------------------------------------------------------------------

    def _schedule_waiting(self, opened: OpenPlan) -> None:
        """Let others in while seats, budget and blocks allow: swapped ones first, but for the more urgent."""
        closed: set[str] = set()
        for request in list(self._queues.swapped):
            if request.request_id in self._scheduler.ending:
                continue
            if not self._admit_waiting(opened, closed, above=request.priority):
                return
            if (rid := request.request_id) in opened.plan.preempted:
                opened.plan.reasons[rid] = self._why_closed(opened) or f"{rid} gave way in this step"
                return
            if why := self._admission.why_never(request):
                self._exhaust(opened, request, why)
            elif why := self._admission.why_skipped(request):
                opened.plan.reasons[request.request_id] = why
            elif not self._swap_in(opened, request):
                return
        self._admit_waiting(opened, closed)

    def _admit_waiting(self, opened: OpenPlan, closed: set[str], above: int | None = None) -> bool:
        """Admit from the head of the queue, with `above` only who is more urgent. False: nobody else comes in.

        `closed` collects the tenants that have their share.
        """
        with closing(self._queues.waiting.in_order(closed)) as waiting:
            for request in waiting:
                rid = request.request_id
                if above is not None and request.priority >= above:
                    return True
                if rid in self._scheduler.ending:
                    continue
                if rid in opened.plan.preempted:
                    opened.plan.reasons[rid] = self._why_closed(opened) or f"{rid} gave way in this step"
                    return False
                if why := self._admission.why_never(request):
                    self._exhaust(opened, request, why)
                elif why := self.sharing.why_not_yet(opened, request):
                    opened.plan.reasons[rid] = why
                elif why := self._admission.why_skipped(request):
                    opened.plan.reasons[rid] = why
                    closed.add(request.tenant)
                elif why := self._why_not_now(opened, request):
                    opened.plan.reasons[rid] = why
                    return False
                elif not self._admit(opened, request):
                    return False
        return True

    def _swap_in(self, opened: OpenPlan, request: Request) -> bool:
        """Bring a swapped request back. False: it must wait, and so must all that came later."""
        rid, plan = request.request_id, opened.plan
        why = self._why_closed(opened) or self._admission.why_no_place(request, plan, opened.budget)
        if why is None:
            spare = self.promised(opened) + (self._watermark if self._queues.running else 0)
            why = self._blocks.shortage((), request.num_tokens, request.max_total_tokens, spare)
        if why is not None and not self._queues.running and self._blocks.release_pins():
            why = self._blocks.shortage((), request.num_tokens, request.max_total_tokens, 0)
        if why is not None:
            plan.reasons[rid] = why
            return False
        try:
            back = self._blocks.restore(rid, request.num_computed_tokens, request.max_total_tokens)
        except OutOfBlocks as error:
            plan.reasons[rid] = f"{error}, refused"
            return False
        opened.touched.add(rid)
        self._queues.swap_in(request, back)
        opened.num_admitted += 1
        opened.promised = None
        self._serve(opened, request, self._first_share(opened, request))
        return True

    def _first_share(self, opened: OpenPlan, request: Request) -> int:
        """Tokens of a request that joins the batch; there is budget for one at least."""
        if self._guard.chunks:
            return self._guard.chunk([request], opened.budget)[request.request_id]
        return min(request.num_pending_tokens, opened.budget)

    def _why_closed(self, opened: OpenPlan) -> str | None:
        """Why nobody comes in: a running request has just lost its place for want of blocks."""
        lost = [rid for rid in opened.plan.preempted if rid not in opened.yielded]
        if not lost:
            return None
        return f"{', '.join(lost)} {'was' if len(lost) == 1 else 'were'} preempted in this step"

    def _why_not_now(self, opened: OpenPlan, request: Request) -> str | None:
        """Why the request in front must wait; less urgent running requests are preempted for it if that helps."""
        why = self._why_closed(opened) or self._why_short(opened, request)
        while why is not None and (outranked := self._outranked(opened, request)):
            victim = self._guard.victim(request, outranked)
            opened.yielded.add(victim.request_id)
            self._preempt(opened, victim, f"{request.request_id} is more urgent and {why}")
            why = self._why_short(opened, request)
        return why

    def _why_short(self, opened: OpenPlan, request: Request) -> str | None:
        why = self._admission.why_no_place(request, opened.plan, opened.budget)
        if why is not None:
            return why
        why = self._guard.admit(request)
        if why is None or self._queues.running or opened.plan.scheduled:
            return why
        # Nobody runs, so nobody will give blocks back: whoever fits comes in, whatever a policy waits for.
        if self.sharing.shortage(request, 0) is None or (
            self._blocks.release_pins() and self.sharing.shortage(request, 0) is None
        ):
            return None
        return why

    def _outranked(self, opened: OpenPlan, request: Request) -> list[Request]:
        """Running requests that are strictly less urgent, if giving up all of them would make room for `request`."""
        below = [
            r
            for r in self._queues.running
            if r.priority > request.priority
            and r.order_key > request.order_key
            and not any(r.request_id in other.touched for other in self._scheduler.open_plans[:-1])
        ]
        if not below or not opened.budget or self._why_closed(opened):
            return []  # who is more urgent has had its turn at the budget before
        others = [r for r in self._queues.running if r not in below]
        kept = sum(self._blocks.num_missing(r.request_id, r.num_tokens) for r in others)
        kept += self._watermark if others else 0
        needed = self._blocks.num_needed(request.num_tokens, request.max_total_tokens)
        room = self._blocks.num_free + sum(self._blocks.num_freed_with(r.request_id) for r in below)
        return below if needed + kept <= room else []

    def _admit(self, opened: OpenPlan, request: Request) -> bool:
        """Move the request in front into the batch. False: an allocation was refused by fault injection."""
        try:
            self._blocks.ask(self._blocks.blocks_for(request.num_tokens))
        except OutOfBlocks as error:  # enough are free: fault injection said no
            opened.plan.reasons[request.request_id] = f"{error}, refused"
            return False
        cached = self.sharing.begin(opened, request)
        share = self._first_share(opened, request)
        new = self._blocks.allocate(
            request.request_id,
            cached + share,
            start=cached,
            max_total_tokens=request.max_total_tokens,
            asked=True,
        )
        self._queues.admit(request)
        opened.num_admitted += 1
        self._place(opened, request, share, new)
        if opened.promised is not None:
            opened.promised += self._blocks.num_missing(request.request_id, request.num_tokens)
        return True

    # -- what policies ask --------------------------------------------------------------------------------------

    @property
    def num_admitted(self) -> int:
        """Requests that joined the batch in the plan that is being made."""
        return self._plan.num_admitted if self._plan is not None else 0

    @property
    def _watermark(self) -> int:
        return int(self._scheduler.config.watermark * self._blocks.num_blocks)

    def promised(self, opened: OpenPlan | None = None) -> int:
        """Blocks that running requests still need for tokens they have."""
        opened = opened or self._plan
        if opened is not None and opened.promised is not None:
            return opened.promised
        promised = sum(
            self._blocks.num_missing(r.request_id, r.num_tokens)
            for r in self._queues.running
            if r.num_tokens - r.num_computed_tokens > 0
        )
        if opened is not None:
            opened.promised = promised
        return promised
