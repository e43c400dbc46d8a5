"""Static pictures: the standard library alone, well-formed, repeatable, true to the numbers."""

import base64
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from pagedinfer.engine.request import Request
from pagedinfer.errors import ConfigError, readable
from pagedinfer.trace.recording import Recording, RecordingError
from pagedinfer.views import (
    PANES,
    Latency,
    StaticView,
    block_map_svg,
    describe,
    export_html,
    memory_svg,
    picture_svg,
    timeline_svg,
)
from pagedinfer.views.film import film_of
from pagedinfer.views.raster import png_of

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recording(simulated_run):
    return simulated_run(seed=3, num_blocks=32, prompts=(8, 90), outputs=(4, 40), max_num_seqs=6).finish()


def texts(svg):
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("draw", [block_map_svg, timeline_svg, memory_svg, picture_svg])
def test_svg_is_well_formed_named_and_repeatable(recording, draw):
    svg = draw(recording, 30)
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text
    assert root.find(f"{SVG}desc").text
    assert "NaN" not in svg
    assert ' d=""' not in svg
    assert draw(Recording(recording.events), 30) == svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("step", [0, 1, -1])
@pytest.mark.parametrize("pane", PANES)
def test_first_and_last_steps_can_be_drawn(recording, pane, step):
    assert texts(picture_svg(recording, step, panes=pane))


@pytest.mark.parametrize("panes", [PANES, ("blocks", "timeline"), "memory"])
@pytest.mark.parametrize("width", [240, 448, 940])
def test_the_picture_says_its_step_on_top(recording, panes, width):
    preempted = next(s.step for s in recording.states() if s.last.preempted)
    for step in (0, preempted, recording.last_step):
        said, found = describe(recording, step), texts(picture_svg(recording, step, panes=panes, width=width))
        lines = next(n for n in range(1, len(found)) if " ".join(found[:n]) == said)
        assert max(map(len, found[:lines])) * 12 * 0.54 <= width or " " not in max(found[:lines], key=len)
        assert found[lines] != said, "once"


def test_nothing_reaches_beyond_a_narrow_picture(recording):
    root = ET.fromstring(picture_svg(recording, 20, panes=PANES, width=448))
    wide = []

    def walk(node, x):
        if found := re.match(r"translate\((-?[\d.]+) ", node.get("transform", "")):
            x += float(found[1])
        if node.tag == f"{SVG}text" and not node.get("text-anchor"):
            wide.append((x + float(node.get("x")) + len(node.text) * 5.5, node.text))
        for child in node:
            walk(child, x)

    walk(root, 0)
    assert max(wide)[0] <= 448 + 32, max(wide)


def test_the_block_map_labels_each_block_with_its_owner(recording):
    for step in (5, 20, 38):
        state, found = recording.at(step), texts(block_map_svg(recording, step))
        assert f"{len(state.ref_counts)} of 32 blocks in use, 16 tokens each" in found
        for rid, request in state.requests.items():
            assert found.count(rid) == len(request.block_table) + 1, "its blocks and its line in the queues"


def test_the_selected_request_is_tabled(recording):
    step = 20
    state = recording.at(step)
    rid = state.running[-1]
    found = texts(block_map_svg(recording, step, rid))
    start = found.index("tokens") + 1
    rows = [found[i : i + 3] for i in range(start, start + 3 * len(state.requests[rid].block_table), 3)]
    table = zip(state.requests[rid].block_table, state.fill(rid), strict=True)
    assert rows == [[str(i), str(block), f"{fill}/16"] for i, (block, fill) in enumerate(table)]


def test_the_timeline_has_a_row_per_request_and_marks_every_end(recording):
    svg = timeline_svg(recording)
    assert [t for t in texts(svg) if re.fullmatch(r"R\d+", t)] == recording.requests["request"]
    ends = [row["finish_reason"] for row in recording.requests.rows()]
    assert svg.count("l3 3.5l5 -7") == ends.count("length") + 1, "one tick more in the legend"
    assert svg.count("l6 6m0 -6l-6 6") == ends.count("abort")


