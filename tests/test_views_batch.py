"""Batch composition: the continuous chart is the recording, the static one follows from its lengths alone."""

import random
import xml.etree.ElementTree as ET

import pytest

from pagedinfer.errors import ConfigError
from pagedinfer.views.batch import COMPUTING, BatchComposition, _empty, continuous_batching, static_batching

SVG = "{http://www.w3.org/2000/svg}"


def tight_run(simulated_run, seed):
    rng = random.Random(seed)
    sizes = {"num_blocks": rng.choice([10, 20, 40]), "block_size": rng.choice([1, 4, 16])}
    return simulated_run(
        seed=seed, max_num_batched_tokens=rng.choice([3, 16, 64]), prompts=(1, 9), outputs=(1, 12), requests=20,
        aborts=0.03, cancels=0.1, **sizes,
    ).finish()  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_continuous_slots_hold_what_the_engine_ran(simulated_run, seed):
    recording = tight_run(simulated_run, seed)
    batching = continuous_batching(recording, 8)
    scheduled = 0
    for state in recording.states():
        here = batching.at(state.step)
        assert len({bar.slot for bar in here}) == len(here), "two in one slot"
        assert {bar.rid for bar in here if bar.did in COMPUTING} == set(state.last.scheduled)
        assert {bar.rid for bar in here} - set(state.last.scheduled) <= {*state.running, *state.last.finished}
        assert set(state.running) <= {bar.rid for bar in here}
        scheduled += len(state.last.scheduled)
    assert batching.busy == scheduled
    assert batching.idle == 8 * batching.num_steps - scheduled
    assert batching.tokens == sum(recording.requests["output_tokens"])


def expected_static(recording, slots):
    """The rule again, request by request: (request, first step, first token, last token, end of its batch)."""
    rows = [row for row in recording.requests.rows() if row["output_tokens"] or row["admitted"] is not None]
    budget, now, found = recording.config["max_num_batched_tokens"], 0, []
    while rows:
        now = max(now, rows[0]["submitted"])
        batch = []
        while rows and len(batch) < slots and rows[0]["submitted"] <= now:
            batch.append(rows.pop(0))
        left, token_step = sum(row["prompt_tokens"] for row in batch), now
        while left > 0:
            left, token_step = left - budget, token_step + 1
        ends = [token_step + max(0, row["output_tokens"] - 1) for row in batch]
        found += [
            (row["request"], now + 1, token_step, end, max(ends))
            for row, end in zip(batch, ends, strict=True)
        ]
        now = max(ends)
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_static_batches_follow_from_the_lengths(simulated_run, seed, slots):
    recording = tight_run(simulated_run, seed)
    batching = static_batching(recording, slots)
    expected = expected_static(recording, slots)
    bars = {}
    for bar in batching.bars:
        bars.setdefault(bar.rid, []).append((bar.did, bar.first, bar.last))
    assert set(bars) == {row[0] for row in expected}
    for rid, first, token, end, whole in expected:
        rows = [("prefill", first, token), ("decode", token + 1, end), ("done", end + 1, whole)]
        assert bars[rid] == [row for row in rows if row[1] <= row[2]]
    assert batching.last == max(row[4] for row in expected)
    for step in range(batching.first, batching.last + 1):
        here = batching.at(step)
        assert len({bar.slot for bar in here}) == len(here) <= slots


@pytest.mark.parametrize("seed", range(8))
def test_what_both_ways_count_is_the_same_work(simulated_run, seed):
    recording = tight_run(simulated_run, seed)
    both = static_batching(recording, 8), continuous_batching(recording, 8)
    assert [b.giving for b in both] == [sum(recording.requests["output_tokens"])] * 2
    assert [b.running for b in both] == [0, 0]
    left = {(rid, state.step) for state in recording.states() for rid in state.last.preempted}
    assert len(both[1].preempted) == len(left)
    bars = {(bar.slot, bar.last + 1): bar.rid for bar in both[1].bars}
    assert {(bars[place], place[1]) for place in both[1].preempted} == left


def test_requests_that_still_run_are_not_said_to_have_ended(simulated_run):
    run = simulated_run(seed=5, num_blocks=12, block_size=4, prompts=(3, 9), outputs=(6, 30), requests=9)
    view, still = BatchComposition(run.recording), set()
    while not (still and view.continuous.preempted):
        assert run.unfinished
        run.advance()
        view = BatchComposition(run.recording)
        still = {bar.rid for bar in view.static.bars if bar.did == "open"}
    living = set(run.recording.at(-1).requests)
    assert still <= living
    assert living.isdisjoint(bar.rid for bar in view.static.bars if bar.did == "done")
    svg = view.svg()
    assert f"as if the pool could hold any batch; {view.static.running} of them still run" in view.text()
    assert "still runs, length not known yet" in svg
    assert "preempted, waits without a slot" in svg
    assert svg.count("h8l-4 5z") == len(view.continuous.preempted) + 1, "one more in the legend"


def test_the_drawing_says_the_numbers(simulated_run):
    recording = simulated_run(
        seed=3, num_blocks=32, prompts=(8, 90), outputs=(4, 40), max_num_seqs=6
    ).finish()
    view = BatchComposition(recording)
    for width in (920, 430):
        for step in (0, 1, 30, view.last_step):
            root = ET.fromstring(view.svg(step, width))
            words = " ".join(node.text for node in root.iter(f"{SVG}text"))
            counts = [sum(b.did in COMPUTING for b in x.at(step)) for x in (view.static, view.continuous)]
            assert f"slots computing, of 6: static {counts[0]}, continuous {counts[1]}" in words
            for batching in (view.static, view.continuous):
                assert batching.words() in words
            titles = [node.text for node in root.iter(f"{SVG}title")][1:]
            bars = [*view.static.bars, *view.continuous.bars]
            marked = [node.get("data-rid") for node in root.iter(f"{SVG}g") if node.get("data-rid")]
            assert marked == [bar.rid for bar in bars]
            assert titles == [f"{b.rid} {b.did}, steps {b.first} to {b.last}, slot {b.slot}" for b in bars]
    assert view.static.num_steps > view.continuous.num_steps


def test_idle_is_what_the_hatching_covers(simulated_run):
    view = BatchComposition(simulated_run(seed=3, num_blocks=32, outputs=(4, 40), max_num_seqs=6).finish())
    for batching in (view.static, view.continuous):
        empty = sum(b.last - b.first + 1 for b in _empty(batching.bars, 6, batching.first, batching.last))
        held = sum(b.last - b.first + 1 for b in batching.bars if b.did not in COMPUTING)
        assert empty + held == batching.idle > 0


def test_slots_are_checked(simulated_run):
    recording = tight_run(simulated_run, 1)
    for slots in (0, 65, True, 2.0):
        with pytest.raises(ConfigError, match=f"num_slots={slots}: it must be an integer from"):
            BatchComposition(recording, num_slots=slots)


def test_a_recording_in_which_nothing_ran_can_be_drawn(simulated_run):
    run = simulated_run(requests=0)
    view = BatchComposition(run.recording)
    assert "static: 0 steps, 0 tokens per step; 0 of 0 slot-steps gave a token (0.0 %)" in view.text()
    assert view.svg().startswith("<svg")
    assert view.png().startswith(b"\x89PNG")
