"""Runs of an engine without a model that show a lot: shared prompts, swaps, preemptions."""

import random

from pagedinfer import Recorder, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.sim.simulated import SimulatedRunner


def busy_engine(seed=1, requests=24, **options):
    """An engine over simulated tokens, and a function that submits the requests of a step. Prompts begin alike."""
    chance = random.Random(seed)
    settings = {
        "num_blocks": 48, "block_size": 8, "max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 64
    } | options  # fmt: skip
    engine = Engine(EngineConfig(**settings), SimulatedRunner())
    starts = [[start] * 24 for start in (1, 2, 3)]
    left = [
        (chance.choice(starts) + [10 + number] * chance.randint(1, 40), chance.randint(6, 45))
        for number in range(requests)
    ]

    def submit():
        for _ in range(3 if engine.scheduler.step == 0 else chance.random() < 0.4):
            if left:
                prompt, most = left.pop()
                engine.add_request(prompt, SamplingParams(max_tokens=most, ignore_eos=True, detokenize=False))
        return bool(left)

    return engine, submit


def busy_run(seed=1, **options):
    """The finished recording of a busy engine."""
    engine, submit = busy_engine(seed, **options)
    with Recorder(engine) as recording:
        while submit() or engine.has_unfinished():
            engine.step()
    return recording
