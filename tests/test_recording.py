"""Recordings: steps, going back, files."""

import json
import threading

import pytest

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import ConfigError, PagedInferError
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace import recording as recording_module
from pagedinfer.trace.events import SCHEMA, Meta
from pagedinfer.trace.recorder import Recorder
from pagedinfer.trace.recording import Recording, RecordingError
from pagedinfer.trace.replay import fold

CROWDED = EngineConfig(num_blocks=6, block_size=2, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=20)


def engine_with(num_requests=5, config=CROWDED, **options):
    engine = Engine(config, SimulatedRunner(), **options)
    for number in range(num_requests):
        engine.add_request([1] * (2 + number), SamplingParams(max_tokens=6))
    return engine


def steps(engine, bound=500):
    """Step to the end, within a bound; yields after each step."""
    for _ in range(bound):
        if not engine.has_unfinished():
            return
        engine.step()
        yield
    raise AssertionError(f"not done after {bound} steps")


def finish(engine):
    for _ in steps(engine):
        pass


@pytest.fixture
def recorded():
    """A finished recording and the engine's own snapshots after each step."""
    engine = Engine(CROWDED, SimulatedRunner())
    with Recorder(engine) as recording:
        for number in range(5):
            engine.add_request([1] * (2 + number), SamplingParams(max_tokens=6))
        snapshots = [engine.snapshot()]
        snapshots.extend(engine.snapshot() for _ in steps(engine))
    return recording, snapshots


# -- steps --------------------------------------------------------------------------------------------------------


def test_at_gives_the_engine_as_it_was_after_each_step(recorded):
    recording, snapshots = recorded
    assert recording.num_steps == recording.last_step == len(snapshots) - 1
    assert recording.first_step == 0
    assert snapshots[-1]["num_preemptions"] > 0
    for step in [*reversed(range(len(snapshots))), *range(0, len(snapshots), 3)]:
        assert recording.at(step).snapshot() == snapshots[step]
    assert recording.at(-1).snapshot() == snapshots[-1]
    assert recording.at(-len(snapshots)).snapshot() == snapshots[0]
    assert [state.snapshot() for state in recording.states()] == snapshots


@pytest.mark.parametrize("every", [1, 2, 5])
def test_kept_states_change_nothing(recorded, every, monkeypatch):
    monkeypatch.setattr(recording_module, "KEYFRAME_STEPS", every)
    recording, snapshots = recorded
    for step in [7, 3, len(snapshots) - 1, 8, 0, 4, 3]:
        state = recording.at(step)
        assert state.snapshot() == snapshots[step]
        state.waiting.append("junk")  # what a caller does with it does not come back
        if len(state.free):
            state.free.pop_front()
        state.last.finished.append("junk")
        assert recording.at(step).snapshot() == snapshots[step]
        assert recording.at(step).last.finished != ["junk"]
    assert set(recording._keyframes) == set(range(0, len(snapshots) - 1, every))


def test_kept_states_make_going_back_cheap(recorded, monkeypatch):
    monkeypatch.setattr(recording_module, "KEYFRAME_STEPS", 4)
    recording, snapshots = recorded
    recording.at(-1)
    applied = []
    apply = recording_module.State.apply
    monkeypatch.setattr(
        recording_module.State, "apply", lambda self, event: applied.append(event) or apply(self, event)
    )
    recording.at(len(snapshots) - 2)
    assert len({event.step for event in applied}) <= 4


def test_step_events_divide_the_recording(recorded):
    recording, _ = recorded
    parts = [recording.step_events(step) for step in range(recording.last_step + 1)]
    assert [event for part in parts for event in part] == recording.events
    assert {event.kind for event in parts[0]} == {"meta", "submit"}
    assert all(part[0].kind == "step" and part[0].i == step for step, part in enumerate(parts) if step)


@pytest.mark.parametrize("step", [99, -99, 1.0, True, None, "1"])
def test_a_step_that_is_not_there(recorded, step):
    recording, snapshots = recorded
    with pytest.raises(
        RecordingError, match=f"No step {step!r}: the recording has 0 to {len(snapshots) - 1}"
    ):
        recording.at(step)


def test_an_empty_recording_says_so():
    with pytest.raises(RecordingError, match="The recording is empty"):
        Recording().at(0)


