"""The second law of events: a recording's inputs, run again, give the same bytes. (Random: test_scheduler_machine.)"""

import pytest

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.plan import StepResult
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import RequestError
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.events import SCHEMA, Meta
from pagedinfer.trace.recorder import Recorder
from pagedinfer.trace.recording import Recording, RecordingError

CROWDED = EngineConfig(num_blocks=6, block_size=2, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=20)


def recorded_engine(**options):
    """An engine's run with everything that can come from outside, and its snapshots after each step."""
    engine = Engine(CROWDED, SimulatedRunner(vocab_size=16), eos_token_ids=(3,), **options)
    engine.scheduler.blocks.refuse_calls = {2, 9}
    snapshots = []
    with Recorder(engine) as recording:
        for number in range(6):
            engine.add_request([1] * (1 + 2 * number), SamplingParams(max_tokens=7))
        with pytest.raises(RequestError):
            engine.add_request([1] * 25)
        snapshots.append(engine.snapshot())
        while engine.has_unfinished():
            engine.step()
            if engine.metrics()["num_steps"] == 4:
                engine.abort("r2")
                engine.scheduler.preempt(engine.scheduler.running[0].request_id, "forced")
            snapshots.append(engine.snapshot())
            assert len(snapshots) < 300
    return recording, snapshots


def test_an_engines_run_again_gives_the_same_bytes():
    recording, snapshots = recorded_engine()
    kinds = {event.kind for event in recording.events}
    assert {"reject", "refuse", "preempt", "resume", "abort"} <= kinds
    assert {event.why for event in recording.events if event.kind == "finish"} == {"length", "stop", "abort"}
    scheduler, second = rerun(recording)
    assert second.to_jsonl(wall=False) == recording.to_jsonl(wall=False)
    assert scheduler.snapshot() == snapshots[-1]
    assert rerun(second)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


def test_a_loaded_recording_can_be_run_again_too():
    recording, _ = recorded_engine()
    loaded = Recording.from_jsonl(recording.to_jsonl())
    assert rerun(loaded)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


def test_the_clock_is_an_input():
    times = iter(x / 8 for x in range(10_000))
    recording, _ = recorded_engine(clock=lambda: next(times))
    again = rerun(recording)[1]
    assert again.to_jsonl(wall=False) == recording.to_jsonl(wall=False)
    assert len(set(again.steps["now"])) == again.num_steps


def test_up_to_a_step():
    recording, snapshots = recorded_engine()
    for step in (0, 1, 5, len(snapshots) - 1):
        scheduler, part = rerun(recording, until_step=step)
        assert scheduler.snapshot() == snapshots[step]
        assert part.last_step == step
        assert recording.to_jsonl(wall=False).startswith(part.to_jsonl(wall=False))
    with pytest.raises(RecordingError, match="No step 999"):
        rerun(recording, until_step=999)


def test_from_there_on_it_is_an_ordinary_scheduler():
    recording, _ = recorded_engine()
    scheduler, _ = rerun(recording, until_step=3)
    runner = SimulatedRunner()
    for _ in range(300):
        if not scheduler.requests:
            break
        plan = scheduler.schedule(scheduler.step)
        scheduler.commit(plan, runner.execute(plan))
        scheduler.check()
    assert scheduler.blocks.num_free == CROWDED.num_blocks


def test_a_row_that_fails_while_the_next_plan_is_open():
    """Its end comes only when the second plan closes; what is planned in between must already know of it."""
    scheduler = Scheduler(EngineConfig(num_blocks=8, block_size=2, max_num_batched_tokens=4, max_num_seqs=4))
    meta = Meta(SCHEMA, scheduler.config.to_dict())
    meta.step = 0
    recording = Recording([meta])
    scheduler.bus.subscribe(recording.add)
    scheduler.submit(Request("a", 14, 3), 0)
    first, second = scheduler.schedule(0), scheduler.schedule(1)
    assert not first.scheduled[0].samples
    assert scheduler.commit(first, StepResult({}, errors={"a": "logits are NaN"}))[0].finish_reason is None
    third = scheduler.schedule(2)
    assert third.scheduled == []
    (update,) = scheduler.commit(second, StepResult({}))
    assert (update.finish_reason, update.detail) == ("error", "logits are NaN")
    scheduler.commit(third, StepResult({}))
    again, second_recording = rerun(recording)
    assert second_recording.to_jsonl(wall=False) == recording.to_jsonl(wall=False)
    assert again.snapshot() == scheduler.snapshot()


def test_a_part_or_a_hole_cannot_be_run_again():
    engine = Engine(CROWDED, SimulatedRunner())
    engine.add_request([1, 2])
    engine.step()
    with Recorder(engine) as late:
        engine.step()
    engine = Engine(CROWDED, SimulatedRunner())
    with Recorder(engine, max_events=3) as holed:
        engine.add_request([1, 2])
        engine.step()
    for recording in (late, holed, Recording()):
        with pytest.raises(RecordingError, match="from the engine's first step, without gaps"):
            rerun(recording)
