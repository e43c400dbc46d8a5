"""The scheduler: who computes how many tokens in the next step, and who has to wait or give way.

There is no prefill phase and no decode phase. Each request has `num_tokens` and `num_computed_tokens`; a step spends
a token budget on letting computed catch up, running requests first, then waiting ones, both first come, first
served (iteration-level scheduling: Yu et al., "Orca", OSDI 2022; chunked prefill: Agrawal et al., "Sarathi-Serve",
OSDI 2024; the single rule: vLLM V1).

Progress: the oldest request is never preempted for a younger one, and a request that the whole pool could not hold
is ended, not retried. So each step computes a token, ends a request, or frees blocks for the oldest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pagedinfer.config import EngineConfig
from pagedinfer.engine.admission import Admission
from pagedinfer.engine.plan import ScheduledRequest, StepPlan, StepResult
from pagedinfer.engine.queues import Queues
from pagedinfer.engine.request import Request, Status
from pagedinfer.errors import OutOfBlocks, RequestError, UnknownRequest, count
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.journal import Journal
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus

__all__ = ["Scheduler", "Update"]

Ends = Mapping[str, tuple[str, str]]
"""Request id -> (finish reason, the sentence that explains it)."""


@dataclass(slots=True)
class Update:
    """What a commit changed for one request.

    Attributes:
        request: the request, its new tokens already appended.
        new_token_ids: the tokens that this step added.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        detail: the sentence that explains the end.
    """

    request: Request
    new_token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    detail: str = ""


@dataclass(slots=True)
class _OpenPlan:
    plan: StepPlan
    journal: Journal = field(default_factory=Journal)
    touched: set[str] = field(default_factory=set)


class Scheduler:
    """Makes plans and closes them. Pure bookkeeping: it never sees a tensor, a token's value or a clock.

    A plan is a transaction: open from `schedule` until `commit` or `cancel`. Several may be open (the next step is
    planned while one runs); they commit oldest first and cancel newest first.

    Attributes:
        config: limits and pool size.
        bus: where events go.
        blocks: the block manager.
        queues: live requests, waiting and running.
        admission: who may come in, and who may join the batch.
        step: number of the last plan.
        is_changing: whether the books are half written; only code that interrupts this thread can see True.
    """

    def __init__(self, config: EngineConfig, bus: EventBus | None = None) -> None:
        self.config = config
        self.bus = bus or EventBus()
        self.blocks = BlockManager(config.num_blocks, config.block_size, self.bus)
        self.queues = Queues(config, self.blocks, self.bus)
        self.admission = Admission(config, self.blocks, self.queues)
        self.step = 0
        self.is_changing = False
        self._open: list[_OpenPlan] = []
        self._ending: dict[str, tuple[str, str]] = {}  # ends that wait for an open plan to close

    @property
    def waiting(self) -> deque[Request]:
        """Requests without a place in the batch, in order of arrival."""
        return self.queues.waiting

    @property
    def running(self) -> list[Request]:
        """Requests with a place in the batch, in order of arrival."""
        return self.queues.running

    @property
    def requests(self) -> dict[str, Request]:
        """Every live request by id."""
        return self.queues.requests

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Around each change: events go out at its end, when the books are whole and subscribers may change more."""
        with self.bus.hold():
            outer, self.is_changing = self.is_changing, True
            try:
                yield
            finally:
                self.is_changing = outer

    # -- requests come and go -----------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queue a request.

        Raises:
            DuplicateRequest: a live request has the same id.
            RequestTooLong: the prompt can never fit the context or the pool.
            RequestError: the prompt is empty, or no token is asked for.
        """
        rid, prompt, priority = request.request_id, request.num_prompt_tokens, request.priority
        if error := self.admission.refusal(request):
            if self.bus.subs:
                self.bus.emit(ev.Reject(rid, prompt, request.max_tokens, priority, now, str(error)))
            raise error
        request.max_tokens = min(request.max_tokens, self.config.max_model_len - prompt)
        with self._change():
            self.queues.add(request)
            if self.bus.subs:
                self.bus.emit(ev.Submit(rid, prompt, request.max_tokens, priority, now))

    def abort(self, request_id: str) -> list[Update]:
        """Give a request up. It ends at once, or when the open plan that works on it closes.

        Raises:
            UnknownRequest: no live request has this id.
        """
        if request_id not in self.requests:
            raise UnknownRequest(f"No live request {request_id!r}: it never came, or it has ended.")
        with self._change():
            if self.bus.subs:
                self.bus.emit(ev.Abort(request_id))
            self._ending.setdefault(request_id, ("abort", "aborted by the caller"))
            return self._end([])

    def preempt(self, request_id: str, why: str) -> None:
        """Preempt a running request from outside (fault injection, teaching); refused while a plan is open.

        Raises:
            RequestError: a plan is open, or the request is not running.
        """
        request = self.requests.get(request_id)
        if self._open or self.is_changing or request is None or request.status != Status.RUNNING:
            raise RequestError(f"Request {request_id!r} cannot be preempted: it must run, with no plan open.")
        with self._change():
            self.queues.preempt(request, why)

    # -- the plan -----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step at time `now`. The plan stays open until `commit` or `cancel`."""
        with self._change():
            plan = StepPlan(self.step + 1, now, self.config.max_num_batched_tokens)
            opened = _OpenPlan(plan)
            self._open.append(opened)
            self.blocks.journal = opened.journal
            self.step = self.bus.step = plan.step
            mark = self.bus.num_queued
            budget = self._schedule_running(opened, plan.token_budget)
            self._schedule_waiting(opened, budget)
            self.blocks.journal = None
            if self.bus.subs:
                scheduled = {item.request_id: item.num_tokens for item in plan.scheduled}
                event = ev.Step(plan.step, now, plan.token_budget, scheduled, dict(plan.reasons))
                self.bus.emit(event, at=mark)
        return plan

    def _schedule_running(self, opened: _OpenPlan, budget: int) -> int:
        """Give running requests their tokens, oldest first, preempting from the young end. Returns what is left."""
        plan, position = opened.plan, 0
        while position < len(self.running):
            request = self.running[position]
            position += 1
            rid, pending = request.request_id, request.num_pending_tokens
            if pending == 0 or rid in self._ending:
                continue  # its newest token is still being computed in an open plan, or it is about to end
            if budget == 0:
                plan.reasons[rid] = f"token budget of {plan.token_budget} used up"
            elif why := self.admission.why_never(request):
                self._exhaust(opened, request, why)
            elif (new := self._allocate_or_preempt(opened, request, min(pending, budget))) is not None:
                self._place(opened, request, min(pending, budget), new)
                budget -= min(pending, budget)
        return budget

    def _allocate_or_preempt(
        self, opened: _OpenPlan, request: Request, num_tokens: int
    ) -> tuple[int, ...] | None:
        """Blocks for a running request, taken from the youngest if need be. None: the request itself gave way."""
        end = request.num_computed_tokens + num_tokens
        while True:
            try:
                return self.blocks.allocate(request.request_id, end)
            except OutOfBlocks as error:
                victim = self.running[-1]
                if any(victim.request_id in other.touched for other in self._open):
                    opened.plan.reasons[request.request_id] = (
                        f"{error}; {victim.request_id} is in an open step"
                    )
                    return None
                for_whom = "it is the newest" if victim is request else f"{request.request_id} is older"
                self.queues.preempt(victim, f"{request.request_id} {error}; {for_whom}")
                opened.touched.add(victim.request_id)
                opened.plan.preempted.append(victim.request_id)
                if victim is request:
                    return None

    def _schedule_waiting(self, opened: _OpenPlan, budget: int) -> None:
        """Admit from the head of the queue while seats, budget and blocks allow. Nobody overtakes."""
        plan, position = opened.plan, 0
        while position < len(self.waiting):
            request = self.waiting[position]
            if request.request_id in self._ending:
                position += 1
            elif why := self.admission.why_never(request):
                self._exhaust(opened, request, why)
                position += 1
            elif why := self.admission.why_not_now(request, plan, budget):
                plan.reasons[request.request_id] = why
                return
            else:
                num_tokens = min(request.num_pending_tokens, budget)
                try:
                    new_block_ids = self.blocks.allocate(request.request_id, num_tokens)
                except OutOfBlocks as error:  # enough are free: fault injection said no
                    plan.reasons[request.request_id] = f"{error}, refused"
                    return
                self.queues.admit(request)
                self._place(opened, request, num_tokens, new_block_ids)
                budget -= num_tokens

    def _exhaust(self, opened: _OpenPlan, request: Request, why: str) -> None:
        opened.touched.add(request.request_id)
        opened.plan.exhausted[request.request_id] = why

    def _place(
        self, opened: _OpenPlan, request: Request, num_tokens: int, new_block_ids: tuple[int, ...]
    ) -> None:
        """Put the request's next `num_tokens` tokens into the plan; they count as computed until a cancel."""
        rid, start, params = request.request_id, request.num_computed_tokens, request.params
        is_prefill = start == 0 or request.num_pending_tokens > 1
        request.num_computed_tokens = start + num_tokens
        samples = request.num_computed_tokens == request.num_tokens
        index = request.num_output_tokens
        opened.touched.add(rid)
        opened.plan.scheduled.append(
            ScheduledRequest(
                rid, start, num_tokens, samples, index, is_prefill, new_block_ids,
                self.blocks.table(rid), request.token_ids, params, request.seed,
                request.end_token_ids if index < params.min_tokens else (),
                request.num_prompt_tokens, request.rules,
            )
        )  # fmt: skip

    # -- closing a plan -----------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, ends: Ends | None = None) -> list[Update]:
        """Close the oldest open plan as done: append tokens, end what has ended, free its blocks.

        `ends` names requests that end for a reason that only the engine can see: a stop string, an end id.
        """
        assert self._open and self._open[0].plan is plan, f"step {plan.step} is not the oldest open plan"
        ends = {**(ends or {}), **{rid: ("error", why) for rid, why in result.errors.items()}}
        _check_result(plan, result, ends)
        with self._change():
            self._open.pop(0)
            self.bus.step = plan.step  # what follows belongs to this plan, also when a later one is open
            if self.bus.subs:
                numbers = {rid: len(tokens) for rid, tokens in result.tokens.items() if tokens}
                self.bus.emit(ev.Commit(numbers, {rid: list(end) for rid, end in ends.items()}))
            updates = []
            for item in plan.scheduled:
                request = self.requests[item.request_id]
                new = result.tokens.get(item.request_id, ())
                request.append(new)
                updates.append(Update(request, new))
                if end := ends.get(item.request_id) or _length_end(request):
                    self._ending.setdefault(item.request_id, end)
            for rid, why in plan.exhausted.items():
                updates.append(Update(self.requests[rid]))
                self._ending.setdefault(rid, ("length", why))
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
        if not self._ending:
            return updates
        by_id = {update.request.request_id: update for update in updates}
        for rid in [r for r in self._ending if not any(r in opened.touched for opened in self._open)]:
            request, (reason, detail) = self.requests[rid], self._ending.pop(rid)
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


def _check_result(plan: StepPlan, result: StepResult, ends: Ends) -> None:
    """Assert that each request that samples got a token or an end: without, it would stand still for ever."""
    sampled = {item.request_id for item in plan.scheduled if item.samples}
    assert result.tokens.keys() <= sampled, f"tokens for requests that did not sample in step {plan.step}"
    assert ends.keys() <= {item.request_id for item in plan.scheduled}, (
        f"ends of requests outside step {plan.step}"
    )
    silent = [rid for rid in sampled if not result.tokens.get(rid) and rid not in ends]
    assert not silent, f"step {plan.step} brought neither a token nor an end for {silent}"


def _length_end(request: Request) -> tuple[str, str] | None:
    if request.num_output_tokens < request.max_tokens:
        return None
    return "length", f"{count(request.max_tokens, 'token')} produced"
