"""Contiguous memory under the real scheduler: the shadow checks every read, the fold every state."""

import random

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import OutOfBlocks
from pagedinfer.memory.contiguous import STRATEGIES
from pagedinfer.sim.shadow import ShadowRunner
from pagedinfer.trace.events import SCHEMA, Meta
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State

SETTINGS = [(name, compaction) for name in STRATEGIES for compaction in (False, True)] + [("paged", False)]


class Traffic:
    """Seeded arrivals, aborts, cancelled plans, two open plans, compaction and other pool sizes between steps."""

    def __init__(self, seed, allocator, compaction, **settings):
        self.draw = random.Random(seed)
        self.config = EngineConfig(
            **{
                "num_blocks": 24, "block_size": 4, "max_model_len": 40, "max_num_batched_tokens": 24,
                "max_num_seqs": 6, "allocator": allocator, "compaction": compaction,
            } | settings
        )  # fmt: skip
        self.scheduler = Scheduler(self.config)
        self.runner = ShadowRunner(self.config.num_blocks, 4, self.config.num_host_blocks)
        self.recording, self.state = Recording(), State()
        meta = Meta(SCHEMA, self.config.to_dict())
        meta.step = 0
        for sink in (self.recording.add, self.state.apply):
            sink(meta)
            self.scheduler.bus.subscribe(sink)
        self.count = 0
        self.num_moved = self.num_cancelled = 0

    def check(self):
        self.scheduler.check()
        assert self.state.snapshot() == self.scheduler.snapshot()

    def submit(self):
        self.count += 1
        lengths = self.draw.randint(1, 20), self.draw.randint(1, 18)
        self.scheduler.submit(Request(f"R{self.count}", *lengths, seed=self.count), self.scheduler.step)

    def between(self):
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        if self.draw.random() < 0.1:
            ops = scheduler.plan_compact()
            self.runner.run_ops(ops)
            scheduler.compact(ops, "a try")
            self.num_moved += sum(len(op.pairs) for op in ops)
        if self.draw.random() < 0.1:
            size = self.draw.randint(16, 28)
            try:
                ops = scheduler.plan_resize(size)
            except OutOfBlocks:
                return
            self.runner.run_ops(ops)
            self.runner.resize(size)
            scheduler.resize(size, ops)
            self.num_moved += sum(len(op.pairs) for op in ops)
            assert blocks.num_blocks == size
        self.check()

    def step(self):
        scheduler, draw = self.scheduler, self.draw
        before = scheduler.snapshot()
        plan = scheduler.schedule(scheduler.step)
        self.check()
        self.num_moved += sum(len(op.pairs) for op in plan.ops if op.kind == "move")
        if draw.random() < 0.15:
            self.num_cancelled += 1
            if draw.random() < 0.5:
                self.runner.execute(plan)
                self.runner.take_back(plan)
            scheduler.cancel(plan)
            self.check()
            assert scheduler.snapshot() == before
            return
        result = self.runner.execute(plan)
        second = None
        if draw.random() < 0.3:
            second = scheduler.schedule(scheduler.step)
            self.check()
        scheduler.commit(plan, result)
        self.check()
        if second is None:
            return
        if draw.random() < 0.4:
            scheduler.cancel(second)
        else:
            scheduler.commit(second, self.runner.execute(second))
        self.check()

    def run(self, requests):
        for _ in range(600):
            if self.count < requests and self.draw.random() < 0.4:
                self.submit()
            if self.count == requests and not self.scheduler.requests:
                return
            if self.draw.random() < 0.03 and self.scheduler.requests:
                self.scheduler.abort(self.draw.choice(list(self.scheduler.requests)))
            self.between()
            self.step()
        raise AssertionError(f"not done: {self.scheduler.requests}")


@pytest.mark.parametrize(("allocator", "compaction"), SETTINGS)
@pytest.mark.parametrize("seed", range(3))
def test_every_read_is_right_and_every_state_is_folded(allocator, compaction, seed):
    traffic = Traffic(seed, allocator, compaction)
    traffic.run(25)
    assert traffic.num_cancelled
    assert traffic.num_moved or seed != 0
    assert traffic.scheduler.blocks.num_free == traffic.scheduler.blocks.num_blocks
