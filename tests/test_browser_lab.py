"""Notebooks in a real JupyterLab: opened, run, driven by keys and clicks, saved, and read where no script runs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: test)").expect
for package in ("jupyterlab", "ipykernel", "anywidget"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra: test)")

# A live engine over simulated tokens.
SIMULATED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import SimulatedRun
from pagedinfer.views import EngineView

run = SimulatedRun(seed=2, requests=30, num_blocks=32)
view = EngineView(run.recording, run.advance)
"""

# The real thing: a model, its engine, and the view that a session gives.
REAL = """
import pagedinfer

llm = pagedinfer.LLM("tiny", num_blocks=40, block_size=4)
session = pagedinfer.Session(llm)
for number in range(6):
    session.submit(f"request number {number}", temperature=0.0, max_tokens=50, ignore_eos=True)
view = session.view()
"""


def notebook(*cells):
    cells = [
        {
            "cell_type": "code",
            "id": f"c{i}",
            "metadata": {},
            "source": source.strip(),
            "outputs": [],
            "execution_count": None,
        }
        for i, source in enumerate(cells)
    ]
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": spec, "cells": cells})


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A JupyterLab server of its own: (address, folder of notebooks)."""
    with running_lab(tmp_path_factory.mktemp("lab")) as found:
        yield found


@contextmanager
def running_lab(base, app="lab"):
    """JupyterLab (app="notebook": Notebook 7) on a free port, with everything that it keeps in the folder `base`."""
    root = base / "root"
    root.mkdir()
    quiet = base / "SETTINGS" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false"}')
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {f"JUPYTER_{kind}_DIR": str(base / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"HOME": str(base), "IPYTHONDIR": str(base / "ipython"), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    own |= {f"JUPYTERLAB_{kind}_DIR": str(base / kind) for kind in ("SETTINGS", "WORKSPACES")}
    module, name = {"lab": ("jupyterlab", "LabApp"), "notebook": ("notebook", "JupyterNotebookApp")}[app]
    command = [
        sys.executable, "-m", module, "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}", "--IdentityProvider.token=",
        f"--{name}.expose_app_in_browser=True", "--LabApp.news_url=None", "--LabApp.extension_manager=readonly",
        "--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate",
    ]  # fmt: skip
    with (base / "lab.log").open("w") as log:
        server = subprocess.Popen(
            command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
        )
        address = f"http://127.0.0.1:{port}"
        try:
            _wait_for(server, address, base / "lab.log")
            yield address, root
        finally:
            server.terminate()  # also stops the kernels
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait(5)


def _wait_for(server, address, log):
    for _ in range(400):
        if server.poll() is not None:
            raise RuntimeError(log.read_text()[-3000:])
        try:
            urllib.request.urlopen(f"{address}/api", timeout=2).close()
            return
        except OSError:
            time.sleep(0.25)
    raise RuntimeError("Jupyter did not start within 100 seconds")


IDLE = "() => window.jupyterapp?.shell?.currentWidget?.context?.sessionContext?.session?.kernel?.status === 'idle'"
ERRORS = """() => window.jupyterapp.shell.currentWidget.content.widgets.flatMap((c) => {
  if (c.model.type !== 'code') return [];
  const all = Array.from({ length: c.model.outputs.length }, (_, i) => c.model.outputs.get(i));
  return all.filter((o) => o.type === 'error').map((o) => o.toJSON().evalue); })"""
CELLS = "() => window.jupyterapp.shell.currentWidget.content.widgets.map((c) => c.model.type).join()"
IN_KERNEL = """async (code) => {
  const kernel = window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel;
  const future = kernel.requestExecute({ code, store_history: false }); let said = '';
  future.onIOPub = (m) => { if (m.header.msg_type === 'stream') said += m.content.text; };
  await future.done; return said.trim(); }"""


def run_notebook(page, lab, *cells, path="doc/workspaces/{name}/tree/{name}.ipynb"):
    """Open a notebook of these cells in a workspace of its own, run it all, and return the view."""
    address, root = lab
    name = f"n{uuid.uuid4().hex[:8]}"
    (root / f"{name}.ipynb").write_text(notebook(*cells))
    page.goto(f"{address}/{path.format(name=name)}")
    page.wait_for_function(IDLE, timeout=90_000)
    done = page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    assert done, page.evaluate(ERRORS)
    view = page.get_by_test_id("pi-view").first
    view.wait_for(timeout=60_000)
    return view


def step_of(view):
    return int(view.get_attribute("data-step"))


def test_the_live_view_advances_while_requests_are_unfinished(lab, new_page, artifacts):
    pytest.importorskip("torch", reason="torch is not installed (extra: engine)")
    page = new_page(height=1500)
    view = run_notebook(page, lab, REAL, "view")
    expect(view).to_have_attribute("data-step", "0")

    view.focus()
    page.keyboard.press("ArrowRight")
    expect(view).to_have_attribute("data-step", "1")
    page.keyboard.press("Shift+ArrowRight")
    expect(view).to_have_attribute("data-step", "11")
    page.keyboard.press("ArrowLeft")
    expect(view).to_have_attribute("data-step", "10")

    cells = page.evaluate(CELLS)
    for key in ("b", "m", "d", "d", "x", "0", "0"):
        page.keyboard.press(key)
    page.wait_for_timeout(200)  # to see that nothing happens
    assert page.evaluate(CELLS) == cells, "Lab's own shortcuts must not fire inside the view"

    page.keyboard.press("End")
    view.get_by_label("Speed").select_option("10")
    view.get_by_role("button", name="Play").click()
    page.wait_for_function("v => +v.dataset.step >= 20", arg=view.element_handle())
    assert page.evaluate(IN_KERNEL, "print(llm.engine.has_unfinished())") == "True"
    view.get_by_role("button", name="Pause").click()
    expect(view.get_by_role("button", name="Play")).to_be_visible()

    view.locator(".pi-chip").first.click()
    expect(view.locator(".pi-rows .is-linked")).to_have_count(1)
    rid = view.locator(".pi-rows .is-linked").get_attribute("data-request")
    page.wait_for_function(IDLE)
    kernel = page.evaluate(IN_KERNEL, "print(view.cursor, view.selected, llm.engine.scheduler.step)").split(
        " ", 1
    )
    assert kernel == [str(step_of(view)), f"{{'request': '{rid}'}} {step_of(view)}"]

    page.evaluate(IN_KERNEL, "view.step(3)")
    expect(view).to_have_attribute("data-step", str(int(kernel[0]) + 3))
    view.screenshot(path=artifacts / "lab-light.png")
    _check_accessibility(page)
    assert not page.external, page.external[:5]
    assert not page.errors, page.errors[:5]


KEPT = """() => {  // the picture in the view's output is of the step that the view shows
  const { step } = document.querySelector('[data-testid=pi-view]').dataset;
  const output = window.jupyterapp.shell.currentWidget.content.widgets[1].model.outputs.get(0).toJSON();
  return String(output.data['text/plain']).includes(`step ${step}:`); }"""
SAVED = """async () => {
  await window.jupyterapp.commands.execute('docmanager:save');
  return window.jupyterapp.shell.currentWidget.context.path; }"""


def saved_view(page, lab):
    """The data of the view's output in the notebook's file, saved now."""
    name = page.evaluate(SAVED)
    saved = json.loads((lab[1] / name).read_text())
    (output,) = saved["cells"][1]["outputs"]
    assert not saved["metadata"].get("widgets"), "no widget state in the file"
    return output["data"]


def test_the_saved_notebook_shows_the_last_picture(lab, new_page, artifacts):
    page = new_page(height=1500)
    view = run_notebook(page, lab, SIMULATED, "view")
    assert "step 0:" in saved_view(page, lab)["text/plain"][0]

    view.focus()  # the browser drives: the picture is kept when the keys go elsewhere, or at a pause
    page.keyboard.press("Shift+ArrowRight")
    expect(view).to_have_attribute("data-step", "10")
    view.get_by_label("Speed").select_option("30")
    view.focus()
    page.keyboard.press("Space")
    page.wait_for_function("v => +v.dataset.step >= 20", arg=view.element_handle())
    page.keyboard.press("Space")
    expect(view.get_by_role("button", name="Play")).to_be_visible()
    page.wait_for_function(KEPT)
    page.wait_for_function("() => document.activeElement?.closest?.('[data-testid=pi-view]')")
    step = step_of(view)
    page.keyboard.press("ArrowLeft")  # drawn anew, it still has the keys
    expect(view).to_have_attribute("data-step", str(step - 1))
    data = saved_view(page, lab)
    assert f"step {step}:" in data["text/plain"][0]
    assert f"Block map, step {step}" in "".join(data["image/svg+xml"])
    assert "image/png" in data
    assert len(json.dumps(data)) < 150_000

    page.evaluate(IN_KERNEL, "view.play(5)")  # a cell drives: the picture is kept at its end
    page.wait_for_function(IDLE)
    expect(view).to_have_attribute("data-last", str(step + 5))
    page.evaluate(IN_KERNEL, "view.step(2)")
    page.wait_for_function(IDLE)
    last = int(page.evaluate(IN_KERNEL, "print(run.scheduler.step)"))
    assert last == step + 7
    assert page.evaluate(IN_KERNEL, "print(view.cursor)") in saved_view(page, lab)["text/plain"][0]

    page.evaluate(IN_KERNEL, "view.close()")
    data = saved_view(page, lab)
    assert "application/vnd.jupyter.widget-view+json" not in data, "a closed view leaves its picture"
    assert page.locator(".jp-OutputArea-output img, .jp-OutputArea-output svg").count()
    page.screenshot(path=artifacts / "lab-closed.png")
    assert not page.errors, page.errors[:5]


# -- the whole way: run all, look, stop, compare, save, and the file on a viewer without scripts -----------------------

WHOLE = """
import pagedinfer
from pagedinfer.config import EngineConfig
from pagedinfer.course import bundled_recording
from pagedinfer.engine.engine import Engine
from pagedinfer.sim.fork import fork
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.views import RunComparison

