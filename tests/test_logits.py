"""Penalties, bias, allowed ids, bad words, masks and processors: against a slow twin, alone and in the engine."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedinfer import SamplingParams
from pagedinfer.engine.plan import ScheduledRequest, TokenRules
from pagedinfer.errors import ConfigError
from pagedinfer.model.tiny import ByteTokenizer
from pagedinfer.runner.logits import shape, shape_reference
from pagedinfer.runner.sampler import sample
from pagedinfer.testing import (
    assert_no_leak,
    assert_same,
    cold_outputs,
    force_preempt,
    poison,
    run_bounded,
    tiny_llm,
)

INF = math.inf


pytestmark = pytest.mark.usefixtures("one_thread")


def item(prompt=(), output=(), *, forbidden=(), masks=(), bad_words=(), **params):
    """The share of a request that has produced `output` and samples the next token."""
    ids = [*prompt, *output]
    rules = TokenRules(tuple(masks), tuple(bad_words)) if masks or bad_words else None
    return ScheduledRequest(
        "r", len(ids) - 1, 1, True, len(output), False, (), (), ids, SamplingParams(**params), 0,
        tuple(forbidden), len(prompt), rules,
    )  # fmt: skip


class Fixed:
    """A mask that is always the same."""

    def __init__(self, mask):
        self.mask = mask

    def allowed(self, token_ids):
        return self.mask


def shaped(logits, *items):
    rows = torch.tensor([logits] * len(items))
    raw, errors = shape(rows, items)
    return rows, raw, errors


# -- the twin ---------------------------------------------------------------------------------------------------------

VOCAB = 9
IDS = st.integers(0, VOCAB - 1)
LOGITS = st.lists(st.integers(-40, 40).map(lambda i: i / 4) | st.just(-INF), min_size=VOCAB, max_size=VOCAB)
PENALTY = st.sampled_from([-2.0, -0.5, 0.0, 0.0, 0.75, 2.0])
ITEMS = st.builds(
    item,
    st.lists(IDS, min_size=1, max_size=12),
    st.lists(IDS, max_size=12),
    forbidden=st.lists(IDS, max_size=2),
    masks=st.lists(st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB).map(Fixed), max_size=2),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=4),
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.3, 10.0]),
    logit_bias=st.none() | st.dictionaries(IDS, st.integers(-400, 400).map(lambda i: i / 4), max_size=4),
    allowed_token_ids=st.none() | st.lists(IDS, min_size=1, max_size=VOCAB),
    logprobs=st.none() | st.just(1),
)


@settings(max_examples=400, deadline=None)
@given(rows=st.lists(st.tuples(LOGITS, ITEMS), min_size=1, max_size=4))
def test_shape_equals_the_reference(rows):
    logits = torch.tensor([row for row, _ in rows])
    before = logits.clone()
    raw, errors = shape(logits, [asked for _, asked in rows])
    assert not errors
    for number, (row, asked) in enumerate(rows):
        assert logits[number].tolist() == pytest.approx(shape_reference(row, asked), rel=1e-5, abs=1e-5)
        original = raw.get(number, logits[number] if asked.params.logprobs is not None else before[number])
        assert torch.equal(original, before[number])


@settings(max_examples=100, deadline=None)
@given(LOGITS, st.lists(IDS, min_size=1, max_size=20), st.floats(0.1, 5.0), st.integers(0, 19))
def test_the_repetition_penalty_is_that_of_transformers(logits, ids, penalty, num_output):
    transformers = pytest.importorskip("transformers", reason="the extra `test` brings transformers")
    assume(max(logits) > -INF)
    theirs = transformers.RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([ids]), torch.tensor([logits])
    )
    cut = max(1, len(ids) - num_output)
    ours, _, _ = shaped(logits, item(ids[:cut], ids[cut:], repetition_penalty=penalty))
    torch.testing.assert_close(ours, theirs)


def test_a_row_that_asks_for_nothing_is_not_looked_at():
    class Untouchable:
        def __getitem__(self, key):
            raise AssertionError("looked at")

    plain = [item([1, 2], [3]), item([1], temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=1, logprobs=3)]
    assert shape(Untouchable(), plain) == ({}, {})


def test_rows_do_not_touch_each_other():
    logits = [0.5 * i for i in range(VOCAB)]
    rows, raw, _ = shaped(logits, item([1]), item([1], [2], presence_penalty=1.0, logprobs=0), item([3]))
    assert rows[0].tolist() == rows[2].tolist() == logits
    assert rows[1].tolist() == [0.0, 0.5, 0.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert list(raw) == [1]


# -- which tokens count -----------------------------------------------------------------------------------------------


def test_sd_14_repetition_sees_the_prompt_and_the_others_do_not():
    logits = [2.0, 2.0, -2.0, 2.0]
    rows, _, _ = shaped(
        logits,
        item([0, 0, 0], [1, 1, 2], repetition_penalty=2.0),
        item([0, 0, 0], [1, 1, 2], presence_penalty=0.5),
        item([0, 0, 0], [1, 1, 2], frequency_penalty=0.5),
        item([0, 0, 0], presence_penalty=0.5, frequency_penalty=0.5),
    )
    assert rows.tolist() == [[1.0, 1.0, -4.0, 2.0], [2.0, 1.5, -2.5, 2.0], [2.0, 1.0, -2.5, 2.0], logits]


def test_sd_14_after_a_preemption_output_is_still_output():
    """The resumed request computes prompt and output as one prefill; what is prompt is known by its length."""
    decode = item([5, 5], [1, 1, 2], presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.5)
    prefill = ScheduledRequest(
        "r", 0, 5, True, 3, True, (), (), decode.token_ids, decode.params, 0, (), 2
    )  # all five tokens at once
    rows, _, _ = shaped([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], decode, prefill)
    assert rows[0].tolist() == rows[1].tolist() == [1.0, pytest.approx(2 / 1.5 - 2), 0.5, 4.0, 5.0, 4.0]


def test_bad_words_are_rows_of_ids():
    logits = [0.0] * 5
    for output, ruled_out in (([], {4}), ([1], {4, 2}), ([1, 2], {4, 3}), ([2, 1], {4, 2}), ([0, 2], {4})):
        rows, _, _ = shaped(logits, item([1, 2], output, bad_words=[(1, 2), (1, 2, 3), (4,)]))
        assert {token for token, value in enumerate(rows[0].tolist()) if value == -INF} == ruled_out, output


# -- masks and processors ---------------------------------------------------------------------------------------------

KEEP = [True, False, True, False, False]
PACKED = np.array([0b00101], np.int32)


@pytest.mark.parametrize(
    "mask",
    [KEEP, np.array(KEEP), torch.tensor(KEEP), PACKED, torch.from_numpy(PACKED)],
    ids=lambda m: type(m),
)
def test_every_form_of_a_mask(mask):
    rows, _, errors = shaped([1.0] * 5, item([0], masks=[Fixed(mask)]))
    assert not errors
    assert rows[0].tolist() == [1.0, -INF, 1.0, -INF, -INF]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_packed_masks_of_any_length(vocab):
    keep = np.random.default_rng(vocab).random(vocab) < 0.5
    bits = np.zeros((vocab + 31) // 32 * 32, bool)
    bits[:vocab] = keep
    packed = np.packbits(bits, bitorder="little").view(np.int32)
    rows, _, _ = shaped([1.0] * vocab, item([0], masks=[Fixed(packed)]))
    assert (rows[0] == 1.0).tolist() == keep.tolist()


@pytest.mark.parametrize(
    "mask", [[True] * 4, [1.0] * 5, [[True] * 5], None, "yes", np.ones(5, np.int32)], ids=repr
)
def test_what_is_no_mask_fails_its_row_only(mask):
    rows, _, errors = shaped(
        [1.0] * 5, item([0]), item([0], masks=[Fixed(mask)]), item([0], logit_bias={1: 1})
    )
    assert list(errors) == [1]
    assert "mask" in errors[1]
    assert rows[0].tolist() == [1.0] * 5
    assert rows[2].tolist() == [1.0, 2.0, 1.0, 1.0, 1.0]


def test_processors_come_first_and_get_what_they_ask_for():
    seen = []

    def two(output_ids, logits):
        seen.append(list(output_ids))
        return torch.full_like(logits, 3.0)

    def three(prompt_ids, output_ids, logits):
        seen.append((list(prompt_ids), list(output_ids), logits.tolist()))
        return logits + 1.0

    asked = item([7, 8], [1], logits_processors=[two, three], allowed_token_ids=[1, 2], presence_penalty=1.0,
                 logit_bias={2: 0.5})  # fmt: skip
    rows, _, _ = shaped([0.0] * 4, asked)
    assert seen == [[1], ([7, 8], [1], [3.0] * 4)]
    assert rows[0].tolist() == [-INF, 3.0, 4.5, -INF]  # no processor brings back what is ruled out


def test_a_processor_may_change_its_argument_but_must_return_logits():
    def broken(ids, logits):
        logits[:] = 9.0

    rows, _, errors = shaped([1.0] * 3, item([0], logits_processors=[broken]))
    assert "TypeError" in errors[0]
    assert rows[0].tolist() == [1.0] * 3


def test_where_everything_is_ruled_out_the_row_says_so():
    rows, _, _ = shaped([1.0] * 3, item([0], allowed_token_ids=[1], forbidden=[1]), item([0]))
    sampled = sample(rows, [SamplingParams(temperature=0.0)] * 2, [0.5] * 2)
    assert sampled.tokens == [-1, 0]
    assert "rule out every token" in sampled.errors[0]


# -- in the engine ----------------------------------------------------------------------------------------------------

PENALTIES = (
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4, "repetition_penalty": 0.8},
)


@pytest.fixture
def llm():
    with tiny_llm(num_blocks=128) as llm:
        yield llm
        llm.engine.check()


def greedy(**options):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | options))


def chain(llm, prompt, params):
    """The oracle: each token from raw log-probabilities of everything before it, shaped by the slow twin."""
    output = []
    for _ in range(params.max_tokens):
        (known,) = llm.generate([[*prompt, *output]], greedy(max_tokens=1, logprobs=-1))
        raw = known.outputs[0].logprobs[0]
        row = [raw[token].logprob for token in range(259)]
        asked = item(prompt, output)
        asked.params = params
        row = shape_reference(row, asked)
        output.append(row.index(max(row)))
    return output


@pytest.mark.parametrize(
    "options",
    [{"presence_penalty": 1.5}, {"frequency_penalty": 0.7, "presence_penalty": -0.4},
     {"logit_bias": {71: -9.0, 65: 3.0}}, {"allowed_token_ids": [*range(97, 110), 257]}],
    ids=str,
)  # fmt: skip
def test_the_engine_follows_the_oracle(llm, options):
    # additive ones, so that log-probabilities do for logits
    prompt, params = [256, *b"AAA bbb"], greedy(**options)
    (output,) = llm.generate([prompt], params)
    assert list(output.outputs[0].token_ids) == chain(llm, prompt, params)
    (plain,) = llm.generate([prompt], greedy())
    assert list(plain.outputs[0].token_ids) != list(output.outputs[0].token_ids)


@pytest.mark.parametrize("options", PENALTIES, ids=str)
def test_sd_14_penalties_are_unchanged_by_preemption(options):
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=10, ignore_eos=True, logprobs=1, **options)
    (cold,) = cold_outputs(["A A A"], params)
    (plain,) = cold_outputs(
        ["A A A"], SamplingParams(temperature=0.9, seed=5, max_tokens=10, ignore_eos=True)
    )
    assert plain.outputs[0].token_ids != cold.outputs[0].token_ids
    for after in range(1, 10):
        with tiny_llm(num_blocks=32, max_num_batched_tokens=3 if after % 2 else 64) as llm:
            rid = llm.engine.add_request("A A A", params)
            while llm.engine.request(rid).num_output_tokens < after:
                llm.engine.step()
            force_preempt(llm.engine, rid)
            assert_same([run_bounded(llm.engine, 100)[rid]], [cold])


def test_sd_14_penalties_on_one_row_of_three(llm):
    params = [greedy(), greedy(repetition_penalty=1.8, presence_penalty=1.0), greedy()]
    outputs = llm.generate(["A A A"] * 3, params)
    assert_same(outputs, cold_outputs(["A A A"] * 3, params))
    assert (
        outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids != outputs[1].outputs[0].token_ids
    )


def test_allowed_ids_and_bad_words_hold_whatever_is_drawn(llm):
    letters = list(b"abc ")
    params = SamplingParams(
        temperature=3.0, seed=1, max_tokens=80, allowed_token_ids=letters, bad_words=["ab", "c"]
    )
    (output,) = llm.generate(["x"], params)
    assert set(output.outputs[0].token_ids) <= set(b"ab ")
    assert "ab" not in output.outputs[0].text
    assert {"a", "b"} <= set(output.outputs[0].text)


def test_a_bias_forces_and_bans(llm):
    (output,) = llm.generate(["x"], greedy(logit_bias={90: 100}))
    assert output.outputs[0].text == "Z" * 12
    (free,) = llm.generate(["x"], greedy())
    (banned,) = llm.generate(["x"], greedy(logit_bias=dict.fromkeys(free.outputs[0].token_ids, -100.0)))
    assert not set(free.outputs[0].token_ids) & set(banned.outputs[0].token_ids)


def test_min_tokens_stands_against_every_end(llm):
    """All end ids are masked, stop strings do not count yet; a bias that asks for the end changes nothing."""
    asked = {"temperature": 0.0, "max_tokens": 20, "min_tokens": 8}
    bias = {257: 90, 65: 80, 90: 60}
    (output,) = llm.generate(["x"], SamplingParams(stop_token_ids=[65], logit_bias=bias, **asked))
    assert list(output.outputs[0].token_ids) == [90] * 8 + [257]
    assert output.outputs[0].finish_reason == "stop"
    (output,) = llm.generate(["x"], SamplingParams(stop_token_ids=[65], logit_bias={65: 80, 90: 60}, **asked))
    assert list(output.outputs[0].token_ids) == [90] * 8 + [65]
    assert output.outputs[0].stop_reason == 65
    (output,) = llm.generate(["x"], SamplingParams(stop=["Z"], logit_bias={90: 60}, **asked))
    assert list(output.outputs[0].token_ids) == [90] * 8  # the eighth is the first that counts
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("Z" * 7, "Z")


class Alternate:
    """Odd and even ids take turns: depends on the output's length only, so it may be shared."""

    def __init__(self, fail_at=None):
        self.fail_at, self.calls = fail_at, []

    def allowed(self, token_ids):
        self.calls.append(list(token_ids))
        if len(token_ids) == self.fail_at:
            raise RuntimeError("no mask today")
        return np.arange(259) % 2 == len(token_ids) % 2