def test_a_long_run_is_shown_around_the_step(simulated_run):
    recording = simulated_run(requests=150, cancels=0).finish()
    assert recording.last_step > 250
    shown = [int(t) for t in texts(timeline_svg(recording, 200)) if t.isdecimal() and int(t) % 10 == 0]
    assert min(shown) > 50
    assert min(shown) <= 200 <= max(shown)


@pytest.mark.parametrize("blocks", [1, 7, 64, 1000, 4096])
def test_any_pool_size(simulated_run, blocks):
    run = simulated_run(num_blocks=blocks, block_size=16, prompts=(1, 9), outputs=(1, 5), max_model_len=16)
    run.advance()
    svg = block_map_svg(run.recording)
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
    assert width == 972
    assert height < 620
    assert len(svg) < 60_000 + 60 * blocks


def test_a_view_writes_all_its_files(recording, tmp_path):
    view = StaticView(recording, panes=("blocks", "memory"), step=20, request="R9")
    assert view.svg() == picture_svg(recording, 20, "R9", ("blocks", "memory"))
    assert view.svg(21) == picture_svg(recording, 21, "R9", ("blocks", "memory")) != view.svg()
    assert view.png() == png_of(view.svg()) == base64.b64decode(view._static()["image/png"])
    assert view.png(21) == png_of(view.svg(21))
    assert view.text(21).startswith("EngineView(blocks, memory): step 21")
    page = view.html(tmp_path / "page.html", more=[Latency(recording)]).read_text()
    assert page.count("<noscript><svg") == 2
    assert '"panes": ["blocks", "memory"]' in page
    assert '"cursor": 20, "selected": {"request": "R9"}' in page
    with pytest.raises(RecordingError, match="No step 9999"):
        view.png(9999)


def test_static_views_show_the_same_without_a_widget(recording):
    view = StaticView(recording, panes=("blocks", "memory"), step=20, request="R9", why="because.")
    bundle, _ = view._repr_mimebundle_()
    assert set(bundle) == {"image/svg+xml", "image/png", "text/plain"}
    assert bundle["image/svg+xml"] == picture_svg(recording, 20, "R9", ("blocks", "memory")) == view.svg()
    text = bundle["text/plain"]
    assert text.startswith(f"EngineView(blocks, memory): {describe(recording, 20)}\n")
    assert text.endswith("static: because.")
    state = recording.at(20)
    for rid, request in state.requests.items():
        assert (
            f"  {rid}: {request.status}, {request.num_computed_tokens} of {request.num_tokens} tokens" in text
        )
    assert text == repr(
        StaticView(Recording(recording.events), panes=("blocks", "memory"), step=20, why="because.")
    )


def test_a_static_view_steps_the_engine(simulated_run):
    run = simulated_run()
    view = StaticView(run.recording, run.advance)
    assert view.cursor == 0
    assert view.step(3)
    assert view.cursor == 3 == run.scheduler.step
    assert not view.play()
    assert not run.unfinished
    assert view.cursor == run.recording.last_step
    view.close()
    assert not view.step()


def test_errors_are_sentences(recording):
    with pytest.raises(
        ConfigError, match="panes=\\('maps',\\): name one or more of blocks, budget, queues, timeline, memory"
    ):
        picture_svg(recording, panes=("maps",))
    with pytest.raises(RecordingError, match="No step 9999"):
        describe(recording, 9999)


