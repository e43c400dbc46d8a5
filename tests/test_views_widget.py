"""The widget's Python side: protocol, driving, failures, letting go; no browser."""

import asyncio
import gc
import json
import threading
import weakref

import pytest

from pagedinfer.errors import ConfigError
from pagedinfer.views import (
    EngineView,
    batch_timeline,
    block_map,
    memory_chart,
    picture_svg,
    prefix_chains,
    queues,
    token_budget,
)
from pagedinfer.views.assets import esm
from pagedinfer.views.film import film_of

ipywidgets = pytest.importorskip("ipywidgets", reason="the live view needs the extra 'view'")
pytest.importorskip("anywidget", reason="the live view needs the extra 'view'")


def lines(data):
    head, *rows = (json.loads(row) for row in bytes(data).decode().split("\n"))
    return head, rows


@pytest.fixture
def live(simulated_run):
    run = simulated_run()
    view = EngineView(run.recording, run.advance)
    yield run, view
    view.close()


def sent(view):
    """Messages of state that the view sends from now on, as sets of names."""
    messages = []
    original = view.send_state

    def spy(key=None):
        messages.append({key} if isinstance(key, str) else set(key or ()))
        return original(key)

    view.send_state = spy
    return messages


def test_bundle_is_live_and_static_and_repeatable(simulated_run):
    recording = simulated_run().finish()
    view = EngineView(recording, step=12, request="R2")
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {
        "application/vnd.jupyter.widget-view+json",
        "image/svg+xml",
        "image/png",
        "text/plain",
    }
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == view.model_id
    assert bundle["image/svg+xml"] == picture_svg(recording, 12, "R2", view.panes) == view.svg()
    assert bundle["text/plain"] == repr(view) == repr(EngineView(recording, step=12))
    assert not view.live


def test_one_pane_each(simulated_run):
    recording = simulated_run().recording
    makers = (block_map, batch_timeline, memory_chart, token_budget, queues, prefix_chains)
    panes = [make(recording).panes for make in makers]
    assert panes == [["blocks", "details"], ["timeline"], ["memory"], ["budget"], ["queues"], ["chains"]]
    with pytest.raises(ConfigError, match="name one or more of blocks, budget, queues, timeline, memory"):
        EngineView(recording, panes=())


def test_the_script_is_small_and_local():
    assert len(esm().encode()) < 100_000
    assert "http" not in esm().replace("http://www.w3.org/2000/svg", "")
    assert esm().count("\nexport ") == 1


def test_a_recording_is_sent_whole(simulated_run):
    recording = simulated_run().finish()
    head, rows = lines(EngineView(recording).film)
    assert head["from"] == 0
    assert rows == film_of(recording).lines


def test_a_browsers_tick_steps_the_engine_and_gets_one_message(live):
    run, view = live
    messages = sent(view)
    view.ask = {"id": 7, "steps": 3, "pause": False, "have": 0}
    assert run.scheduler.step == 3
    assert view.cursor == 3, "it was at the end, so it follows"
    head, rows = lines(view.tail)
    assert head["from"] == 0
    assert rows == film_of(run.recording).lines
    assert view.answer == {"id": 7, "more": True, "error": ""}
    if int(ipywidgets.__version__.split(".")[0]) < 8:
        return  # 7 sends nothing without a kernel, so there is nothing to count
    mine = [names for names in messages if names & {"tail", "answer", "cursor"}]
    assert len(mine) == 1, "one message per frame"


def test_only_new_lines_travel(live):
    _, view = live
    view.step(10)
    view.ask = {"id": 1, "steps": 1, "have": 10}
    head, rows = lines(view.tail)
    assert (head["from"], [row["s"] for row in rows]) == (10, [10, 11]), (
        "the newest line again: it may have changed"
    )


def test_a_browser_that_missed_lines_gets_them(live):
    run, view = live
    view.step(10)
    view.ask = {"id": 1, "steps": 0, "have": 4}
    assert [row["s"] for row in lines(view.tail)[1]] == [4, 5, 6, 7, 8, 9, 10]
    assert run.scheduler.step == 10, "no step was asked for"


def test_nb_02_looking_back_is_not_disturbed_by_a_running_engine(live):
    _, view = live
    view.step(5)
    view.cursor = 2
    view.step(2)
    assert view.cursor == 2
    assert lines(view.tail)[1][-1]["s"] == 7


def test_submissions_after_the_newest_step_show_up(live):
    from pagedinfer.engine.request import Request

    run, view = live
    view.step(2)
    run.scheduler.submit(Request("late", 5, 3), run.scheduler.step)
    view.refresh()
    frame = film_of(run.recording).frame()
    assert "late" in [film_of(run.recording).lanes[lane].rid for lane in frame.waiting]
    assert any("late" in str(row.get("new")) for row in lines(view.tail)[1])


def test_play_runs_to_the_end_and_always_sends_the_last_frame(live):
    run, view = live
    assert not view.play()
    assert not run.unfinished
    assert view.cursor == run.recording.last_step
    assert lines(view.tail)[1][-1]["s"] == run.recording.last_step
    assert not view.step(), "nothing left"
    view.ask = {"id": 9, "steps": 1, "have": view.cursor}
    assert view.answer["more"] is False


def test_play_coalesces_frames(simulated_run):
    run = simulated_run(requests=60)
    view = EngineView(run.recording, run.advance, frames_per_second=0.001)
    messages = sent(view)
    view.play()
    assert run.recording.last_step > 50
    assert len([names for names in messages if "tail" in names]) <= 2, "the first frame and the last"


def test_play_stops_after_the_steps_asked_for(live):
    run, view = live
    assert view.play(4)
    assert run.scheduler.step == 4 == view.cursor


