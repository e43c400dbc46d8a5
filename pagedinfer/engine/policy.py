"""The decisions of a scheduler that can be replaced: five methods, each with a sound default.

A policy looks and answers; the scheduler checks the answer and does the work. Override one method, or mix classes
that each override one (`engine.policies` has those with names). What a method raises, or an answer that makes no
sense, becomes an `error` event and the default decides instead (`engine.guard`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pagedinfer.config import EngineConfig
from pagedinfer.engine.look import RequestView, SchedulerView

__all__ = ["Policy"]


class Policy:
    """First come, first served; oldest first within the budget; the newest gives way and recomputes.

    Attributes:
        moving_key: True when a waiting request's `order` changes while it waits. The queue is then sorted again for
            each step, O(n log n) in the waiting requests; with fixed keys a change costs O(log n).
        waiting_first: True when a step admits before it serves running requests.
        config: the engine's settings, where parameters come from.
    """

    moving_key: ClassVar[bool] = False
    waiting_first: ClassVar[bool] = False

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def order(self, request: RequestView, view: SchedulerView) -> Any:
        """The request's place among the waiting: smaller comes in earlier, equal ones by arrival."""
        return request.arrival

    def admit(self, request: RequestView, view: SchedulerView) -> str | None:
        """Why the request at the head must wait although a seat and the step's budget would take it; None for yes.

        The default keeps room for what running prefills still need and for the watermark: an admission that is
        taken back a step later has cost a prefill.
        """
        promised = view.num_promised_blocks
        watermark = self.config.watermark_blocks if view.num_running else 0
        why = view.shortage(request, promised + watermark)
        if why is None:
            return None
        why += f", {promised} promised to running requests" if promised else ""
        return why + (f", watermark {watermark}" if watermark else "")

    def chunk(self, requests: Sequence[RequestView], budget: int, view: SchedulerView) -> Mapping[str, int]:
        """Tokens for each request in this step, by id; 0 or absent for none. At most `budget` in all.

        Asked once for the running requests (in the order in which they are served), then for each one admitted.
        The default serves decodes first, then prefills in order, each at most `max_chunk_tokens`.
        """
        shares: dict[str, int] = {}
        cap = self.config.max_chunk_tokens or budget
        for request in sorted(requests, key=lambda r: not r.is_decoding):
            shares[request.request_id] = share = min(request.num_pending_tokens, budget, cap)
            budget -= share
        return shares

    def victim(
        self, request: RequestView, candidates: Sequence[RequestView], view: SchedulerView
    ) -> RequestView:
        """Who gives its blocks for `request`; `candidates` are the running requests, `request` among them.

        Answering `request` itself means: it waits. The default is the newest. The oldest running request is never
        among the candidates unless it is `request` and alone, so that something always goes on.
        """
        return candidates[-1]

    def preempt_mode(self, victim: RequestView, view: SchedulerView) -> str:
        """How the victim goes: "recompute" or "swap", which is recompute when the host pool has no room."""
        return "recompute"

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
