"""What the views draw from is what the recording says, at every step, on random runs and while they grow."""

import json
import random
import shutil
import subprocess

import pytest
from busy_runs import busy_run
from simulated_runs import randomly

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.events import SCHEMA, Keyframe, Meta
from pagedinfer.trace.recording import Recording, RecordingError
from pagedinfer.views.assets import read_static
from pagedinfer.views.camera import queue_change
from pagedinfer.views.film import Film, film_of
from pagedinfer.views.frame import DECODE, GONE, HELD, PREEMPTED, PREFILL, WAITING, changed_queue
from pagedinfer.views.memory import memory_words
from pagedinfer.views.picture import describe
from pagedinfer.views.sentences import block_sentence, short_label

TIGHT = {"prompts": (1, 9), "outputs": (1, 12), "requests": 20, "aborts": 0.03, "cancels": 0.1}


def tight_run(simulated_run, seed):
    rng = random.Random(seed)
    sizes = {"num_blocks": rng.choice([10, 20, 40]), "block_size": rng.choice([1, 4, 16])}
    return simulated_run(seed=seed, max_num_batched_tokens=rng.choice([7, 16, 64]), **sizes, **TIGHT)


def rids(film, lanes):
    return [film.lanes[lane].rid for lane in lanes]


def assert_frame_is_state(film, frame, state):
    assert (rids(film, frame.running), rids(film, frame.waiting)) == (state.running, state.waiting)
    assert sorted(rids(film, frame.rows)) == sorted(state.requests)
    for lane, row in frame.rows.items():
        request = state.requests[film.lanes[lane].rid]
        assert row.num_tokens == request.num_tokens
        assert row.num_computed_tokens == request.num_computed_tokens
        assert row.status == request.status
        assert row.block_table == request.block_table
        fill = [row.fill(logical, film.block_size) for logical in range(len(row.block_table))]
        assert fill == state.fill(request.rid)
        if request.rid in state.last.reasons:
            assert row.why == state.last.reasons[request.rid]
    assert {film.lanes[lane].rid: n for lane, n in frame.scheduled.items()} == state.last.scheduled
    usage = state.usage()
    slots = [
        usage[f"{part}_slots"] for part in ("live", "tail_slack", "free", "shared", "cached", "reserved")
    ]
    memory = frame.memory
    assert [memory.live, memory.slack, memory.free, memory.shared, memory.cached, memory.reserved] == slots
    assert memory.used == len(state.ref_counts)
    assert memory.host == sum(map(len, state.host_tables.values()))
    assert rids(film, frame.swapped) == state.swapped
    assert frame.kv_waste == pytest.approx(usage["kv_waste"])
    blocks = frame.blocks(film.block_size)
    assert {b: block.ref_count for b, block in blocks.items() if not block.is_idle} == state.ref_counts
    owners = {
        b: sorted((film.lanes[lane].rid, i) for lane, i in block.owners)
        for b, block in blocks.items()
        if block.owners
    }
    assert owners == {b: sorted(held) for b, held in state.owners().items()}
    groups = state.num_groups
    keys = {
        b: (group + groups * key, groups * state.parents[key] + group if state.parents[key] >= 0 else -1)
        for b, (group, key) in state.cached.items()
    }
    assert frame.cached == keys


@pytest.mark.parametrize("seed", range(8))
def test_every_frame_is_the_recorded_state(simulated_run, seed):
    recording = tight_run(simulated_run, seed).finish()
    film = Film(recording)
    assert film.last_step == recording.last_step
    for state in recording.states():
        assert_frame_is_state(film, film.frame(state.step), state)


