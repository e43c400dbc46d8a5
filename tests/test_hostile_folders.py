"""Model folders that are cut, lie, or mean harm: safetensors, their index and `config.json`.

Each load gives the model or an error that names the file and the field. The files are written here with `struct`
and `json` alone, so that every field can be made to lie.
"""

import json
import math
import os
import random
import re
import struct

import numpy as np
import pytest
import torch
import transformers

from pagedinfer.errors import ModelError, PagedInferError
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.families import FAMILIES
from pagedinfer.model.weights import check_weights, expected_shapes, open_weights

pytestmark = pytest.mark.timeout(120)  # the guard against hanging; all together take a few seconds

HIDDEN, VOCAB, HEAD = 32, 8, 16
LAYER = "model.layers.0."
UP = LAYER + "mlp.up_proj.weight"
SHAPES = {  # one layer, two query heads and one KV head; the output is tied
    "model.embed_tokens.weight": [VOCAB, HIDDEN],
    LAYER + "input_layernorm.weight": [HIDDEN],
    LAYER + "self_attn.q_proj.weight": [2 * HEAD, HIDDEN],
    LAYER + "self_attn.k_proj.weight": [HEAD, HIDDEN],
    LAYER + "self_attn.v_proj.weight": [HEAD, HIDDEN],
    LAYER + "self_attn.o_proj.weight": [HIDDEN, 2 * HEAD],
    LAYER + "post_attention_layernorm.weight": [HIDDEN],
    LAYER + "mlp.gate_proj.weight": [HIDDEN, HIDDEN],
    UP: [HIDDEN, HIDDEN],
    LAYER + "mlp.down_proj.weight": [HIDDEN, HIDDEN],
    "model.norm.weight": [HIDDEN],
}
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 6,
    "eos_token_id": 7,
}


def load(path):
    source = open_weights(path)
    try:
        check_weights(source)
        return source.config, {name: source.read(name, torch.float32) for name in source.names()}
    finally:
        source.close()


def is_sentence(text):
    return bool(re.search(r"\w+ \w+", text)) and text.isprintable() and len(text) < 3000


def outcome(path, what):
    """Load; None where that worked, else the sentence. Any other exception fails the test."""
    try:
        load(path)
    except PagedInferError as error:
        said = str(error)
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    else:
        return None
    assert is_sentence(said), (what, said)
    return said


def damaged(whole, seed, size):
    """Seeded damage to the first `size` bytes: bytes changed, removed, doubled."""
    rng = random.Random(seed)
    data, at, length = bytearray(whole), rng.randrange(size), rng.randrange(1, 24)
    kind = rng.randrange(4)
    if kind == 0:
        data[at] = rng.randrange(256)
    elif kind == 1:
        data[at : at + length] = rng.randbytes(length)
    elif kind == 2:
        del data[at : at + length]
    else:
        data[at:at] = data[at : at + length]
    return bytes(data)


def header_of(shapes):
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return header


def safetensors_bytes(header, size=None, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = header_size(header) if size is None else size
    noise = np.random.default_rng(0).standard_normal(size // 4).astype(np.float32).tobytes()
    return struct.pack("<Q", len(text) if length is None else length) + text + noise


def header_size(header):
    return max(entry["data_offsets"][1] for entry in header.values())


def write_folder(folder, config=CONFIG, header=None):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header or header_of(SHAPES)))
    return folder


def test_the_folders_written_here_load(tmp_path):
    config, weights = load(write_folder(tmp_path))
    again_config, again = load(tmp_path)
    assert (config, weights.keys()) == (again_config, again.keys())
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert weights[UP].shape == (HIDDEN, HIDDEN)


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path):
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for end in [*range(0, 1400, 11), *range(1400, len(whole), 997), len(whole) - 1]:
        file.write_bytes(whole[:end])
        assert "model.safetensors" in outcome(tmp_path, f"cut at {end}"), end
    file.write_bytes(whole + b"x")
    assert "ends at byte" in outcome(tmp_path, "longer")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 100_000_001, 30_000, 0, 1, 20])
