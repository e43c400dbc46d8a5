"""All views of one recording: one step, one selection, one growing run."""

import asyncio
import gc
import json
import weakref
import zlib

import pytest
from simulated_runs import make_session

pytest.importorskip("anywidget", reason="anywidget is not installed (extra: view)")

from pagedinfer.sim.fork import fork
from pagedinfer.views import (
    BatchComposition,
    EngineView,
    FragmentationLab,
    Latency,
    PrefixTree,
    RunComparison,
)
from pagedinfer.views.link import link_of


@pytest.fixture
def session():
    with make_session() as session:
        yield session


def displayed(*views):
    """As a cell shows them: from here on they take part."""
    for view in views:
        view._repr_mimebundle_()
    return views


def test_a_move_in_one_view_moves_the_others(session):
    session.run(20)
    engine, latency, tree = session.view(), *displayed(Latency(session), PrefixTree(session))
    engine.cursor = 7  # as the browser's message does
    assert (latency.cursor, tree.cursor) == (7, 7)
    assert latency._front.cursor == 7
    latency._front.cursor = 12
    assert (engine.cursor, tree.cursor) == (12, 12)
    tree._front.selected = {"request": "r2"}
    assert engine.selected == latency.selected == {"request": "r2"}
    engine.selected = {"block": 3}
    assert latency.selected == tree._front.selected == {"block": 3}


def test_views_of_another_recording_and_unlinked_ones_stay(session):
    session.run(20)
    other = fork(session.recording, 5, num_blocks=40)
    engine, alone, far = session.view(), *displayed(Latency(session), Latency(other))
    alone.linked = False
    engine.cursor = 3
    assert (alone.cursor, far.cursor) == (20, far.last_step)
    alone.cursor = 9
    assert engine.cursor == 3


def test_views_of_several_recordings_tie_them_together(session):
    session.run(30)
    other = fork(session.recording, 5, num_blocks=40)
    pair, lab = displayed(
        RunComparison(session, other), FragmentationLab({"a": session.recording, "b": other.recording})
    )
    here, there = session.view(), EngineView(other)
    here.cursor = 11
    assert (pair.cursor, lab.cursor) == (11, 11)
    pair._front.cursor = 13
    assert (here.cursor, there.cursor, lab.cursor) == (13, 13, 13)


def test_each_shows_the_nearest_step_it_has(session):
    session.run(20)
    engine = session.view()
    (batch,) = displayed(BatchComposition(session))
    assert batch.last_step > 20, "static batches end later"
    batch._front.cursor = batch.last_step
    assert engine.cursor == 20


def drawn(front):
    """The step and the last step of the drawing sent beside the film."""
    tail = json.loads(front.tail)
    return tail["steps"], tail["range"][1]


@pytest.mark.parametrize("drive", ["button", "cell", "await", "refresh", "sheet"])
def test_views_grow_with_the_run_whoever_drives(session, drive):
    session.run(4)
    engine, (latency, tree) = session.view(), displayed(Latency(session), PrefixTree(session))
    assert latency._front.live
    if drive == "button":
        engine.ask = {"id": 1, "steps": 3, "have": 4}
    elif drive == "cell":
        engine.step(3)
    elif drive == "await":
        asyncio.run(session.play(3))
    elif drive == "refresh":
        session.run(3)
        assert {view.cursor for view in (engine, latency, tree)} == {4}, "a cell's run moves no picture"
        assert latency.last_step == json.loads(latency._front.tail)["range"][1] == 7
        for view in (latency, tree):
            view._front.seen = view._front._sent  # as the browser does
        engine.refresh()
    else:
        tree._front.ask = {"id": 1, "steps": 3}
        assert tree._front.answer == {"id": 1, "more": True, "error": ""}
    assert session.recording.last_step == 7
    for view in (engine, latency, tree):
        assert view.cursor == 7
    for view in (latency, tree):
        assert view._front.cursor == 7
        assert drawn(view._front) == ([7], 7)
        assert view.text() == type(view)(session).text()


def test_a_view_made_later_moves_nobody(session):
    session.run(12)
    engine = session.view(step=4)
    (pair,) = displayed(RunComparison(session, fork(session.recording, 2, max_num_seqs=2)))
    assert pair.cursor == pair.divergence[0] != 4
    assert engine.cursor == 4


def test_views_of_several_runs_go_along_with_the_live_one(session):
    session.run(6)
    branch = session.fork(2, max_num_seqs=2)
    engine, (pair, lab) = (
        session.view(),
        displayed(RunComparison(session, branch), FragmentationLab([session, branch])),
    )
    engine.ask = {"id": 1, "steps": 2, "have": 6}
    assert engine.cursor == pair.cursor == lab.cursor == 8
    assert lab.recordings.keys() == {"paged", "paged (2)"}


