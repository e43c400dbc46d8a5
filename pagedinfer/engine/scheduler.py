"""The scheduler: who computes how many tokens in the next step, and who has to wait or give way.

There is no prefill phase and no decode phase. Each request has `num_tokens` and `num_computed_tokens`; a step spends
a token budget on letting computed catch up, running requests first, then swapped and waiting ones (iteration-level
scheduling: Yu et al., "Orca", OSDI 2022; chunked prefill: Agrawal et al., "Sarathi-Serve", OSDI 2024; the single
rule: vLLM V1). Five decisions are a `Policy`'s: order, admission, chunk, victim, preempt mode.

This file holds the transaction: `schedule` opens a plan, `commit` or `cancel` closes it. How a plan is made is in
`engine.planner`, what its result changes in `engine.committer`.

Progress: the first running request is never preempted for a later one, and a request that the whole pool could not
hold is ended, not retried. So each step computes a token, ends a request, or frees blocks for the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedinfer.config import EngineConfig
from pagedinfer.engine.admission import Admission
from pagedinfer.engine.committer import Committer, Ends, Update, check_result
from pagedinfer.engine.guard import Guard
from pagedinfer.engine.look import SchedulerView
from pagedinfer.engine.open_plan import OpenPlan
from pagedinfer.engine.plan import StepPlan, StepResult
from pagedinfer.engine.planner import Planner
from pagedinfer.engine.policies import make_policy
from pagedinfer.engine.policy import Policy
from pagedinfer.engine.pool_books import PoolBooks
from pagedinfer.engine.queues import Queues
from pagedinfer.engine.request import Request, Status
from pagedinfer.engine.waiting import WaitingQueue
from pagedinfer.errors import RequestError, UnknownRequest, count
from pagedinfer.memory.allocator import KVAllocator
from pagedinfer.memory.keys import KeyTable
from pagedinfer.memory.make import MakeMemory, make_allocator
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus

__all__ = ["Scheduler", "Update"]


class Scheduler(PoolBooks):
    """Makes plans and closes them. Pure bookkeeping: it never sees a tensor, a token's value or a clock.

    A plan is a transaction: open from `schedule` until `commit` or `cancel`. Several may be open (the next step is
    planned while one runs); they commit oldest first and cancel newest first.

    Args:
        policy: decides instead of the one that `config` names.
        make_memory: makes the memory instead of what `config` names.

    Attributes:
        config: limits and pool size.
        bus: where events go.
        blocks: the block manager, or a contiguous allocator.
        keys: the keys of full blocks, for the prefix cache.
        queues: live requests: waiting, running, swapped.
        admission: who may come in at all, and who has a place.
        guard: asks the policy.
        planner: fills plans. committer: enters their results.
        caches: whether there is a prefix cache.
        step: number of the last plan. now: its time.
        ending: requests that end as soon as the plans that work on them close: (finish reason, sentence).
        served: tokens computed for each named tenant.
        is_changing: whether the books are half written; only code that interrupts this thread can see True.
    """

    def __init__(
        self,
        config: EngineConfig,
        bus: EventBus | None = None,
        policy: Policy | None = None,
        make_memory: MakeMemory = make_allocator,
    ) -> None:
        self.config = config
        self.bus = bus or EventBus()
        self.blocks: KVAllocator = make_memory(config, self.bus)
        self.keys = KeyTable()
        policy = policy or make_policy(config)
        self.guard = Guard(policy, config, self.bus, SchedulerView(self))
        self.queues = Queues(config, self.blocks, self._new_waiting(), self.bus)
        self.admission = Admission(config, self.blocks, self.queues)
        self.step = 0
        self.now = 0.0
        self.is_changing = False
        self.served: dict[str, int] = {}
        self.caches = config.enable_prefix_caching and config.allocator == "paged"
        self.planner = Planner(self)
        self.committer = Committer(self)
        self._open: list[OpenPlan] = []
        self.ending: dict[str, tuple[str, str]] = {}  # ends that wait for an open plan to close

    def _new_waiting(self) -> WaitingQueue:
        limits = self.config.tenant_max_running, self.config.tenant_max_blocks
        return WaitingQueue(self.guard.order, self.guard.policy.moving_key, limits != (None, None))

    @property
    def waiting(self) -> WaitingQueue:
        """Requests without a place in the batch."""
        return self.queues.waiting

    @property
    def running(self) -> list[Request]:
        """Requests with a place in the batch, by priority and arrival."""
        return self.queues.running

    @property
    def requests(self) -> dict[str, Request]:
        """Every live request by id."""
        return self.queues.requests

    @property
    def open_plans(self) -> Sequence[OpenPlan]:
        """Plans that are neither committed nor cancelled, oldest first."""
        return self._open

    # -- requests come and go -----------------------------------------------------------------------------------

    def submit(self, request: Request, now: float, room_for: int = 1) -> None:
        """Queue a request. `room_for` counts it and those that are submitted with it.

        Raises:
            DuplicateRequest: a live request has the same id.
            RequestTooLong: the prompt can never fit the context or the pool.
            RequestError: the prompt is empty, or no token is asked for.
            QueueFull: as many wait as `max_num_waiting` allows.
            ConfigError: it has a priority, and the order is not by priority.
        """
        rid, prompt, priority = request.request_id, request.num_prompt_tokens, request.priority
        if error := self.admission.refusal(request, room_for):
            if self.bus.subs:
                self.bus.emit(ev.Reject(rid, prompt, request.max_tokens, priority, now, str(error), room_for))
            raise error
        request.max_tokens = min(request.max_tokens, self.config.max_model_len - prompt)
        with self._change():
            self.committer.extend_keys(request, request.key_ids)
            if request.parent and self.blocks.can_share:
                request.shares_with = self.requests.get(request.parent)
            self.queues.add(request, now)
            if self.bus.subs:
                self.bus.emit(
                    ev.Submit(
                        rid, prompt, request.max_tokens, priority, now, tuple(key.id for key in request.keys),
                        request.tenant, request.deadline, request.expires, request.parent, request.retain,
                    )
                )  # fmt: skip

    def fork(self, parent_id: str, request: Request, now: float) -> None:
        """Add a copy of a live request as it stands: `request` (made by `Request.fork`) shares its blocks.

        The last token may be another than the parent's: nothing of it is computed yet. The copy runs at once when a
        seat is free; otherwise, or without paged memory, it waits and computes again.

        Raises:
            UnknownRequest: no live request has the parent's id. RequestError: a plan is open.
            DuplicateRequest, QueueFull: as `submit`.
        """
        parent = self.requests.get(parent_id)
        if parent is None:
            raise UnknownRequest(f"No live request {parent_id!r}: it never came, or it has ended.")
        if self._open or self.is_changing:
            raise RequestError(f"Request {parent_id!r} cannot be forked while a step is open.")
        if error := self.admission.refusal(request):
            raise error
        with self._change():
            request.keys = parent.keys[: (parent.num_tokens - 1) // self.config.block_size]
            self.queues.add(request, now)
            if self.bus.subs:
                ids = tuple(key.id for key in request.keys)
                self.bus.emit(ev.Fork(request.request_id, parent_id, request.max_tokens, now, ids))
            self.planner.sharing.start_fork(parent, request)

    def abort(self, request_id: str, why: str = "aborted by the caller") -> list[Update]:
        """Give a request up. It ends at once, or when the open plan that works on it closes.

        Raises:
            UnknownRequest: no live request has this id.
        """
        if request_id not in self.requests:
            raise UnknownRequest(f"No live request {request_id!r}: it never came, or it has ended.")
        with self._change():
            if self.bus.subs:
                self.bus.emit(ev.Abort(request_id, why))
            self.ending.setdefault(request_id, ("abort", why))
            return self._end([])

    def overdue(self, now: float) -> list[str]:
        """Take the ids of the requests whose time is up; each is named once, for the caller to abort."""
        return [rid for rid in self.queues.overdue(now) if rid not in self.ending]

    def preempt(self, request_id: str, why: str, mode: str = "recompute") -> None:
        """Preempt a running request from outside (fault injection, teaching); refused while a plan is open.

        Raises:
            RequestError: a plan is open, or the request is not running.
        """
        request = self.requests.get(request_id)
        if self._open or self.is_changing or request is None or request.status != Status.RUNNING:
            raise RequestError(f"Request {request_id!r} cannot be preempted: it must run, with no plan open.")
        with self._change():
            self.queues.preempt(request, mode, why)

    def reconfigure(self, config: EngineConfig, policy: Policy | None, why: str) -> None:
        """Go on with other limits and another policy, between two steps. The memory stays as it is.

        Raises:
            RequestError: a plan is open.
        """
        if self._open or self.is_changing:
            raise RequestError("Settings cannot change while a step is open.")
        policy = policy or make_policy(config)
        self.config = config
        self.guard = Guard(policy, config, self.bus, SchedulerView(self))
        self.queues.reconfigure(config, self._new_waiting())
        self.admission = Admission(config, self.blocks, self.queues)
        self.planner = Planner(self)
        while len(self.running) > config.max_num_seqs:
            self.preempt(self.running[-1].request_id, f"{why}: max_num_seqs is {config.max_num_seqs} now")

    # -- the plan -----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step at time `now`. The plan stays open until `commit` or `cancel`."""
        with self._change():
            self.now = now
            plan = StepPlan(self.step + 1, now, self.config.max_num_batched_tokens)
            opened = OpenPlan(plan)
            self._open.append(opened)
            if left := list(
                self.blocks.ops
            ):  # of a request swapped out between two steps: they run with this plan
                opened.journal.record(lambda: self.blocks.ops.extend(left))
            self.blocks.journal = self.queues.host.journal = opened.journal
            self.step = self.bus.step = plan.step
            mark = self.bus.num_queued
            self.planner.fill(opened)
            self.blocks.journal = self.queues.host.journal = None
            if self.bus.subs:
                scheduled = {item.request_id: item.num_tokens for item in plan.scheduled}
                event = ev.Step(plan.step, now, plan.token_budget, scheduled, dict(plan.reasons))
                self.bus.emit(event, at=mark)
        return plan

    def commit(
        self,
        plan: StepPlan,
        result: StepResult,
        ends: Ends | None = None,
        drafts: Mapping[str, Sequence[int]] | None = None,
        key_ids: Mapping[str, Sequence[int]] | None = None,
    ) -> list[Update]:
        """Close the oldest open plan as done: append tokens, publish full blocks, end what has ended.

        `ends` names requests that end for a reason that only the engine can see: a stop string, an end id. `drafts`
        are guesses of what follows the new tokens. `key_ids` name the blocks that new tokens complete where the
        requests carry no token ids (a re-run).
        """
        assert self._open and self._open[0].plan is plan, f"step {plan.step} is not the oldest open plan"
        ends = {**(ends or {}), **{rid: ("error", why) for rid, why in result.errors.items()}}
        check_result(plan, result, ends)
        with self._change():
            opened = self._open.pop(0)
            self.queues.host.settle(opened.journal)
            self.bus.step = plan.step  # what follows belongs to this plan, also when a later one is open
            event = None
            if self.bus.subs:
                event = ev.Commit(
                    # in the plan's order, whatever the runner's: equal runs give equal recordings
                    {
                        i.request_id: len(new)
                        for i in plan.scheduled
                        if (new := result.tokens.get(i.request_id))
                    },
                    {rid: list(end) for rid, end in ends.items()},
                    drafts={rid: len(guess) for rid, guess in (drafts or {}).items() if guess},
                )
                self.bus.emit(event)
            updates = self.committer.book(plan, result, ends, drafts or {}, key_ids or {}, event)
            for update in updates:
                request, rid = update.request, update.request.request_id
                if rid in ends or request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
                    self.ending.setdefault(rid, ends.get(rid) or _length_end(request))
            for rid, why in plan.exhausted.items():
                updates.append(Update(self.requests[rid]))
                self.ending.setdefault(rid, ("length", why))
            self._end(updates)
            self.bus.step = self.step
            return updates

    def cancel(self, plan: StepPlan, why: str = "cancelled") -> list[Update]:
        """Close the newest open plan as if it had never been made: the state before `schedule` is back."""
        assert self._open and self._open[-1].plan is plan, f"step {plan.step} is not the newest open plan"
        with self._change():
            opened = self._open.pop()
            for item in plan.scheduled:
                self.requests[item.request_id].num_computed_tokens -= item.num_tokens
            opened.journal.undo()
            if self.bus.subs:
                self.bus.emit(ev.Cancel(why))
            self.step = self.bus.step = plan.step - 1
            return self._end([])

    def _end(self, updates: list[Update]) -> list[Update]:
        """End what has to end, except requests that a still open plan works on: they end when it closes."""
        if not self.ending:
            return updates
        by_id = {update.request.request_id: update for update in updates}
        for rid in [r for r in self.ending if not any(r in opened.touched for opened in self._open)]:
            request, (reason, detail) = self.requests[rid], self.ending.pop(rid)
            self.queues.end(request, reason, detail)
            if rid not in by_id:
                updates.append(by_id.setdefault(rid, Update(request)))
            by_id[rid].finish_reason, by_id[rid].detail = reason, detail
        return updates

    # -- whole state --------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, object]:
        """The whole state as plain data: equal before `schedule` and after `cancel`, and to the folded events."""
        return {"step": self.step, **self.queues.snapshot(), **self.blocks.snapshot()}

    def check(self) -> None:
        """Assert every invariant of queues, pool and open plans."""
        self.queues.check()
        self.blocks.check()
        for opened in self._open:
            assert opened.plan.num_tokens <= opened.plan.token_budget, (
                f"step {opened.plan.step} is over its budget"
            )


def _length_end(request: Request) -> tuple[str, str]:
    return "length", f"{count(request.max_tokens, 'token')} produced"