def test_a_safetensors_header_that_lies_about_its_length(tmp_path, length):
    write_folder(tmp_path)
    data = safetensors_bytes(header_of(SHAPES), length=length)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(
        ModelError, match=r"header of .*model\.safetensors|model\.safetensors.*its header claims"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"data_offsets": [0, 4096]}, "up_proj.* overlaps|model.* overlaps"),
        ({"data_offsets": [-4096, 0]}, "a data offset of the tensor .*up_proj.* is -4096"),
        ({"data_offsets": [2**40, 2**40 + 4096]}, "up_proj.* leaves a gap|leaves a gap"),
        ({"data_offsets": [2**64, 2**64 + 4096]}, "a data offset of the tensor .*up_proj"),
        ({"data_offsets": [4096, 0]}, "up_proj.* has data_offsets"),
        ({"data_offsets": [4096]}, "up_proj.* has data_offsets"),
        ({"data_offsets": [0, 1, 2]}, "up_proj.* has data_offsets"),
        ({"data_offsets": ["0", "4096"]}, "a data offset of the tensor .*up_proj"),
        ({"data_offsets": [0.5, 4096]}, "a data offset of the tensor .*up_proj"),
        ({"data_offsets": None}, "up_proj.* has data_offsets None"),
        ({"shape": [32, 33]}, "up_proj.* has shape .* 4224 bytes, but 4096"),
        ({"shape": [0, 32]}, "a dimension of the tensor .*up_proj.* is 0"),
        ({"shape": [-32, -32]}, "a dimension of the tensor .*up_proj.* is -32"),
        ({"shape": [2**62, 2**62]}, "up_proj.* has shape"),
        ({"shape": [2**64, 1]}, "a dimension of the tensor .*up_proj"),
        ({"shape": [True, 1024]}, "a dimension of the tensor .*up_proj.* is True"),
        ({"shape": [[32], 32]}, "a dimension of the tensor .*up_proj"),
        ({"shape": [1] * 2000}, "up_proj.* has shape .* up to 8"),
        ({"shape": "32"}, 'up_proj.* has shape "32"'),
        ({"dtype": "F16"}, "up_proj.* 2048 bytes, but 4096"),
        ({"dtype": 32}, "the dtype of the tensor .*up_proj.* is 32"),
        ({"dtype": "I32"}, "up_proj.* is stored as I32"),
        ({"dtype": "\x1b[2J"}, "up_proj.* is stored as"),
        ({"more": 1}, "up_proj.* is described as"),
    ],
)
def test_a_safetensors_entry_that_lies_is_named(tmp_path, change, match):
    write_folder(tmp_path)
    header = header_of(SHAPES)
    size = header_size(header)
    header[UP] |= change
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(header, size))
    with pytest.raises(ModelError, match=match) as caught:
        load(tmp_path)
    assert is_sentence(str(caught.value))


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "holds a list"),
        (b"\xff\xfe{}", "header of"),
        (b"[" * 100_000, "nested too deeply|not valid JSON"),
        (b'{"a":' * 50_000, "nested too deeply|not valid JSON"),
        (b'{"a": 1, "a": 2}', '"a" stands there twice'),
        (b'{"a": 1}', 'the tensor "a" .* is described as 1'),
        (b'{"a": NaN}', 'the tensor "a" .* is described as nan'),
        (
            b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
            "a tensor name .* must be text",
        ),
        (b"{}", "no tensor is there"),
    ],
)
def test_a_safetensors_header_that_is_none(tmp_path, header, match):
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(header, 4))
    with pytest.raises(ModelError, match=match) as caught:
        load(tmp_path)
    assert is_sentence(str(caught.value))


def test_safetensors_files_with_random_damage(tmp_path):
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    whole, refusals = file.read_bytes(), 0
    for seed in range(250):
        file.write_bytes(damaged(whole, seed, size=1400))
        refusals += outcome(tmp_path, f"seed {seed}") is not None
    assert refusals > 150


def test_configs_with_random_damage(tmp_path):
    write_folder(tmp_path)
    file = tmp_path / "config.json"
    whole = file.read_bytes()
    for seed in range(250):
        file.write_bytes(damaged(whole, seed, size=len(whole)))
        outcome(tmp_path, f"seed {seed}")


