"""What all views with a cursor promise: one drawing, as SVG, PNG, text, a widget, a page; repeatable and offline."""

import base64
import json
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
import zlib

import pytest
from made_taps import tapped_run

from pagedinfer.errors import ConfigError
from pagedinfer.sim.compare import compare
from pagedinfer.trace.recording import Recording, RecordingError
from pagedinfer.views import (
    AttentionView,
    BatchComposition,
    FragmentationLab,
    Latency,
    PrefixTree,
    RunComparison,
    SamplingView,
)  # fmt: skip
from pagedinfer.views.raster import png_of
from pagedinfer.views.stepped import MAX_FRAMES, NARROW, WIDE
from pagedinfer.views.svg import Drawing, document

SVG = "{http://www.w3.org/2000/svg}"
MAKERS = {
    "latency": lambda a, b: Latency(a, slo={"TTFT": 8, "ITL": 2}),
    "batch": lambda a, b: BatchComposition(a),
    "lab": lambda a, b: FragmentationLab({"large pool": a, "small pool": b}),
    "prefix": lambda a, b: PrefixTree(a),
    "compare": lambda a, b: RunComparison(a, b),
    "attention": lambda a, b: AttentionView(tapped_run()),
    "sampling": lambda a, b: SamplingView(tapped_run()),
}


@pytest.fixture(scope="module")
def pair(simulated_run):
    options = {
        "seed": 3,
        "max_model_len": 320,
        "prompts": (8, 90),
        "outputs": (4, 40),
        "max_num_seqs": 6,
        "aborts": 0,
    }
    return tuple(simulated_run(num_blocks=n, **options).finish() for n in (32, 24))


@pytest.fixture(params=MAKERS)
def make(request, pair):
    def make():
        return MAKERS[request.param](*(Recording(recording.events) for recording in pair))

    return make


