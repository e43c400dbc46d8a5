"""Beam search on forked requests: equal to transformers and to a slow twin, sharing blocks, leaving nothing behind."""

from functools import cache
from itertools import product

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedinfer import BeamSearchParams, Recorder, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.beam_search import beam_search
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import ConfigError, RequestError, RequestTooLong
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.tiny import TinyWeights, tiny_config
from pagedinfer.runner.torch_runner import TorchRunner
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.shadow import ShadowMemory
from pagedinfer.testing import assert_no_leak, poison, tiny_llm
from pagedinfer.trace.replay import fold

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [list(b"Hello"), list(b"Once upon a time"), [7], list(range(30, 43))]


@cache
def decoder(vocab_size=259):
    config = tiny_config(vocab_size=vocab_size)
    return Decoder(config).load(TinyWeights(config, seed=1))


def make(ends=(), vocab_size=259, **options):
    """An engine over the tiny model, poisoned and watched by the shadow, and its recording."""
    settings = {"num_blocks": 96, "block_size": 4, "max_model_len": 128, "watermark": 0.0} | options
    config = EngineConfig(**settings)
    runner = TorchRunner(decoder(vocab_size), num_blocks=config.num_blocks, block_size=config.block_size)
    engine = Engine(config, runner, eos_token_ids=ends)
    poison(engine)
    ShadowMemory(config.num_blocks, config.block_size).watch(runner)
    return engine, Recorder(engine).start()


def search(engine, prompts, **how):
    outputs = beam_search(engine, prompts, BeamSearchParams(**how))
    engine.check()
    assert_no_leak(engine)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [
        [(s.tokens[len(p) :], s.cum_logprob) for s in o.sequences]
        for p, o in zip(prompts, outputs, strict=True)
    ]


def assert_equal(found, expected):
    """The same sequences in the same order, with the same sums."""
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [total for _, total in found] == pytest.approx([total for _, total in expected], abs=1e-3)


# -- the oracles ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    """The tiny model in transformers."""
    c = tiny_config()
    source = TinyWeights(c, seed=1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            rms_norm_eps=c.rms_norm_eps, bos_token_id=None, eos_token_id=None, pad_token_id=258,
        )
    ).eval()  # fmt: skip
    model.load_state_dict({name: source.read(name, torch.float32) for name in source.names()})
    return model


def search_with_transformers(model, prompt, ends, *, beam_width, max_tokens, length_penalty=1.0):
    model.generation_config.eos_token_id = list(ends) or None
    done = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        max_new_tokens=max_tokens, num_beams=beam_width, num_return_sequences=beam_width, early_stopping="never",
        length_penalty=length_penalty, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    found = []
    for row, score in zip(
        done.sequences[:, len(prompt) :].tolist(), done.sequences_scores.tolist(), strict=True
    ):
        end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        found.append((row[: end + 1], score * (end + 1) ** length_penalty))
    return found


@cache
def logprobs(tokens, vocab_size=259):
    """The model's log-probabilities of what follows, from an engine of its own."""
    config = EngineConfig(num_blocks=32, block_size=4, enable_prefix_caching=False)
    with Engine(config, TorchRunner(decoder(vocab_size), num_blocks=32, block_size=4)) as engine:
        engine.add_request(list(tokens), SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1))
        (output,) = engine.step()
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def search_slowly(prompt, ends, *, beam_width, max_tokens, length_penalty=1.0):
    """The twin: no early stop, every next token of every beam, whole sequences computed anew."""
    beams, done = [((), 0.0)], []
    for length in range(1, max_tokens + 1):
        found = [
            ((*tokens, token), total + logprob)
            for tokens, total in beams
            for token, logprob in logprobs((*prompt, *tokens)).items()
        ]
        found.sort(key=lambda candidate: -candidate[1])
        last = length == max_tokens
        done += [c for c in found[:beam_width] if c[0][-1] in ends or last]
        beams = [c for c in found if c[0][-1] not in ends][:beam_width]
    done.sort(key=lambda c: -c[1] / len(c[0]) ** length_penalty)
    return [(list(tokens), total) for tokens, total in done[:beam_width]]


