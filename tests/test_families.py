"""Every family that the decoder computes equals `transformers`, and a wrong block does not."""

import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagedinfer.backends.attention import AttentionRule
from pagedinfer.backends.torch_ops import BiasedLinear, TorchOps
from pagedinfer.config import SamplingParams
from pagedinfer.errors import ModelError
from pagedinfer.llm import LLM
from pagedinfer.model.blueprint import Rotary
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.families import FAMILIES
from pagedinfer.model.rotary import scaled_frequencies
from pagedinfer.model.weights import open_weights

VOCAB = 97
LENGTH = 45  # tokens of the prompt: more than every window and every original context length below
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA3 = {
    "full_attention": LINEAR | {"rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
SLIDING = {"use_sliding_window": True, "sliding_window": 9}
GEMMA = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24, "final_logit_softcapping": 6.0}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2}

CASES = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": ("qwen2", SLIDING | {"max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3 window": ("qwen3", SLIDING | {"head_dim": 8, "layer_types": ALTERNATE}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "attention_bias": True}),
    "gemma3": ("gemma3_text", GEMMA | {"rope_parameters": GEMMA3, "layer_types": ALTERNATE}),
    "phi3": ("phi3", {"sliding_window": 10}),
    "phi3 partial": ("phi3", {"rope_parameters": PARTIAL}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "gpt2": ("gpt2", {"n_inner": 80}),
    "gpt2 unscaled": ("gpt2", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "qwen2_moe": (
        "qwen2_moe",
        EXPERTS | SLIDING | {"shared_expert_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [1],
                             "max_window_layers": 2},
    ),
    "qwen3_moe": ("qwen3_moe", EXPERTS | SLIDING | {"head_dim": 16, "decoder_sparse_step": 2, "attention_bias": True}),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 3, "clip_qkv": 1.5, "norm_topk_prob": True}),
}  # fmt: skip


def prompt(seed, length=LENGTH):
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(length)]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def built(random_model, tmp_path_factory):
    """A case's folder, its model in transformers, and that model's logits for `prompt(0)`."""
    made = {}

    def build(case):
        if case not in made:
            family, options = CASES[case]
            config = AutoConfig.for_model(family, **((GPT2 if family == "gpt2" else COMMON) | options))
            model = random_model(config)
            folder = tmp_path_factory.mktemp(family)
            model.save_pretrained(folder)
            with torch.inference_mode():
                made[case] = folder, model, model(torch.tensor([prompt(0)])).logits[0]
        return made[case]

    return build


def load(folder, ops=None, **options):
    source = open_weights(folder)
    decoder = Decoder(source.config, ops, **options).load(source)
    source.close()
    return decoder


def test_every_family_is_tested():
    assert {family for family, _ in CASES.values()} == FAMILIES.keys()


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, built, paged_batch):
    folder, _, expected = built(case)
    assert expected.std() > 2
    decoder = load(folder)
    for chunk in (LENGTH, 7, 1):
        (logits,) = paged_batch(decoder, [prompt(0)]).finish(chunk)
        assert (logits - expected).abs().max() < 1e-4, f"chunks of {chunk}"


@pytest.mark.parametrize("case", CASES)
def test_neighbours_change_nothing(case, built, paged_batch):
    folder, _, expected = built(case)
    prompts = [prompt(1, 3), prompt(0), prompt(2, 20), prompt(3, 60)]
    batch = paged_batch(load(folder), prompts, block_size=8, seed=1)
    batch.step(2, 30, 0, 9)  # chunks beside chunks, then chunks beside single tokens, then single tokens
    batch.step(1, 1, 13, 1)
    batch.step(0, 8, 1, 40)
    assert (batch.finish(1)[1] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["llama llama3", "gemma3", "gpt2", "qwen2_moe"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(case, dtype, built, paged_batch):
    folder, _, expected = built(case)
    (logits,) = paged_batch(load(folder, dtype=dtype), [prompt(0)]).finish(7)
    assert logits.dtype == dtype
    # Experts change where their scores nearly tie, so not every token can be near.
    assert torch.cosine_similarity(logits.float(), expected, dim=-1).median() > 0.99


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 5.0]}  # fmt: skip


