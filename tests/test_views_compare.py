"""The compare view: differences counted here from the states of both runs, at every step."""

import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest
from handmade import HandMade

from pagedinfer.errors import ConfigError
from pagedinfer.sim.compare import compare
from pagedinfer.sim.fork import fork
from pagedinfer.trace import events as ev
from pagedinfer.trace.recording import Recording
from pagedinfer.views.compare_view import RunComparison
from pagedinfer.views.marks import scale_of

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("wide", "tight")


def one(simulated_run, seed, num_blocks=32, **options):
    return simulated_run(
        seed=seed, num_blocks=num_blocks, max_model_len=320, prompts=(8, 90), outputs=(4, 40), max_num_seqs=6, aborts=0,
        cancels=0.05, **options,
    ).finish()  # fmt: skip


@pytest.fixture(scope="module", params=range(4))
def pair(request, simulated_run):
    return one(simulated_run, request.param), one(simulated_run, request.param, 22)


def facts(state):
    snapshot = state.snapshot()
    names = ("running", "waiting", "requests", "block_tables")
    return [
        *(snapshot[name] for name in names),
        state.last.scheduled,
        state.last.preempted,
        state.last.finished,
    ]


def use(state):
    found = {}
    for block_id, owners in state.owners().items():
        found[block_id] = (sorted(owners), max(state.fill(rid)[logical] for rid, logical in owners))
    return found


def test_they_part_where_the_states_first_differ(pair):
    steps = range(min(run.last_step for run in pair) + 1)
    expected = next(s for s in steps if facts(pair[0].at(s)) != facts(pair[1].at(s)))
    view = RunComparison(*pair, names=NAMES)
    step, why = view.divergence
    assert step == expected > 0
    assert all(name in why for name in NAMES)
    assert view.cursor == step, "it opens where they part"
    assert f"they part at step {step}: {why}" in view.text()
    assert f"part at step {step}" in view.svg()
    assert "settings: num_blocks 32 | 22" in view.text()


@pytest.mark.parametrize("width", [920, 430])
def test_blocks_and_numbers_are_those_of_the_states(pair, width):
    view = RunComparison(*pair, names=NAMES)
    for step in sorted({0, 1, view.cursor - 1, view.cursor, view.cursor + 9, view.last_step}):
        states = [run.at(min(step, run.last_step)) for run in pair]
        uses = [use(state) for state in states]
        expected = {b for b in uses[0].keys() | uses[1].keys() if uses[0].get(b) != uses[1].get(b)}
        assert view.different_blocks(step) == sorted(expected)
        root = ET.fromstring(view.svg(step, width))
        titles = [node.text for node in root.iter(f"{SVG}title")][1:]
        assert len(titles) == 32 + 22
        for state, shown, held in zip(states, (titles[:32], titles[32:]), uses, strict=True):
            for block_id, title in enumerate(shown):
                words = f"block {block_id}: free"
                if block_id in held:
                    names = ", ".join(rid for rid, _ in held[block_id][0])
                    words = f"block {block_id}: {names}, {held[block_id][1]} of {state.block_size} tokens"
                assert title == words + (", not so in the other run" if block_id in expected else "")
        words = [node.text for node in root.iter(f"{SVG}text")]
        for i, state in enumerate(states):
            usage = state.usage()
            for name, value in {
                "running": len(state.running), "waiting": len(state.waiting), "blocks in use": len(state.ref_counts),
                "preemptions so far": state.num_preemptions, "requests ended so far": state.num_finished,
                "output tokens so far": sum(pair[i].until(min(step, pair[i].last_step)).requests["output_tokens"]),
                "KV usage": f"{100 * usage['kv_usage']:.1f} %", "KV waste": f"{100 * usage['kv_waste']:.1f} %",
            }.items():  # fmt: skip
                assert words[words.index(name) + 1 + i] == str(value), (step, name)
            late = f" at step {pair[i].last_step}, its last" if step > pair[i].last_step else ""
            assert f"{len(state.ref_counts)} of {state.num_blocks} blocks in use{late}" in words


def test_the_strip_hatches_the_steps_that_differ(pair):
    view = RunComparison(*pair, names=NAMES)
    root = ET.fromstring(view.svg())
    strip = [node for node in root.iter(f"{SVG}rect") if node.get("fill") == "url(#pi-v-lost)"]
    assert strip
    column = scale_of(0, view.last_step, 920 - 96 - 14).column
    hatched = sum(float(node.get("width")) for node in strip) / column
    last = min(run.last_step for run in pair)
    different = sum(
        s > last or facts(pair[0].at(s)) != facts(pair[1].at(s)) for s in range(view.last_step + 1)
    )
    assert round(hatched) == pytest.approx(different, abs=1)
    assert min(float(node.get("x")) for node in strip) == pytest.approx(
        96 + view.divergence[0] * column, abs=0.1
    )


def standing(state, rid):
    if rid not in state.requests:
        return state.finished.get(rid, ("",))[0]
    request = state.requests[rid]
    why = state.last.reasons.get(rid) if request.status != "running" else None
    return request.status, request.num_tokens, request.num_computed_tokens, len(request.block_table), why


