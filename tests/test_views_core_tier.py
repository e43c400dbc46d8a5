"""The middle tier: views of core ipywidgets alone, used as a browser does, by their buttons and their traits."""

import asyncio
import gc
import weakref
from html import escape

import pytest
from simulated_runs import make_session

pytest.importorskip("ipywidgets", reason="ipywidgets is not installed (extra: view)")

from pagedinfer.errors import RecordingError
from pagedinfer.views import (
    BatchComposition,
    EngineView,
    FragmentationLab,
    Latency,
    PrefixTree,
    RunComparison,
    describe,
    stepped,
)
from pagedinfer.views.link import link_of
from pagedinfer.views.sheet import Sheet

MAKERS = {
    "latency": lambda a, b: Latency(a),
    "batch": lambda a, b: BatchComposition(a),
    "lab": lambda a, b: FragmentationLab({"large pool": a, "small pool": b}),
    "prefix": lambda a, b: PrefixTree(a),
    "compare": lambda a, b: RunComparison(a, b),
}


@pytest.fixture(scope="module")
def pair(simulated_run):
    options = {"seed": 3, "requests": 5, "max_model_len": 320, "outputs": (4, 20), "aborts": 0}
    return tuple(simulated_run(num_blocks=n, **options).finish() for n in (32, 24))


@pytest.fixture
def session():
    with make_session(max_tokens=5) as session:
        yield session


@pytest.fixture(autouse=True)
def _no_anywidget(monkeypatch):
    """The package is here; these tests are without."""
    monkeypatch.setattr(stepped, "FRONTS", stepped.FRONTS[1:])


def fronted(view):
    """The view as a cell shows it, and what shows it."""
    view.why = "the live view needs <anywidget>."
    view._repr_mimebundle_()
    return view, view._front


def test_core_widgets_step_scrub_and_select(simulated_run):
    run = simulated_run(requests=4, cancels=0, aborts=0)
    view = EngineView(run.recording, run.advance, tier="ipywidgets")
    view._forward.click()
    view._forward.click()
    assert view.cursor == 2 == run.scheduler.step
    view._back.click()
    assert view.cursor == 1
    assert run.scheduler.step == 2
    assert "Block map, step 1" in view._picture.value
    assert describe(run.recording, 1) in view._said.value
    view._select.value = {"request": "R1"}
    assert "R1: logical to physical" in view._picture.value
    assert view.selected == {"request": "R1"}
    view._play.value = 2  # as the browser counts on
    assert view.cursor == 2
    assert view._play.max > 2, "an engine goes on"
    assert not asyncio.run(view.run_async())
    assert view.cursor == view._play.value == view._slider.max == run.recording.last_step
    view._play.value += 1
    assert view._play.value == view._play.max == view.cursor, "nothing left to do: Play ends"
    view.cursor = 5
    assert (view._slider.value, view._play.value) == (5, 5)
    with pytest.raises(RecordingError, match="No step 5000"):
        view.cursor = 5000
    view.close()
    assert not view.step()


def test_a_failing_engine_is_told_below_the_words(simulated_run):
    run = simulated_run()
    view = EngineView(run.recording, lambda: 1 / 0, tier="ipywidgets")
    view._forward.click()
    assert "ZeroDivisionError: division by zero" in view._trouble.value
    view._back.click()
    assert not view._trouble.value


@pytest.mark.parametrize("name", MAKERS)
def test_every_view_with_a_cursor_is_driven_by_core_widgets(pair, name):
    view, front = fronted(MAKERS[name](*pair))

    def shows(step):
        assert view.cursor == step
        assert (front._slider.value, front._play.value) == (step, step)
        assert front._picture.value == view.svg(step)
        assert front._said.value.startswith(escape(view.sheet(step, 920).words)[:20])
        assert "needs &lt;anywidget&gt;." in front._said.value

    shows(view.last_step)
    front._slider.value = 7
    shows(7)
    front._forward.click()
    front._forward.click()
    front._back.click()
    shows(8)
    front._play.value = 9
    shows(9)
    view.cursor = 3
    shows(3)
    front._slider.value = view.first_step
    front._back.click()
    shows(view.first_step)
    front._slider.value = view.last_step
    front._forward.click()
    shows(view.last_step)
    assert (front._slider.min, front._slider.max) == (view.first_step, view.last_step)
    assert front._play.max == view.last_step, "Play ends by itself"
    for _, selected in front._select.options:
        assert selected in ({}, *view.related(view.cursor, 920).selections())