ENDS = (37, 45, 52, 90, 101)
"""Ids that the tiny model likes, so that many beams end."""

CASES = [
    {"beam_width": 1, "max_tokens": 9},
    {"beam_width": 2, "max_tokens": 12},
    {"beam_width": 4, "max_tokens": 9},
    {"beam_width": 5, "max_tokens": 7, "length_penalty": 0.0},
    {"beam_width": 3, "max_tokens": 9, "length_penalty": 2.0},
    {"beam_width": 3, "max_tokens": 6, "length_penalty": -1.0},
    {"beam_width": 4, "max_tokens": 1},
]


@pytest.mark.parametrize("ends", [(), ENDS[:1], ENDS], ids=len)
@pytest.mark.parametrize("how", CASES[1:], ids=str)  # a single beam is none there
def test_it_equals_transformers(reference, how, ends):
    engine, _ = make(ends)
    for prompt, found in zip(PROMPTS, search(engine, PROMPTS, **how), strict=True):
        assert_equal(found, search_with_transformers(reference, prompt, ends, **how))


@pytest.mark.parametrize("ends", [(), ENDS], ids=len)
@pytest.mark.parametrize("how", CASES[:4], ids=str)
def test_it_equals_the_slow_twin(how, ends):
    engine, _ = make(ends)
    outputs = search(engine, PROMPTS[:2], **how)
    for prompt, found in zip(PROMPTS[:2], outputs, strict=True):
        assert_equal(found, search_slowly(prompt, ends, **how))
    if ends and how["beam_width"] > 2:
        assert any(tokens[-1] in ends for found in outputs for tokens, _ in found), (
            "nothing ends: choose other ends"
        )


def test_beams_enough_for_all_find_the_best_of_all():
    prompt, vocab_size, max_tokens = [1, 2, 3], 5, 3
    engine, _ = make(vocab_size=vocab_size, max_num_seqs=32)
    (found,) = search(engine, [prompt], beam_width=25, max_tokens=max_tokens)
    everything = []
    for tokens in product(range(vocab_size), repeat=max_tokens):
        steps = [logprobs((*prompt, *tokens[:i]), vocab_size)[tokens[i]] for i in range(max_tokens)]
        everything.append((list(tokens), sum(steps)))
    everything.sort(key=lambda c: -c[1])
    assert_equal(found, everything[:25])


# -- memory -----------------------------------------------------------------------------------------------------------


def test_beams_share_blocks_and_copy_when_they_part():
    engine, recording = make()
    most, execute = [], engine.runner.execute

    def look(plan):
        most.append(max(engine.snapshot()["ref_counts"].values()))
        return execute(plan)

    engine.runner.execute = look
    search(engine, [list(range(30, 43))], beam_width=4, max_tokens=12)
    assert max(most) == 4
    kinds = [event.kind for event in recording.events]
    assert kinds.count("copy") > 0
    assert kinds.count("fork") >= 3
    assert kinds.count("submit") == 1  # all others are forks
    computed = sum(sum(e.scheduled.values()) for e in recording.events if e.kind == "step")
    assert computed == 13 + 4 * 11  # the prompt once, then one token per beam and step
    assert fold(recording.events).snapshot() == engine.snapshot()
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 9},
        {"num_blocks": 14, "max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 4},
        {"enable_prefix_caching": False, "num_blocks": 12},
        {"allocator": "first-fit"},
        {"block_size": 1},
    ],
    ids=str,
)
def test_a_tight_engine_finds_the_same(options):
    how = {"beam_width": 4, "max_tokens": 9}
    roomy, _ = make(ENDS)
    expected = search(roomy, PROMPTS, **how)
    engine, recording = make(ENDS, **options)
    for found, wanted in zip(search(engine, PROMPTS, **how), expected, strict=True):
        assert_equal(found, wanted)
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


