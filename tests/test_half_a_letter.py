"""A request id may hold half of a surrogate pair: recordings keep it, and all that leaves for a reader is UTF-8."""

import json
import os
from importlib import import_module

import pytest

from pagedinfer import EngineConfig, SamplingParams, Session, compare
from pagedinfer.cli import main
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import PagedInferError, readable
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.watch import parse
from pagedinfer.views import EngineView, export_html
from pagedinfer.views.film import film_of

HALF, SHOWN = "a\ud800", r"a\ud800"


@pytest.fixture(scope="module")
def run():
    """A session in which requests with such ids wait for each other, preempt each other and find cached blocks."""
    config = EngineConfig(num_blocks=9, block_size=2, max_num_seqs=3, max_num_batched_tokens=8, watermark=0.0)
    with Session(Engine(config, SimulatedRunner())) as session:
        session.breakpoints.add("any preempted")
        for rid in ("r0", HALF, "\udcffb", "r3"):
            params = SamplingParams(max_tokens=5, detokenize=False, ignore_eos=True)
            session.engine.add_request([1, 2, 3, 4, 5], params, rid)
        session.plan = session.engine.scheduler.schedule(0.0)
        session.engine.scheduler.cancel(session.plan, f"for {HALF}")
        session.run()
        session.run()
    assert any(e.kind == "preempt" and not e.rid.isascii() for e in session.recording.events)
    return session


def things(session):
    """Everything public that shows a run, by name."""
    recording = session.recording
    branch = session.fork(3, num_blocks=12, model=False)
    comparison = compare(recording, branch, names=["here", HALF])
    yield from ((name, getattr(recording, name)) for name in ("steps", "requests", "blocks"))
    yield from [("recording", recording), ("events table", recording.events_table()), ("session", session)]
    yield from [
        ("state", recording.at(4)),
        ("plan", session.plan),
        ("branch", branch),
        ("compare", comparison),
    ]
    yield from [("comparison table", comparison.table), ("breakpoints", session.breakpoints)]
    yield from ((f"why {rid}", session.why(rid)) for rid in ("r0", HALF, "r3"))
    yield from ((f"output {rid}", output) for rid, output in session.outputs.items())
    yield from ((f"stop {n}", stop) for n, stop in enumerate(session.stops))
    yield from ((f"event {n}", event) for n, event in enumerate(recording.events))
    yield "divergence", comparison.divergences[0]
    engine = Engine(session.engine.config, SimulatedRunner())
    engine.add_request([1], request_id=HALF)
    yield "request", engine.request(HALF)
    for tier in ("anywidget", "ipywidgets", "static"):
        for step in (3, -1):
            yield f"{tier} view, step {step}", EngineView(recording, tier=tier, step=step, request=HALF)


def texts_of(thing):
    """What it says of itself, whole bundles as JSON text that is written as Jupyter writes its messages."""
    yield from (repr(thing), str(thing))
    for name in ("_repr_html_", "svg"):
        if hasattr(thing, name):
            yield getattr(thing, name)()
    if hasattr(thing, "_repr_mimebundle_"):
        shown = thing._repr_mimebundle_()
        yield json.dumps(shown, ensure_ascii=False)
    if hasattr(thing, "get_state"):
        yield json.dumps(thing.get_state(), default=bytes.hex, ensure_ascii=False)


def test_all_that_a_reader_sees_is_utf8(run):
    seen = 0
    for name, thing in things(run):
        for text in texts_of(thing):
            assert readable(text) == text, f"{name} holds half of a surrogate pair"
            seen += SHOWN in text
    assert seen > 40, "the id is among what was looked at"


def test_recordings_keep_it(run, tmp_path):
    again = Recording.load(run.recording.save(tmp_path / "a.jsonl"))
    assert again.events == run.recording.events
    assert HALF in again.requests["request"]


def test_a_view_finds_it_by_either_name(run, tmp_path):
    film = film_of(run.recording)
    assert film.lanes[film.find(HALF)].rid == SHOWN
    assert film.find(SHOWN) == film.find(HALF) >= 0
    assert EngineView(run.recording, request=HALF).selected == {"request": SHOWN}
    page = export_html(run.recording, tmp_path / "a.html", request=HALF).read_text(encoding="utf-8")
    assert f'"selected": {json.dumps({"request": SHOWN})}' in page


def test_a_condition_names_it(run):
    watch = parse(f'"{HALF}" finished')
    assert parse(str(watch)).condition == watch.condition
    assert run.recording.find_all(str(watch))


def test_errors_name_it():
    with pytest.raises(PagedInferError) as caught:
        raise PagedInferError(f"no {HALF}")
    assert str(caught.value) == f"no {SHOWN}"


@pytest.mark.parametrize("tool", ["pandas", "polars", "parquet"])
def test_tables_for_other_tools_have_its_escape(run, tmp_path, tool):
    pytest.importorskip({"parquet": "pyarrow"}.get(tool, tool), reason="extra: tables")
    table = run.recording.requests
    if tool == "parquet":
        read = import_module("pyarrow.parquet").read_table(table.to_parquet(tmp_path / "a.parquet"))
        assert SHOWN in read["request"].to_pylist()
    else:
        assert SHOWN in list(getattr(table, f"to_{tool}")()["request"])


def test_the_command_prints_names_that_are_no_utf8(run, tmp_path, capsysbinary):
    target = tmp_path / "a\udcff.svg"  # how Python shows such a file name
    assert (
        main(["export", str(run.recording.save(tmp_path / "run.jsonl")), str(target), "--request", HALF]) == 0
    )
    assert capsysbinary.readouterr().out.startswith(os.fsencode(tmp_path) + rb"/a\udcff.svg: ")
    assert main(["export", str(tmp_path / "run.jsonl"), str(target), "--request", "b"]) == 1
    assert SHOWN.encode() in capsysbinary.readouterr().err