def test_a_mask_hook_sees_the_output_and_decides(llm):
    hook = Alternate()
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=9, ignore_eos=True, token_mask=hook)
    outputs = llm.generate(["a", "b"], params)
    rows = [list(output.outputs[0].token_ids) for output in outputs]
    for row in rows:
        assert [token % 2 for token in row] == [0, 1] * 4 + [0]
    assert sorted(hook.calls) == sorted(row[:n] for row in rows for n in range(9))


def test_a_mask_hook_that_raises_ends_its_request_only(llm):
    params = [greedy(), greedy(token_mask=Alternate(fail_at=3)), greedy()]
    outputs = llm.generate(["Hello"] * 3, params)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error == "RuntimeError in a mask or logits processor: no mask today"
    assert len(outputs[1].outputs[0].token_ids) == 3
    assert_same([outputs[0], outputs[2]], cold_outputs(["Hello"] * 2, greedy()))
    assert_no_leak(llm.engine)


def test_a_poisoned_row_is_the_models_fault_whatever_is_allowed(llm):
    rid = llm.engine.add_request("Hello", greedy(allowed_token_ids=[65, 66]))
    llm.engine.step()
    poison(llm.engine)
    assert "not finite" in run_bounded(llm.engine, 50)[rid].error


# -- at the door ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty=2.1"),
        ({"frequency_penalty": math.nan}, "frequency_penalty=nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty=-1.0"),
        ({"logit_bias": [1]}, "logit_bias=.*dict"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias='1'"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias=-1"),
        ({"logit_bias": {1: INF}}, r"logit_bias\[1\]=inf"),
        ({"allowed_token_ids": []}, "allows nothing"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids=True"),
        ({"bad_words": ["a", ""]}, "bad_words"),
        ({"bad_words": 5}, "bad_words=5"),
        ({"logits_processors": [5]}, "logits_processors"),
        ({"token_mask": 5}, "token_mask=5"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        SamplingParams(**options)


def test_sv_04_foreign_ids_in_bias_and_allowed_ids_are_refused(llm):
    for bad in (259, 260, 2**31):
        for options in (
            {"logit_bias": {bad: 1.0}},
            {"allowed_token_ids": [1, bad]},
            {"stop_token_ids": [bad]},
        ):
            with pytest.raises(ConfigError, match=f"{next(iter(options))} has {bad}, outside the vocabulary"):
                llm.generate(["a"], greedy(**options))
    assert_no_leak(llm.engine)


def test_the_engine_without_tokenizer_or_logits_says_what_it_cannot():
    from pagedinfer import Engine, EngineConfig
    from pagedinfer.sim.simulated import SimulatedRunner

    engine = Engine(EngineConfig(num_blocks=4), SimulatedRunner())
    with pytest.raises(ConfigError, match="bad_words need a tokenizer"):
        engine.add_request([1], SamplingParams(bad_words=["x"]))
    for options in (
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"allowed_token_ids": [1]},
        {"token_mask": Alternate()},
    ):
        with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*simulates"):
            engine.add_request([1], SamplingParams(**options))
    with pytest.raises(ConfigError, match=r"best_of=2.*simulates"):
        engine.add_request([1], SamplingParams(best_of=2))
    shaping = SamplingParams(presence_penalty=1.0, logit_bias={1: 1.0}, temperature=0.5, n=2, best_of=2)
    rid = engine.add_request([1], shaping)
    assert len(run_bounded(engine, 100)[rid].outputs) == 2


class PanicException(BaseException):  # what a panic of Rust code is called
    pass


@pytest.mark.parametrize("kind", [PanicException, KeyboardInterrupt])
def test_a_panic_costs_its_request_and_ctrl_c_goes_on(kind):
    def raising(ids, logits):
        raise kind("now")

    asked = item([0], logits_processors=[raising])
    if kind is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            shaped([1.0] * 3, asked)
    else:
        assert shaped([1.0] * 3, asked)[2] == {0: "PanicException in a mask or logits processor: now"}


def test_bad_words_are_tokenized_with_and_without_a_space():
    from pagedinfer.engine.intake import make_rules

    rules = make_rules(SamplingParams(bad_words=["ab", " c"]), ByteTokenizer(), None)
    assert rules.bad_words == ((97, 98), (32, 97, 98), (32, 99))
    assert make_rules(SamplingParams(), ByteTokenizer(), None) is None
    words = SimpleNamespace(encode=lambda text, add_special_tokens: [])
    assert make_rules(SamplingParams(bad_words=["x"]), words, None) is None


# -- all at once ------------------------------------------------------------------------------------------------------

CROWD = (
    {"repetition_penalty": 1.4, "logprobs": 1},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "n": 2},
    {"logit_bias": {65: 4.0, 257: -100}, "prompt_logprobs": 1},
    {"allowed_token_ids": [*range(65, 91), 257], "min_tokens": 6},
    {"bad_words": ["e", "a"], "top_k": 30},
    {"token_mask": Alternate(), "top_p": 0.9},
    {"best_of": 3, "stop": ["Q"]},
    {"min_p": 0.05, "temperature": 0.7},
)


