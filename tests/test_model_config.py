"""What configs say, and that nothing in them is ignored."""

import subprocess
import sys

import pytest

from pagedinfer.errors import ModelError
from pagedinfer.model.config import ModelConfig

HF = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GGUF = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 5000.0,
    "llama.vocab_size": 100,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def test_both_formats_give_the_same_config():
    from_hf = ModelConfig.from_hf(HF, name="tiny")
    from_gguf = ModelConfig.from_gguf(GGUF)
    assert from_hf == from_gguf
    assert (from_hf.head_dim, from_hf.num_kv_heads, from_hf.rms_norm_eps) == (16, 2, 1e-5)
    assert from_hf.eos_token_ids == (2,)


@pytest.mark.parametrize("theta", [10000.0, 100000.0])
def test_what_transformers_writes_is_understood(theta):
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
    theirs = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        dtype="float16",
    )
    ours = ModelConfig.from_hf(theirs.to_dict())
    assert (ours.rope_theta, ours.head_dim, ours.num_kv_heads, ours.dtype) == (theta, 32, 1, "float16")
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


def test_rotary_base_in_every_style():
    without = {key: value for key, value in HF.items() if key != "rope_theta"}
    assert ModelConfig.from_hf(without).rope_theta == 10000.0
    nested = without | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}
    assert ModelConfig.from_hf(nested).rope_theta == 7.0
    assert ModelConfig.from_hf(HF | {"rope_scaling": None}).rope_theta == 5000.0
    with pytest.raises(ModelError, match="two rotary bases"):
        ModelConfig.from_hf(HF | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}})


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ((2, None), (2,)),
        ((2, [3, 4]), (2, 3, 4)),
        (([2, 5], 2), (2, 5)),
        ((None, 7), (7,)),
        ((None, None), ()),
        ((0, None), (0,)),
    ],
)
def test_end_ids_are_the_union_of_all_sources(sources, expected):
    config, generation = sources
    made = ModelConfig.from_hf(HF | {"eos_token_id": config}, {"eos_token_id": generation})
    assert made.eos_token_ids == expected


def test_gguf_end_ids_are_the_union_too():
    more = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 8}
    assert ModelConfig.from_gguf(GGUF | more).eos_token_ids == (2, 8, 9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": 0}),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 5000.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5}),
        ("rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1.0}}),
        ("attention_bias", 1.5),
        ("sliding_window", 4096),
        ("hidden_act", "gelu"),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"quant_method": "awq"}),
        ("num_local_experts", 8),
    ],
)
def test_unsupported_features_are_named(field, value):
    with pytest.raises(ModelError, match=field):
        ModelConfig.from_hf(HF | {field: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "yarn"),
        ("llama.rope.scaling.factor", 4.0),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.value_length", 8),
        ("llama.attention.head_count_kv", [2, 1]),
        ("llama.expert_count", 8),
        ("llama.attention.sliding_window", 128),
        ("llama.logit_scale", 0.5),
        ("llama.attention.something_new", 1),
    ],
)
def test_unsupported_gguf_features_are_named(key, value):
    with pytest.raises(ModelError, match=key.replace(".", r"\.")):
        ModelConfig.from_gguf(GGUF | {key: value})


def test_neutral_values_are_accepted():
    ModelConfig.from_hf(
        HF | {"sliding_window": None, "attention_bias": False, "layer_types": ["full_attention"] * 2}
    )
    ModelConfig.from_gguf(GGUF | {"llama.rope.scaling.type": "none", "llama.attention.head_count_kv": [2, 2]})


def test_ql_12_explicit_head_size_wins():
    assert ModelConfig.from_hf(HF | {"head_dim": 32}).head_dim == 32
    assert ModelConfig.from_gguf(GGUF | {"llama.attention.key_length": 32}).head_dim == 32
    with pytest.raises(ModelError, match="do not divide"):
        ModelConfig.from_hf(HF | {"num_attention_heads": 5, "num_key_value_heads": 5})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "mamba"}, '"mamba"; supported: llama'),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"head_dim": 15}, "even"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8"),
        ({"eos_token_id": 100}, "outside its vocabulary"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers .* is 0; it must be a whole number from 1"),
    ],
)
def test_impossible_configs_are_refused(change, text):
    with pytest.raises(ModelError, match=text):
        ModelConfig.from_hf(HF | change)
    with pytest.raises(ModelError, match="qwen9"):
        ModelConfig.from_gguf(GGUF | {"general.architecture": "qwen9"})


def test_the_config_needs_the_standard_library_only():
    code = (
        "import sys, pagedinfer.model.config, pagedinfer.model.weights, pagedinfer.model.sources\n"
        "import pagedinfer.model.tokenizer, pagedinfer.model.gguf, pagedinfer.model.folder\n"
        "heavy = {'torch', 'numpy', 'gguf', 'tokenizers', 'jinja2', 'safetensors', 'huggingface_hub'}\n"
        "sys.exit(', '.join(heavy & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
