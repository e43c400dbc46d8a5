"""What `import pagedinfer` costs, and what works where torch and numpy are not installed."""

import json
import os
import subprocess
import sys

import pytest

from pagedinfer import Recorder, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.sim.simulated import SimulatedRunner

HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "triton",
    "ipywidgets",
    "anywidget",
    "plotly",
    "tokenizers",
    "jinja2",
    "rich",
)

IMPORT = """
import json, sys, time
before = set(sys.modules)
start = time.perf_counter()
import pagedinfer
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before)}))
"""

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Blocker())
"""

REPLAY = """
import pagedinfer, json
from pagedinfer.sim.rerun import rerun
recording = pagedinfer.Recording.load(sys.argv[2])
middle = recording.at(recording.last_step // 2)
scheduler, again = rerun(recording)
assert again.to_jsonl(wall=False) == recording.to_jsonl(wall=False)
assert scheduler.snapshot() == recording.at(-1).snapshot()
assert "<table" in recording._repr_html_()
tables = [dict(table) for table in (recording.steps, recording.requests, recording.blocks)]
print(json.dumps({"tables": tables, "middle": middle.snapshot()}))
"""

ENGINE = """
import pagedinfer
from pagedinfer.engine.engine import Engine
from pagedinfer.sim.simulated import SimulatedRunner
engine = Engine(pagedinfer.EngineConfig(num_blocks=4), SimulatedRunner())
engine.add_request([1, 2, 3])
while engine.has_unfinished():
    engine.step()
try:
    pagedinfer.LLM
except ModuleNotFoundError as error:
    print(error.name)
"""


def python(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def roots(names):
    return {name.split(".")[0] for name in names}


def test_import_loads_the_standard_library_only():
    facts = json.loads(python(IMPORT))
    print(f"import pagedinfer: {facts['seconds'] * 1000:.0f} ms, {len(facts['new'])} modules")
    assert "pagedinfer.config" in facts["new"]
    foreign = roots(facts["new"]) - set(sys.stdlib_module_names) - {"pagedinfer"}
    assert not foreign, f"import pagedinfer loads {sorted(foreign)}"


def test_the_whole_core_loads_the_standard_library_only():
    code = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
import pagedinfer.engine, pagedinfer.memory, pagedinfer.sim, pagedinfer.trace
for package in (pagedinfer.engine, pagedinfer.memory, pagedinfer.sim, pagedinfer.trace):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
import pagedinfer.session, pagedinfer.testing, pagedinfer.cli
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    loaded = json.loads(python(code))
    assert "pagedinfer.engine.scheduler" in loaded
    assert roots(loaded) <= set(sys.stdlib_module_names) | {"pagedinfer"}


@pytest.mark.slow
def test_import_takes_under_a_third_of_a_second():
    times = sorted(json.loads(python(IMPORT))["seconds"] for _ in range(9))
    assert times[4] < 0.3, times


@pytest.fixture
def recording():
    engine = Engine(EngineConfig(num_blocks=6, block_size=4, max_num_batched_tokens=5), SimulatedRunner())
    with Recorder(engine) as recording:
        for length in (3, 9, 5):
            engine.add_request(list(range(length)), SamplingParams(max_tokens=9))
        while engine.has_unfinished():
            engine.step()
    assert engine.metrics()["num_preemptions"]
    return recording


def test_replay_works_without_torch_and_numpy(recording, tmp_path):
    path = recording.save(tmp_path / "run.jsonl")
    facts = json.loads(python(BLOCKER + REPLAY, ",".join(HEAVY), str(path)))
    assert facts["tables"] == [
        dict(table) for table in (recording.steps, recording.requests, recording.blocks)
    ]
    assert facts["middle"] == recording.at(recording.last_step // 2).snapshot()


def test_the_simulator_runs_without_torch_and_llm_names_what_is_missing():
    assert python(BLOCKER + ENGINE, ",".join(HEAVY)).strip() == "torch"


def test_the_blocker_blocks():
    assert python(
        BLOCKER + "try:\n    import torch\nexcept ImportError as e:\n    print(e)", "torch"
    ).startswith("No module")


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_torchs_threads_sleep_while_they_wait_unless_told_otherwise(given, expected):
    """Set before torch is loaded, or it would have no effect."""
    code = "import os, sys, pagedinfer; print('torch' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", expected]
