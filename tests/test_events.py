"""The vocabulary: which kinds there are, that they survive JSON, and that their size stays small."""

import dataclasses
import json

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace import events as ev

EXAMPLES = [
    ev.Meta("1.0", {"num_blocks": 4, "watermark": 0.01}, {"model": "tiny"}),
    ev.Keyframe(
        {"step": 3, "waiting": ["b"], "running": ["a"], "free": [2, 0], "block_tables": {"a": [1, 3]}}
    ),
    ev.Submit("a", 5, 16, 0, 0.5),
    ev.Fork("b", "a", 16, 0.5, (3, 4)),
    ev.Reject("a", 0, 16, 0, 0.5, "Request 'a' has an empty prompt; give at least one token."),
    ev.Abort("a"),
    ev.Step(4, 3.0, 16, {"a": 1, "ü€": 7}, {"c": "needs 3 blocks, 1 free"}),
    ev.Commit({"a": 1}, {"b": ["stop", "end id 2"]}),
    ev.Cancel("RuntimeError: out of memory"),
    ev.Admit("a", "2 blocks for 5 tokens, 4 free"),
    ev.Resume("a", "2 blocks for 5 tokens, 4 free"),
    ev.Alloc("a", 0, 2, (5, 7)),
    ev.Share("a", 0, 0, (5, 7), 32),
    ev.Hit("a", 32, "block 2 was never seen"),
    ev.Copy("a", 0, 3, ((7, 9),)),
    ev.Cache("a", (5, 7), (0, 1), -1),
    ev.Evict((7, 5), "b needs 2 blocks"),
    ev.Retain((5, 7), 80, 12.5),
    ev.Expire((5, 7)),
    ev.Reset((7, 5), "asked for"),
    ev.Trim("a", 0, (9,)),
    ev.Slide("a", 0, 0, (5,)),
    ev.Move("a", 0, ((5, 0), (7, 1)), "compaction"),
    ev.Swap("a", "out", ((5, 0), (7, 1))),
    ev.Resize(64),
    ev.Compact("asked for"),
    ev.Free("a", (7, 5), "finish"),
    ev.Preempt("a", "recompute", "b needs 1 block, 0 free; b is older"),
    ev.Finish("a", "length", "16 tokens produced"),
    ev.Refuse(3, 2),
    ev.Error("subscriber", "draw: ValueError: oh"),
    ev.Gap(12),
]


def test_every_kind_has_an_example_here():
    assert [type(event) for event in EXAMPLES] == list(ev.KINDS.values())


def test_kinds_are_the_class_names_in_lower_case():
    assert all(cls.kind == name == cls.__name__.lower() for name, cls in ev.KINDS.items())
    assert {
        "meta",
        "submit",
        "reject",
        "admit",
        "resume",
        "step",
        "commit",
        "alloc",
        "free",
        "preempt",
        "finish",
    } <= set(ev.KINDS)
    assert ev.Event not in ev.KINDS.values()
    assert {cls.__name__ for cls in ev.KINDS.values()} < set(ev.__all__)


def test_classes_in_the_registry_are_the_ones_that_the_module_exports():
    assert all(getattr(ev, cls.__name__) is cls for cls in ev.KINDS.values())


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_json_round_trip(event):
    event.seq, event.step, event.t = 7, 3, 1.25
    data = json.loads(json.dumps(event.to_dict()))
    again = ev.event_from_dict(data)
    assert type(again) is type(event)
    assert again == event
    assert (again.seq, again.step, again.t) == (7, 3, 1.25)
    assert again.to_dict() == event.to_dict()
    assert "t" not in event.to_dict(wall=False)


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: event.kind)
def test_no_dict_per_event_and_no_stray_fields(event):
    with pytest.raises(AttributeError):
        event.anything = 1
    own = [f.name for f in dataclasses.fields(event) if f.init]
    assert list(event.to_dict(wall=False)) == ["kind", "seq", "step", *own]


def test_seq_and_wall_time_are_no_part_of_equality_and_the_step_is():
    one, two = ev.Abort("a"), ev.Abort("a")
    one.seq, one.t = 5, 1.0
    assert one == two
    one.step = 2
    assert one != two


def test_unknown_kinds_and_missing_fields_give_none_and_unknown_fields_are_left():
    assert ev.event_from_dict({"kind": "teleport", "seq": 1, "step": 1, "rid": "a"}) is None
    assert ev.event_from_dict({"seq": 1}) is None
    assert ev.event_from_dict({"kind": "alloc", "rid": "a"}) is None
    later = ev.event_from_dict({"kind": "abort", "seq": 1, "step": 2, "rid": "a", "mood": "sad"})
    assert (type(later), later.rid, later.step) == (ev.Abort, "a", 2)
    earlier = ev.event_from_dict(
        {"kind": "commit", "seq": 1, "step": 2, "tokens": {"a": 1}}
    )  # before `ends` existed
    assert earlier.ends == {}


def test_a_decode_step_of_64_requests_is_2_events_and_at_most_1500_bytes():
    """The steps between block boundaries; at a boundary each request that crosses it adds one `alloc`."""
    config = EngineConfig(num_blocks=2000, block_size=16, max_num_seqs=64, max_num_batched_tokens=4096)
    scheduler, runner, told = Scheduler(config), SimulatedRunner(), []
    for number in range(64):
        scheduler.submit(Request(f"r{number}", 16, 200), 0)
    plan = scheduler.schedule(0)
    scheduler.commit(plan, runner.execute(plan))
    scheduler.bus.subscribe(told.append)
    num_boundaries = 0
    for _ in range(160):
        told.clear()
        plan = scheduler.schedule(scheduler.step)
        scheduler.commit(plan, runner.execute(plan))
        if plan.scheduled[0].new_block_ids:
            num_boundaries += 1
            assert [event.kind for event in told] == ["step", *["alloc"] * 64, "commit"]
        else:
            assert [event.kind for event in told] == ["step", "commit"]
            size = sum(
                len(json.dumps(event.to_dict(wall=False), separators=(",", ":"))) + 1 for event in told
            )
            assert size <= 1500
    assert num_boundaries == 10
