"""Random runs of the core without a model, for tests that look at recordings: seeded, with everything that can come."""

import random

from pagedinfer import Session
from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.plan import StepResult
from pagedinfer.engine.request import Request, Status
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import RequestError
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.events import SCHEMA, Meta
from pagedinfer.trace.recording import Recording

CROWDED = EngineConfig(
    num_blocks=10, block_size=2, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=40, watermark=0.0
)


class Run:
    """A scheduler under a recording, stepped by hand. `ends`: request -> tokens after which it stops by itself."""

    def __init__(self, config=CROWDED, wall=None, policy=None):
        self.scheduler = Scheduler(config, policy=policy)
        self.scheduler.bus.wall_clock = wall
        meta = Meta(SCHEMA, config.to_dict())
        meta.step = 0
        self.recording = Recording([meta])
        self.scheduler.bus.subscribe(self.recording.add)
        self.runner = SimulatedRunner()
        self.ends = {}
        self.facts = []  # the scheduler's own numbers after each step, and the blocks that its plan wrote

    def submit(self, rid, prompt, max_tokens, stop_after=None, **options):
        """`prompt`: a number of tokens that nobody shares, or token ids, by which prefixes are shared."""
        if stop_after is not None:
            self.ends[rid] = stop_after
        tokens = [] if isinstance(prompt, int) else list(prompt)
        request = Request(rid, len(tokens) or prompt, max_tokens, token_ids=tokens, **options)
        self.scheduler.submit(request, float(self.scheduler.step))

    def step(self, errors=()):
        scheduler = self.scheduler
        plan = scheduler.schedule(float(scheduler.step))
        result = self.runner.execute(plan)
        ends = {}
        for item in plan.scheduled:
            rid = item.request_id
            if rid in errors:
                result = StepResult(
                    {r: t for r, t in result.tokens.items() if r != rid}, errors={rid: "made up"}
                )
            elif item.samples and scheduler.requests[rid].num_output_tokens + 1 == self.ends.get(rid):
                ends[rid] = ("stop", "an end id came")
        size = scheduler.blocks.block_size
        written = {
            item.block_table[position // size]
            for item in plan.scheduled
            for position in range(item.start, item.start + item.num_tokens)
        }
        scheduler.commit(plan, result, ends)
        scheduler.check()
        free, num_blocks = scheduler.blocks.num_free, scheduler.blocks.num_blocks
        self.facts.append(
            {
                "step": plan.step, "waiting": len(scheduler.waiting), "running": len(scheduler.running),
                "free blocks": free, "used blocks": num_blocks - free, "kv_usage": 1 - free / num_blocks,
                "preemptions": scheduler.queues.num_preemptions, "tokens": plan.num_tokens, "written": written,
            }
        )  # fmt: skip

    def drain(self, most=2_000):
        for _ in range(most):
            if not self.scheduler.requests:
                return self.recording
            self.step()
        raise AssertionError(f"not done after {most} steps")


def random_run(seed, **options):
    """The recording of `randomly`."""
    return randomly(seed, **options).recording


def randomly(seed, *, faults=True, failures=True, num_requests=14, config=None, shared=False, policy=None):
    """A finished run of random requests that crowd each other.

    Without `faults` nothing but submissions and aborts, without `failures` no cancelled plans and no sick rows. With
    `shared` many prompts begin alike.
    """
    rng = random.Random(seed)
    config = config or EngineConfig(
        num_blocks=rng.choice([6, 8, 12, 20]), block_size=rng.choice([1, 2, 3, 4]),
        max_num_seqs=rng.choice([2, 3, 4, 8]), max_num_batched_tokens=rng.choice([3, 5, 8, 16]),
        max_model_len=rng.choice([24, 40]), watermark=rng.choice([0.0, 0.0, 0.25]),
    )  # fmt: skip
    run, number = Run(config, policy=policy), 0
    while number < num_requests or run.scheduler.requests:
        if number < num_requests and rng.random() < 0.5:
            try:
                stop = rng.choice([None, None, rng.randint(1, 6)])
                length, most = rng.randint(0 if faults else 1, 14), rng.randint(1, 10)
                prompt = ([rng.choice([1, 2])] * 9 + [number] * 5)[:length] if shared and length else length
                run.submit(f"r{number}", prompt, most, stop)
            except RequestError:
                pass  # recorded as rejected
            number += 1
        live = list(run.scheduler.requests)
        if live and rng.random() < 0.05:
            run.scheduler.abort(rng.choice(live))
        running = [r.request_id for r in run.scheduler.running if r.status == Status.RUNNING]
        if faults and failures and rng.random() < 0.1:
            run.scheduler.cancel(run.scheduler.schedule(float(run.scheduler.step)), "made up")
        if faults and running and rng.random() < 0.05:
            run.scheduler.preempt(rng.choice(running), "forced")
        if faults and rng.random() < 0.05:
            run.scheduler.blocks.refuse_calls.add(run.scheduler.blocks.num_calls + rng.randint(0, 3))
        if run.scheduler.requests:
            run.step([rng.choice(live)] if faults and failures and live and rng.random() < 0.02 else ())
        assert run.scheduler.step < 3_000
    return run


def make_session(runner=None, requests=6, max_tokens=30, **config):
    """A session of requests that crowd each other in a small pool, with made-up tokens."""
    settings = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16} | config
    session = Session(Engine(EngineConfig(**settings), runner or SimulatedRunner()))
    for number in range(requests):
        session.submit([number] * 9, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
    return session
