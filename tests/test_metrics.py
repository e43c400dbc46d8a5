"""Latencies, percentiles, goodput and phases, each beside a slow twin on random runs."""

import statistics

import pytest
from simulated_runs import CROWDED, Run, random_run

from pagedinfer.config import EngineConfig
from pagedinfer.errors import ConfigError, RecordingError
from pagedinfer.trace import events as ev
from pagedinfer.trace.metrics import goodput, kept_events, lives, mean, percentile
from pagedinfer.trace.moments import moments
from pagedinfer.trace.phases import PHASES, phases
from pagedinfer.trace.recording import Recording

SEEDS = range(10)
SWAPPING = EngineConfig(**(CROWDED.to_dict() | {"num_host_blocks": 6, "preempt_mode": "swap"}))


def without_cancelled(events):
    """The twin of `kept_events` for runs with one open plan: what lies between a step and its cancel goes."""
    kept = []
    for event in events:
        if event.kind == "cancel":
            start = max(i for i, e in enumerate(kept) if e.kind == "step")
            kept[start:] = [
                e for e in kept[start:] if e.kind == "refuse"
            ]  # an input, whatever became of the plan
        else:
            kept.append(event)
    return kept


def twin_phases(recording):
    """request -> (step -> phase, recomputed tokens), by sets of positions and plain rules."""
    found, live = {}, {}
    events = without_cancelled(recording.events)
    for index, event in enumerate(events):
        if event.kind == "submit":
            live[event.rid] = {"phase": {}, "done": set(), "now": 0, "was": "queue", "again": 0, "tokens": 0}
            found[event.rid] = live[event.rid]
        elif event.kind in ("admit", "resume"):
            live[event.rid]["was"] = "in"
        elif event.kind == "preempt":
            live[event.rid].update(was="preempted", now=live[event.rid]["now"] if event.mode == "swap" else 0)
        elif event.kind == "step":
            rest = events[index:]
            commit = next(e for e in rest if e.kind == "commit")
            shared = {e.rid: e.num_tokens for e in rest[: rest.index(commit)] if e.kind == "share"}
            moves = {
                e.rid: e.kind for e in rest[: rest.index(commit)] if e.kind in ("admit", "resume", "preempt")
            }
            for rid, one in live.items():
                where = {"admit": "in", "resume": "in", "preempt": "preempted"}.get(
                    moves.get(rid), one["was"]
                )
                n = event.scheduled.get(rid, 0)
                start = shared.get(rid, one["now"])
                positions = set(range(start, start + n))
                one["now"] = start + n
                again = len(positions & one["done"])
                one["again"] += again
                one["done"] |= positions
                got = commit.tokens.get(rid, 0)
                if n and again and not got:
                    phase = "recompute"
                elif n:
                    phase = "prefill" if one["tokens"] == 0 else "decode"
                else:
                    phase = "stall" if where == "in" else where
                one["tokens"] += got
                one["phase"][event.i] = phase
        elif event.kind == "finish":
            live.pop(event.rid)
    return {rid: (one["phase"], one["again"]) for rid, one in found.items()}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [{}, {"shared": True}, {"config": SWAPPING}])
def test_phases_beside_the_twin(seed, options):
    recording = random_run(seed, num_requests=20, **options)
    want = twin_phases(recording)
    found = phases(recording)
    assert [one.life.rid for one in found] == list(want)
    for one in found:
        assert (one.by_step, one.num_recomputed_tokens) == want[one.life.rid], one.life.rid
        assert sum(one.counts.values()) == one.life.steps.e2e
        assert set(one.counts) == set(PHASES)
        assert [s for _, first, last in one.runs() for s in range(first, last + 1)] == list(one.by_step)
        assert one.counts["queue"] == one.life.steps.queue_time or one.life.steps.admitted is None


def test_phases_reach_every_phase():
    seen = {
        phase
        for seed in SEEDS
        for one in phases(random_run(seed, num_requests=20))
        for phase in one.by_step.values()
    }
    assert seen == set(PHASES)


@pytest.mark.parametrize("seed", SEEDS)
def test_lives_beside_a_plain_count(seed):
    recording = random_run(seed)
    assert kept_events(recording.events) == without_cancelled(recording.events)
    for life in lives(recording):
        tokens = [
            e.step for e in recording.events if e.kind == "commit" for _ in range(e.tokens.get(life.rid, 0))
        ]
        (submit,) = (e for e in recording.events if e.kind == "submit" and e.rid == life.rid)
        (finish,) = (e for e in recording.events if e.kind == "finish" and e.rid == life.rid)
        kept = without_cancelled(recording.events)
        assert life.steps.tokens == tokens
        assert life.num_output_tokens == len(tokens)
        assert life.num_preemptions == sum(e.kind == "preempt" and e.rid == life.rid for e in kept)
        assert (life.finish_reason, life.detail) == (finish.why, finish.detail)
        assert life.steps.e2e == finish.step - submit.step
        assert life.steps.ttft == (tokens[0] - submit.step if tokens else None)
        assert len(life.steps.itl) == max(0, len(tokens) - 1)
        assert life.steps.tpot == (
            pytest.approx(statistics.mean(life.steps.itl)) if len(tokens) > 1 else None
        )
        assert life.seconds.e2e is None


