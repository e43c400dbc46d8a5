"""Perfetto traces, read back by the classes of the `perfetto` package: slices, tracks, counters against the tables."""

from itertools import pairwise

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import RecordingError
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace import events as ev
from pagedinfer.trace.lives import Lives
from pagedinfer.trace.perfetto import COUNTERS, to_perfetto
from pagedinfer.trace.protobuf import double, integer, message, text
from pagedinfer.trace.recording import Recording

pb = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="perfetto is not installed (extra: test)"
)
EVENT = pb.TrackEvent


def facts_of(event):
    """The arguments of a track event."""
    return {a.name: getattr(a, a.WhichOneof("value")) for a in event.debug_annotations}


class Trace:
    """A trace file, read back and checked: times, nesting, and that every track used is described."""

    def __init__(self, data):
        self.file = pb.Trace.FromString(data)
        assert self.file.SerializeToString() == data or pb.Trace.FromString(data) == self.file
        self.tracks = {
            p.track_descriptor.uuid: p.track_descriptor
            for p in self.file.packet
            if p.HasField("track_descriptor")
        }
        self.events = [(p.timestamp, p.track_event) for p in self.file.packet if p.HasField("track_event")]
        assert {p.trusted_packet_sequence_id for p in self.file.packet} == {1}
        assert len(self.tracks) == sum(p.HasField("track_descriptor") for p in self.file.packet)
        times = [at for at, _ in self.events]
        assert times == sorted(times)
        assert {e.track_uuid for _, e in self.events} <= self.tracks.keys()
        (self.process,) = [t for t in self.tracks.values() if t.HasField("process")]
        assert all(t.parent_uuid == self.process.uuid for t in self.tracks.values() if t is not self.process)
        self.slices = {uuid: self._slices(uuid) for uuid in self.tracks}

    def _slices(self, uuid):
        """[(name, start, end, depth, facts)] of a track by their begins; fails where begins and ends do not pair."""
        done, stack = [], []
        for at, event in self.events:
            if event.track_uuid != uuid:
                continue
            if event.type == EVENT.TYPE_SLICE_BEGIN:
                stack.append([event.name, at, None, len(stack), facts_of(event)])
                done.append(stack[-1])
            elif event.type == EVENT.TYPE_SLICE_END:
                row = stack.pop()
                row[2] = at
                row[4] |= facts_of(event)
        assert not stack, f"{self.tracks[uuid].name}: {stack} never ends"
        return [tuple(row) for row in done]

    def named(self, name):
        """Track ids of a name, in order."""
        return [uuid for uuid, track in self.tracks.items() if track.name == name]

    @property
    def requests(self):
        """(request id, its slices) of each request's track."""
        return [(t.name, self.slices[uuid]) for uuid, t in self.tracks.items() if uuid >= 1000]

    def counter(self, name):
        """[(time, value)] of a counter track."""
        (uuid,) = self.named(name)
        found = [(at, e) for at, e in self.events if e.track_uuid == uuid]
        assert all(e.type == EVENT.TYPE_COUNTER for _, e in found)
        return [(at, getattr(e, e.WhichOneof("counter_value_field"))) for at, e in found]

    def instants(self, name="steps"):
        """(name, facts) of the marks of a track."""
        (uuid,) = self.named(name)
        return [
            (e.name, facts_of(e))
            for _, e in self.events
            if (e.track_uuid, e.type) == (uuid, EVENT.TYPE_INSTANT)
        ]


def check(recording):
    """The trace of a recording agrees with its tables. Returns the trace."""
    trace = Trace(to_perfetto(recording))
    steps, (track,) = recording.steps, trace.named("steps")
    assert [name for name, *_ in trace.slices[track]] == [f"step {i}" for i in steps["step"]]
    ends = [end for _, _, end, _, _ in trace.slices[track]]
    for name in COUNTERS:
        known = (
            [recording.config["num_blocks"] - used for used in steps["used_blocks"]]
            if name == "free_blocks"
            else steps[name]
        )
        assert trace.counter(name) == list(zip(ends, known, strict=True)), name
    for column, fact in (("num_scheduled_tokens", "tokens"), ("num_requests", "requests")):
        assert [facts[fact] for *_, facts in trace.slices[track]] == steps[column]
    before = next((e.snapshot["requests"] for e in recording.events if e.kind == "keyframe"), {})
    submitted = recording.requests["request"]
    assert [rid for rid, _ in trace.requests][len(before) :] == submitted
    assert {rid for rid, _ in trace.requests[: len(before)]} == before.keys()
    table = list(recording.requests.rows())
    for (rid, slices), row in zip(trace.requests[len(before) :], table, strict=True):
        check_life(rid, slices, row, recording)
    return trace


