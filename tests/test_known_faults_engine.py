"""Faults that engines of this kind have shipped, at the level of the whole engine on the tiny model.

Each test bears the id of the fault in our list. Others of that list stand where their part is tested: BM-12, SC-16,
SC-18, SD-02, SD-04, SD-06, SD-08, SD-12, SD-16, SD-18, SV-04 and NB-10 in `test_llm`, `test_engine` and `test_text`.
"""

import asyncio
import json
import warnings
from dataclasses import asdict

import pytest

from pagedinfer import Recorder, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import RequestError, RequestTooLong
from pagedinfer.model.tiny import ByteTokenizer
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.testing import (
    assert_no_leak,
    assert_same,
    check_map,
    cold_outputs,
    force_preempt,
    refuse_allocation,
    run_bounded,
    tiny_llm,
)

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_sc_02_a_prompt_larger_than_the_pool_blocks_nobody():
    with tiny_llm(num_blocks=8) as llm:
        with pytest.raises(RequestTooLong, match=r"its 36 tokens need 9 blocks of 4, the whole pool has 8"):
            llm.engine.add_request([1] * 36, GREEDY)
        grows = llm.engine.add_request([1] * 26, GREEDY)  # the prompt fits, prompt and output do not
        short = llm.engine.add_request([2, 3], GREEDY)
        done = run_bounded(llm.engine, 100)
        assert done[grows].outputs[0].finish_reason == "length"
        assert "the whole pool has 8" in done[grows].detail
        assert (
            len(done[grows].outputs[0].token_ids) == 7
        )  # every slot of the pool was used, and one token more
        assert_same([done[short]], cold_outputs([[2, 3]], GREEDY))
        assert_no_leak(llm.engine)


@pytest.mark.parametrize("after", [1, 2, BLOCK_SIZE, BLOCK_SIZE + 1])
@pytest.mark.parametrize("budget", [2, 3, 64])
@pytest.mark.parametrize("caching", [False, True])
def test_sc_04_resumed_work_is_judged_by_what_is_missing(after, budget, caching):
    prompt = ByteTokenizer().encode("Hello")
    options = {"max_num_batched_tokens": budget, "enable_prefix_caching": caching}
    with tiny_llm(**options) as llm, Recorder(llm.engine) as recording:
        rid = llm.engine.add_request(prompt, GREEDY)
        while llm.engine.request(rid).num_output_tokens < after:
            llm.engine.step()
        force_preempt(llm.engine, rid)
        done = run_bounded(llm.engine, 100)
        assert_same([done[rid]], cold_outputs([prompt], GREEDY))
    # Each forward that reached the last position, and no other, brought exactly one token.
    computed, known, shared = 0, len(prompt), 0
    for event in recording.events:
        if event.kind == "preempt":
            computed = 0
        elif event.kind == "step":
            computed += event.scheduled[rid]
        elif event.kind == "share":  # what the cache holds counts as computed
            computed += event.num_tokens
            shared += event.num_tokens
        elif event.kind == "commit":
            reached = computed == known
            assert event.tokens.get(rid, 0) == reached
            known += reached
    assert known == len(prompt) + GREEDY.max_tokens
    assert bool(shared) == caching


@pytest.mark.parametrize("budget", [3, 5, 8, 9, 31])
def test_sc_06_a_chunk_sees_only_what_is_written(budget):
    prompts = [[1 + i] * n for i, n in enumerate((3, 30, 8, 17, 41))]
    with tiny_llm(max_num_batched_tokens=budget) as llm, Recorder(llm.engine) as recording:
        # The pool is poisoned: a key that is not written is NaN.
        assert_same(llm.generate(prompts, GREEDY), cold_outputs(prompts, GREEDY))
    steps = [event.scheduled for event in recording.events if event.kind == "step"]
    assert any(len(scheduled) > 1 and max(scheduled.values()) > 1 for scheduled in steps)


