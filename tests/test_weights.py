"""Weights from folders and from GGUF: exact against transformers and gguf, and in little memory."""

import json
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagedinfer.errors import ModelError
from pagedinfer.model.gguf_header import read_header
from pagedinfer.model.sources import resolve
from pagedinfer.model.weights import WeightSource, check_weights, expected_shapes, open_weights

TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_llama(heads=4, kv_heads=2, head_dim=16, tied=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def weights_of(model):
    tied = model.config.tie_word_embeddings
    return {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def converter_rows(weight, heads):
    """Row order of llama.cpp's converter, written independently: pair i of a head goes to rows 2i, 2i + 1."""
    head_dim = weight.shape[0] // heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def gguf_name(name):
    middle = name.removesuffix(".weight")
    if not middle.startswith("model.layers."):
        return TO_GGUF[middle] + ".weight"
    _, _, layer, rest = middle.split(".", 3)
    return f"blk.{layer}.{TO_GGUF[rest]}.weight"


def write_gguf(path, model, quantize=None, extra=(), skip=(), keys=()):
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in keys:
        writer.add_float32(key, value)
    for name, weight in weights_of(model).items():
        if name in skip:
            continue
        if "q_proj" in name:
            weight = converter_rows(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = converter_rows(weight, config.num_key_value_heads)
        kind = quantize(name) if quantize and weight.dim() > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(weight.numpy(), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    for name, data in extra:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_all(source, dtype=torch.float32):
    return {name: source.read(name, dtype) for name in source.names()}


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(mine[name], weight), name
        assert mine[name].is_contiguous()


# -- folders


@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_reads_as_transformers_wrote_it(tmp_path, shard_size, tied):
    model = make_llama(tied=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    source = open_weights(tmp_path)
    assert isinstance(source, WeightSource)
    check_weights(source)
    assert_same(read_all(source), weights_of(model))
    assert source.config.tie_word_embeddings == tied
    assert ("lm_head.weight" in source.names()) == (not tied)
    half = source.read("model.norm.weight", torch.bfloat16)
    assert half.dtype == torch.bfloat16
    source.close()


def test_tensors_own_their_memory(tmp_path):
    make_llama().save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    first = source.read("model.norm.weight", torch.float32)
    first.fill_(7.0)
    assert not torch.equal(source.read("model.norm.weight", torch.float32), first)
    assert first.untyped_storage().nbytes() == first.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_folders(tmp_path, dtype):
    model = make_llama().to(dtype)
    model.save_pretrained(tmp_path)
    source = open_weights(tmp_path)
    assert source.config.dtype == str(dtype).removeprefix("torch.")
    assert_same(read_all(source, dtype), weights_of(model))
    assert source.info("model.norm.weight").storage == {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_weights(tmp_path).config.dtype == str(dtype).removeprefix("torch.")


def test_end_ids_of_the_generation_config_count(tmp_path):
    make_llama().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert open_weights(tmp_path).config.eos_token_ids == (2, 5)


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_wrong_tensors_are_named(tmp_path):
    make_llama().save_pretrained(tmp_path)

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.norm.weight"] = torch.zeros(63)

    change_tensors(tmp_path, change)
    with pytest.raises(ModelError) as caught:
        check_weights(open_weights(tmp_path))
    text = str(caught.value)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in text
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in text
    assert "1 misshapen: model.norm.weight is [63] instead of [64]" in text


def test_long_lists_are_cut_but_counted(tmp_path):
    make_llama().save_pretrained(tmp_path)
    change_tensors(
        tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name]
    )
    with pytest.raises(ModelError, match=r"18 missing: .* and 8 more"):
        check_weights(open_weights(tmp_path))


def test_harmless_extras_are_dropped_and_harmful_ones_are_not(tmp_path):
    make_llama(tied=True).save_pretrained(tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    inv_freq = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()} | inv_freq))
    source = open_weights(tmp_path)
    check_weights(source)
    assert set(source.names()) == set(expected_shapes(source.config))
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ModelError, match=r"differs from model\.embed_tokens"):
        open_weights(tmp_path)


def test_damaged_and_incomplete_folders(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        open_weights(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        open_weights(tmp_path)
    make_llama().save_pretrained(tmp_path, max_shard_size="60KB")
    victim = sorted(tmp_path.glob("model-*.safetensors"))[1]
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=f"{victim.name}.*damaged"):
        open_weights(tmp_path)
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        open_weights(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        open_weights(tmp_path)


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"gguf is missing.*pip install \"pagedinfer\[engine\]\""):
        open_weights(tmp_path)


def test_quantized_safetensors_are_refused_by_name(tmp_path):
    make_llama().save_pretrained(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(96, 64, dtype=torch.int8)}))
    source = open_weights(tmp_path)
    with pytest.raises(ModelError, match=f"{name}.*I8"):
        source.read(name, torch.float32)
    with pytest.raises(ModelError, match="no tensor"):
        source.read("nothing", torch.float32)


# -- GGUF


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (8, 8, 8), (8, 1, 8), (4, 2, 32)])
@pytest.mark.parametrize("tied", [False, True])
def test_ql_06_gguf_gives_the_original_weights(tmp_path, heads, kv_heads, head_dim, tied):
    model = make_llama(heads, kv_heads, head_dim, tied)
    source = open_weights(write_gguf(tmp_path / "tiny.gguf", model))
    check_weights(source)
    assert_same(read_all(source), weights_of(model))
    assert source.config.head_dim == head_dim
    assert source.config.tie_word_embeddings == tied
    assert source.config.dtype == "float32"
    source.close()
    source.close()
    with pytest.raises(ModelError, match="closed"):
        source.read("model.norm.weight", torch.float32)


