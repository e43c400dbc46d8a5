"""Every view in a real browser, light and dark, on a projector and on a phone: screenshots to look at, kept by CI.

What a machine can see is checked too: no label clipped or covered, no sideways scrolling, nothing asked of a network.
"""

import pytest
from busy_runs import busy_run

from pagedinfer.sim.fork import fork
from pagedinfer.views import (
    PANES,
    AttentionView,
    BatchComposition,
    FragmentationLab,
    Latency,
    PrefixTree,
    RunComparison,
    SamplingView,
    export_html,
    picture_svg,
)

pytestmark = pytest.mark.browser

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: test)")

ALLOCATORS = ("paged", "first-fit", "buddy", "reserve-max")


@pytest.fixture(scope="module")
def run():
    """Requests that share, wait, are swapped out and preempted."""
    return busy_run(num_blocks=32, watermark=0.0, num_host_blocks=12, preempt_mode="cheaper")


@pytest.fixture(scope="module")
def tapped():
    """A tap on a tiny model, with two requests."""
    pytest.importorskip("torch", reason="torch is not installed (extra: engine)")
    import pagedinfer

    llm = pagedinfer.LLM("tiny", num_blocks=40, block_size=4)
    with pagedinfer.Session(llm) as session:
        tap = session.tap(tokenizer=llm.tokenizer)
        session.submit("The attention of the last token", max_tokens=12, temperature=0.9, top_p=0.9, seed=3)
        session.submit("Greedy", max_tokens=9, temperature=0.0, repetition_penalty=1.2)
        session.run()
        yield tap


def engine_page(recording, path, panes=PANES, request=None, step=None):
    return export_html(recording, path, panes=panes, request=request, step=step, title="Inside the engine")


def busiest(recording):
    """The step with the most blocks in use among those in which somebody waits or is swapped out."""
    said = [
        (bool(s.swapped) + bool(s.waiting), len(s.ref_counts), s.step)
        for s in recording.states()
        if s.running
    ]
    return max(said)[-1]


PAGES = {
    "engine": lambda run, path: engine_page(run, path, step=busiest(run), request=run.at(busiest(run)).running[0]),
    "map": lambda run, path: engine_page(run, path, ("blocks", "details"), step=busiest(run)),
    **{
        pane: (lambda run, path, pane=pane: engine_page(run, path, (pane,), step=busiest(run)))
        for pane in ("queues", "budget", "chains", "timeline", "memory")
    },
    "latency": lambda run, path: Latency(run, slo={"TTFT": 12, "ITL": 2}).html(path),
    "batch": lambda run, path: BatchComposition(run, step=busiest(run)).html(path),
    "prefix": lambda run, path: PrefixTree(run, step=busiest(run)).html(path),
    "compare": lambda run, path: RunComparison(run, fork(run, 12, victim="largest", max_num_seqs=4)).html(path),
    "fragmentation": lambda run, path: FragmentationLab(
        [busy_run(requests=20, allocator=name) for name in ALLOCATORS], step=58
    ).html(path),
}  # fmt: skip

# Labels that leave their picture's frame or the page, lie on each other, or are cut by their own box.
WRONG = """() => {
  const bad = [], room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > room) bad.push("the page scrolls sideways");
  for (const svg of document.querySelectorAll("svg")) {
    const said = [...svg.querySelectorAll("text")].filter((t) => t.checkVisibility())
      .map((t) => [t.textContent, t.getBoundingClientRect()]).filter(([, b]) => b.width);
    for (const [words, b] of said) if (b.left < -1 || b.right > room + 1) bad.push(`cut: ${words}`);
    said.forEach(([a, p], i) => said.slice(i + 1).forEach(([b, q]) => {
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const tall = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 2 && tall > 5) bad.push(`${a} over ${b}`);
    }));
  }
  for (const t of document.querySelectorAll(".pi-view :is(h3, .pi-sub, .pi-say, dt, dd, button, output, li, p)"))
    if (t.scrollWidth > t.clientWidth + 1 && t.clientWidth > 1 && getComputedStyle(t).display !== "inline")
      bad.push(`cut: ${t.textContent}`);
  return bad;
}"""


def shoot(page, artifacts, name):
    """Screenshots in both themes and widths. Returns what is wrong in any of them."""
    wrong = []
    for width in (1280, 480):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(60)  # a ResizeObserver draws anew in the next frame
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=artifacts / f"gallery-{name}-{width}-{scheme}.png", full_page=True)
        wrong += [f"{width}: {words}" for words in page.evaluate(WRONG)]
    return wrong


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_every_view(new_page, artifacts, run, tmp_path, name):
    page = new_page()
    page.goto(PAGES[name](run, tmp_path / "page.html").as_uri())
    page.locator(".pi-view").wait_for()
    assert shoot(page, artifacts, name) == []
    assert not page.errors
    assert not page.external


def test_a_density_map(new_page, artifacts, huge_pool, tmp_path):
    page = new_page()
    page.goto(engine_page(huge_pool(1_000_000, 300_000), tmp_path / "huge.html", request="A").as_uri())
    page.locator(".pi-view").wait_for()
    assert shoot(page, artifacts, "density") == []


@pytest.mark.parametrize("make", [AttentionView, SamplingView])
@pytest.mark.parametrize("request_id", ["r0", "r1"])
def test_a_page_of_what_a_tap_saw(new_page, artifacts, tapped, tmp_path, make, request_id):
    page = new_page()
    page.goto(make(tapped, request=request_id).html(tmp_path / "page.html").as_uri())
    page.locator(".pi-view").wait_for()
    assert shoot(page, artifacts, f"{make.__name__.lower()}-{request_id}") == []
    page.keyboard.press("Home")
    assert shoot(page, artifacts, f"{make.__name__.lower()}-{request_id}-first") == []
    assert not page.errors
    assert not page.external


def test_the_static_picture(new_page, artifacts, run):
    page = new_page()
    step = busiest(run)
    picture = picture_svg(run, step, run.at(step).running[0], PANES)
    page.set_content(f"<!doctype html><body style='margin:8px'>{picture}</body>")
    assert [words for words in shoot(page, artifacts, "static") if words.startswith("1280")] == []
