import gc
import weakref

import pytest
import torch

from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.errors import ConfigError, EngineClosed


def make(dtype=torch.float32, **overrides):
    sizes = {"num_layers": 3, "num_blocks": 7, "block_size": 4, "num_kv_heads": 2, "head_dim": 6} | overrides
    return KVStorage(**sizes, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("head_dim", [6, 32])
def test_bytes_per_block_are_the_tensors_own(dtype, head_dim):
    kv = make(dtype, head_dim=head_dim)
    assert kv.bytes_per_block == kv.pool.untyped_storage().nbytes() // kv.num_blocks
    assert kv.total_bytes == kv.num_blocks * kv.bytes_per_block


def test_gather_returns_what_write_stored_through_a_scattered_table():
    kv = make()
    kv.poison()
    table = [5, 0, 3]
    positions = torch.arange(10)
    slots = torch.tensor(table)[positions // 4] * 4 + positions % 4
    stored = torch.randn(3, 10, 2, 2, 6)
    for layer in range(3):
        kv.write(layer, slots, stored[layer])
    for layer in range(3):
        keys, values = kv.gather(layer, table, 10)
        assert torch.equal(keys, stored[layer, :, 0])
        assert torch.equal(values, stored[layer, :, 1])
    assert kv.pool.isnan().sum() == kv.pool.numel() - stored.numel()


def test_copies_run_in_order():
    kv = make()
    kv.pool.copy_(torch.randn(kv.pool.shape))
    before = kv.pool.clone()
    kv.copy([(1, 2), (2, 3)])  # the second reads what the first wrote
    assert torch.equal(kv.pool[:, 2], before[:, 1])
    assert torch.equal(kv.pool[:, 3], before[:, 1])
    assert torch.equal(kv.pool[:, [0, 1, 4, 5, 6]], before[:, [0, 1, 4, 5, 6]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_over_the_host_is_bit_equal(dtype):
    kv = make(dtype)
    kv.pool.copy_(torch.randn(kv.pool.shape))
    before = kv.pool.clone()
    data = kv.read_out([6, 2])
    kv.poison()
    assert torch.equal(data[0], before[:, [6, 2]])  # a copy, not a view of the pool
    kv.write_in([1, 4], data)
    assert torch.equal(kv.pool[:, [1, 4]], before[:, [6, 2]])
    assert kv.pool[:, [0, 2, 3, 5, 6]].isnan().all()


@pytest.mark.parametrize("num_blocks", [1, 3, 7, 12])
def test_a_new_size_keeps_the_blocks_that_stay(num_blocks):
    kv = make()
    kv.pool.copy_(torch.randn(kv.pool.shape))
    before, kept = kv.pool.clone(), min(num_blocks, 7)
    kv.resize(num_blocks)
    assert kv.num_blocks == num_blocks == kv.total_bytes // kv.bytes_per_block
    assert torch.equal(kv.pool[:, :kept], before[:, :kept])
    assert not kv.pool[:, kept:].any()
    last = torch.tensor([num_blocks * 4 - 1])
    kv.write(1, last, torch.ones(1, 2, 2, 6))  # the views of the layers are of the new pool
    assert (kv.pool[1, -1, 3] == 1.0).all()
    assert kv.slots(1).shape[0] == num_blocks * 4


def test_a_new_size_beyond_the_machine_leaves_the_pool_as_it_was():
    kv = make()
    pool = kv.pool
    with pytest.raises(ConfigError, match="ask for fewer blocks"):
        kv.resize(10**14)
    assert kv.pool is pool
    assert kv.num_blocks == 7


def test_poison_of_an_integer_pool_is_its_largest_number():
    kv = make(torch.int8)
    kv.poison()
    assert (kv.pool == 127).all()


def test_close_frees_the_pool_and_may_be_repeated():
    kv = make()
    pool = weakref.ref(kv.pool)
    kv.close()
    kv.close()
    gc.collect()
    assert pool() is None
    assert kv.total_bytes == 0
    with pytest.raises(EngineClosed, match="freed"):
        _ = kv.pool


def test_a_pool_beyond_the_machine_is_a_sentence_with_the_bytes():
    with pytest.raises(ConfigError, match=r"needs [\d,]+ bytes.*fewer blocks"):
        make(num_blocks=10**14)
