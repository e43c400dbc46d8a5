"""The memory-waste comparison: order and bands on the bundled excerpt, every number against a slow twin."""

from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from pagedinfer.cli import main
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import ConfigError, RequestTooLong
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.sim.waste import EXCERPT, STRATEGIES, WASTE_CONFIG, waste_table
from pagedinfer.trace.measures import external_fragmentation, free_extents, slots_of
from pagedinfer.trace.workload import TraceRequest, read_azure

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "azure_2023_conv.csv"
SMALL = replace(WASTE_CONFIG, num_blocks=256, max_model_len=2048)
MAXIMUM, POW2, BUDDY, FIRST, BEST, PAGED = STRATEGIES


def by_strategy(table):
    return {row["strategy"]: row for row in table.rows()}


def assert_bands(rows):
    """In kind what the paper shows: reserving leaves most of the memory without tokens, paging next to none."""
    tokens = {name: row["tokens"] for name, row in rows.items()}
    assert 0.1 < tokens[MAXIMUM] < 0.2
    assert 0.45 < tokens[POW2] < tokens[BUDDY] < 0.6
    assert 0.7 < tokens[FIRST] < 0.8
    assert 0.7 < tokens[BEST] < 0.8
    assert tokens[PAGED] > 0.95
    assert 1 - rows[PAGED]["tokens_of_allocated"] < 0.01
    assert rows[PAGED]["reserved"] == rows[PAGED]["external_fragmentation"] == 0
    assert 1 - rows[MAXIMUM]["tokens_of_allocated"] > 0.8
    for row in rows.values():
        parts = row["tokens"] + row["reserved"] + row["tail_slack"] + row["free"]
        assert parts == pytest.approx(1)
        assert row["short_steps"] > row["steps"] / 3
    batch = [rows[name]["batch"] for name in (MAXIMUM, POW2, BUDDY, FIRST, PAGED)]
    finished = [rows[name]["finished"] for name in (MAXIMUM, POW2, BUDDY, FIRST, PAGED)]
    assert batch == sorted(batch)
    assert finished == sorted(finished)
    assert batch[0] == 16  # 8,192 blocks in extents of 512
    assert finished[-1] > 2 * finished[0]
    assert [name for name, row in rows.items() if row["preemptions"]] == [PAGED]


def test_on_the_bundled_excerpt():
    requests = read_azure(EXCERPT)
    assert len(requests) == 500
    assert_bands(by_strategy(waste_table(requests)))


@pytest.mark.slow
def test_on_the_trace():
    if not TRACE.exists():
        pytest.skip(f"the Azure trace is not at {TRACE}; the excerpt is tested")
    assert_bands(by_strategy(waste_table(read_azure(TRACE, limit=4000))))


def test_the_excerpt_is_the_trace_s_beginning():
    if not TRACE.exists():
        pytest.skip(f"the Azure trace is not at {TRACE}")
    text = EXCERPT.read_bytes()
    assert TRACE.read_bytes().startswith(text)
    assert text.count(b"\n") == 501
    assert "CC-BY 4.0" in EXCERPT.with_name("README.md").read_text(encoding="utf-8")


