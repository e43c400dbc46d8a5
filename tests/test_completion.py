"""The generator behind generate, chat and stream, over the simulated runner."""

import pytest

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.completion import complete
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import ConfigError, RequestError
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.testing import assert_no_leak, run_bounded


@pytest.fixture
def engine():
    engine = Engine(EngineConfig(num_blocks=32, block_size=4), SimulatedRunner())
    yield engine
    engine.check()


def lengths(*numbers):
    return [SamplingParams(max_tokens=n) for n in numbers]


def test_each_output_comes_with_its_place(engine):
    seen = list(complete(engine, [[1], [2]], lengths(2, 1)))
    assert [(place, len(o.outputs[0].token_ids), o.finished) for place, o in seen] == [
        (0, 1, False), (1, 1, True), (0, 2, True),
    ]  # fmt: skip
    assert_no_leak(engine)


def test_a_refused_prompt_comes_first_and_alone(engine):
    before = RequestError("refused before")
    seen = list(complete(engine, [[1], [], before], lengths(1, 1, 1)))
    assert [place for place, _ in seen] == [1, 2, 0]
    assert [output.error for _, output in seen] == [seen[0][1].error, "refused before", None]
    assert "no tokens" in seen[0][1].error


def test_single_raises(engine):
    for prompt in ([], RequestError("refused before")):
        with pytest.raises(RequestError):
            next(complete(engine, [prompt], lengths(1), single=True))


def test_nothing_is_asked_before_the_first_step(engine):
    complete(engine, [[1]], lengths(1)).close()
    assert engine.metrics()["num_submitted"] == 0


def test_wrong_params_run_none_of_the_prompts(engine):
    with pytest.raises(ConfigError, match="300"):
        next(complete(engine, [[1], [2]], [*lengths(1), SamplingParams(stop_token_ids=[300])]))
    assert_no_leak(engine)


def test_closing_aborts_its_own_requests_only(engine):
    for name in ("other", "prompt 1"):  # what a refused prompt is called may be somebody's id
        engine.add_request([1], SamplingParams(max_tokens=6), request_id=name)
    steps = complete(engine, [[1], []], lengths(9, 1))
    assert next(steps)[1].request_id == "prompt 1"
    next(steps)
    steps.close()
    assert set(engine.scheduler.requests) == {"other", "prompt 1"}
    assert set(run_bounded(engine, 20)) == {"other", "prompt 1"}


def test_what_others_finish_meanwhile_comes_with_the_next_step(engine):
    engine.add_request([1], SamplingParams(max_tokens=1), request_id="other")
    assert len(list(complete(engine, [[1]], lengths(4)))) == 4
    (output,) = engine.step()
    assert (output.request_id, output.finished) == ("other", True)
    assert_no_leak(engine)


def test_two_at_once_end_whoever_steps(engine):
    first, second = complete(engine, [[1]], lengths(5)), complete(engine, [[2]], lengths(3))
    seen = {1: [], 2: []}
    for _ in range(10):
        for number, steps in ((1, first), (2, second)):
            seen[number] += [
                len(output.outputs[0].token_ids) for _, output in [next(steps, (0, None))] if output
            ]
    assert seen == {1: [1, 2, 3, 4, 5], 2: [1, 2, 3]}
    assert_no_leak(engine)


def test_a_step_that_fails_aborts_all(engine):
    steps = complete(engine, [[1], [2]], lengths(5, 5))
    next(steps)
    engine.runner.execute = None
    next(steps)  # the first step's other output
    with pytest.raises(TypeError):
        next(steps)
    assert_no_leak(engine)
