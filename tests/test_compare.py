"""Comparisons beside slow twins: the first step that differs, block maps, and every number of the table."""

import re
import statistics

import numpy as np
import pytest
from simulated_runs import CROWDED, Run, random_run
from test_metrics import twin_phases, without_cancelled

from pagedinfer.errors import ConfigError, RecordingError
from pagedinfer.sim.compare import compare, summary
from pagedinfer.sim.fork import fork
from pagedinfer.trace.recording import Recording

SEEDS = range(8)
CHANGES = [{"max_num_batched_tokens": 2}, {"num_blocks": 40}, {"max_num_seqs": 1}, {"watermark": 0.5}]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("changes", CHANGES)
def test_the_first_divergence_beside_a_plain_comparison(seed, changes):
    recording = random_run(seed, faults=False)
    branch = fork(recording, 2, **changes)
    found = compare(recording, branch).first_divergence
    states = zip(recording.states(), branch.recording.states(), strict=False)
    taken = [_taken(run) for run in (recording, branch.recording)]
    apart = [
        step
        for step, (a, b) in enumerate(states)
        if step and (_told(a), taken[0].get(step)) != (_told(b), taken[1].get(step))
    ]
    if found is None:
        assert not apart
        assert recording.num_steps == branch.recording.num_steps
    elif apart:
        # What comes in after a step shows in the state at once, and in the comparison with the step that follows.
        assert apart[0] <= found.step <= apart[0] + 1
    else:
        assert "has ended" in found.sentence
        assert found.step == min(recording.last_step, branch.recording.last_step) + 1


def _told(state):
    tables = {rid: request.block_table for rid, request in state.requests.items()}
    return state.running, state.waiting, state.last.scheduled, state.last.tokens, tables


def _taken(recording):
    """step -> the blocks taken in it, also for requests that ended at once."""
    found = {}
    for row in recording.blocks.rows():
        found.setdefault(row["allocated"], []).append((row["block"], row["request"], row["logical"]))
    return found


def test_equal_runs_do_not_part():
    recording = random_run(5)
    same = compare(recording, recording, random_run(5), names=["a", "b", "c"])
    assert same.first_divergence is None
    assert same.divergences == [None, None]
    assert same.sentences == [
        '"a" and "b" do the same in every step.',
        '"a" and "c" do the same in every step.',
    ]
    assert all(not same.block_differences(step) for step in range(same.last_step + 1))


def crowd(config=CROWDED, last=6):
    run = Run(config)
    run.submit("a", 3, 4)
    run.submit("b", 3, last)
    return run


def test_words_of_a_divergence():
    first = crowd()
    second = crowd()
    for run in (first, second):
        run.step()
    second.scheduler.preempt("b", "forced")
    third = crowd()
    third.submit("c", 9, 2)
    fourth = crowd(last=2)
    for run in (first, second, third, fourth):
        run.drain()
    runs = compare(*(run.recording for run in (first, second, third, fourth)), names="wxyz")
    assert [str(d) for d in runs.divergences] == [
        '"w" and "x" part at step 2: "x" preempts b (forced), "w" does not',
        '"w" and "y" part at step 1: "y" gets c, "w" does not',
        '"w" and "z" part at step 2: "z" ends b (2 tokens produced), "w" does not',
    ]
    assert runs.first_divergence.names == ("w", "y")


def test_words_of_amounts_and_of_an_end():
    recording = random_run(0, faults=False)
    chunked = compare(recording, fork(recording, 0, max_num_batched_tokens=1)).first_divergence
    assert re.search(
        r'computes \d+ tokens? of r\d+, "max_num_batched_tokens=1" computes (1$|none \(\w+)', str(chunked)
    )
    over = Recording(crowd().drain().events)
    later = Run(CROWDED)
    later.submit("a", 3, 4)
    later.submit("b", 3, 6)
    later.drain()
    later.step()
    short = compare(over, later.recording, names=["short", "long"])
    assert str(short.first_divergence) == (
        f'"short" and "long" part at step {over.last_step + 1}: "short" has ended, "long" goes on'
    )
    assert not short.unended


