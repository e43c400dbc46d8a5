"""What a policy gets to see: requests and the scheduler, read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedinfer.engine.request import Request
    from pagedinfer.engine.scheduler import Scheduler

__all__ = ["RequestView", "SchedulerView"]

_FIELDS = frozenset(
    ("request_id", "num_prompt_tokens", "max_tokens", "priority", "tenant", "deadline", "arrival", "arrived_at",
     "status", "num_tokens", "num_computed_tokens", "num_cached_tokens", "num_preemptions", "num_output_tokens",
     "num_pending_tokens", "max_total_tokens", "is_decoding")
)  # fmt: skip


class RequestView:
    """A request to look at. Attributes: those of `Request` that are numbers or names.

    `request_id, num_prompt_tokens, max_tokens, priority, tenant, deadline, arrival` (number of the submission),
    `arrived_at` (its time), `status, num_tokens, num_computed_tokens, num_cached_tokens, num_preemptions,
    num_output_tokens, num_pending_tokens, is_decoding` (only its newest token is to be computed),
    `max_total_tokens` (prompt and `max_tokens`).
    """

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        object.__setattr__(self, "_request", request)

    def __getattr__(self, name: str) -> Any:
        if name not in _FIELDS:
            raise AttributeError(
                f"a policy sees no {name!r} of a request; it sees {', '.join(sorted(_FIELDS))}."
            )
        return getattr(self._request, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be set: a policy looks at requests and changes nothing.")

    def __repr__(self) -> str:
        return f"RequestView({self._request!r})"


class SchedulerView:
    """The scheduler to look at, while it makes a plan."""

    __slots__ = ("_scheduler",)

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    @property
    def now(self) -> float:
        """The time given to `schedule`, in the caller's clock (steps by default)."""
        return self._scheduler.now

    @property
    def step(self) -> int:
        """Number of the plan that is being made."""
        return self._scheduler.step

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._scheduler.blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody uses; cached ones count, they can be evicted."""
        return self._scheduler.blocks.num_free

    @property
    def kv_usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self._scheduler.blocks.kv_usage

    @property
    def num_running(self) -> int:
        """Requests with a place in the batch."""
        return len(self._scheduler.running)

    @property
    def running(self) -> list[RequestView]:
        """Requests with a place in the batch, in order of arrival."""
        return [request.view for request in self._scheduler.running]

    @property
    def num_waiting(self) -> int:
        """Requests without a place in the batch."""
        return len(self._scheduler.waiting)

    @property
    def num_admitted(self) -> int:
        """Requests that joined the batch in the plan that is being made."""
        return self._scheduler.planner.num_admitted

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that running requests still need for tokens they have: the rest of their prefills."""
        return self._scheduler.planner.promised()

    @property
    def num_free_host_slots(self) -> int:
        """Blocks that the host pool can take; 0 without one."""
        return self._scheduler.queues.host.num_free

    def num_held_blocks(self, request: RequestView) -> int:
        """Blocks in the request's table."""
        return len(self._scheduler.blocks.table(request.request_id))

    def num_missing_blocks(self, request: RequestView, num_tokens: int) -> int:
        """Blocks to add, over all groups of layers, until the request holds `num_tokens` tokens."""
        return self._scheduler.blocks.num_missing(request.request_id, num_tokens)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return self._scheduler.blocks.blocks_for(num_tokens)

    def shortage(self, request: RequestView, spare: int = 0) -> str | None:
        """Why a waiting request cannot come in leaving `spare` blocks free; None when it can."""
        return self._scheduler.planner.sharing.shortage(request._request, spare)

    def num_cached_tokens(self, request: RequestView) -> int:
        """Tokens of a waiting request that the prefix cache holds now."""
        known = request._request
        return self._scheduler.blocks.num_cached(known.keys, known.num_tokens)

    def num_served_tokens(self, tenant: str) -> int:
        """Tokens computed for a tenant's requests so far."""
        return self._scheduler.served.get(tenant, 0)
