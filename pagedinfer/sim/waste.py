"""What KV memory holds when it is scarce: the same requests through every way of giving memory out.

The comparison of Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
(SOSP 2023), figure 2: of the KV memory of systems that reserve ahead, 20 to 38% hold tokens, of a paged one 96%. Here
the scheduler and the allocators are the real ones, the runner is simulated, and the requests come from a trace; every
number is what `State.usage` says while a step runs. The steps that count are those in which requests wait for memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import ConfigError
from pagedinfer.memory.extents import power_of_two
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.metrics import mean
from pagedinfer.trace.replay import State
from pagedinfer.trace.tables import Table
from pagedinfer.trace.workload import TraceRequest

__all__ = [
    "EXCERPT",
    "STRATEGIES",
    "WASTE_CONFIG",
    "Strategy",
    "is_short_of_memory",
    "run_trace",
    "waste_table",
]

EXCERPT = Path(__file__).with_name("excerpts") / "azure_2023_conv.csv"
"""The first 500 requests of the Azure LLM inference trace 2023, conversation (CC-BY 4.0; see README.md beside it)."""

WASTE_CONFIG = EngineConfig(
    num_blocks=8192, block_size=16, max_model_len=8192, max_num_seqs=512, max_num_batched_tokens=8192,
    enable_prefix_caching=False, watermark=0.0,
)  # fmt: skip
"""40 GiB for a model like Llama 2 70B: 131,072 slots of 320 KiB (K and V of 80 layers, 8 heads of 128, two bytes each),
and a context that all but one of the trace's 19,366 requests fit into. Seats and token budget are so many that only
memory keeps requests waiting."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to give memory out.

    Attributes:
        allocator: as in `EngineConfig.allocator`.
        rounds_output: whether what a request may produce at most is given as the next power of two of what it will
            produce, not exactly. Only those that reserve prompt and `max_tokens` look at it.
    """

    allocator: str
    rounds_output: bool = False


STRATEGIES = {
    "reserve max_model_len": Strategy("reserve-max"),
    "buddy, output to a power of 2": Strategy("buddy", rounds_output=True),
    "buddy, output known": Strategy("buddy"),
    "first-fit, output known": Strategy("first-fit"),
    "best-fit, output known": Strategy("best-fit"),
    "paged": Strategy("paged"),
}
"""The first three are the paper's Orca (Max), Orca (Pow2) and Orca (Oracle), to which it gives a buddy allocator."""

MEANS = ("tokens_of_allocated", "tokens", "reserved", "tail_slack", "free", "external_fragmentation", "batch")
COUNTS = ("finished", "preemptions", "short_steps", "steps")


def waste_table(
    requests: Sequence[TraceRequest],
    config: EngineConfig = WASTE_CONFIG,
    *,
    seconds_per_step: float = 0.1,
    strategies: Mapping[str, Strategy] = STRATEGIES,
) -> Table:
    """One row a strategy: means over the steps in which memory is short, and counts of the whole run.

    Columns: `tokens_of_allocated` is live slots / allocated slots, 1 - `kv_waste`. `tokens`, `reserved`, `tail_slack`
    and `free` are shares of the pool's slots and add up to 1. `external_fragmentation` is 1 - largest free extent /
    free space, `batch` the requests of a step. `finished` (requests), `preemptions`, `short_steps` and `steps` count.
    A mean over no step is None.

    Requests arrive as the trace says, a step being `seconds_per_step` of it, and the run ends with the last arrival.
    Those of more than `max_model_len` tokens are left out. `config.allocator` plays no part.

    Raises:
        ConfigError: `seconds_per_step` is not above 0.
        RequestTooLong: the pool is too small for a request.
    """
    if not (seconds_per_step > 0 and isfinite(seconds_per_step)):
        raise ConfigError(f"seconds_per_step={seconds_per_step!r}: it must be a finite number above 0.")
    fitting = [r for r in requests if r.num_prompt_tokens + r.num_output_tokens <= config.max_model_len]
    columns: dict[str, list[Any]] = {name: [] for name in ("strategy", *MEANS, *COUNTS)}
    for name, strategy in strategies.items():
        short, state = [], State()
        for state in run_trace(fitting, strategy, config, seconds_per_step):
            if is_short_of_memory(state):
                short.append(_numbers(state))
        means = [mean([numbers[column] for numbers in short]) for column in MEANS]
        counts = (state.num_finished, state.num_preemptions, len(short), state.step)
        for column, value in zip(columns.values(), (name, *means, *counts), strict=True):
            column.append(value)
    return Table(columns, dict.fromkeys(MEANS, float))


def is_short_of_memory(state: State) -> bool:
    """Whether requests wait though seats and token budget are left: what they wait for is memory."""
    scheduled, seats = state.last.scheduled, state.config["max_num_seqs"]
    return bool(state.waiting) and len(scheduled) < seats and sum(scheduled.values()) < state.last.budget


def _numbers(state: State) -> dict[str, float]:
    """The numbers of one step, by column."""
    usage, pool = state.usage(), state.num_blocks * state.block_size
    return {name: usage[f"{name}_slots"] / pool for name in ("reserved", "tail_slack", "free")} | {
        "tokens": usage["live_slots"] / pool,
        "tokens_of_allocated": 1 - usage["kv_waste"],
        "external_fragmentation": usage["external_fragmentation"],
        "batch": len(state.last.scheduled),
    }


def run_trace(
    requests: Sequence[TraceRequest], strategy: Strategy, config: EngineConfig, seconds_per_step: float
) -> Iterator[State]:
    """The state while each step runs, its tokens counted as written, until the last request has come.

    One object that changes.
    """
    config = replace(config, allocator=strategy.allocator)
    scheduler, runner, state = Scheduler(config), SimulatedRunner(), State(config.to_dict())
    scheduler.bus.subscribe(state.apply)
    traced = {f"r{number}": request for number, request in enumerate(requests)}
    coming = deque(traced.items())
    while coming:
        now = (scheduler.step + 1) * seconds_per_step
        while coming and coming[0][1].arrival <= now:
            rid, request = coming.popleft()
            output = request.num_output_tokens
            most = power_of_two(output) if strategy.rounds_output else output
            scheduler.submit(Request(rid, request.num_prompt_tokens, most), now)
        plan = scheduler.schedule(now)
        ends = {
            item.request_id: ("stop", "it ends here in the trace")
            for item in plan.scheduled
            if item.samples and item.output_index + 1 == traced[item.request_id].num_output_tokens
        }
        yield state
        scheduler.commit(plan, runner.execute(plan), ends)
    assert state.snapshot() == scheduler.snapshot(), "what was measured is not the scheduler's state"