def test_one_that_somebody_else_is_preempted_for():
    """Whom the other run takes instead is told, and so is why it leaves somebody out."""
    first, second = crowd(), crowd()
    for run in (first, second):
        run.step()
    first.scheduler.preempt("a", "forced")
    second.scheduler.preempt("b", "forced, too")
    for run in (first, second):
        run.drain()
    assert compare(first.recording, second.recording, names="xy").sentences == [
        '"x" and "y" part at step 2: "x" preempts a (forced), "y" preempts b instead.'
    ]
    seats = fork(first.recording, 0, max_num_seqs=1)
    assert compare(first.recording, seats).sentences == [
        '"run 1" and "max_num_seqs=1" part at step 1: "run 1" admits b (2 blocks for 3 tokens, 6 free after that), '
        '"max_num_seqs=1" does not (the only seat (max_num_seqs) is taken).'
    ]


def test_a_run_that_has_not_ended_is_no_divergence():
    recording = random_run(0, faults=False)
    live = recording.until(3)
    both = compare(live, recording, names=["live", "whole"])
    assert both.first_divergence is None
    assert both.unended == {"live": 3}
    assert both.sentences == [
        '"live" and "whole" do the same in every step.',
        '"live" has not ended: it is compared up to step 3, and its numbers are those up to there.',
    ]
    assert compare(live, live).unended == {}
    turned = compare(fork(recording, 1, max_num_batched_tokens=1), live, names=["other", "live"])
    assert turned.first_divergence.step <= 3
    assert turned.unended == {"live": 3}


def test_sessions_and_branches_are_taken():
    from pagedinfer import SamplingParams
    from pagedinfer.engine.engine import Engine
    from pagedinfer.session import Session
    from pagedinfer.sim.simulated import SimulatedRunner

    with Session(Engine(CROWDED, SimulatedRunner())) as session:
        session.submit([1] * 3, SamplingParams(max_tokens=3))
        session.run()
        runs = compare(session, session.fork(1, max_num_batched_tokens=4), session.recording)
    assert runs.names == ["run 1", "max_num_batched_tokens=4", "run 3"]
    assert runs.recordings[0] is runs.recordings[2]


@pytest.mark.parametrize("seed", SEEDS)
def test_block_maps_beside_a_plain_comparison(seed):
    recording = random_run(seed, faults=False)
    branch = fork(recording, 1, max_num_batched_tokens=2)
    both = compare(recording, branch)
    for step in range(0, both.last_step + 1, 3):
        want = {}
        for which, run in enumerate((recording, branch.recording)):
            state = run.at(min(step, run.last_step))
            for rid, request in state.requests.items():
                for logical, block_id in enumerate(request.block_table):
                    want.setdefault(block_id, ([], []))[which].append((rid, logical))
        found = {d.block_id: tuple(map(list, d.owners)) for d in both.block_differences(step)}
        assert found == {block_id: held for block_id, held in want.items() if held[0] != held[1]}
        assert list(found) == sorted(found)
    if found:
        assert str(both.block_differences(step)[0]).startswith("block ")


def test_lockstep_goes_to_the_end_of_the_longest():
    recording = random_run(2)
    both = compare(recording, recording.until(3))
    seen = [(step, tuple(state and state.step for state in states)) for step, states in both.lockstep()]
    assert [step for step, _ in seen] == list(range(recording.last_step + 1))
    assert [states[1] is None for _, states in seen] == [step > 3 for step, _ in seen]
    assert [state.step for state in both.states(recording.last_step)] == [recording.at(-1).step, 3]


@pytest.mark.parametrize("seed", range(12))
def test_numbers_beside_a_plain_count(seed):
    recording = random_run(seed)
    rows, steps = list(recording.requests.rows()), list(recording.steps.rows())
    found = summary(recording)
    for name, values in {
        "TTFT": [row["ttft_steps"] for row in rows if row["ttft_steps"] is not None],
        "TPOT": [row["tpot_steps"] for row in rows if row["tpot_steps"] is not None],
        "E2E": [row["finished"] - row["submitted"] for row in rows],
    }.items():
        assert found[f"{name} mean, steps"] == pytest.approx(statistics.mean(values))
        for q in (50, 99):
            assert found[f"{name} p{q}, steps"] == pytest.approx(np.percentile(values, q))
    kept = without_cancelled(recording.events)
    assert found["steps"] == len(steps) == len({event.i for event in kept if event.kind == "step"})
    assert found["requests"] == found["requests finished"] == len(rows)
    assert found["output tokens"] == sum(row["output_tokens"] for row in rows)
    assert found["recomputed tokens"] == sum(again for _, again in twin_phases(recording).values())
    assert found["makespan, steps"] == max(r["finished"] for r in rows) - min(r["submitted"] for r in rows)
    states = [recording.at(step) for step in range(1, recording.last_step + 1)]
    usage = [len(state.ref_counts) / state.num_blocks for state in states]
    assert found["KV usage mean, share"] == pytest.approx(statistics.mean(usage))
    assert found["KV usage max, share"] == max(usage)
    waste = [state.usage()["kv_waste"] for state in states if state.ref_counts]
    assert found["KV waste mean, share"] == pytest.approx(statistics.mean(waste))


