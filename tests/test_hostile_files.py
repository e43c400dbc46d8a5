"""GGUF files that are cut, lie, or mean harm: an error that names the field, at once, and nothing allocated.

The files are written here with `struct` alone, so that every field can be made to lie.
"""

import math
import os
import random
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch

from pagedinfer.errors import ModelError, PagedInferError
from pagedinfer.model.tokenizer import open_tokenizer
from pagedinfer.model.weights import check_weights, open_weights

pytestmark = pytest.mark.timeout(120)  # the guard against hanging; all together take a few seconds

HIDDEN, VOCAB, HEAD = 32, 8, 16
SHAPES = {  # one layer, two query heads and one KV head
    "token_embd": (VOCAB, HIDDEN),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.attn_q": (2 * HEAD, HIDDEN),
    "blk.0.attn_k": (HEAD, HIDDEN),
    "blk.0.attn_v": (HEAD, HIDDEN),
    "blk.0.attn_output": (HIDDEN, 2 * HEAD),
    "blk.0.ffn_norm": (HIDDEN,),
    "blk.0.ffn_gate": (HIDDEN, HIDDEN),
    "blk.0.ffn_up": (HIDDEN, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, HIDDEN),
    "output_norm": (HIDDEN,),
}
METADATA = {
    "general.architecture": "llama",
    "general.name": "tiny",
    "general.alignment": 32,
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": HIDDEN,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": [1],
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "c", "Ġ", "é", "<s>", "</s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 1, 3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 6,
    "tokenizer.ggml.eos_token_id": 7,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}
KINDS = {str: 8, bool: 7, int: 4, float: 6}
CODES = {7: "?", 4: "I", 6: "f"}


class Gguf:
    """A GGUF file in memory: `data`, and where each of its fields lies.

    Metadata and shapes are mappings, or pairs where a name stands twice.
    """

    def __init__(self, metadata=METADATA, shapes=SHAPES):
        metadata, shapes = (
            list(each.items()) if isinstance(each, dict) else each for each in (metadata, shapes)
        )
        self.data = bytearray(b"GGUF")
        self.fields = {}  # name -> (offset, struct code)
        self.number("I", 3, "version")
        self.number("Q", len(shapes), "number of tensors")
        self.number("Q", len(metadata), "number of metadata keys")
        for key, value in metadata:
            self.text(key, f"key {key}")
            self.value(key, value)
        at = 0
        for name, shape in shapes:
            self.text(name + ".weight", f"name {name}")
            self.number("I", len(shape), f"dims {name}")
            for index, dim in enumerate(reversed(shape)):
                self.number("Q", dim, f"dim {index} {name}")
            self.number("I", 0, f"kind {name}")  # F32
            self.number("Q", at, f"offset {name}")
            at += -(-4 * math.prod(shape) // 32) * 32
        self.header_size = len(self.data)
        self.data += bytes(-len(self.data) % 32)
        noise = np.random.default_rng(0).standard_normal(at // 4).astype(np.float32)
        self.data += noise.tobytes()

    def number(self, code, value, name):
        self.fields[name] = len(self.data), code
        self.data += struct.pack("<" + code, value)

    def text(self, text, name):
        raw = text if isinstance(text, bytes) else text.encode()
        self.number("Q", len(raw), f"length of {name}")
        self.data += raw

    def value(self, key, value):
        entries = value if isinstance(value, list) else [value]
        kind = 8 if isinstance(entries[0], bytes) else KINDS[type(entries[0])]
        if isinstance(value, list):
            self.number("I", 9, f"type {key}")
            self.number("I", kind, f"entry type {key}")
            self.number("Q", len(value), f"entries {key}")
        else:
            self.number("I", kind, f"type {key}")
        for entry in entries:
            if kind == 8:
                self.text(entry, f"value {key}")
            else:
                self.number(CODES[kind], entry, f"value {key}")

    def lie(self, name, value):
        offset, code = self.fields[name]
        struct.pack_into("<" + code, self.data, offset, value)
        return self


def load_gguf(path):
    """Everything a user's load does: weights, their check, each tensor, and the tokenizer in use."""
    tokenizer = open_tokenizer(path)
    tokenizer.decode(tokenizer.encode("ab c"))
    tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])
    source = open_weights(path)
    try:
        check_weights(source)
        return source.config, {name: source.read(name, torch.float32) for name in source.names()}
    finally:
        source.close()


def is_sentence(text):
    return bool(re.search(r"\w+ \w+", text)) and text.isprintable() and len(text) < 3000


