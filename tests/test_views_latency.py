"""The latency view: every number is the recording's own, counted here from states and tables."""

import math
import random
import statistics
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from handmade import HandMade

from pagedinfer.errors import ConfigError
from pagedinfer.trace import events as ev
from pagedinfer.trace.events import Commit
from pagedinfer.trace.metrics import goodput
from pagedinfer.trace.phases import PHASES
from pagedinfer.trace.recording import RecordingError
from pagedinfer.views.latency import SERIES, Latency
from pagedinfer.views.lives import lives_of
from pagedinfer.views.marks import plain

SVG = "{http://www.w3.org/2000/svg}"


def tight_run(simulated_run, seed):
    rng = random.Random(seed)
    sizes = {"num_blocks": rng.choice([10, 20, 40]), "block_size": rng.choice([1, 4, 16])}
    return simulated_run(
        seed=seed, max_num_batched_tokens=rng.choice([3, 16, 64]), prompts=(1, 9), outputs=(1, 12), requests=20,
        aborts=0.03, cancels=0.1, **sizes,
    ).finish()  # fmt: skip


def words_of(svg):
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("seed", range(8))
def test_lives_agree_with_the_table_of_requests(simulated_run, seed):
    recording = tight_run(simulated_run, seed)
    rows = list(recording.requests.rows())
    lives = lives_of(recording)
    assert len(rows) == len(lives) == 20
    for life, row in zip(lives, rows, strict=True):
        assert (life.rid, life.submitted, life.finished) == (
            row["request"],
            row["submitted"],
            row["finished"],
        )
        assert (life.times.ttft, len(life.token_steps)) == (row["ttft_steps"], row["output_tokens"])
        assert life.times.tpot == (None if row["tpot_steps"] is None else pytest.approx(row["tpot_steps"]))


@pytest.mark.parametrize("seed", range(8))
def test_phases_fill_each_life_and_are_what_the_states_say(simulated_run, seed):
    recording = tight_run(simulated_run, seed)
    lives = {life.rid: life for life in lives_of(recording)}
    for life in lives.values():
        assert sum(map(life.steps, PHASES)) == life.times.e2e
        edges = [step for _, first, last in life.runs for step in (first, last)]
        assert edges == sorted(edges)
    had = dict.fromkeys(lives, False)
    for state in recording.states():
        for rid, life in lives.items():
            phase = next((name for name, a, b in life.runs if a <= state.step <= b), None)
            if state.last.scheduled.get(rid):
                tokens = state.last.tokens.get(rid, 0)
                assert phase == ("decode" if had[rid] and tokens else "recompute" if had[rid] else "prefill")
                had[rid] |= tokens > 0
            elif rid in state.requests and phase:
                request = state.requests[rid]
                place = "stall" if request.status == "running" else "preempted"
                assert phase == (place if request.num_preemptions or place == "stall" else "queue")


def test_the_runs_of_these_tests_know_every_phase(simulated_run):
    left_out = HandMade().submit("A").submit("B")
    tables = [ev.Alloc("A", 0, 0, (0, 1, 2)), ev.Alloc("B", 0, 0, (3, 4, 5))]
    left_out.step({"A": 8, "B": 8}, ev.Admit("A", ""), ev.Admit("B", ""), *tables, tokens=["A", "B"])
    left_out.step({"B": 1}, tokens=["B"]).step({"A": 1, "B": 1}, tokens=["A", "B"])
    runs = [left_out.recording, *(tight_run(simulated_run, seed) for seed in range(8))]
    lives = [life for recording in runs for life in lives_of(recording)]
    assert {phase for life in lives for phase, _, _ in life.runs} == set(PHASES)


def test_gaps_are_those_between_commits(simulated_run):
    recording = tight_run(simulated_run, 3)
    steps = {}
    for event in recording.events:
        if isinstance(event, Commit):
            for rid, n in event.tokens.items():
                steps.setdefault(rid, []).extend([event.step] * n)
    gaps = [b - a for times in steps.values() for a, b in pairwise(times)]
    assert sorted(Latency(recording).values("ITL")) == sorted(gaps)
    assert gaps


def linear(values, p):
    """Percentile between neighbours, by the standard library."""
    return statistics.quantiles(values, n=100, method="inclusive")[p - 1] if len(values) > 1 else values[0]


@pytest.mark.parametrize("step", [0, 1, 9, -1])
@pytest.mark.parametrize("width", [920, 430])
def test_the_numbers_drawn_are_those_known_at_the_step(simulated_run, step, width):
    recording = tight_run(simulated_run, 2)
    view = Latency(recording, slo={"ttft": 4, "ITL": 2})
    shown = " | ".join(words_of(view.svg(step, width)))
    table = recording.until(view.clamp(step)).requests
    ttfts = [value for value in table["ttft_steps"] if value is not None]
    assert view.values("TTFT", step) == ttfts
    if ttfts:
        assert (
            f"{len(ttfts)} values · p50 {plain(linear(ttfts, 50))} · p90 {plain(linear(ttfts, 90))}" in shown
        )
        assert f"max {max(ttfts)}" in shown
    within = sum(value <= 4 for value in ttfts)
    assert not ttfts or f"{100 * within / len(ttfts):.1f} % within 4" in shown
    past = recording.until(view.clamp(step))
    met = goodput(past, ttft=4, itl=2)
    ended = bool(past.at(-1).finished)
    words = f"{met.met} of {met.total} ended within" if ended else "none has ended yet"
    assert words in shown.replace(" | ", " ")
    assert shown.count("SLO") == 2
    for rid in table["request"]:
        assert rid in shown