def test_it_may_be_looked_at_while_it_grows(monkeypatch):
    monkeypatch.setattr(recording_module, "KEYFRAME_STEPS", 2)
    engine = engine_with()
    with Recorder(engine) as recording:
        for _ in steps(engine):
            assert recording.at(-1).snapshot() == engine.snapshot()
            assert (
                recording.at(recording.last_step // 2).step == recording.first_step + recording.last_step // 2
            )
            assert len(recording.steps) == recording.num_steps


def test_a_recording_of_a_part_keeps_the_engines_step_numbers():
    engine = engine_with()
    for _ in range(4):
        engine.step()
    with Recorder(engine) as recording:
        before = engine.snapshot()
        finish(engine)
    assert recording.first_step == 4
    assert recording.at(4).snapshot() == before
    assert recording.last_step == engine.metrics()["num_steps"]
    assert recording.num_steps == recording.last_step - 4
    with pytest.raises(RecordingError, match="the recording has 4 to"):
        recording.at(3)
    assert list(recording.steps["step"]) == list(range(5, recording.last_step + 1))


# -- cancelled plans ----------------------------------------------------------------------------------------------


def scheduler_with_recording():
    scheduler = Scheduler(CROWDED)
    meta = Meta(SCHEMA, CROWDED.to_dict())
    meta.step = 0
    recording = Recording([meta])
    scheduler.bus.subscribe(recording.add)
    for number in range(3):
        scheduler.submit(Request(f"r{number}", 4, 6), 0)
    return scheduler, recording


def commit(scheduler, plan):
    scheduler.commit(plan, SimulatedRunner().execute(plan))


def test_a_cancelled_plan_and_its_successor_are_one_step(monkeypatch):
    monkeypatch.setattr(recording_module, "KEYFRAME_STEPS", 1)
    scheduler, recording = scheduler_with_recording()
    commit(scheduler, scheduler.schedule(0))
    commit(scheduler, scheduler.schedule(1))
    scheduler.cancel(scheduler.schedule(2))
    recording.at(3)
    commit(scheduler, scheduler.schedule(2))
    assert recording.num_steps == 3
    assert recording.at(3).snapshot() == scheduler.snapshot()
    assert [e.kind for e in recording.step_events(3)].count("step") == 2
    assert list(recording.steps["step"]) == [1, 2, 3]


def test_two_plans_cancelled_one_after_the_other():
    scheduler, recording = scheduler_with_recording()
    first, second = scheduler.schedule(0), scheduler.schedule(1)
    scheduler.cancel(second)
    scheduler.cancel(first)
    commit(scheduler, scheduler.schedule(0))
    assert recording.last_step == 1
    assert recording.at(1).snapshot() == scheduler.snapshot()
    commit(scheduler, scheduler.schedule(1))
    assert recording.last_step == 2
    assert recording.at(2).snapshot() == scheduler.snapshot()
    assert recording.at(1).step == 1


def test_a_cancelled_plan_at_the_end_is_no_row():
    scheduler, recording = scheduler_with_recording()
    commit(scheduler, scheduler.schedule(0))
    scheduler.cancel(scheduler.schedule(1))
    assert list(recording.steps["step"]) == [1]
    assert recording.at(-1).snapshot() == scheduler.snapshot()


# -- files --------------------------------------------------------------------------------------------------------


def test_save_and_load(recorded, tmp_path):
    recording, snapshots = recorded
    path = recording.save(tmp_path / "run.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]
    loaded = Recording.load(path)
    assert loaded.events == recording.events
    assert loaded.to_jsonl() == recording.to_jsonl() == path.read_text(encoding="utf-8")
    assert not loaded.truncated
    assert loaded.config == CROWDED.to_dict()
    assert [loaded.at(step).snapshot() for step in range(len(snapshots))] == snapshots
    assert repr(loaded) == repr(recording)


def test_equal_runs_give_equal_bytes_without_wall_time():
    texts = []
    for start in (0.0, 100.0):
        times = iter(range(10_000))
        engine = Engine(
            CROWDED, SimulatedRunner(), wall_clock=lambda times=times, start=start: start + next(times) / 7
        )
        with Recorder(engine) as recording:
            engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
            finish(engine)
        texts.append((recording.to_jsonl(), recording.to_jsonl(wall=False)))
    assert texts[0][0] != texts[1][0]
    assert texts[0][1] == texts[1][1]
    assert '"t":' not in texts[0][1]


def test_every_cut_of_the_tail_is_tolerated(recorded):
    recording, _ = recorded
    text = recording.to_jsonl()
    last = text[:-1].rindex("\n") + 1
    for end in range(last + 1, len(text) - 1):
        loaded = Recording.from_jsonl(text[:end])
        assert loaded.truncated
        assert loaded.events == recording.events[:-1]
    assert not Recording.from_jsonl(text[:-1]).truncated
    assert not Recording.from_jsonl(text[:last]).truncated


def test_a_tail_cut_inside_a_character(tmp_path):
    scheduler, recording = scheduler_with_recording()
    scheduler.submit(Request("née", 3, 3), 0)
    data = recording.save(tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(data[: data.rindex("é".encode()) + 1])
    loaded = Recording.load(tmp_path / "a")
    assert loaded.truncated
    assert loaded.events == recording.events[:-1]


def test_a_broken_line_before_the_end_is_an_error(recorded):
    lines = recorded[0].to_jsonl().splitlines(keepends=True)
    lines[3] = lines[3][:10] + "\n"
    with pytest.raises(RecordingError, match="the text, line 4 is not an event"):
        Recording.from_jsonl("".join(lines))


def test_unknown_kinds_are_skipped(recorded):
    recording, snapshots = recorded
    lines = recording.to_jsonl().splitlines(keepends=True)
    lines.insert(5, '{"kind":"swap","seq":99,"step":1,"dir":"out","pairs":[[1,2]]}\n')
    lines.insert(9, "[1,2,3]\n")
    loaded = Recording.from_jsonl("".join(lines))
    assert loaded.events == recording.events
    assert loaded.at(-1).snapshot() == snapshots[-1]


def test_a_newer_minor_schema_is_read_and_another_major_one_refused(recorded):
    head, *lines = recorded[0].to_jsonl().splitlines(keepends=True)
    for schema, readable in (("1.7", True), ("1", True), ("2.0", False), ("0.9", False), ("11.0", False)):
        data = json.loads(head) | {"schema": schema, "new_field": [1]}
        text = "".join([json.dumps(data) + "\n", *lines])
        if readable:
            assert Recording.from_jsonl(text).events[1:] == recorded[0].events[1:]
        else:
            with pytest.raises(
                RecordingError, match=rf"old.jsonl has schema {schema}; this version reads 1\.0"
            ):
                Recording.from_jsonl(text, "old.jsonl")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "it is empty"),
        ("\n \n", "it is empty"),
        ('{"kind":"abort","seq":0,"step":0,"rid":"a"}\n', "first line is not a meta event"),
        ("hello\n", "line 1 is not an event"),
        ('{"a": 1}\n', "first line is not a meta event"),
        ("3\n", "first line is not a meta event"),
    ],
)
def test_what_is_no_recording(text, what):
    with pytest.raises(RecordingError, match=what) as caught:
        Recording.from_jsonl(text)
    assert isinstance(caught.value, PagedInferError)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RecordingError, match=r"Cannot read .*nothing\.jsonl: No such file"):
        Recording.load(tmp_path / "nothing.jsonl")


