"""What broke the linked views once: threads, messages that no page sends, listeners that raise, full recordings."""

import asyncio
import json
import random
import threading
import time
from itertools import islice

import pytest
from simulated_runs import make_session

pytest.importorskip("anywidget", reason="anywidget is not installed (extra: view)")

from pagedinfer import Recorder
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.recording import Recording
from pagedinfer.views import (
    BatchComposition,
    EngineView,
    FragmentationLab,
    Latency,
    PrefixTree,
    RunComparison,
)
from pagedinfer.views.link import POSTING


class SlowRunner(SimulatedRunner):
    """A step takes a while, so that others come in between."""

    def execute(self, plan):
        time.sleep(0.002)
        return super().execute(plan)


@pytest.fixture
def session():
    with make_session() as session:
        yield session


def shown(view):
    """As a cell shows it: from here on it takes part."""
    view._repr_mimebundle_()
    return view


def tell(widget, **state):
    """As a page does it."""
    widget._handle_custom_msg({"state": state}, [])


def drawn(front):
    """The step and the last step of the drawing sent beside the film."""
    tail = json.loads(front.tail)
    return tail["steps"][0], tail["range"][1]


# -- views that were closed, read or listened to


def test_a_closed_engine_view_does_not_stand_in_the_way(session):
    view, latency = session.view(), shown(Latency(session))
    view.close()
    assert not view.live
    assert latency.advance(2)
    assert latency.cursor == session.recording.last_step == 2
    tree = shown(PrefixTree(session))
    tree.close()
    latency.cursor = 1
    assert tree.cursor == 2, "it has left the link"


def test_reading_a_view_does_not_keep_its_drawing_from_the_page(session):
    latency = shown(Latency(session))
    session.step()
    assert "step 1:" in latency.text(-1), "a cell reads it"
    session.run(0)
    assert drawn(latency._front) == (0, 1)
    session.engine.bus.subscribe(lambda event: latency.text())
    tell(latency._front, seen=1)
    session.run(4)
    assert drawn(latency._front) == (0, 5)


def test_a_listener_that_raises_ends_neither_the_run_nor_the_other_views(session, capsys):
    view, latency, tree = session.view(), shown(Latency(session)), shown(PrefixTree(session))
    view.observe(lambda change: 1 / 0, "tail")
    session.run(3)
    assert "A EngineView raised ZeroDivisionError" in capsys.readouterr().err
    assert (latency.last_step, tree.last_step, session.recording.last_step) == (3, 3, 3)
    view.unobserve_all("tail")
    assert not view._quiet


# -- messages


@pytest.mark.parametrize(
    ("selected", "means"),
    [
        ({"block": "abc"}, {}),
        ({"block": None}, {}),
        ({"block": True}, {}),
        ({"block": -3}, {}),
        ({"request": []}, {}),
        ({"request": {"a": 1}}, {}),
        ({"colour": "red"}, {}),
        ({"block": 10**30}, {"block": 10**30}),
        ({"request": "r1", "block": 3}, {"request": "r1"}),
    ],
)
def test_a_selection_that_makes_no_sense_selects_nothing(session, selected, means):
    session.run(5)
    view, latency, core = session.view(), shown(Latency(session)), session.view(tier="ipywidgets")
    for widget in (view, latency._front):
        tell(widget, selected={"request": "r0"})
        tell(widget, selected=selected)
        assert view.selected == latency.selected == latency._front.selected == core.selected == means
        assert all(each.svg() for each in (view, latency, core))


def test_a_step_that_is_not_there_is_the_nearest(session):
    session.run(5)
    view, latency = session.view(), shown(Latency(session))
    for step, nearest in ((10**30, 5), (-1, 5), (2, 2), (-(10**30), 0)):
        tell(view, cursor=step)
        assert (view.cursor, latency.cursor) == (nearest, nearest)
        assert f"step {nearest}:" in view.text()
    tell(latency._front, cursor=10**9)
    assert (latency._front.cursor, view.cursor) == (5, 5)


@pytest.mark.parametrize(
    "ask", [{"have": None}, {"have": "x"}, {"steps": "x"}, {"steps": -5}, {"steps": [1]}]
)
def test_every_ask_is_answered(session, ask):
    session.run(2)
    view, latency = session.view(), shown(Latency(session))
    for widget in (view, latency._front):
        tell(widget, ask={"id": 7} | ask)
        assert widget.answer["id"] == 7
    assert session.recording.last_step == 2


def test_a_page_cannot_keep_the_kernel_with_one_ask():
    with make_session() as session:
        session.submit([7] * 9, max_tokens=50, detokenize=False, ignore_eos=True)
        tell(session.view(), ask={"id": 1, "steps": 10**9, "have": 0})
        assert session.recording.last_step == 100


def test_a_late_word_of_a_second_page_stops_no_drawing(session):
    latency = shown(Latency(session))
    session.run(1)
    tell(latency._front, seen=1)
    session.run(1)
    tell(latency._front, seen=2)
    tell(latency._front, seen=1)
    session.run(1)
    assert drawn(latency._front) == (0, 3)


# -- threads


class Arriving(list):
    """Events of which each look finds more: what a thread that runs steps does, here at every possible place."""

    def __init__(self, events):
        super().__init__(events[:1])
        self._coming, self._is_busy, self._chance = iter(events[1:]), False, random.Random(3)

    def __len__(self):
        count = super().__len__()
        if not self._is_busy:
            self._is_busy = True
            for event in islice(self._coming, 6 * (self._chance.random() < 0.04)):
                self.add(event)
            self._is_busy = False
        return count

    def __getitem__(self, place):
        len(self)
        return super().__getitem__(place)


