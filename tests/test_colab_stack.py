"""The views on Colab's packages: ipywidgets 7.7.1 and IPython 7, in an environment of their own, without torch.

Colab's own front end cannot be had here; this runs its kernel side: a notebook is executed, and what each cell shows
is compared with what the packages of this environment show.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STACK = (
    "ipywidgets==7.7.1",
    "ipykernel==6.17.1",
    "ipython==7.34.0",
    "anywidget==0.9.21",
    "nbclient>=0.7",
    "nbformat",
)

CELLS = (
    """
import ipywidgets, sys
import pagedinfer
from pagedinfer.config import EngineConfig
from pagedinfer.course import bundled_recording
from pagedinfer.engine.engine import Engine
from pagedinfer.sim.fork import fork
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.views import EngineView, Latency, RunComparison
from pagedinfer.views import stepped

engine = Engine(EngineConfig(num_blocks=20, block_size=4, max_num_seqs=4, max_num_batched_tokens=16), SimulatedRunner())
session = pagedinfer.Session(engine)
for number in range(8):
    session.submit([number] * 9, max_tokens=30, detokenize=False, ignore_eos=True)
recorded = bundled_recording()
view = session.view()
""",
    "view",
    """
view.ask = {"id": 1, "steps": 7, "have": 0}  # as the browser asks
assert session.recording.last_step == 7 and view.answer['id'] == 1 and not view.error
view.ask = {"id": 2, "steps": 0, "have": 7, "watch": "any preempted"}
view.ask = {"id": 3, "steps": 50, "have": 7}
assert session.stops and view.breaks[0]["marks"], (session.stops, view.breaks)
await session.play(3)
""",
    "RunComparison(recorded, fork(recorded, 6, max_num_seqs=2))",
    "core = EngineView(recorded, tier='ipywidgets', step=4); core",
    "core._forward.click(); assert core.cursor == 5 and 'step 5:' in repr(core)",
    "stepped.FRONTS = stepped.FRONTS[1:]; latency = Latency(recorded, step=4); latency",  # as without anywidget
    """
latency._front._forward.click()
assert latency.tier == "ipywidgets" and latency.cursor == 5 and "step 5:" in latency._front._said.value
""",
    "EngineView(recorded, tier='static', step=4)",
    "assert 'torch' not in sys.modules; print(view.tier, ipywidgets.__version__)",
)

RUN = """
import json, sys
import nbclient, nbformat
cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
book = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(book, timeout=120, store_widget_state=False, kernel_name="python3").execute()
json.dump([cell["outputs"] for cell in book["cells"]], sys.stdout)
"""


def outputs(python, folder):
    """What the cells show under this interpreter, whose kernel is its own."""
    root = Path(__file__).parents[1]
    own = {
        "HOME": str(folder),
        "IPYTHONDIR": str(folder),
        "JUPYTER_PATH": "",
        "JUPYTER_DATA_DIR": str(folder / "data"),
    }
    env = os.environ | own | {"PYTHONPATH": str(root), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    done = subprocess.run(
        [python, "-c", RUN],
        input=json.dumps(CELLS),
        env=env,
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def shown(cell):
    """The data of a cell's one picture, without what is another in each session."""
    (output,) = [o for o in cell if o["output_type"] in ("display_data", "execute_result")]
    data = dict(output["data"])
    return data.pop("application/vnd.jupyter.widget-view+json", None), data


def test_every_tier_shows_the_same_on_ipywidgets_7(tmp_path):
    python = tmp_path / "colab" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    installed = subprocess.run([python, "-m", "pip", "install", "-q", *STACK], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"Colab's packages cannot be installed here: {installed.stderr[-300:]}")
    old, new = outputs(python, tmp_path), outputs(sys.executable, tmp_path)
    assert "".join(o["text"] for o in old[-1]).split() == ["anywidget", "7.7.1"]
    for cell, is_widget in ((1, True), (3, True), (4, True), (6, True), (8, False)):
        (live, data), (live_now, data_now) = shown(old[cell]), shown(new[cell])
        assert bool(live) == bool(live_now) == is_widget
        assert data == data_now
        assert {"image/svg+xml", "image/png", "text/plain"} <= data.keys()
    assert not any(o["output_type"] == "error" for cell in old for o in cell)
