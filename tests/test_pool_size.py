import pytest
import torch

from pagedinfer.errors import ConfigError
from pagedinfer.runner import pool_size
from pagedinfer.runner.pool_size import check_pool_size, choose_num_blocks, memory_limit_bytes

CPU = torch.device("cpu")
GIB = 1 << 30


def choose(**options):
    facts = {
        "bytes_per_block": 1000,
        "block_size": 16,
        "max_model_len": 160,
        "max_num_seqs": 8,
        "weight_bytes": 5000,
        "device": CPU,
    }
    return choose_num_blocks(**(facts | options))


@pytest.fixture
def limit(monkeypatch):
    def set_limit(num_bytes):
        monkeypatch.setattr(pool_size, "memory_limit_bytes", lambda device: num_bytes)

    return set_limit


def test_a_number_of_blocks_is_taken_as_it_is():
    assert choose(num_blocks=7) == 7


def test_bytes_are_rounded_down():
    assert choose(kv_cache_bytes=2999) == 2
    assert choose(kv_cache_bytes=1000) == 1
    with pytest.raises(
        ConfigError, match="kv_cache_bytes=999: one block of 16 tokens takes 1000 bytes; give more"
    ):
        choose(kv_cache_bytes=999)


def test_a_share_counts_weights_and_pool_together(limit):
    limit(100_000)
    assert choose(memory_share=0.5) == 45
    assert choose(memory_share=1) == 95
    with pytest.raises(
        ConfigError, match=r"gpu_memory_utilization=0.05 leaves 0 bytes beside the weights' 5000"
    ):
        choose(memory_share=0.05)


def test_by_default_what_all_seats_could_fill_up_to_a_tenth(limit):
    limit(GIB)
    assert choose() == 8 * 10
    assert choose(max_model_len=161) == 8 * 11
    limit(500_000)
    assert choose() == 50
    limit(5_000)
    assert choose() == 1


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_blocks": 4, "kv_cache_bytes": 4}, "num_blocks and kv_cache_bytes both"),
        ({"num_blocks": 4, "memory_share": 0.5}, "num_blocks and gpu_memory_utilization both"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"num_blocks": True}, "num_blocks=True"),
        ({"kv_cache_bytes": "4GB"}, "kv_cache_bytes='4GB'"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes=-1"),
        ({"kv_cache_bytes": 1.5}, "kv_cache_bytes=1.5"),
        ({"memory_share": 0}, "gpu_memory_utilization=0"),
        ({"memory_share": 1.01}, "gpu_memory_utilization=1.01"),
        ({"memory_share": float("nan")}, "gpu_memory_utilization=nan"),
        ({"memory_share": "half"}, "gpu_memory_utilization='half'"),
        ({"memory_share": True}, "gpu_memory_utilization=True"),
    ],
)
def test_sizes_that_make_no_sense_are_named(sizes, words):
    with pytest.raises(ConfigError, match=words):
        check_pool_size(**sizes)
    with pytest.raises(ConfigError, match=words):
        choose(**sizes)


def test_the_limit_is_the_containers_where_there_is_one(monkeypatch):
    files = {}
    monkeypatch.setattr(pool_size, "_read_int", lambda path: files.get(str(path), 0))
    monkeypatch.setattr(pool_size, "_machine_bytes", lambda: 8 * GIB)
    assert memory_limit_bytes(CPU) == 8 * GIB
    files["/sys/fs/cgroup/memory.max"] = 2 * GIB
    assert memory_limit_bytes(CPU) == 2 * GIB
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = GIB
    assert memory_limit_bytes(CPU) == GIB
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = (
        1 << 63
    )  # version 1 writes "no limit" as a huge number
    assert memory_limit_bytes(CPU) == 2 * GIB


def test_files_that_hold_no_number_are_no_limit(tmp_path):
    file = tmp_path / "memory.max"
    assert pool_size._read_int(file) == 0
    file.write_text("max\n")
    assert pool_size._read_int(file) == 0
    file.write_text("1234\n")
    assert pool_size._read_int(file) == 1234


def test_this_machine_has_memory():
    assert 100 << 20 < memory_limit_bytes(CPU) < 1 << 50
