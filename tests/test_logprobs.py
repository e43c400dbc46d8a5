"""Log-probabilities of new tokens and of prompts: raw, complete, the same however the prompt was computed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedinfer import SamplingParams
from pagedinfer.errors import ConfigError
from pagedinfer.model.tiny import ByteTokenizer
from pagedinfer.runner import logprobs as module
from pagedinfer.runner.logprobs import token_logprobs, token_logprobs_reference
from pagedinfer.testing import assert_no_leak, assert_same, force_preempt, run_bounded, tiny_llm

PROMPT = [256, *b"The cat sat on the mat."]
SCORE = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2, logprobs=2)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llm():
    with tiny_llm(num_blocks=128) as llm:
        yield llm
        llm.engine.check()


# -- the twin ---------------------------------------------------------------------------------------------------------

QUARTERS = st.integers(-40, 40).map(lambda i: i / 4)


def rows_of(**options):
    row = st.lists(QUARTERS, min_size=7, max_size=7, **options)
    return st.lists(st.tuples(row, st.integers(-1, 9), st.integers(0, 6)), min_size=1, max_size=4)


def fast(rows):
    logits = torch.tensor([row for row, _, _ in rows])
    return token_logprobs(logits, [num for _, num, _ in rows], [token for _, _, token in rows])


@settings(max_examples=200, deadline=None)
@given(rows_of(unique=True))
def test_token_logprobs_equals_the_reference(rows):
    for entry, (row, num, token) in zip(fast(rows), rows, strict=True):
        expected = token_logprobs_reference(row, num, token)
        assert list(entry) == list(expected)
        for candidate, (value, rank) in entry.items():
            assert value == pytest.approx(expected[candidate][0], abs=1e-5)
            assert rank == expected[candidate][1]


@settings(max_examples=200, deadline=None)
@given(rows_of())
def test_of_equal_logits_any_may_be_listed(rows):
    for entry, (row, num, token) in zip(fast(rows), rows, strict=True):
        num = 7 if num < 0 else min(num, 7)
        assert token in entry
        assert num <= len(entry) <= num + 1
        assert [row[candidate] for candidate in list(entry)[:num]] == sorted(row, reverse=True)[:num]
        for candidate, (value, rank) in entry.items():
            assert value == pytest.approx(row[candidate] - math.log(sum(map(math.exp, row))), abs=1e-4)
            assert rank > sum(other > row[candidate] for other in row)
            assert rank <= sum(other >= row[candidate] for other in row)


# -- prompts ----------------------------------------------------------------------------------------------------------


def oracle(prompt):
    """Each prompt token's distribution, from the prompt cut before it: (log-probability per id) for positions 1, ..."""
    with tiny_llm(num_blocks=512) as llm:
        cut = [prompt[:end] for end in range(1, len(prompt))]
        outputs = llm.generate(cut, SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1))
    return [{token: entry.logprob for token, entry in o.outputs[0].logprobs[0].items()} for o in outputs]


@pytest.fixture(scope="module")
def expected():
    return oracle(PROMPT)


def check(prompt_logprobs, prompt, expected, num):
    assert len(prompt_logprobs) == len(prompt)
    assert prompt_logprobs[0] is None
    for token, entry, row in zip(prompt[1:], prompt_logprobs[1:], expected, strict=True):
        ordered = sorted(row, key=row.get, reverse=True)
        assert set(entry) == {*ordered[:num], token}
        for candidate, value in entry.items():
            assert value.logprob == pytest.approx(row[candidate], abs=1e-4)
            assert value.rank == ordered.index(candidate) + 1
            assert value.decoded_token == ByteTokenizer().decode([candidate], skip_special_tokens=False)


@pytest.mark.parametrize("num", [0, 1, 5, -1])
def test_prompt_logprobs_are_those_of_the_model(llm, expected, num):
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=num)
    (output,) = llm.generate([PROMPT], asked)
    check(output.prompt_logprobs, PROMPT, expected, 259 if num == -1 else num)
    (none,) = llm.generate([PROMPT], SamplingParams(max_tokens=1))
    assert none.prompt_logprobs is None


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 8, 23, 24, 64])
@pytest.mark.parametrize("block_size", [3, 4])
def test_sc_08_no_entry_is_lost_at_a_chunk_edge(expected, budget, block_size):
    with tiny_llm(max_num_batched_tokens=budget, block_size=block_size) as llm:
        (output,) = llm.generate([PROMPT], SCORE)
        check(output.prompt_logprobs, PROMPT, expected, 2)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_sc_08_a_preemption_loses_nothing_and_doubles_nothing(llm, expected, steps):
    (whole,) = llm.generate([PROMPT], SCORE)
    with tiny_llm(max_num_batched_tokens=8) as small:  # three chunks, then two tokens more
        rid = small.engine.add_request(PROMPT, SCORE)
        for _ in range(steps):
            small.engine.step()
        force_preempt(small.engine, rid)
        done = run_bounded(small.engine, 50)[rid]
    check(done.prompt_logprobs, PROMPT, expected, 2)
    assert_same([done], [whole])


def test_sc_08_chunks_that_are_computed_again_are_kept_once(expected):
    with tiny_llm(max_num_batched_tokens=11) as llm:
        rid = llm.engine.add_request(PROMPT, SCORE)
        lengths = []
        while rid in llm.engine.scheduler.requests and len(lengths) < 40:
            outputs = llm.engine.step()
            lengths.append(len(outputs[0].prompt_logprobs))
            if len(lengths) in (1, 3):
                force_preempt(llm.engine, rid)
        check(outputs[0].prompt_logprobs, PROMPT, expected, 2)
    assert lengths[:3] == [12, 12, 23]  # 11 scored and the None; scored again, kept once; 22 and the None
    assert lengths == sorted(lengths)


