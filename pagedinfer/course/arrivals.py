"""The runs of notebook 02: the same seeded arrivals through every way of giving memory out.

Scheduler and allocators are the real ones; the runner is simulated, so a run takes a moment. Requests ask for more
tokens than they will produce, as people do, and nobody can know it before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.plan import ScheduledRequest
from pagedinfer.memory.make import MakeMemory
from pagedinfer.session import Session
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.recording import Recording

__all__ = ["Arrival", "arrivals", "memory_run"]

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 64, 8, 128
REQUESTS = 60
STOP = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: it comes at `step`, asks for at most `max_tokens`, and ends after `num_output_tokens` of them."""

    step: int
    num_prompt_tokens: int
    max_tokens: int
    num_output_tokens: int


def arrivals(seed: int = 0, requests: int = REQUESTS) -> list[Arrival]:
    """Seeded arrivals, about one in two steps and a few at once."""
    rng, step, result = random.Random(seed), 0, []
    for _ in range(requests):
        max_tokens = rng.choice((16, 32, 48, 64))
        result.append(Arrival(step, rng.randint(4, 60), max_tokens, rng.randint(4, max_tokens)))
        step += rng.choice((0, 0, 1, 2, 4))
    return result


def memory_run(
    allocator: str,
    seed: int = 0,
    *,
    compaction: bool = False,
    requests: int = REQUESTS,
    make_memory: MakeMemory | None = None,
    runner_class: type[SimulatedRunner] = SimulatedRunner,
) -> Recording:
    """The recording of `arrivals(seed)` in an engine with this allocator, to the end of the last request.

    `make_memory` is the engine's: what its memory is made with. `runner_class` may look at the plans that it gets.
    """
    config = EngineConfig(
        allocator=allocator,
        compaction=compaction,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
    )
    lengths: dict[str, int] = {}

    def rule(item: ScheduledRequest) -> int:
        return STOP if item.output_index + 1 == lengths[item.request_id] else 0

    runner = runner_class(rule=rule)
    engine = (
        Engine(config, runner) if make_memory is None else Engine(config, runner, make_memory=make_memory)
    )
    with engine, Session(engine) as session:
        coming = arrivals(seed, requests)
        while coming or engine.has_unfinished():
            while coming and coming[0].step <= session.recording.last_step:
                arrival = coming.pop(0)
                params = SamplingParams(
                    max_tokens=arrival.max_tokens, stop_token_ids=(STOP,), detokenize=False, seed=0
                )
                rid = session.submit({"prompt_token_ids": [0] * arrival.num_prompt_tokens}, params)
                lengths[rid] = arrival.num_output_tokens
            session.step()
        return session.recording
