import hashlib

import pytest
import torch

from pagedinfer.engine.protocols import Tokenizer
from pagedinfer.errors import ModelError
from pagedinfer.model.tiny import ByteTokenizer, TinyWeights, tiny_config
from pagedinfer.model.weights import WeightSource, check_weights


def test_weights_are_a_source_that_fits_its_config():
    for config in (tiny_config(), tiny_config(tie_word_embeddings=True, vocab_size=64, head_dim=32)):
        source = TinyWeights(config)
        assert isinstance(source, WeightSource)
        check_weights(source)
        for name in source.names():
            assert tuple(source.read(name, torch.float32).shape) == source.info(name).shape


def test_numbers_are_the_same_on_every_machine():
    source = TinyWeights(seed=7)
    digest = hashlib.sha256()
    for name in source.names():
        digest.update(source.read(name, torch.float32).numpy().tobytes())
    assert digest.hexdigest() == "129772ebd570db81f03c686cb84042a904b371deb238b3c88d92fe20dd9cda29"


def test_seeds_and_tensors_differ():
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    zero, one = TinyWeights(seed=0), TinyWeights(seed=1)
    weight = zero.read(name, torch.float32)
    assert torch.equal(weight, zero.read(name, torch.float32))
    for different in (one.read(name, torch.float32), zero.read(other, torch.float32)):
        correlation = torch.corrcoef(torch.stack((weight.flatten(), different.flatten())))[0, 1]
        assert abs(correlation) < 0.05


def test_an_unknown_tensor_is_named():
    with pytest.raises(ModelError, match="no tensor"):
        TinyWeights().read("model.layers.9.bias", torch.float32)


def test_overrides_and_small_vocabularies():
    assert tiny_config(num_kv_heads=1).num_kv_heads == 1
    small = tiny_config(vocab_size=64)
    assert small.bos_token_id is None
    assert small.eos_token_ids == ()


def test_tokenizer_follows_the_protocol_and_returns_what_it_was_given():
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer, Tokenizer)
    for text in ("", "plain", "naïve 🙂\n", "\x00"):
        ids = tokenizer.encode(text)
        assert ids == [256, *tokenizer.encode(text, add_special_tokens=False)]
        assert max(ids) < tokenizer.vocab_size
        assert tokenizer.decode(ids) == text


def test_tokenizer_decodes_broken_text_and_specials():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([*"🙂".encode()][:3]) == "\ufffd"
    assert tokenizer.decode([256, 65, 257]) == "A"
    assert tokenizer.decode([256, 65, 257], skip_special_tokens=False) == "<bos>A<eos>"
    assert tokenizer.special_token_ids == {256, 257, 258}


def test_chat_has_one_begin_token():
    tokenizer = ByteTokenizer()
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "user: Hi\nassistant: "
    assert (
        tokenizer.apply_chat_template(messages, add_generation_prompt=False, tokenize=False) == "user: Hi\n"
    )
    ids = tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.encode(text)
    assert ids.count(256) == 1