def check_life(rid, slices, row, recording):
    """One request's slices: one outer slice with its ends and counts, phases within that do not overlap."""
    (life,) = [s for s in slices if s[3] == 0]
    assert life[0] == rid
    assert life[4]["prompt_tokens"] == row["prompt_tokens"]
    if row["finish_reason"] is not None:
        assert life[4]["ended"] == row["finish_reason"]
        assert life[4]["preemptions"] == row["preemptions"]
        assert life[4]["output_tokens"] == row["output_tokens"]
    phases = [s for s in slices if s[3] == 1]
    assert all(a[2] <= b[1] for a, b in pairwise(phases))
    assert {s[0] for s in phases} <= {"waiting", "prefill", "decode", "held", "preempted", "swapped"}
    assert all(start < end for name, start, end, depth, _ in slices if name == "waiting" or depth == 2)
    work = sum(s[4]["tokens"] for s in phases if s[0] in ("prefill", "decode"))
    assert work == scheduled_tokens(recording, rid, row)


def scheduled_tokens(recording, rid, row):
    """Tokens of the request in plans that were not cancelled: from the states, which take cancelled plans back."""
    last = recording.last_step if row["finished"] is None else row["finished"]
    total = 0
    for step, state in enumerate(recording.states(), recording.first_step):
        if row["submitted"] < step <= last and state.step == step:
            total += state.last.scheduled.get(rid, 0)
    return total


SMALL_POOL = {"num_blocks": 12, "block_size": 4, "prompts": (4, 20), "outputs": (2, 20), "watermark": 0.0}


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_agree_with_their_tables(simulated_run, seed):
    recording = simulated_run(seed=seed, cancels=0.2, aborts=0.1, **SMALL_POOL).finish()
    trace = check(recording)
    cancelled = sum(event.kind == "cancel" for event in recording.events)
    assert sum(name.endswith("cancelled") for name, _ in trace.instants()) == cancelled
    assert trace.process.process.process_name == "pagedinfer"
    assert list(trace.process.process.process_labels) == [
        "steps; 1 step = 1 ms, for the recording has no wall time"
    ]


class EveryLife(Lives):
    """The slow twin: looks at every live request after every plan, not only at those that something happened to."""

    def _commit(self, plan, result):
        self._touched |= self._live.keys()
        super()._commit(plan, result)


@pytest.mark.parametrize("seed", range(4))
def test_looking_only_at_what_was_touched_misses_nothing(simulated_run, seed):
    settings = SMALL_POOL | {"requests": 40, "max_num_seqs": 2, "cancels": 0.2, "aborts": 0.1}
    recording = simulated_run(seed=seed, **settings).finish()
    assert max(recording.steps["waiting"]) > 4
    assert Lives(recording.events, 0).marks == EveryLife(recording.events, 0).marks


def test_the_random_runs_meet_what_they_are_for(simulated_run):
    runs = [simulated_run(seed=seed, cancels=0.2, aborts=0.1, **SMALL_POOL).finish() for seed in range(12)]
    kinds = {event.kind for run in runs for event in run.events}
    assert {"preempt", "resume", "cancel", "abort", "finish"} <= kinds
    names = {
        s[0]
        for run in runs[:4]
        for _, slices in Trace(to_perfetto(run)).requests
        for s in slices
        if s[3] == 1
    }
    assert names >= {"waiting", "prefill", "decode", "preempted"}


@pytest.mark.parametrize(
    ("options", "phase"),
    [
        ({"num_host_blocks": 64, "preempt_mode": "swap"}, "swapped"),
        ({"allocator": "grow-by-move", "num_blocks": 16}, "preempted"),
        ({"enable_prefix_caching": False}, "preempted"),
    ],
)
def test_other_ways_to_keep_memory(simulated_run, options, phase):
    recording = simulated_run(seed=2, requests=30, cancels=0.2, **SMALL_POOL | options).finish()
    assert phase in {name for _, slices in check(recording).requests for name, *_ in slices}


