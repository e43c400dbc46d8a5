"""The policies with names: small classes that each override one method. `make_policy` mixes what a config names.

Where they come from: fair shares as in the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024); longest prefix first as in SGLang (Zheng et al., 2024); full reservation as in Orca (Yu et al.,
OSDI 2022); watermark, swap and recompute as in vLLM (Kwon et al., SOSP 2023); chunks beside decodes as in Sarathi-Serve
(Agrawal et al., OSDI 2024); earliest deadline first (Liu and Layland, 1973).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pagedinfer.config import EngineConfig
from pagedinfer.engine.look import RequestView, SchedulerView
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import count

__all__ = ["POLICIES", "make_policy"]


class PriorityOrder(Policy):
    """Lower `priority` first. With `aging` set, having waited that long is worth one level, so nobody starves.

    Waiting is worth the same to all, so the key never moves: arrival time plus priority times `aging`.
    """

    def order(self, request: RequestView, view: SchedulerView) -> tuple[float, ...]:
        """(priority), or with aging (time of arrival, put off by its priority)."""
        if self.config.aging is None:
            return (request.priority,)
        return (request.arrived_at + request.priority * self.config.aging,)


class ShortestPrefill(Policy):
    """Least to compute first; long prompts may starve under load."""

    def order(self, request: RequestView, view: SchedulerView) -> int:
        """Known tokens: prompt, and after a preemption output."""
        return int(request.num_tokens)


class LongestPrefix(Policy):
    """Most cached tokens first: their blocks are there now and may be evicted later."""

    moving_key = True

    def order(self, request: RequestView, view: SchedulerView) -> int:
        """Minus the tokens that the prefix cache holds now."""
        return -view.num_cached_tokens(request)


class FairShare(Policy):
    """The tenant that has been served the fewest tokens first."""

    moving_key = True

    def order(self, request: RequestView, view: SchedulerView) -> int:
        """Tokens computed for the tenant so far."""
        return view.num_served_tokens(request.tenant)


class EarliestDeadline(Policy):
    """Earliest deadline first; requests without one come last."""

    def order(self, request: RequestView, view: SchedulerView) -> float:
        """The deadline."""
        return float("inf") if request.deadline is None else float(request.deadline)


class LowestPriority(Policy):
    """The least urgent gives way, the newest of those."""

    def victim(
        self, request: RequestView, candidates: Sequence[RequestView], view: SchedulerView
    ) -> RequestView:
        """Largest `priority`, then latest arrival."""
        return max(candidates, key=lambda c: (c.priority, c.arrival))


class FewestTokensLost(Policy):
    """The one that has the least to compute again gives way."""

    def victim(
        self, request: RequestView, candidates: Sequence[RequestView], view: SchedulerView
    ) -> RequestView:
        """Fewest computed tokens, then latest arrival."""
        return min(candidates, key=lambda c: (c.num_computed_tokens, -c.arrival))


class Largest(Policy):
    """The one with the most blocks gives way: one preemption, much room."""

    def victim(
        self, request: RequestView, candidates: Sequence[RequestView], view: SchedulerView
    ) -> RequestView:
        """Most blocks, then latest arrival."""
        return max(candidates, key=lambda c: (view.num_held_blocks(c), c.arrival))


class Swap(Policy):
    """Victims go to the host pool and come back without computing anything again."""

    def preempt_mode(self, victim: RequestView, view: SchedulerView) -> str:
        """Always "swap"."""
        return "swap"


class Cheaper(Policy):
    """Swap when copying the victim's blocks out and back costs less than computing its tokens again.

    An estimate in tokens: `swap_cost_tokens` a block against one a token. It leaves out that attention grows with
    the context, and that the prefix cache may still hold blocks.
    """

    def preempt_mode(self, victim: RequestView, view: SchedulerView) -> str:
        """The cheaper of the two."""
        swap = self.config.swap_cost_tokens * view.num_held_blocks(victim)
        return "swap" if swap < victim.num_computed_tokens else "recompute"


class FitsNow(Policy):
    """Whoever fits into what is free now comes in, whatever the others will need: preemptions follow."""

    def admit(self, request: RequestView, view: SchedulerView) -> str | None:
        """Room for its known tokens."""
        return view.shortage(request)


class FullReservation(Policy):
    """Room for everything that all may come to need: no preemption ever, and a small batch."""

    def admit(self, request: RequestView, view: SchedulerView) -> str | None:
        """Blocks up to `max_tokens` for it and for all running requests."""
        return _reserve(request, view, lambda r: int(r.max_total_tokens))


class ExpectedLength(Policy):
    """Room for the output that is to be expected, `expected_output_tokens`, not for the longest possible."""

    def admit(self, request: RequestView, view: SchedulerView) -> str | None:
        """Blocks up to the expected length for it and for all running requests."""
        expected = self.config.expected_output_tokens or 0

        def length(r: RequestView) -> int:
            return int(max(r.num_tokens, min(r.max_total_tokens, r.num_prompt_tokens + expected)))

        return _reserve(request, view, length)


class Pressure(Policy):
    """Nobody comes in while more of the pool is in use than `pressure`."""

    def admit(self, request: RequestView, view: SchedulerView) -> str | None:
        """A look at `kv_usage`, and room for the known tokens beside those of running prefills."""
        if view.num_running and view.kv_usage >= self.config.pressure:
            return f"{view.kv_usage:.0%} of the pool is in use, the threshold is {self.config.pressure:.0%}"
        return view.shortage(request, view.num_promised_blocks)


class PrefillFirst(Policy):
    """New requests first, then the rest of running prefills, decodes with what is left: early first tokens, stalls."""

    waiting_first = True

    def chunk(self, requests: Sequence[RequestView], budget: int, view: SchedulerView) -> Mapping[str, int]:
        """Greedy, prefills before decodes."""
        cap = self.config.max_chunk_tokens or budget
        shares: dict[str, int] = {}
        for request in sorted(requests, key=lambda r: r.is_decoding):
            shares[request.request_id] = share = min(request.num_pending_tokens, budget, cap)
            budget -= share
        return shares


class EqualProgress(Policy):
    """Everybody gets the same share of the budget; what short ones leave goes round again."""

    def chunk(self, requests: Sequence[RequestView], budget: int, view: SchedulerView) -> Mapping[str, int]:
        """Water-filling: the shortest first, each at most an equal part of what is left."""
        cap = self.config.max_chunk_tokens or budget
        shares: dict[str, int] = {}
        left = len(requests)
        for request in sorted(requests, key=lambda r: r.num_pending_tokens):
            part = -(-budget // left)
            shares[request.request_id] = share = min(request.num_pending_tokens, part, cap)
            budget, left = budget - share, left - 1
        return shares


POLICIES: dict[str, dict[str, type[Policy]]] = {
    "order": {"priority": PriorityOrder, "shortest-prefill": ShortestPrefill, "longest-prefix": LongestPrefix,
              "fair-share": FairShare, "deadline": EarliestDeadline},
    "victim": {"lowest-priority": LowestPriority, "fewest-tokens-lost": FewestTokensLost, "largest": Largest},
    "preempt_mode": {"swap": Swap, "cheaper": Cheaper},
    "admission": {"fits-now": FitsNow, "full-reservation": FullReservation, "expected-length": ExpectedLength,
                  "pressure": Pressure},
    "chunking": {"prefill-first": PrefillFirst, "equal-progress": EqualProgress},
}  # fmt: skip
"""For each decision the classes by the names that `EngineConfig` takes; what is missing is the default."""


def make_policy(config: EngineConfig) -> Policy:
    """The policy that a config names: one class that inherits each decision from the class of its name."""
    named = [kinds.get(getattr(config, decision)) for decision, kinds in POLICIES.items()]
    bases = tuple(kind for kind in named if kind is not None)
    return type("ConfiguredPolicy", bases, {})(config) if bases else Policy(config)


def _reserve(request: RequestView, view: SchedulerView, length: object) -> str | None:
    assert callable(length)
    promised = sum(view.num_missing_blocks(other, length(other)) for other in view.running)
    needed, free = view.num_missing_blocks(request, length(request)), view.num_free_blocks
    if needed + promised <= free:
        return view.shortage(request)
    if not view.num_running and view.shortage(request) is None:
        return None  # alone, it may try: nobody will give blocks back
    return f"would need up to {count(needed, 'block')}, running requests up to {promised} more, {free} free"
