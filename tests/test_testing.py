"""The helpers of `pagedinfer.testing`: each one passes on a sound engine and fails on a broken one."""

import pytest
import torch

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.output import CompletionOutput, RequestOutput
from pagedinfer.errors import ConfigError, RequestError
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.testing import (
    TIE_GAP,
    assert_no_leak,
    assert_same,
    check_map,
    cold_outputs,
    first_difference,
    force_preempt,
    poison,
    refuse_allocation,
    run_bounded,
    tiny_llm,
)
from pagedinfer.trace.recorder import Recorder

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("one_thread")


def engine(**options):
    config = EngineConfig(**({"num_blocks": 8, "block_size": 4} | options))
    return Engine(config, SimulatedRunner())


def output(ids=(1, 2), text="ab", reason="length"):
    return RequestOutput(
        "r0", None, [1], [CompletionOutput(0, text, list(ids), finish_reason=reason)], finished=True
    )


# -- references -------------------------------------------------------------------------------------------------------


def test_tiny_is_small_poisoned_and_the_same_each_time():
    with tiny_llm() as one, tiny_llm(num_blocks=8, block_size=2) as two:
        assert one.engine.config.block_size == 4
        assert (two.engine.config.num_blocks, two.engine.config.block_size) == (8, 2)
        assert one.engine.runner.kv.dtype == torch.float32
        assert one.engine.runner.kv.pool.isnan().all()
        assert_same(one.generate(["Hello"], GREEDY), two.generate(["Hello"], GREEDY))


def test_cold_runs_each_prompt_alone():
    params = [GREEDY, SamplingParams(seed=1)]
    first, second = cold_outputs(["Hello", "x"], params)
    assert (first.request_id, second.request_id) == ("r0", "r0")  # an engine for each
    assert (first.prompt, second.prompt) == ("Hello", "x")
    with pytest.raises(ValueError, match="zip"):
        cold_outputs(["Hello"], params)


# -- comparisons ------------------------------------------------------------------------------------------------------


def test_first_difference_has_one_tie_rule():
    assert first_difference([1, 2, 3], [1, 2, 3]) == ("same", 3)
    assert first_difference([1, 9, 3], [1, 2, 3]) == ("different", 1)
    assert first_difference([1, 9, 3], [1, 2, 3], [0.0, TIE_GAP / 2, 0.0]) == ("tie", 1)
    assert first_difference([1, 9, 3], [1, 2, 3], [0.0, TIE_GAP, 0.0]) == ("different", 1)
    assert first_difference([1, 2], [1, 2, 3], [0.0] * 3) == ("different", 2)
    assert first_difference([1, 2, 3, 4], [1, 2, 3], [0.0] * 3) == ("different", 3)
    assert first_difference([], []) == ("same", 0)


def test_same_compares_ids_text_and_reason():
    assert_same([output()], [output()])
    for other in (output(ids=(1, 3)), output(text="ac"), output(reason="stop")):
        with pytest.raises(AssertionError, match="r0"):
            assert_same([output()], [other])
    with pytest.raises(AssertionError, match="1 outputs, 2 references"):
        assert_same([output()], [output(), output()])


# -- invariants -------------------------------------------------------------------------------------------------------


def test_bound_returns_the_ended_and_fails_on_a_run_without_end():
    sound = engine()
    sound.add_request([1], SamplingParams(max_tokens=3))
    assert list(run_bounded(sound, 3)) == ["r0"]
    endless = engine()
    endless.add_request([1], SamplingParams(max_tokens=5))
    with pytest.raises(AssertionError, match="still unfinished after 4 steps"):
        run_bounded(endless, 4)


def test_leak_sees_what_is_left():
    sound = engine()
    assert_no_leak(sound)
    sound.add_request([1], SamplingParams(max_tokens=2))
    with pytest.raises(AssertionError, match="not drained"):
        assert_no_leak(sound)
    run_bounded(sound, 5)
    assert_no_leak(sound)
    sound.scheduler.blocks.allocate("ghost", 3)
    with pytest.raises(AssertionError, match="block_tables is not empty"):
        assert_no_leak(sound)
    lost = engine()
    lost.scheduler.blocks.pool._free.pop_front()
    with pytest.raises(AssertionError, match="missing from the free list"):
        assert_no_leak(lost)


def test_map_sees_wrong_counts():
    broken = engine()
    broken.add_request([1] * 6)
    broken.step()
    check_map(broken)
    broken.scheduler.blocks.pool._ref_counts[0] += 1
    with pytest.raises(AssertionError, match="ref count"):
        check_map(broken)


def test_check_sees_a_request_without_its_text():
    broken = engine()
    broken.add_request([1])
    broken._callers.live.clear()
    with pytest.raises(AssertionError, match="differ"):
        broken.check()


# -- faults -----------------------------------------------------------------------------------------------------------


def test_poison_shows_in_what_reads_it():
    with tiny_llm() as llm:
        rid = llm.engine.add_request("Hello", GREEDY)
        llm.engine.step()
        poison(llm.engine)  # now its own keys and values are gone
        done = run_bounded(llm.engine, 10)
    assert "not finite" in done[rid].error
    with pytest.raises(ConfigError, match="SimulatedRunner has no KV pool"):
        poison(engine())


def test_poison_is_in_no_cached_block():
    prompt = {"prompt_token_ids": list(range(1, 10))}
    with tiny_llm() as llm:
        (before,) = llm.generate([prompt], GREEDY)
        assert llm.engine.snapshot()["cached"]
        poison(llm.engine)
        assert not llm.engine.snapshot()["cached"]
        assert_same(llm.generate([prompt], GREEDY), [before])


def test_force_preempt_takes_the_place_and_says_so():
    mine = engine()
    with Recorder(mine) as recording:
        mine.add_request([1], SamplingParams(max_tokens=4))
        with pytest.raises(RequestError, match="must run"):
            force_preempt(mine, "r0")
        mine.step()
        force_preempt(mine, "r0")
        assert mine.metrics()["num_running"] == 0
        assert mine.request("r0").num_computed_tokens == 0
        run_bounded(mine, 10)
    assert [event.why for event in recording.events if event.kind == "preempt"] == ["forced"]
    assert [event.rid for event in recording.events if event.kind == "resume"] == ["r0"]


def test_refused_allocations_count_from_the_next():
    mine = engine()
    with Recorder(mine) as recording:
        for _ in range(2):
            mine.add_request([1] * 3, SamplingParams(max_tokens=6))
        refuse_allocation(mine, at=1)
        mine.step()
        assert mine.metrics()["num_running"] == 1
        refuse_allocation(mine, at=[0, 2])
        assert len(run_bounded(mine, 50)) == 2
    assert len([event for event in recording.events if event.kind == "refuse"]) == 3
    assert_no_leak(mine)
    with pytest.raises(ConfigError, match="counted from 0"):
        refuse_allocation(mine, at=-1)