def test_seconds_come_from_the_wall_clock():
    times = iter(range(1000))
    run = Run(wall=lambda: next(times) / 4)
    run.submit("a", 3, 3)
    (life,) = lives(run.drain())
    stamps = {e.kind: e.t for e in run.recording.events}
    assert life.seconds.e2e == stamps["finish"] - stamps["submit"]
    assert life.seconds.ttft == pytest.approx(life.seconds.tokens[0] - stamps["submit"])
    assert 0 < life.seconds.queue_time < life.seconds.ttft
    assert life.times("seconds") is life.seconds
    with pytest.raises(ConfigError, match='"steps" or "seconds"'):
        life.times("hours")
    assert goodput(run.recording, e2e=1e6, unit="seconds").rate == pytest.approx(1 / life.seconds.e2e)


@pytest.mark.parametrize("values", [[3], [5, 1], [2, 2, 9, 4], list(range(100, 0, -7))])
def test_percentiles_beside_numpy(values):
    import numpy as np

    for q in (0, 1, 25, 50, 90, 99, 100):
        assert percentile(values, q) == pytest.approx(np.percentile(values, q))
    assert mean(values) == pytest.approx(statistics.mean(values))


def test_percentiles_of_nothing_and_outside():
    assert percentile([], 50) is mean([]) is None
    for q in (-1, 101, float("nan")):
        with pytest.raises(ConfigError, match="from 0 to 100"):
            percentile([1], q)


@pytest.mark.parametrize("seed", SEEDS)
def test_goodput_beside_a_plain_count(seed):
    recording = random_run(seed)
    rows = list(recording.requests.rows())
    for ttft, tpot, e2e in ((1, 1, 5), (3, 2, 9), (99, 99, 99)):
        good = [
            row for row in rows
            if row["finish_reason"] in ("stop", "length") and row["first_token"] and row["ttft_steps"] <= ttft
            and (row["tpot_steps"] or 0) <= tpot and row["finished"] - row["submitted"] <= e2e
        ]  # fmt: skip
        found = goodput(recording, ttft=ttft, tpot=tpot, e2e=e2e)
        assert (found.met, found.total) == (len(good), len(rows))
        assert found.share == len(good) / len(rows)
        makespan = max(row["finished"] for row in rows) - min(row["submitted"] for row in rows)
        assert found.duration == makespan
        assert found.rate == found.met / makespan
    assert str(found).startswith(f"{found.met} of {len(rows)} requests met every objective, ")
    slowest = max(max(life.steps.itl, default=0) for life in lives(recording))
    assert goodput(recording, itl=slowest).met >= goodput(recording, itl=0).met


def test_goodput_needs_limits():
    recording = random_run(1)
    for options, match in (({}, "at least one limit"), ({"ttft": "fast"}, "is a number of steps"),
                           ({"ttft": True}, "is a number"), ({"e2e": 3, "unit": "seconds"}, "no wall time"),
                           ({"e2e": 3, "unit": "hours"}, "steps")):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            goodput(recording, **options)
    empty = goodput(Recording(recording.events[:1]), ttft=1)
    assert (empty.share, empty.rate, str(empty)) == (0.0, None, "0 of 0 requests met every objective")


def test_an_id_that_comes_twice_has_two_lives():
    run = Run()
    run.submit("a", 3, 1)
    run.step()
    run.submit("a", 2, 2)
    run.drain()
    first, second = phases(run.recording)
    assert (first.by_step, second.by_step) == ({1: "prefill"}, {2: "prefill", 3: "decode"})


def test_a_life_between_two_steps_has_no_phases():
    run = Run()
    run.submit("a", 3, 2)
    run.step()
    run.submit("b", 3, 2)
    run.scheduler.abort("b")
    run.drain()
    assert [one.by_step for one in phases(run.recording)] == [{1: "prefill", 2: "decode"}, {}]


def test_spans_outside_the_tables_are_refused():
    run = Run()
    run.submit("a", 3, 4)
    run.drain()
    events = [event for event in run.recording.events if not isinstance(event, ev.Alloc)]
    with pytest.raises(RecordingError, match="outside its block table"):
        list(moments(Recording(events)))
    assert CROWDED.num_blocks == 10
