"""An allocator and an eviction rule of one's own: used by the engine, and never able to harm it."""

import random

import pytest

from pagedinfer import Engine, EngineConfig, SamplingParams, Session
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.contiguous import ContiguousAllocator
from pagedinfer.sim.shadow import ShadowRunner
from pagedinfer.trace.replay import fold

CONFIG = EngineConfig(num_blocks=12, block_size=4, max_num_batched_tokens=32, max_num_seqs=3)


def with_rule(rule):
    def allocator(config, bus):
        manager = BlockManager(config.num_blocks, config.block_size, bus)
        manager.pool.eviction = rule
        return manager

    return Engine(CONFIG, ShadowRunner(12, 4), make_memory=allocator)


def traffic(engine, seed=1, requests=40):
    """Prompts with a few beginnings, one after the other and side by side; cancels some plans on the way."""
    rng = random.Random(seed)
    with Session(engine) as session:
        for _ in range(requests):
            prompt = [rng.randrange(3)] * 8 + [rng.randrange(200) for _ in range(rng.randint(1, 8))]
            session.submit({"prompt_token_ids": prompt}, SamplingParams(max_tokens=4, detokenize=False))
            while rng.random() < 0.7:
                before = engine.snapshot()
                plan = engine.scheduler.schedule(engine.scheduler.step)
                engine.scheduler.cancel(plan, "to see that nothing is left of it")
                assert {**engine.snapshot(), "step": 0} == {**before, "step": 0}
                session.advance()
                engine.check()
        session.run()
        assert fold(session.recording.events).snapshot() == engine.snapshot()
        return session.recording


def evicted(recording):
    return [block_id for event in recording.events if event.kind == "evict" for block_id in event.pblks]


@pytest.mark.parametrize("pick", [min, max, lambda idle: idle[-1]])
def test_the_rule_decides_and_a_cancel_takes_it_back(pick):
    asked = []

    def rule(idle):
        asked.append((tuple(idle), pick(idle)))
        return asked[-1][1]

    recording = traffic(with_rule(rule))
    gone = evicted(recording)
    assert len(gone) > 20
    assert set(gone) <= {choice for _, choice in asked}
    assert not recording.errors


def test_without_a_rule_the_least_recently_used_goes():
    assert evicted(traffic(with_rule(lambda idle: idle[0]))) == evicted(traffic(with_rule(None)))


@pytest.mark.parametrize(
    "rule", [lambda idle: 1 / 0, lambda idle: 99, lambda idle: None, lambda idle: idle.pop()]
)
def test_a_rule_that_makes_no_sense_is_told_and_overruled(rule):
    recording = traffic(with_rule(rule))
    assert evicted(recording) == evicted(traffic(with_rule(None)))
    assert {error.where for error in recording.errors} == {"eviction"}
    assert "the least recently used block goes" in recording.errors[0].what


def test_a_contiguous_allocator_with_a_learners_fit():
    holes_seen = []

    def last_hole(holes, size):
        holes_seen.append(holes)
        return max((first for first, length in holes if length >= size), default=None)

    config = EngineConfig(num_blocks=12, block_size=4, max_num_seqs=3, allocator="first-fit")

    def allocator(config, bus):
        return ContiguousAllocator("first-fit", 12, 4, config.max_model_len, bus, fit=last_hole)

    with Engine(config, ShadowRunner(12, 4), make_memory=allocator) as engine, Session(engine) as session:
        for length in (5, 9, 3):
            session.submit(
                {"prompt_token_ids": list(range(length))}, SamplingParams(max_tokens=3, detokenize=False)
            )
        session.run()
    assert holes_seen
    assert not session.recording.errors
