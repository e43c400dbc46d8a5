"""Every state a block and a request can be in, drawn: shared, cached, reserved, pinned, in host memory; huge pools."""

import itertools
import json
import random
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from pagedinfer.views import budget_svg, chains_svg, details_svg, memory_svg, picture_svg, queues_svg
from pagedinfer.views.budget import budget_words
from pagedinfer.views.chains import chain_rows
from pagedinfer.views.density import density_of, density_words
from pagedinfer.views.film import film_of
from pagedinfer.views.frame import Frame, Memory
from pagedinfer.views.memory import memory_words
from pagedinfer.views.pool import Pool
from pagedinfer.views.raster import png_of
from pagedinfer.views.touched import Touched

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}text")]


def test_shared_cached_and_pinned_blocks(everything):
    blocks = film_of(everything).frame().blocks(4)
    assert [blocks[b].ref_count for b in (0, 1, 2, 3, 4)] == [2, 2, 2, 1, 1]
    assert blocks[0].owners == [(0, 0), (1, 0)]
    assert [b for b, block in blocks.items() if block.is_idle] == [20, 21, 22, 23, 24]
    assert blocks[16].pins == 1
    assert not blocks[16].is_idle
    assert blocks[21].key == 5
    found = texts(picture_svg(everything, panes="blocks"))
    assert found.count("A ×2") == 3
    assert found.count("cache") == 5
    assert found.count("pin") == 1
    for explained in ("shared (× users)", "cached, idle", "reserved"):
        assert explained in found
    assert "13 of 32 blocks in use, 5 cached and idle, 4 tokens each; 2 in host memory" in found


def test_memory_parts_add_up_and_are_named(everything):
    memory = film_of(everything).frame().memory
    assert memory == Memory(34, 2, 56, 13, 12, 20, 8, 2)
    assert memory.slots == 120
    assert memory_words(film_of(everything), 1) == (
        "34 live (12 shared), 2 tail slack, 8 reserved, 20 cached and idle, 56 free of 120 token slots; "
        "KV waste 46.9 %; 2 blocks in host memory"
    )
    found = texts(memory_svg(everything))
    for part in ("live, shared by several requests", "reserved, unused", "cached, idle"):
        assert part in found


def test_the_queues_say_who_is_swapped_out_and_why(everything):
    found = texts(queues_svg(everything))
    assert "Swapped out: 1" in found
    assert "3 running, 0 waiting, 1 swapped out" in found
    assert "swapped out for B, which needs 2 blocks" in found
    assert "Host slots 0, 1." in texts(details_svg(everything, request="C"))


def test_the_budget_bar_counts_by_phase(everything):
    frame = film_of(everything).frame()
    assert budget_words(frame) == "21 of 40 tokens, 1 decode (1 request), 20 prefill (2 requests), 19 unused"
    assert "B 14" in texts(budget_svg(everything))


def test_chains_branch_where_prefixes_part(everything):
    cached = film_of(everything).frame().cached
    assert chain_rows(cached) == [(0, [0, 1, 2]), (2, [20, 21]), (0, [16]), (0, [22, 23]), (1, [24])]
    assert "9 cached blocks in 5 chains" in texts(chains_svg(everything))
    assert "0×2" in texts(chains_svg(everything))


@pytest.mark.parametrize("seed", range(5))
def test_chain_rows_hold_every_key_once_and_follow_the_parents(seed):
    rng = random.Random(seed)
    cached, keys = {}, [-1]
    for key in range(60):
        block = rng.choice([b for b in range(200) if b not in cached])
        cached[block] = (key, rng.choice(keys))
        keys.append(key)
    for block in rng.sample(sorted(cached), 12):  # evicted from the middle: what hung on them begins anew
        del cached[block]
    rows = chain_rows(cached)
    assert sorted(b for _, row in rows for b in row) == sorted(cached)
    for _, row in rows:
        for before, after in itertools.pairwise(row):
            assert cached[after][1] == cached[before][0]
    kept = {key for key, _ in cached.values()}
    assert sum(depth == 0 for depth, _ in rows) == sum(parent not in kept for _, parent in cached.values())


