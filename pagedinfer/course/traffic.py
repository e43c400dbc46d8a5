"""Seeded arrivals for notebook 03: the same requests at the same steps, whatever policy serves them. No torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.plan import ScheduledRequest
from pagedinfer.engine.policy import Policy
from pagedinfer.session import Session
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.recording import Recording

__all__ = ["ROOMY", "TIGHT", "Workload", "run_traffic"]

END = 0
"""The token that ends an output."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Random requests and the engine that they come to.

    Attributes:
        requests: how many. gap: mean steps between two arrivals.
        prompt, output: shortest and longest, in tokens. max_tokens: what every request asks for at most.
        num_blocks, max_num_seqs: pool and seats; a block holds 8 tokens.
    """

    requests: int
    gap: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    max_tokens: int
    num_blocks: int
    max_num_seqs: int

    def config(self) -> EngineConfig:
        """The engine's settings."""
        return EngineConfig(
            num_blocks=self.num_blocks,
            block_size=8,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=128,
            enable_prefix_caching=False,
        )


ROOMY = Workload(24, 5.0, (8, 24), (4, 60), 60, 256, 4)
"""Seats are short, memory is not."""
TIGHT = Workload(40, 10.0, (8, 24), (40, 80), 160, 32, 16)
"""Memory is short, seats are not; and nobody knows how long an answer will be."""


def run_traffic(
    workload: Workload, seed: int, policy: Callable[[EngineConfig], Policy] = Policy
) -> Recording:
    """Serve the workload's requests of this seed under a policy (a class); time counts in steps."""
    rng = random.Random(seed)
    arrivals, step = [], 0.0
    for _ in range(workload.requests):
        arrivals.append((int(step), rng.randint(*workload.prompt), rng.randint(*workload.output)))
        step += rng.expovariate(1 / workload.gap)
    lengths = {f"r{number}": length for number, (_, _, length) in enumerate(arrivals)}

    def rule(item: ScheduledRequest) -> int:
        return END if item.output_index + 1 == lengths[item.request_id] else 1

    config = workload.config()
    engine = Engine(config, SimulatedRunner(rule=rule), policy=policy(config), eos_token_ids=(END,))
    with engine, Session(engine) as session:
        due = list(enumerate(arrivals))
        while due or engine.has_unfinished():
            # With nobody there no step is run and no time goes by: then the next one comes at once.
            while due and (due[0][1][0] <= session.recording.last_step or not engine.has_unfinished()):
                number, (_, prompt, _) = due.pop(0)
                params = SamplingParams(max_tokens=workload.max_tokens, detokenize=False)
                engine.add_request({"prompt_token_ids": [1] * prompt}, params, f"r{number}")
            session.step()
        return session.recording