def outcome(load, path, what):
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


def refused(tmp_path, data, match, load=load_gguf):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=match) as caught:
        load(path)
    assert is_sentence(str(caught.value))


def mutations(whole, count, seed, size=None):
    """Seeded damage: bytes changed, hostile numbers written, pieces removed, doubled, swapped."""
    numbers = [0, 1, 2**16, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1]
    for index in range(count):
        rng = random.Random(seed * 100_003 + index)
        data, end = bytearray(whole), size or len(whole)
        at, length = rng.randrange(end), rng.randrange(1, 24)
        kind = rng.randrange(6)
        if kind == 0:
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(end)] = rng.randrange(256)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<Q", rng.choice(numbers))
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", rng.choice(numbers) % 2**32)
        elif kind == 3:
            del data[at : at + length]
        elif kind == 4:
            data[at:at] = data[at : at + length]
        else:
            data[at : at + length] = rng.randbytes(length)
        yield f"seed {seed}, mutation {index}", bytes(data)


# -- GGUF


def test_the_files_written_here_load(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(Gguf().data)
    config, weights = load_gguf(path)
    assert (config.num_layers, config.num_kv_heads, config.vocab_size) == (1, 1, VOCAB)
    assert len(weights) == len(SHAPES)
    again_config, again = load_gguf(path)  # loading twice gives the same
    assert config == again_config
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert open_tokenizer(path).encode("ab c") == open_tokenizer(path).encode("ab c") == [6, 2, 4, 3]


def test_a_gguf_file_cut_anywhere_is_refused(tmp_path):
    made = Gguf()
    path = tmp_path / "tiny.gguf"
    ends = [*range(0, made.header_size, 3), *range(made.header_size, len(made.data), 997), len(made.data) - 1]
    named = r"version|number of|metadata key|general\.|llama\.|tokenizer\.|tensor|not a GGUF"
    for end in ends:
        path.write_bytes(made.data[:end])
        said = outcome(load_gguf, path, f"cut at {end}")
        assert said, end
        assert re.search(named, said), (end, said)


TOKENS = "tokenizer.ggml.tokens"


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("version", 1, "version 1;.*2 and 3 are read"),
        ("version", 4, "version 4;"),
        ("version", 999, "version 999;"),
        ("version", 3 << 24, "big-endian"),
        ("number of tensors", 2**60, f"number of tensors: .*{2**60}"),
        ("number of tensors", 2**64 - 1, "number of tensors"),
        ("number of tensors", 12, 'tensor 12 of 12|tensor ""'),
        ("number of metadata keys", 2**60, "number of metadata keys"),
        ("number of metadata keys", 19, "tensor 1 of 11|metadata key 19 of 19"),
        ("number of metadata keys", 17, r"tensor 1 of 11|tokenizer\.chat_template"),
        ("length of key general.name", 2**63, "metadata key 2 of 18: "),
        ("length of key general.name", 60_000, "metadata key 2 of 18: "),
        ("length of value general.name", 2**63, r"general\.name: "),
        ("length of value general.name", 2**30, r"general\.name: "),
        ("type general.name", 13, r"general\.name: value type 13 is unknown"),
        ("type llama.block_count", 2**32 - 1, r"llama\.block_count: value type"),
        (f"entries {TOKENS}", 2**61, r"tokenizer\.ggml\.tokens: "),
        (f"entries {TOKENS}", 2**64 - 1, r"tokenizer\.ggml\.tokens: "),
        (f"entries {TOKENS}", 1_000_000, r"tokenizer\.ggml\.tokens: "),
        (f"entry type {TOKENS}", 9, r"tokenizer\.ggml\.tokens: an array of arrays"),
        (f"entry type {TOKENS}", 77, r"tokenizer\.ggml\.tokens: value type 77"),
        ("value general.alignment", 0, r"general\.alignment 0; it must be a power of two"),
        ("value general.alignment", 3, r"general\.alignment 3"),
        ("value general.alignment", 2**31, r"general\.alignment 2147483648"),
        ("value general.alignment", 2**20, r'"token_embd.weight" ends at byte|offset'),
        ("type general.alignment", 6, r"general\.alignment"),  # a float
        ("value llama.block_count", 0, r"llama\.block_count .* is 0"),
        ("value llama.block_count", 2**32 - 1, r"llama\.block_count .* is 4294967295"),
        ("value llama.embedding_length", 2**31, r"llama\.embedding_length"),
        ("value llama.attention.head_count", 0, r"llama\.attention\.head_count"),
        ("value llama.attention.head_count_kv", 0, r"llama\.attention\.head_count_kv"),
        ("entries llama.attention.head_count_kv", 0, r"llama\.attention|metadata key"),
        ("value llama.attention.layer_norm_rms_epsilon", math.nan, r"layer_norm_rms_epsilon .* is nan"),
        ("value llama.attention.layer_norm_rms_epsilon", math.inf, "layer_norm_rms_epsilon"),
        ("value llama.attention.layer_norm_rms_epsilon", -1.0, "rms_norm_eps -1"),
        ("value tokenizer.ggml.bos_token_id", 8, r"tokenizer\.ggml\.bos_token_id is 8; .* from 0 to 7"),
        ("value tokenizer.ggml.eos_token_id", 2**32 - 1, r"tokenizer\.ggml\.eos_token_id"),
        ("dims token_embd", 0, '"token_embd.weight": its shape is'),
        ("dims token_embd", 5, '"token_embd.weight": claims 5'),
        ("dims token_embd", 2**32 - 1, '"token_embd.weight": claims'),
        ("dim 0 token_embd", 0, '"token_embd.weight": its shape is'),
        ("dim 1 token_embd", 0, '"token_embd.weight": its shape is'),
        ("dim 0 blk.0.attn_q", 2**63, '"blk.0.attn_q.weight" ends at byte'),
        ("dim 1 blk.0.attn_q", 2**64 - 1, '"blk.0.attn_q.weight" ends at byte'),
        ("dim 1 blk.0.attn_q", 2**59, '"blk.0.attn_q.weight" ends at byte'),  # 2**64 elements: 0 in 64 bits
        ("kind blk.0.ffn_up", 4, '"blk.0.ffn_up.weight" .* type number 4'),  # a type that was removed
        ("kind blk.0.ffn_up", 999, '"blk.0.ffn_up.weight" .* type number 999'),
        ("kind blk.0.ffn_up", 12, '"blk.0.ffn_up.weight" .* multiple of 256'),
        ("kind blk.0.ffn_norm", 24, "post_attention_layernorm|ffn_norm"),  # I8
        ("offset blk.0.ffn_up", 2**63, '"blk.0.ffn_up.weight" ends at byte'),
        ("offset blk.0.ffn_up", 2**64 - 32, '"blk.0.ffn_up.weight" ends at byte'),
        ("offset blk.0.ffn_up", 8, '"blk.0.ffn_up.weight" has offset 8, no multiple of 32'),
        ("offset blk.0.ffn_up", 0, '"token_embd.weight" and "blk.0.ffn_up.weight" overlap|overlap'),
        ("offset blk.0.ffn_up", 32, '"blk.0.ffn_up.weight".* overlap'),
        ("length of name blk.0.ffn_up", 2**62, "tensor 9 of 11: "),
    ],
)
def test_a_gguf_field_that_lies_is_named(tmp_path, field, value, match):
    refused(tmp_path, Gguf().lie(field, value).data, match)


