"""The simulated runner: tokens by a rule, one for each request that samples."""

import pytest

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.plan import BlockOp, StepPlan
from pagedinfer.engine.protocols import Runner
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.simulated import SimulatedRunner, counting_rule


def outputs(runner, requests, **limits):
    """Output ids by request."""
    config = EngineConfig(**({"num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 64} | limits))
    scheduler = Scheduler(config)
    for request in requests:
        scheduler.submit(request, 0)
    for _ in range(500):
        if not scheduler.requests:
            return {r.request_id: r.token_ids[r.num_prompt_tokens :] for r in requests}
        plan = scheduler.schedule(scheduler.step)
        scheduler.commit(plan, runner.execute(plan))
    raise AssertionError("not done")


def make(rid, prompt, max_tokens, seed, **more):
    return Request(rid, prompt, max_tokens, token_ids=[0] * prompt, seed=seed, **more)


def test_it_is_a_runner():
    assert isinstance(SimulatedRunner(), Runner)


def test_the_counting_rule_by_hand():
    assert outputs(SimulatedRunner(vocab_size=100), [make("a", 3, 4, seed=2)]) == {"a": [63, 70, 77, 84]}
    assert outputs(SimulatedRunner(vocab_size=70), [make("a", 3, 4, seed=2)]) == {"a": [63, 0, 7, 14]}


@pytest.mark.parametrize(
    "limits", [{}, {"max_num_batched_tokens": 3}, {"num_blocks": 5}, {"max_num_seqs": 1}]
)
def test_a_requests_tokens_do_not_depend_on_its_batch(limits):
    requests = [make(f"r{i}", 2 + 3 * i, 6, seed=i) for i in range(4)]
    got = outputs(SimulatedRunner(), requests, **limits)
    rule = counting_rule(256)
    for i in range(4):
        alone = outputs(SimulatedRunner(), [make("x", 2 + 3 * i, 6, seed=i)])["x"]
        assert got[f"r{i}"] == alone
        assert len(alone) == 6
    assert callable(rule)


def test_chunks_that_do_not_sample_get_no_token():
    scheduler = Scheduler(EngineConfig(num_blocks=4, block_size=4, max_num_batched_tokens=5))
    scheduler.submit(make("a", 8, 2, seed=0), 0)
    runner = SimulatedRunner()
    plan = scheduler.schedule(0)
    assert runner.execute(plan).tokens == {}
    scheduler.commit(plan, runner.execute(plan))
    plan = scheduler.schedule(1)
    assert runner.execute(plan).tokens == {"a": (1,)}
    assert runner.num_steps == 3


def test_a_rule_of_ones_own_and_ids_that_must_not_come_yet():
    runner = SimulatedRunner(vocab_size=10, rule=lambda item: 9)
    params = SamplingParams(min_tokens=2)
    request = make("a", 3, 4, seed=0, params=params, end_token_ids=(9, 0))
    assert outputs(runner, [request]) == {"a": [1, 1, 9, 9]}
    runner.close()
    runner.close()


def test_block_operations_are_counted():
    runner = SimulatedRunner(bytes_per_block=100)
    ops = [BlockOp("copy", ((0, 1), (2, 3))), BlockOp("swap_out", ((4, 0),)), BlockOp("copy", ((1, 5),))]
    plan = StepPlan(1, 0.0, 8, ops=ops)
    result = runner.execute(plan)
    assert (result.tokens, result.op_bytes, result.op_seconds) == ({}, 400, 0.0)
    assert runner.run_ops(ops[1:2]) == (100, 0.0)
    assert runner.num_moved == {"copy": 3, "swap_out": 2}
    runner.take_back(plan)
    runner.resize(9)
    assert SimulatedRunner().execute(plan).op_bytes == 0