@pytest.mark.parametrize(("original", "max_len"), [(64, None), (64, 64), (16, 128)])
def test_longrope_takes_the_list_of_the_longest_request(
    original, max_len, random_model, paged_batch, tmp_path
):
    """transformers takes it by the length reached, so both agree where no request crosses the border."""
    config = AutoConfig.for_model(
        "phi3",
        **COMMON,
        original_max_position_embeddings=original,
        rope_parameters=LONGROPE | {"original_max_position_embeddings": original},
    )
    model = random_model(config)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt(0)])).logits[0]
    (logits,) = paged_batch(load(tmp_path, max_len=max_len), [prompt(0)]).finish(7)
    assert (logits - expected).abs().max() < 1e-4
    other = 128 if max_len != 128 else original
    (logits,) = paged_batch(load(tmp_path, max_len=other), [prompt(0)]).finish(7)
    assert (logits - expected).abs().max() > 0.05
    assert open_weights(tmp_path).config.usual_max_len == original


# -- planted faults -----------------------------------------------------------------------------------------------


class PositionsOffByOne(TorchOps):
    """All tokens but the first are one position too far; shifting all of them would change nothing."""

    def prepare(self, inputs, kv, num_heads, rule):
        inputs.positions = inputs.positions + (inputs.positions > 0).long()
        return super().prepare(inputs, kv, num_heads, rule)


class BiasedTopK(TorchOps):
    """One expert fewer than the model has."""

    def route(self, scores, used, normalized):
        return super().route(scores, used - 1, normalized)


class WeightsNotNormalized(TorchOps):
    def route(self, scores, used, normalized):
        return super().route(scores, used, not normalized)


class SiluInPlaceOfGelu(TorchOps):
    def gelu_mul(self, gate_up):
        return self.silu_mul(gate_up)

    def gelu(self, x):
        return torch.nn.functional.silu(x)


class NormsWithoutMean(TorchOps):
    def layer_norm_add(self, x, residual, weight, bias, eps):
        normed, residual = self.rms_norm_add(x, residual, weight, eps)
        return normed + bias, residual


def each_layer(**changes):
    def plant(decoder):
        for layer in decoder.layers:
            for field, change in changes.items():
                setattr(layer, field, change(getattr(layer, field)))

    return plant


def each_rule(**changes):
    def plant(decoder):
        decoder.rules = [
            AttentionRule(**{field: getattr(rule, field) for field in AttentionRule.__slots__}
                          | {field: change(rule) for field, change in changes.items()})
            for rule in decoder.rules
        ]  # fmt: skip

    return plant


def blueprint(**changes):
    def plant(decoder):
        decoder.config = replace(decoder.config, blueprint=replace(decoder.config.blueprint, **changes))

    return plant


def without_bias(linear):
    assert isinstance(linear, BiasedLinear)
    return linear.linear


def experts_without(**changes):
    def plant(decoder):
        for layer in decoder.layers:
            for field, value in changes.items():
                if hasattr(layer.mlp, field):
                    setattr(layer.mlp, field, value)

    return plant


def plain_angles(rule, theta=10000.0, share=1.0):
    return scaled_frequencies(Rotary(share=share), 2 * len(rule.frequencies), theta)


def gpt2_positions_late(decoder):
    decoder.positions = decoder.positions.roll(-1, 0)


def no_embedding_scale(decoder):
    decoder._embedding_scale = 1.0


def norms_plain(decoder):
    """Gemma's norm weights taken for Llama's."""
    for layer in decoder.layers:
        for norm in (layer.attention_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp):
            norm.weight -= 1


def mlp_without_bias(decoder):
    for layer in decoder.layers:
        layer.mlp.down = layer.mlp.down.linear


def constant(value):
    return lambda _: value


