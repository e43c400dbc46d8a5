"""What KV memory holds when it is scarce: the same requests through every way of giving memory out.

The comparison of Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(SOSP 2023), figure 2: of the KV memory of systems that reserve ahead, 20 to 38% hold tokens, of a paged one 96%. Here
the scheduler and the allocators are the real ones, the runner is simulated, and the requests come from a trace; every
number is what `State.usage` says at the end of a step. Like the paper we count the steps in which memory is what keeps
requests waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagedinfer.checks import check_real
from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.memory.extents import power_of_two
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.metrics import mean
from pagedinfer.trace.replay import State
from pagedinfer.trace.tables import Table
from pagedinfer.trace.workload import TraceRequest

__all__ = ["EXCERPT", "STRATEGIES", "WASTE_CONFIG", "Strategy", "is_short_of_memory", "run_trace", "waste_table"]

EXCERPT = Path(__file__).with_name("excerpts") / "azure_2023_conv.csv"
"""The first 1,000 requests of the Azure LLM inference trace 2023, conversation (CC-BY 4.0; see README.md beside it)."""

WASTE_CONFIG = EngineConfig(
    num_blocks=8192, block_size=16, max_model_len=8192, max_num_seqs=512, max_num_batched_tokens=8192,
    enable_prefix_caching=False, watermark=0.0,
)  # fmt: skip
"""Memory for 131,072 tokens, and neither seats nor token budget so small that they would keep anybody waiting."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to give memory out.

    Attributes:
        allocator: as in `EngineConfig.allocator`.
        foresight: what a request is said to produce at most: "exact" its true number of tokens, "pow2" the next power
            of two. The others do not ask.
    """

    allocator: str
    foresight: str = "exact"

    def most_tokens(self, num_output_tokens: int) -> int:
        """The `max_tokens` of a request that will produce `num_output_tokens`."""
        return power_of_two(num_output_tokens) if self.foresight == "pow2" else num_output_tokens


STRATEGIES = {
    "reserve max_model_len": Strategy("reserve-max"),
    "buddy, output to a power of 2": Strategy("buddy", "pow2"),
    "buddy, output known": Strategy("buddy"),
    "first-fit, output known": Strategy("first-fit"),
    "best-fit, output known": Strategy("best-fit"),
    "paged": Strategy("paged"),
}
"""The first three are the paper's Orca (Max), (Pow2) and (Oracle), which it gives a buddy allocator."""


def waste_table(
    requests: Sequence[TraceRequest],
    config: EngineConfig = WASTE_CONFIG,
    *,
    seconds_per_step: float = 0.1,
    strategies: Mapping[str, Strategy] = STRATEGIES,
) -> Table:
    """One row a strategy: means over the steps in which memory is short, and counts of the whole run.

    Columns: `tokens_of_allocated` is live slots / allocated slots, 1 - `kv_waste`. `tokens`, `reserved`, `tail_slack`
    and `free` are shares of the pool that add up to 1. `external_fragmentation` is 1 - largest free extent / free
    space, `batch` the requests of a step. `finished`, `preemptions` and `short_steps` count. What has no step to be
    the mean of is None.

    The requests arrive as the trace says, a step being `seconds_per_step` of it, and the run ends with the last
    arrival; those of more than `max_model_len` tokens are left out. `config.allocator` plays no part.

    Raises:
        ConfigError: `seconds_per_step` is not above 0.
        RequestTooLong: the pool is too small for a request.
    """
    check_real("seconds_per_step", seconds_per_step, 1e-6)
    fitting = [r for r in requests if r.num_prompt_tokens + r.num_output_tokens <= config.max_model_len]
    rows: dict[str, list[Any]] = {name: [] for name in ("strategy", *_MEANS, *_COUNTS)}
    for name, strategy in strategies.items():
        short: list[dict[str, float]] = []
        state = State()
        for state in run_trace(fitting, strategy, config, seconds_per_step):
            if is_short_of_memory(state):
                short.append(shares(state))
        counts = (state.num_finished, state.num_preemptions, len(short), state.step)
        means = [mean([step[column] for step in short]) for column in _MEANS]
        for column, value in zip(rows, (name, *means, *counts), strict=True):
            rows[column].append(value)
    return Table(rows, dict.fromkeys(_MEANS, float))


_MEANS = ("tokens_of_allocated", "tokens", "reserved", "tail_slack", "free", "external_fragmentation", "batch")
_COUNTS = ("finished", "preemptions", "short_steps", "steps")


def shares(state: State) -> dict[str, float]:
    """The numbers of one step, by column of `waste_table`."""
    usage, pool = state.usage(), state.num_blocks * state.block_size
    parts = {name: usage[f"{name}_slots"] / pool for name in ("reserved", "tail_slack", "free")}
    return parts | {
        "tokens": usage["live_slots"] / pool,
        "tokens_of_allocated": 1 - usage["kv_waste"],
        "external_fragmentation": usage["external_fragmentation"],
        "batch": len(state.last.scheduled),
    }


def is_short_of_memory(state: State) -> bool:
    """Whether requests wait though there are a seat and budget for one: what they wait for is memory."""
    scheduled = state.last.scheduled
    seats, budget = state.config["max_num_seqs"], state.last.budget
    return bool(state.waiting) and len(scheduled) < seats and sum(scheduled.values()) < budget


def run_trace(
    requests: Sequence[TraceRequest], strategy: Strategy, config: EngineConfig, seconds_per_step: float
) -> Iterator[State]:
    """The state at the end of each step until the last request has come: one object that changes."""
    config = replace(config, allocator=strategy.allocator)
    scheduler, runner, state = Scheduler(config), SimulatedRunner(), State(config.to_dict())
    scheduler.bus.subscribe(state.apply)
    lengths = {f"r{number}": traced for number, traced in enumerate(requests)}
    coming = deque(lengths.items())
    while coming:
        now = (scheduler.step + 1) * seconds_per_step
        while coming and coming[0][1].arrival <= now:
            rid, traced = coming.popleft()
            most = strategy.most_tokens(traced.num_output_tokens)
            scheduler.submit(Request(rid, traced.num_prompt_tokens, most), now)
        plan = scheduler.schedule(now)
        ends = {
            item.request_id: ("stop", "it ends here in the trace")
            for item in plan.scheduled
            if item.samples and item.output_index + 1 == lengths[item.request_id].num_output_tokens
        }
        scheduler.commit(plan, runner.execute(plan), ends)
        yield state
    assert state.snapshot() == scheduler.snapshot(), "the state is not the scheduler's"