engine = Engine(EngineConfig(num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=16), SimulatedRunner())
session = pagedinfer.Session(engine)
for number in range(8):
    session.submit([number] * 9, max_tokens=30, detokenize=False, ignore_eos=True)
view = session.view()
recorded = bundled_recording()
compared = RunComparison(recorded, fork(recorded, 6, max_num_seqs=2))
"""


def test_from_run_all_to_the_saved_file_without_scripts(lab, new_page, artifacts):
    page = new_page(height=1700)
    view = run_notebook(page, lab, WHOLE, "view", "compared")
    expect(view).to_have_attribute("data-step", "0")
    view.focus()
    for key, step in (("Shift+ArrowRight", 10), ("ArrowLeft", 9), ("ArrowLeft", 8), ("ArrowRight", 9)):
        page.keyboard.press(key)
        expect(view).to_have_attribute("data-step", str(step))

    block = view.locator("[data-block][data-owner='r1']").first
    block.click()
    for pane in (".pi-rows", ".pi-queues", ".pi-budget"):
        expect(view.locator(f"{pane} .is-linked")).to_have_attribute("data-request", "r1")
    mine = view.locator(".pi-grid .is-linked").evaluate_all("nodes => nodes.map(n => n.dataset.block)")
    state = "session.recording.at(9).requests['r1']"
    assert page.evaluate(IN_KERNEL, f"print(*sorted({state}.block_table))") == " ".join(mine)
    expect(view.locator(".pi-details tbody tr")).to_have_count(len(mine))

    _stop_at_a_breakpoint(page, view, artifacts)
    _compare(page)
    page.screenshot(path=artifacts / "lab-compared.png")
    assert not page.external, page.external[:5]
    assert not page.errors, page.errors[:5]
    _read_without_scripts(page, lab, new_page, artifacts)


def _stop_at_a_breakpoint(page, view, artifacts):
    box = view.get_by_label("Stop when", exact=True)
    box.fill("any preempted twice over")
    box.press("Enter")
    expect(view.locator(".pi-wrong")).to_be_visible()
    box.fill("any preempted")
    box.press("Enter")
    expect(view.locator(".pi-break-list code")).to_have_text("any preempted")
    view.get_by_label("Speed").select_option("30")
    view.get_by_role("button", name="Play").click()
    expect(view.locator(".pi-notice")).to_contain_text("Stop at step", timeout=20_000)
    page.wait_for_function(IDLE)
    said = "print(session.stops[0].step, engine.has_unfinished(), session.stops[0].cause)"
    step, unfinished, cause = page.evaluate(IN_KERNEL, said).split(" ", 2)
    expect(view).to_have_attribute("data-step", step)
    assert unfinished == "True"
    expect(view.locator(".pi-notice")).to_have_text(f"Stop at step {step}: {cause}")
    expect(view.locator(".pi-note-preempted")).to_have_count(1)
    expect(view.locator(".pi-axis [data-stop]")).to_have_attribute("data-stop", step)
    view.screenshot(path=artifacts / "lab-breakpoint.png")
    page.evaluate(IN_KERNEL, "await session.play()")  # goes on to the next stop
    expect(view.locator(".pi-axis [data-stop]")).to_have_count(2)
    last = int(view.get_attribute("data-last"))
    view.get_by_role("button", name="Step forward").click()  # the engine listens after a cell that awaited
    expect(view).to_have_attribute("data-step", str(last + 1))


def _compare(page):
    sheet = page.get_by_test_id("pi-sheet")
    parted = page.evaluate(IN_KERNEL, "print(compared.divergence[0])")
    expect(sheet).to_have_attribute("data-step", parted)
    expect(sheet.locator(".pi-picture")).to_contain_text(f"part at step {parted}")
    sheet.focus()
    page.keyboard.press("Shift+ArrowRight")
    words = page.evaluate(IN_KERNEL, f"print(compared.sheet({parted} + 10, 920).words)")
    expect(sheet.locator(".pi-say")).to_have_text(words)
    assert "blocks and" in words, "the runs differ there"


def _read_without_scripts(page, lab, new_page, artifacts):
    """The file as it was saved, on a viewer that runs no scripts: pictures of now, or the text where it has none."""
    import nbformat
    from nbconvert import HTMLExporter

    name = page.evaluate(SAVED)
    saved = json.loads((lab[1] / name).read_text())
    assert not saved["metadata"].get("widgets"), "no widget state in the file"
    assert (lab[1] / name).stat().st_size < 300_000
    step = page.evaluate(IN_KERNEL, "print(session.recording.last_step)")
    data = [cell["outputs"][0]["data"] for cell in saved["cells"][1:]]
    assert f"step {step}:" in data[0]["text/plain"][0], "the picture is of the newest step"
    viewer = new_page(java_script_enabled=False)
    exporter, path = HTMLExporter(mathjax_url="", require_js_url=""), lab[1] / "saved.html"
    for shown in ("image/svg+xml", "image/png", "text/plain"):
        path.write_text(exporter.from_notebook_node(nbformat.reads(json.dumps(saved), as_version=4))[0])
        viewer.goto(path.as_uri())
        outputs = viewer.locator(".jp-OutputArea-output")
        expect(outputs).to_have_count(2)
        if shown == "text/plain":
            expect(outputs.first).to_contain_text(f"step {step}:")
            expect(outputs.last).to_contain_text("they part at step")
            continue
        for image in outputs.locator("img").all():
            box = image.bounding_box()
            assert min(box["width"], box["height"]) > 40, shown
            assert image.evaluate("node => node.complete && node.naturalWidth > 40"), f"{shown} is broken"
            assert shown in image.get_attribute("src")
        assert outputs.locator("img").count() == 2
        viewer.screenshot(path=artifacts / f"saved-{shown.split('/')[1][:3]}.png", full_page=True)
        for part in data:
            del part[shown]  # as a viewer that cannot show it
    assert not viewer.external


def _check_accessibility(page):
    from axe_playwright_python.sync_playwright import Axe

    # Lab's body is 0 px high with hidden overflow, so axe would call everything hidden and skip contrast.
    page.add_style_tag(content="body{overflow:visible !important}")
    found = Axe().run(page, context="[data-testid=pi-view]", options={})
    serious = [x["id"] for x in found.response["violations"] if x["impact"] in ("serious", "critical")]
    assert not serious, found.generate_report()
    assert any(x["id"] == "color-contrast" for x in found.response["passes"]), "contrast was not checked"


SLOWLY = """
import time
advance, view._advance = view._advance, lambda: time.sleep(0.02) or advance()
"""


def test_labs_dark_theme_and_an_async_run(lab, new_page, artifacts):
    page = new_page(height=1500)
    view = run_notebook(page, lab, SIMULATED, "view")
    page.evaluate(
        "() => window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Dark' })"
    )
    expect(view).to_have_css("color-scheme", "dark")
    page.evaluate(IN_KERNEL, SLOWLY)
    running = page.evaluate_handle(f"() => ({{ done: ({IN_KERNEL})('await view.run_async()') }})")
    page.wait_for_function("v => +v.dataset.step >= 8", arg=view.element_handle())
    view.get_by_role("button", name="Pause").click()
    running.evaluate("run => run.done")
    steps = int(page.evaluate(IN_KERNEL, "print(run.scheduler.step)"))
    assert page.evaluate(IN_KERNEL, "print(run.unfinished)") == "True"
    page.evaluate(IN_KERNEL, f"await view.run_async({max(1, 30 - steps)})")
    expect(view).to_have_attribute("data-step", "30")
    view.screenshot(path=artifacts / "lab-dark.png")
    page.evaluate(
        "() => window.jupyterapp.commands.execute('apputils:change-theme', { theme: 'JupyterLab Light' })"
    )
    expect(view).to_have_css("color-scheme", "light")

    page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.restart()"
    )
    page.wait_for_function(IDLE)
    view.focus()
    page.keyboard.press("ArrowLeft")
    expect(view).to_have_attribute("data-step", "29")  # what the browser has can still be looked at
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    expect(view.get_by_role("alert")).to_contain_text("disconnected", timeout=15_000)
    assert not page.external, page.external[:5]