def pixels(png):
    """(rows of palette places, colours) of a PNG file."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, colours, size = 8, b"", [], (0, 0)
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
        elif kind == b"PLTE":
            colours = [body[i : i + 3].hex() for i in range(0, len(body), 3)]
        elif kind == b"IDAT":
            data += body
        at += 12 + length
    raw = zlib.decompress(data)
    return [raw[y * (size[0] + 1) + 1 : (y + 1) * (size[0] + 1)] for y in range(size[1])], colours


def test_svg_is_well_formed_named_and_repeatable(make):
    view, again = make(), make()
    for step in (view.first_step, 20, view.last_step):
        for width in (WIDE, NARROW):
            svg = view.svg(step, width)
            root = ET.fromstring(svg)
            assert root.get("role") == "img"
            assert root.find(f"{SVG}title").text == view.title
            assert root.find(f"{SVG}desc").text.startswith(f"step {step}")
            assert root.get("width") == str(width + 32)
            for bad in ("NaN", "None", ' d=""', 'width="-'):
                assert bad not in svg
            assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
            assert again.svg(step, width) == svg
        assert view.png(step) == again.png(step)
        assert view.text(step) == again.text(step)
        assert view.text(step).startswith(f"{view.name}: step {step}")


def test_the_bundle_has_no_html_and_the_static_parts_repeat(make):
    pytest.importorskip("anywidget", reason="anywidget is not installed (extra: view)")
    view = make()
    bundle = view._repr_mimebundle_()
    kinds = {"application/vnd.jupyter.widget-view+json", "image/svg+xml", "image/png", "text/plain"}
    assert set(bundle) == kinds
    assert not hasattr(view, "_repr_html_")
    assert bundle["image/svg+xml"] == make().svg()
    assert base64.b64decode(bundle["image/png"]) == view.png()
    assert bundle["text/plain"] == repr(make())
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == view._front.model_id
    assert view._repr_mimebundle_() == bundle, "one widget, however often it is shown"


def test_the_widgets_cursor_is_the_views(make):
    pytest.importorskip("anywidget", reason="anywidget is not installed (extra: view)")
    view = make()
    view._repr_mimebundle_()
    view._front.cursor = 7  # as the browser does
    assert view.cursor == 7
    assert view.text() == view.text(7) != view.text(8)
    view.cursor = -1
    assert view._front.cursor == view.last_step


def test_what_the_browser_gets_is_the_drawing(make):
    view = make()
    data = json.loads(view.encode())
    assert data["steps"] == list(range(view.first_step, view.last_step + 1))
    assert data["note"] == ""
    assert [size["width"] for size in data["sizes"]] == [WIDE, NARROW]
    for size in data["sizes"]:
        layers = {}
        for step, (height, frame, _) in zip(data["steps"], size["frames"], strict=True):
            layers = {i: layer or layers[i] for i, layer in enumerate(frame)}
            sheet = view.sheet(step, size["width"])
            assert [(y, [data["parts"][p] for p in parts]) for y, parts in layers.values()] == sheet.layers
            assert height == round(sheet.height)
            assert data["say"][step - view.first_step] == sheet.words


def test_long_runs_are_shown_at_spaced_steps(simulated_run):
    recording = simulated_run(
        requests=3, outputs=(500, 700), num_blocks=256, prompts=(4, 9), aborts=0
    ).finish()
    view = BatchComposition(recording, step=333)
    frames = view.frames()
    assert view.last_step > MAX_FRAMES
    assert MAX_FRAMES <= len(frames) <= MAX_FRAMES + 1
    assert {0, 333, view.last_step} <= set(frames)
    assert (
        json.loads(view.encode())["note"]
        == f"{len(frames)} of {view.last_step + 1} steps are held, evenly spaced."
    )


def test_the_page_is_self_contained(make, tmp_path):
    view = make()
    page = view.html(tmp_path / "page.html", summary={"requests": "14 <b>"}).read_text()
    assert page == make().html(tmp_path / "again.html", summary={"requests": "14 <b>"}).read_text()
    assert f"<title>{view.title}</title>" in page
    assert "14 &lt;b&gt;" in page
    assert "<noscript><svg" in page
    links = re.findall(r"""(?:src|href)=|url\((?!#)|https?://(?!www\.w3\.org)|@import""", page)
    assert not links


def test_steps_and_widths_are_checked(make):
    view = make()
    for step in (view.last_step + 1, -view.last_step - 2, 1.5, True, "1"):
        with pytest.raises(RecordingError, match=r"No step .*: this view has 0 to"):
            view.svg(step)
    for width in (0, 319, 4001, 500.0, True):
        with pytest.raises(ConfigError, match=f"width={width}: it must be an integer from 320 to 4000"):
            view.svg(width=width)
    assert view.svg(-1) == view.svg(view.last_step)


def test_the_raster_draws_what_the_svg_says():
    body = '<rect class="pi-alarm" x="10" y="20" width="40" height="10"/><path class="pi-live" d="M60 20h10v10h-10z"/>'
    body += '<text x="10" y="60" class="pi-ink">1</text>'
    body += '<rect x="80" y="20" width="30" height="30" fill="url(#pi-v-idle)"/>'
    rows, colours = pixels(png_of(document("x", Drawing(body, 120, 80, "x"))))
    assert (len(rows[0]), len(rows)) == (round(152 * 1.3), round(112 * 1.3))
    alarm, live, ink = (colours.index(c) for c in ("b3261e", "3a6a94", "1b2430"))
    zoom = 1.3
    assert all(
        rows[round((16 + y) * zoom)][round((16 + x) * zoom)] == alarm for x in (11, 30, 48) for y in (21, 28)
    )
    assert sum(row.count(alarm) for row in rows) == pytest.approx(400 * zoom**2, rel=0.05)
    assert sum(row.count(live) for row in rows) == pytest.approx(100 * zoom**2, rel=0.1)
    assert sum(row.count(ink) for row in rows) == 13, "the pixels of a 1"


def test_the_views_agree_with_the_comparison_of_runs(pair):
    compared = compare(*pair, names=["a", "b"])
    view = RunComparison(compared)
    assert view.names == ["a", "b"]
    assert view.divergence[0] == compared.divergences[0].step
    for step in (0, view.cursor, view.cursor + 5):
        theirs = {difference.block_id for difference in compared.block_differences(step)}
        assert theirs <= set(view.different_blocks(step)), "we count another fill, too"
    assert RunComparison(compare(pair[0], pair[0])).divergence is None


BLOCKED = """
import sys
class Blocker:
    names = {"anywidget", "ipywidgets", "traitlets", "numpy", "torch", "plotly", "IPython"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from pagedinfer.trace.recording import Recording
from pagedinfer import views
recording = Recording.load(sys.argv[1])
for view in (views.Latency(recording), views.BatchComposition(recording), views.FragmentationLab([recording]),
             views.PrefixTree(recording), views.RunComparison(recording, recording)):
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"image/svg+xml", "image/png", "text/plain"}, set(bundle)
    assert bundle["text/plain"].endswith('the live view needs anywidget; pip install "pagedinfer[view]" brings it.')
    view.html(sys.argv[2])
assert not {name.split(".")[0] for name in sys.modules} & Blocker.names
print("done")
"""


def test_the_static_tier_needs_the_standard_library_alone(pair, tmp_path):
    saved = pair[1].save(tmp_path / "run.jsonl")
    command = [sys.executable, "-c", BLOCKED, str(saved), str(tmp_path / "page.html")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "done", done.stderr