def test_requests_that_differ_are_told(pair):
    view = RunComparison(*pair, names=NAMES)
    for step in (view.cursor, view.cursor + 12):
        states = [run.at(step) for run in pair]
        live = [rid for state in states for rid in state.requests]
        expected = {rid for rid in live if standing(states[0], rid) != standing(states[1], rid)}
        named = re.findall(r"^  (R\d+): wide:", view.text(step), re.M)
        assert set(named) <= expected
        assert len(named) == min(8, len(expected))
        assert f"and {len(expected)} request{'s' * (len(expected) != 1)} differ" in view.text(step)


def test_equal_runs_have_no_difference(simulated_run):
    first, second = one(simulated_run, 5), one(simulated_run, 5)
    view = RunComparison(first, second)
    assert view.divergence is None
    assert all(view.different_blocks(step) == [] for step in range(view.last_step + 1))
    assert '"A" and "B" do the same in every step' in view.text()
    assert view.cursor == view.last_step
    longer = RunComparison(first, first.until(9), names=("whole", "part"))
    assert longer.divergence is None, "it was cut, nobody knows how it went on"
    assert (
        '"whole" and "part" do the same in every step; "part" has not ended: it is compared up to step 9'
    ) in longer.text()
    assert f"of {first.at(9).num_blocks} blocks in use at step 9, its last" in longer.svg()


def test_a_run_with_nobody_left_has_ended():
    def made(steps):
        run = HandMade().submit("A", 4)
        run.step({"A": 4}, ev.Admit("A", ""), ev.Alloc("A", 0, 0, (0,)), tokens="A").finish("A", 0)
        for _ in range(steps):
            run.step({})
        return run.recording

    view = RunComparison(made(0), made(2), names=("short", "long"))
    assert view.divergence == (2, '"short" has ended, "long" goes on')
    assert view.cursor == 2
    assert 'they part at step 2: "short" has ended, "long" goes on' in view.text()


def test_the_view_and_the_comparison_say_it_in_the_same_words(simulated_run):
    recording = one(simulated_run, 0, 22)
    sentences = []
    for changes in ({"victim": "fewest-tokens-lost"}, {"max_num_seqs": 3}, {"max_num_batched_tokens": 16}):
        both = compare(recording, fork(recording, 0, **changes), names=NAMES)
        found = both.first_divergence
        assert RunComparison(both).divergence == (found.step, found.sentence)
        sentences.append(found.sentence)
    assert sentences[0] == (
        '"wide" preempts R11 (R10 needs 1 block, 0 free; R11 gives way), "tight" preempts R9 instead'
    )
    assert sentences[1].endswith(
        '(6 blocks for 82 tokens, 9 free after that), "tight" does not (all 3 seats (max_num_seqs) are taken)'
    )


def test_branches_and_comparisons_are_taken(pair):
    branches = [SimpleNamespace(recording=run) for run in pair]
    parted = RunComparison(*pair).divergence[0]
    assert RunComparison(*branches).divergence[0] == parted
    three = SimpleNamespace(names=["a", "b", "c"], recordings=[pair[0], pair[0], pair[1]])
    assert RunComparison(three).divergence is None
    view = RunComparison(three, run=2)
    assert (view.names, view.divergence[0]) == (["a", "c"], parted)


def test_what_is_no_pair_is_named(pair, simulated_run):
    with pytest.raises(ConfigError, match="Compare two recordings; Recording and NoneType came"):
        RunComparison(pair[0])
    with pytest.raises(ConfigError, match="need two different names"):
        RunComparison(*pair, names=("a", "a"))
    three = SimpleNamespace(names=["a", "b"], recordings=list(pair))
    with pytest.raises(ConfigError, match="run=2: the comparison has runs 1 to 1"):
        RunComparison(three, run=2)
    assert isinstance(pair[0], Recording)


def test_a_large_pool_is_drawn_in_layers(simulated_run):
    small = RunComparison(*(one(simulated_run, 1, n) for n in (3000, 2500)))
    svg = small.svg(20)
    assert len(svg) < 400_000
    assert small.png(20).startswith(b"\x89PNG")


def test_what_stands_for_a_block_or_a_request_says_so(pair):
    view = RunComparison(*pair, names=NAMES)
    view.cursor += 9
    root = ET.fromstring(view.svg())
    cells = [node for node in root.iter(f"{SVG}g") if node.get("data-blocks")]
    held = [state.owners() for state in view.states()]
    expected = [
        (str(b), owners[b][0][0] if len(owners.get(b, ())) == 1 else None)
        for owners, size in zip(held, (32, 22), strict=True)
        for b in range(size)
    ]
    assert [(cell.get("data-blocks"), cell.get("data-rid")) for cell in cells] == expected
    lines = [node for node in root.iter(f"{SVG}g") if node.get("data-rid") and not node.get("data-blocks")]
    assert lines
    for line in lines:
        assert "".join(line.itertext()).startswith(f"{line.get('data-rid')}: wide: ")


def test_what_is_saved_is_what_the_cursor_shows(simulated_run):
    """Also after the page has moved it."""
    pair = one(simulated_run, 0), one(simulated_run, 0, 22)
    pytest.importorskip("anywidget", reason="anywidget is not installed (extra: view)")
    view = RunComparison(*pair, names=NAMES)
    first, parted = view._repr_mimebundle_(), view.cursor
    view._front.set_state({"cursor": parted + 3})
    moved = view._repr_mimebundle_()
    assert moved["image/svg+xml"] == view.svg() == view.svg(parted + 3) != first["image/svg+xml"]
    assert moved["text/plain"] == view.text() == view.text(parted + 3) != first["text/plain"]
    assert moved["image/png"] != first["image/png"]