def write_shards(folder, weight_map=None):
    """Two shards and an index; `weight_map` may change what the index says."""
    names = list(SHAPES)
    files = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, part in files.items():
        header = header_of({name: SHAPES[name] for name in part})
        (folder / file).write_bytes(safetensors_bytes(header))
    told = {name: file for file, part in files.items() for name in part}
    told = (
        told | weight_map if isinstance(weight_map, dict) else weight_map if weight_map is not None else told
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": told}))
    return folder


def test_shards_load_twice_the_same(tmp_path):
    config, weights = load(write_shards(tmp_path))
    again_config, again = load(tmp_path)
    assert config == again_config
    assert all(torch.equal(weights[name], again[name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({UP: "three.safetensors"}, "missing: three.safetensors"),
        ({UP: "../outside.safetensors"}, f'puts "{UP}" into "../outside.safetensors"'),
        ({UP: "/etc/passwd"}, 'into "/etc/passwd"'),
        ({UP: "deeper/two.safetensors"}, "into "),
        ({UP: "..\\two.safetensors"}, "into "),
        ({UP: ".."}, "into "),
        ({UP: ""}, "into "),
        ({UP: "two\x00"}, "into "),
        ({UP: "x" * 10_000}, "into "),
        ({UP: 5}, "into 5"),
        ({UP: None}, "into None"),
        ({UP: ["two.safetensors"]}, "into "),
        ({UP: "one.safetensors"}, f"one.safetensors.* lacks {UP}, which the index says"),
        ({"nothing": "one.safetensors"}, "one.safetensors.* lacks nothing"),
        (["one.safetensors"], "weight_map .* must be an object"),
        ({}, None),
    ],
)
def test_an_index_that_lies_is_named(tmp_path, weight_map, match):
    write_shards(tmp_path, weight_map)
    (tmp_path.parent / "outside.safetensors").write_bytes(b"secret")
    if match is None:
        load(tmp_path)
        return
    with pytest.raises(ModelError, match=match) as caught:
        load(tmp_path)
    assert is_sentence(str(caught.value))


def test_a_tensor_in_two_shards(tmp_path):
    write_shards(tmp_path)
    header = header_of({name: SHAPES[name] for name in [*list(SHAPES)[5:], "model.embed_tokens.weight"]})
    (tmp_path / "two.safetensors").write_bytes(safetensors_bytes(header))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight twice, in one\.safetensors and in two"):
        load(tmp_path)


# -- config.json


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("field", [key for key in CONFIG if key not in ("model_type", "num_key_value_heads")])
def test_a_config_field_of_the_wrong_kind_is_named(tmp_path, field, nested):
    wrong = ["x", [], {}, [1, [2]], -1, 2.5, math.nan, math.inf, 2**70, 10**400, True, "\x1b", "x" * 10**5]
    allowed = {
        "rms_norm_eps": (2.5, 2**70),
        "rope_theta": (2.5, 2**70),
        "tie_word_embeddings": (True,),
        "eos_token_id": ([],),
    }
    write_folder(tmp_path)
    for value in wrong:
        changed = CONFIG | {field: value}
        if nested:
            changed = {"model_type": "llama", "text_config": changed}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        said = outcome(tmp_path, f"{field} = {value!r:.50}")
        if value not in allowed.get(field, ()):
            assert said, (field, value)
            assert field in said, (field, value, said)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_act",
        "sliding_window",
        "rope_scaling",
        "rope_parameters",
        "layer_types",
        "quantization_config",
        "dtype",
        "text_config",
        "model_type",
        "head_dim",
        "num_key_value_heads",
        "_name_or_path",
    ],
)
def test_other_config_fields_with_anything_in_them(tmp_path, key):
    write_folder(tmp_path)
    deep = []
    for _ in range(400):
        deep = [deep]
    for value in (
        "x",
        "x" * 10**6,
        5,
        -1,
        0,
        math.nan,
        [],
        [5],
        [None],
        {},
        {"a": {}},
        {"rope_theta": "x"},
        deep,
    ):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | {key: value}))
        outcome(tmp_path, f"{key} = {value!r:.50}")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not valid JSON"),
        ("null", "holds a NoneType"),
        ("[1]", "holds a list"),
        ('"' + "x" * 100, "not valid JSON"),
        ("[" * 200_000, "nested too deeply|not valid JSON"),
        ('{"a":' * 200_000, "nested too deeply|not valid JSON"),
        ('{"vocab_size": ' + "9" * 10_000 + "}", "not valid JSON"),
        ("\ufeff{}", "not valid JSON"),
        ('{"vocab_size": 8, "vocab_size": 9}', '"vocab_size" stands there twice'),
        ("{}", 'has architecture "missing"'),
    ],
)
def test_a_config_that_is_none(tmp_path, text, match):
    with pytest.raises(ModelError, match=match) as caught:
        load(write_folder(tmp_path, text))
    assert is_sentence(str(caught.value))


def test_a_config_that_is_no_text_or_too_much(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    assert "not UTF-8" in outcome(tmp_path, "bytes")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 34)  # 16 GB of nothing
    assert "more than 64 MB" in outcome(tmp_path, "sparse")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert "not a regular file" in outcome(tmp_path, "folder")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, name):
    write_folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    assert "not a regular file" in outcome(tmp_path, name)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is neither" in outcome(tmp_path / "pipe.gguf", "gguf")


def test_bases_nested_or_flat_are_the_same_and_may_not_contradict(tmp_path):
    flat, weights = load(write_folder(tmp_path))
    nested = {"model_type": "llava", "text_config": CONFIG}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    assert load(tmp_path)[0] == flat
    without = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    for bases in ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, {}):
        (tmp_path / "config.json").write_text(json.dumps(without | bases))
        again, same = load(tmp_path)
        assert again == flat
        assert all(torch.equal(weights[name], same[name]) for name in weights)
    (tmp_path / "config.json").write_text(json.dumps(nested | {"hidden_size": 64}))
    assert "hidden_size 64 and, in text_config, 32" in outcome(tmp_path, "contradiction")


# -- every family


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_every_field_of_every_family_with_anything_in_it(architecture):
    """Each value gives a config whose tensors can be listed, or an error: no field is trusted."""
    given = transformers.AutoConfig.for_model(architecture).to_dict()
    wrong = [
        "x",
        [],
        [5],
        [[1]],
        {},
        {"a": {}},
        -1,
        0,
        1,
        2.5,
        math.nan,
        math.inf,
        2**31 - 1,
        2**70,
        True,
        False,
    ]
    refusals = 0
    for key in given:
        for value in wrong:
            try:
                expected_shapes(ModelConfig.from_hf(given | {key: value}))
            except ModelError as error:
                refusals += 1
                said = str(error)
                if not is_sentence(said):
                    raise AssertionError((key, value, said)) from error
            except BaseException as error:
                raise AssertionError(f"{key} = {value!r}: {type(error).__name__}: {error}") from error
    assert refusals > 100
