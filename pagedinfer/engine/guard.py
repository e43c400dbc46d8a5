"""Between the scheduler and a policy: asks, checks the answer, and lets the default decide when it makes no sense.

A policy is often a learner's first try. What it raises, or an answer that cannot be done, is told as an `error`
event ("policy.victim") and costs nothing else: the run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import Any, TypeVar

from pagedinfer.config import EngineConfig
from pagedinfer.engine.interrupt import GuestInterrupt, interruptible
from pagedinfer.engine.look import RequestView, SchedulerView
from pagedinfer.engine.policy import Policy
from pagedinfer.engine.request import Request
from pagedinfer.errors import ConfigError, describe_error
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.events import Error

__all__ = ["Guard"]

T = TypeVar("T")


class Guard:
    """Asks `policy` and takes only answers that can be done.

    Attributes:
        policy: the one that is asked.
        chunks: whether it decides chunks itself even when all pending tokens fit the budget.
    """

    def __init__(self, policy: object, config: EngineConfig, bus: EventBus, view: SchedulerView) -> None:
        if not isinstance(policy, Policy):
            what = f"the class {policy.__name__}" if isinstance(policy, type) else repr(policy)
            raise ConfigError(f"policy is {what:.80}; it must be an object of a class made from Policy.")
        self.policy: Policy = policy
        self.chunks = type(policy).chunk is not Policy.chunk or config.max_chunk_tokens is not None
        self._default = Policy(config)
        self._bus = bus
        self._view = view

    def _ask(self, name: str, ask: Callable[[Policy], T], check: Callable[[T], str | None]) -> T:
        try:
            with interruptible():
                answer = ask(self.policy)
                wrong = check(answer)
        except BaseException as error:  # whatever it is, the plan stays whole; `exit()` too
            if isinstance(error, KeyboardInterrupt) and not isinstance(error, GuestInterrupt):
                raise  # nobody has remembered it: a fork or a re-run, whose scheduler is given up
            wrong = describe_error(error)
        if wrong is None:
            return answer
        if self._bus.subs:
            self._bus.emit(
                Error(f"policy.{name}", f"{type(self.policy).__name__}: {wrong}; the default decides")
            )
        return ask(self._default)

    def order(self, request: Request) -> tuple[Any, ...]:
        """The request's key as a tuple of numbers, so that any two compare."""
        key = self._ask("order", lambda policy: policy.order(request.view, self._view), _check_key)
        return tuple(key) if isinstance(key, tuple | list) else (key,)

    def admit(self, request: Request) -> str | None:
        """The sentence why the request must wait; None for yes, and there is room."""

        def wrong(answer: Any) -> str | None:
            if answer is None:
                short = self._view.shortage(request.view)
                return f"admit() answered None, which says yes, but the request {short}" if short else None
            if isinstance(answer, str) and answer:
                return None
            return f"admit() answered {answer!r:.60}; None says yes, a sentence says why not"

        why: str | None = self._ask("admit", lambda policy: policy.admit(request.view, self._view), wrong)
        return why

    def chunk(self, requests: Sequence[Request], budget: int) -> Mapping[str, int]:
        """Tokens by request id, within pending tokens and budget."""
        views = [request.view for request in requests]
        pending = {request.request_id: request.num_pending_tokens for request in requests}
        return self._ask(
            "chunk",
            lambda policy: policy.chunk(views, budget, self._view),
            lambda answer: _check_shares(answer, pending, budget),
        )

    def victim(self, request: Request, candidates: Sequence[Request]) -> Request:
        """One of `candidates`."""
        views = [candidate.view for candidate in candidates]
        by_id = {candidate.request_id: candidate for candidate in candidates}
        chosen = self._ask(
            "victim",
            lambda policy: policy.victim(request.view, views, self._view),
            lambda answer: (
                None
                if isinstance(answer, RequestView) and answer.request_id in by_id
                else f"victim() answered {answer!r:.60}; it must be one of the candidates "
                f"({', '.join(list(by_id)[:8])})"
            ),
        )
        return by_id[chosen.request_id]

    def preempt_mode(self, victim: Request) -> str:
        """Whether the victim recomputes or is swapped."""
        return self._ask(
            "preempt_mode",
            lambda policy: policy.preempt_mode(victim.view, self._view),
            lambda answer: (
                None
                if answer in ("recompute", "swap")
                else f"preempt_mode() answered {answer!r:.60}; it must be 'recompute' or 'swap'"
            ),
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isnan(value)


def _check_key(key: Any) -> str | None:
    parts = key if isinstance(key, tuple | list) and key else (key,)
    return (
        None
        if all(map(_is_number, parts))
        else f"order() answered {key!r:.60}; it must be a number or a tuple of numbers"
    )


def _check_shares(shares: Any, pending: Mapping[str, int], budget: int) -> str | None:
    if not isinstance(shares, Mapping):
        return f"chunk() answered a {type(shares).__name__}; it must be a mapping from request id to tokens"
    for rid, share in shares.items():
        if rid not in pending:
            return f"chunk() gave tokens to {rid!r:.60}, which was not among the requests"
        if isinstance(share, bool) or not isinstance(share, int) or not 0 <= share <= pending[rid]:
            return f"chunk() gave {rid} {share!r:.60} tokens; it has {pending[rid]} to compute"
    total = sum(shares.values())
    if not total and budget and any(pending.values()):
        return "chunk() gave nobody a token; a step that computes nothing helps nobody"
    return f"chunk() gave {total} tokens; the budget is {budget}" if total > budget else None