def everything(output):
    scores = [
        None if entry is None else {token: pytest.approx(e.logprob, abs=1e-3) for token, e in entry.items()}
        for entry in output.prompt_logprobs or ()
    ]
    return scores, [(list(c.token_ids), c.text, c.finish_reason, c.stop_reason) for c in output.outputs]


@pytest.mark.parametrize(("seed", "caching"), [(0, False), (1, True), (2, True)])
def test_every_option_in_one_crowd_is_as_alone(seed, caching):
    """A pool too small for all, a preemption forced at every second step: each output equals its run alone."""
    params = [
        SamplingParams(**({"temperature": 1.0, "seed": 10 * seed + i, "max_tokens": 14} | options))
        for i, options in enumerate(CROWD)
    ]
    prompts = [f"{i}: the cat sat on the mat"[: 4 + 3 * i] for i in range(len(CROWD))]
    cold = cold_outputs(prompts, params)
    options = {
        "num_blocks": 40,
        "max_num_batched_tokens": 13,
        "max_num_seqs": 8,
        "enable_prefix_caching": caching,
    }
    with tiny_llm(**options) as llm:
        rids = [llm.engine.add_request(*asked) for asked in zip(prompts, params, strict=True)]
        done = {}
        while llm.engine.has_unfinished():
            done.update((output.request_id, output) for output in llm.engine.step())
            llm.engine.check()
            step, running = llm.engine.scheduler.step, llm.engine.scheduler.running
            if step % 2 and len(running) > 1:
                force_preempt(llm.engine, running[step % len(running)].request_id)
            assert step < 2000
        # Who finds its blocks in the cache again is done in fewer steps.
        assert llm.engine.metrics()["num_preemptions"] > (10 if caching else 20)
        for rid, alone in zip(rids, cold, strict=True):
            assert everything(done[rid]) == everything(alone), rid
        assert_no_leak(llm.engine)
