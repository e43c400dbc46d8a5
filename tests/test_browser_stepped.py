"""The views with a cursor in a real browser: keys, each drawing, both themes, both widths, nothing clipped."""

import pytest
from handmade import HandMade

from pagedinfer.trace import events as ev
from pagedinfer.views import BatchComposition, FragmentationLab, Latency, PrefixTree, RunComparison
from pagedinfer.views.stepped import NARROW, WIDE

pytestmark = pytest.mark.browser

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: test)").expect


def cached_run():
    """Two prompts that share two blocks, and a third that shares one."""
    made = HandMade(num_blocks=24, block_size=4)
    paths = {"A": [1, 2, 3], "B": [1, 2, 4, 5], "C": [1, 6]}
    free, cached = list(range(24)), {}
    for rid, keys in paths.items():
        made.submit(rid, 4 * len(keys) + 2, 5, keys)
        hit = sum(key in cached for key in keys)
        blocks = [free.pop(0) for _ in range(len(keys) + 1)]
        events = [ev.Admit(rid, "room"), ev.Hit(rid, 4 * hit, ""), ev.Alloc(rid, 0, 0, tuple(blocks))]
        made.step({rid: 4 * len(keys) + 2}, *events, tokens=[rid])
        made.add(ev.Cache(rid, tuple(blocks[hit:-1]), tuple(keys[hit:]), keys[hit - 1] if hit else -1))
        cached |= dict(zip(keys, blocks, strict=False))
    return made.recording


@pytest.fixture(scope="module")
def views(simulated_run):
    options = {
        "seed": 3,
        "max_model_len": 320,
        "prompts": (8, 90),
        "outputs": (4, 40),
        "max_num_seqs": 6,
        "aborts": 0,
    }
    first, second = (simulated_run(num_blocks=n, **options).finish() for n in (32, 24))
    return {
        "latency": Latency(first, slo={"TTFT": 8, "ITL": 2}),
        "batch": BatchComposition(first),
        "lab": FragmentationLab({"large pool": first, "small pool": second}),
        "prefix": PrefixTree(cached_run()),
        "compare": RunComparison(first, second),
    }


@pytest.fixture(scope="module")
def pages(views, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stepped")
    return {name: view.html(folder / f"{name}.html") for name, view in views.items()}


NAMES = ("latency", "batch", "lab", "prefix", "compare")


@pytest.fixture
def open_view(new_page, pages):
    def open_view(name, **options):
        page = new_page(**options)
        page.goto(pages[name].as_uri())
        view = page.get_by_test_id("pi-sheet")
        view.wait_for()
        return page, view

    return open_view


def shown(view):
    return view.locator(".pi-picture text").evaluate_all("nodes => nodes.map(n => n.textContent)")


@pytest.mark.parametrize("name", NAMES)
def test_keys_slider_and_the_drawing_of_every_step(open_view, views, name):
    page, view = open_view(name)
    last = views[name].last_step
    expect(view).to_have_attribute("data-step", str(views[name].cursor))
    view.focus()
    ten = min(11, last)
    moves = [("Home", 0), ("ArrowRight", 1), ("Shift+ArrowRight", ten), ("ArrowLeft", ten - 1), ("End", last)]
    for key, step in moves:
        page.keyboard.press(key)
        expect(view).to_have_attribute("data-step", str(step))
        sheet = views[name].sheet(step, WIDE)
        expect(view.locator(".pi-say")).to_have_text(sheet.words)
        words = "".join("".join(parts) for _, parts in sheet.layers)
        for text in shown(view):
            assert text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in words
        assert len(shown(view)) == words.count("<text ")
    view.get_by_role("slider", name="Step").fill("1")
    expect(view).to_have_attribute("data-step", "1")
    view.get_by_label("Speed").select_option("100")
    view.get_by_role("button", name="Play").click()
    expect(view).to_have_attribute("data-step", str(last))
    assert not page.errors, page.errors[:3]
    assert not page.external


CLIPPED = """svg => {
  const box = svg.viewBox.baseVal;
  return [...svg.querySelectorAll("text")].filter((node) => {
    const b = node.getBBox();
    return b.width && (b.x + node.getCTM().e / svg.getCTM().a < -1 || right(node) > box.width + 1);
  }).map((node) => node.textContent);
  function right(node) {
    const zoom = svg.getBoundingClientRect(), mine = node.getBoundingClientRect();
    return (mine.right - zoom.left) * box.width / zoom.width;
  }
}"""

OVERLAPS = """svg => {
  const boxes = [...svg.querySelectorAll("text")].map((node) => [node.textContent, node.getBoundingClientRect()]);
  const found = [];
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const tall = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (wide > 2 && tall > 5) found.push(`${a} / ${b}`);
  }));
  return found;
}"""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (480, "light")])
def test_no_label_is_clipped_or_covered(open_view, views, artifacts, name, width, scheme):
    page, view = open_view(name, width=width, scheme=scheme)
    expect(view.locator(".pi-picture > svg")).to_have_attribute(
        "width", str(WIDE if width == 1280 else NARROW)
    )
    for step in sorted({1, views[name].last_step // 2, views[name].cursor}):
        view.get_by_role("slider", name="Step").fill(str(step))
        expect(view).to_have_attribute("data-step", str(step))
        svg = view.locator(".pi-picture > svg")
        assert svg.evaluate(CLIPPED) == []
        assert svg.evaluate(OVERLAPS) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.screenshot(path=artifacts / f"view-{name}-{width}-{scheme}.png", full_page=True)
    ink = view.locator(".pi-picture .pi-h").first.evaluate("node => getComputedStyle(node).fill")
    assert ink == ("rgb(27, 36, 48)" if scheme == "light" else "rgb(230, 234, 240)")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_view, name, scheme):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed (extra: test)"
    )
    page, _ = open_view(name, scheme=scheme)
    found = axe.Axe().run(page, options={}).response
    serious = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert not serious, [(v["id"], v["nodes"][0]["html"][:200]) for v in serious]


def test_without_scripts_the_page_shows_the_picture(open_view, new_page, pages):
    page = new_page(java_script_enabled=False)
    page.goto(pages["compare"].as_uri())
    assert "part at step" in page.locator("noscript").first.inner_html()


def test_what_moves_glides_where_motion_is_welcome(new_page, tmp_path):
    view = FragmentationLab({"one": moving_run()}, step=1)
    page = new_page()
    page.goto(view.html(tmp_path / "page.html").as_uri())
    sheet = page.get_by_test_id("pi-sheet")
    count = "root => [...root.querySelectorAll('[data-k]')].flatMap(n => n.getAnimations()).length"
    for motion, glides in (("reduce", 0), ("no-preference", 1)):
        page.emulate_media(reduced_motion=motion)
        sheet.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect(sheet).to_have_attribute("data-step", "2")
        assert sheet.evaluate(count) == glides


def moving_run():
    """A holds blocks 0 and 1 and ends; in the next step B moves from 2 and 3 there."""
    made = HandMade(num_blocks=8, block_size=4, allocator="first-fit").submit("A", 8).submit("B", 6)
    tables = [ev.Alloc("A", 0, 0, (0, 1)), ev.Alloc("B", 0, 0, (2, 3))]
    made.step({"A": 8, "B": 6}, ev.Admit("A", ""), ev.Admit("B", ""), *tables, tokens="AB")
    made.finish("A", 0, 1)
    made.step({"B": 1}, ev.Move("B", 0, ((2, 0), (3, 1)), "compaction"), tokens="B")
    return made.recording