@pytest.mark.parametrize("seed", range(10))
def test_the_accounts_are_those_of_a_recount(seed):
    """`Pool` keeps sums by differences; here everything is counted afresh after each change."""
    rng = random.Random(seed)
    size, pool, tables = 4, Pool(4), {}
    for _ in range(300):
        lane = rng.randrange(6)
        table, computed = tables.get(lane, ([], 0))
        match rng.randrange(5):
            case 0:
                table, computed = [], 0
            case 1:  # grows, perhaps by a block that another has too
                table = [*table, *rng.sample([b for b in range(20) if b not in table], 2)]
            case 2 if table:
                table, computed = table[:-1], min(computed, 4 * len(table) - 4)
            case 3 if table:
                table = [rng.choice([b for b in range(20) if b not in table]), *table[1:]]
        computed = min(computed + rng.randrange(4), size * len(table))
        if table == tables.get(lane, ([], 0))[0]:
            pool.compute(lane, computed)
        else:
            pool.hold(lane, table, computed)
        tables[lane] = (table, computed)
        fills = {}
        for held, done in tables.values():
            for i, b in enumerate(held):
                fills.setdefault(b, []).append(min(size, max(0, done - i * size)))
        live = sum(map(max, fills.values()))
        shared = sum(max(f) for f in fills.values() if len(f) > 1)
        reserved = sum(size for f in fills.values() if not max(f))
        free = (20 - len(fills)) * size
        slack = len(fills) * size - live - reserved
        memory = Memory(live, slack, free, len(fills), shared, 0, reserved)
        assert pool.memory(20, len(fills), 0) == memory
        assert {b: sorted(h.values()) for b, h in pool.holders.items()} == {
            b: sorted(f) for b, f in fills.items()
        }


def test_a_cancelled_plan_makes_the_camera_look_at_everybody():
    event = SimpleNamespace(kind="cancel")
    touched = Touched()
    touched.note(event, {}, lambda: [3, 5])
    assert touched.moved == {3, 5}
    assert touched.queues


def test_an_event_of_an_unknown_kind_makes_it_look_at_everybody_too():
    touched = Touched()
    touched.note(SimpleNamespace(kind="surprise"), {}, lambda: [3, 5])
    assert touched.moved == {3, 5}


def test_a_million_blocks_are_a_density_map(huge_pool):
    recording = huge_pool(1_000_000, 300_000)
    frame = film_of(recording).frame()
    density = density_of(film_of(recording), frame, 0)
    assert density.each == 512
    assert sum(density.live) == 16 * 300_000
    assert sum(density.slots) == 16_000_000
    assert (
        density_words(density) == "512 blocks a cell, live slots in a cell: least 0 %, mean 30 %, most 100 %"
    )
    svg = picture_svg(recording, request="A", panes="blocks")
    assert len(svg) < 150_000
    assert any("mean 30 %" in text for text in texts(svg) if text)
    assert len(png_of(svg)) < 20_000


@pytest.mark.parametrize("num_blocks", [4096, 4097, 16_384])
def test_above_4096_blocks_a_cell_stands_for_several(num_blocks, huge_pool):
    recording = huge_pool(num_blocks, num_blocks)
    density = density_of(film_of(recording), film_of(recording).frame(), -1)
    assert len(density.live) == -(-num_blocks // density.each) <= 2048
    assert set(density.shares()) == {1.0}
    svg = picture_svg(recording, panes="blocks")
    assert len(svg) < 300_000
    assert ("blocks a cell" in svg) == (num_blocks > 4096)


def test_frames_share_tables_and_nothing_else():
    frame = Frame()
    line = {"s": 1, "b": 1, "m": [0, 0, 0, 0], "say": "", "r": {"0": [4, 0, 0]}, "t": {"0": [0, [1, 2]]}}
    frame.apply(line, [])
    twin = frame.copy()
    twin.apply({**line, "t": {"0": [1, [9]]}, "k": [[1, 5, -1]], "i": [[3, 1]]}, [])
    assert frame.rows[0].block_table == [1, 2]
    assert twin.rows[0].block_table == [1, 9]
    assert (frame.cached, frame.pins) == ({}, {})


def test_lines_are_plain_json(everything):
    assert all(json.loads(json.dumps(line)) == line for line in film_of(everything).lines)