def test_a_recording_begun_in_the_middle(simulated_run):
    run = simulated_run(seed=3, cancels=0.1, **SMALL_POOL)
    for _ in range(9):
        run.advance()
    recording = Recording([run.recording.events[0]])
    recording.events[0].step = run.scheduler.step
    recording = Recording(recording.events)
    keyframe = ev.Keyframe(run.scheduler.snapshot())
    keyframe.step = run.scheduler.step
    recording.add(keyframe)
    live = set(run.scheduler.requests)
    run.scheduler.bus.subscribe(recording.add)
    run.finish()
    assert live
    trace = check(recording)
    assert [s[0] for rid, slices in trace.requests for s in slices if s[3] == 0 and rid in live]
    assert trace.slices[trace.named("steps")[0]][0][1] == keyframe.step * 1_000_000


def test_a_gap_and_an_open_plan_at_the_end(simulated_run):
    events = simulated_run(seed=5, **SMALL_POOL).finish().events
    for length in range(1, 90, 7):
        recording = Recording(max_events=length)
        for event in events:
            recording.add(event)
        trace = check(recording)
        assert trace.instants()[-1] == ("gap", {"dropped": len(events) - length})


def test_every_beginning_of_a_recording_makes_a_trace(simulated_run):
    events = simulated_run(seed=8, cancels=0.2, aborts=0.1, requests=4, **SMALL_POOL).finish().events
    for length in range(1, len(events), 3):
        check(Recording(events[:length]))


class Told:
    """A scheduler under a recording with a wall clock that is told the time."""

    def __init__(self, **config):
        settings = {
            "num_blocks": 4,
            "block_size": 2,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 4,
            "max_model_len": 20,
        }
        self.scheduler = Scheduler(EngineConfig(**settings | config))
        self.time = 100.0
        self.scheduler.bus.wall_clock = lambda: self.time
        meta = ev.Meta(ev.SCHEMA, self.scheduler.config.to_dict(), {"model": "tiny"})
        meta.step = 0
        self.recording = Recording([meta])
        self.scheduler.bus.subscribe(self.recording.add)

    def submit(self, rid, prompt, max_tokens):
        self.scheduler.submit(Request(rid, prompt, max_tokens), self.scheduler.step)

    def plan(self):
        return self.scheduler.schedule(self.scheduler.step)

    def commit(self, plan):
        self.scheduler.commit(plan, SimulatedRunner().execute(plan))

    def step(self, seconds):
        plan = self.plan()
        self.time += seconds
        self.commit(plan)
        self.time += 0.25