def test_a_failed_step_neither_loses_nor_doubles(llm, expected):
    execute, calls = llm.engine.runner.execute, []

    def patched(plan):
        result = execute(plan)
        calls.append(plan.step)
        if len(calls) in (1, 3):
            raise RuntimeError("made to fail")
        return result

    with tiny_llm(max_num_batched_tokens=10) as llm:
        execute = llm.engine.runner.execute
        llm.engine.runner.execute = patched
        rid = llm.engine.add_request(PROMPT, SCORE)
        done = {}
        while llm.engine.has_unfinished():
            try:
                done.update((o.request_id, o) for o in llm.engine.step())
            except RuntimeError:
                llm.engine.check()
        check(done[rid].prompt_logprobs, PROMPT, expected, 2)


def test_rows_are_projected_a_few_at_a_time(llm, expected, monkeypatch):
    sizes = []
    original = token_logprobs

    def watched(logits, nums, ids):
        sizes.append(len(logits))
        return original(logits, nums, ids)

    monkeypatch.setattr(module, "_ROWS", 7)
    monkeypatch.setattr(module, "token_logprobs", watched)
    (output,) = llm.generate([PROMPT], SCORE)
    check(output.prompt_logprobs, PROMPT, expected, 2)
    assert sizes == [7, 7, 7, 2]  # of 24 tokens the last one's logits are the first output's


def test_only_those_who_ask_pay(llm, expected, monkeypatch):
    projected = []
    logits = type(llm.engine.runner._decoder).logits

    def watched(self, x, rows):
        projected.append(len(rows))
        return logits(self, x, rows)

    monkeypatch.setattr(type(llm.engine.runner._decoder), "logits", watched)
    plain = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate([PROMPT, PROMPT[:9], PROMPT], [plain, SCORE, plain])
    check(outputs[1].prompt_logprobs, PROMPT[:9], expected[:8], 2)
    assert outputs[0].prompt_logprobs is outputs[2].prompt_logprobs is None
    assert projected == [8, 3, 3, 3]
    alone = llm.generate([PROMPT], plain)
    assert_same([outputs[0], outputs[2]], alone * 2)


def test_a_prompt_of_one_token_has_nothing_to_score(llm):
    (output,) = llm.generate([[65]], SCORE)
    assert output.prompt_logprobs == [None]
    assert len(output.outputs[0].logprobs) == 3


def test_a_running_output_holds_what_is_known(llm):
    with tiny_llm(max_num_batched_tokens=8) as llm:
        llm.engine.add_request(PROMPT, SCORE)
        lengths = []
        while llm.engine.has_unfinished():
            lengths += [len(output.prompt_logprobs) for output in llm.engine.step()]
    assert lengths == [9, 17, 24, 24, 24]


def test_an_abort_keeps_what_was_scored(llm):
    with tiny_llm(max_num_batched_tokens=8) as llm:
        rid = llm.engine.add_request(PROMPT, SCORE)
        llm.engine.step()
        assert len(llm.engine.abort(rid).prompt_logprobs) == 9
        assert_no_leak(llm.engine)


# -- new tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shaping",
    [
        {"temperature": 3.0},
        {"presence_penalty": 2.0, "repetition_penalty": 3.0},
        {"logit_bias": {65: 50.0}},
        {"allowed_token_ids": [65, 66]},
        {"top_k": 2},
    ],
    ids=str,
)
def test_logprobs_are_raw_whatever_shapes_the_choice(llm, shaping):
    params = SamplingParams(**({"seed": 3, "max_tokens": 6, "ignore_eos": True, "logprobs": 2} | shaping))
    (output,) = llm.generate([PROMPT], params)
    completion = output.outputs[0]
    ids = [*PROMPT, *completion.token_ids]
    total = 0.0
    for number, entry in enumerate(completion.logprobs):
        raw = oracle_row(llm, ids[: len(PROMPT) + number])
        token = completion.token_ids[number]
        ordered = sorted(raw, key=raw.get, reverse=True)
        assert set(entry) == {*ordered[:2], token}
        assert entry[token].logprob == pytest.approx(raw[token], abs=1e-4)
        assert entry[token].rank == ordered.index(token) + 1
        total += raw[token]
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def oracle_row(llm, ids):
    (output,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1))
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def test_logprobs_are_unchanged_by_preemption(llm):
    params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True, logprobs=2)
    (cold,) = llm.generate([PROMPT], params)
    for after in range(1, 6):
        rid = llm.engine.add_request(PROMPT, params)
        while llm.engine.request(rid).num_output_tokens < after:
            llm.engine.step()
        force_preempt(llm.engine, rid)
        done = run_bounded(llm.engine, 50)[rid].outputs[0]
        assert done.cumulative_logprob == pytest.approx(cold.outputs[0].cumulative_logprob, abs=1e-4)
        for ours, theirs in zip(done.logprobs, cold.outputs[0].logprobs, strict=True):
            assert ours.keys() == theirs.keys()


def test_more_than_the_vocabulary_is_refused(llm):
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ConfigError, match=f"{name}=260: the vocabulary has 259"):
            llm.generate([PROMPT], SamplingParams(**{name: 260}))
        with pytest.raises(ConfigError, match=f"{name}=-2"):
            SamplingParams(**{name: -2})
