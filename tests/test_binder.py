"""binder/: what repo2docker reads, that it installs in a clean environment, and what the notebooks cost in memory."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BINDER = ROOT / "binder"


def requirements():
    lines = [line.split("#")[0].strip() for line in (BINDER / "requirements.txt").read_text().splitlines()]
    return [line for line in lines if line]


def test_requirements_install_this_checkout():
    lines = requirements()
    assert lines[0] == "-c constraints.txt"  # relative to the file
    assert (BINDER / "constraints.txt").is_file()
    assert "-e .[engine,view]" in lines  # relative to the root, where repo2docker runs pip
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"engine", "view"} <= extras.keys()
    assert any(line.startswith("jupyterlab") for line in lines)
    assert not any(line.startswith(("plotly", "triton", "transformers")) for line in lines), "keep it light"


def test_python_is_one_that_the_package_allows():
    """repo2docker's default, 3.10, is too old; runtime.txt is what raises it."""
    name, _, version = (BINDER / "runtime.txt").read_text().strip().partition("-")
    assert name == "python"
    assert (3, 11) <= tuple(map(int, version.split("."))) <= (3, 14)


def test_torch_is_capped():
    constraints = (BINDER / "constraints.txt").read_text()
    assert any(line.startswith("torch<") for line in constraints.splitlines())
    assert "torch<" not in (ROOT / "pyproject.toml").read_text(), "the package itself has lower bounds only"


def test_no_file_names_a_registry():
    for path in (*BINDER.iterdir(), *(ROOT / "notebooks").rglob("*.py")):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert "index-url" not in text
            assert "https://" not in text, path
            assert "http://" not in text.replace("http://127.0.0.1", ""), path


def test_post_build_can_run():
    script = BINDER / "postBuild"
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", script], check=True)


def environment(folder, *arguments):
    """A clean virtual environment with what pip is told to install; its python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", *arguments], check=True, cwd=ROOT)
    return python


def measure(python, notebook):
    command = [python, BINDER / "measure.py", ROOT / "notebooks" / notebook]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # installs; minutes on a busy machine
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_notebook_00_without_torch_under_1_gb(tmp_path_factory):
    folder = tmp_path_factory.mktemp("light")
    try:
        found = measure(environment(folder / "env", "-e", ".[view]", "jupyterlab"), "00_sixty_seconds.ipynb")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert not found["errors"]
    assert not found["torch"]
    assert 100 < found["total_mb"] < 1000, found


@pytest.mark.slow
@pytest.mark.timeout(1800)  # installs; minutes on a busy machine
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_requirements_serve_notebook_01_under_2_gb(tmp_path_factory):
    folder = tmp_path_factory.mktemp("binder")
    try:
        python = environment(folder / "env", "-r", "binder/requirements.txt")
        subprocess.run([python, "-m", "pip", "check", "-q"], check=True)
        found = measure(python, "01_block_tables.ipynb")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert not found["errors"]
    assert found["torch"]
    assert found["kernel_mb"] > 450, f"too little for the real model: {found}"
    assert found["total_mb"] < 2000, found