def test_sc_14_a_long_prefill_does_not_freeze_a_decode():
    engine = Engine(EngineConfig(num_blocks=64, block_size=4, max_num_batched_tokens=8), SimulatedRunner())
    with Recorder(engine) as recording:
        engine.add_request([1], SamplingParams(max_tokens=30), request_id="decoding")
        engine.step()
        engine.add_request([1] * 80, SamplingParams(max_tokens=2), request_id="long")
        engine.add_request([1] * 2, SamplingParams(max_tokens=2), request_id="short")
        done = run_bounded(engine, 100)
    assert len(done) == 3
    steps = [event for event in recording.events if event.kind == "step"]
    assert all("decoding" in event.scheduled for event in steps[:30])  # a token in every step
    first = dict(zip(recording.requests["request"], recording.requests["first_token"], strict=True))
    # The long prompt takes ceil(80 / 7) steps beside the decode; first come, first served, so the short one is next.
    assert first == {"decoding": 1, "long": 13, "short": 13}


@pytest.mark.parametrize("prompt", [[], [[]], {"prompt_token_ids": []}, {}], ids=repr)
def test_sv_02_an_empty_prompt_is_refused_and_the_engine_goes_on(prompt):
    with tiny_llm() as llm:
        live = llm.engine.add_request("Hello", GREEDY)
        with pytest.raises(RequestError):
            llm.engine.add_request(prompt)
        done = run_bounded(llm.engine, 50)
        assert_same([done[live]], cold_outputs(["Hello"], GREEDY))


def test_sv_02_empty_text_is_served_where_there_is_a_begin_token():
    with tiny_llm() as llm:
        (output,) = llm.generate("", GREEDY)
        assert output.prompt_token_ids == [256]
        assert len(output.outputs[0].token_ids) == 12
        (output,) = llm.chat([{"role": "system", "content": ""}], GREEDY)
        assert output.error is None


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_sd_04_an_output_cut_inside_a_character_is_valid_json(count):
    bytes_of = [*"🙂!".encode()]
    runner = SimulatedRunner(vocab_size=259, rule=lambda item: bytes_of[item.output_index])
    engine = Engine(EngineConfig(num_blocks=8), runner, tokenizer=ByteTokenizer())
    engine.add_request("a", SamplingParams(max_tokens=count))
    shown = ""
    while engine.has_unfinished():
        (output,) = engine.step()
        text = json.loads(json.dumps(asdict(output)))["outputs"][0]["text"]
        text.encode()  # real text, no half characters
        assert text.startswith(shown)
        assert output.finished or "\ufffd" not in text
        shown = text
    assert shown == ByteTokenizer().decode(bytes_of[:count])
    assert shown.count("\ufffd") == (count < 4)


def test_bm_10_free_list_and_tables_never_drift_apart():
    with tiny_llm(num_blocks=12) as llm:
        for _ in range(15):
            rids = [llm.engine.add_request([7] * n, GREEDY) for n in (5, 9, 3)]
            refuse_allocation(llm.engine, at=[1, 3])
            for _ in range(4):
                llm.engine.step()
                check_map(llm.engine)
            for rid in rids:
                if rid in {request.request_id for request in llm.engine.scheduler.running}:
                    force_preempt(llm.engine, rid)
                    check_map(llm.engine)
            assert len(run_bounded(llm.engine, 200)) == 3
            assert_no_leak(llm.engine)


@pytest.mark.parametrize("garbage", [float("inf"), -1e30, 0.0])
def test_tr_04_what_lies_in_unused_slots_never_matters(garbage):
    prompts = [[1 + i] * n for i, n in enumerate(range(1, 2 * BLOCK_SIZE + 2))]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3)
    results = []
    for value in (float("nan"), garbage):
        with tiny_llm(num_blocks=40) as llm:
            llm.engine.runner.kv.pool.fill_(value)
            results.append(llm.generate(prompts, params))
    for one, other in zip(*results, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs  # to the last bit


def test_nb_12_synchronous_calls_work_inside_a_running_loop():
    async def cell(llm):
        texts = [output.outputs[0].text for output in llm.generate(["Hello"], GREEDY)]
        return texts, "".join(llm.stream("Hello", GREEDY))

    with tiny_llm() as llm, warnings.catch_warnings(action="error"):
        (text,), streamed = asyncio.run(cell(llm))
    assert text == streamed == cold_outputs(["Hello"], GREEDY)[0].outputs[0].text
