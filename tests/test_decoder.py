import itertools
import math
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.backends.torch_ops import DenseLinear, TorchOps
from pagedinfer.errors import ModelError
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.tiny import TinyWeights, tiny_config

TOKENS = [256, 72, 105, 32, 116, 104, 101, 114, 101, 33, 7, 200, 72, 72]
SHAPES = {
    "default": {},
    "tied": {"tie_word_embeddings": True},
    "head_dim is not hidden / heads": {"head_dim": 32},
    "one kv head": {"num_kv_heads": 1, "num_heads": 3, "hidden_size": 48, "rope_theta": 100000.0},
    "no groups": {"num_kv_heads": 4, "num_layers": 3, "rms_norm_eps": 1e-3},
    "groups of 8": {"num_heads": 16, "num_kv_heads": 2, "head_dim": 4, "hidden_size": 48},
}


def transformers_twin(source):
    c = source.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            rms_norm_eps=c.rms_norm_eps,
            tie_word_embeddings=c.tie_word_embeddings,
        )
    )
    weights = {name: source.read(name, torch.float32) for name in source.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if c.tie_word_embeddings else set())
    return model.eval()


def reference_logits(source, tokens=TOKENS):
    with torch.inference_mode():
        return transformers_twin(source)(torch.tensor([tokens])).logits[0]


def inputs_for(tokens, start, end, *, block_size=4, first_block=2):
    positions = torch.arange(start, end)
    num = end - start
    return ModelInputs(
        token_ids=torch.tensor(tokens[start:end]),
        positions=positions,
        slot_mapping=positions + first_block * block_size,
        query_start=torch.tensor([0, num]),
        context_lens=torch.tensor([end]),
        block_tables=torch.arange(first_block, first_block + -(-end // block_size))[None],
        logits_indices=torch.arange(num),
        query_lens=[num],
        ends=[end],
        num_single=int(num == 1),
    )


def paged_logits(decoder, tokens=TOKENS, cuts=(5, 9, 10, 11)):
    """All logits, computed in chunks and single tokens over a poisoned pool."""
    kv = decoder.new_kv(num_blocks=8, block_size=4)
    kv.poison()
    bounds = [0, *cuts, len(tokens)]
    parts = [decoder.forward(inputs_for(tokens, *ends), kv) for ends in itertools.pairwise(bounds)]
    return torch.cat(parts)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape):
    source = TinyWeights(tiny_config(**shape), seed=1)
    expected = reference_logits(source)
    assert expected.std() > 2
    decoder = Decoder(source.config).load(source)
    for cuts in ((), (5, 9, 10, 11), range(1, len(TOKENS))):
        assert (paged_logits(decoder, cuts=cuts) - expected).abs().max() < 1e-4


class PositionsOffByOne(TorchOps):
    """All tokens but the first are one position too far; shifting all of them would change nothing."""

    def prepare(self, inputs, kv, num_heads, frequencies):
        inputs.positions = inputs.positions + (inputs.positions > 0).long()
        return super().prepare(inputs, kv, num_heads, frequencies)


class NoFinalNorm(TorchOps):
    calls = 0

    def rms_norm_add(self, x, residual, weight, eps):
        normed, residual = super().rms_norm_add(x, residual, weight, eps)
        self.calls += 1
        return (residual if self.calls % 5 == 0 else normed), residual  # 2 layers: the fifth is the last


class NormWithoutWeight(TorchOps):
    def rms_norm_add(self, x, residual, weight, eps):
        return super().rms_norm_add(x, residual, torch.ones_like(weight), eps)


class HeadsInterleaved(TorchOps):
    """Query head h reads KV head h % num_kv_heads instead of h // group."""

    def attention(self, q, layer, kv, context):
        num, heads, size = q.shape
        turned = q.reshape(num, -1, kv.num_kv_heads, size).transpose(1, 2).reshape(num, heads, size)
        out = super().attention(turned, layer, kv, context)
        return out.view(num, kv.num_kv_heads, -1, size).transpose(1, 2).reshape(num, -1)


class UpBeforeGate(TorchOps):
    def silu_mul(self, gate_up):
        return super().silu_mul(gate_up.roll(gate_up.shape[1] // 2, -1))


FAULTS = [PositionsOffByOne, NoFinalNorm, NormWithoutWeight, HeadsInterleaved, UpBeforeGate]


@pytest.mark.parametrize("ops", FAULTS)
def test_planted_faults_fail_the_comparison(ops):
    source = TinyWeights(seed=1)
    logits = paged_logits(Decoder(source.config, ops()).load(source))
    assert (logits - reference_logits(source)).abs().max() > 0.5


def test_the_head_runs_on_the_wanted_rows_only():
    source = TinyWeights()
    decoder = Decoder(source.config).load(source)
    kv = decoder.new_kv(8, 4)
    inputs = inputs_for(TOKENS, 0, len(TOKENS))
    full = decoder.forward(inputs, kv)
    inputs.logits_indices = torch.tensor([3, 13])
    torch.testing.assert_close(decoder.forward(inputs, kv), full[[3, 13]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(dtype):
    source = TinyWeights(seed=1)
    logits = paged_logits(Decoder(source.config, dtype=dtype).load(source))
    assert logits.dtype == dtype
    expected = reference_logits(source)
    cosine = torch.cosine_similarity(logits.float(), expected, dim=-1)
    assert cosine.min() > 0.98


def test_bytes_are_counted_and_a_tied_output_is_one_tensor():
    for tied in (False, True):
        source = TinyWeights(tiny_config(tie_word_embeddings=tied))
        decoder = Decoder(source.config, dtype=torch.bfloat16).load(source)
        numbers = sum(math.prod(source.info(name).shape) for name in source.names())
        assert decoder.nbytes == 2 * numbers
    assert decoder.head.weight.data_ptr() == decoder.embedding.data_ptr()


class Watched(TinyWeights):
    """Notes which tensors that were read are still alive at the next read."""

    def __init__(self):
        super().__init__()
        self.alive_at = {}
        self._read = {}

    def read(self, name, dtype):
        self.alive_at[name] = {other for other, ref in self._read.items() if ref() is not None}
        tensor = super().read(name, dtype)
        self._read[name] = weakref.ref(tensor)
        return tensor


def test_loading_holds_no_part_of_a_fused_matrix_when_it_reads_the_next():
    source = Watched()
    Decoder(source.config).load(source)
    for name, alive in source.alive_at.items():
        assert not any(part in other for other in alive for part in ("q_proj", "k_proj", "gate_proj")), name


def test_a_source_that_does_not_fit_is_named():
    source = TinyWeights()
    source._shapes.pop("model.norm.weight")
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        Decoder(source.config).load(source)


def test_linears_are_made_by_the_caller():
    made = []

    def make_linear(source, names, dtype, device):
        made.append(tuple(names))
        return DenseLinear(torch.cat([source.read(name, dtype) for name in names]))

    source = TinyWeights(seed=1)
    decoder = Decoder(source.config).load(source, make_linear)
    assert len(made) == 2 * 4 + 1
    assert made[-1] == ("lm_head.weight",)
    assert (paged_logits(decoder) - reference_logits(source)).abs().max() < 1e-4