def test_the_exported_page_is_whole_and_asks_nothing_of_the_network(recording, tmp_path):
    path = export_html(
        recording,
        tmp_path / "page.html",
        title="A <run>",
        step=20,
        texts={"R1": "a <b> & c"},
        summary={"TTFT": "12 ms"},
    )
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=|@import|fetch\(|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "<title>A &lt;run&gt;</title>" in page
    assert "a &lt;b&gt; &amp; c" in page
    assert "<dt>TTFT</dt><dd>12 ms</dd>" in page
    assert f"<noscript>{picture_svg(recording, 20, panes=PANES)}</noscript>" in page
    assert "<footer>Left and Right step" in page
    assert len(page) < 300_000


def test_a_page_says_why_it_opens_where_it_does(recording, tmp_path):
    page = export_html(recording, tmp_path / "page.html").read_text(encoding="utf-8")
    used = {step: len(recording.at(step).ref_counts) for step in range(recording.last_step + 1)}
    fullest = max(used, key=used.get)
    assert (
        f"<footer>Opens at step {fullest}, the first with the most blocks in use. Left and Right step" in page
    )


BLOCKED = """
import sys
class Blocker:
    names = {"numpy", "torch", "transformers", "anywidget", "ipywidgets", "traitlets", "IPython", "plotly"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from pagedinfer.trace.recording import Recording
from pagedinfer import views
recording = Recording.load(sys.argv[1])
view = views.EngineView(recording, step=20, frames_per_second=5)
bundle, _ = view._repr_mimebundle_()
assert set(bundle) == {"image/svg+xml", "image/png", "text/plain"}, set(bundle)
assert bundle["text/plain"].endswith('the live view needs anywidget; pip install "pagedinfer[view]" brings it.')
for make in (views.block_map, views.batch_timeline, views.memory_chart):
    assert make(recording)._repr_mimebundle_()[0]["image/svg+xml"].startswith("<svg")
views.export_html(recording, sys.argv[2])
loaded = {name.split(".")[0] for name in sys.modules} & Blocker.names
assert not loaded, loaded
print(views.describe(recording, 20))
"""


def test_the_static_tier_needs_the_standard_library_alone(recording, tmp_path):
    saved = recording.save(tmp_path / "run.jsonl")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(saved), str(tmp_path / "page.html")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == describe(recording, 20)


def test_importing_views_loads_no_widget(tmp_path):
    code = (
        "import sys, pagedinfer.views\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(names & {'anywidget', 'ipywidgets', 'traitlets', 'numpy', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("rid", ["a\ud800b", "\udcff", "a\x00\x1b[31m\x07\ufffe"])
def test_ids_of_odd_characters_are_drawn_and_exported(rid, tmp_path, simulated_run):
    run = simulated_run(requests=3, num_blocks=8, prompts=(4, 9), outputs=(3, 9), cancels=0, aborts=0)
    run.scheduler.submit(Request(rid, 5, 3), 0)
    recording = run.finish()
    for draw in (block_map_svg, timeline_svg, memory_svg, picture_svg):
        ET.fromstring(draw(recording, 2, *([rid] if draw is picture_svg else [])).encode())
    page = export_html(recording, tmp_path / "a.html", title=rid, texts={rid: rid}, request=rid).read_bytes()
    assert "a" in page.decode()
    assert json.loads(film_of(recording).encode().split(b"\n")[1])["new"][-1][0] == readable(rid)


def test_numbers_out_of_their_range_are_named(recording, tmp_path):
    for width in (0, -5, 1.5, True, 10**9):
        with pytest.raises(ConfigError, match=f"width={width}: it must be an integer from 240 to 20000"):
            picture_svg(recording, width=width)
    for step in (1.5, "1", True, None):
        with pytest.raises(RecordingError, match=r"No step .*: steps are numbered 0 to"):
            picture_svg(recording, step)
    assert ET.fromstring(picture_svg(recording, width=240)).get("width") == "272"


def test_texts_of_a_page_may_be_anything_that_can_be_shown(recording, tmp_path):
    page = export_html(recording, tmp_path / "a.html", texts={"a": 5, 7: None}, summary={"x": 1}).read_text()
    assert '<th scope="row">a</th><td>5</td>' in page
    assert '<th scope="row">7</th><td>None</td>' in page
