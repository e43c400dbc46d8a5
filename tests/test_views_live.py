"""Driving, rates, conditions, the picture that is kept, and the tiers: what a live view does, without a browser."""

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from simulated_runs import make_session

from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import ConfigError
from pagedinfer.session import Session
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.views import EngineView, describe
from pagedinfer.views.film import film_of

pytest.importorskip("anywidget", reason="the live view needs the extra 'view'")

WIDGET = "application/vnd.jupyter.widget-view+json"


def lines(data):
    return [json.loads(row) for row in bytes(data).decode().split("\n")]


@pytest.fixture
def clock(monkeypatch):
    """Time as the view sees it: each look at it is 30 ms later."""
    now = SimpleNamespace(seconds=0.0)

    def monotonic():
        now.seconds += 0.03
        return now.seconds

    monkeypatch.setattr("pagedinfer.views.widget.time.monotonic", monotonic)
    return now


@pytest.fixture
def published(monkeypatch):
    """What was put on the page: (bundle, display id, whether it changes an output that is there)."""
    found = []
    monkeypatch.setattr(
        "pagedinfer.views.widget.publish",
        lambda bundle, name, update=False: found.append((bundle, name, update)),
    )
    return found


def count_posts(view):
    posts, post = [], view._post
    view._post = lambda *a, **k: posts.append(film_of(view.recording).last_step) or post(*a, **k)
    return posts


def test_a_run_sends_ten_frames_a_second_and_the_newest(simulated_run, clock):
    run = simulated_run(requests=60)
    view = EngineView(run.recording, run.advance)
    posts, began = count_posts(view), clock.seconds
    view.play()
    seconds = clock.seconds - began
    assert run.recording.last_step > 100
    assert len(posts) <= 10 * seconds + 2
    assert lines(view.tail)[-1]["s"] == run.recording.last_step


def test_no_frame_is_queued_while_the_browser_draws(simulated_run, clock):
    run = simulated_run(requests=60)
    view = EngineView(run.recording, run.advance)
    view.begin()
    posts = count_posts(view)
    for _ in range(20):  # 0.6 s: no browser has drawn the first frame
        run.advance()
        view.follow()
    assert posts == [1]
    view.seen = 1
    run.advance()
    view.follow()
    assert posts == [1, 21], "all that came meanwhile is in one frame"
    assert [row["s"] for row in lines(view.tail)[1:]] == list(range(1, 22))
    for _ in range(40):
        view.follow()
    assert len(posts) == 3, "nobody draws (there may be no page): a frame a second, no more"
    view.end()
    assert not view.driving


