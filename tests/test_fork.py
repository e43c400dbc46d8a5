"""Forks: nothing changed gives the same run again; changes hold from where they are said to."""

import pytest
from simulated_runs import CROWDED, Run, random_run, randomly

from pagedinfer.config import EngineConfig
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import ConfigError, RecordingError, RequestError
from pagedinfer.sim.fork import LIVE_SETTINGS, fork
from pagedinfer.sim.rerun import rerun
from pagedinfer.trace.metrics import kept_events
from pagedinfer.trace.recording import Recording

SEEDS = range(12)


def facts(events):
    """Events without what differs for sure: numbers, the first event's info, what was cancelled, failures told."""
    rows = []
    for event in kept_events(events):
        data = event.to_dict(wall=False)
        data.pop("seq")
        data.pop("info", None)
        rows.append(data)
    return rows


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fork_without_a_change_is_the_recording_again(seed):
    """Aborts, stops, rejections and refusals come where they came."""
    recording = random_run(seed, faults=False, num_requests=10)
    for step in (0, 1, recording.last_step // 2, recording.last_step):
        branch = fork(recording, step)
        assert facts(branch.recording.events) == facts(recording.events)
        assert branch.is_complete
        assert branch.way == f"re-run to step {step}, then run on."


@pytest.mark.parametrize("seed", SEEDS)
def test_with_faults_too(seed):
    """Forced preemptions and refused allocations too."""
    recording = random_run(seed, failures=False, num_requests=10)
    branch = fork(recording, recording.last_step // 2)
    assert facts(branch.recording.events) == facts(recording.events)


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_prefixes_are_shared_again(seed):
    recording = random_run(seed, failures=False, shared=True, num_requests=20)
    for step in (0, recording.last_step // 2):
        branch = fork(recording, step)
        assert facts(branch.recording.events) == facts(recording.events)
    hits = [event.n for event in fork(recording, 0, num_blocks=60).recording.events if event.kind == "hit"]
    assert any(hits)
    alone = fork(recording, 0, num_blocks=60, enable_prefix_caching=False).recording
    assert not any(event.kind in ("hit", "share", "cache") for event in alone.events)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_sharing_survives_another_block_size(size):
    hits = 0
    for seed in SEEDS:
        branch = fork(random_run(seed, faults=False, shared=True), 0, block_size=size, num_blocks=80)
        assert branch.recording.at(-1).requests == {}
        hits += sum(event.n for event in branch.recording.events if event.kind == "hit")
    assert hits > 20


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "changes",
    [{"order": "shortest-prefill"}, {"victim": "fewest-tokens-lost"}, {"chunking": "prefill-first"},
     {"admission": "fits-now"}, {"preempt_mode": "swap", "num_host_blocks": 20}, {"max_chunk_tokens": 2},
     {"tenant_max_running": 1}, {"allocator": "buddy", "num_blocks": 64}],
)  # fmt: skip
def test_policies_by_name(seed, changes):
    recording = random_run(seed, faults=False, shared=True)
    step = recording.last_step // 3
    branch = fork(recording, step, **changes)
    fixed = {"num_host_blocks", "allocator"} & changes.keys()
    assert branch.step == (0 if fixed else step)
    before = facts(recording.until(branch.step).events)
    assert fixed or facts(branch.recording.events)[: len(before)] == before
    assert branch.recording.at(-1).requests == {}
    assert sum(branch.recording.requests["output_tokens"]) > 0


class OldestGivesWay(Policy):
    def victim(self, request, candidates, view):
        return candidates[0]


class Broken(Policy):
    def order(self, request, view):
        raise RuntimeError("no order")


def test_a_policy_of_ones_own():
    recording = random_run(3, faults=False)
    for policy in (OldestGivesWay, OldestGivesWay(EngineConfig(**recording.config))):
        branch = fork(recording, 2, policy=policy)
        assert branch.name == "policy=OldestGivesWay"
        assert branch.changes == {"policy": "OldestGivesWay"}
    twin = randomly(3, faults=False, policy=OldestGivesWay(EngineConfig(**recording.config))).recording
    own = EngineConfig(**recording.config)
    assert facts(fork(twin, 5, recorded_policy=OldestGivesWay(own)).recording.events) == facts(twin.events)
    broken = fork(recording, 2, policy=Broken)
    assert any(event.kind == "error" for event in broken.recording.events)
    assert broken.recording.at(-1).requests == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_part_before_the_fork_is_untouched(seed):
    recording = random_run(seed)
    for step in (1, recording.last_step // 2):
        branch = fork(recording, step, max_num_batched_tokens=recording.config["max_num_batched_tokens"] * 2)
        before = facts(recording.until(step).events)
        assert facts(branch.recording.events)[: len(before)] == before
        budgets = {
            event.budget for event in branch.recording.events if event.kind == "step" and event.i > step
        }
        assert budgets <= {recording.config["max_num_batched_tokens"] * 2}
        assert branch.recording.at(-1).requests == {}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "changes", [{"num_blocks": 40}, {"block_size": 5}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 2},
                {"watermark": 0.5, "num_blocks": 9}, {"max_model_len": 20}]
)  # fmt: skip
def test_every_request_does_what_it_did(seed, changes):
    """As many tokens, the same reason to end, at the same step after which it came; only its pace differs."""
    recording = random_run(seed)
    branch = fork(recording, recording.last_step // 2, **changes)
    before = {row["request"]: row for row in recording.requests.rows()}
    after = {row["request"]: row for row in branch.recording.requests.rows()}
    rejected = {event.rid for event in branch.recording.events if event.kind == "reject"}
    assert before.keys() <= after.keys() | rejected
    for rid, row in after.items():
        if rid not in before:
            continue
        assert row["submitted"] == before[rid]["submitted"]
        cut = before[rid]["finish_reason"] == "length" and "pool" in _detail(recording, rid)
        cut = cut or (row["finish_reason"] == "length" and "pool" in _detail(branch.recording, rid))
        if (
            "abort" not in (before[rid]["finish_reason"], row["finish_reason"])
            and not cut
            and "max_model_len" not in changes
        ):
            assert row["output_tokens"] == before[rid]["output_tokens"], rid
            assert row["finish_reason"] == before[rid]["finish_reason"]
    for event in branch.recording.events:
        if event.kind == "abort":
            assert event.step in {
                e.step for e in recording.events if e.kind == "abort" and e.rid == event.rid
            }


def _detail(recording, rid):
    return next(event.detail for event in recording.events if event.kind == "finish" and event.rid == rid)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_change_from_the_start_is_that_engines_own_run(seed):
    """The twin: the same requests given to a scheduler of the other settings, by hand."""
    recording = random_run(seed, faults=False)
    config = EngineConfig(**(recording.config | {"num_blocks": recording.config["num_blocks"] + 7}))
    branch = fork(recording, 3, num_blocks=config.num_blocks)
    assert branch.step == 0
    assert branch.way.startswith("num_blocks cannot change in a running engine: re-run from the first step.")
    assert branch.recording.config == config.to_dict()
    run, rows = Run(config), {row["request"]: row for row in recording.requests.rows()}
    inputs = [e for e in recording.events if e.kind in ("submit", "reject", "abort")]
    while inputs or run.scheduler.requests:
        while inputs and inputs[0].step <= run.scheduler.step:
            event = inputs.pop(0)
            if event.kind == "abort":
                if event.rid in run.scheduler.requests:
                    run.scheduler.abort(event.rid)
                continue
            row = rows.get(event.rid)
            stop = row["output_tokens"] if row and row["finish_reason"] == "stop" else None
            try:
                run.submit(event.rid, event.num_prompt_tokens, event.max_tokens, stop)
            except ValueError:
                assert event.kind == "reject"
        if inputs or run.scheduler.requests:
            run.step()
    assert facts(branch.recording.events) == facts(run.recording.events)


def test_fewer_seats_than_requests_that_run():
    run = Run()
    for number in range(4):
        run.submit(f"r{number}", 2, 6)
    run.drain()
    branch = fork(run.recording, 1, max_num_seqs=2)
    state = branch.recording.at(1)
    assert state.running == ["r0", "r1"]
    gone = [event for event in branch.recording.events if event.kind == "preempt"]
    assert [event.rid for event in gone][:2] == ["r3", "r2"]
    assert gone[0].why == "forked at step 1: max_num_seqs is 2 now"
    assert max(branch.recording.steps["running"][1:]) == 2


def test_a_run_that_has_not_ended_runs_on_to_its_limits():
    run = Run()
    run.submit("a", 3, 6)
    run.step()
    branch = fork(run.recording, 1)
    assert branch.recording.requests["output_tokens"] == [6]
    assert run.recording.num_steps == 1


def test_an_aborted_request_has_no_length_of_its_own():
    run = Run()
    run.submit("a", 8, 9)
    run.submit("b", 2, 9)
    for _ in range(4):
        run.step()
    run.scheduler.abort("a")
    run.drain()
    faster = fork(run.recording, 0, max_num_batched_tokens=16).recording.requests
    row = dict(zip(faster["request"], faster.rows(), strict=True))["a"]
    assert (row["finish_reason"], row["finished"], row["output_tokens"]) == ("abort", 4, 4)


def test_ends_that_only_the_engine_knew():
    run = Run()
    run.submit("a", 2, 9, stop_after=3)
    run.submit("b", 2, 9)
    run.step()
    run.step(errors=["b"])
    run.drain()
    branch = fork(run.recording, 0, num_blocks=30)
    a, b = branch.recording.requests.rows()
    assert (a["finish_reason"], a["output_tokens"]) == ("stop", 3)
    assert (b["finish_reason"], b["output_tokens"]) == ("error", 1)


def test_the_engine_idles_until_the_next_request_comes():
    run = Run()
    run.submit("a", 2, 6)
    run.drain()
    run.submit("b", 2, 2)
    run.drain()
    assert [e.rid for e in run.recording.events if e.kind == "submit" and e.step == 6] == ["b"]
    branch = fork(run.recording, 0, block_size=4)
    assert branch.recording.requests["submitted"] == [0, 6]


def test_what_was_asked_is_in_the_recording_and_its_name():
    recording = random_run(1)
    branch = fork(recording, 2, watermark=0.5)
    assert branch.recording.info["fork"] == {"step": 2, "watermark": 0.5}
    assert branch.name == "watermark=0.5"
    assert fork(recording, 2).name == "as recorded"
    assert "watermark=0.5: re-run to step 2" in repr(branch)
    assert "<b>watermark=0.5</b>" in branch._repr_html_()
    loaded = Recording.from_jsonl(branch.recording.to_jsonl())
    assert loaded.to_jsonl() == branch.recording.to_jsonl()
    assert loaded.at(-1).snapshot() == branch.recording.at(-1).snapshot()


def test_a_setting_that_stays_is_no_change():
    recording = random_run(1)
    branch = fork(recording, 2, num_blocks=recording.config["num_blocks"])
    assert branch.changes == {}
    assert branch.step == 2


def test_refusals():
    recording = random_run(1)
    with pytest.raises(
        ConfigError, match=r"no option num_block; did you mean num_blocks\? There are .*block_size"
    ):
        fork(recording, 1, num_block=3)
    with pytest.raises(ConfigError, match="num_blocks=0"):
        fork(recording, 1, num_blocks=0)
    with pytest.raises(RecordingError, match="No step 9999"):
        fork(recording, 9999)
    with pytest.raises(RecordingError, match="No step 9999"):
        fork(recording, 9999, num_blocks=3)
    with pytest.raises(RecordingError, match="from the engine's first step"):
        fork(Recording(), 0)
    assert set(CROWDED.to_dict()) >= LIVE_SETTINGS


def test_a_fork_where_steps_overlap():
    run = Run(
        EngineConfig(num_blocks=8, block_size=2, max_num_batched_tokens=4, max_num_seqs=4, max_model_len=30)
    )
    run.submit("a", 9, 3)
    scheduler = run.scheduler
    first, second = scheduler.schedule(0.0), scheduler.schedule(1.0)
    scheduler.commit(first, run.runner.execute(first))
    scheduler.commit(second, run.runner.execute(second))
    run.drain()
    for step in (1, 2, 3):
        branch = fork(run.recording, step, max_num_batched_tokens=8)
        assert branch.recording.requests["output_tokens"] == [3]
        assert branch.is_complete


def test_a_branch_that_changed_midway_cannot_be_forked_again():
    recording = random_run(1, faults=False)
    with pytest.raises(RecordingError, match="whose settings changed at step 2; fork the one it came from"):
        fork(fork(recording, 2, max_num_batched_tokens=1).recording, 3)
    for branch in (
        fork(recording, 2),
        fork(recording, 0, max_num_batched_tokens=1),
        fork(recording, 2, num_blocks=50),
    ):
        again = fork(branch.recording, 3)
        assert facts(again.recording.events) == facts(branch.recording.events)
        assert rerun(branch.recording)[1].to_jsonl(wall=False) == branch.recording.to_jsonl(wall=False)


def test_settings_change_between_steps_only():
    run = Run()
    run.submit("a", 3, 4)
    run.scheduler.schedule(0.0)
    with pytest.raises(RequestError, match="cannot change while a step is open"):
        run.scheduler.reconfigure(CROWDED, None, "test")


def test_groups_that_stay_are_no_change():
    recording = random_run(1, faults=False)
    windows = tuple(recording.config["group_windows"])
    assert fork(recording, 2, group_windows=windows).changes == {}
