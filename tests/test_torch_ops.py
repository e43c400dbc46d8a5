import random

import pytest
import torch
import torch.nn.functional as F

from pagedinfer.backends.attention import TILE, AttentionRule, attention_reference
from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.backends.torch_ops import BiasedLinear, DenseLinear, TorchOps, rope_frequencies

OPS = TorchOps()


def paged_batch(shares, block_size, *, kv_heads=2, head_dim=8, dtype=torch.float32, seed=0, spare=3):
    """A poisoned pool with scattered tables holding random keys and values for (query_len, end) shares."""
    torch.manual_seed(seed)
    shares = sorted(shares, key=lambda share: share[1] if share[0] == 1 else 10**9)
    blocks = [-(-end // block_size) for _, end in shares]
    ids = list(range(sum(blocks) + spare))
    random.Random(seed).shuffle(ids)
    kv = KVStorage(
        num_layers=2,
        num_blocks=len(ids),
        block_size=block_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    kv.poison()
    tables = torch.full((len(shares), max(blocks) + 1), -1)
    positions, slots = [], []
    for row, (num, end) in enumerate(shares):
        tables[row, : blocks[row]] = torch.tensor([ids.pop() for _ in range(blocks[row])])
        where = torch.arange(end)
        mine = tables[row, where // block_size] * block_size + where % block_size
        kv.write(1, mine, torch.randn(end, 2, kv_heads, head_dim).to(dtype))
        positions.append(where[end - num :])
        slots.append(mine[end - num :])
    lens = [num for num, _ in shares]
    start = torch.tensor([0, *lens]).cumsum(0)
    inputs = ModelInputs(
        token_ids=torch.zeros(sum(lens), dtype=torch.int64),
        positions=torch.cat(positions),
        slot_mapping=torch.cat(slots),
        query_start=start,
        context_lens=torch.tensor([end for _, end in shares]),
        block_tables=tables,
        logits_indices=start[1:] - 1,
        query_lens=lens,
        ends=[end for _, end in shares],
        num_single=lens.count(1),
    )
    return kv, inputs


def attend(kv, inputs, q, **rule):
    frequencies = rope_frequencies(kv.head_dim, 10000.0)
    context = OPS.prepare(inputs, kv, q.shape[1], AttentionRule(frequencies, **rule))
    return OPS.attention(q, 1, kv, context)


def test_long_chunks_are_cut_into_tiles():
    shares = [(TILE - 1, TILE), (TILE, TILE), (TILE + 1, 2 * TILE), (2 * TILE + 3, 2 * TILE + 3), (1, 9)]
    kv, inputs = paged_batch(shares, 16)
    q = torch.randn(sum(inputs.query_lens), 6, 8)
    assert len(OPS.prepare(inputs, kv, 6, AttentionRule(rope_frequencies(8, 100.0))).spans[-1].tiles) == 3
    torch.testing.assert_close(
        attend(kv, inputs, q), attention_reference(q, 1, kv, inputs), rtol=1e-5, atol=1e-5
    )


def shares_around(block_size):
    """Lengths 1 to 2 * block_size + 1 (all, or those around the edges), as decodes and as chunks."""
    lengths = range(1, 2 * block_size + 2)
    if block_size > 3:
        lengths = sorted(
            {1, 2, block_size - 1, block_size, block_size + 1, 2 * block_size, 2 * block_size + 1}
        )
    shares = [(1, end) for end in lengths]
    for end in lengths:
        shares += [(num, end) for num in {2, 3, end // 2, end - 1, end} if 1 < num <= min(end, 40)]
    return shares


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_the_reference(block_size, group, dtype):
    shares = shares_around(block_size)
    if block_size == 256:  # the reference takes one token at a time
        shares = [share for share in shares if share[0] < 4]
    kv, inputs = paged_batch(shares, block_size, dtype=dtype, seed=group)
    q = (2 * torch.randn(sum(inputs.query_lens), 2 * group, 8)).to(dtype)
    expected = attention_reference(q, 1, kv, inputs)
    assert not expected.isnan().any()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attend(kv, inputs, q), expected, rtol=tolerance, atol=tolerance)


RULES = {
    "window of 1": {"window": 1},
    "window of 2": {"window": 2},
    "window of a tile and a half": {"window": TILE + TILE // 2 - 1},
    "window as long as the longest": {"window": 3 * TILE + 2},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "all": {"window": 20, "scale": 0.7, "softcap": 1.5},
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_windows_and_caps_equal_the_reference(rule, block_size):
    shares = [(1, end) for end in (1, 2, 19, 20, 21, TILE, 3 * TILE + 2, 700)]
    shares += [
        (num, end) for end in (2, 21, TILE + 5, 3 * TILE + 2) for num in {2, 20, TILE + 1, end} if num <= end
    ]
    kv, inputs = paged_batch(shares, block_size, seed=block_size)
    q = 2 * torch.randn(sum(inputs.query_lens), 6, 8)
    expected = attention_reference(q, 1, kv, inputs, AttentionRule(**rule))
    got = attend(kv, inputs, q, **rule)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(attend(kv, inputs, q), expected, atol=1e-2)
    for field in {"window", "softcap"} & rule.keys():
        off = rule | {field: rule[field] + 1}
        if rule[field] < 3 * TILE:
            assert not torch.allclose(attend(kv, inputs, q, **off), expected, atol=1e-3), field


def test_a_window_gathers_no_more_than_it_sees():
    kv, inputs = paged_batch([(1, 900), (1, 5), (100, 900)], 16)
    spans = OPS.prepare(inputs, kv, 6, AttentionRule(window=10)).spans
    assert [span.length for span in spans] == [10, 109]
    assert max(tile.mask.shape[-1] for tile in spans[1].tiles) == TILE + 9


def test_keys_before_the_window_change_no_bit():
    kv, inputs = paged_batch([(1, 40), (5, 40), (20, 20)], 4)
    q = torch.randn(26, 4, 8)
    clean = attend(kv, inputs, q, window=6)
    old = inputs.block_tables[:2, :7].flatten()  # tokens 0 to 27; the first token of the chunk is number 35
    kv.pool[1, old] = float("nan")
    assert torch.equal(attend(kv, inputs, q, window=6), clean)


def test_single_tokens_of_unlike_contexts_are_split():
    shares = [(1, end) for end in (3, 900, 5, 4, 905, 300, 310)]
    kv, inputs = paged_batch(shares, 16)
    q = torch.randn(7, 6, 8)
    spans = OPS.prepare(inputs, kv, 6, AttentionRule(rope_frequencies(8, 100.0))).spans
    assert [span.length for span in spans] == [5, 310, 905]
    torch.testing.assert_close(
        attend(kv, inputs, q), attention_reference(q, 1, kv, inputs), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("shares", [[(1, 9)], [(5, 5)], [(3, 9)], [(1, 1), (1, 33), (2, 17), (7, 7)]])
def test_unused_slots_and_table_entries_change_no_bit(shares):
    kv, inputs = paged_batch(shares, 4, seed=3)
    q = torch.randn(sum(inputs.query_lens), 4, 8)
    clean = attend(kv, inputs, q)
    assert clean.isfinite().all()
    unused = kv.pool[1].isnan()
    assert unused.any()
    kv.pool[1][unused] = 1e30
    inputs.block_tables[inputs.block_tables < 0] = 0  # somebody else's block
    assert torch.equal(attend(kv, inputs, q), clean)


def test_a_poisoned_request_leaves_its_neighbours_alone():
    kv, inputs = paged_batch([(1, 6), (1, 9), (4, 8), (3, 3)], 4)
    q = torch.randn(sum(inputs.query_lens), 4, 8)
    clean = attend(kv, inputs, q)
    kv.write(1, inputs.slot_mapping[:1], torch.full((1, 2, 2, 8), float("nan")))
    result = attend(kv, inputs, q)
    assert result[0].isnan().all()
    assert torch.equal(result[1:], clean[1:])


def test_the_comparison_catches_planted_faults():
    kv, inputs = paged_batch([(1, 9), (1, 6), (4, 7)], 4)
    q = torch.randn(6, 4, 8)
    expected = attention_reference(q, 1, kv, inputs)
    assert torch.allclose(attend(kv, inputs, q), expected, atol=1e-5)
    swapped = q.view(6, 2, 2, 8).transpose(1, 2).reshape(6, 4, 8)  # heads of a group taken from the other
    assert not torch.allclose(attend(kv, inputs, swapped), expected, atol=1e-2)
    row = inputs.ends.index(9)
    inputs.ends[row] -= 1  # the newest key is not seen
    inputs.context_lens[row] -= 1
    assert not torch.allclose(attend(kv, inputs, q), expected, atol=1e-2)
    inputs.ends[row] += 1
    inputs.context_lens[row] += 1
    inputs.block_tables[row, 1:3] = inputs.block_tables[row, 1:3].flip(
        0
    )  # the unfinished block in the middle
    assert not torch.allclose(attend(kv, inputs, q), expected, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_and_cache_rotates_and_stores(dtype):
    kv, inputs = paged_batch([(1, 9), (3, 7)], 4, dtype=dtype)
    qkv = torch.randn(4, (4 + 2 * 2) * 8).to(dtype)
    heads = qkv.clone().view(4, 8, 8).double()
    context = OPS.prepare(inputs, kv, 4, AttentionRule(rope_frequencies(8, 100.0)))
    q = OPS.rope_and_cache(qkv, 1, kv, context)
    # Each pair (i, i + 4) turns by position * 100 ** (-i / 4), written with complex numbers.
    angles = inputs.positions[:, None, None] * 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(heads[..., :4], heads[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), -1)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    torch.testing.assert_close(q.double(), expected[:, :4], **tolerance)
    stored = kv.slots(1)[inputs.slot_mapping].double()
    torch.testing.assert_close(stored[:, 0], expected[:, 4:6], **tolerance)
    torch.testing.assert_close(stored[:, 1], heads[:, 6:], rtol=0, atol=0)


@pytest.mark.parametrize(("turning", "magnitude"), [(4, 1.0), (8, 1.3), (0, 1.0)])
def test_rotary_may_turn_a_part_and_stretch_it(turning, magnitude):
    kv, inputs = paged_batch([(1, 9), (3, 7)], 4)
    qkv = torch.randn(4, 8 * 8)
    heads = qkv.clone().view(4, 8, 8).double()
    rule = AttentionRule(rope_frequencies(turning, 100.0), magnitude) if turning else AttentionRule()
    q = OPS.rope_and_cache(qkv, 1, kv, OPS.prepare(inputs, kv, 4, rule))
    half = turning // 2
    expected = heads.clone()
    if turning:
        angles = inputs.positions[:, None, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        pairs = torch.complex(heads[..., :half], heads[..., half:turning])
        turned = pairs * torch.polar(torch.full_like(angles, magnitude), angles)
        expected[:, :6, :turning] = torch.cat((turned.real, turned.imag), -1)[:, :6]
    torch.testing.assert_close(q.double(), expected[:, :4], rtol=1e-5, atol=1e-5)
    stored = kv.slots(1)[inputs.slot_mapping].double()
    torch.testing.assert_close(stored, expected[:, 4:].view(4, 2, 2, 8), rtol=1e-5, atol=1e-5)


def test_norms_of_queries_and_keys():
    qkv, q_weight, k_weight = torch.randn(3, (4 + 2 + 2) * 8), torch.randn(8), torch.randn(8)
    expected = qkv.clone().view(3, 8, 8)
    expected[:, :4] = F.rms_norm(expected[:, :4], (8,), q_weight, 1e-5)
    expected[:, 4:6] = F.rms_norm(expected[:, 4:6], (8,), k_weight, 1e-5)
    OPS.qk_norm(qkv, q_weight, k_weight, [32, 16, 16], 1e-5)
    torch.testing.assert_close(qkv, expected.flatten(1))
    whole, q_weight, k_weight = qkv.clone(), torch.randn(32), torch.randn(16)
    OPS.qk_norm(whole, q_weight, k_weight, [32, 16, 16], 1e-5)
    torch.testing.assert_close(whole[:, :32], F.rms_norm(qkv[:, :32], (32,), q_weight, 1e-5))
    torch.testing.assert_close(whole[:, 32:48], F.rms_norm(qkv[:, 32:48], (16,), k_weight, 1e-5))
    assert torch.equal(whole[:, 48:], qkv[:, 48:])


@pytest.mark.parametrize("normalized", [False, True])
def test_experts_sum_what_each_token_chose(normalized):
    x, scores = torch.randn(9, 8), torch.randn(9, 5)
    each = [DenseLinear(torch.randn(8, 8)) for _ in range(5)]
    weights, chosen = OPS.route(scores, 2, normalized)
    got = OPS.experts(x, weights, chosen, each)
    for row in range(9):
        shares = scores[row].softmax(0)
        best = shares.argsort(descending=True)[:2].tolist()
        total = shares[best].sum() if normalized else 1.0
        expected = sum(shares[e] / total * each[e](x[row]) for e in best)
        torch.testing.assert_close(got[row], expected)
    calls = []
    OPS.experts(x[:1], weights[:1], chosen[:1], [lambda part: calls.append(len(part)) or part] * 5)
    assert calls == [1, 1]  # nobody asks an expert that nobody chose


def test_norm_weights_may_be_finer_than_the_model():
    x, weight = torch.randn(3, 8).bfloat16(), 1 + 1e-3 * torch.randn(8)
    normed = OPS.rms_norm(x, weight, 1e-5)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed, F.rms_norm(x.float(), (8,), weight, 1e-5).bfloat16())


def test_the_small_ops():
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    normed, stream = OPS.rms_norm_add(x, residual, weight, 1e-5)
    torch.testing.assert_close(stream, total)
    torch.testing.assert_close(normed, total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight)
    first, stream = OPS.rms_norm_add(x, None, weight, 1e-5)
    torch.testing.assert_close(first, F.rms_norm(x, (8,), weight, 1e-5))
    assert stream is x
    gate_up = torch.randn(3, 10)
    torch.testing.assert_close(OPS.silu_mul(gate_up), F.silu(gate_up[:, :5]) * gate_up[:, 5:])
    torch.testing.assert_close(
        OPS.gelu_mul(gate_up), F.gelu(gate_up[:, :5], approximate="tanh") * gate_up[:, 5:]
    )
    torch.testing.assert_close(OPS.gelu(gate_up), F.gelu(gate_up, approximate="tanh"))
    bias = torch.randn(8)
    normed, stream = OPS.layer_norm_add(x.clone(), residual.clone(), weight, bias, 1e-5)
    torch.testing.assert_close(stream, x + residual)
    torch.testing.assert_close(normed, F.layer_norm(stream, (8,), weight, bias, 1e-5))
    linear = DenseLinear(torch.randn(6, 8))
    biased = BiasedLinear(linear, torch.randn(6))
    torch.testing.assert_close(OPS.linear(x, biased), x @ linear.weight.T + biased.bias)
    assert biased.nbytes == 6 * 8 * 4 + 6 * 4
    torch.testing.assert_close(OPS.linear(x, linear), x @ linear.weight.T)
    torch.testing.assert_close(OPS.head(x, torch.tensor([2, 0]), linear), x[[2, 0]] @ linear.weight.T)
    assert linear.nbytes == 6 * 8 * 4
    assert torch.equal(OPS.embed(torch.tensor([5, 0]), linear.weight), linear.weight[[5, 0]])