def test_a_frame_is_small():
    """64 requests, 1,024 blocks: the target is less than what a message costs anyway (2.4 kB)."""
    config = EngineConfig(num_blocks=1024, max_num_seqs=64, max_num_batched_tokens=512)
    session = Session(Engine(config, SimulatedRunner()))
    for number in range(90):
        session.submit([number] * 100, max_tokens=90, detokenize=False, ignore_eos=True)
    view, sizes = session.view(), []
    while view.step():
        sizes.append(len(bytes(view.tail)))
    assert sum(sizes) / len(sizes) < 2_000
    assert sorted(sizes)[len(sizes) * 99 // 100] < 6_000


def test_await_play_drives_every_view_and_stops_at_a_breakpoint(published):
    session = make_session(requests=8)
    views = [session.view(), session.view(panes="timeline")]
    session.breakpoints.add("any preempted")
    assert not asyncio.run(session.play())
    stop = session.stops[0]
    assert session.engine.has_unfinished()
    for view in views:
        assert view.cursor == stop.step == session.recording.last_step
        assert not view.driving
        assert view.breaks == [{"text": "any preempted", "marks": [[stop.step, stop.cause]]}]
    assert asyncio.run(session.play(steps=1)) in (True, False)
    assert session.recording.last_step == stop.step + 1
    session.close()


def test_pause_in_one_view_stops_await_play():
    session = make_session(requests=8)
    view, other = session.view(), session.view()
    follow = other.follow

    def press():
        if session.recording.last_step == 3:
            other.pause()
        return follow()

    other.follow = press
    assert asyncio.run(session.play())
    assert session.recording.last_step == 3 == view.cursor
    session.close()


def test_text_from_the_box_goes_to_the_sessions_breakpoints():
    session = make_session(requests=8)
    view = session.view()
    assert view.watching
    view.ask = {"id": 1, "steps": 0, "have": 0, "watch": "free blocks under four"}
    told = view.answer["watch"]
    assert not told["ok"]
    assert "free blocks under four" in told["message"]
    view.ask = {"id": 2, "steps": 0, "have": 0, "watch": "free blocks < 4"}
    assert view.answer["watch"]["ok"]
    assert [str(watch) for watch in session.breakpoints] == ["free blocks < 4"]
    view.ask = {"id": 3, "steps": 100, "have": 0}
    step = session.recording.last_step
    assert view.answer["stop"][0] == step == view.cursor
    assert len(session.recording.at(step).free) < 4 <= len(session.recording.at(step - 1).free)
    view.ask = {"id": 4, "steps": 0, "have": 0, "unwatch": "free blocks < 4"}
    assert list(session.breakpoints) == []
    assert view.breaks[0]["marks"], "where it came true stays marked"
    assert view.breaks[0]["past"], "and it is none of the conditions that stop the run"
    session.close()


def test_the_view_lists_the_conditions_that_the_session_has():
    session = make_session(requests=8)
    stop = session.run(until="free blocks < 4")
    session.breakpoints.add("any preempted")
    view = session.view()
    assert [known["text"] for known in view.breaks if not known.get("past")] == ["any preempted"]
    (past,) = [known for known in view.breaks if known.get("past")]
    assert past == {"text": "free blocks < 4", "marks": [[stop.step, stop.cause]], "past": True}
    session.close()


def test_conditions_are_looked_for_in_a_recording_without_an_engine():
    session = make_session(requests=8)
    recording = session.run()
    view = EngineView(recording)
    view.ask = {"id": 1, "steps": 0, "have": 0, "watch": "any preempted"}
    (found,) = view.breaks
    assert found["marks"] == [[stop.step, stop.cause] for stop in recording.find_all("any preempted")]
    assert found["marks"]
    view.ask = {"id": 2, "steps": 0, "have": 0, "unwatch": "any preempted"}
    assert view.breaks == []
    view.ask = {"id": 3, "steps": 0, "have": 0, "unwatch": "never there"}
    assert not view.answer["watch"]["ok"]


def test_a_predicate_among_the_breakpoints_is_marked_too():
    session = make_session(requests=8)
    session.breakpoints.add(lambda event: event.kind == "preempt")
    view = session.view()
    session.run(1000)
    view.refresh()
    assert view.breaks[0]["marks"]
    session.close()


def test_the_picture_is_kept_where_the_view_was_shown(simulated_run, published):
    run = simulated_run()
    view = EngineView(run.recording, run.advance)
    view.step()
    assert published == [], "it is on no page yet"
    view._ipython_display_()
    (first,) = published
    assert WIDGET in first[0]
    assert first[1:] == (view._display_id, False)
    view.play(5)
    bundle, name, update = published[-1]
    assert (name, update) == (first[1], True)
    assert WIDGET in bundle
    assert describe(run.recording, 6) in bundle["text/plain"]
    assert len(published) == 2, "once, at the end: the page draws the view anew each time"
    view.ask = {"id": 1, "steps": 3, "have": 0}
    assert len(published) == 2
    view.ask = {"id": 2, "steps": 0, "have": 0, "keep": True}
    assert describe(run.recording, 9) in published[-1][0]["text/plain"]
    view.close()
    assert WIDGET not in published[-1][0]
    assert "image/svg+xml" in published[-1][0]
    view.close()
    assert len(published) == 4


def test_kept_pictures_are_equal_for_equal_runs_and_small(simulated_run, published):
    def picture():
        run = simulated_run(num_blocks=4096, requests=40)
        view = EngineView(run.recording, run.advance)
        view._ipython_display_()
        view.play(60)
        view.close()
        return published[-1][0]

    first, second = picture(), picture()
    assert first == second
    assert len(json.dumps(first)) < 250_000


def test_each_tier_says_which_it_is(simulated_run):
    run = simulated_run()
    assert EngineView(run.recording).tier == "anywidget"
    for tier in ("ipywidgets", "static"):
        view = EngineView(run.recording, run.advance, tier, watch=None, frames_per_second=3)
        assert view.tier == tier
        assert view.step(2) is True
        assert view.cursor == run.recording.last_step
        assert describe(run.recording, view.cursor) in view._repr_mimebundle_()[0]["text/plain"]
    with pytest.raises(ConfigError, match="tier='canvas': it must be one of anywidget, ipywidgets, static"):
        EngineView(run.recording, tier="canvas")


WITHOUT = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "anywidget":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from pagedinfer.trace.recording import Recording
from pagedinfer.views import EngineView, Latency
recording = Recording.load(sys.argv[1])
for view in EngineView(recording, step=3), Latency(recording, step=3):
    bundle = view._repr_mimebundle_()
    bundle = bundle[0] if isinstance(bundle, tuple) else bundle
    print(view.tier, "application/vnd.jupyter.widget-view+json" in bundle)
    print(bundle["text/plain"].splitlines()[-1])
"""


def test_without_anywidget_the_views_are_of_core_widgets(simulated_run, tmp_path):
    saved = simulated_run(requests=3).finish().save(tmp_path / "run.jsonl")
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(saved)], capture_output=True, text=True)
    each = [
        "ipywidgets True",
        '  core widgets: the live view needs anywidget; pip install "pagedinfer[view]" brings it.',
    ]
    assert done.stdout.splitlines() == each * 2, done.stderr
