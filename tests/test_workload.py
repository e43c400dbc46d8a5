"""Traces of production services, and their serial replay through the real scheduler and prefix cache."""

import json
from collections import OrderedDict
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest

from pagedinfer.errors import RequestTooLong, WorkloadError
from pagedinfer.sim.replay_trace import replay_through_cache
from pagedinfer.trace.workload import TraceRequest, read_azure, read_mooncake, read_workload

TRACES = Path(__file__).parents[2] / "shared" / "traces"


@pytest.fixture(scope="module")
def trace():
    """A published trace by its file's name."""

    def read(name):
        if not (TRACES / name).exists():
            pytest.skip("the published traces lie beside the development checkout only")
        return read_workload(TRACES / name)

    return read


# -- reading ----------------------------------------------------------------------------------------------------------


def write(folder, name, *lines):
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def mooncake_line(**changes):
    row = {"timestamp": 1000, "input_length": 1300, "output_length": 7, "hash_ids": [5, 6, 9]} | changes
    return json.dumps({name: value for name, value in row.items() if value is not ...})


def test_mooncake_lines_become_requests_without_the_partly_filled_block(tmp_path):
    path = write(
        tmp_path, "m.jsonl", mooncake_line(), "", mooncake_line(timestamp=3500, input_length=1024, hash_ids=[5, 6])
    )  # fmt: skip
    assert read_mooncake(path) == [TraceRequest(0.0, 1300, 7, (5, 6)), TraceRequest(2.5, 1024, 7, (5, 6))]
    assert read_workload(path, limit=1) == read_mooncake(path)[:1]


def test_azure_lines_become_requests(tmp_path):
    times = [
        "2024-02-28 23:59:59.9999999",
        "2024-02-29 00:00:00",
        "2024-03-01 00:00:00.5",
        "2025-01-01 12:30:15.25",
    ]
    path = write(tmp_path, "a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{t},30,4" for t in times))
    requests = read_azure(path)
    assert requests[0] == TraceRequest(0.0, 30, 4)
    assert requests[1].arrival == 1e-7
    began = datetime.fromisoformat("2024-02-28 23:59:59.999999")
    for request, text in zip(requests, times, strict=True):
        expected = (datetime.fromisoformat(text[:26]) - began).total_seconds()
        assert request.arrival == pytest.approx(expected, abs=2e-6)
    assert read_azure(path, limit=2) == requests[:2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"m.jsonl, line 2, is not JSON"),
        ("[1]", "is a list; a Mooncake trace has one object per line"),
        (mooncake_line(input_length=0), "input_length 0; it must be an integer of at least 1"),
        (mooncake_line(output_length=True), "output_length True"),
        (mooncake_line(output_length=...), "output_length None"),
        (mooncake_line(timestamp="0"), "timestamp '0'; it must be milliseconds"),
        (mooncake_line(hash_ids=[1, 2]), "2 hash_ids for 1300 prompt tokens; blocks of 512 make 3"),
        (mooncake_line(hash_ids=[1, 2, "3"]), "hash_ids .*list of integers"),
    ],
)
def test_a_wrong_mooncake_line_is_a_sentence(tmp_path, line, words):
    with pytest.raises(WorkloadError, match=words):
        read_mooncake(write(tmp_path, "m.jsonl", mooncake_line(), line))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["TIMESTAMP,Tokens"], "begins with 'TIMESTAMP,Tokens'; an Azure trace begins with"),
        ([], "begins with ''"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,3"], "line 2, has 2 fields"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,3,4"], "TIMESTAMP 'yesterday'; it must look like"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,3,x"], "GeneratedTokens 'x'"),
    ],
)  # fmt: skip
def test_a_wrong_azure_line_is_a_sentence(tmp_path, lines, words):
    with pytest.raises(WorkloadError, match=words):
        read_azure(write(tmp_path, "a.csv", *lines))