# -- the recorder -------------------------------------------------------------------------------------------------


def test_recording_starts_and_stops_with_its_block():
    engine = engine_with()
    recorder = Recorder(engine)
    with recorder as recording:
        engine.step()
        assert recorder.start() is recording  # harmless
        number = len(recording)
    assert recorder.stop() is recording
    engine.step()
    assert len(recording) == number
    assert engine.bus.subs == ()


def test_a_fresh_engine_needs_no_keyframe_and_a_used_one_gets_one():
    engine = Engine(CROWDED, SimulatedRunner(), info={"model": "none"})
    with Recorder(engine) as recording:
        pass
    assert [event.kind for event in recording.events] == ["meta"]
    assert recording.info == {"model": "none"}
    engine.add_request([1])
    with Recorder(engine) as recording:
        pass
    assert [event.kind for event in recording.events] == ["meta", "keyframe"]


def test_past_its_limit_it_counts_what_it_drops():
    engine = Engine(CROWDED, SimulatedRunner())
    whole, part = Recorder(engine), Recorder(engine, max_events=20)
    with whole as everything, part as recording:
        for number in range(5):
            engine.add_request([1] * (2 + number), SamplingParams(max_tokens=6))
        finish(engine)
    assert recording.events[:20] == everything.events[:20]
    assert [event.kind for event in recording.events[20:]] == ["gap"]
    assert recording.events[-1].dropped == len(everything) - 20
    loaded = Recording.from_jsonl(recording.to_jsonl())
    assert loaded.events[-1].dropped == len(everything) - 20