def test_histograms_hold_every_value(simulated_run):
    view = Latency(tight_run(simulated_run, 5), slo={"TPOT": 1.5})
    for name in SERIES:
        body, _ = view._distribution(name, values := view.values(name), 300)
        titles = [node.text for node in ET.fromstring(f"<g>{''.join(body)}</g>").iter("title")]
        assert sum(int(title.rpartition(": ")[2]) for title in titles) == len(values) > 0


def test_seconds_are_the_recordings_wall_time(simulated_run):
    recording = tight_run(simulated_run, 5)
    with pytest.raises(ConfigError, match='no wall time; use unit="steps"'):
        Latency(recording, unit="seconds")
    for i, event in enumerate(recording.events):
        event.t = i / 128
    view = Latency(recording, unit="seconds", slo={"TTFT": 0.25})
    table = recording.requests
    assert view.values("TTFT") == [t for t in table["ttft_s"] if t is not None]
    assert view.values("TPOT") == pytest.approx([t for t in table["tpot_s"] if t is not None])
    assert "latencies in seconds" in view.text()
    assert (
        f"{goodput(recording, ttft=0.25, unit='seconds').met} of 20 ended within TTFT ≤ 0.25" in view.text()
    )


def test_limits_are_checked(simulated_run):
    recording = tight_run(simulated_run, 1)
    for slo in ({"E2E": 3}, {"TTFT": 0}, {"TTFT": "fast"}, {"ITL": True}, {"ITL": math.nan}):
        with pytest.raises(ConfigError, match="give TTFT, TPOT or ITL a number of steps above 0"):
            Latency(recording, slo=slo)
    with pytest.raises(RecordingError, match="No step 10000: this view has 0 to"):
        Latency(recording).svg(10_000)
    with pytest.raises(ConfigError, match="width=100: it must be an integer from 320 to 4000"):
        Latency(recording).svg(width=100)


def test_many_requests_show_those_near_the_cursor(simulated_run):
    recording = simulated_run(requests=40, num_blocks=64, prompts=(4, 30), outputs=(2, 12)).finish()
    view = Latency(recording)
    assert "and 16 more requests, which ended before" in words_of(view.svg())
    assert "R40" in words_of(view.svg())
    assert "R1" in words_of(view.svg(3))


def test_an_id_used_again_is_another_life():
    made = HandMade().submit("a", 4, 4)
    made.step({"a": 4}, ev.Admit("a", ""), ev.Alloc("a", 0, 0, (0,)), tokens="a")
    made.finish("a", 0).submit("a", 4, 4)
    made.step({"a": 4}, ev.Admit("a", ""), ev.Alloc("a", 0, 0, (0,)))
    lives = lives_of(made.recording)
    found = [(life.rid, life.number, life.why, life.times.e2e) for life in lives]
    assert found == [("a", 0, "length", 1), ("a", 1, "", None)]


def test_the_plotly_figure_has_the_same_values(simulated_run):
    pytest.importorskip("plotly", reason="plotly is not installed (extra: lab)")
    view = Latency(tight_run(simulated_run, 4), slo={"TTFT": 4})
    figure = view.plotly()
    assert [list(trace.x) for trace in figure.data] == [view.values(name) for name in SERIES]
    assert [trace.name.split(":")[0] for trace in figure.data] == list(SERIES)
    assert len(figure.layout.shapes) == 1


def test_without_plotly_the_figure_says_what_to_install(simulated_run, monkeypatch):
    monkeypatch.delitem(sys.modules, "pagedinfer.views.latency_plotly", raising=False)
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    with pytest.raises(ConfigError, match=r'needs plotly; pip install "pagedinfer\[lab\]" brings it'):
        Latency(tight_run(simulated_run, 4)).plotly()


def test_rows_say_which_request_they_stand_for(simulated_run):
    view = Latency(tight_run(simulated_run, 2))
    for step in (5, view.last_step):
        marked = [node for node in ET.fromstring(view.svg(step)).iter(f"{SVG}g") if node.get("data-rid")]
        rows = {life.rid: len(life.runs) for life in view.known(step)}
        found = dict.fromkeys(rows, 0)
        for node in marked:
            titles = [title.text for title in node.iter(f"{SVG}title")]
            assert all(title.startswith(f"{node.get('data-rid')} ") for title in titles)
            found[node.get("data-rid")] += len(titles)
        assert found == rows
        assert len(marked) == 2 * len(rows)