def slow_row(requests, strategy, config, seconds_per_step):
    """The twin: no events, no state; the allocator's own books, walked through, and the plan's own sentences."""
    scheduler, runner = Scheduler(replace(config, allocator=strategy.allocator)), SimulatedRunner()
    coming, lengths, size = deque(enumerate(requests)), {}, config.block_size
    pool, found, preempted = config.num_blocks * size, [], 0
    while coming:
        now = (scheduler.step + 1) * seconds_per_step
        while coming and coming[0][1].arrival <= now:
            number, traced = coming.popleft()
            most = lengths[str(number)] = traced.num_output_tokens
            while strategy.rounds_output and most & (most - 1):
                most += 1
            scheduler.submit(Request(str(number), traced.num_prompt_tokens, most), now)
        plan = scheduler.schedule(now)
        preempted += len(plan.preempted)
        produced = {rid: request.num_output_tokens + 1 for rid, request in scheduler.requests.items()}
        ends = {i.request_id: ("stop", "") for i in plan.scheduled if i.samples}
        ends = {rid: end for rid, end in ends.items() if produced[rid] == lengths[rid]}
        waiting = [request.request_id for request in scheduler.waiting]
        why = [plan.reasons[rid] for rid in waiting if rid in plan.reasons]
        if any(reason.startswith("needs ") or "preempted in this step" in reason for reason in why):
            tables, computed = scheduler.blocks.tables, {}
            for rid in tables:
                computed[rid] = scheduler.requests[rid].num_computed_tokens
            slots = slots_of(tables, computed, size)
            free = set(range(config.num_blocks)) - {block for table in tables.values() for block in table}
            found.append((
                1 - slots.kv_waste, slots.live / pool, slots.reserved / pool, slots.tail_slack / pool,
                len(free) * size / pool,
                0.0 if strategy.allocator == "paged" else external_fragmentation(free_extents(free)),
                len(plan.scheduled),
            ))  # fmt: skip
        scheduler.commit(plan, runner.execute(plan), ends)
    means = [sum(column) / len(found) for column in zip(*found, strict=True)]
    return [*means, scheduler.queues.num_finished, preempted, len(found), scheduler.step]


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_number_is_what_a_slow_twin_counts(name):
    requests = [r for r in read_azure(EXCERPT, limit=80) if r.num_prompt_tokens + r.num_output_tokens <= 2048]
    (row,) = waste_table(requests, SMALL, seconds_per_step=0.3, strategies={name: STRATEGIES[name]}).rows()
    assert row["short_steps"] > 40
    assert list(row.values())[1:] == pytest.approx(slow_row(requests, STRATEGIES[name], SMALL, 0.3))


def test_a_small_story_by_hand():
    """Four blocks of 2, each request reserves all of them: 5, 6, then 3 tokens are in 8 slots, while another waits."""
    requests = [TraceRequest(0.0, 5, 2), TraceRequest(0.0, 3, 1), TraceRequest(3.0, 1, 1)]
    config = replace(WASTE_CONFIG, num_blocks=4, block_size=2, max_model_len=8)
    table = waste_table(requests, config, seconds_per_step=1.0, strategies={"all": STRATEGIES[MAXIMUM]})
    (row,) = table.rows()
    assert row == {
        "strategy": "all", "tokens_of_allocated": pytest.approx(14 / 24), "tokens": pytest.approx(14 / 24),
        "reserved": pytest.approx(8 / 24), "tail_slack": pytest.approx(2 / 24), "free": 0.0,
        "external_fragmentation": 0.0, "batch": 1.0, "finished": 2, "preemptions": 0, "short_steps": 3, "steps": 3,
    }  # fmt: skip


def test_where_memory_is_never_short_there_is_no_mean():
    requests = [
        TraceRequest(0.0, 100, 3),
        TraceRequest(9.0, 9000, 1),
    ]  # the second is too long for the context
    table = waste_table(requests, seconds_per_step=1.0)
    assert set(table["tokens"]) == set(table["batch"]) == {None}
    assert set(table["short_steps"]) == {0}
    assert table.types["tokens"] is float


def test_what_is_refused():
    requests = read_azure(EXCERPT, limit=3)
    for seconds in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="seconds_per_step"):
            waste_table(requests, seconds_per_step=seconds)
    with pytest.raises(RequestTooLong, match="the whole pool has 100"):
        waste_table(requests, replace(WASTE_CONFIG, num_blocks=100))


def test_the_command(capsys):
    arguments = ["waste", "--requests", "60", "--num-blocks", "256", "--max-model-len", "2048"]
    assert main([*arguments, "--seconds-per-step", "0.3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    longer = sum(r.num_prompt_tokens + r.num_output_tokens > 2048 for r in read_azure(EXCERPT, limit=60))
    assert longer
    assert out.startswith(f"azure_2023_conv.csv, 60 requests; {longer} of more than 2,048 tokens")
    table = waste_table(read_azure(EXCERPT, limit=60), SMALL, seconds_per_step=0.3)
    assert out.endswith(f"{table!r}\n")
    assert main(["waste", "--requests", "0"]) == 1
    assert capsys.readouterr().err == "pagedinfer: --requests=0: it must be an integer of at least 1.\n"
