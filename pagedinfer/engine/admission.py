"""Admission: which requests may come in, which may join the batch now, and the sentence for those that may not."""

from __future__ import annotations

from pagedinfer.config import EngineConfig
from pagedinfer.engine.plan import StepPlan
from pagedinfer.engine.queues import Queues
from pagedinfer.engine.request import Request
from pagedinfer.errors import DuplicateRequest, RequestError, RequestTooLong, count
from pagedinfer.memory.blocks import BlockManager

__all__ = ["Admission"]


class Admission:
    """Answers with the sentence why not, or None for yes. Looks at queues and pool, changes nothing."""

    def __init__(self, config: EngineConfig, blocks: BlockManager, queues: Queues) -> None:
        self._config = config
        self._blocks = blocks
        self._queues = queues

    def refusal(self, request: Request) -> RequestError | None:
        """The error for a request that can never be served, or not under this id."""
        rid, prompt, config = request.request_id, request.num_prompt_tokens, self._config
        if rid in self._queues.requests:
            return DuplicateRequest(
                f"Request {rid!r} is still live; wait for it, abort it, or use another id."
            )
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
        if (needed := self._blocks.blocks_for(prompt)) > config.num_blocks:
            return RequestTooLong(
                f"Request {rid!r} has {prompt} prompt tokens and needs {needed} blocks of {config.block_size}; the "
                f"whole pool has {config.num_blocks}. Shorten the prompt or raise num_blocks."
            )
        return None

    def why_not_now(self, request: Request, plan: StepPlan, budget: int) -> str | None:
        """Why the head of the queue must wait in this step.

        Its whole known length must fit, beside what running prefills still need and the watermark: an admission
        that is taken back a step later has cost a prefill.
        """
        running, seats = self._queues.running, self._config.max_num_seqs
        if plan.preempted:
            verb = "was" if len(plan.preempted) == 1 else "were"
            return f"{', '.join(plan.preempted)} {verb} preempted in this step"
        if len(running) >= seats:
            return (
                f"all {seats} seats (max_num_seqs) are taken"
                if seats > 1
                else "the only seat (max_num_seqs) is taken"
            )
        if budget == 0:
            return f"token budget of {plan.token_budget} used up"
        needed, free = self._blocks.blocks_for(request.num_tokens), self._blocks.num_free
        promised = sum(self._blocks.num_missing(r.request_id, r.num_tokens) for r in running)
        watermark = self._config.watermark_blocks if running else 0
        if needed + promised + watermark <= free:
            return None
        why = f"needs {count(needed, 'block')}, {free} free"
        why += f", {promised} promised to running requests" if promised else ""
        return why + (f", watermark {watermark}" if watermark else "")

    def why_never(self, request: Request) -> str | None:
        """Why even the whole pool could not hold the request's known tokens."""
        needed = self._blocks.blocks_for(request.num_tokens)
        if needed <= self._config.num_blocks:
            return None
        return (
            f"its {request.num_tokens} tokens need {needed} blocks of {self._config.block_size}, "
            f"the whole pool has {self._config.num_blocks}"
        )