def test_others_use_the_engine_meanwhile():
    expected, _ = make(ENDS)
    expected = search(expected, PROMPTS[:1], beam_width=3, max_tokens=8)
    engine, _ = make(ENDS, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    theirs = [engine.add_request(prompt, params) for prompt in PROMPTS]
    (output,) = beam_search(engine, PROMPTS[:1], BeamSearchParams(beam_width=3, max_tokens=8))
    assert_equal([(s.tokens[5:], s.cum_logprob) for s in output.sequences], expected[0])
    done = {}
    while engine.has_unfinished():
        done.update((o.request_id, len(o.outputs[0].token_ids)) for o in engine.step() if o.finished)
    assert done == dict.fromkeys(theirs, 20)
    assert_no_leak(engine)


# -- the interface ----------------------------------------------------------------------------------------------------


def test_what_it_returns():
    with tiny_llm() as llm:
        (output,) = llm.beam_search("Hello", BeamSearchParams(beam_width=3, max_tokens=8))
        best = output.sequences[0]
        assert best.tokens[:6] == [256, *b"Hello"]
        assert best.text == llm.tokenizer.decode(best.tokens)
        assert best.finish_reason == "length"
        assert best.score == pytest.approx(best.cum_logprob / 8)
        chosen = [row[token].logprob for row, token in zip(best.logprobs, best.tokens[6:], strict=True)]
        assert sum(chosen) == pytest.approx(best.cum_logprob)
        assert [s.score for s in output.sequences] == sorted(
            (s.score for s in output.sequences), reverse=True
        )
        (greedy,) = llm.generate(
            "Hello", SamplingParams(temperature=0.0, max_tokens=8, logprobs=0), use_tqdm=False
        )
        assert best.cum_logprob >= greedy.outputs[0].cumulative_logprob
        llm.engine.check()


def test_one_bad_prompt_costs_only_itself():
    with tiny_llm() as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=4)
        good, bad, other = llm.beam_search(["a", [1] * 5000, "b"], params)
        assert (len(good.sequences), len(bad.sequences), len(other.sequences)) == (2, 0, 2)
        assert "max_model_len" in bad.error
        with pytest.raises(RequestTooLong):
            llm.beam_search([1] * 5000, params)
        with pytest.raises(RequestError, match="no tokens"):
            llm.beam_search({"prompt_token_ids": []}, params)
        assert_no_leak(llm.engine)


def test_a_sequence_ends_where_the_context_ends():
    engine, _ = make(max_model_len=16)
    (found,) = search(engine, [list(range(30, 43))], beam_width=3, max_tokens=9)
    assert [len(tokens) for tokens, _ in found] == [3, 3, 3]


def test_an_aborted_beam_ends_its_search_only():
    engine, _ = make()
    victims = []

    def subscriber(event):
        if event.kind == "fork" and not victims:
            victims.append(event.rid)
            engine.abort(event.rid)

    with engine.bus.subscribe(subscriber):
        first, second = beam_search(engine, PROMPTS[:2], BeamSearchParams(beam_width=2, max_tokens=6))
    assert first.sequences == []
    assert first.error == "A beam ended before its time: aborted by the caller."
    assert len(second.sequences) == 2
    assert_no_leak(engine)


def test_a_runner_that_fails_leaves_nothing_behind():
    engine, _ = make()
    execute, calls = engine.runner.execute, []

    def broken(plan):
        calls.append(plan)
        if len(calls) == 4:
            raise RuntimeError("once")
        return execute(plan)

    engine.runner.execute = broken
    with pytest.raises(RuntimeError, match="once"):
        beam_search(engine, PROMPTS, BeamSearchParams(beam_width=3, max_tokens=8))
    assert_no_leak(engine)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beam_width": 0}, "beam_width=0"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens=0"),
        ({"beam_width": 2, "ignore_eos": 1}, "ignore_eos=1"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty=nan"),
    ],
)
def test_bad_parameters_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        BeamSearchParams(**options)


def test_what_does_not_suit_the_engine_is_refused():
    engine, _ = make(max_num_seqs=2)
    with pytest.raises(ConfigError, match="beam_width=3 is above max_num_seqs=2"):
        beam_search(engine, PROMPTS, BeamSearchParams(beam_width=3))
    with pytest.raises(ConfigError, match=r"params is a SamplingParams; give BeamSearchParams"):
        beam_search(engine, PROMPTS, SamplingParams())
    assert beam_search(engine, [], BeamSearchParams(beam_width=2)) == []
