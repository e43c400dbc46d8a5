import random

import pytest
import torch
import torch.nn.functional as F

from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.backends.torch_ops import TILE, DenseLinear, TorchOps, attention_reference, rope_frequencies

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


def attend(kv, inputs, q):
    context = OPS.prepare(inputs, kv, q.shape[1], rope_frequencies(kv.head_dim, 10000.0))
    return OPS.attention(q, 1, kv, context)


def test_long_chunks_are_cut_into_tiles():
    shares = [(TILE - 1, TILE), (TILE, TILE), (TILE + 1, 2 * TILE), (2 * TILE + 3, 2 * TILE + 3), (1, 9)]
    kv, inputs = paged_batch(shares, 16)
    q = torch.randn(sum(inputs.query_lens), 6, 8)
    assert len(OPS.prepare(inputs, kv, 6, rope_frequencies(8, 100.0)).spans[-1].tiles) == 3
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


def test_single_tokens_of_unlike_contexts_are_split():
    shares = [(1, end) for end in (3, 900, 5, 4, 905, 300, 310)]
    kv, inputs = paged_batch(shares, 16)
    q = torch.randn(7, 6, 8)
    spans = OPS.prepare(inputs, kv, 6, rope_frequencies(8, 100.0)).spans
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
    context = OPS.prepare(inputs, kv, 4, rope_frequencies(8, 100.0))
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
    linear = DenseLinear(torch.randn(6, 8))
    torch.testing.assert_close(OPS.linear(x, linear), x @ linear.weight.T)
    torch.testing.assert_close(OPS.head(x, torch.tensor([2, 0]), linear), x[[2, 0]] @ linear.weight.T)
    assert linear.nbytes == 6 * 8 * 4
    assert torch.equal(OPS.embed(torch.tensor([5, 0]), linear.weight), linear.weight[[5, 0]])
