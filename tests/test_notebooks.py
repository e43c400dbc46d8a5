"""The notebooks: built from their sources, clean, real on a static page, and right with and without torch.

pytest itself runs every notebook as shipped (nbval, see pyproject.toml); the solved copies run with the slow suites.
"""

import copy
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
VIEW = "application/vnd.jupyter.widget-view+json"
SVG = "image/svg+xml"


def tool(name):
    """A script of notebooks/ as a module; they import each other by bare name, as scripts do."""
    sys.path.insert(0, str(NOTEBOOKS))
    try:
        spec = importlib.util.spec_from_file_location(name, NOTEBOOKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(NOTEBOOKS))


build, clean = tool("build"), tool("clean")
PAIRS = [(source, solved) for source in build.sources() for solved in (False, True)]
IDS = [f"{source.stem}{'-solved' * solved}" for source, solved in PAIRS]


def committed(source, solved):
    return json.loads(build.target(source, solved=solved).read_text(encoding="utf-8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def plain(cell):
    return "".join("".join(o.get("data", {}).get("text/plain", o.get("text", ""))) for o in cell["outputs"])


# -- sources and hygiene ----------------------------------------------------------------------------------------------


def test_there_are_notebooks():
    assert [source.name[:2] for source in build.sources()] == ["00", "01", "02", "03", "07", "08", "10"]
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {source.stem for source in build.sources()}


@pytest.mark.parametrize(("source", "solved"), PAIRS, ids=IDS)
def test_committed_notebooks_are_what_the_sources_make(source, solved):
    """Forgotten after a change of a source? Run `python notebooks/build.py`."""
    built, there = build.build(source, solved=solved), committed(source, solved)
    for cell in there["cells"]:
        cell.update({"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {})
    assert built == there


@pytest.mark.parametrize(("source", "solved"), PAIRS, ids=IDS)
def test_committed_notebooks_are_clean(source, solved):
    path = build.target(source, solved=solved)
    text = path.read_text(encoding="utf-8")
    assert clean.dump(clean.clean(json.loads(text))) == text
    assert len(text.encode()) < clean.MAX_BYTES
    assert VIEW not in text


@pytest.mark.parametrize(("source", "solved"), PAIRS, ids=IDS)
def test_compared_cells_have_something_to_compare(source, solved):
    """nbval passes a cell without outputs in silence, and so would an error that was committed."""
    cells = code_cells(committed(source, solved))
    compared = [cell for cell in cells if "nbval-check-output" in cell["metadata"].get("tags", [])]
    assert len(compared) >= 8
    for cell in compared:
        assert cell["execution_count"]
        assert cell["outputs"], cell["source"]
    assert not [o for cell in cells for o in cell["outputs"] if o["output_type"] == "error"]
    assert sum(SVG in o.get("data", {}) for cell in compared for o in cell["outputs"]) >= 4


@pytest.mark.parametrize(("source", "solved"), PAIRS, ids=IDS)
def test_every_exercise_is_checked(source, solved):
    notebook = committed(source, solved)
    asked = [
        t for c in code_cells(notebook) for t in c["metadata"].get("tags", []) if re.fullmatch(r"\d\d\.\d", t)
    ]
    number = source.name[:2]
    assert asked == sorted(i for i in build.exercises() if i.startswith(number))
    verdicts = [plain(c) for c in code_cells(notebook) if "".join(c["source"]).startswith("check(")]
    assert [verdict.split()[1] for verdict in verdicts] == asked
    assert {verdict[0] for verdict in verdicts} == {"✓" if solved else "…"}


def test_clean_drops_state_and_keeps_pictures():
    picture = {VIEW: {"model_id": "abc"}, SVG: ["<svg/>"], "text/plain": ["View"]}
    cell = {
        "cell_type": "code", "execution_count": 3, "id": "a", "source": ["view"],
        "metadata": {"execution": {"iopub.status.busy": "now"}, "tags": ["nbval-check-output"]},
        "outputs": [
            {"output_type": "execute_result", "data": picture, "metadata": {"x": 1}, "execution_count": 3},
            {"output_type": "display_data", "data": {VIEW: {"model_id": "abc"}}, "metadata": {}},
        ],
    }  # fmt: skip
    dirty = {
        "cells": [cell],
        "metadata": {"widgets": {"state": 1}, "kernelspec": {"name": "mine"}},
        "nbformat": 4,
    }
    result = clean.clean(copy.deepcopy(dirty))
    assert result["metadata"] == clean.KERNEL
    assert result["cells"][0]["metadata"] == {"tags": ["nbval-check-output"]}
    assert result["cells"][0]["execution_count"] == 3
    assert list(result["cells"][0]["outputs"][0]["data"]) == [SVG, "text/plain"]
    assert list(result["cells"][0]["outputs"][1]["data"]) == [VIEW], "an output must not end up empty"


def test_clean_as_pre_commit_runs_it(tmp_path):
    path = tmp_path / "a.ipynb"
    path.write_text(
        json.dumps({"cells": [], "metadata": {"widgets": {}}, "nbformat": 4, "nbformat_minor": 5})
    )
    assert clean.main([str(path)]) == 1
    assert clean.main([str(path)]) == 0
    path.write_text(path.read_text() + " " * 10 + "\n")
    assert clean.main([str(path)]) == 1


# -- pytest runs them -------------------------------------------------------------------------------------------------


def run_pytest(*arguments):
    pytest_of = (
        Path(sys.executable).parent / "pytest"
    )  # never `python -m pytest`: see DESIGN on the name `kernels`
    command = [pytest_of, "-p", "no:cacheprovider", "-q", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_pytest_collects_the_notebooks():
    shipped = run_pytest("--collect-only", NOTEBOOKS).stdout
    solved = run_pytest("--collect-only", "-m", "slow", NOTEBOOKS).stdout
    for source in build.sources():
        count = len(code_cells(build.build(source, solved=False)))
        assert shipped.count(f"notebooks/{source.stem}.ipynb::") == count
        assert solved.count(f"solutions/{source.stem}.ipynb::") == count
    assert "solutions/" not in shipped


def test_nb_08_pytest_really_compares_pictures(tmp_path):
    """A changed picture fails, a changed widget id does not."""
    source = build.sources()[0]
    notebook = committed(source, solved=False)
    notebook["cells"] = code_cells(notebook)[1:2]
    good, bad = tmp_path / "good.ipynb", tmp_path / "bad.ipynb"
    good.write_text(clean.dump(notebook), encoding="utf-8")
    data = notebook["cells"][0]["outputs"][0]["data"]
    changed = "".join(data[SVG]).replace("<rect", '<rect class="x"', 1)
    assert changed != "".join(data[SVG])
    data[SVG] = changed
    bad.write_text(clean.dump(notebook), encoding="utf-8")
    out = run_pytest("-c", ROOT / "pyproject.toml", "--rootdir", ROOT, good, bad).stdout
    assert "1 failed, 1 passed" in out, out
    assert "image/svg+xml" in out


# -- without a kernel: the cells as one script ------------------------------------------------------------------------


def source_of(number):
    return next(source for source in build.sources() if source.name.startswith(number))


def run_cells(source, tmp_path, *, solved, before="", setup=True, **environment):
    """Run the code cells as a script, each check's verdict printed. Returns what it printed."""
    cells = ["".join(cell["source"]) for cell in code_cells(build.build(source, solved=solved))]
    cells = cells if setup else cells[1:]
    lines = [re.sub(r"^(check\(.*\))$", r"print(\1)", cell, flags=re.M) for cell in cells]
    script = "\n\n".join([before, *lines])
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "missing", [("torch", "numpy"), ("torch", "numpy", "ipywidgets", "anywidget", "traitlets")]
)
def test_notebook_00_runs_without_torch(tmp_path, missing):
    before = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
    out = run_cells(build.sources()[0], tmp_path, solved=True, before=before, setup=len(missing) == 2)
    assert out.count("✓") == 3
    assert "torch is not installed" in out
    assert (tmp_path / "eight_requests.html").stat().st_size > 10_000


@pytest.mark.parametrize(("number", "exercises"), [("02", 4), ("03", 4), ("07", 4), ("08", 4), ("10", 5)])
def test_notebooks_without_a_model_need_no_torch(tmp_path, number, exercises):
    before = "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\n"
    out = run_cells(source_of(number), tmp_path, solved=True, before=before)
    assert out.count("✓") == exercises
    assert "torch is missing" not in out


def test_notebook_01_falls_back_to_the_tiny_model(tmp_path):
    """Nothing cached and no package index: it says so and every exercise still works."""
    offline = {"PAGEDINFER_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    offline |= {"PIP_CONFIG_FILE": os.devnull}
    out = run_cells(build.sources()[1], tmp_path, solved=True, **offline)
    assert "The tiny model with random weights stands in" in out
    assert out.count("✓") == 3
    assert "the same key: True" in out


# -- the first cell ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run_setup(monkeypatch, tmp_path, capsys):
    """Call the notebooks' `setup` where some packages are missing. Returns (what it said, what pip was told)."""

    def run(missing, packages, cwd=tmp_path):
        names, commands = {}, []
        exec((NOTEBOOKS / "src" / "setup.py").read_text(encoding="utf-8"), names)
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else name)
        monkeypatch.setattr(
            names["subprocess"], "run", lambda c: commands.append(c[5:]) or subprocess.CompletedProcess(c, 0)
        )
        names["setup"](*packages)
        monkeypatch.undo()
        return capsys.readouterr().out.strip(), commands

    return run


def test_setup_installs_only_what_is_missing(run_setup):
    packages = ["pagedinfer", "torch", "anywidget", "gguf"]
    assert run_setup([], packages) == ("Everything is here.", [])
    assert run_setup(["gguf"], packages) == ("Installed gguf", [["gguf"]])
    said, commands = run_setup(["pagedinfer", "anywidget"], packages, cwd=NOTEBOOKS)
    assert (said, commands) == ("Installed pagedinfer, anywidget", [[str(ROOT), "anywidget"]])


def test_setup_never_touches_torch(run_setup):
    said, commands = run_setup(["torch", "gguf"], ["pagedinfer", "torch", "gguf"])
    assert not commands
    assert said.startswith("torch is missing")
    for source in build.sources():
        assert "install torch" not in source.read_text(encoding="utf-8")


def test_setup_without_a_checkout_says_what_to_do(run_setup):
    said, commands = run_setup(["pagedinfer"], ["pagedinfer"])
    assert not commands
    assert "clone its repository" in said


# -- on a static page -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every shipped notebook as HTML, as a site without a kernel shows it."""
    from nbconvert import HTMLExporter

    folder = tmp_path_factory.mktemp("pages")
    exporter = HTMLExporter(mathjax_url="", require_js_url="")
    for source in build.sources():
        body, _ = exporter.from_filename(str(build.target(source, solved=False)))
        (folder / f"{source.stem}.html").write_text(body, encoding="utf-8")
    return folder


@pytest.mark.parametrize("source", build.sources(), ids=lambda source: source.stem)
def test_static_pages_hold_the_pictures(pages, source):
    page = (pages / f"{source.stem}.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg+xml") >= 4
    assert "jupyter-widgets-view" not in page
    assert "widget-view+json" not in page


@pytest.mark.browser
def test_static_pages_show_pictures_without_javascript(pages):
    from playwright.sync_api import sync_playwright

    chromium = next((p for p in ("/usr/bin/chromium", "/usr/bin/chromium-browser") if Path(p).exists()), None)
    if chromium is None:
        pytest.skip("no Chromium in /usr/bin")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_context(java_script_enabled=False).new_page()
        outside = []
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else outside.append(r.url))
        for source in build.sources():
            page.goto((pages / f"{source.stem}.html").as_uri())
            pictures = page.locator("img[src^='data:image/svg+xml']")
            assert pictures.count() >= 4
            for index in range(pictures.count()):
                box = pictures.nth(index).bounding_box()
                assert box["width"] > 500, (source.stem, index, box)  # a broken picture is 16 pixels wide
                assert box["height"] > 80
        browser.close()
    assert not outside


# -- Colab ------------------------------------------------------------------------------------------------------------

COLAB = ["ipywidgets==7.7.1", "ipykernel==6.17.1", "IPython==7.34.0", "plotly==5.24.1", "anywidget==0.9.21"]
"""The versions of Colab that matter to a notebook's kernel (googlecolab/backend-info, August 2026)."""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # installs torch; minutes on a busy machine
def test_notebooks_pass_with_colabs_versions(tmp_path_factory):
    import shutil
    import venv

    folder = tmp_path_factory.mktemp("colab")
    try:
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        wanted = [*COLAB, "pytest", "pytest-timeout", "nbval", "-e", f"{ROOT}[engine,view]"]
        constraints = ["-c", str(ROOT / "binder" / "constraints.txt")]
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--no-compile", *constraints, *wanted],
            check=True,
            cwd=folder,
        )
        environment = os.environ | {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        notebooks = [build.target(source, solved=False) for source in build.sources()]
        command = [folder / "env" / "bin" / "pytest", "-p", "no:cacheprovider", "-q", *notebooks]
        result = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=600
        )
        assert result.returncode == 0, result.stdout
        assert re.search(r"\d{2} passed", result.stdout), result.stdout
    finally:
        shutil.rmtree(folder, ignore_errors=True)
