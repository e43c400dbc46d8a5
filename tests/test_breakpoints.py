"""Breakpoints over a growing recording: a session stops exactly where the finished recording says it should have."""

import random
import warnings

import pytest

from pagedinfer import EngineConfig, SamplingParams, Session, compare, fork, why
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import WatchError
from pagedinfer.sim.simulated import SimulatedRunner

CROWDED = EngineConfig(
    num_blocks=10, block_size=2, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=40
)
CONDITIONS = [
    "any preempted", "free blocks < 2", "waiting >= 2 or any finished", "block 3 written", "TTFT of any > 3 steps",
    "not running >= 3 and step > 4", "stall of any > 1", "R2 finishes", "any aborted", "ITL of any > 1 and waiting > 0",
]  # fmt: skip


def session_of(requests=6):
    session = Session(Engine(CROWDED, SimulatedRunner(vocab_size=16)))
    for number in range(requests):
        session.submit([1] * (1 + 2 * number), max_tokens=6)
    return session


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("seed", range(3))
def test_live_stops_are_those_that_the_recording_has(condition, seed):
    """Requests come and go between the stops; each `run` goes on to the very next one."""
    rng = random.Random(seed)
    with session_of(4) as session:
        stops = []
        for number in range(200):
            stop = session.run(until=condition)
            stops += [] if stop is None else [(stop.step, stop.cause)]
            if stop is None and number > 3:
                break
            if number < 4:
                session.submit([1] * rng.randint(1, 9), max_tokens=rng.randint(1, 8))
            live = list(session.engine.scheduler.requests)
            if len(live) > 1 and rng.random() < 0.2:  # after the last one no step would come to see it
                session.engine.abort(rng.choice(live))
        found = [(stop.step, stop.cause) for stop in session.recording.find_all(condition)]
    assert stops == found
    assert not session.breakpoints


def test_run_says_what_it_did():
    with session_of() as session:
        assert session.run(max_steps=1) is session.recording
        stop = session.run(until="any preempted")
        assert stop.step == session.recording.last_step == session.engine.scheduler.step
        assert stop == session.stops[-1]
        assert stop.cause.startswith("r")
        assert session.run(until="kv_usage > 2") is None
        assert not session.engine.has_unfinished()
        assert session.stops == [stop]
        assert session.run() is session.recording


def test_max_steps_come_first():
    with session_of() as session:
        assert session.run(2, until="step == 9") is None
        assert session.run(until="step == 9").step == 9


def test_what_is_true_already_does_not_stop():
    with session_of() as session:
        first = session.run(until="waiting >= 1")
        second = session.run(until="waiting >= 1")
        assert first.step == 1
        assert second is None or second.step > 2
        assert [s.step for s in session.stops] == [s.step for s in session.recording.find_all("waiting >= 1")]


def test_several_breakpoints_stay_until_removed():
    with session_of() as session:
        finishes = session.breakpoints.add("any finishes")
        session.breakpoints.add("any preempted")
        session.breakpoints.add(lambda event: event.kind == "resume")
        assert [str(known) for known in session.breakpoints] == [
            "any finished",
            "any preempted",
            "<<lambda>>",
        ]
        while session.engine.has_unfinished():
            session.run()
        for text in ("any finished", "any preempted"):
            want = [stop.step for stop in session.recording.find_all(text)]
            assert [stop.step for stop in session.stops if str(stop.watch) == text] == want
        assert {stop.step for stop in session.stops} >= {
            row["finished"] for row in session.recording.requests.rows()
        }
        session.breakpoints.remove(finishes)
        session.breakpoints.remove("any preempted")
        with pytest.raises(WatchError, match="No breakpoint any preempted; there is <<lambda>>"):
            session.breakpoints.remove("any preempted")
        session.breakpoints.clear()
        assert len(session.breakpoints) == 0
        assert repr(session.breakpoints) == "Breakpoints(none)"


def test_play_stops_at_a_breakpoint_and_goes_on():
    with session_of() as session:
        session.breakpoints.add("step == 3")
        steps = 0
        while session.advance():
            steps += 1
        assert session.engine.scheduler.step == 3
        assert steps == 2
        assert session.advance()
        assert session.engine.scheduler.step == 4


def test_until_beside_a_breakpoint_of_the_same_text():
    with session_of() as session:
        known = session.breakpoints.add("step == 3")
        stop = session.run(until="step == 3")
        assert stop.watch is not known
        assert list(session.breakpoints) == [known]
        assert len(session.stops) == 2


def test_steps_by_hand_pass_breakpoints():
    with session_of() as session:
        session.breakpoints.add("step == 2")
        for _ in range(4):
            session.step()
        session.run(1)
        assert session.stops == []


def test_a_condition_that_cannot_be_read_changes_nothing():
    with session_of() as session:
        with pytest.raises(WatchError, match="Cannot read the condition"):
            session.run(until="R3 explodes")
        assert session.recording.num_steps == 0
        assert len(session.breakpoints) == 0


def test_a_predicate_that_raises_loses_nothing():
    def broken(event):
        if event.step == 3:
            raise RuntimeError("oh")
        return False

    with session_of() as session:
        session.breakpoints.add("step == 3")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(WatchError, match="The predicate broken raised RuntimeError: oh at step 3"):
                session.run(until=broken)
        assert session.engine.scheduler.step == 3
        assert len(session.breakpoints) == 1
        session.run()
        session.run()
        outputs = {rid: len(output.outputs[0].token_ids) for rid, output in session.outputs.items()}
        assert outputs == {f"r{number}": 6 for number in range(6)}
        assert session.recording.at(-1).snapshot() == session.engine.snapshot()


def test_a_session_begun_mid_run():
    engine = Engine(CROWDED, SimulatedRunner(vocab_size=16))
    for number in range(6):
        engine.add_request([1] * (1 + 2 * number), SamplingParams(max_tokens=6))
    engine.step()
    with Session(engine) as session:
        stop = session.run(until="any preempted")
        assert stop.step == session.recording.find("any preempted") > 1


def test_without_breakpoints_nothing_is_followed():
    with session_of() as session:
        session.run()
        assert session.breakpoints._follower is None


def test_a_session_forks_and_explains_itself():
    with session_of() as session:
        session.run()
        events = len(session.recording)
        branch = session.fork(2, max_num_batched_tokens=4)
        assert (
            branch.recording.until(2).requests["submitted"]
            == session.recording.until(2).requests["submitted"]
        )
        assert branch.recording.requests["output_tokens"] == session.recording.requests["output_tokens"]
        assert session.why("r5").sentences == why(session.recording, "r5").sentences
        assert len(session.recording) == events
        assert repr(compare(session.recording, branch)).startswith(
            '"run 1" and "max_num_batched_tokens=4" part at step'
        )


def test_forks_do_not_need_to_wait_for_the_end():
    with session_of() as session:
        session.run(3)
        assert fork(session.recording, 3).recording.requests["output_tokens"] == [6] * 6
        assert session.engine.scheduler.step == 3
