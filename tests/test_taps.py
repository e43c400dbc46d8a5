"""Tensor taps: what they keep is what the step did, and the step does the same without them."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig

from pagedinfer import Engine, EngineConfig, SamplingParams, Session
from pagedinfer.backends.torch_ops import TorchOps
from pagedinfer.errors import ConfigError, RecordingError
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.fallback import FallbackSource
from pagedinfer.model.tiny import ByteTokenizer, TinyWeights, tiny_config
from pagedinfer.model.weights import open_weights
from pagedinfer.runner import torch_runner
from pagedinfer.runner.explain import explain
from pagedinfer.runner.sampler import sample, sample_reference, stages, uniform
from pagedinfer.runner.taps import Tap
from pagedinfer.runner.torch_runner import TorchRunner
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.testing import tiny_llm
from pagedinfer.trace.tap_records import TapRecord
from pagedinfer.views import AttentionView, Latency, SamplingView
from pagedinfer.views.stepped import WIDE

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GEMMA = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24}
MODELS = {
    "llama": {},
    "gemma2": GEMMA
    | {"attn_logit_softcapping": 3.0},  # softcap, windows in every other layer, a scale of its own
    "gemma3_text": GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt2": {},
    "starcoder2": {"sliding_window": 9},  # through transformers' own modules
}
# float32 against float32 over other shapes and orders of sums: 9e-5 was the largest difference of logits measured.
TOLERANCE = 2e-5


def prompt(seed, length):
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def built(random_model, tmp_path_factory):
    """A family's model for our runner, and transformers' own."""
    made = {}

    def build(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            options = COMMON | MODELS[family]
            if family == "gpt2":
                options = {
                    "vocab_size": VOCAB,
                    "n_embd": 48,
                    "n_layer": 3,
                    "n_head": 6,
                    "n_positions": 64,
                    "bos_token_id": 1,
                    "eos_token_id": 2,
                }
            theirs = random_model(AutoConfig.for_model(family, **options))
            theirs.save_pretrained(folder)
            if family == "starcoder2":
                ours = FallbackSource(folder).load(torch.float32)
            else:
                source = open_weights(folder)
                ours = Decoder(source.config).load(source)
            made[family] = ours, theirs
        return made[family]

    return build


def engine_of(model, block_size=4, **config):
    config = {"num_blocks": 60, "block_size": block_size, "max_num_batched_tokens": 16} | config
    runner = TorchRunner(model, num_blocks=config["num_blocks"], block_size=block_size)
    runner.kv.poison()
    return Engine(EngineConfig(**config), runner)


def run(engine):
    outputs = {}
    while engine.has_unfinished():
        outputs.update((output.request_id, output) for output in engine.step())
    return {rid: list(output.outputs[0].token_ids) for rid, output in outputs.items()}


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", MODELS)
def test_attention_per_block_equals_transformers(built, family):
    model, theirs = built(family)
    engine = engine_of(model)
    tap = Tap(sampling=False).attach(engine.runner)
    ids = {f"r{seed}": prompt(seed, length) for seed, length in ((0, 30), (1, 5), (2, 21))}
    for rid, tokens in ids.items():
        engine.add_request(tokens, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), rid)
    outputs = run(engine)
    theirs.set_attn_implementation("eager")
    seen_prefill = seen_decode = 0
    for rid, tokens in ids.items():
        with torch.inference_mode():
            weights = theirs(torch.tensor([tokens + outputs[rid]]), output_attentions=True).attentions
        records = [record for record in tap.records if record.request_id == rid]
        assert [record.position for record in records][-4:] == list(
            range(len(tokens), len(tokens) + 4)
        )  # one a step, from the prompt's last on
        for record in records:
            seen_prefill += record.position < len(tokens) - 1
            seen_decode += record.position >= len(tokens)
            assert [layer.layer for layer in record.attention] == [0, 1, 2]
            for layer in record.attention:
                row = weights[layer.layer][0, :, record.position, : record.position + 1].double()
                blocks = row.new_zeros(6, record.position // 4 + 1)
                blocks.index_add_(1, torch.arange(record.position + 1) // 4, row)
                assert layer.heads == tuple(range(6))
                assert torch.tensor(layer.mass, dtype=torch.float64).sub(blocks).abs().max() < TOLERANCE
                assert sum(layer.mean()) == pytest.approx(1.0, abs=1e-6)
                assert len(layer.block_table) == len(layer.mass[0])
    assert seen_prefill >= 2, "chunks that do not sample have a newest query too"
    assert seen_decode == 12
    windows = {layer.window for record in tap.records for layer in record.attention}
    expected = {"gemma2": {7, None}, "gemma3_text": {7, None}, "starcoder2": {9}}
    assert windows == expected.get(family, {None})


def test_attention_equals_a_softmax_by_hand():
    """From the pool and the queries alone, in float64, with plain numbers."""
    seen = []

    class Noting(TorchOps):
        def attention(self, q, layer, kv, context):
            out = super().attention(q, layer, kv, context)
            seen.append((layer, q[-1].clone(), out[-1].view(q.shape[1:]).clone()))
            return out

    source = TinyWeights(seed=3)
    engine = engine_of(Decoder(source.config, Noting()).load(source), block_size=1)
    tap = Tap(sampling=False).attach(engine.runner)
    rid = engine.add_request(ByteTokenizer().encode("by hand"), SamplingParams(max_tokens=4, seed=1))
    for _ in range(3):
        seen.clear()
        engine.step()
        record, table = tap.last(rid), engine.snapshot()["block_tables"][rid]
        for (layer, q, attended), kept in zip(seen, record.attention, strict=True):
            assert kept.layer == layer
            assert list(kept.block_table) == list(table[: record.position + 1])
            for head in range(4):
                slots = engine.runner.kv.pool[layer, list(kept.block_table), 0, :, head // 2].double()
                scores = [(key @ q[head].double()).item() / 4.0 for key in slots[:, 0]]
                weights = torch.tensor(scores, dtype=torch.float64).sub(max(scores)).exp()
                weights /= weights.sum()
                got = torch.tensor(kept.mass[head], dtype=torch.float64)
                assert (got - weights).abs().max() < 1e-6
                # A block is a token here, so the op's own output must be the values under the tap's weights.
                assert (got @ slots[:, 1] - attended[head]).abs().max() < 1e-5


def test_layers_and_heads_are_chosen_and_checked(built):
    model, _ = built("llama")
    engine = engine_of(model)
    with Tap(layers=[-1], heads=[0, -2]).attach(engine.runner) as tap:
        engine.add_request(prompt(0, 9), SamplingParams(max_tokens=1))
        engine.step()
    ((layer,),) = (record.attention for record in tap.records)
    assert (layer.layer, layer.heads, len(layer.mass)) == (2, (0, 4), 2)
    with pytest.raises(ConfigError, match=r"layers=\[3\]: this model has 3"):
        Tap(layers=[0, 3]).attach(engine.runner)
    with pytest.raises(ConfigError, match=r"heads=\[-7\]: this model has 6"):
        Tap(heads=[-7]).attach(engine.runner)


# -- sampling ---------------------------------------------------------------------------------------------------------


def told(logits, params, u, top=8):
    token = sample(logits[None], [params], [u]).tokens[0]
    return explain(
        [("model", logits)], params, output_index=3, uniform=u, token_id=token, top=top, text=lambda token: f"<{token}>"
    )  # fmt: skip


FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"min_p": 0.05, "top_k": 20, "top_p": 0.7, "temperature": 1.3},
    {"top_k": 300, "top_p": 0.999},
    {"top_p": 0.9999, "temperature": 4.0},  # more than the sampler's first candidates
]


@pytest.mark.parametrize("settings", FILTERS)
def test_stages_are_the_samplers_own(settings):
    torch.manual_seed(1)
    params = SamplingParams(**settings)
    for row in range(12):
        logits = (2.5 * torch.randn(400)).mul_(4).round_().div_(4)  # many equal logits
        u = uniform(row, 1)
        token, kept = sample_reference(logits.tolist(), params, u)
        found = stages(logits, params)
        assert [name for name, _ in found] == [
            "temperature",
            *(n for n in ("min_p", "top_k", "top_p") if n in settings),
        ]
        for (_, before), (_, after) in pairwise(found):
            assert ((after == before) | (after == 0)).all(), "a filter drops, and changes nothing else"
        weights = found[-1][1]
        assert set(weights.nonzero().flatten().tolist()) == kept
        choice = told(logits, params, u)
        assert choice.token_id == token
        assert choice.chosen.start <= u < choice.chosen.start + choice.chosen.shares[-1] + 1e-9
        by_hand = logits.double().div(params.temperature).softmax(0)
        after = by_hand * torch.tensor([token in kept for token in range(400)])
        after /= after.sum()
        for one in choice.candidates:
            assert one.logit == logits[one.token_id].item()
            assert one.shares[0] == pytest.approx(logits.double().softmax(0)[one.token_id].item(), abs=1e-6)
            assert one.shares[1] == pytest.approx(by_hand[one.token_id].item(), abs=1e-6)
            assert one.shares[-1] == pytest.approx(after[one.token_id].item(), abs=1e-6)
            assert bool(one.why) == (one.token_id not in kept)
        for place, stage in enumerate(choice.stages):
            assert sum(one.shares[place] for one in choice.candidates) + stage.rest == pytest.approx(
                1.0, abs=1e-6
            )
        assert choice.stages[-1].left == len(kept)
        assert 8 <= len(choice.candidates) <= 9


def test_the_sentences_say_what_dropped_whom():
    half = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]).log()
    params = SamplingParams(temperature=1.0, min_p=0.1, top_k=3, top_p=0.7)
    assert [one.why for one in told(half, params, 0.1).candidates] == [
        "",
        "",
        "dropped by top-p: cumulative 0.89 before it reached 0.7",
        "dropped by top-k: rank 4, 3 stay",
        "dropped by min-p: 0.08 of the best, below 0.1",
    ]
    greedy = told(half, SamplingParams(temperature=0.0, top_k=2), 0.9)
    assert [stage.name for stage in greedy.stages] == ["model", "greedy"]
    assert [one.why for one in greedy.candidates][:2] == [
        "",
        "not the most likely: temperature 0 takes only that",
    ]
    assert greedy.chosen.shares[1] == 1.0


def test_what_changes_logits_is_a_stage_and_a_reason():
    bonus = {ord("e"): 100.0, ord("q"): 2.0}
    with tiny_llm() as llm:
        session = Session(llm)
        tap = session.tap(attention=False, tokenizer=llm.tokenizer, top=5)
        params = SamplingParams(
            temperature=1.0, top_k=3, seed=1, max_tokens=4, min_tokens=3, logit_bias=bonus, frequency_penalty=1.5,
            allowed_token_ids=[257, *range(97, 123)],
            logits_processors=[lambda output, logits: logits.index_fill(0, torch.tensor([ord("a")]), 50.0)],
        )  # fmt: skip
        rid = session.submit("Hello", params)
        session.run()
        records = tap.records
    assert [record.choices[0].output_index for record in records] == [0, 1, 2, 3]
    assert [record.choices[0].token_id for record in records] == session.outputs[rid].outputs[0].token_ids
    names = [[stage.name for stage in record.choices[0].stages] for record in records]
    start = ["model", "logits processor", "allowed_token_ids"]
    assert names[0] == [*start, "min_tokens, bad_words", "logit_bias", "temperature", "top_k"]
    assert names[1] == [*start, "min_tokens, bad_words", "logit_bias", "penalties", "temperature", "top_k"]
    assert "min_tokens, bad_words" not in names[3], "a stage that changes nothing is none"
    first = records[0].choices[0]
    assert first.token_id == ord("e")
    assert first.chosen.text == "e"
    reasons = {one.why for one in first.candidates}
    assert "ruled out by allowed_token_ids" in reasons
    assert max(len(record.choices[0].candidates) for record in records) <= 11
    assert "".join(records[3].tokens) == "<bos>Hello" + session.outputs[rid].outputs[0].text[:3]


def test_a_row_that_fails_has_no_choice_and_hurts_nobody():
    def broken(output, logits):
        raise ValueError("no")

    with tiny_llm() as llm, Tap(attention=False) as tap:
        tap.attach(llm.engine.runner)
        params = SamplingParams(max_tokens=1, seed=1)
        outputs = llm.generate(
            ["a", "b"], [params, replace(params, logits_processors=[broken])], use_tqdm=False
        )
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]
    assert [len(record.choices) for record in tap.records] == [1, 0]


# -- the run stays the same -------------------------------------------------------------------------------------------

TRAFFIC = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=12, seed=5, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=7, top_p=0.9, min_p=0.01, max_tokens=15, seed=6, ignore_eos=True),
    SamplingParams(
        temperature=1.2,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        max_tokens=9,
        seed=7,
        min_tokens=4,
    ),
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, prompt_logprobs=1, ignore_eos=True),
]


@pytest.mark.parametrize("family", ["llama", "gemma2", "starcoder2"])
def test_outputs_are_token_identical_with_and_without_taps(built, family):
    model, _ = built(family)
    found = []
    for taps in ((), (Tap(keep=2), Tap(layers=[0], heads=[1], requests=["r1", "r4"], steps=range(3, 30)))):
        engine = engine_of(model, num_blocks=16, max_num_batched_tokens=20)
        for tap in taps:
            tap.attach(engine.runner)
        for seed, params in enumerate(TRAFFIC):
            engine.add_request(prompt(seed, 5 + 4 * seed), params)
        outputs = run(engine)
        assert engine.metrics()["num_preemptions"] > 0
        found.append((outputs, engine.runner.kv.pool.view(torch.int32).clone()))
    (alone, pool), (tapped, same_pool) = found
    assert alone == tapped
    assert torch.equal(pool, same_pool), "not a bit of the pool differs"
    two, few = taps
    assert len({record.step for record in two.records}) == 2
    assert {record.step for record in few.records} <= set(range(3, 30))
    assert {record.request_id for record in few.records} == {"r1", "r4"}


def test_without_taps_nothing_is_made(built, monkeypatch):
    model, _ = built("llama")
    engine = engine_of(model)
    monkeypatch.setattr(torch_runner, "StepWatch", lambda *_: pytest.fail("nobody watches"))
    engine.add_request(prompt(0, 9), SamplingParams(max_tokens=2))
    run(engine)
    tap = Tap().attach(engine.runner)
    tap.close()
    tap.close()
    assert engine.runner.taps == ()
    engine.add_request(prompt(0, 9), SamplingParams(max_tokens=2))
    run(engine)


# -- keeping ----------------------------------------------------------------------------------------------------------


def test_it_keeps_the_newest_steps_and_what_was_asked_for():
    with tiny_llm() as llm, Session(llm) as session:
        tap = session.tap(keep=3, layers=[0])
        only = session.tap(attention=False, requests=["r1"], steps=[2, 4])
        for text in ("one", "two"):
            session.submit(text, temperature=0.0, max_tokens=6, ignore_eos=True)
        session.run()
        assert sorted({record.step for record in tap.records}) == [4, 5, 6]
        assert [(record.step, record.request_id) for record in only.records] == [(2, "r1"), (4, "r1")]
        assert only.last() == only.records[-1]
        assert all(not record.attention and len(record.choices) == 1 for record in only.records)
        assert repr(tap) == "Tap(6 records, steps 4 to 6, attached)"
        with pytest.raises(ConfigError, match="no record of 'r0' yet"):
            only.last("r0")
        tap.clear()
        assert tap.records == []
    assert llm.engine.runner.taps == (), "a session takes its taps with it"


def test_a_view_of_a_sessions_tap_is_linked_with_those_of_its_recording():
    pytest.importorskip("anywidget", reason="anywidget is not installed (extra: view)")
    with tiny_llm() as llm, Session(llm) as session:
        tap, latency = session.tap(), Latency(session.recording)
        view = SamplingView(tap)
        for each in (view, latency):
            each._repr_mimebundle_()
        for _ in range(2):
            session.submit("linked", temperature=0.0, max_tokens=6, ignore_eos=True)
        session.run()
        latency.refresh()
        assert view.cursor == latency.cursor == tap.last_step == 6
        latency.selected = {"request": "r1"}
        latency.cursor = 4
        assert view.record() is next(r for r in tap.records if (r.step, r.request_id) == (4, "r1"))
        view._front.seen = json.loads(view._front.tail)["number"]  # as the browser does
        drawn = json.loads(view._front.tail)
        assert (drawn["steps"], drawn["say"]) == ([4], [view.sheet(4, WIDE).words])
        assert set(view.related(4, WIDE).tables) == {"r0", "r1"}


def test_views_of_a_tap_go_along_with_it():
    with tiny_llm() as llm, Session(llm) as session:
        tap = session.tap(keep=4, tokenizer=llm.tokenizer)
        views = [AttentionView(tap), SamplingView(tap)]
        for view in views:
            assert view.text() == f"{view.name}: step 0: no record yet; run a step while the tap is attached"
            assert view.svg()
        session.submit("one", temperature=0.0, max_tokens=9, ignore_eos=True)
        for step in range(1, 8):
            session.step()
            assert (len(tap), tap.last_step) == (step, step)
            for view in views:
                assert view.update()
                assert (view.first_step, view.last_step, view.cursor) == (max(1, step - 3), step, step)
                assert view.text().startswith(f"{view.name}: step {step}: r0, ")
        assert tap.recording is session.recording
        for view in views:
            view.cursor = 5
        session.run()
        for view in views:
            assert view.update()
            assert view.cursor == view.first_step == 6, "the tap has forgotten step 5"
        tap.clear()
        for view in views:
            assert view.update()
            assert "no record yet" in view.text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": False, "sampling": False}, "keeps nothing"),
        ({"keep": 0}, "keep=0"),
        ({"top": True}, "top=True"),
        ({"requests": "r0"}, r"\['r0'\]"),
        ({"layers": []}, "layers"),
        ({"heads": ["a"]}, "heads"),
        ({"layers": 1}, "layers=1"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Tap(**options)


def test_only_a_runner_with_a_model_can_be_tapped():
    engine = Engine(EngineConfig(num_blocks=4, block_size=2), SimulatedRunner())
    with Session(engine) as session, pytest.raises(ConfigError, match="SimulatedRunner has no tensors"):
        session.tap()
    source = TinyWeights(tiny_config())
    runner = TorchRunner(Decoder(source.config).load(source), num_blocks=4, block_size=2)
    tap = Tap().attach(runner)
    with pytest.raises(ConfigError, match="attached already"):
        tap.attach(runner)


def test_records_go_to_json_and_back():
    with tiny_llm() as llm, Session(llm) as session:
        tap = session.tap(tokenizer=llm.tokenizer)
        session.submit(
            "Hello 🙂", temperature=0.9, top_k=4, allowed_token_ids=[65, 66, 67], max_tokens=3, seed=1
        )
        session.run()
        for record in tap.records:
            line = record.to_json()
            assert "\n" not in line
            assert json.loads(line)["schema"] == "tap 1.0"
            assert TapRecord.from_json(line) == record
    for wrong, message in (
        ("{}", "no tap's record"),
        ("nonsense", "no tap's record"),
        (line.replace("tap 1.0", "tap 9.0"), "'tap 9.0'"),
        (line.replace('"mass"', '"mess"'), "no tap's record"),
    ):
        with pytest.raises(RecordingError, match=message):
            TapRecord.from_json(wrong)