def quantizable():
    """Types that the gguf package can both make and decode, with rows of 64 or 96."""
    found = []
    for kind in gguf.GGMLQuantizationType:
        block = gguf.GGML_QUANT_SIZES[kind][0]
        try:
            gguf.dequantize(gguf.quantize(np.ones((2, max(block, 32)), dtype=np.float32), kind), kind)
        except NotImplementedError:
            continue
        if 32 % block == 0:
            found.append(kind)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ql_08_one_file_of_many_types_decodes_as_gguf_does(tmp_path, dtype):
    kinds = quantizable()
    assert {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"} <= {kind.name for kind in kinds}
    model = make_llama()
    matrices = [name for name, weight in weights_of(model).items() if weight.dim() > 1]
    assert len(matrices) >= len(kinds)
    chosen = {name: kinds[index % len(kinds)] for index, name in enumerate(matrices)}
    source = open_weights(write_gguf(tmp_path / "mixed.gguf", model, quantize=chosen.__getitem__))
    for name, weight in weights_of(model).items():
        kind = chosen.get(name, gguf.GGMLQuantizationType.F32)
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        stored = converter_rows(weight, heads) if heads else weight
        decoded = torch.from_numpy(gguf.dequantize(gguf.quantize(stored.numpy(), kind), kind).copy())
        mine = source.read(name, dtype)
        assert source.info(name).storage == kind.name
        assert mine.dtype == dtype
        assert torch.equal(converter_rows(mine, heads) if heads else mine, decoded.to(dtype)), (
            name,
            kind.name,
        )


@pytest.mark.parametrize(
    "kind", [kind for kind in gguf.GGMLQuantizationType if kind.name.startswith(("Q", "IQ", "TQ"))]
)
def test_k_types_decode_or_are_named(tmp_path, kind):
    """Types that can't be made here: random blocks, decoded as the gguf package does, or refused by name."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    model = make_llama()
    name = "model.layers.0.mlp.down_proj.weight"
    raw = np.random.default_rng(0).integers(0, 60, (64, size), dtype=np.uint8)
    path = write_gguf(tmp_path / "k.gguf", model, skip=[name])
    writer_extra = tmp_path / "k2.gguf"
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(writer_extra, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_weights(writer_extra)
    assert source.info(name).shape == (64, block)
    try:
        expected = gguf.dequantize(raw, kind)
    except NotImplementedError:
        with pytest.raises(ModelError, match=kind.name):
            source.read(name, torch.float32)
    else:
        mine = source.read(name, torch.float32)
        assert torch.equal(torch.nan_to_num(mine), torch.nan_to_num(torch.from_numpy(expected.copy())))


def test_many_chunks_are_one_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("pagedinfer.model.gguf._CHUNK", 64 * 5)  # 96 rows do not divide by 5
    model = make_llama()
    source = open_weights(write_gguf(tmp_path / "tiny.gguf", model))
    assert_same(read_all(source), weights_of(model))


def test_gguf_with_wrong_tensors(tmp_path):
    model = make_llama()
    bias = [("blk.0.attn_q.bias", np.zeros(64, dtype=np.float32))]
    path = write_gguf(tmp_path / "bad.gguf", model, skip=["model.layers.1.mlp.up_proj.weight"], extra=bias)
    with pytest.raises(ModelError) as caught:
        check_weights(open_weights(path))
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in str(caught.value)


def test_rope_freqs_divide_the_angles(tmp_path):
    model = make_llama()
    ones = write_gguf(tmp_path / "ones.gguf", model, extra=[("rope_freqs.weight", np.ones(8, np.float32))])
    check_weights(open_weights(ones))
    assert open_weights(ones).config.blueprint.rotary.scaling == "none"
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    scaled = write_gguf(tmp_path / "scaled.gguf", model, extra=[("rope_freqs.weight", divisors)])
    check_weights(open_weights(scaled))
    assert open_weights(scaled).config.blueprint.rotary.factors == tuple(divisors.tolist())
    for wrong in (np.zeros(8), np.full(8, np.nan), np.full(8, -1), np.ones(7), np.ones((8, 1))):
        path = write_gguf(
            tmp_path / "bad.gguf", model, extra=[("rope_freqs.weight", wrong.astype(np.float32))]
        )
        with pytest.raises(ModelError, match=r"rope_freqs\.weight.*a positive number for each of 8 pairs"):
            open_weights(path)


def test_scaled_rope_in_gguf_is_refused(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", make_llama(), keys=[("llama.rope.scaling.factor", 4.0)])
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.factor"):
        open_weights(path)


def test_damaged_gguf_files(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", make_llama())
    whole = path.read_bytes()
    for end in (2, 6, 20, 300, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"tiny\.gguf"):
            open_weights(path)
    path.write_bytes(b"PK\3\4" + whole[4:])
    with pytest.raises(ModelError, match="not a GGUF"):
        open_weights(path)
    path.write_bytes(whole[:4] + struct.pack(">I", 3) + whole[8:])
    with pytest.raises(ModelError, match="version"):
        open_weights(path)
    path.write_bytes(whole[:8] + struct.pack("<QQ", 1 << 60, 1 << 60) + whole[24:])
    with pytest.raises(ModelError, match="damaged"):
        open_weights(path)


def test_a_type_that_gguf_does_not_know(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", make_llama())
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # name, number of dimensions, two of them, then the type
    data[at : at + 4] = struct.pack("<I", 999)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight.*999"):
        open_weights(path)
    data[at : at + 4] = struct.pack("<I", int(gguf.GGMLQuantizationType.Q6_K))  # blocks of 256, rows of 64
    path.write_bytes(data)
    with pytest.raises(ModelError, match="multiple of 256"):
        open_weights(path)


# -- the real file


def test_header_equals_the_one_of_the_gguf_package():
    path = resolve("smollm2-135m", progress=False)
    header, theirs = read_header(path), gguf.GGUFReader(path)
    assert header.metadata == {
        key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
    }
    assert {
        name: (tensor.shape, tensor.type_id, tensor.offset) for name, tensor in header.tensors.items()
    } == {
        tensor.name: (tuple(tensor.shape[::-1].tolist()), int(tensor.tensor_type), tensor.data_offset)
        for tensor in theirs.tensors
    }


def test_smollm2_is_what_it_should_be():
    source = open_weights(resolve("smollm2-135m", progress=False))
    check_weights(source)
    config = source.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.vocab_size, config.rope_theta, config.tie_word_embeddings) == (49152, 100000.0, True)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (1, (2,), "bfloat16")
    storage = [source.info(name).storage for name in source.names()]
    assert {kind: storage.count(kind) for kind in set(storage)} == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert source.info("model.embed_tokens.weight").storage == "Q8_0"
    source.close()


@pytest.mark.slow
def test_smollm2_equals_transformers():
    path = resolve("smollm2-135m", progress=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    source = open_weights(path)
    state = theirs.state_dict()
    for name in source.names():
        assert torch.equal(source.read(name, torch.float32), state[name]), name
    source.close()


MEASURE = """
import resource, sys
import torch
from pathlib import Path
bare = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from pagedinfer.model.weights import open_weights
source = open_weights(Path(sys.argv[1]))
weights = {name: source.read(name, torch.bfloat16) for name in source.names()}
size = sum(weight.nbytes for weight in weights.values())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
unit = 1 if sys.platform == "darwin" else 1024
print(((peak - bare) * unit - size) / 1e6, size / 1e6)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no getrusage")
@pytest.mark.parametrize("form", ["gguf", pytest.param("folder", marks=pytest.mark.slow)])
def test_loading_takes_little_more_than_the_weights(tmp_path, form):
    path = resolve("smollm2-135m", progress=False)
    if form == "folder":
        source = open_weights(path)
        save_file(read_all(source, torch.bfloat16), tmp_path / "model.safetensors")
        config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        config.save_pretrained(tmp_path)
        path = tmp_path
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    above, size = map(float, done.stdout.split())
    assert size == pytest.approx(269, abs=1)
    assert above < 300
