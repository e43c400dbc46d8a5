"""Serial replay of a trace through the real scheduler and prefix cache: how much of its prompts is computed already.

One request at a time, in the order of arrival, each with its whole prompt in one step. That is the upper end of what
a cache of some size can give: with requests beside each other the ratio is lower.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagedinfer.config import EngineConfig
from pagedinfer.engine.plan import StepResult
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.trace.workload import MOONCAKE_BLOCK_SIZE, TraceRequest

__all__ = ["CacheReplay", "replay_through_cache"]


@dataclass(frozen=True, slots=True)
class CacheReplay:
    """What a replay found in the cache.

    Attributes:
        block_size: tokens per block.
        hits: for each request the prompt tokens that it did not have to compute.
        num_prompt_tokens: tokens of all prompts.
        num_full_blocks: full blocks of all prompts.
    """

    block_size: int
    hits: tuple[int, ...]
    num_prompt_tokens: int
    num_full_blocks: int

    @property
    def block_hit_rate(self) -> float:
        """Share of the prompts' full blocks that were found, 0 to 1."""
        return sum(self.hits) / self.block_size / self.num_full_blocks if self.num_full_blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Share of the prompts' tokens that were found (`prefix_hit_rate`), 0 to 1."""
        return sum(self.hits) / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def replay_through_cache(
    requests: Iterable[TraceRequest], *, num_blocks: int | None = None, block_size: int = MOONCAKE_BLOCK_SIZE
) -> CacheReplay:
    """Send each request through a scheduler with `num_blocks` blocks (default: enough never to evict).

    `block_size` is what one of the requests' `key_ids` stands for. Each request ends with its first token: a trace
    does not say what its outputs would share.

    Raises:
        RequestTooLong: a prompt needs more blocks than the pool has.
    """
    listed = list(requests)
    longest = max((r.num_prompt_tokens for r in listed), default=1)
    if num_blocks is None:
        num_blocks = len({key for r in listed for key in r.key_ids}) + -(-longest // block_size)
    config = EngineConfig(
        num_blocks=max(1, num_blocks),
        block_size=block_size,
        max_model_len=longest + 1,
        max_num_seqs=1,
        max_num_batched_tokens=longest,
    )
    scheduler = Scheduler(config)
    hits = []
    for number, traced in enumerate(listed):
        request = Request(f"r{number}", traced.num_prompt_tokens, 1, key_ids=traced.key_ids)
        scheduler.submit(request, traced.arrival)
        plan = scheduler.schedule(traced.arrival)
        scheduler.commit(plan, StepResult({request.request_id: (0,)}))
        hits.append(request.num_cached_tokens)
    return CacheReplay(
        block_size,
        tuple(hits),
        sum(r.num_prompt_tokens for r in listed),
        sum(len(r.key_ids) for r in listed),
    )
