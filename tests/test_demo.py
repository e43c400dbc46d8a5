"""The demo, with the tiny model: what it prints and writes is what the engine did."""

import re
import signal

import pytest

from pagedinfer.cli import main
from pagedinfer.demo import QUESTIONS, run_demo
from pagedinfer.session import Session
from pagedinfer.sim.rerun import rerun


@pytest.mark.parametrize("live", [False, True], ids=["lines", "board"])
def test_the_demo_shows_eight_requests_in_a_pool_too_small(tmp_path, capsys, live):
    page = tmp_path / "demo.html"
    result = run_demo(tiny=True, html=page, live=live)
    printed = capsys.readouterr().out

    requests, steps = result.recording.requests, result.recording.steps
    assert list(result.prompts.values()) == list(QUESTIONS)
    assert len(requests) == 8
    assert all(requests["finish_reason"])
    assert sum(requests["preemptions"]) > 0
    assert max(steps["kv_usage"]) == 1.0
    assert len(set(requests["submitted"])) > 4, "they arrive over time"

    for rid, question in result.prompts.items():
        assert f"{rid}  > {question}" in printed
        assert result.texts[rid].split("\n")[0] in printed
    assert result.summary["tokens"].startswith(f"{sum(requests['output_tokens'])} in ")
    assert re.search(r"speed +\d+ tokens/s", printed)
    assert ("pool   " in printed) == live
    assert ("preempted because" in printed) == (not live)

    html = page.read_text(encoding="utf-8")
    assert 'type="range"' in html or "range" in html
    assert all(question in html for question in QUESTIONS if "'" not in question)
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", html), "the page asks for something"


def test_a_demo_can_be_run_again_from_its_recording(tmp_path, capsys):
    result = run_demo(tiny=True, html=tmp_path / "demo.html", live=False)
    _, again = rerun(result.recording)
    assert again.to_jsonl(wall=False) == result.recording.to_jsonl(wall=False)


@pytest.mark.parametrize("live", [False, True], ids=["lines", "board"])
@pytest.mark.parametrize("after", [0, 6])
def test_ctrl_c_ends_it_with_the_page_of_the_run_so_far(tmp_path, capsys, monkeypatch, after, live):
    step = Session.step

    def interrupted(session):
        if session.engine.scheduler.step == after:
            session.engine.bus.subscribe(
                lambda event: signal.raise_signal(signal.SIGINT) if event.kind == "commit" else None
            )
        return step(session)

    monkeypatch.setattr(Session, "step", interrupted)
    page = tmp_path / "demo.html"
    result = run_demo(tiny=True, html=page, live=live)
    assert result.stopped
    assert result.recording.last_step == after + 1, "the step that it came in is whole"
    assert f"Stopped in step {after + 1}. The run so far, step by step: {page}" in capsys.readouterr().out
    assert all(f'<th scope="row">{rid}</th>' in page.read_text(encoding="utf-8") for rid in result.prompts)


def test_ctrl_c_before_anything_ran_is_status_130(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Session, "step", lambda session: signal.raise_signal(signal.SIGINT))
    page = tmp_path / "demo.html"
    assert main(["demo", "--tiny", "--html", str(page)]) == 130
    assert "Stopped in step 0. The run so far" in capsys.readouterr().out
    assert page.exists()
