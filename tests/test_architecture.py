"""The shape of the package: which module may import which, what `import pagedinfer` loads, and how long files get."""

import ast
import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pagedinfer"
MAX_LINES = 400
HEAVY = ("torch", "numpy", "transformers", "triton", "ipywidgets", "anywidget", "plotly")


def _name_of(path):
    """`engine.scheduler` for pagedinfer/engine/scheduler.py, `engine` for a package, "" for pagedinfer itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}

# What a module may import of pagedinfer, beside its own package; the longest matching name decides.
LAYERS = {
    "errors": (),
    "randomness": (),
    "checks": ("errors",),
    "sampling_params": ("errors", "checks"),
    "config": ("errors", "checks", "sampling_params"),
    "trace.schema": (),
    "trace.events": ("trace.schema",),
    "trace.bus": ("errors", "trace.events"),
    "memory": ("errors", "config", "trace.events", "trace.bus"),
    "engine": ("errors", "checks", "config", "randomness", "memory", "trace.events", "trace.bus"),
    "trace": ("errors", "config", "memory.free_queue"),
    "trace.tap_records": ("errors",),
    "views": ("errors", "checks", "config", "trace"),
    "backends": ("errors", "config"),
    "model": ("errors", "config", "backends"),
    "runner": ("errors", "config", "randomness", "engine", "backends", "model", "trace.tap_records"),
    "sim": ("errors", "config", "memory", "engine", "trace"),
}
# These wire the sides together and may import anything of ours.
WIRING = {"", "llm", "arguments", "async_engine", "session", "model_fork", "cli", "demo", "testing", "course"}
CORE = ("errors", "randomness", "checks", "sampling_params", "config", "memory", "engine", "trace", "sim")
LIVE_VIEWS = {
    "views.widget",
    "views.core_frame",
    "views.output",
    "views.sheet_widget",
    "views.latency_plotly",
}  # the modules of the views that need more than the standard library


def _imports(name):
    """(line, top-level package, module within pagedinfer or None) of each import, those for type checkers left out."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for part in node.body
        for inner in ast.walk(part)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}, line {node.lineno}: a relative import"
            targets = [
                f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}".removeprefix("pagedinfer.") in MODULES
                else node.module
                for alias in node.names
            ]  # fmt: skip
        else:
            continue
        for target in targets:
            top, _, rest = target.partition(".")
            yield node.lineno, top, rest if top == "pagedinfer" else None


def _within(name, package):
    return name == package or name.startswith(package + ".")


def _layer(name):
    return max((layer for layer in LAYERS if _within(name, layer)), key=len, default=None)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports_in_one_direction(name):
    layer = _layer(name)
    if layer is None:
        assert name.split(".")[0] in WIRING, f"{name} has no place in LAYERS or WIRING: give it one"
        return
    allowed = (*LAYERS[layer], layer)
    wrong = [
        f"line {line}: pagedinfer.{target}"
        for line, top, target in _imports(name)
        if top == "pagedinfer" and not any(_within(target, other) for other in allowed)
    ]
    assert not wrong, f"{name} may import {allowed} only"


@pytest.mark.parametrize(
    "name", [m for m in MODULES if m.split(".")[0] in (*CORE, "views") and m not in LIVE_VIEWS]
)
def test_core_and_static_views_need_the_standard_library_only(name):
    wrong = [
        f"line {line}: {top}"
        for line, top, _ in _imports(name)
        if top != "pagedinfer" and top not in sys.stdlib_module_names
    ]
    assert not wrong


@pytest.mark.parametrize("name", [m for m in MODULES if m.split(".")[0] in ("memory", "engine", "trace")])
def test_the_core_never_reads_a_clock(name):
    assert not {top for _, top, _ in _imports(name)} & {"time", "datetime", "calendar"}


def test_the_walk_sees_imports(tmp_path, monkeypatch):
    """The tests above can fail: a file with every kind of import, each seen or left out as it should be."""
    path = tmp_path / "sample.py"
    path.write_text(
        textwrap.dedent("""
        import time, torch.nn as nn
        from typing import TYPE_CHECKING
        from pagedinfer.trace import events as ev
        from pagedinfer.trace.recording import Recording
        if TYPE_CHECKING:
            import numpy
        def f():
            from pagedinfer.llm import LLM
        """)
    )
    monkeypatch.setitem(MODULES, "sample", path)
    assert [(top, target) for _, top, target in _imports("sample")] == [
        ("time", None), ("torch", None), ("typing", None), ("pagedinfer", "trace.events"),
        ("pagedinfer", "trace.recording"), ("pagedinfer", "llm"),
    ]  # fmt: skip
    assert _layer("trace.bus") == "trace.bus"
    assert _layer("trace.replay") == "trace"
    assert _layer("engine.engine") == "engine"