def test_errors_of_the_run_are_listed():
    class Failing(SimulatedRunner):
        def execute(self, plan):
            if plan.step == 2 and self.num_steps == 1:
                self.num_steps += 1
                raise OSError("no luck")
            return super().execute(plan)

    engine = Engine(CROWDED, Failing())
    with Recorder(engine) as recording:
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
        engine.step()
        with pytest.raises(OSError, match="no luck"):
            engine.step()
        finish(engine)
    assert [(error.where, error.what) for error in recording.errors] == [("runner", "OSError: no luck")]
    assert fold(recording.events).snapshot() == engine.snapshot()


def test_it_shows_itself(recorded):
    recording, snapshots = recorded
    steps = len(snapshots) - 1
    assert repr(recording) == f"Recording({steps} steps, 5 requests, {len(recording)} events)"
    assert "num_blocks=6" in recording._repr_html_()
    assert "<table>" in recording._repr_html_()


def test_a_recording_cannot_begin_inside_a_subscriber():
    from pagedinfer.engine.engine import Engine
    from pagedinfer.sim.simulated import SimulatedRunner

    engine, refused = Engine(EngineConfig(num_blocks=4, block_size=4), SimulatedRunner()), []

    def listen(event):
        with pytest.raises(RecordingError, match="between two steps"):
            Recorder(engine).start()
        refused.append(event.kind)

    engine.bus.subscribe(listen)
    engine.add_request([1, 2, 3])
    engine.step()
    assert "step" in refused
    assert Recorder(engine).start().events


def test_what_a_recording_says_of_itself_is_text_not_html():
    meta = Meta(SCHEMA, {"num_blocks": 4, "<img src=x onerror=alert(1)>": "<script>alert(2)</script>"})
    html = Recording([meta])._repr_html_()
    assert "<img" not in html
    assert "<script" not in html
    assert "&lt;script&gt;alert(2)&lt;/script&gt;" in html


ODD = ["a\ud800b", "\udcff", "a\x00\x1b[31m\x07", "naïve 🙂 \u2028"]


@pytest.mark.parametrize("rid", ODD)
def test_any_id_survives_a_file(rid, tmp_path):
    recording = Recorder(engine := Engine(CROWDED, SimulatedRunner())).start()
    engine.add_request([1, 2], SamplingParams(max_tokens=2), request_id=rid)
    finish(engine)
    again = Recording.load(recording.save(tmp_path / "a.jsonl"))
    assert again.events == recording.events
    assert list(again.requests["request"]) == [rid]
    assert not (tmp_path / "a.jsonl.part").exists()


def test_a_recording_begins_between_two_steps_of_another_thread():
    from pagedinfer.config import SamplingParams
    from pagedinfer.engine.engine import Engine
    from pagedinfer.sim.simulated import SimulatedRunner

    engine = Engine(EngineConfig(num_blocks=40, block_size=4), SimulatedRunner())
    engine.add_request([1, 2], SamplingParams(max_tokens=100))
    engine.step()
    subscribe, threads = engine.bus.subscribe, []

    def late(fn):  # another thread tries to step between the keyframe and the subscription
        threads.append(threading.Thread(target=engine.step))
        threads[0].start()
        threads[0].join(0.1)
        return subscribe(fn)

    engine.bus.subscribe = late
    recording = Recorder(engine).start()
    threads[0].join()
    for _ in range(5):
        engine.step()
    assert recording.at(-1).snapshot() == engine.snapshot()


def test_a_recording_cannot_begin_inside_a_forward_pass():
    from pagedinfer.engine.engine import Engine
    from pagedinfer.sim.simulated import SimulatedRunner

    class Curious(SimulatedRunner):
        def execute(self, plan):
            with pytest.raises(RecordingError, match="between two steps"):
                Recorder(engine).start()
            return super().execute(plan)

    engine = Engine(EngineConfig(num_blocks=4, block_size=4), Curious())
    engine.add_request([1, 2, 3])
    assert engine.step()


# -- what does not fit ------------------------------------------------------------------------------------------------


def changed(recording, kind, **values):
    """The recording's file, with fields of the first event of a kind changed."""
    rows = [json.loads(line) for line in recording.to_jsonl().splitlines()]
    next(row for row in rows if row["kind"] == kind).update(values)
    return "\n".join(map(json.dumps, rows))