@pytest.mark.parametrize(
    "kind",
    [
        Latency,
        BatchComposition,
        PrefixTree,
        lambda run: RunComparison(run, run, step=-1),
        lambda run: FragmentationLab([run]),
    ],
)
def test_views_read_while_another_thread_records_are_right_afterwards(kind):
    with make_session(requests=5, num_blocks=9, watermark=0.0) as session:
        whole = session.run()
    assert whole.last_step > 66, "a state is kept on the way"
    growing = Recording()
    growing.events = Arriving(whole.events)
    growing.events.add = growing.add
    view, looks = kind(growing), 0
    while growing.last_step < whole.last_step:
        looks += 1
        assert looks % 3 or view.text()
        view.update()
    growing.events = list(whole.events)
    view.update()
    fresh = kind(whole)
    assert view.text(-1) == fresh.text()
    assert view.svg(-1) == fresh.svg()


def test_breakpoints_see_each_step_once_whoever_steps():
    with make_session(SlowRunner()) as session:
        view, steps, stop = session.view(), [], threading.Event()
        session.breakpoints.add("step > 10000")
        look = session.breakpoints._look
        session.breakpoints._look = lambda moment: (
            time.sleep(0.001) or steps.append(moment.step) or look(moment)
        )

        def press():
            while not stop.is_set():
                tell(view, ask={"id": 1, "steps": 1, "have": 0})
                tell(view, ask={"id": 2, "watch": "step > 20000", "have": 0})

        thread = threading.Thread(target=press, daemon=True)
        thread.start()
        asyncio.run(session.play())
        stop.set()
        thread.join(10)
        session.breakpoints.check()
        assert view.error == ""
        assert [step for step in steps if step] == list(range(1, session.recording.last_step + 1))


def test_who_listens_to_a_view_can_step_it_while_another_thread_does(session):
    """A listener is called under POSTING; a step of the other thread must not hold what it needs."""
    view, listening, stepping = session.view(), threading.Event(), threading.Event()

    def advance():
        stepping.set()
        assert listening.wait(5)
        time.sleep(0.05)  # the listener waits for the lock of drivers by now
        return True

    view._advance = advance

    def listen():
        with POSTING:
            assert stepping.wait(5)
            listening.set()
            view.go_on(1)

    threads = [threading.Thread(target=each, daemon=True) for each in (listen, view.step)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)


def test_a_session_that_is_closed_plays_no_further():
    async def play_and_close():
        playing = asyncio.create_task(session.play())
        while session.recording.last_step < 3:
            await asyncio.sleep(0.001)
        session.close()
        return await playing

    with make_session(SlowRunner()) as session:
        latency = shown(Latency(session))
        assert latency._front.live
        assert not asyncio.run(play_and_close())
        assert session.engine.has_unfinished()
        assert session.engine.scheduler.step <= session.recording.last_step + 1
        assert not latency._front.live


# -- what it costs


@pytest.mark.parametrize("tier", ["anywidget", "ipywidgets"])
def test_each_view_keeps_one_picture_of_a_run(session, tier, monkeypatch):
    from pagedinfer.views import core_widget, output, widget

    kept = []
    for module in (core_widget, output, widget):
        monkeypatch.setattr(module, "publish", lambda bundle, name, update=False: kept.append(name))
    views = [session.view(tier=tier) for _ in range(4)] + [shown(Latency(session))]
    for view in views:
        view._ipython_display_()
    kept.clear()
    asyncio.run(session.play(3))
    assert len(kept) == len(set(kept)) == 5
    asyncio.run(session.play(0))
    assert len(kept) == 5, "nothing is new"
    views[0].selected = {"request": "r1"}
    asyncio.run(session.play(0))
    assert len(kept) == 10


def test_a_full_recording_counts_on(session):
    recording = Recorder(session.engine, max_events=30).start()
    view = EngineView(recording, tier="static")
    for _ in range(8):
        session.step()
        view.text()
    again = Recording.from_jsonl(recording.to_jsonl())
    assert recording.events[-1].dropped > 5
    fresh, last = EngineView(again, tier="static"), again.last_step
    assert (view.svg(last), view.text(last)) == (fresh.svg(), fresh.text())


def test_a_request_of_any_id_is_followed_in_the_views_of_a_tap():
    pytest.importorskip("torch")
    from made_taps import attention_of

    from pagedinfer.trace.tap_records import TapRecord
    from pagedinfer.views import AttentionView

    ids = ["a", "\ud800x", "a\nb\t'\"<", "__proto__"]
    parts = {"position": 9, "choices": (), "tokens": (), "block_size": 4}
    records = [
        TapRecord(step=1, request_id=rid, attention=attention_of(random.Random(1), 9), **parts) for rid in ids
    ]
    view = AttentionView(records)
    for rid in ids:
        view.selected = {"request": rid}
        assert view.record().request_id == rid


@pytest.mark.browser
def test_a_narrow_page_does_not_scroll_sideways(session, new_page, tmp_path):
    session.run()
    path = session.view().html(tmp_path / "page.html", more=[Latency(session), BatchComposition(session)])
    page = new_page(width=1300, height=700)
    page.goto(path.as_uri())
    last = page.get_by_test_id("pi-sheet").last
    last.wait_for()
    last.evaluate(
        "node => node.scrollIntoView()"
    )  # the views above are not drawn anew before they come into sight
    for width in (320, 1600, 431):
        page.set_viewport_size({"width": width, "height": 700})
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("scrollTo(0, 0)")
    page.set_viewport_size({"width": 320, "height": 700})
    page.wait_for_timeout(200)
    inner, outer = (
        page.evaluate(f"document.querySelector('.pi-card-timeline {it}').getBoundingClientRect().right")
        for it in ("svg", ".pi-plot")
    )
    assert inner <= outer + 1, "nothing is cut off"
    assert page.errors == []
