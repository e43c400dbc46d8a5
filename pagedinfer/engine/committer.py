"""What a step's result changes: tokens are appended, guesses that did not come true go, full blocks are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedinfer.engine.plan import StepPlan, StepResult
from pagedinfer.engine.request import Request
from pagedinfer.trace import events as ev

if TYPE_CHECKING:
    from pagedinfer.engine.scheduler import Scheduler

__all__ = ["Committer", "Ends", "Update", "check_result"]

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


class Committer:
    """Enters results into a scheduler's books, for `Scheduler.commit`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._requests = scheduler.requests
        self._blocks = scheduler.blocks
        self._keys = scheduler.keys
        self._caches = scheduler.caches
        self._block_size = scheduler.config.block_size

    def book(
        self,
        plan: StepPlan,
        result: StepResult,
        ends: Ends,
        drafts: Mapping[str, Sequence[int]],
        key_ids: Mapping[str, Sequence[int]],
        event: ev.Commit | None,
    ) -> list[Update]:
        """Give each request of the plan its tokens; `event` learns the keys of blocks that they fill."""
        updates = []
        for item in plan.scheduled:
            rid = item.request_id
            request, new = self._requests[rid], result.tokens.get(rid, ())
            written = item.start + item.num_tokens
            if item.draft_token_ids:
                written = self._roll_back(request, written, len(item.draft_token_ids), len(new))
            if new:
                request.append(new)
                if drafts:
                    request.draft_token_ids = drafts.get(rid, ())
            if self._caches and written >= request.publish_at and not self._has_failed(rid, ends):
                self._publish(request, written, key_ids.get(rid, ()), event)
            updates.append(Update(request, new))
        return updates

    def _has_failed(self, rid: str, ends: Ends) -> bool:
        """Whether the request ends for an error, in this plan or an older one: who knows what it wrote."""
        reason, _ = ends.get(rid) or self._scheduler.ending.get(rid, ("", ""))
        return reason == "error"

    def _publish(
        self, request: Request, written: int, key_ids: Sequence[int], event: ev.Commit | None
    ) -> None:
        rid = request.request_id
        completed = self.extend_keys(request, key_ids)
        if completed and event is not None:
            event.keys[rid] = completed
        is_first = not request.publish_at
        self._blocks.publish(rid, request.keys, written, request.retain, is_first=is_first)
        request.publish_at = (written // self._block_size + 1) * self._block_size

    def _roll_back(self, request: Request, written: int, num_drafts: int, num_new: int) -> int:
        """Guesses that did not come true: their keys and values count for nothing. Returns the tokens written."""
        rejected = num_drafts + 1 - num_new if num_new else num_drafts
        request.draft_token_ids = ()
        if rejected > 0:
            request.num_computed_tokens -= rejected
            self._blocks.trim(request.request_id, request.num_computed_tokens)
        return written - max(0, rejected)

    def extend_keys(self, request: Request, key_ids: Sequence[int]) -> list[int]:
        """Keys of the blocks that the known tokens have completed; their ids."""
        if not self._caches or request.params.prompt_logprobs is not None:
            return []  # a prompt is scored by computing it, so its request takes nothing from the cache
        if not request.token_ids:
            self._keys.named(request.keys, key_ids)
            return list(key_ids)
        size = self._block_size
        if len(request.keys) == request.num_tokens // size:
            return []
        root = self._keys.root(salt=request.salt) if request.salt else None
        return self._keys.extend(request.keys, root, request.token_ids, size)


def check_result(plan: StepPlan, result: StepResult, ends: Ends) -> None:
    """Assert that each request that samples got a token or an end: without, it would stand still for ever."""
    sampled = {item.request_id for item in plan.scheduled if item.samples}
    assert result.tokens.keys() <= sampled, f"tokens for requests that did not sample in step {plan.step}"
    if ends:
        assert ends.keys() <= {item.request_id for item in plan.scheduled}, (
            f"ends of requests outside step {plan.step}"
        )
    silent = [rid for rid in sampled if not result.tokens.get(rid) and rid not in ends]
    assert not silent, f"step {plan.step} brought neither a token nor an end for {silent}"