def test_async_play_leaves_the_loop_free_and_can_be_paused(live):
    run, view = live
    advance, entered, gate, opened = view._advance, threading.Event(), threading.Event(), []

    def gated():
        if run.scheduler.step == 3:
            entered.set()
            opened.append(gate.wait(10))  # only the loop opens it
        return advance()

    view._advance = gated

    async def main():
        async def press_pause():
            while not entered.is_set():
                await asyncio.sleep(0)
            assert view.driving
            view._pause_asked = True  # what `ask` sets before it waits for the step to end
            gate.set()

        presser = asyncio.create_task(press_pause())
        more = await view.run_async()
        await presser
        return more

    assert asyncio.run(main())
    assert opened == [True]
    assert run.scheduler.step == 4 == view.cursor, "it stopped after the step it was in"
    assert run.unfinished
    assert not view.driving


def test_the_pause_button_reaches_an_async_run(live):
    _, view = live
    view.ask = {"id": 3, "steps": 0, "pause": True, "have": 0}
    assert view._pause_asked
    assert view.answer["id"] == 3


def test_nb_04_async_steps_run_in_a_worker_and_messages_leave_on_the_loop(live):
    run, view = live
    where = {"step": set(), "send": set()}
    advance = view._advance
    view._advance = lambda: where["step"].add(threading.current_thread()) or advance()
    send = view._post
    view._post = lambda *a, **k: where["send"].add(threading.current_thread()) or send(*a, **k)
    asyncio.run(view.run_async(5))
    assert threading.main_thread() not in where["step"]
    assert where["send"] == {threading.main_thread()}
    assert run.scheduler.step == 5


def test_nb_06_a_failing_engine_is_shown_and_stops_the_run(simulated_run):
    run = simulated_run()

    def advance():
        if run.scheduler.step == 2:
            raise RuntimeError("the model is gone")
        return run.advance()

    view = EngineView(run.recording, advance)
    view.ask = {"id": 1, "steps": 5, "have": 0}
    assert view.answer == {"id": 1, "more": True, "error": "RuntimeError: the model is gone"}
    assert view.cursor == 2, "what was done before is shown"
    with pytest.raises(RuntimeError, match="the model is gone"):
        view.step()
    assert view.answer["error"] == view.error == "RuntimeError: the model is gone"
    with pytest.raises(RuntimeError):
        view.play()
    with pytest.raises(RuntimeError):
        asyncio.run(view.run_async())
    assert not view.driving
    run.scheduler.step = 3
    view._advance = lambda: False
    view.step()
    assert view.error == ""


def test_ticks_from_two_threads_never_overlap(simulated_run):
    run, inside, overlaps = simulated_run(requests=40), [], []

    def advance():
        inside.append(1)
        overlaps.append(len(inside))
        more = run.advance()
        inside.pop()
        return more

    view = EngineView(run.recording, advance)
    other = EngineView(run.recording, advance)
    threads = [
        threading.Thread(
            target=lambda v=v, k=k: [
                setattr(v, "ask", {"id": (k, i), "steps": 1, "have": 0}) for i in range(25)
            ]
        )
        for k, v in enumerate((view, other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(overlaps) == {1}
    assert run.scheduler.step == 50
    assert film_of(run.recording).last_step == 50


def test_a_closed_view_lets_go_of_the_engine(simulated_run):
    class Engine:
        def __init__(self):
            self.run = simulated_run()

        def advance(self):
            return self.run.advance()

    engine = Engine()
    view = EngineView(engine.run.recording, engine.advance)
    view.step()
    gone = weakref.ref(engine)
    view.close()
    del engine
    gc.collect()
    assert gone() is None
    assert view.step() is False, "a closed view steps nothing"


def test_a_subscriber_may_read_a_view_while_two_threads_step():
    from pagedinfer.config import EngineConfig, SamplingParams
    from pagedinfer.engine.engine import Engine
    from pagedinfer.session import Session
    from pagedinfer.sim.simulated import SimulatedRunner
    from pagedinfer.views import describe

    engine = Engine(EngineConfig(num_blocks=200, block_size=4), SimulatedRunner())
    session, seen = Session(engine), []
    session.submit([1, 2], SamplingParams(max_tokens=300, detokenize=False))
    view = session.view()

    def look(event):
        if event.kind == "commit":
            view.refresh()
            seen.append(describe(session.recording))

    engine.bus.subscribe(look)
    act = {"view": view.step, "engine": engine.step}
    threads = [
        threading.Thread(target=lambda step=step: [step() for _ in range(100)], daemon=True)
        for step in act.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "each waits for the lock that the other holds"
    assert engine.scheduler.step == len(seen) == 200
    session.close()


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "10"])
def test_a_frame_rate_that_is_none_is_refused(simulated_run, rate):
    with pytest.raises(ConfigError, match=r"frames_per_second=.*: it must be a number above 0"):
        EngineView(simulated_run().recording, frames_per_second=rate)


def test_what_the_page_tells_is_taken_in_at_once_and_nothing_else(live):
    run, view = live
    told = {
        "cursor": 0,
        "selected": {"request": "R1"},
        "ask": {"id": 5, "steps": 2, "have": 0},
        "title": "theirs",
    }
    view._handle_custom_msg({"state": told}, [])
    assert run.scheduler.step == 2
    assert view.selected == {"request": "R1"}
    assert (view.answer["id"], view.cursor) == (5, 2)
    assert view.title != "theirs"
    for other in ("text", {}, {"kind": "anywidget-command"}, {"state": 3}):
        view._handle_custom_msg(other, [])
    assert run.scheduler.step == 2