def test_every_gguf_field_with_every_hostile_number(tmp_path):
    path = tmp_path / "tiny.gguf"
    numbers = {
        "I": [0, 9, 2**31, 2**32 - 1],
        "Q": [0, 7, 2**31, 2**64 - 1],
        "f": [-1.0, math.nan, math.inf],
        "?": [False],
    }
    made = Gguf()
    whole, survived = bytes(made.data), 0
    for name, (_, code) in made.fields.items():
        for number in numbers[code]:
            path.write_bytes(made.lie(name, number).data)
            survived += outcome(load_gguf, path, f"{name} = {number}") is None
            made.data[:] = whole
    assert survived < 100  # some change nothing: an end id, a token's type, a context length


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({b"general.n\xffme": "x"}, "metadata key 19 of 19: .*utf-8"),
        ({"general.name": b"caf\xe9"}, r"general\.name: .*utf-8"),
        (
            {TOKENS: [b"a", b"\xff", *(bytes([99 + i]) for i in range(6))]},
            r"tokenizer\.ggml\.tokens: .*utf-8",
        ),
        ({TOKENS: ["a", "b", "ab", "c", "a", "é", "<s>", "</s>"]}, 'tokens has "a" twice'),
        ({TOKENS: [1, 2, 3, 4, 5, 6, 7, 8]}, r"tokens\[0\] is 1; it must be text"),
        ({TOKENS: "abcdefgh"}, "tokens is .* must be a list of texts"),
        ({"general.architecture": [1] * 500}, "architecture"),
        ({"general.architecture": 5}, "architecture"),
        ({"general.name": "\x1b[2J" * 1000 + "x"}, None),
        ({"llama.block_count": "one"}, r'llama\.block_count .* is "one"; it must be a whole number'),
        ({"llama.block_count": True}, r"llama\.block_count .* is True"),
        ({"llama.block_count": 1.5}, r"llama\.block_count .* is 1\.5"),
        ({"llama.block_count": [1, 1]}, r"llama\.block_count"),
        ({"llama.block_count": 9}, "missing: model.layers.1.input_layernorm.weight"),
        ({"llama.attention.head_count": [2, 4]}, r"head_count .* differs by layer"),
        ({"llama.attention.head_count": "2"}, r"head_count"),
        ({"llama.attention.head_count": 3}, "do not divide|KV heads"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "layer_norm_rms_epsilon"),
        ({"llama.attention.layer_norm_rms_epsilon": [1e-5]}, "layer_norm_rms_epsilon"),
        ({"llama.rope.freq_base": math.nan}, r"rope\.freq_base .* is nan"),
        ({"llama.rope.dimension_count": "16"}, r"rope\.dimension_count"),
        ({"llama.rope.scaling.type": "x" * 10_000}, r"rope\.scaling\.type"),
        ({"llama.expert_count": [8] * 10_000}, "expert_count"),
        ({"general.alignment": "32"}, r'general\.alignment "32"'),
        ({"general.alignment": [32]}, r"general\.alignment \[32\]"),
        ({"tokenizer.ggml.model": "x" * 100_000}, r"tokenizer\.ggml\.model"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer\.ggml\.scores"),
        ({"tokenizer.ggml.pre": [1]}, r"tokenizer\.ggml\.pre"),
        ({"tokenizer.ggml.token_type": [1, 1]}, r"tokenizer\.ggml\.token_type"),
        ({"tokenizer.ggml.token_type": 3}, r"tokenizer\.ggml\.token_type"),
        ({"tokenizer.ggml.merges": ["ab"]}, r'tokenizer\.ggml\.merges has "ab"'),
        ({"tokenizer.ggml.merges": ["a é"]}, r'tokenizer\.ggml\.merges has "a é"'),
        ({"tokenizer.ggml.merges": ["a zz"]}, r'tokenizer\.ggml\.merges has "a zz"'),
        ({"tokenizer.ggml.merges": [7]}, r"tokenizer\.ggml\.merges\[0\] is 7"),
        ({"tokenizer.ggml.bos_token_id": "<s>"}, "bos_token_id"),
        ({"tokenizer.ggml.eos_token_id": [7]}, "eos_token_id"),
        ({"tokenizer.ggml.padding_token_id": 99}, "padding_token_id is 99"),
        ({"tokenizer.ggml.add_bos_token": "false"}, 'add_bos_token is "false"'),
        ({"tokenizer.chat_template": 5}, r"tokenizer\.chat_template is 5"),
    ],
)
def test_gguf_metadata_of_the_wrong_kind_are_named(tmp_path, changes, match):
    made = Gguf({key: value for key, value in METADATA.items() if key not in changes} | changes)
    if match:
        refused(tmp_path, made.data, match)
    else:  # harmless, but no terminal may get it as it is
        path = tmp_path / "tiny.gguf"
        path.write_bytes(made.data)
        assert load_gguf(path)[0].name.isprintable()