def test_who_looks_back_is_left_there(session):
    session.run(10)
    engine, (latency,) = session.view(), displayed(Latency(session))
    engine.cursor = 6
    engine.step(2)
    assert (engine.cursor, latency.cursor, latency.last_step) == (6, 6, 12)
    assert drawn(latency._front) == ([6], 12), "drawn anew: its axis is longer"


def test_a_view_that_no_browser_draws_is_not_drawn_again(session):
    engine, (latency,) = session.view(), displayed(Latency(session))
    for _ in range(4):
        engine.step()
    front = latency._front
    assert drawn(front) == ([1], 1)
    front.seen = 1  # the browser has drawn it at last
    assert drawn(front) == ([4], 4), "the newest is delivered"
    sent = front._sent
    front.seen = 2
    assert front._sent == sent, "and nothing is sent twice"


def test_steps_that_the_film_does_not_hold_come_from_the_kernel(simulated_run):
    recording = simulated_run(
        requests=3, outputs=(500, 700), num_blocks=256, prompts=(4, 9), aborts=0
    ).finish()
    (view,) = displayed(Latency(recording))
    front = view._front
    missing = next(step for step in range(view.last_step) if step not in front._steps)
    front.cursor = missing + 1
    assert not front.tail, "the film has it"
    front.cursor = missing
    assert drawn(front)[0] == [missing]
    assert json.loads(front.tail) == json.loads(view.encode(step=missing, number=1))


def test_a_view_that_is_slow_to_draw_is_shown_all_the_same(session, monkeypatch):
    session.run()
    monkeypatch.setattr("pagedinfer.views.sheet_widget.FILM_S", 0.0)
    (view,) = displayed(Latency(session))
    front, last = view._front, view.last_step
    assert json.loads(zlib.decompress(front.film))["steps"] == sorted(front._steps) == [0, last]
    front.cursor = last // 2
    assert drawn(front)[0] == [last // 2]


def test_a_failing_engine_is_told_where_it_was_stepped(session):
    (latency,) = displayed(Latency(session))
    session.breakpoints.add(lambda event: 1 / 0)
    latency._front.ask = {"id": 5, "steps": 1}
    answer = latency._front.answer
    assert answer["id"] == 5
    assert not answer["more"]
    assert "division by zero" in answer["error"]


def test_after_the_session_a_view_stands(session):
    session.run(4)
    (latency,) = displayed(Latency(session))
    session.close()
    latency._front.ask = {"id": 1, "steps": 1}
    assert (latency._front.answer["more"], session.recording.last_step) == (False, 4)
    latency._front.cursor = 2
    assert latency.cursor == 2


def plain_parts(svg, rid):
    """How many parts stand for a request."""
    return svg.count(f'data-rid="{rid}"')


def test_a_selection_dims_the_rest_of_a_still_picture(session):
    session.run(12)
    view = Latency(session)
    plain, mine = view.svg(), plain_parts(view.svg(), "r2")
    view.selected = {"request": "r2"}
    assert view.svg().count('<g opacity=".4"') == plain.count("data-rid=") - mine > 2 * mine > 0
    table = session.recording.at(12).requests["r2"].block_table
    view.selected = {"block": table[0]}
    assert view.svg().count('<g opacity=".4"') == plain.count("data-rid=") - mine
    view.selected = {"request": "nobody"}
    assert view.svg() == plain, "nothing belongs to it: nothing is dimmed"


def test_a_view_opened_at_a_step_of_its_own_stays_there(session):
    session.run(12)
    pinned, (sheet,) = session.view(step=4), displayed(Latency(session, step=5))
    engine = session.view()
    engine.cursor = 9
    engine.step(2)
    assert (pinned.cursor, sheet.cursor) == (4, 5)
    sheet.linked = True
    engine.cursor = 3
    assert (pinned.cursor, sheet.cursor) == (4, 3)


def test_blocks_are_not_dimmed_for_a_request_that_holds_none(session):
    session.run(12)
    waiting = session.recording.at(12).waiting[0]
    view = RunComparison(session, session)
    view.selected = {"request": waiting}
    assert 'opacity=".4"' not in view.svg()
    view.selected = {"request": session.recording.at(12).running[0]}
    assert 'opacity=".4"' in view.svg()


def test_links_keep_nothing_alive(session):
    session.run(3)
    view = Latency(session)
    link = link_of(session.recording)
    assert len(link._members) == 0, "who is not shown takes no part"
    displayed(view)
    assert len(link._members) == 1
    gone = weakref.ref(view)
    view.close()
    del view
    gc.collect()
    assert gone() is None
    assert len(link._members) == 0