@pytest.mark.parametrize("seed", range(12))
def test_preemptions_are_all_counted(seed):
    recording = random_run(seed)
    want = sum(event.kind == "preempt" for event in without_cancelled(recording.events))
    assert summary(recording)["preemptions"] == want == recording.at(-1).num_preemptions


def test_the_table_and_its_pictures():
    recording = random_run(1)
    runs = compare(
        recording, fork(recording, 1, max_num_batched_tokens=1), fork(recording, 1, max_num_batched_tokens=1)
    )
    assert runs.names == ["run 1", "max_num_batched_tokens=1 (2)", "max_num_batched_tokens=1 (3)"]
    assert list(runs.table) == ["metric", *runs.names]
    assert runs.table["run 1"] == list(summary(recording).values())
    again = compare(
        recording, fork(recording, 1, max_num_batched_tokens=1), fork(recording, 1, max_num_batched_tokens=1)
    )
    assert repr(again) == repr(runs)
    assert again._repr_html_() == runs._repr_html_()
    lines = repr(runs).split("\n")
    assert lines[0].startswith('"run 1" and "max_num_batched_tokens=1 (2)" part at step ')
    assert lines[2].split()[0] == "metric"
    assert len({len(line) for line in lines[2:]}) == 1
    assert runs._repr_html_().count("<tr>") == len(runs.table) + 1
    assert "<b>" not in compare(recording, recording, names=["<b>", "&"])._repr_html_()


def test_four_runs_with_long_names_and_one_that_is_equal():
    recording = random_run(1, faults=False)
    changes = {"num_blocks": 40, "preempt_mode": "swap", "num_host_blocks": 9}
    branches = [
        fork(recording, 1, max_num_batched_tokens=1),
        fork(recording, 0, **changes),
        fork(recording, 2),
    ]
    lines = repr(compare(recording, *branches)).split("\n")
    assert lines[2] == '"run 1" and "as recorded" do the same in every step.'
    assert [line.split() for line in lines[3:6]] == [
        ["metric", "run", "1", "max_num_batched_tokens=1", "num_blocks=40,", "as", "recorded"],
        ["preempt_mode=swap,"],
        ["num_host_blocks=9"],
    ]
    assert len({len(line) for line in lines[3:]}) == 1
    assert len(lines[3]) < 100
    for line in lines[6:]:
        first, *others = re.split(r"\s{2,}", line)[1:]
        assert others[-1] == first, "the equal run has equal numbers"
        assert len({"." in cell for cell in (first, *others) if cell != "-"}) <= 1, f"decimals differ: {line}"


def test_nothing_happened_in_either():
    empty = Recording(random_run(1).events[:1])
    runs = compare(empty, empty)
    assert runs.first_divergence is None
    assert runs.metrics["run 1"]["TTFT mean, steps"] is None
    assert re.search(r"KV usage max, share +- +-", repr(runs))


def test_refusals():
    recording = random_run(1)
    for runs, names, error, match in (
        ((recording,), None, ConfigError, "at least two runs; 1 came"),
        ((), None, ConfigError, "at least two runs; none came"),
        ((recording, 3), None, ConfigError, "not an int"),
        ((recording, Recording()), None, RecordingError, "is empty"),
        ((recording, recording), ["a"], ConfigError, "2 runs need as many different names"),
        ((recording, recording), ["a", "a"], ConfigError, "2 runs need as many different names"),
        ((recording, recording), ["a", "metric"], ConfigError, "none is metric"),
        ((recording, late()), None, ConfigError, "The runs begin after steps 0, 1"),
    ):
        with pytest.raises(error, match=match):
            compare(*runs, names=names)


def late():
    from pagedinfer import Recorder, SamplingParams
    from pagedinfer.engine.engine import Engine
    from pagedinfer.sim.simulated import SimulatedRunner

    engine = Engine(CROWDED, SimulatedRunner())
    engine.add_request([1], SamplingParams(max_tokens=3))
    engine.step()
    with Recorder(engine) as recording:
        engine.step()
    return recording