# -- what really gets loaded --------------------------------------------------------------------------------------


def run_python(code):
    """Standard output of a fresh interpreter started in the repository's root."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in BLOCKED):
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
sys.meta_path.insert(0, Blocker())
"""

RUN_SCHEDULER = """
from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.simulated import SimulatedRunner
events, runner = [], SimulatedRunner()
scheduler = Scheduler(EngineConfig(num_blocks=4, block_size=2, max_num_batched_tokens=16))
scheduler.bus.subscribe(events.append)
for rid in "ab":
    scheduler.submit(Request(rid, 3, 4), 0)
for _ in range(6):
    plan = scheduler.schedule(scheduler.step)
    scheduler.commit(plan, runner.execute(plan))
    scheduler.check()
print(scheduler.queues.num_finished, scheduler.queues.num_preemptions, len(events))
"""


def test_importing_pagedinfer_loads_the_standard_library_only():
    loaded = run_python("""
        import sys
        before = set(sys.modules)
        import pagedinfer
        print(sorted({name.split(".")[0] for name in set(sys.modules) - before}))
    """)
    tops = set(ast.literal_eval(loaded))
    assert "pagedinfer" in tops
    assert not tops & set(HEAVY)
    assert not {top for top in tops - {"pagedinfer"} if top not in sys.stdlib_module_names}


def test_the_engine_runs_without_views_and_without_trace_but_events_and_bus():
    kept = {"trace", "trace.schema", "trace.events", "trace.bus"}
    hidden = [
        f"pagedinfer.{m}" for m in MODULES if (_within(m, "trace") and m not in kept) or _within(m, "views")
    ]
    assert {"pagedinfer.trace.recording", "pagedinfer.trace.replay", "pagedinfer.trace.tables"} <= set(hidden)
    engine = [f"pagedinfer.{m}" for m in MODULES if _within(m, "engine") or _within(m, "memory")]
    code = f"BLOCKED = {hidden!r}\n{BLOCKER}\nimport importlib\n[importlib.import_module(m) for m in {engine!r}]\n"
    assert run_python(code + RUN_SCHEDULER) == "2 1 30"


def test_core_recording_and_pictures_work_where_nothing_else_can_be_imported():
    code = (
        f"BLOCKED = {HEAVY!r}\n{BLOCKER}\n"
        + """
from pagedinfer import Engine, EngineConfig, Recorder, Recording
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.views import block_map_svg, timeline_svg
engine = Engine(EngineConfig(num_blocks=4, block_size=2), SimulatedRunner())
with Recorder(engine) as recording:
    for _ in range(2):
        engine.add_request([1, 2, 3])
    for _ in range(20):
        engine.step()
assert not engine.has_unfinished()
loaded = Recording.from_jsonl(recording.to_jsonl())
assert rerun(loaded)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)
print(all("<svg" in draw(loaded) for draw in (block_map_svg, timeline_svg)), len(loaded.steps) > 3)
"""
    )
    assert run_python(code) == "True True"


def test_the_name_kernels_stays_free():
    """A package of that name exists on the index and transformers probes for it: our folder must not look like it."""
    pytest.importorskip("transformers", reason="the extra `test` brings transformers")
    origin = run_python("""
        import importlib.util
        spec = importlib.util.find_spec("kernels")
        print("none" if spec is None or spec.origin is None else spec.origin)
        import transformers
    """)
    assert origin == "none" or "site-packages" in origin
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_pagedinfer_is_imported_from_this_checkout():
    spec = importlib.util.find_spec("pagedinfer")
    assert Path(spec.origin).resolve() == (PACKAGE / "__init__.py").resolve()


# -- the map and the sizes ----------------------------------------------------------------------------------------


def test_the_map_in_contributing_lists_every_module():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = [path.relative_to(PACKAGE).as_posix() for path in MODULES.values() if path.name != "__init__.py"]
    missing = [p for p in paths if f"`{p}`" not in text and f"`pagedinfer/{p}`" not in text]
    assert not missing, f"CONTRIBUTING.md does not list {missing}"


def test_the_map_lists_nothing_that_is_gone():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {
        word.removeprefix("pagedinfer/")
        for word in text.split("`")[1::2]
        if word.endswith(".py") and " " not in word
    }
    gone = [p for p in sorted(named) if not (PACKAGE / p).exists() and not (ROOT / p).exists()]
    assert not gone, f"CONTRIBUTING.md names {gone}, which do not exist"


def test_no_module_is_longer_than_a_reader_can_hold():
    lengths = sorted(
        ((len(p.read_text(encoding="utf-8").splitlines()), n) for n, p in MODULES.items()), reverse=True
    )
    assert lengths[0][0] <= MAX_LINES, f"longest modules: {lengths[:5]}"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is(name):
    assert ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8")))
