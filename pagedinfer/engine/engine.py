"""The engine: requests in, tokens out, one step at a time.

Every other way to run (`LLM`, notebooks, the simulator) is a loop around `Engine.step`; there is no second engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any

from pagedinfer.checks import MAX_FLOAT, check_int, check_real, check_text
from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.callers import Callers, Outbox
from pagedinfer.engine.drafter import Drafter, NgramDrafter
from pagedinfer.engine.group import child_ids, child_seed, split
from pagedinfer.engine.intake import MakeMask, Prompt, check_params, make_rules, read_prompt
from pagedinfer.engine.interrupt import DeferredInterrupt
from pagedinfer.engine.live import LiveRequest
from pagedinfer.engine.operations import Operations
from pagedinfer.engine.options import RequestOptions
from pagedinfer.engine.output import RequestOutput
from pagedinfer.engine.plan import StepResult
from pagedinfer.engine.policy import Policy
from pagedinfer.engine.pool_control import PoolControl
from pagedinfer.engine.protocols import Runner, Tokenizer
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler, Update
from pagedinfer.engine.speculation import Speculation
from pagedinfer.errors import (
    ConfigError,
    DuplicateRequest,
    PagedInferError,
    RequestError,
    describe_error,
)
from pagedinfer.memory.make import MakeMemory, make_allocator
from pagedinfer.randomness import mix
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.events import Error

__all__ = ["Engine"]


class Engine(PoolControl):
    """Schedules, runs and commits steps over a runner.

    Thread-safe: one lock guards each call, so widget callbacks and cells may share an engine.

    Attributes:
        config: the limits and the pool.
        bus: events; subscribe here, or use `Recorder(engine)`.
        scheduler: queues and block manager, to look at.
        runner: what computes.
        eos_token_ids: ids that end an output.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        clock: Callable[[], float] | None = None,
        wall_clock: Callable[[], float] | None = None,
        info: dict[str, Any] | None = None,
        make_mask: MakeMask | None = None,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        make_memory: MakeMemory = make_allocator,
    ) -> None:
        """Make an engine.

        `clock` gives the time for decisions; the default counts steps, so that equal seeds give equal recordings.
        `wall_clock` only stamps events. `info` goes into recordings (model name, dtype, ...). `make_mask` makes the
        mask of one structured output; without it they are refused. `drafter` guesses tokens; the default looks for
        n-grams in the request's own text when `config.num_draft_tokens` asks for it. `policy` decides instead of
        the one that `config` names, and `make_memory(config, bus)` makes the memory.
        """
        self.config = config
        self.runner = runner
        self.bus = EventBus(wall_clock)
        self._make_memory = make_memory
        self.scheduler = Scheduler(config, self.bus, policy, make_memory)
        self._tokenizer = tokenizer
        own = tokenizer.eos_token_ids if tokenizer is not None else ()
        self.eos_token_ids = tuple(sorted({*own, *eos_token_ids}))
        self._seed = seed
        self._clock = clock
        self._info = dict(info or {})
        self._operations = Operations()
        self._make_mask = make_mask
        if drafter is None and config.num_draft_tokens:
            drafter = NgramDrafter(config.num_draft_tokens)
        self._speculation = Speculation(drafter, runner.vocab_size, self.bus)
        self._callers = Callers(self._speculation.forget)
        self._num_requests = 0  # as callers count: one, however many outputs
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._stepping = False
        self._closed = False

    def twin(self, config: EngineConfig) -> Engine:
        """A fresh engine over the same model with other settings, a pool of its own, and no requests.

        Raises:
            ConfigError: this engine has a clock or a drafter of its own, or a runner without `twin`.
        """
        if what := self.why_no_twin:
            raise ConfigError(
                f"This engine has {what}, so it cannot be made again; fork its recording instead."
            )
        make_runner: Callable[[EngineConfig], Runner] = getattr(self.runner, "twin")  # noqa: B009, no part of Runner
        policy = self.scheduler.guard.policy
        own = None if type(policy).__name__ in ("ConfiguredPolicy", "Policy") else type(policy)(config)
        return Engine(
            config, make_runner(config), tokenizer=self._tokenizer, eos_token_ids=self.eos_token_ids,
            seed=self._seed, info=self._info, make_mask=self._make_mask, policy=own, make_memory=self._make_memory,
        )  # fmt: skip

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int | str = 0,
        *,
        outbox: Outbox | None = None,
        **options: Any,
    ) -> str:
        """Queue a prompt; returns its request id ("r0", "r1", ... when none is given).

        `options` are those of `RequestOptions`: tenant, deadline, timeout, cache_salt, retain.

        With `outbox` the request's outputs are appended there, and `step` does not return them: whoever waits for
        this request gets them, whoever steps or aborts.

        Raises:
            RequestError: the prompt cannot be used. RequestTooLong: it can never fit. DuplicateRequest: the id lives.
            ConfigError: the parameters do not suit this model.
        """
        with self._lock:
            self._check_open()
            wishes = RequestOptions(priority=priority, **options)
            vocab_size, has_logits = self.runner.vocab_size, getattr(self.runner, "has_logits", True)
            params = check_params(params, self._tokenizer, vocab_size, has_logits)
            text, token_ids = read_prompt(prompt, self._tokenizer, vocab_size)
            request_id = self._name(request_id, params.num_children)
            requests = self._make_requests(request_id, token_ids, params)
            with self._operations.run(), self.bus.hold():
                self._check_open()  # reading a long prompt takes time: a signal handler may have closed it
                now = self._now()
                for request in requests:  # if one is refused it is the first: they differ in seed and id only
                    wishes.apply(request, now)
                    self.scheduler.submit(request, now, len(requests) if request is requests[0] else 1)
                    self._callers.add(LiveRequest(request, text, self._tokenizer, outbox))
                self._num_requests += 1
                self._num_prompt_tokens += len(token_ids)
                if len(requests) > 1:
                    children = [request.request_id for request in requests]
                    self._callers.add_group(request_id, params, children, outbox)
            return request_id

    def _name(self, request_id: str | None, num_children: int) -> str:
        if request_id is None:
            names = (f"r{n}" for n in count(self._num_requests))
            return next(
                rid for rid in names if not any(map(self.is_live, (rid, *child_ids(rid, num_children))))
            )
        if not isinstance(request_id, str) or not request_id:
            raise ConfigError(f"request_id={request_id!r}: it must be a non-empty string.")
        if self.is_live(request_id):
            raise DuplicateRequest(f"Request {request_id!r} is still live; wait for it, or use another id.")
        return request_id

    def _make_requests(self, request_id: str, token_ids: list[int], params: SamplingParams) -> list[Request]:
        """The request, or its children when it has several outputs."""
        eos = () if params.ignore_eos else self.eos_token_ids
        if params.structured_outputs is not None and not eos:
            raise ConfigError("structured_outputs need an end-of-sequence id and this model has none.")
        whole = Request(
            request_id,
            len(token_ids),
            self.config.max_model_len if params.max_tokens is None else params.max_tokens,
            params=params,
            token_ids=token_ids,
            seed=params.seed if params.seed is not None else mix(self._seed, self._num_requests),
            end_token_ids=(*eos, *(params.stop_token_ids or ())),
        )
        requests = [whole] if params.num_children == 1 else split(whole)
        for request in requests:
            # The scheduler refuses a live id, but of a group it does not see the caller's.
            ids = () if request is whole else (request_id, request.request_id)
            if live := [rid for rid in ids if rid in self.scheduler.requests]:
                raise DuplicateRequest(
                    f"Request {live[0]!r} is still live; {request_id!r} needs this id for its outputs."
                )
            request.rules = make_rules(params, self._tokenizer, self._make_mask)
        return requests

    def fork(
        self,
        request_id: str,
        new_id: str | None = None,
        *,
        last_token_id: int | None = None,
        seed: int | None = None,
        outbox: Outbox | None = None,
    ) -> str:
        """Copy a live request as it stands, between two steps; returns the copy's id. They share their blocks.

        The copy has the same tokens so far, but for the last output token if `last_token_id` names another, and goes
        its own way from there: it draws with `seed` (default: one of its own). With temperature 0, or with the
        parent's seed, it needs another last token to differ. A child of several outputs can be copied; the copy is
        none of them.

        Raises:
            UnknownRequest: no live request has this id. DuplicateRequest: the new one lives. QueueFull: too many wait.
            RequestError: a step is open, or `last_token_id` cannot be: the prompt's last token stays, ids are those
                of the vocabulary, and the output must go on. ConfigError: `seed` is no integer of 64 bits.
        """
        with self._lock:
            self._check_open()
            parent = self.request(request_id)
            new_id = self._name(new_id, 1)
            if seed is None:
                seed = mix(child_seed(parent.seed, 1), self._num_requests)
            else:  # the runner would choke on it in each step from now on, and all other requests with it
                check_int("seed", seed, -(2**63), 2**64 - 1)
            rules = make_rules(parent.params, self._tokenizer, self._make_mask)
            request = parent.fork(new_id, seed=seed, rules=rules)
            if last_token_id is not None:
                self._replace_last(request, last_token_id)
            live = self._callers.live[request_id].fork(request, outbox)
            with self._operations.run(), self.bus.hold():
                self.scheduler.fork(request_id, request, self._now())
                self._callers.add(live)
                self._num_requests += 1
            return new_id

    def _replace_last(self, request: Request, token_id: int) -> None:
        if not request.num_output_tokens:
            raise RequestError(f"last_token_id={token_id!r}: {request.request_id!r} copies a prompt alone.")
        vocab_size = self.runner.vocab_size
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise RequestError(f"last_token_id={token_id!r}: ids are integers from 0 to {vocab_size - 1}.")
        request.token_ids[-1] = token_id

    def abort(self, request_id: str) -> RequestOutput | None:
        """Give a request up, with all its outputs, and free its blocks. Returns what it had produced.

        Inside a step (a callback) it ends when the step closes; None is returned and the step's outputs hold it.
        So it is in the middle of any other change (a signal handler, a finalizer): it ends with that.
        A child ("r0.1") may be given up alone; the others go on.

        Raises:
            UnknownRequest: no live request has this id.
        """
        check_text("request_id", request_id)
        with self._operations.run():
            if self.scheduler.is_changing:
                self._operations.later(lambda: self._callers.deliver(self._give_up(request_id)))
                return None
            outputs = self._callers.collect(self._give_up(request_id))
            for outbox, output in outputs:
                if outbox is not None:
                    outbox.append(output)
            return outputs[0][1] if outputs else None

    def _give_up(self, request_id: str) -> list[Update]:
        group = self._callers.groups.get(request_id)
        ids = [rid for rid in group.live if rid in self.scheduler.requests] if group else [request_id]
        updates = [update for rid in ids for update in self.scheduler.abort(rid)]
        # What an interrupted step left behind says less than the output that is made of these.
        self._callers.undelivered = [
            o for o in self._callers.undelivered if o.finished or o.request_id != request_id
        ]
        return updates

    def has_unfinished(self) -> bool:
        """Whether a request is waiting or running, or an output has not been handed out yet."""
        return not self._closed and bool(self.scheduler.requests or self._callers.undelivered)

    def preempt(self, request_id: str, why: str) -> None:
        """Take a running request's place and blocks between two steps; it recomputes and goes on.

        Raises:
            RequestError: the request is not running, or a step is open.
        """
        check_text("request_id", request_id)
        check_text("why", why)
        with self._operations.run():
            self.scheduler.preempt(request_id, why)

    def hand_back(self, outputs: Sequence[RequestOutput]) -> None:
        """Take outputs back that were not meant for the caller; the next `step` returns them first."""
        with self._lock:
            self._callers.undelivered += outputs

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns an output for each request that computed, or ended, in it.

        A runner that raises costs the step, nothing else: the plan is cancelled and the error raised; the next call
        tries again. Ctrl-C waits for the step's end; a second Ctrl-C cancels the step.
        """
        with self._lock:
            self._check_open()
            if self._stepping or self.scheduler.is_changing:
                raise PagedInferError(
                    "step() was called from inside a step (a subscriber?); call it afterwards."
                )
            with self._operations.run() as interrupt:
                self._stepping = True
                try:
                    now = self._now()
                    self._give_up_overdue(now)
                    if self.scheduler.requests:
                        self._run(now, interrupt)
                finally:
                    self._stepping = False
            outputs, self._callers.undelivered = self._callers.undelivered, []
            return outputs

    def _run(self, now: float, interrupt: DeferredInterrupt) -> None:
        plan = self.scheduler.schedule(now)
        try:
            interrupt.forward = True
            result = self.runner.execute(plan) if plan.scheduled or plan.ops else StepResult({})
            interrupt.forward = False
            plan.check_result(result, self.runner.vocab_size)
        except BaseException as error:
            interrupt.forward = False
            what = describe_error(error)
            try:
                self.runner.take_back(plan)
            finally:
                self._callers.deliver(self.scheduler.cancel(plan, what))
            if isinstance(error, Exception) and self.bus.subs:
                self.bus.emit(Error("runner", what))
            raise
        result, ends = self._callers.look_for_ends(result)
        self._num_output_tokens += sum(map(len, result.tokens.values()))
        drafts = None
        if self._speculation.drafter is not None:
            self._speculation.count(plan, result)
            drafts = self._speculation.propose(self.scheduler.requests, result, ends)
        self._callers.deliver(self.scheduler.commit(plan, result, ends, drafts))

    def _give_up_overdue(self, now: float) -> None:
        for rid in self.scheduler.overdue(now):
            request = self.scheduler.requests[rid]
            why = f"timed out: it came at {request.arrived_at:g} and was given until {request.expires:g}"
            self._callers.deliver(self.scheduler.abort(rid, why))

    def _now(self) -> float:
        if self._clock is None:
            return self.scheduler.step
        now = self._clock()
        check_real("the clock's time", now, -MAX_FLOAT)
        return now

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what lives and free the KV pool. Harmless when called twice; other calls raise `EngineClosed`.

        Inside another call (a callback, a signal handler) it waits for the end of that.
        """
        with self._lock:
            if self._operations.inside and not self._closed:
                self._operations.later(self.close)
                return
        with self._operations.run():
            if self._closed:
                return
            self._closed = True
            alone = [rid for rid in self.scheduler.requests if rid not in self._callers.parents]
            with ExitStack() as rest:  # does each of these, last first, also when another raises
                rest.callback(self.runner.close)
                for request_id in reversed([*self._callers.groups, *alone]):
                    rest.callback(self._end, request_id)

    def _end(self, request_id: str) -> None:
        if self.is_live(request_id):  # a subscriber may have aborted it while another one ended
            self._callers.deliver(self._give_up(request_id))

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
