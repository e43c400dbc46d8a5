"""Contiguous memory under the real scheduler: the shadow checks every read, the fold every state."""

import contextlib
import random

import pytest

from pagedinfer import SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import OutOfBlocks
from pagedinfer.memory.contiguous import STRATEGIES
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.shadow import ShadowRunner
from pagedinfer.testing import assert_no_leak, assert_same, cold_outputs, poison, tiny_llm
from pagedinfer.trace.events import SCHEMA, Meta
from pagedinfer.trace.measures import external_fragmentation
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State

SETTINGS = [(name, compaction) for name in STRATEGIES for compaction in (False, True)] + [("paged", False)]


class Traffic:
    """Seeded arrivals, aborts, cancelled plans, two open plans, compaction and other pool sizes between steps."""

    def __init__(self, seed, allocator, compaction, *, cancels=0.15, **settings):
        self.draw, self.cancels = random.Random(seed), cancels
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
            usual = self.config.num_blocks
            size = self.draw.randint(usual * 2 // 3, usual * 7 // 6)
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
        if draw.random() < self.cancels:
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
@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_every_read_is_right_every_state_is_folded_and_the_re_run_is_the_same(allocator, compaction, swap):
    host = {"num_host_blocks": 16, "preempt_mode": "swap"} if swap else {}
    moved = cancelled = 0
    for seed in range(2):
        traffic = Traffic(seed, allocator, compaction, **host)
        traffic.run(25)
        blocks = traffic.scheduler.blocks
        assert blocks.num_free == blocks.num_blocks
        again, second = rerun(traffic.recording)
        assert second.to_jsonl(wall=False) == traffic.recording.to_jsonl(wall=False)
        assert again.snapshot() == traffic.scheduler.snapshot()
        moved, cancelled = moved + traffic.num_moved, cancelled + traffic.num_cancelled
    assert cancelled
    assert moved or allocator == "paged"


@pytest.mark.parametrize("compaction", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_plan_that_preempted_and_ran_gives_everything_back(compaction, mode):
    """Half of the plans are cancelled, most of them after their operations and writes were done."""
    preempted = 0
    for seed in range(4):
        traffic = Traffic(
            seed,
            "grow-by-move",
            compaction,
            cancels=0.5,
            num_blocks=16,
            num_host_blocks=12,
            preempt_mode=mode,
        )
        traffic.run(20)
        cancelled, plan = set(), None
        for event in traffic.recording.events:
            if event.kind == "step":
                plan = []
            elif event.kind == "preempt" and plan is not None:
                plan.append(event.rid)
            elif event.kind == "cancel" and plan:
                cancelled.update(plan)
        preempted += len(cancelled)
    assert preempted > 3


# -- with a model -----------------------------------------------------------------------------------------------------

PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(n)] for i, n in enumerate((5, 17, 3, 30, 9, 1, 22, 12))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 20, 33, 4, 17, 26, 8, 12)
]


@pytest.fixture(scope="module")
def cold(one_thread):
    return cold_outputs(PROMPTS, PARAMS)


@pytest.mark.parametrize(("allocator", "compaction"), SETTINGS[:-1])
def test_tokens_are_those_of_the_cold_run(cold, allocator, compaction):
    """A pool in which requests wait, move and are preempted, compacted and resized while they run."""
    small = 44 if allocator == "buddy" else 22  # its extents are larger
    with tiny_llm(
        num_blocks=small, block_size=4, max_model_len=64, max_num_batched_tokens=16, allocator=allocator,
        compaction=compaction,
    ) as llm:  # fmt: skip
        engine, moved, fragments = llm.engine, 0, set()
        poison(engine)
        rids = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        outputs = {}
        for step in range(500):
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = output
            if not engine.has_unfinished():
                break
            fragments.add(external_fragmentation(engine.scheduler.blocks.holes))
            if step % 7 == 3:
                before = engine.scheduler.blocks.largest_hole
                moved += engine.compact()
                assert engine.scheduler.blocks.largest_hole >= before
            if step % 11 == 5:
                with contextlib.suppress(OutOfBlocks):  # a full pool cannot shrink
                    engine.resize_pool(small + 4 if engine.scheduler.blocks.num_blocks == small else small)
        assert_same([outputs[rid] for rid in rids], cold)
        assert_no_leak(engine)
        assert moved or allocator == "reserve-max"  # one at a time: nothing to move
        assert max(fragments) > 0 or allocator == "reserve-max"