FAULTS = {
    "rotary off by one": ("llama llama3", PositionsOffByOne),
    "rotary off by one, partial": ("phi3 partial", PositionsOffByOne),
    "llama3 scaling left out": ("llama llama3", each_rule(frequencies=plain_angles)),
    "linear scaling left out": ("llama linear", each_rule(frequencies=plain_angles)),
    "yarn scaling left out": ("llama yarn", each_rule(frequencies=plain_angles)),
    "yarn magnitude left out": ("llama yarn", each_rule(magnitude=constant(1.0))),
    "another rotary base": ("llama", each_rule(frequencies=lambda rule: plain_angles(rule, 5000.0))),
    "whole heads turn": ("phi3 partial", each_rule(frequencies=lambda rule: scaled_frequencies(Rotary(), 8, 1e4))),
    "no qkv bias": ("qwen2", each_layer(qkv=without_bias)),
    "no output bias": ("llama", each_layer(output=without_bias)),
    "no mlp bias": ("llama", mlp_without_bias),
    "no window": ("mistral", each_rule(window=constant(None))),
    "window one too short": ("mistral", each_rule(window=lambda rule: rule.window - 1)),
    "window one too long": ("phi3", each_rule(window=lambda rule: rule.window + 1)),
    "windows in the other layers": ("gemma2", each_layer(rule=lambda rule: 1 - rule)),
    "window from the wrong layer": ("qwen2 window", each_layer(rule=constant(0))),
    "no q and k norm": ("qwen3", each_layer(qk_norm=constant(None))),
    "no whole q and k norm": ("olmo2", each_layer(qk_norm=constant(None))),
    "q and k norm swapped": ("gemma3", each_layer(qk_norm=lambda norms: norms[::-1])),
    "no norm after attention": ("gemma2", each_layer(after_attention=constant(None))),
    "no norm after the mlp": ("olmo2", each_layer(after_mlp=constant(None))),
    "gemma norms taken for plain": ("gemma2", norms_plain),
    "no attention softcap": ("gemma2", each_rule(softcap=constant(None))),
    "no logit softcap": ("gemma3", blueprint(logit_softcap=None)),
    "attention scale of the head": ("gemma2", each_rule(scale=constant(None))),
    "scaled attention": ("gpt2 unscaled", each_rule(scale=constant(None))),
    "no embedding scale": ("gemma3", no_embedding_scale),
    "one rotary base for all layers": (
        "gemma3",
        lambda decoder: each_rule(frequencies=constant(decoder.rules[1].frequencies))(decoder),
    ),
    "another activation": ("gemma2", SiluInPlaceOfGelu),
    "another activation, not gated": ("gpt2", SiluInPlaceOfGelu),
    "learned positions off by one": ("gpt2", gpt2_positions_late),
    "norms keep the mean": ("gpt2", NormsWithoutMean),
    "no clip": ("olmoe", blueprint(qkv_clip=None)),
    "an expert too few": ("mixtral", BiasedTopK),
    "router weights not normalized": ("mixtral", WeightsNotNormalized),
    "router weights normalized": ("qwen3_moe", WeightsNotNormalized),
    "no shared expert": ("qwen2_moe", experts_without(shared=None)),
    "shared expert without its gate": (
        "qwen2_moe", experts_without(shared_gate=lambda x: torch.full((len(x), 1), 1e9)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_fail_the_comparison(fault, built, paged_batch):
    case, plant = FAULTS[fault]
    folder, _, expected = built(case)
    as_ops = isinstance(plant, type)
    decoder = load(folder, plant() if as_ops else None)
    with torch.inference_mode():
        if not as_ops:
            plant(decoder)
    (logits,) = paged_batch(decoder, [prompt(0)]).finish(LENGTH)
    assert (logits - expected).abs().max() > 0.05


# -- checkpoints as they are found --------------------------------------------------------------------------------


def rewrite(folder, target, change):
    """Copy a checkpoint, its tensors changed by `change` (name to tensor)."""
    from safetensors.torch import load_file, save_file

    save_file(change(load_file(folder / "model.safetensors")), target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())


def stacked(tensors):
    """Experts as transformers 5 holds them in memory, and as some checkpoints store them."""
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    prefixes = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    names = (
        ("w1", "w3", "w2")
        if any(".w1." in name for name in tensors)
        else ("gate_proj", "up_proj", "down_proj")
    )
    for prefix in prefixes:
        count = sum(name.startswith(f"{prefix}.experts.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.experts.{e}.{part}.weight"] for e in range(count)])
            for part in names
        )
        kept[f"{prefix}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        kept[f"{prefix}.experts.down_proj"] = down
    return kept


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def test_stacked_experts_are_taken_apart(case, built, paged_batch, tmp_path):
    folder, _, expected = built(case)
    rewrite(folder, tmp_path, stacked)
    (logits,) = paged_batch(load(tmp_path), [prompt(0)]).finish(LENGTH)
    assert (logits - expected).abs().max() < 1e-4


def test_gpt2_as_openai_published_it(built, paged_batch, tmp_path):
    """Names without a prefix, and causal masks saved among the weights."""
    folder, _, expected = built("gpt2")

    def old(tensors):
        masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(3)}
        return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks

    rewrite(folder, tmp_path, old)
    (logits,) = paged_batch(load(tmp_path), [prompt(0)]).finish(LENGTH)
    assert (logits - expected).abs().max() < 1e-4


def test_gemma3_that_also_sees_is_read_as_text(built, paged_batch, tmp_path):
    folder, _, expected = built("gemma3")

    def seeing(tensors):
        return {"language_model." + name: tensor for name, tensor in tensors.items()} | {
            "vision_tower.embeddings.weight": torch.zeros(4, 4),
            "multi_modal_projector.weight": torch.zeros(4, 4),
        }

    rewrite(folder, tmp_path, seeing)
    text = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 4}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (logits,) = paged_batch(load(tmp_path), [prompt(0)]).finish(LENGTH)
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["phi3", "gpt2", "mixtral"])
def test_a_part_of_a_missing_tensor_is_named(case, built, tmp_path):
    folder, _, _ = built(case)
    part = {
        "phi3": "layers.1.self_attn.qkv_proj",
        "gpt2": "h.1.attn.c_attn.weight",
        "mixtral": "experts.2.w3",
    }[case]

    def without(tensors):
        found = {name for name in tensors if part in name}
        assert found
        return {name: tensor for name, tensor in tensors.items() if name not in found}

    rewrite(folder, tmp_path, without)
    with pytest.raises(ModelError, match=r"missing: model\.layers\.\d\."):
        load(tmp_path)


