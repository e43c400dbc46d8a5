"""Linked views in a real browser: one step, one selection, one growing run; in JupyterLab and on an offline page."""

import pytest
from test_browser_lab import CELLS as CELL_TYPES
from test_browser_lab import IDLE, IN_KERNEL, expect, lab, run_notebook

from pagedinfer.views import BatchComposition, Latency, RunComparison, export_html

pytestmark = pytest.mark.browser
__all__ = ["lab"]

CELLS = (
    """
import pagedinfer
from pagedinfer.views import AttentionView, Latency, PrefixTree

llm = pagedinfer.LLM("tiny", num_blocks=40, block_size=4)
session = pagedinfer.Session(llm)
tap = session.tap(tokenizer=llm.tokenizer)
for number in range(6):
    session.submit(f"request number {number}", temperature=0.0, max_tokens=50, ignore_eos=True)
session.run(4)
""",
    "session.view(panes=('blocks', 'details'))",
    "Latency(session)",
    "PrefixTree(session)",
    "AttentionView(tap)",
)


def sight(view):
    """Bring it into sight: what nobody sees is not drawn."""
    view.evaluate("node => node.scrollIntoView({ block: 'center' })")
    return view


def test_views_of_a_live_session_go_together(lab, new_page, artifacts):
    page = new_page()
    view = run_notebook(page, lab, *CELLS)
    sheets = page.get_by_test_id("pi-sheet")
    latency, tree, attention = (sheets.nth(i) for i in range(3))

    def all_at(step, last=None):
        for each in (view, latency, tree, attention):
            expect(sight(each)).to_have_attribute("data-step", str(step))
            if last is not None and each is not attention:
                expect(each).to_have_attribute("data-last", str(last))

    all_at(4)
    sight(view)
    view.focus()
    page.keyboard.press("ArrowRight")  # past the end: the engine steps
    all_at(5, 5)
    sight(latency)
    latency.focus()
    page.keyboard.press("ArrowRight")  # from any view
    expect(latency).to_have_attribute("data-step", "6")
    all_at(6, 6)
    tree.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    all_at(4, 6)
    assert page.evaluate(IN_KERNEL, "print(session.recording.last_step)") == "6"

    # A click in one marks its relatives in all.
    sight(latency)
    latency.locator('[data-rid="r3"]').first.click(force=True)  # wherever in the row
    expect(latency.locator('.is-linked:not([data-rid="r3"])')).to_have_count(0)
    expect(latency.locator('[data-rid="r3"].is-linked').first).to_be_visible()
    expect(view.locator(".pi-details")).to_contain_text("r3")
    sight(view)
    expect(view.locator(".pi-grid .is-linked").first).to_be_visible()
    sight(attention)
    expect(attention.locator(".pi-say")).to_contain_text("r3")
    page.screenshot(path=artifacts / "linked.png", full_page=True)
    sight(view)
    view.focus()
    page.keyboard.press("Escape")
    expect(latency.locator(".pi-dim")).to_have_count(0)

    # By keyboard alone, and Jupyter's own keys stay out of it.
    cells = page.evaluate(CELL_TYPES)
    sight(latency).get_by_label("Select").focus()
    for key in ("r", "2", "ArrowDown"):
        page.keyboard.press(key)
    for control in (latency.get_by_role("slider"), view.get_by_label("Speed", exact=False)):
        control.focus()
        for key in ("m", "ArrowUp", "ArrowDown", "d", "d"):
            page.keyboard.press(key)
    assert page.evaluate(CELL_TYPES) == cells
    expect(latency.get_by_label("Select")).to_have_value('{"request":"r3"}')
    page.wait_for_function(IDLE)
    latency.get_by_label("Select").select_option("{}")

    # Play in a view with a cursor: to the end of the run, and the picture is kept for the saved file.
    sight(latency)
    latency.get_by_label("Speed").select_option("100")
    latency.focus()
    page.keyboard.press("End")
    page.keyboard.press(" ")
    page.wait_for_function(
        "() => !document.querySelectorAll('[data-testid=pi-sheet] [aria-label=Pause]').length", timeout=60_000
    )
    last = page.evaluate(IN_KERNEL, "print(session.recording.last_step)")
    assert int(last) > 40
    all_at(last, last)
    assert not page.errors, page.errors[:3]
    assert not page.external


def test_views_on_an_offline_page_go_together(new_page, simulated_run, tmp_path):
    options = {"seed": 3, "max_model_len": 320, "prompts": (8, 90), "outputs": (4, 40), "aborts": 0}
    recording = simulated_run(num_blocks=24, **options).finish()
    more = [Latency(recording), BatchComposition(recording), RunComparison(recording, recording)]
    page = new_page()
    page.goto(export_html(recording, tmp_path / "page.html", more=more).as_uri())
    engine, sheets = page.get_by_test_id("pi-view"), page.get_by_test_id("pi-sheet")
    expect(sheets).to_have_count(3)
    engine.focus()
    page.keyboard.press("Home")
    page.keyboard.press("Shift+ArrowRight")
    for sheet in sheets.all():
        sight(sheet)
        expect(sheet).to_have_attribute("data-step", "10")
    rid = recording.at(10).running[0]
    batch = sheets.nth(1)
    batch.get_by_label("Select").select_option(label=rid)
    expect(batch.locator(".is-linked").nth(1)).to_be_attached()
    sight(sheets.nth(0))
    expect(sheets.nth(0).locator(f'[data-rid="{rid}"].is-linked').first).to_be_visible()
    expect(sheets.nth(0).locator(f'.is-linked:not([data-rid="{rid}"])')).to_have_count(0)
    expect(engine.locator(".pi-details")).to_contain_text(rid)
    block_id = recording.at(10).requests[rid].block_table[0]
    sight(engine)
    engine.locator(f'[data-block="{block_id}"]').click()
    pair = sheets.nth(2)
    sight(pair)
    expect(pair.get_by_label("Select")).to_have_value(f'{{"block":{block_id}}}')
    expect(pair.locator(".is-linked")).to_have_count(2)
    patterns = page.evaluate("[...document.querySelectorAll('pattern')].map(node => node.id)")
    assert len(set(patterns)) == len(patterns) > 10, "one that Jupyter does not draw is never another's"
    assert not page.errors, page.errors[:3]
    assert not page.external
