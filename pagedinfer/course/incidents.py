"""The incidents of notebook 10: small runs of the real scheduler and pool, without a model, in which something fails.

Each incident has a maker, `make(seed)`: seed 0 is the run that comes with the package, other seeds are runs of the same
kind that a learner has not seen. `notebooks/record_incidents.py` writes those of seed 0.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.session import Session
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.recording import Recording

__all__ = ["INCIDENTS", "Arrival", "crowd", "quiet_day", "simulate"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come: after which step, its prompt's token ids, its output tokens, and options of the request."""

    step: int
    prompt: Sequence[int]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)


def simulate(config: EngineConfig, arrivals: Iterable[Arrival]) -> Recording:
    """Run the engine until every request has ended; they are r0, r1, ... in order of arrival."""
    queue = sorted(arrivals, key=lambda arrival: arrival.step)
    with Engine(config, SimulatedRunner()) as engine, Session(engine) as session:
        while queue or engine.has_unfinished():
            while queue and (queue[0].step <= session.recording.last_step or not engine.has_unfinished()):
                one = queue.pop(0)
                params = SamplingParams(max_tokens=one.max_tokens, detokenize=False)
                session.submit({"prompt_token_ids": list(one.prompt)}, params, **one.options)
            session.step()
        return session.recording


def _unique(rng: random.Random, num_tokens: int) -> list[int]:
    """A prompt that begins like no other."""
    return [rng.randrange(256) for _ in range(num_tokens)]


def giant(seed: int) -> Recording:
    """Head-of-line blocking: a prompt too large for what is free waits in front, and small ones wait behind it."""
    rng = random.Random(seed)
    config = EngineConfig(
        num_blocks=48, block_size=8, max_num_seqs=12, max_num_batched_tokens=64, enable_prefix_caching=False
    )
    come = [Arrival(step, _unique(rng, rng.randint(48, 60)), rng.randint(36, 44)) for step in (0, 0, 1)]
    huge = 4 + rng.randrange(3)
    come.append(Arrival(huge, _unique(rng, rng.randint(290, 310)), 8))
    come += [Arrival(huge + 1 + 3 * i, _unique(rng, rng.randint(6, 14)), rng.randint(5, 9)) for i in range(8)]
    return simulate(config, come)


def crowd(seed: int) -> Recording:
    """Preemption storm: short prompts with long answers come in all at once, and the pool cannot let them all grow."""
    rng = random.Random(seed)
    config = EngineConfig(
        num_blocks=40, block_size=4, max_num_seqs=16, max_num_batched_tokens=16, watermark=0.0,
        enable_prefix_caching=False,
    )  # fmt: skip
    lengths = [rng.randint(8, 14) for _ in range(16)]
    return simulate(
        config, [Arrival(i // 3, _unique(rng, n), rng.randint(36, 46)) for i, n in enumerate(lengths)]
    )


def flood(seed: int) -> Recording:
    """Cache wipe: three applications share long prefixes; a burst of long unique prompts evicts them all."""
    rng = random.Random(seed)
    config = EngineConfig(num_blocks=64, block_size=8, max_num_seqs=12, max_num_batched_tokens=64)
    prefixes = {f"app-{letter}": _unique(rng, 80) for letter in "abc"}

    def ask(step: int, tenant: str) -> Arrival:
        return Arrival(step, [*prefixes[tenant], *_unique(rng, rng.randint(4, 8))], 5, {"tenant": tenant})

    come = [ask(3 * i, tenant) for i, tenant in enumerate(list(prefixes) * 8)]
    burst = 26 + rng.randrange(4)
    come += [Arrival(burst, _unique(rng, rng.randint(96, 112)), 4, {"tenant": "crawler"}) for _ in range(6)]
    return simulate(config, come)


def patient(seed: int) -> Recording:
    """Starvation: under strict priorities urgent requests keep coming, and one that is not urgent waits on and on."""
    rng = random.Random(seed)
    config = EngineConfig(
        num_blocks=64, block_size=8, max_num_seqs=3, max_num_batched_tokens=64, order="priority",
        enable_prefix_caching=False,
    )  # fmt: skip
    urgent = [
        Arrival(
            max(0, 2 * i - 4),
            _unique(rng, rng.randint(8, 20)),
            rng.randint(5, 8),
            {"priority": "interactive"},
        )
        for i in range(24)
    ]
    late = Arrival(5 + rng.randrange(3), _unique(rng, 30), 6, {"priority": "background"})
    return simulate(config, [*urgent, late])


def quiet_day(seed: int) -> Recording:
    """Nothing is wrong: a few requests, room for all."""
    rng = random.Random(seed)
    config = EngineConfig(num_blocks=64, block_size=8, max_num_seqs=8, max_num_batched_tokens=64)
    return simulate(
        config, [Arrival(4 * i, _unique(rng, rng.randint(8, 30)), rng.randint(5, 12)) for i in range(10)]
    )


INCIDENTS: dict[str, Callable[[int], Recording]] = {
    "incident_1": giant, "incident_2": crowd, "incident_3": flood, "incident_4": patient,
}  # fmt: skip
"""The maker of each bundled incident, by the name of its recording: what went wrong is for the learner to find."""