def test_a_fused_matrix_of_another_size_is_named(built, tmp_path):
    folder, _, _ = built("phi3")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    rewrite(folder, tmp_path, lambda tensors: tensors | {name: tensors[name][:-8].clone()})
    with pytest.raises(ModelError, match="unexpected: " + name.replace(".", r"\.")):
        load(tmp_path)


GGUF_NAMES = {
    "embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
}  # fmt: skip


def write_gguf(path, architecture, model):
    """Write a model as llama.cpp's converter does, in float32."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCAB)
    if "factor" in config.rope_parameters:
        writer.add_tensor("rope_freqs.weight", (plain(model) / model.model.rotary_emb.inv_freq).numpy())
    for name, weight in model.state_dict().items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        part = next(ours for theirs, ours in GGUF_NAMES.items() if theirs in name)
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        writer.add_tensor(f"{layer}{part}.{name.rsplit('.', 1)[1]}", weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def plain(model):
    config = model.config
    return 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_gguf_equals_transformers_and_its_own_reader(architecture, random_model, paged_batch, tmp_path):
    options = {"head_dim": 16} if architecture == "qwen3" else {}
    model = random_model(AutoConfig.for_model(architecture, **(COMMON | options)))
    write_gguf(tmp_path / "tiny.gguf", architecture, model)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt(0)])).logits[0]
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file="tiny.gguf", dtype=torch.float32, config=model.config
        )
        # That the file is one of its kind is for another reader to say.
        assert (theirs(torch.tensor([prompt(0)])).logits[0] - expected).abs().max() < 1e-3
    (logits,) = paged_batch(load(tmp_path / "tiny.gguf"), [prompt(0)]).finish(7)
    assert (logits - expected).abs().max() < 1e-4


def test_gguf_of_llama3_divides_its_angles(random_model, paged_batch, tmp_path):
    model = random_model(AutoConfig.for_model("llama", **COMMON, rope_parameters=LLAMA3))
    write_gguf(tmp_path / "tiny.gguf", "llama", model)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt(0)])).logits[0]
    decoder = load(tmp_path / "tiny.gguf")
    (logits,) = paged_batch(decoder, [prompt(0)]).finish(7)
    assert (logits - expected).abs().max() < 1e-4
    each_rule(frequencies=plain_angles)(decoder)
    (logits,) = paged_batch(decoder, [prompt(0)]).finish(7)
    assert (logits - expected).abs().max() > 0.05


# -- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "change", "text"),
    [
        ("phi3", {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}}, "a list of 4"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "not below high_freq_factor"),
        ("llama", {"rope_scaling": YARN | {"mscale": 0.7}}, "mscale"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"layer_types": ALTERNATE}, "layer_types"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3, "use_sliding_window": True}, "linear_attention"),
        ("qwen2", {"layer_types": ALTERNATE[:2], "use_sliding_window": True}, "a list of 3"),
        ("qwen2", {"layer_types": ALTERNATE}, "no sliding_window in use"),
        ("phi3", {"partial_rotary_factor": 0.01}, "of which 0 turn"),
        ("gemma3_text", {"rope_local_base_freq": -1.0}, "rope_local_base_freq"),
        ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": LINEAR}}, "not scaled here"),
        ("gpt2", {"activation_function": "relu"}, "activation_function"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("mixtral", {"num_local_experts": 1}, "num_experts_per_tok 2, but 1"),
        ("qwen2_moe", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": ["x"]}, "mlp_only_layers"),
    ],
)  # fmt: skip
def test_what_no_family_computes_is_refused_by_name(family, change, text):
    with pytest.raises(ModelError, match=text):
        ModelConfig.from_hf(COMMON | {"model_type": family} | change)


def test_configs_mean_what_they_leave_out():
    bare = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # fmt: skip
    config = ModelConfig.from_hf(bare)  # what is published with Gemma 3 4B
    assert (config.head_dim, config.num_kv_heads, config.vocab_size, config.rope_theta) == (
        256,
        4,
        262208,
        1e6,
    )
    assert config.tie_word_embeddings
    assert config.blueprint.windows[:7] == (1024, 1024, 1024, 1024, 1024, None, 1024)
    assert config.blueprint.local_theta == 10000.0
    assert config.blueprint.rotary.factor == 8.0
    gpt2 = ModelConfig.from_hf(GPT2 | {"model_type": "gpt2"})
    assert (gpt2.intermediate_size, gpt2.max_position_embeddings, gpt2.num_kv_heads) == (192, 64, 6)
    mistral = COMMON | {"model_type": "mistral"}
    assert ModelConfig.from_hf(mistral).blueprint.windows == (4096,) * 3
    assert ModelConfig.from_hf(mistral | {"sliding_window": None}).blueprint.windows == ()
    qwen = COMMON | {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}
    assert ModelConfig.from_hf(qwen).blueprint.windows == ()


# -- all the way ----------------------------------------------------------------------------------------------------


def byte_tokenizer(folder):
    """A tokenizer.json of single characters, so that a folder is a whole model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    vocab = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "case", ["llama llama3", "qwen2 window", "qwen3", "gemma2", "gemma3", "gpt2", "mixtral"]
)
def test_llm_writes_what_transformers_writes(case, built):
    folder, model, _ = built(case)
    byte_tokenizer(folder)
    prompts = [prompt(seed, length) for seed, length in ((0, 30), (1, 3), (2, 17), (3, 1))]
    num_blocks = 9 if case == "mixtral" else 24  # all its layers have a window, which lets go of blocks
    with LLM(
        str(folder), dtype="float32", num_blocks=num_blocks, block_size=4, max_num_batched_tokens=16
    ) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        preempted = llm.engine.metrics()["num_preemptions"]
    assert preempted > 0
    for ids, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            for token in output.outputs[0].token_ids:
                best = model(torch.tensor([ids])).logits[0, -1].topk(2)
                if best.values[0] - best.values[1] < 1e-3:
                    break  # a tie: either may follow
                assert token == best.indices[0]
                ids = [*ids, token]
