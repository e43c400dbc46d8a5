"""A notebook in a real Notebook 7: run, driven by keys and clicks, in the light and the dark theme, and saved."""

import json

import pytest
from test_browser_lab import CELLS, IN_KERNEL, KEPT, WHOLE, expect, run_notebook, running_lab, saved_view

pytestmark = pytest.mark.browser

pytest.importorskip("notebook", reason="notebook is not installed (extra: test)")

# Notebook 7.6 says so when it starts, in any notebook: its settings load before those of its shortcuts.
ITS_OWN = "Cannot read properties of undefined (reading 'schema')"


@pytest.fixture(scope="module")
def notebook7(tmp_path_factory):
    """A Notebook 7 server of its own: (address, folder of notebooks)."""
    with running_lab(tmp_path_factory.mktemp("notebook7"), "notebook") as found:
        yield found


def test_from_run_all_to_the_saved_file_in_notebook_7(notebook7, new_page, artifacts):
    page = new_page(height=1700)
    view = run_notebook(page, notebook7, WHOLE, "view", "compared", path="notebooks/{name}.ipynb")
    assert page.locator("body").get_attribute("data-notebook") == "notebooks", "this is Notebook, not Lab"
    assert page.evaluate(IN_KERNEL, "print(view.tier)") == "anywidget"
    _step_with_keys(page, view)

    view.locator("[data-block][data-owner='r1']").first.click()
    for pane in (".pi-rows", ".pi-queues", ".pi-budget"):
        expect(view.locator(f"{pane} .is-linked")).to_have_attribute("data-request", "r1")
    mine = view.locator(".pi-grid .is-linked").evaluate_all("nodes => nodes.map(n => n.dataset.block)")
    table = "sorted(session.recording.at(9).requests['r1'].block_table)"
    assert page.evaluate(IN_KERNEL, f"print(*{table})") == " ".join(mine)

    for theme in ("Dark", "Light"):
        change = "name => window.jupyterapp.commands.execute('apputils:change-theme', { theme: `JupyterLab ${name}` })"
        page.evaluate(change, theme)
        expect(view).to_have_css("color-scheme", theme.lower())
        view.screenshot(path=artifacts / f"notebook7-{theme.lower()}.png")

    _play_and_save(page, view, notebook7)
    _compare(page)
    page.screenshot(path=artifacts / "notebook7.png")
    assert not page.external, page.external[:5]
    errors = [error for error in page.errors if error != ITS_OWN]
    assert not errors, errors[:5]


def _step_with_keys(page, view):
    """The engine steps at the end of what there is, the browser scrubs within it, and Notebook keeps its own keys."""
    view.focus()
    expect(view).to_have_attribute("data-step", "0")
    for key, step in (("Shift+ArrowRight", 10), ("ArrowLeft", 9), ("ArrowLeft", 8), ("ArrowRight", 9)):
        page.keyboard.press(key)
        expect(view).to_have_attribute("data-step", str(step))
    assert page.evaluate(IN_KERNEL, "print(engine.scheduler.step)") == "10"
    cells = page.evaluate(CELLS)
    for key in ("b", "a", "m", "d", "d", "x", "0", "0", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    page.wait_for_timeout(200)  # to see that nothing happens
    assert page.evaluate(CELLS) == cells, "Notebook's own shortcuts must not fire inside the view"
    assert page.locator(".jp-Dialog").count() == 0


def _play_and_save(page, view, notebook7):
    """At a pause the picture of now is put into the output, and the file has it."""
    view.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    expect(view).to_have_attribute("data-step", "11")
    view.get_by_label("Speed").select_option("30")
    view.get_by_role("button", name="Play").click()
    page.wait_for_function("v => +v.dataset.step >= 15", arg=view.element_handle())
    view.get_by_role("button", name="Pause").click()
    expect(view.get_by_role("button", name="Play")).to_be_visible()
    page.wait_for_function(KEPT)
    step = page.evaluate(IN_KERNEL, "print(engine.scheduler.step)")
    data = saved_view(page, notebook7)
    assert f"step {step}:" in data["text/plain"][0]
    assert f"Block map, step {step}" in "".join(data["image/svg+xml"])
    assert "image/png" in data
    assert "text/html" not in data
    assert len(json.dumps(data)) < 150_000


def _compare(page):
    """A view of the other kind: two runs side by side, where they part and ten steps later."""
    sheet = page.get_by_test_id("pi-sheet")
    parted = page.evaluate(IN_KERNEL, "print(compared.divergence[0])")
    expect(sheet).to_have_attribute("data-step", parted)
    sheet.focus()
    page.keyboard.press("Shift+ArrowRight")
    words = page.evaluate(IN_KERNEL, f"print(compared.sheet({parted} + 10, 920).words)")
    expect(sheet.locator(".pi-say")).to_have_text(words)