def test_a_choice_selects_in_all_linked_views(session):
    session.run(8)
    (latency, front), (tree, tree_front) = fronted(Latency(session)), fronted(PrefixTree(session))
    engine = EngineView(session.recording, tier="ipywidgets")
    engine._select.value = {"request": "r2"}
    assert latency.selected == tree.selected == engine.selected == {"request": "r2"}
    assert front._select.value == tree_front._select.value == {"request": "r2"}
    assert front._picture.value == latency.svg()
    engine._slider.value = 4
    assert (latency.cursor, tree.cursor, front._slider.value) == (4, 4, 4)
    front._select.value = {}
    front._slider.value = 8
    assert (engine.cursor, engine.selected) == (8, {})
    engine.linked = False
    tree_front._slider.value = 2
    assert (engine.cursor, latency.cursor) == (8, 2)


def test_what_a_drawing_shows_can_be_chosen():
    sheet = Sheet(920)
    sheet.add(['<g class="x" data-rid="a&lt;b">', '<g data-blocks="4 3">'], 10)
    sheet.add(['<g data-rid="a&lt;b" data-blocks="7">', '<g data-blocks="">', "<g>"], 10)
    assert sheet.selections() == [{"request": "a<b"}, {"block": 4}]


@pytest.mark.parametrize("drive", ["sheet", "play", "engine", "cell", "await"])
def test_core_views_grow_with_the_run_whoever_drives(session, drive):
    (latency, front), engine = fronted(Latency(session)), session.view(tier="ipywidgets")
    if drive == "sheet":
        front._forward.click()
    elif drive == "play":
        front._play.value = 1
    elif drive == "engine":
        engine._forward.click()
    elif drive == "cell":
        session.run(1)
        assert (latency.cursor, engine.cursor, front._slider.max, engine._slider.max) == (0, 0, 1, 1)
        engine.refresh()
    else:
        asyncio.run(session.play(1))
    assert session.recording.last_step == 1 == latency.cursor == engine.cursor
    for core in (front, engine):
        assert (core._slider.value, core._slider.max, core._play.value) == (1, 1, 1)
    assert front._picture.value == Latency(session).svg()
    assert engine._picture.value == engine.svg()
    front._back.click()
    session.run(1)
    assert (latency.cursor, engine.cursor, front._slider.max, engine._slider.max) == (0, 0, 2, 2)


def test_play_ends_with_the_engine_and_its_error_is_told(session):
    latency, front = fronted(Latency(session))
    for _ in range(100):
        if front._play.value == front._play.max:
            break
        front._play.value += 1  # as the browser does, until the end
    assert not session.engine.has_unfinished()
    assert latency.cursor == session.recording.last_step
    session.submit([1] * 9, max_tokens=5, detokenize=False, ignore_eos=True)
    last = latency.last_step
    session.breakpoints.add(lambda event: event.step > last and 1 / 0)
    front._forward.click()
    assert "division by zero" in front._trouble.value
    front._back.click()
    assert not front._trouble.value


def test_the_picture_of_a_core_view_is_kept_in_its_output(simulated_run, monkeypatch):
    from pagedinfer.views import core_widget

    run, published = simulated_run(), []
    monkeypatch.setattr(core_widget, "publish", lambda *args, **more: published.append((args, more)))
    view = EngineView(run.recording, run.advance, tier="ipywidgets")
    view._ipython_display_()
    view._forward.click()
    assert len(published) == 1, "a button's step leaves the output, or it would lose the keys"
    view.play(3)
    link_of(run.recording).keep()
    view.close()
    kinds, ids = [set(args[0]) for args, _ in published], {args[1] for args, _ in published}
    assert len(ids) == 1
    assert [more.get("update", False) for _, more in published] == [False, True, True], "once for each change"
    static = {"image/svg+xml", "image/png", "text/plain"}
    assert kinds == [static | {"application/vnd.jupyter.widget-view+json"}] * 2 + [static]
    assert "step 4:" in published[-1][0][0]["text/plain"]


def test_a_closed_core_view_is_let_go(session):
    session.run(3)
    views = [session.view(tier="ipywidgets"), fronted(Latency(session))[0]]
    gone = [weakref.ref(view) for view in views]
    for view in views:
        view.close()
    del view, views
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    link_of(session.recording).grew()
