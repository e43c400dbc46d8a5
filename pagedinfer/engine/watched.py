"""The side of an engine that one looks at: requests, snapshot, metrics, and where events go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedinfer.checks import check_text
from pagedinfer.config import EngineConfig
from pagedinfer.engine.callers import Callers
from pagedinfer.engine.drafter import NgramDrafter
from pagedinfer.engine.operations import Operations
from pagedinfer.engine.protocols import Runner
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.engine.speculation import Speculation
from pagedinfer.errors import EngineClosed, UnknownRequest
from pagedinfer.trace.bus import EventBus, Subscription
from pagedinfer.trace.events import Event

__all__ = ["Watched"]


class Watched:
    """What an engine shows of itself. `Engine` fills the attributes."""

    config: EngineConfig
    runner: Runner
    bus: EventBus
    scheduler: Scheduler
    _info: dict[str, Any]
    _operations: Operations
    _callers: Callers
    _speculation: Speculation
    _num_requests: int
    _num_prompt_tokens: int
    _num_output_tokens: int
    _stepping: bool
    _closed: bool
    _clock: Callable[[], float] | None

    @property
    def why_no_twin(self) -> str:
        """What keeps `Engine.twin` from making this engine again, "" when nothing does."""
        if self._clock is not None:
            return "a clock of its own"
        if type(self._speculation.drafter) not in (type(None), NgramDrafter):
            return "a drafter of its own"
        return "" if hasattr(self.runner, "twin") else f"a {type(self.runner).__name__}"

    @property
    def _lock(self) -> Any:
        return self._operations.lock

    def is_live(self, request_id: str) -> bool:
        """Whether a request, or a child of one, of this id has not ended."""
        check_text("request_id", request_id)
        return request_id in self._callers.groups or request_id in self.scheduler.requests

    def request(self, request_id: str) -> Request:
        """A live request, to look at.

        Raises:
            UnknownRequest: no live request has this id.
        """
        check_text("request_id", request_id)
        if group := self._callers.groups.get(request_id):
            raise UnknownRequest(
                f"Request {request_id!r} has several outputs, each a request: {', '.join(group.live)}."
            )
        try:
            return self.scheduler.requests[request_id]
        except KeyError:
            raise UnknownRequest(f"No live request {request_id!r}: it never came, or it has ended.") from None

    def snapshot(self) -> dict[str, Any]:
        """Queues, requests, block tables, ref counts and the free list, as plain data."""
        with self._lock:
            return self.scheduler.snapshot()

    def check(self) -> None:
        """Assert every invariant of queues and pool. Between steps."""
        with self._lock:
            self.scheduler.check()
            self._callers.check(self.scheduler.requests)

    def metrics(self) -> dict[str, int | float]:
        """Counts now and since the start. `kv_usage` is a share, 0 to 1; `num_draft_tokens` are computed drafts.

        `prefix_hit_rate` is the share of prompt tokens that first admissions found in the prefix cache.

        A request with several outputs counts once in `num_requests`, its prompt once in `num_prompt_tokens`; for the
        scheduler (`num_submitted`, `num_running`, ...) each output is a request.
        """
        with self._lock:
            scheduler = self.scheduler
            queried, hit = scheduler.queues.num_queried_tokens, scheduler.queues.num_hit_tokens
            return {
                "num_steps": scheduler.step,
                "num_requests": self._num_requests,
                "num_prompt_tokens": self._num_prompt_tokens,
                "num_output_tokens": self._num_output_tokens,
                "num_draft_tokens": self._speculation.num_draft_tokens,
                "num_accepted_tokens": self._speculation.num_accepted_tokens,
                "num_running": len(scheduler.running),
                "num_waiting": len(scheduler.waiting),
                "num_swapped": len(scheduler.queues.swapped),
                "num_submitted": scheduler.queues.num_submitted,
                "num_finished": scheduler.queues.num_finished,
                "num_preemptions": scheduler.queues.num_preemptions,
                "num_free_blocks": scheduler.blocks.num_free,
                "kv_usage": scheduler.blocks.kv_usage,
                "prefix_hit_rate": hit / queried if queried else 0.0,
            }

    def attach(
        self, fn: Callable[[Event], None], begin: Callable[[dict[str, Any], dict[str, Any]], None]
    ) -> Subscription | None:
        """Subscribe `fn`, after `begin(describe(), snapshot())` with the state just before the first event of `fn`.

        Inside a step or a subscriber, where a change may be half told, it does neither and returns None.
        """
        with self._lock:  # asked under it: before it is ours another thread may be in a step
            if self._stepping or self.bus.is_delivering or self.scheduler.is_changing:
                return None
            begin(self.describe(), self.scheduler.snapshot())
            return self.bus.subscribe(fn)

    def describe(self) -> dict[str, Any]:
        """Settings and facts for the first event of a recording."""
        return {"config": self.config.to_dict(), "info": self._info}

    def __repr__(self) -> str:
        now, num_blocks = self.metrics(), self.scheduler.blocks.num_blocks
        return (
            f"Engine(step {now['num_steps']}: {now['num_running']} running, {now['num_waiting']} waiting, "
            f"{num_blocks - now['num_free_blocks']} of {num_blocks} blocks used"
            f"{', closed' if self._closed else ''})"
        )

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><th>{name}</th><td>{value:g}</td></tr>" for name, value in self.metrics().items()
        )
        return f"<table><caption>{escape(repr(self))}</caption><tbody>{rows}</tbody></table>"

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("The engine is closed; make a new one.")
