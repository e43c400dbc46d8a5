"""Recordings as tables: literal rows of a small story, and cancelled plans that must not show."""

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.events import SCHEMA, Meta
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.tables import Table

SMALL = EngineConfig(num_blocks=4, block_size=2, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20)


class Run:
    """A scheduler under a recording, with wall time if asked for."""

    def __init__(self, wall=None):
        self.scheduler = Scheduler(SMALL)
        self.scheduler.bus.wall_clock = wall
        meta = Meta(SCHEMA, SMALL.to_dict())
        meta.step = 0
        self.recording = Recording([meta])
        self.scheduler.bus.subscribe(self.recording.add)

    def submit(self, rid, prompt, max_tokens):
        self.scheduler.submit(Request(rid, prompt, max_tokens), self.scheduler.step)

    def plan(self):
        return self.scheduler.schedule(self.scheduler.step)

    def commit(self, plan):
        self.scheduler.commit(plan, SimulatedRunner().execute(plan))

    def steps(self, count):
        for _ in range(count):
            self.commit(self.plan())


def story(run):
    """Two requests; b is preempted in step 3, waits in 4, comes back in 5 and ends in 6."""
    run.submit("a", 3, 4)
    run.submit("b", 3, 4)
    run.steps(6)
    assert not run.scheduler.requests
    return run.recording


@pytest.fixture
def recording():
    return story(Run())


def test_steps(recording):
    steps = recording.steps
    assert dict(steps) == {
        "step": [1, 2, 3, 4, 5, 6],
        "now": [0, 1, 2, 3, 4, 5],
        "num_scheduled_tokens": [6, 2, 1, 1, 5, 1],
        "prefill_tokens": [6, 0, 0, 0, 5, 0],
        "num_requests": [2, 2, 1, 1, 1, 1],
        "new_tokens": [2, 2, 1, 1, 1, 1],
        "running": [2, 2, 1, 0, 1, 0],
        "waiting": [0, 0, 1, 1, 0, 0],
        "preempted": [0, 0, 1, 0, 0, 0],
        "finished": [0, 0, 0, 1, 0, 1],
        "used_blocks": [4, 4, 3, 0, 3, 0],
        "kv_usage": [1.0, 1.0, 0.75, 0.0, 0.75, 0.0],
        "kv_waste": [0.25, 0.0, 1 - 5 / 6, 0.0, 1 - 5 / 6, 0.0],
        "shared_slots": [0] * 6,
        "cached_slots": [0] * 6,
        "reserved_slots": [0] * 6,
        "sharing_ratio": [1.0] * 6,
        "external_fragmentation": [0.0] * 6,
    }


def test_requests(recording):
    a, b = recording.requests.rows()
    nothing = {"ttft_s": None, "tpot_s": None, "finish_reason": "length"}
    assert a == {
        "request": "a", "prompt_tokens": 3, "output_tokens": 4, "submitted": 0, "admitted": 1, "first_token": 1,
        "finished": 4, "preemptions": 0, "ttft_steps": 1, "tpot_steps": 1.0, **nothing,
    }  # fmt: skip
    assert b == {
        "request": "b", "prompt_tokens": 3, "output_tokens": 4, "submitted": 0, "admitted": 1, "first_token": 1,
        "finished": 6, "preemptions": 1, "ttft_steps": 1, "tpot_steps": 5 / 3, **nothing,
    }  # fmt: skip


def test_blocks(recording):
    assert [tuple(row.values()) for row in recording.blocks.rows()] == [
        (0, "a", 0, 1, 4, "finish"),
        (1, "a", 1, 1, 4, "finish"),
        (2, "b", 0, 1, 3, "preempt"),
        (3, "b", 1, 1, 3, "preempt"),
        (3, "a", 2, 3, 4, "finish"),
        (2, "b", 0, 5, 6, "finish"),
        (3, "b", 1, 5, 6, "finish"),
        (1, "b", 2, 5, 6, "finish"),
    ]


def test_latencies_in_seconds_where_there_is_wall_time():
    seconds = iter(range(100))
    requests = story(Run(lambda: float(next(seconds)))).requests
    events = story(Run()).events
    commits = [i - 1 for i, event in enumerate(events) if event.kind == "commit"]  # meta has no time
    assert requests["ttft_s"][0] == commits[0] - 0
    assert requests["ttft_s"][1] == commits[0] - 1
    # Wall times are stamped in the order of emission, in which a plan's own event comes after its others.
    assert requests["tpot_s"][0] == pytest.approx((commits[3] - commits[0]) / 3)
    assert requests["tpot_s"][1] == pytest.approx((commits[5] - commits[0]) / 3)


def test_a_cancelled_plan_leaves_no_trace_in_the_tables(recording):
    run = Run()
    run.submit("a", 3, 4)
    run.submit("b", 3, 4)
    for _ in range(6):
        for _ in range(2):
            run.scheduler.cancel(run.plan())
        run.steps(1)
    for name in ("steps", "requests", "blocks"):
        assert dict(getattr(run.recording, name)) == dict(getattr(recording, name))


def test_an_end_while_a_plan_is_open_is_no_part_of_that_plan():
    run = Run()
    run.submit("a", 3, 9)
    run.steps(1)
    run.submit("b", 1, 9)
    first = run.plan()
    run.scheduler.abort("a")
    second = run.plan()
    run.commit(first)  # a ends here, with `second` still open
    run.scheduler.cancel(second)
    rows = {(row["block"], row["request"]): (row["freed"], row["why"]) for row in run.recording.blocks.rows()}
    assert rows[0, "a"] == rows[1, "a"] == (2, "finish")


def test_requests_stay_in_order_of_submission_when_an_id_comes_again():
    run = Run()
    run.submit("a", 3, 1)
    run.submit("b", 1, 2)
    run.steps(1)
    run.submit("a", 2, 1)
    run.steps(1)
    table = run.recording.requests
    assert table["request"] == ["a", "b", "a"]
    assert table["prompt_tokens"] == [3, 1, 2]
    assert table["output_tokens"] == [1, 2, 1]


def test_a_rejected_request_is_no_row():
    run = Run()
    with pytest.raises(ValueError):
        run.submit("a", 0, 1)
    assert len(run.recording.requests) == len(run.recording.steps) == len(run.recording.blocks) == 0
    assert list(run.recording.requests)[:2] == ["request", "prompt_tokens"]


def test_a_table_is_a_mapping_of_columns_with_a_length_in_rows():
    table = Table({"x": [1, 2, 3], "name": ["a", "<b>", None]})
    assert len(table) == 3
    assert list(table) == ["x", "name"]
    assert table["x"] == [1, 2, 3]
    assert list(table.rows()) == [{"x": 1, "name": "a"}, {"x": 2, "name": "<b>"}, {"x": 3, "name": None}]
    assert repr(table) == "x  name\n1     a\n2   <b>\n3     -"
    assert "<td>&lt;b&gt;</td>" in table._repr_html_()
    with pytest.raises(KeyError):
        table["y"]


def test_a_long_table_shows_its_beginning():
    table = Table({"x": list(range(50))})
    assert repr(table).endswith("\n19\n... 30 more rows")
    assert table._repr_html_().endswith("<p>30 more rows</p>")
    assert table._repr_html_().count("<tr>") == 21