def test_a_story_in_wall_time():
    run = Told()
    run.submit("a", 3, 4)
    run.time += 1
    run.submit("b", 3, 4)
    run.time += 1
    for _ in range(6):
        run.step(0.5)
    trace = check(run.recording)
    assert trace.process.process.process_name == "pagedinfer tiny"
    assert list(trace.process.process.process_labels) == [
        "wall time; 0 is 100.000000 s of the recording's clock"
    ]
    ms = 1_000_000
    (a, b) = trace.requests
    assert [(name, start // ms, end // ms) for name, start, end, depth, _ in a[1] if depth < 2] == [
        ("a", 0, 4750), ("waiting", 0, 2000), ("prefill", 2000, 2500), ("decode", 2750, 4750),
    ]  # fmt: skip
    assert [(name, start // ms, end // ms) for name, start, end, depth, _ in b[1] if depth < 2] == [
        ("b", 1000, 6250), ("waiting", 1000, 2000), ("prefill", 2000, 2500), ("decode", 2750, 3250),
        ("preempted", 3500, 5000), ("prefill", 5000, 5500), ("decode", 5750, 6250),
    ]  # fmt: skip
    causes = [name for name, _, _, depth, _ in b[1] if depth == 2]
    assert causes[0] == "no step has been planned since it came"
    assert causes[1] == next(e.why for e in run.recording.events if e.kind == "preempt")
    waits = [e.reasons["b"] for e in run.recording.events if e.kind == "step" and "b" in e.reasons]
    assert causes[2:] == list(dict.fromkeys(waits[1:]))  # the first says only that it was preempted
    prefill = next(s for s in b[1] if s[0] == "prefill")
    assert prefill[4] == {"step": 1, "tokens": 3, "from": 0, "blocks": 2}
    decode = next(s for s in a[1] if s[0] == "decode")
    assert decode[4] == {"first_step": 2, "from": 3, "tokens": 3, "steps": 3, "last_step": 4, "blocks": 3}


def test_two_plans_under_way_do_not_overlap():
    run = Told(num_blocks=16)
    run.submit("a", 3, 9)
    first = run.plan()
    run.time += 1
    run.submit("b", 2, 9)
    second = run.plan()
    run.time += 1
    run.commit(first)
    run.time += 1
    run.commit(second)
    run.time += 1
    trace = Trace(to_perfetto(run.recording))
    steps = [(name, start, end) for name, start, end, *_ in trace.slices[trace.named("steps")[0]]]
    assert steps == [("step 1", 0, 2_000_000_000), ("step 2", 2_000_000_000, 3_000_000_000)]


def test_an_id_used_again_is_two_tracks_that_are_never_merged():
    run = Told()
    run.submit("a", 3, 1)
    run.step(1)
    run.submit("a", 2, 1)
    run.step(1)
    trace = check(run.recording)
    assert [rid for rid, _ in trace.requests] == ["a", "a"]
    kinds = {t.sibling_merge_behavior for uuid, t in trace.tracks.items() if uuid >= 1000}
    assert kinds == {pb.TrackDescriptor.SIBLING_MERGE_BEHAVIOR_NONE}


def test_marks_for_what_happens_beside_the_plan():
    run = Told()
    run.submit("a", 3, 1)
    run.step(1)
    for event in (ev.Reject("z", 99, 1, 0, 0.0, "too long"), ev.Error("subscriber", "ValueError: \ud800")):
        run.scheduler.bus.emit(event)
    assert Trace(to_perfetto(run.recording)).instants()[1:] == [
        ("z rejected", {"why": "too long"}),
        ("error in subscriber", {"what": "ValueError: \\ud800"}),
    ]


def test_what_the_file_says_of_itself(simulated_run, tmp_path):
    recording = simulated_run(seed=1, requests=2).finish()
    path = recording.to_perfetto(tmp_path / "run.pftrace")
    assert [p.name for p in tmp_path.iterdir()] == ["run.pftrace"]
    about = Trace(path.read_bytes()).instants()[0]
    assert about[0] == "recording"
    assert about[1]["clock"].startswith("steps; 1 step = 1 ms")
    assert about[1]["num_blocks"] == recording.config["num_blocks"]


def test_an_empty_recording_has_no_trace():
    with pytest.raises(RecordingError, match="The recording is empty"):
        to_perfetto(Recording())


def test_the_checks_can_fail(simulated_run):
    recording = simulated_run(seed=2, requests=3).finish()
    data = to_perfetto(recording)
    broken = pb.Trace.FromString(data)
    ends = [i for i, p in enumerate(broken.packet) if p.track_event.type == EVENT.TYPE_SLICE_END]
    del broken.packet[ends[-1]]
    with pytest.raises(AssertionError, match="never ends"):
        Trace(broken.SerializeToString())


def test_fields_as_the_reference_writes_them():
    """Our writer against protobuf's own, on each wire type and at the ends of their ranges."""
    for value in (0, 1, 127, 128, 300, 2**32, 2**63 - 1, -1, -(2**63)):
        assert pb.DebugAnnotation.FromString(integer(4, value)).int_value == value
        assert integer(4, value) == pb.DebugAnnotation(int_value=value).SerializeToString()
    for value in (0.0, -1.5, 1e300, float("inf")):
        assert double(5, value) == pb.DebugAnnotation(double_value=value).SerializeToString()
    for value in ("", "abc", "é…" * 100):
        assert text(10, value) == pb.DebugAnnotation(name=value).SerializeToString()
    inner = pb.TracePacket(track_event=EVENT(track_uuid=2**64 - 1))
    assert message(11, integer(11, 2**64 - 1)) == inner.SerializeToString()
