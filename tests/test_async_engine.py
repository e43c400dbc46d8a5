"""Many streams over one engine from async code, over a simulated runner and over the tiny model."""

import asyncio
import functools
import threading
import time

import pytest

from pagedinfer.async_engine import AsyncEngine
from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import EngineClosed, RequestError
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.testing import assert_no_leak, run_bounded

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class GatedRunner(SimulatedRunner):
    """Waits inside the forward pass until the event loop opens the gate: a blocked loop would never open it."""

    def __init__(self):
        super().__init__()
        self.inside, self.gate, self.fail, self.seconds = threading.Event(), threading.Event(), None, 0.0
        self.gate.set()

    def execute(self, plan):
        self.inside.set()
        assert self.gate.wait(30), "the event loop never ran during the forward pass"
        time.sleep(self.seconds)
        if self.fail:
            raise self.fail
        return super().execute(plan)


def make(num_blocks=64, **config):
    runner = GatedRunner()
    return runner, Engine(
        EngineConfig(num_blocks=num_blocks, block_size=4, max_model_len=64, **config), runner
    )


def in_a_loop(body):
    """Run an async test in a loop of its own, as a script would."""

    @functools.wraps(body)
    def test():
        asyncio.run(asyncio.wait_for(body(), 60))

    return test


def prompt(number):
    return [number + 1] * (3 + number % 5)


def idle():
    return all(thread.name != "pagedinfer-steps" for thread in threading.enumerate())


async def until(condition):
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


@in_a_loop
async def test_many_streams_give_what_the_engine_gives_alone():
    _, engine = make(num_blocks=16)
    streams = AsyncEngine(engine)
    outputs = await asyncio.gather(*(streams.generate(prompt(n), PARAMS) for n in range(20)))
    _, alone = make()
    for number in range(20):
        alone.add_request(prompt(number), PARAMS)
    expected = run_bounded(alone, 500)
    got = sorted((o.request_id, list(o.outputs[0].token_ids)) for o in outputs)
    assert got == sorted((rid, list(o.outputs[0].token_ids)) for rid, o in expected.items())
    await until(idle)
    assert_no_leak(engine)


@in_a_loop
async def test_the_loop_runs_while_the_model_does():
    runner, engine = make()
    runner.gate.clear()
    answer = asyncio.create_task(AsyncEngine(engine).generate(prompt(0), PARAMS))
    await until(runner.inside.is_set)
    runner.gate.set()  # only a loop that is free gets here
    assert len((await answer).outputs[0].token_ids) == 12


@in_a_loop
async def test_submitting_during_a_forward_pass_does_not_block_either():
    runner, engine = make()
    streams = AsyncEngine(engine)
    runner.gate.clear()
    first = asyncio.create_task(streams.generate(prompt(0), PARAMS))
    await until(runner.inside.is_set)
    second = asyncio.create_task(streams.generate(prompt(1), PARAMS))
    await asyncio.sleep(0)
    runner.gate.set()
    outputs = await asyncio.gather(first, second)
    assert {o.request_id for o in outputs} == {"r0", "r1"}


@in_a_loop
async def test_leaving_the_loop_or_cancelling_the_task_aborts():
    runner, engine = make()
    runner.seconds = 0.01
    streams = AsyncEngine(engine)
    endless = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    seen = []
    stream = streams.stream(prompt(0), endless)
    async for output in stream:
        seen.append(len(output.outputs[0].token_ids))
        if len(seen) == 2:
            break
    await stream.aclose()
    await until(lambda: not engine.scheduler.requests)
    assert seen == sorted(seen)
    assert seen[-1] < 50

    task = asyncio.create_task(streams.generate(prompt(1), endless))
    await until(lambda: engine.scheduler.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not engine.scheduler.requests)
    await until(idle)
    assert_no_leak(engine)


@in_a_loop
async def test_cancelled_while_it_is_being_submitted():
    runner, engine = make()
    streams = AsyncEngine(engine)
    runner.gate.clear()
    first = asyncio.create_task(streams.generate(prompt(0), PARAMS))
    await until(runner.inside.is_set)
    second = asyncio.create_task(streams.generate(prompt(1), PARAMS))
    await asyncio.sleep(0.01)
    second.cancel()
    runner.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (await first).finished
    await until(idle)
    assert_no_leak(engine)


@in_a_loop
async def test_a_slow_reader_gets_the_newest_and_the_last():
    _, engine = make()
    streams = AsyncEngine(engine)
    lengths = []
    async for output in streams.stream(prompt(0), PARAMS):
        lengths.append(len(output.outputs[0].token_ids))
        if len(lengths) == 1:
            await until(lambda: not engine.scheduler.requests)  # the engine does not wait for the reader
    assert lengths[-1] == 12
    assert len(lengths) <= 3, "outputs queued up"


@in_a_loop
async def test_a_failing_step_reaches_every_reader_and_leaves_the_engine_clean():
    runner, engine = make()
    streams = AsyncEngine(engine)
    runner.fail = RuntimeError("no more memory")
    results = await asyncio.gather(
        *(streams.generate(prompt(n), PARAMS) for n in range(3)), return_exceptions=True
    )
    assert [str(r) for r in results] == ["no more memory"] * 3
    await until(idle)
    assert_no_leak(engine)
    runner.fail = None
    assert (await streams.generate(prompt(0), PARAMS)).finished


class Undecodable:
    """A tokenizer that cannot decode once it is told so."""

    vocab_size, eos_token_ids, bos_token_id, broken = 256, (), None, False

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=True):
        if self.broken:
            raise ValueError("cannot decode")
        return bytes(token_ids).decode("latin-1")


@in_a_loop
async def test_a_failing_step_with_failing_aborts_still_reaches_every_reader():
    runner = GatedRunner()
    engine = Engine(EngineConfig(num_blocks=64, block_size=4), runner, tokenizer=Undecodable())
    streams = AsyncEngine(engine)
    runner.gate.clear()
    tasks = [asyncio.ensure_future(streams.generate("hello", PARAMS)) for _ in range(3)]
    await until(runner.inside.is_set)
    abort = engine.abort
    engine.abort = lambda request_id: 1 / 0
    runner.fail = RuntimeError("no more memory")
    runner.gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {str(r) for r in results} == {"no more memory"}
    await until(idle)
    engine.abort, runner.fail = abort, None
    assert (await streams.generate("hello", PARAMS)).finished


@in_a_loop
async def test_a_worker_that_died_is_replaced():
    _, engine = make()
    streams = AsyncEngine(engine)
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    streams._worker = dead
    assert (await streams.generate(prompt(0), PARAMS)).finished


@in_a_loop
async def test_refusals_are_raised():
    _, engine = make()
    streams = AsyncEngine(engine)
    with pytest.raises(RequestError, match="no tokens"):
        await streams.generate([], PARAMS)
    engine.close()
    with pytest.raises(EngineClosed):
        await streams.generate(prompt(0), PARAMS)
    await until(idle)


@in_a_loop
async def test_outputs_of_other_requests_are_kept_for_the_next_step():
    _, engine = make()
    other = engine.add_request(prompt(0), SamplingParams(max_tokens=2, ignore_eos=True))
    await AsyncEngine(engine).generate(prompt(1), PARAMS)
    await until(idle)
    assert engine.has_unfinished()
    assert [o.request_id for o in engine.step() if o.finished] == [other]


def test_one_engine_serves_several_loops_one_after_the_other():
    _, engine = make()
    streams = AsyncEngine(engine)
    for number in range(3):
        assert asyncio.run(streams.generate(prompt(number), PARAMS)).finished
    assert_no_leak(engine)