def test_other_files_are_refused(tmp_path):
    with pytest.raises(WorkloadError, match=r"x\.json: give a Mooncake trace \(\.jsonl\)"):
        read_workload(tmp_path / "x.json")
    (tmp_path / "m.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(WorkloadError, match="is not text"):
        read_workload(tmp_path / "m.jsonl")


@pytest.mark.parametrize(("name", "number", "seconds"), [("conv", 19_366, 3501), ("code", 8_819, 3435)])
def test_the_azure_traces(trace, name, number, seconds):
    requests = trace(f"azure_2023_{name}.csv")
    assert len(requests) == number
    assert int(requests[-1].arrival) == seconds
    assert all(a.arrival <= b.arrival for a, b in pairwise(requests))


# -- replay -----------------------------------------------------------------------------------------------------------


def test_a_replay_by_hand():
    requests = [
        TraceRequest(0.0, 1100, 5, (1, 2)),
        TraceRequest(1.0, 1536, 5, (1, 2, 3)),
        TraceRequest(
            2.0, 1536, 5, (1, 2, 3)
        ),  # all is there; the last token is computed, so its block is too
        TraceRequest(3.0, 600, 5, (4,)),
    ]
    replayed = replay_through_cache(requests)
    assert replayed.hits == (0, 1024, 1024, 0)
    assert replayed.block_hit_rate == 4 / 9
    assert replayed.token_hit_rate == 2048 / (1100 + 1536 + 1536 + 600)
    assert replay_through_cache(requests, num_blocks=3).hits == (0, 1024, 1024, 0)
    assert replay_through_cache([]).token_hit_rate == replay_through_cache([]).block_hit_rate == 0.0
    with pytest.raises(RequestTooLong):
        replay_through_cache(requests, num_blocks=2)


@pytest.mark.parametrize(
    ("name", "means", "by_blocks", "by_tokens"),
    [
        ("conversation", (12_031, 12_035, 343), 38.190, 37.338),
        ("synthetic", (3_993, 15_325, 149), 65.944, 65.043),
    ],
)
def test_serial_replay_gives_the_published_ratios(trace, name, means, by_blocks, by_tokens):
    requests = trace(f"mooncake_{name}.jsonl")
    number = len(requests)
    totals = (sum(r.num_prompt_tokens for r in requests), sum(r.num_output_tokens for r in requests))
    assert (number, *(round(total / number) for total in totals)) == means
    replayed = replay_through_cache(requests)
    assert round(100 * replayed.block_hit_rate, 3) == by_blocks
    assert round(100 * replayed.token_hit_rate, 3) == by_tokens


def lru_hits(requests, num_blocks, size=512):
    """The reference: a dict in the order of last use, chains put back tail first."""
    cache, hits = OrderedDict(), []
    for request in requests:
        ids, needed = request.key_ids, -(-request.num_prompt_tokens // size)
        limit = (request.num_prompt_tokens - 1) // size
        found = next((i for i, key in enumerate(ids[:limit]) if key not in cache), min(limit, len(ids)))
        hits.append(found * size)
        for key in ids[:found]:
            del cache[key]
        while len(cache) + needed > num_blocks:
            cache.popitem(last=False)
        cache.update((key, None) for key in reversed(ids) if key not in cache)
    return tuple(hits)


@pytest.mark.parametrize("num_blocks", [400, 1_000, 3_000, 8_000, 20_000])
def test_a_bounded_cache_equals_the_reference(trace, num_blocks):
    requests = trace("mooncake_synthetic.jsonl")
    replayed = replay_through_cache(requests, num_blocks=num_blocks)
    assert replayed.hits == lru_hits(requests, num_blocks)
    assert 0 < replayed.block_hit_rate < 0.65943  # it had to evict


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [300, 1_000, 5_000, 20_000, 60_000])
def test_a_bounded_cache_equals_the_reference_on_the_long_trace(trace, num_blocks):
    requests = trace("mooncake_conversation.jsonl")
    assert replay_through_cache(requests, num_blocks=num_blocks).hits == lru_hits(requests, num_blocks)
