"""The bus: order, stamps, holding back, and subscribers that misbehave."""

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import fold

CROWDED = EngineConfig(num_blocks=6, block_size=2, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=20)
WINDOWED = EngineConfig(
    num_blocks=24, block_size=2, max_model_len=40, group_windows=(None, 4), num_host_blocks=9
)
CONTIGUOUS = EngineConfig(
    num_blocks=8, block_size=2, max_model_len=16, allocator="first-fit", compaction=True
)


def run(scheduler, num_requests=5, *, max_steps=300):
    """Traffic that admits, chunks, preempts, resumes, cancels, refuses, rejects, aborts and finishes."""
    runner = SimulatedRunner()
    scheduler.blocks.refuse_calls = {4}
    for number in range(num_requests):
        scheduler.submit(Request(f"r{number}", 2 + number, 6, seed=number), 0)
    with pytest.raises(ValueError):
        scheduler.submit(Request("big", 19, 6), 0)
    for turn in range(max_steps):
        if not scheduler.requests:
            return
        plan = scheduler.schedule(scheduler.step)
        if turn % 4 == 0:
            scheduler.cancel(plan, "try again")
            plan = scheduler.schedule(scheduler.step)
        if scheduler.step == 3:
            scheduler.abort("r4")
        scheduler.commit(plan, runner.execute(plan))
        scheduler.check()
    raise AssertionError("not done")


def share_and_move(scheduler, contiguous):
    """What `run` leaves out: requests that share, fork, guess, swap, outgrow a window; a pool that changes."""
    runner = SimulatedRunner()

    def submit(rid, token_ids, max_tokens, **options):
        scheduler.submit(
            Request(rid, len(token_ids), max_tokens, token_ids=token_ids, **options), scheduler.step
        )

    def step(**more):
        plan = scheduler.schedule(scheduler.step)
        updates = scheduler.commit(plan, runner.execute(plan), **more)
        scheduler.check()
        return updates

    submit("a", list(range(9)), 6, retain=((0, 4, 80, 3.0),))
    step(drafts={"a": [-1] * 4})  # none of them will come true
    step()
    step()  # 11 tokens are written: the last block is half full
    scheduler.fork("a", scheduler.requests["a"].fork("b"), scheduler.step)
    submit("c", list(range(9)), 3)
    step()
    scheduler.preempt("a", "forced", "swap")
    while scheduler.requests:
        step()
    submit("d", list(range(50, 68)), 2)
    submit("e", list(range(70, 85)), 9)
    while "d" in scheduler.requests:
        step()
    ops = scheduler.plan_resize(20)
    scheduler.resize(20, ops)
    while scheduler.requests:
        step()
    assert scheduler.reset_prefix_cache()
    for rid, prompt in (("f", 4), ("g", 4)):
        contiguous.submit(Request(rid, prompt, 4), 0)
    plan = contiguous.schedule(0)
    contiguous.commit(plan, runner.execute(plan))
    contiguous.abort("f")
    contiguous.compact(contiguous.plan_compact(), "asked for")
    contiguous.check()


def start_recording(scheduler):
    meta = ev.Meta(ev.SCHEMA, scheduler.config.to_dict())
    meta.step = 0
    recording = Recording([meta])
    scheduler.bus.subscribe(recording.add)
    return recording


# -- order and stamps ---------------------------------------------------------------------------------------------


def test_events_come_in_order_with_seq_and_step():
    bus, got = EventBus(), []
    bus.subscribe(got.append)
    bus.emit(ev.Abort("a"))
    bus.step = 5
    bus.emit(ev.Abort("b"))
    early = ev.Abort("c")
    early.step = 2
    bus.emit(early)
    assert [(e.rid, e.seq, e.step, e.t) for e in got] == [
        ("a", 0, 0, None),
        ("b", 1, 5, None),
        ("c", 2, 2, None),
    ]


def test_wall_time_is_there_when_asked_for():
    times = iter([1.5, 2.5])
    bus, got = EventBus(lambda: next(times)), []
    bus.subscribe(got.append)
    bus.emit(ev.Abort("a"))
    bus.emit(ev.Abort("b"))
    assert [event.t for event in got] == [1.5, 2.5]


def test_held_events_wait_for_the_outermost_block_and_may_be_put_in_front():
    bus, got = EventBus(), []
    bus.subscribe(lambda event: got.append(event.rid))
    with bus.hold():
        bus.emit(ev.Abort("before"))
        mark = bus.num_queued
        with bus.hold():
            bus.emit(ev.Abort("x"))
            bus.emit(ev.Abort("y"))
        assert got == []
        bus.emit(ev.Abort("first"), at=mark)
    assert got == ["before", "first", "x", "y"]
    assert bus.num_queued == 0


def test_seq_follows_the_order_of_delivery():
    bus, got = EventBus(), []
    bus.subscribe(got.append)
    with bus.hold():
        bus.emit(ev.Abort("second"))
        bus.emit(ev.Abort("first"), at=0)
    assert [(event.rid, event.seq) for event in got] == [("first", 0), ("second", 1)]