TINY = {
    "num_blocks": 14,
    "block_size": 2,
    "max_num_batched_tokens": 10,
    "max_num_seqs": 5,
    "max_model_len": 28,
}
FEATURES = {
    "shared prefixes": {},
    "swapping": {"num_blocks": 10, "num_host_blocks": 12, "preempt_mode": "swap"},
    "sliding window": {"group_windows": (None, 6), "num_blocks": 24},
    "guessed tokens": {"num_draft_tokens": 3},
    "reserve-max": {"allocator": "reserve-max", "num_blocks": 40, "enable_prefix_caching": False},
    "buddy": {"allocator": "buddy", "num_blocks": 32, "enable_prefix_caching": False},
    "grow by move": {"allocator": "grow-by-move", "compaction": True, "enable_prefix_caching": False},
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_filmed(feature, seed):
    config = EngineConfig(**TINY | FEATURES[feature])
    run = randomly(seed, config=config, shared=feature not in ("reserve-max", "buddy", "grow by move"))
    film = Film(run.recording)
    for step, state in enumerate(run.recording.states()):
        assert_frame_is_state(film, film.frame(step), state)
    growing = Film(Recording(run.recording.events[:5]))
    for event in run.recording.events[5:]:
        growing._camera._events.append(event)
        if event.seq % 3 == 0:
            growing.update()
    growing.update()
    assert growing.lines == film.lines
    film_has(feature, film)


def film_has(feature, film):
    """The feature came: the test above would say nothing of what did not happen."""
    last = [film.frame(step).memory for step in range(film.last_step + 1)]
    if feature == "shared prefixes":
        assert any(m.shared for m in last)
        assert any(m.cached for m in last)
    if feature == "swapping":
        assert any(m.host for m in last)
        assert any(film.frame(step).swapped for step in range(film.last_step + 1))
    if feature in ("reserve-max", "buddy"):
        assert any(m.reserved for m in last)


@pytest.mark.parametrize("seed", range(4))
def test_a_film_that_grows_equals_one_made_at_the_end(simulated_run, seed):
    run = tight_run(simulated_run, seed)
    film, rng = Film(run.recording), random.Random(seed)
    while run.advance():
        if rng.random() < 0.5:
            assert film.update() <= film.last_step
    film.update()
    whole = Film(run.recording)
    assert (film.lines, film.texts, film.lanes) == (whole.lines, whole.texts, whole.lanes)
    assert film.update() == film.last_step + 1, "nothing came in, so nothing changed"


def test_random_access_equals_playing_through(simulated_run):
    film = Film(simulated_run(seed=3, requests=40).finish())
    steps = list(range(film.last_step + 1))
    played = [film.frame(step) for step in steps]
    random.Random(1).shuffle(steps)
    assert all(film.frame(step) == played[step] for step in steps)
    film.frame(5).rows.clear()
    assert film.frame(5) == played[5], "a frame is a copy"


def test_what_requests_did_covers_the_whole_vocabulary_and_fits_the_plan(simulated_run):
    seen = set()
    runs = [tight_run(simulated_run, seed) for seed in range(6)]
    runs.append(simulated_run(cancels=0, aborts=0))
    plan = runs[-1].scheduler.schedule(0)
    later = runs[-1].scheduler.schedule(1)  # nothing is left to compute while the first plan is open
    for open_plan in (plan, later):
        runs[-1].scheduler.commit(open_plan, SimulatedRunner().execute(open_plan))
    for run in runs:
        recording = run.finish()
        film = Film(recording)
        for step in range(1, film.last_step + 1):
            frame, state = film.frame(step), recording.at(step)
            assert set(frame.scheduled) == {
                lane for lane, did in frame.did.items() if did in (PREFILL, DECODE)
            }
            for lane, did in frame.did.items():
                rid = film.lanes[lane].rid
                if did == WAITING:
                    assert state.requests[rid].status == "waiting"
                elif did == PREEMPTED:
                    assert state.requests[rid].status == "preempted"
                elif did == HELD:
                    assert rid in state.running
                    assert rid not in state.last.scheduled
                elif did == DECODE:
                    assert state.last.scheduled[rid] == 1
            seen |= set(frame.did.values())
    assert seen == {WAITING, PREFILL, DECODE, HELD, PREEMPTED}


def test_runs_say_what_frames_say(simulated_run):
    film = Film(tight_run(simulated_run, 2).finish())
    cells = {}
    for lane, runs in film.runs(3, film.last_step).items():
        for did, first, last in runs:
            assert did != PREFILL or first == last, "each chunk is a bar of its own"
            for step in range(first, last + 1):
                assert (lane, step) not in cells
                cells[lane, step] = did
    for step in range(3, film.last_step + 1):
        assert film.frame(step).did == {lane: did for (lane, at), did in cells.items() if at == step}
    assert GONE not in cells.values()


def test_every_waiting_request_has_a_reason_once_steps_are_planned(simulated_run):
    film = Film(tight_run(simulated_run, 4).finish())
    waits = [
        row
        for step in range(1, film.last_step + 1)
        for row in film.frame(step).rows.values()
        if row.status != "running"
    ]
    assert waits
    assert all(row.why for row in waits)


def test_a_block_has_belonged_to_its_owner_since_the_step_the_tables_say(simulated_run):
    recording = simulated_run(seed=5, num_blocks=24, cancels=0).finish()
    film = Film(recording)
    step = max(range(film.last_step + 1), key=lambda s: film.lines[s]["m"][3])
    held = {
        row["block"]: row
        for row in recording.blocks.rows()
        if row["allocated"] <= step and (row["freed"] or 10**9) > step
    }
    blocks = film.frame(step).blocks(film.block_size)
    assert {b: (film.lanes[x.owners[0][0]].rid, x.owners[0][1]) for b, x in blocks.items()} == {
        b: (row["request"], row["logical"]) for b, row in held.items()
    }


def test_lines_sent_to_the_browser_rebuild_the_film(simulated_run):
    run = simulated_run(seed=6)
    for _ in range(10):
        run.advance()
    film = Film(run.recording)
    head, *lines = (json.loads(line) for line in film.encode().decode().split("\n"))
    assert (head["from"], head["num_blocks"], head["block_size"]) == (0, 64, 16)
    newest = film.last_step
    run.advance()
    film.update()
    tail_head, *tail = (json.loads(line) for line in film.encode(newest).decode().split("\n"))
    assert tail_head["from"] == newest
    assert lines[:newest] + tail == film.lines


def test_a_film_stays_small(simulated_run):
    run = simulated_run(
        num_blocks=1024, requests=300, max_num_seqs=32, max_num_batched_tokens=256, cancels=0, aborts=0
    )
    film = Film(run.finish())
    assert film.last_step >= 300
    assert len(film.encode()) / film.last_step < 2_500, (
        "bytes per step: 1,000 steps of 1,024 blocks are a few MB"
    )


def test_an_id_used_again_is_another_request(simulated_run):
    run = simulated_run(requests=3, cancels=0, aborts=0)
    run.scheduler.abort("R2")
    run.scheduler.submit(Request("R2", 5, 3), 0)
    film = Film(run.finish())
    assert [lane.rid for lane in film.lanes] == ["R1", "R2", "R3", "R2"]
    assert film.lane("R2") == 3


def test_a_recording_begun_in_the_middle(simulated_run):
    run = simulated_run(cancels=0)
    for _ in range(9):
        run.advance()
    late = Recording()
    for event in (Meta(SCHEMA, run.scheduler.config.to_dict()), Keyframe(run.scheduler.snapshot())):
        event.step = run.scheduler.step
        late.add(event)
    run.scheduler.bus.subscribe(late.add)
    run.finish()
    film = Film(late)
    assert film.first_step == 9
    for step in range(9, late.last_step + 1):
        assert_frame_is_state(film, film.frame(step), late.at(step))


def test_sentences_name_numbers_and_causes(simulated_run):
    recording = simulated_run(seed=2, num_blocks=16, cancels=0, aborts=0).finish()
    film = film_of(recording)
    step = next(
        s for s in range(film.last_step + 1) if any(k == "preempted" for k, _, _ in film.frame(s).notes)
    )
    state = recording.at(step)
    said = describe(recording, step)
    assert said.startswith(f"step {step}: {len(state.running)} running, {len(state.waiting)} waiting, ")
    assert f"{sum(state.last.scheduled.values())} of {state.last.budget} tokens" in said
    victim = state.last.preempted[0]
    assert f"{victim} preempted because {state.last.causes[victim]}" in said
    ended = next(s for s in range(film.last_step + 1) if recording.at(s).last.finished)
    assert f"{recording.at(ended).last.finished[0]} finished (length: " in describe(recording, ended)


def test_block_sentences(simulated_run):
    recording = simulated_run(seed=1, cancels=0, aborts=0)
    recording.advance()
    film = film_of(recording.recording)
    frame = film.frame()
    block = next(iter(frame.blocks(film.block_size).values()))
    lane, logical = block.owners[0]
    said = block_sentence(film, frame, block.block_id)
    assert said.startswith(
        f"block {block.block_id}: {film.lanes[lane].rid}, logical block {logical}, tokens {16 * logical} to "
    )
    assert said.endswith("ref count 1, written in this step")
    assert block_sentence(film, frame, 63) == "block 63: free"


def test_memory_words_are_the_states_numbers(simulated_run):
    recording = simulated_run(seed=1).finish()
    film = film_of(recording)
    for step in (0, 1, 7, 20):
        usage = recording.at(step).usage()
        said = f"{usage['live_slots']} live, {usage['tail_slack_slots']} tail slack, {usage['free_slots']} free of 1024"
        words, waste = memory_words(film, step).split("; KV waste ")
        assert words == f"{said} token slots"
        assert float(waste.removesuffix(" %")) == pytest.approx(100 * usage["kv_waste"], abs=0.0501)


@pytest.mark.parametrize(
    ("rid", "label"),
    [
        ("R3", "R3"),
        ("r123", "r123"),
        ("request-12", "r12"),
        ("cmpl-a81b", "#7"),
        ("chat/98765", "#7"),
        ("x", "x"),
    ],
)
def test_short_labels(rid, label):
    assert short_label(rid, 7) == label
    assert len(label) <= 4


def test_an_empty_recording_and_a_missing_step_are_refused(simulated_run):
    with pytest.raises(RecordingError, match="record an engine first"):
        Film(Recording())
    film = Film(simulated_run().recording)
    with pytest.raises(RecordingError, match="No step 5: the recording has 0 to 0"):
        film.frame(5)


def test_why_requests_wait_is_told_as_the_state_tells_it(simulated_run):
    run = simulated_run(seed=4, num_blocks=20, max_num_seqs=3, **TIGHT)
    for number in range(9):
        run.scheduler.submit(Request(f"Q{number}", 30, 8), 0)
    recording = run.finish()
    film, behind = Film(recording), 0
    for state in recording.states():
        frame, last = film.frame(state.step), state.last
        named = last.reasons.keys() | last.preempted
        ahead = next((rid for rid in state.waiting if rid in named), None)
        for lane, row in frame.rows.items():
            rid = film.lanes[lane].rid
            if rid in last.scheduled:
                assert row.why == ""
            elif rid in last.reasons or rid in last.preempted:
                assert row.why == last.reasons.get(rid, last.causes.get(rid))
            elif last.cancelled:
                assert row.why in ("the plan was cancelled", "came after this step was planned")
            elif ahead and rid in state.waiting and row.why != "came after this step was planned":
                assert row.why == f"behind {ahead} in the queue"
                behind += 1
    assert behind


def test_those_behind_a_swapped_request_wait_with_a_reason():
    recording = busy_run(num_blocks=32, watermark=0.0, num_host_blocks=12, preempt_mode="cheaper")
    film, behind = Film(recording), 0
    for state in recording.states():
        named = state.last.reasons.keys() | state.last.preempted
        first = next((rid for rid in state.swapped if rid in named), None)
        if first and not any(rid in named for rid in state.waiting):
            rows = film.frame(state.step).rows
            whys = [rows[film.lane(rid)].why for rid in (*state.waiting, *state.swapped)]
            behind += whys.count(f"behind {first} among those swapped out")
            assert "" not in whys
    assert behind


def test_a_line_does_not_grow_with_the_queue(simulated_run):
    sizes = []
    for waiting in (20, 400):
        run = simulated_run(
            requests=3, prompts=(8, 8), outputs=(200, 200), num_blocks=64, cancels=0, aborts=0
        )
        for number in range(waiting):
            run.scheduler.submit(Request(f"Q{number}", 900, 8), 0)
        for _ in range(60):
            run.advance()
        film = Film(run.recording)
        assert len(film.frame(40).waiting) >= waiting - 4
        sizes.append(sum(len(json.dumps(line)) for line in film.lines[10:50]))
    assert sizes[1] < 1.5 * sizes[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [([], [1, 2]), ([1, 2, 3], [2, 3, 4]), ([1, 2, 3], [3, 1]), ([4, 5], [2, 4, 5, 9]), ([1, 2], [])],
)
def test_queue_changes_lead_from_one_queue_to_the_other(old, new):
    assert changed_queue(old, queue_change(old, new)) == new


MEMORY = ("live", "slack", "free", "used", "shared", "cached", "reserved", "host")
TWIN = """
const film = createFilm();
film.add(require("fs").readFileSync(0));
const rows = (f) => [...f.rows.values()].sort((a, b) => a.lane - b.lane)
  .map((r) => [r.lane, r.tokens, r.computed, r.status, r.scheduled, r.why, r.table]);
const tell = (s) => {
  const f = film.frame(s);
  const { wasted, allocated, slots, ...memory } = f.memory;
  const cached = [...f.cached].sort((a, b) => a[0] - b[0]);
  return [f.running, f.waiting, rows(f), f.notes.map((n) => n.text), Object.values(memory), cached];
};
const steps = [...film.lines.keys()].map((i) => i + film.first);
console.log(JSON.stringify([steps.map(tell), steps.reverse().map(tell).reverse()]));
"""


@pytest.mark.skipif(not shutil.which("node"), reason="runs the browser's script in node, which is not here")
@pytest.mark.parametrize("seed", [2, 4])
def test_the_browsers_twin_makes_the_same_frames(simulated_run, seed):
    run = tight_run(simulated_run, seed)
    for number in range(9):
        run.scheduler.submit(Request(f"Q{number}", 9, 8), 0)
    film = Film(run.finish())
    done = subprocess.run(
        ["node", "-e", read_static("film.js") + TWIN], input=film.encode(), capture_output=True, check=True
    )
    wanted = []
    for step in range(film.first_step, film.last_step + 1):
        frame = film.frame(step)
        rows = [
            [r.lane, r.num_tokens, r.num_computed_tokens, r.status, r.scheduled, r.why, r.block_table]
            for r in sorted(frame.rows.values(), key=lambda r: r.lane)
        ]
        cached = [[block, list(keys)] for block, keys in sorted(frame.cached.items())]
        notes = [text for _, _, text in frame.notes]
        memory = [getattr(frame.memory, name) for name in MEMORY]
        wanted.append([frame.running, frame.waiting, rows, notes, memory, cached])
    assert json.loads(done.stdout) == [wanted, wanted]
