"""Saved pictures carry alternative text, where Jupyter's tools look for it."""

import re

import pytest

from pagedinfer.course import bundled_recording
from pagedinfer.views import EngineView, describe


@pytest.fixture(scope="module")
def recording():
    return bundled_recording()


def shown(view, monkeypatch):
    """(bundle, metadata) as IPython puts them on the page, whichever way the view is shown."""
    formatters = pytest.importorskip(
        "IPython.core.formatters", reason="IPython is not installed (extra: view)"
    )
    found = []
    monkeypatch.setattr(
        "pagedinfer.views.output.publish_display_data",
        lambda data, metadata, **_: found.append((data, metadata)),
    )
    data, metadata = formatters.DisplayFormatter().format(view)
    return found[-1] if found else (data, metadata)


@pytest.mark.parametrize("tier", ["anywidget", "ipywidgets", "static"])
@pytest.mark.parametrize("step", [5, 40])
def test_every_picture_of_a_view_says_in_a_line_what_it_shows(tier, step, recording, monkeypatch):
    data, metadata = shown(EngineView(recording, tier=tier, step=step), monkeypatch)
    assert set(metadata) == {kind for kind in data if kind.startswith("image/")} != set()
    for kind in metadata:
        assert metadata[kind] == {"alt": data["text/plain"].split("\n")[0]}
        assert metadata[kind]["alt"].endswith(describe(recording, step))


def test_the_page_that_nbconvert_makes_has_it(recording, monkeypatch):
    """Its templates "classic" and "basic" read it, for bitmaps; "lab" (7.17) and JupyterLab (4.6) do not yet."""
    nbconvert = pytest.importorskip("nbconvert", reason="nbconvert is not installed (extra: test)")
    v4 = pytest.importorskip("nbformat.v4", reason="nbformat is not installed (extra: test)")
    data, metadata = shown(EngineView(recording, tier="static", step=40), monkeypatch)
    output = v4.new_output(
        "display_data", {k: data[k] for k in ("image/png", "text/plain")}, metadata=metadata
    )
    notebook = v4.new_notebook(cells=[v4.new_code_cell("view", outputs=[output])])
    html, _ = nbconvert.HTMLExporter(template_name="classic").from_notebook_node(notebook)
    (alt,) = re.findall(r'<img alt="([^"]*)" src="data:image/png', html)
    assert alt.endswith(describe(recording, 40))