def test_a_step_that_does_not_follow_is_refused_and_the_place_marked(recorded):
    recording, _ = recorded
    third = next(event for event in recording.events if event.kind == "step" and event.i == 3)
    again = Recording(event for event in recording.events if event.step < 2)
    with pytest.raises(RecordingError, match=r"Step 3 does not follow step 1: [0-9]+ or more events"):
        again.add(third)
    assert again.events[-1].kind == "gap"
    assert again.events[-1].dropped == third.seq - again.events[-2].seq - 1 > 0
    assert again.last_step == 1


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("step", {"now": float("nan")}, "NaN is no number"),
        ("step", {"budget": "8"}, "budget of step is '8', which is no int"),
        ("step", {"budget": True}, "budget of step is True, which is no int"),
        ("step", {"scheduled": {"r0": 1.5}}, "scheduled of step is"),
        ("step", {"reasons": ["x"]}, "which is no dict"),
        ("step", {"i": 7}, "Step 7 does not follow"),
        ("submit", {"rid": 5}, "rid of submit is 5, which is no str"),
        ("submit", {"num_prompt_tokens": 10**30}, "which is no int"),
        ("submit", {"t": "now"}, "t of submit is 'now'"),
        ("alloc", {"pblks": ["0"]}, "which is no tuple"),
        ("meta", {"config": {"num_blocks": 10**12}}, "num_blocks in config is 1000000000000; it must be"),
        (
            "meta",
            {"config": {"block_size": 0}},
            "block_size in config is 0; it must be an integer from 1 to 512",
        ),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(recorded, kind, values, said):
    recording, _ = recorded
    with pytest.raises(RecordingError, match=said):
        Recording.from_jsonl(changed(recording, kind, **values))


def test_json_nested_too_deep_is_refused(recorded):
    recording, _ = recorded
    first, *rest = recording.to_jsonl().splitlines()
    with pytest.raises(RecordingError, match="line 2 is not an event"):
        Recording.from_jsonl("\n".join([first, "[" * 200_000, *rest]))


@pytest.mark.parametrize(
    ("kind", "values"),
    [("alloc", {"pblks": [99]}), ("admit", {"rid": "nobody"}), ("commit", {"tokens": {"nobody": 1}})],
)
def test_an_event_that_does_not_fit_is_named(recorded, kind, values):
    from pagedinfer.views import picture_svg

    again = Recording.from_jsonl(changed(recorded[0], kind, **values))
    number = next(event.seq for event in again.events if event.kind == kind)
    for look in (Recording.at, picture_svg):
        with pytest.raises(RecordingError, match=rf"event {number} \({kind}\) does not fit what came before"):
            look(again, -1)


@pytest.mark.parametrize("most", [0, -1, 1.5, True, "9"])
def test_a_bound_of_events_that_is_none_is_refused(most):
    with pytest.raises(PagedInferError, match=r"max_events=.*: it must be None or an integer of at least 1"):
        Recording(max_events=most)


def test_a_second_submission_of_a_live_request_does_not_fit(recorded):
    recording, _ = recorded
    rows = recording.to_jsonl().splitlines()
    again = Recording.from_jsonl("\n".join([*rows[:3], rows[2], *rows[3:]]))
    with pytest.raises(
        RecordingError, match="does not fit what came before it: ValueError 'r1' is live already"
    ):
        again.at(-1)


def test_an_input_that_the_core_cannot_have_had_is_named(recorded):
    from pagedinfer.sim.rerun import rerun

    again = Recording.from_jsonl(changed(recorded[0], "commit", tokens={"nobody": 1}))
    with pytest.raises(
        RecordingError, match=r"\(commit\) does not fit what the core made of those before it"
    ):
        rerun(again)


def test_until_knows_nothing_of_what_comes_later(recorded):
    recording, _ = recorded
    for step in (recording.first_step, 3, recording.last_step):
        cut = recording.until(step)
        assert cut.last_step == step
        assert cut.at(-1).snapshot() == recording.at(step).snapshot()
    with pytest.raises(RecordingError, match="No step"):
        recording.until(recording.last_step + 1)


def test_a_stopped_recorder_does_not_begin_again_with_a_silent_hole():
    engine = Engine(CROWDED, SimulatedRunner())
    recorder = Recorder(engine)
    recorder.start()
    engine.add_request([1, 2], SamplingParams(max_tokens=3))
    recorder.stop()
    engine.step()
    with pytest.raises(RecordingError, match="make a new one"):
        recorder.start()


def test_a_recorder_says_what_it_listens_to():
    with pytest.raises(ConfigError, match="not to a str"):
        Recorder("tiny")
