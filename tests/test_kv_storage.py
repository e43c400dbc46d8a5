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
