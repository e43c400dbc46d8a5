"""Architectures that the decoder does not compute: through transformers over our blocks, or refused by name."""

import json
import logging
import random
import sys

import pytest
import torch
from transformers import AutoConfig

from pagedinfer.config import SamplingParams
from pagedinfer.errors import ModelError, UnknownArchitecture
from pagedinfer.llm import LLM
from pagedinfer.model import fallback
from pagedinfer.model.fallback import FallbackSource
from pagedinfer.model.families import FAMILIES
from pagedinfer.model.weights import open_weights

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CASES = {
    "cohere": {"use_qk_norm": True, "logit_scale": 1.0},  # attention and MLP side by side, rotary in pairs
    "starcoder2": {"sliding_window": 7},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48},  # learned positions with an offset
    "smollm3": {},  # some layers without rotary positions
    "olmo3": {"sliding_window": 7},  # windows in some layers
}


def prompt(seed, length=45):
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(length)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def built(random_model, tmp_path_factory):
    """A case's folder and its model in transformers."""
    made = {}

    def build(case):
        if case not in made:
            folder = tmp_path_factory.mktemp(case)
            model = random_model(AutoConfig.for_model(case, **(COMMON | CASES[case])))
            model.save_pretrained(folder)
            byte_tokenizer(folder)
            made[case] = folder, model
        return made[case]

    return build


def byte_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def reference(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, built, paged_batch):
    folder, theirs = built(case)
    expected = reference(theirs, prompt(0))
    assert expected.std() > 2
    model = FallbackSource(folder).load(torch.float32)
    for chunk in (45, 7, 1):
        (logits,) = paged_batch(model, [prompt(0)]).finish(chunk)
        assert (logits - expected).abs().max() < 1e-4, f"chunks of {chunk}"
    batch = paged_batch(model, [prompt(1, 3), prompt(0), prompt(2, 20), prompt(3, 60)], block_size=8, seed=1)
    batch.step(2, 30, 0, 9)
    batch.step(1, 1, 13, 1)
    assert (batch.finish(1)[1] - expected).abs().max() < 1e-4
    assert model.nbytes == sum(weight.nbytes for weight in theirs.parameters())


@pytest.mark.parametrize("case", ["starcoder2", "cohere"])
def test_llm_says_so_and_writes_what_transformers_writes(case, built, caplog):
    folder, theirs = built(case)
    prompts = [prompt(seed, length) for seed, length in ((0, 30), (1, 3), (2, 17), (3, 1))]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=1)
    with (
        caplog.at_level(logging.WARNING, "pagedinfer"),
        LLM(str(folder), dtype="float32", num_blocks=24, block_size=4, max_num_batched_tokens=16) as llm,
    ):
        outputs = llm.generate(prompts, params)
        assert llm.engine.metrics()["num_preemptions"] > 0
        assert "through transformers" in repr(llm)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "pagedinfer"]
    assert f"the architecture {case} is computed by transformers' own modules" in said
    assert "\n" not in said
    for ids, output in zip(prompts, outputs, strict=True):
        scores = reference(theirs, ids).log_softmax(-1)
        for place in range(1, len(ids)):
            assert output.prompt_logprobs[place][ids[place]].logprob == pytest.approx(
                scores[place - 1, ids[place]].item(), abs=1e-4
            )
        for token in output.outputs[0].token_ids:
            best = reference(theirs, ids)[-1].topk(2)
            if best.values[0] - best.values[1] < 1e-3:
                break  # a tie: either may follow
            assert token == best.indices[0]
            ids = [*ids, token]


def test_families_that_are_computed_here_do_not_fall_back(built):
    folder, _ = built("granite")
    with pytest.raises(UnknownArchitecture, match="granite"):
        open_weights(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_trial(dtype, built):
    folder, _ = built("granite")
    assert FallbackSource(folder).load(dtype).dtype == dtype


# -- what cannot work ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("mamba", {}, 'layers of type "linear_attention"'),
        ("bloom", {}, "does not use the attention interface"),
        ("t5", {}, "no such causal model"),
        ("nonsense", {}, "does not read its config"),
        ("granite", {"num_hidden_layers": 2**31}, "num_hidden_layers is 2147483648"),
        ("granitemoe", {"num_local_experts": 2**31}, "num_local_experts is 2147483648"),
        ("granite", {"hidden_size": "x"}, "does not read its config"),
        ("granite", {"eos_token_id": 500}, "end token 500 is outside"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers of type"),
        ("granite", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic rotary"),
    ],
)  # fmt: skip
def test_what_the_config_gives_away_is_refused_by_name(family, change, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(COMMON | {"model_type": family} | change))
    with pytest.raises(ModelError, match=reason) as refused:
        FallbackSource(tmp_path)
    assert f'architecture "{family}"' in str(refused.value)
    assert ", ".join(FAMILIES) in str(refused.value)


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("bert", {}, "looks ahead"),
        ("gpt_oss", {"num_local_experts": 4, "head_dim": 8}, "needs s_aux"),
    ],
)
def test_what_the_trial_shows_is_refused_by_name(family, change, reason, random_model, tmp_path):
    random_model(AutoConfig.for_model(family, **(COMMON | change))).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as refused:
        FallbackSource(tmp_path).load(torch.float32)
    assert f'architecture "{family}"' in str(refused.value)


@pytest.mark.parametrize("fault", ["scale", "heads", "late"])
def test_the_trial_refuses_attention_that_is_wrong(fault, built, monkeypatch):
    folder, _ = built("granite")
    right = fallback.foreign_attention

    def wrong(module, query, key, value, attention_mask=None, *, scaling=None, **others):
        if fault == "scale":
            scaling *= 1.1
        if fault == "heads":
            key, value = key.flip(1), value.flip(1)
        if fault == "late":
            value = value.roll(1, 2)
        return right(module, query, key, value, attention_mask, scaling=scaling, **others)

    monkeypatch.setattr(fallback, "foreign_attention", wrong)
    with pytest.raises(ModelError, match="its logits differ by"):
        FallbackSource(folder).load(torch.float32)


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_tensors_that_do_not_fit_are_named(change, built, tmp_path):
    """transformers itself would go on with random numbers in their place."""
    from safetensors.torch import load_file, save_file

    folder, _ = built("granite")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.k_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        name = "model.layers.1.self_attn.k_proj.lora_A"
        tensors[name] = torch.zeros(2, 2)
    else:
        tensors[name] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=rf"k_proj|{change}"):
        FallbackSource(tmp_path).load(torch.float32)


def test_without_transformers_one_sentence_says_what_is_missing(built, monkeypatch):
    folder, _ = built("granite")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r'"granite".*is not installed: pip install transformers'):
        LLM(str(folder))