@pytest.mark.parametrize(
    ("scores", "unknown", "match"),
    [
        ([0.0], 0, "scores is .* must have a score for each token"),
        ([math.nan] * VOCAB, 0, "an entry of tokenizer.ggml.scores is nan"),
        (["x"] * VOCAB, 0, "an entry of tokenizer.ggml.scores"),
        ([0.0] * VOCAB, VOCAB, "unknown_token_id is 8"),
        ([0.0] * VOCAB, "<s>", "unknown_token_id"),
    ],
)
def test_sentencepiece_metadata_that_lie_are_named(tmp_path, scores, unknown, match):
    extra = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}
    refused(tmp_path, Gguf(METADATA | extra | {"tokenizer.ggml.unknown_token_id": unknown}).data, match)


def test_a_sentencepiece_token_of_a_million_characters_is_not_cut_everywhere(tmp_path):
    tokens = ["a" * 1_000_000, *METADATA[TOKENS][1:]]
    extra = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * VOCAB, TOKENS: tokens}
    refused(tmp_path, Gguf(METADATA | extra).data, "pieces of up to 1000000 characters")


def test_names_that_stand_twice_in_gguf(tmp_path):
    pairs, shapes = list(METADATA.items()), list(SHAPES.items())
    twice = [*pairs, ("llama.context_length", 64)]
    refused(tmp_path, Gguf(twice).data, '"llama.context_length" stands there twice')
    twice = [*shapes, ("blk.0.ffn_up", (HIDDEN, HIDDEN))]
    refused(tmp_path, Gguf(shapes=twice).data, '"blk.0.ffn_up.weight" stands there twice')
    alias = "model.layers.0.mlp.up_proj"  # the name that we give to blk.0.ffn_up
    twice = [*shapes, (alias, (HIDDEN, HIDDEN))]
    refused(tmp_path, Gguf(shapes=twice).data, f'"blk.0.ffn_up.weight" and "{alias}.weight" are the same')


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("rope_freqs", (HEAD // 2,), "rope_freqs"),  # noise, not ones
        ("rope_freqs", (10_000,), "rope_freqs"),
        ("output", (VOCAB, 1), r"lm_head\.weight is \[8, 1\]"),
        ("blk.0.attn_q", (3, HIDDEN), "q_proj.weight is "),
        ("blk.0.attn_norm", (HEAD, HEAD, 2), "input_layernorm.weight is "),
        ("\x1b[31mred", (1,), r"unexpected: \\x1b\[31mred"),
        ("x" * 60_000, (1,), "unexpected: x"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, name, shape, match):
    refused(tmp_path, Gguf(shapes=SHAPES | {name: shape}).data, match)


def test_reading_a_misshapen_tensor_without_the_check(tmp_path):
    path = tmp_path / "tiny.gguf"
    path.write_bytes(Gguf(shapes=SHAPES | {"blk.0.attn_q": (3, HIDDEN), "nameless": (1,)}).data)
    source = open_weights(path)
    with pytest.raises(ModelError, match=r"q_proj\.weight has 3 rows"):
        source.read("model.layers.0.self_attn.q_proj.weight", torch.float32)
    assert source.read("nameless.weight", torch.float32).shape == (1,)
    source.close()


def test_gguf_files_with_random_damage(tmp_path):
    made = Gguf()
    path, outcomes = tmp_path / "tiny.gguf", []
    for what, data in mutations(made.data, 300, seed=1, size=made.header_size):
        path.write_bytes(data)
        outcomes.append(outcome(load_gguf, path, what) is None)
    assert True in outcomes
    assert outcomes.count(False) > 150


# -- memory


MEMORY = """
import resource, sys
from pathlib import Path
from pagedinfer.errors import ModelError, PagedInferError
from pagedinfer.model.weights import open_weights
from pagedinfer.model.tokenizer import open_tokenizer
paths = [Path(name) for name in sys.argv[1:]]
def load(path):
    source = open_weights(path)
    for name in source.names():
        source.read(name, __import__("torch").float32)
load(paths[0])
open_tokenizer(paths[0])
pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (96 << 20),) * 2)  # what is claimed would not fit
for path in paths[1:]:
    for use in (load, open_tokenizer):
        try:
            use(path)
        except PagedInferError as error:
            print(path.name, error)
        except BaseException as error:
            sys.exit(f"{path.name}: {type(error).__name__}: {error}")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_no_claimed_size_is_allocated(tmp_path):
    (tmp_path / "whole.gguf").write_bytes(Gguf().data)
    lies = {
        f"entries {TOKENS}": 2**31,
        "length of value general.name": 2**33,
        "length of key general.name": 2**33,
        "number of tensors": 2**33,
        "number of metadata keys": 2**33,
        "dim 1 blk.0.attn_q": 2**33,
        "dims token_embd": 2**31,
    }
    paths = []
    for index, (field, value) in enumerate(lies.items()):
        for grown in (False, True):  # and in files that do have that many bytes, none of them written
            path = tmp_path / f"{index}{'-grown' * grown}.gguf"
            path.write_bytes(Gguf().lie(field, value).data)
            if grown:
                os.truncate(path, 1 << 38)
            paths.append(path)
    command = [sys.executable, "-c", MEMORY, *map(str, [tmp_path / "whole.gguf", *paths])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr + done.stdout
    said = done.stdout.splitlines()
    assert {line.split()[0] for line in said} == {path.name for path in paths}