def test_a_block_that_raises_still_delivers():
    bus, got = EventBus(), []
    bus.subscribe(got.append)

    def fail():
        with bus.hold():
            bus.emit(ev.Abort("a"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(got) == 1


def test_subscriptions_close():
    bus, got = EventBus(), []
    with bus.subscribe(got.append) as subscription:
        bus.emit(ev.Abort("a"))
    assert bus.subs == ()
    subscription.close()
    bus.emit(ev.Abort("b"))
    assert len(got) == 1


def test_the_same_function_may_subscribe_twice():
    bus, got = EventBus(), []
    first, _ = bus.subscribe(got.append), bus.subscribe(got.append)
    bus.emit(ev.Abort("a"))
    first.close()
    bus.emit(ev.Abort("b"))
    assert [event.rid for event in got] == ["a", "a", "b"]


def test_a_subscriber_that_emits_comes_after_what_is_under_way():
    bus, got = EventBus(), []

    def answer(event):
        if event.kind == "abort":
            bus.emit(ev.Error("answer", event.rid))

    bus.subscribe(answer)
    bus.subscribe(lambda event: got.append((event.kind, event.seq)))
    with bus.hold():
        bus.emit(ev.Abort("a"))
        bus.emit(ev.Abort("b"))
    assert got == [("abort", 0), ("abort", 1), ("error", 2), ("error", 3)]


# -- nobody listens -----------------------------------------------------------------------------------------------


def test_without_subscribers_no_event_is_ever_built(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise AssertionError(f"{type(self).__name__} was built and nobody listens")

    for cls in ev.KINDS.values():
        monkeypatch.setattr(cls, "__init__", refuse)
    scheduler = Scheduler(CROWDED)
    run(scheduler)
    assert scheduler.queues.num_preemptions > 0
    share_and_move(Scheduler(WINDOWED), Scheduler(CONTIGUOUS))
    scheduler.bus.subscribe(print)
    with pytest.raises(AssertionError, match="Submit was built"):  # the trap works
        scheduler.submit(Request("a", 1, 1), 0)


def test_the_traffic_of_these_tests_has_every_kind_that_the_core_emits():
    crowded, *others = (Scheduler(config) for config in (CROWDED, WINDOWED, CONTIGUOUS))
    recordings = [start_recording(scheduler) for scheduler in (crowded, *others)]
    run(crowded)
    share_and_move(*others)
    told = {event.kind for recording in recordings for event in recording.events}
    assert told == set(ev.KINDS) - {"keyframe", "error", "gap"}
    for scheduler, recording in zip((crowded, *others), recordings, strict=True):
        assert fold(recording.events).snapshot() == scheduler.snapshot()


# -- subscribers that misbehave -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [0, 1, 7, 20])
def test_a_subscriber_that_raises_is_detached_and_the_run_is_the_same(fails_at):
    plain = Scheduler(CROWDED)
    reference = start_recording(plain)
    run(plain)

    scheduler, calls = Scheduler(CROWDED), []

    def clumsy(event):
        calls.append(event)
        if len(calls) > fails_at:
            raise ValueError("oh")

    scheduler.bus.subscribe(clumsy)
    recording = start_recording(scheduler)
    with pytest.warns(UserWarning, match=r"clumsy.* raised ValueError: oh. It is detached; the run goes on."):
        run(scheduler)
    assert len(calls) == fails_at + 1
    assert len(scheduler.bus.subs) == 1
    (error,) = recording.errors
    assert error.where == "subscriber"
    assert error.what.endswith("ValueError: oh")
    assert [e for e in recording.events if e is not error] == reference.events
    assert scheduler.snapshot() == plain.snapshot() == fold(recording.events).snapshot()
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


def test_the_other_subscribers_get_the_event_that_one_choked_on():
    bus, got = EventBus(), []

    def choke(event):
        raise KeyError("x")

    bus.subscribe(choke)
    bus.subscribe(lambda event: got.append(event.kind))
    with pytest.warns(UserWarning, match="KeyError"):
        bus.emit(ev.Abort("a"))
    assert got == ["abort", "error"]


@pytest.mark.parametrize(
    "kind", ["submit", "step", "admit", "alloc", "commit", "free", "finish", "preempt", "cancel"]
)
def test_a_subscriber_may_submit_and_abort_from_inside_a_callback(kind):
    scheduler = Scheduler(CROWDED)
    recording = start_recording(scheduler)
    asked = []

    def meddle(event):
        if event.kind == kind and len(asked) < 3:
            rid = f"extra{len(asked)}"
            asked.append(rid)
            scheduler.submit(Request(rid, 3, 4), 0)
            scheduler.check()
            if len(asked) == 2:
                scheduler.abort("extra0" if "extra0" in scheduler.requests else rid)
                scheduler.check()

    scheduler.bus.subscribe(meddle)
    run(scheduler)
    assert len(asked) == 3
    assert [event.seq for event in recording.events[1:]] == list(range(len(recording) - 1))
    assert fold(recording.events).snapshot() == scheduler.snapshot()
    assert scheduler.blocks.num_free == CROWDED.num_blocks
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)
