"""The views under ipywidgets' own HTML manager, each in a frame of its own: as Colab and exported pages show them.

Neither has Jupyter's front end around it: the manager, its loader and anywidget's script are all there is. There is no
kernel behind, so the views show what they hold.
"""

import functools
import http.server
import json
import shutil
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest

from pagedinfer.views import EngineView, Latency

pytestmark = [pytest.mark.slow, pytest.mark.browser]

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: test)").expect
anywidget = pytest.importorskip("anywidget", reason="anywidget is not installed (extra: view)")

PAGE = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body style="margin:0">
<script src="require.js"></script>
<script>require.config({{ paths: {{ "@jupyter-widgets/html-manager/dist/libembed-amd": "libembed-amd" }} }});</script>
<script type="application/vnd.jupyter.widget-state+json">{state}</script>
<script type="application/vnd.jupyter.widget-view+json">{view}</script>
<script src="embed-amd.js"></script>"""
SANDBOX = "allow-scripts allow-same-origin"
FRAME = f'<iframe sandbox="{SANDBOX}" src="{{}}.html" style="width:100%;height:{{}}px;border:0"></iframe>'


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    """A folder with the manager's scripts, fetched by npm."""
    folder = tmp_path_factory.mktemp("manager")
    if shutil.which("npm") is None:
        pytest.skip("no npm on PATH: it fetches ipywidgets' HTML manager")
    for package in ("@jupyter-widgets/html-manager@^1.0.15", "requirejs@^2.3"):
        done = subprocess.run(
            ["npm", "pack", package], cwd=folder, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            pytest.skip(f"npm cannot fetch {package} here: {done.stderr[-300:]}")
    fonts = folder / "@jupyter-widgets"
    fonts.mkdir()
    for archive in folder.glob("*.tgz"):
        with tarfile.open(archive) as files:
            for file in files:
                if file.isfile() and file.name.startswith(("package/dist/", "package/require.js")):
                    for place in (folder, fonts):  # it looks for its fonts there
                        (place / Path(file.name).name).write_bytes(files.extractfile(file).read())
    shutil.copy(Path(anywidget.__file__).parent / "nbextension" / "index.js", folder / "anywidget.js")
    return folder


@pytest.fixture
def address(manager):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=manager))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_each_view_works_in_a_frame_of_its_own(manager, address, new_page, simulated_run, artifacts):
    from ipywidgets.embed import embed_data

    recording = simulated_run(seed=2, requests=10, num_blocks=32).finish()
    engine, latency = EngineView(recording, step=5), Latency(recording, step=5)
    latency._repr_mimebundle_()
    core = EngineView(recording, step=5, tier="ipywidgets")
    frames = {"engine": (engine, 1400), "latency": (latency._front, 640), "core": (core, 1400)}
    for name, (widget, _) in frames.items():
        data = embed_data(views=[widget], drop_defaults=False)
        (shown,) = data["view_specs"]
        state = json.dumps(data["manager_state"]).replace("<", "\\u003c")
        (manager / f"{name}.html").write_text(PAGE.format(state=state, view=json.dumps(shown)))
    page = new_page(width=1100, height=3500)
    (manager / "index.html").write_text(
        '<link rel="icon" href="data:,">' + "".join(FRAME.format(name, h) for name, (_, h) in frames.items())
    )
    page.goto(f"{address}/index.html")
    view = page.frame_locator("iframe >> nth=0").get_by_test_id("pi-view")
    sheet = page.frame_locator("iframe >> nth=1").get_by_test_id("pi-sheet")
    expect(view).to_have_attribute("data-step", "5", timeout=30_000)
    view.focus()
    for key, step in (("ArrowRight", 6), ("Shift+ArrowRight", 16), ("ArrowLeft", 15)):
        page.keyboard.press(key)
        expect(view).to_have_attribute("data-step", str(step))
    view.locator(".pi-chip").first.click()
    expect(view.locator(".pi-rows .is-linked")).to_have_count(1)
    expect(sheet).to_have_attribute("data-step", "5", timeout=30_000)
    sheet.focus()
    page.keyboard.press("ArrowRight")
    expect(sheet).to_have_attribute("data-step", "6")
    expect(sheet.locator(".pi-say")).to_have_text(latency.sheet(6, 920).words)
    picture = page.frame_locator("iframe >> nth=2").locator("svg.pi-static").first
    expect(picture).to_contain_text("Block map, step 5")
    page.screenshot(path=artifacts / "html-manager.png")
    assert not page.external, page.external[:5]
    own = "Class null not found in module @jupyter-widgets/base"  # what the manager says of any layout
    errors = [error for error in page.errors if own not in error]
    assert not errors, errors[:5]
