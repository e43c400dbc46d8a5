"""Admission: which requests may come in, which may join the batch now, and the sentence for those that may not."""

from __future__ import annotations

from pagedinfer.config import EngineConfig
from pagedinfer.engine.plan import StepPlan
from pagedinfer.engine.queues import Queues
from pagedinfer.engine.request import Request
from pagedinfer.errors import ConfigError, DuplicateRequest, QueueFull, RequestError, RequestTooLong, count
from pagedinfer.memory.allocator import KVAllocator

__all__ = ["Admission"]


class Admission:
    """Answers with the sentence why not, or None for yes. Looks at queues and pool, changes nothing."""

    def __init__(self, config: EngineConfig, blocks: KVAllocator, queues: Queues) -> None:
        self._config = config
        self._blocks = blocks
        self._queues = queues

    def refusal(self, request: Request, room_for: int = 1) -> Exception | None:
        """The error for a request that can never be served, not under this id, or not while so many wait.

        `room_for` counts it and those that come with it. Of such a group the first comes here, and the sentence names
        the request as its caller does.
        """
        rid, prompt, config = request.request_id, request.num_prompt_tokens, self._config
        if rid in self._queues.requests:
            return DuplicateRequest(
                f"Request {rid!r} is still live; wait for it, abort it, or use another id."
            )
        if room_for > 1:
            rid = rid.removesuffix(".0")
        if prompt < 1:
            return RequestError(f"Request {rid!r} has an empty prompt; give at least one token.")
        if request.max_tokens < 1:
            return RequestError(
                f"Request {rid!r} asks for {request.max_tokens} new tokens; ask for at least one."
            )
        if prompt >= config.max_model_len:
            return RequestTooLong(
                f"Request {rid!r} has {count(prompt, 'prompt token')}; max_model_len={config.max_model_len} leaves "
                f"room for at most {config.max_model_len - 1} and one new token. Shorten the prompt or raise "
                "max_model_len."
            )
        most = prompt + min(request.max_tokens, config.max_model_len - prompt)
        if why := self._blocks.why_never(prompt, most):
            return RequestTooLong(f"Request {rid!r}: its {why}. Shorten the prompt or raise num_blocks.")
        if request.priority and config.order != "priority":
            return ConfigError(
                f"priority={request.priority!r} of {rid!r} would be ignored under order={config.order!r}; "
                "leave it at 0 or make the engine with order='priority'."
            )
        waiting, limit = len(self._queues.waiting), config.max_num_waiting
        if limit is not None and waiting + room_for > limit:
            many = f" with {room_for} outputs" if room_for > 1 else ""
            return QueueFull(
                f"Request {rid!r}{many}: {waiting} requests wait and max_num_waiting={limit}; try again later."
            )
        return None

    def why_skipped(self, request: Request) -> str | None:
        """Why a waiting request is passed over while others may come in: its tenant has its share."""
        config = self._config
        if config.tenant_max_running is None and config.tenant_max_blocks is None:
            return None
        own = [r for r in self._queues.running if r.tenant == request.tenant]
        if config.tenant_max_running is not None and len(own) >= config.tenant_max_running:
            return f"tenant {request.tenant!r} has {len(own)} running, tenant_max_running={config.tenant_max_running}"
        if config.tenant_max_blocks is not None and own:
            promised = sum(self._blocks.blocks_for(r.max_total_tokens) for r in own)
            needed = self._blocks.blocks_for(request.max_total_tokens)
            if promised + needed > config.tenant_max_blocks:
                return (
                    f"tenant {request.tenant!r} may come to need {promised} + {needed} blocks, "
                    f"tenant_max_blocks={config.tenant_max_blocks}"
                )
        return None

    def why_no_place(self, request: Request, plan: StepPlan, budget: int) -> str | None:
        """Why nobody can join the batch in this step: no seat, or no budget."""
        seats = self._config.max_num_seqs
        if len(self._queues.running) >= seats:
            return (
                f"all {seats} seats (max_num_seqs) are taken"
                if seats > 1
                else "the only seat (max_num_seqs) is taken"
            )
        return f"token budget of {plan.token_budget} used up" if budget == 0 else None

    def why_never(self, request: Request) -> str | None:
        """Why even the whole pool could not hold the request's known tokens."""
        why = self._blocks.why_never(request.num_tokens, request.max_total_tokens)
        return None if why is None else f"its {why}"
