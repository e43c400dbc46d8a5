"""The views in a real browser, without Jupyter: the exported page, and the module on a model of our own."""

import base64
import json
import re
from types import SimpleNamespace

import pytest
from busy_runs import busy_run

from pagedinfer.errors import ConfigError
from pagedinfer.views import describe, export_html
from pagedinfer.views.assets import esm, style
from pagedinfer.views.budget import budget_words
from pagedinfer.views.film import film_of
from pagedinfer.views.memory import memory_words

pytestmark = pytest.mark.browser

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra: test)").expect


@pytest.fixture(scope="module")
def recording(simulated_run):
    return simulated_run(seed=3, num_blocks=32, prompts=(8, 90), outputs=(4, 40), max_num_seqs=6).finish()


@pytest.fixture(scope="module")
def exported(recording, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    texts = {rid: f"What {rid} said, <b>word</b> for word." for rid in recording.requests["request"]}
    return export_html(
        recording, path, texts=texts, summary={"requests": "14", "TTFT": "12 ms", "KV waste": "6.9 %"}
    )


@pytest.fixture
def open_view(new_page):
    def open_view(path, **options):
        page = new_page(**options)
        page.goto(path.as_uri())
        view = page.get_by_test_id("pi-view")
        view.wait_for()
        return page, view

    return open_view


def assert_clean(page):
    assert not page.errors, page.errors[:5]
    assert not page.external, page.external[:5]


def at(view, step):
    expect(view).to_have_attribute("data-step", str(step))


def linked(view, kind):
    nodes = view.locator(f"[{kind}].is-linked").evaluate_all(
        f"nodes => nodes.map(n => n.getAttribute('{kind}'))"
    )
    return sorted(set(nodes))


def test_keys_step_through_time(open_view, exported, recording):
    page, view = open_view(exported)
    view.focus()
    last = recording.last_step
    steps = [
        ("Home", 0),
        ("ArrowRight", 1),
        ("Shift+ArrowRight", 11),
        ("ArrowLeft", 10),
        (".", 11),
        (",", 10),
    ]
    for key, step in [
        *steps,
        ("End", last),
        ("ArrowRight", last),
        ("Shift+ArrowLeft", last - 10),
        ("Home", 0),
    ]:
        page.keyboard.press(key)
        at(view, step)
    expect(view.get_by_role("button", name="Step back")).to_be_disabled()
    view.get_by_role("button", name="Step forward").click()
    at(view, 1)
    assert_clean(page)


def test_slider_and_play(open_view, exported, recording):
    page, view = open_view(exported)
    slider = view.get_by_role("slider", name="Step")
    slider.fill("7")
    at(view, 7)
    assert slider.get_attribute("aria-valuetext") == f"step 7 of {recording.last_step}"
    slider.press("ArrowRight")
    at(view, 8)
    view.get_by_label("Speed").select_option("100")
    view.get_by_role("button", name="Play").click()
    at(view, recording.last_step)
    expect(view.get_by_role("button", name="Play")).to_be_visible()
    view.focus()
    page.keyboard.press("Space")  # at the end, playing begins again
    expect(view.get_by_role("button", name="Pause")).to_be_visible()
    page.keyboard.press("Space")
    expect(view.get_by_role("button", name="Play")).to_be_visible()
    assert_clean(page)


def test_every_number_shown_is_the_recordings(open_view, exported, recording):
    page, view = open_view(exported)
    film = film_of(recording)
    for step in range(0, recording.last_step + 1, 3):
        view.get_by_role("slider", name="Step").fill(str(step))
        at(view, step)
        state = recording.at(step)
        shown = view.locator("[data-block]").evaluate_all(
            "nodes => nodes.map(n => [n.dataset.owner ?? '', +(n.dataset.fill ?? 0)])"
        )
        owners = state.owners()
        fills = {rid: state.fill(rid) for rid in state.requests}
        expected = [
            [owners[b][0][0], fills[owners[b][0][0]][owners[b][0][1]]] if b in owners else ["", 0]
            for b in range(32)
        ]
        assert shown == expected
        expect(view.locator(".pi-say")).to_have_text(describe(recording, step))
        words = view.locator(".pi-card-memory .pi-sub").inner_text().replace("\u00a0", " ").replace(",", "")
        assert words == memory_words(film, step).replace(",", "")
        expect(view.locator(".pi-card-blocks .pi-sub")).to_contain_text(
            f"{len(state.ref_counts)} of 32 blocks in use"
        )
        for queue in ("running", "waiting"):
            expect(view.locator(".pi-queues")).to_contain_text(
                f"{queue.title()}: {len(getattr(state, queue))}"
            )
        for rid, why in state.last.reasons.items():
            if rid in state.waiting:
                expect(
                    view.locator(".pi-waiting li", has=page.locator(f"[data-request='{rid}']"))
                ).to_contain_text(why)


def test_a_click_on_a_block_lights_its_relatives_everywhere(open_view, exported, recording):
    page, view = open_view(exported)
    step = int(view.get_attribute("data-step"))
    state = recording.at(step)
    rid = state.running[1]
    table = state.requests[rid].block_table
    assert linked(view, "data-request") == linked(view, "data-block") == []
    view.locator(f"[data-block='{table[0]}']").click()
    assert linked(view, "data-request") == [rid]
    assert linked(view, "data-block") == sorted(map(str, table))
    expect(view.locator(".pi-rows .is-linked")).to_have_count(1)
    details = view.locator(".pi-details")
    expect(details).to_contain_text(f"block {table[0]}")
    expect(details.locator("tbody tr")).to_have_count(len(table))
    rows = details.locator("tbody tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.textContent.trim()))"
    )
    fill = state.fill(rid)
    assert [[row[0], row[1], row[3]] for row in rows] == [
        [str(i), str(b), f"{fill[i]}/16"] for i, b in enumerate(table)
    ]
    page.keyboard.press("ArrowRight")  # the mouse left the arrow keys to time
    at(view, step + 1)
    page.keyboard.press("Escape")
    assert linked(view, "data-request") == []
    view.locator(f".pi-chip[data-request='{rid}']").click()
    assert linked(view, "data-request") == [rid]
    assert_clean(page)


def test_a_click_in_the_timeline_selects_request_and_step(open_view, exported, recording):
    page, view = open_view(exported)
    row = view.locator(".pi-rows [data-request='R3']")
    row.scroll_into_view_if_needed()
    box = row.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.3, box["y"] + 10)
    assert linked(view, "data-request") == ["R3"]
    step = int(view.get_attribute("data-step"))
    assert 0 < step < recording.last_step
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 12)
    tip = view.locator(".pi-tip")
    expect(tip).to_contain_text("R3")
    expect(tip).to_contain_text(f"{step}")
    assert_clean(page)


def test_a_tip_does_not_outlive_its_step(open_view, exported):
    page, view = open_view(exported)
    view.locator("[data-block='5']").hover()
    expect(view.locator(".pi-tip")).to_contain_text("block 5")
    view.focus()
    page.keyboard.press("ArrowRight")
    expect(view.locator(".pi-tip")).to_be_hidden()
    assert_clean(page)


def test_the_keyboard_reaches_blocks_and_requests(open_view, exported, recording):
    page, view = open_view(exported)
    step = view.get_attribute("data-step")
    view.locator("[data-block='0']").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
    at(view, step)
    assert page.evaluate("document.activeElement.dataset.block") == "16"
    page.keyboard.press("Enter")
    expect(view.locator("[data-block='16']")).to_have_attribute("aria-pressed", "true")
    expect(view.locator(".pi-tip")).to_contain_text("block 16")
    page.keyboard.press("Escape")
    expect(view).to_be_focused()
    view.locator(".pi-rows [tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert linked(view, "data-request") == [page.evaluate("document.activeElement.dataset.request")]
    at(view, step)
    assert_clean(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 480])
def test_it_is_accessible_and_fits(open_view, exported, artifacts, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    page, view = open_view(exported, width=width, scheme=scheme)
    page.screenshot(path=artifacts / f"views-{scheme}-{width}.png", full_page=True)
    view.locator("[data-block='12']").click()
    page.screenshot(path=artifacts / f"views-{scheme}-{width}-selected.png", full_page=True)
    found = Axe().run(page, options={})
    serious = [x["id"] for x in found.response["violations"] if x["impact"] in ("serious", "critical")]
    assert not serious, found.generate_report()
    assert any(x["id"] == "color-contrast" for x in found.response["passes"]), "contrast was not checked"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling"
    assert page.evaluate(CLIPPED) == []
    assert_clean(page)


# Labels that leave the view, and text cut by its own box.
CLIPPED = """() => {
  const view = document.querySelector('[data-testid=pi-view]').getBoundingClientRect(), bad = [];
  for (const t of document.querySelectorAll('.pi-view svg text')) {
    const b = t.getBoundingClientRect();
    if (b.width && (b.left < view.left || b.right > view.right + 1)) bad.push(t.textContent);
  }
  for (const t of document.querySelectorAll('.pi-view :is(h3, .pi-sub, .pi-say, dt, dd, button, output)'))
    if (t.scrollWidth > t.clientWidth + 1 && getComputedStyle(t).display !== 'inline') bad.push(t.textContent);
  return bad;
}"""


def test_without_javascript_the_page_shows_the_pictures(new_page, exported):
    page = new_page(java_script_enabled=False)
    page.goto(exported.as_uri())
    svg = page.locator("noscript svg, main svg").first
    expect(svg).to_be_visible()
    assert svg.bounding_box()["height"] > 400
    expect(page.get_by_role("row", name="R1 What")).to_be_visible()
    assert_clean(page)


def test_a_big_pool_is_drawn_on_a_canvas(open_view, simulated_run, tmp_path, artifacts):
    run = simulated_run(
        num_blocks=4096, requests=30, prompts=(100, 900), max_num_batched_tokens=512, max_num_seqs=24
    )
    recording = run.finish()
    page, view = open_view(export_html(recording, tmp_path / "big.html"))
    step = int(view.get_attribute("data-step"))
    state = recording.at(step)
    canvas = view.locator("canvas")
    expect(canvas).to_have_count(1)
    rid = state.running[0]
    block = state.requests[rid].block_table[0]
    box = view.evaluate(
        "v => { const c = v.querySelector('canvas'); return [c.clientWidth, c.clientHeight]; }"
    )
    view.locator(f".pi-rows [data-request='{rid}'] text").first.click()
    assert linked(view, "data-request") == [rid]
    spot = view.locator(".pi-spot")
    spot.focus()
    page.keyboard.press("Home")
    columns = None
    page.keyboard.press("ArrowDown")
    columns = int(spot.get_attribute("data-block"))
    assert columns > 8
    cell = box[0] / columns
    rows = -(-4096 // columns)
    x, y = (block % columns + 0.5) * cell, (block // columns + 0.5) * box[1] / rows
    canvas.click(position={"x": x, "y": y})
    expect(view.locator(".pi-details")).to_contain_text(f"block {block}")
    expect(spot).to_have_attribute("data-block", str(block))
    assert rid in spot.get_attribute("aria-label")
    assert "is-linked" in spot.get_attribute("class")
    page.screenshot(path=artifacts / "views-4096-blocks.png", full_page=True)
    assert_clean(page)


@pytest.fixture(scope="module")
def every_state(everything, tmp_path_factory):
    return export_html(everything, tmp_path_factory.mktemp("page") / "states.html", step=1)


def test_every_state_of_a_block_is_told_and_drawn(open_view, every_state, artifacts):
    page, view = open_view(every_state)
    states = view.locator(".pi-grid [data-block]").evaluate_all("nodes => nodes.map(n => n.dataset.state)")
    expected = {0: "shared", 3: "used", 9: "used", 10: "reserved", 16: "pinned", 20: "cached", 5: "free"}
    assert {block: states[block] for block in expected} == expected
    expect(view.locator("[data-block='0']")).to_have_attribute("aria-label", "block 0, A, 4 of 4, 2 users")
    expect(view.locator("[data-block='20']")).to_have_attribute(
        "aria-label", "block 20, cached, idle: nobody uses it"
    )
    for explained in ("shared (× users)", "cached, idle", "reserved, unused"):
        expect(view.locator(".pi-card-blocks .pi-legend")).to_contain_text(explained)
    expect(view.locator(".pi-host")).to_have_text("Host memory holds 2 blocks: C 2")
    expect(view.locator(".pi-card-queues .pi-sub")).to_have_text("3 running, 0 waiting, 1 swapped out")
    expect(view.locator(".pi-waiting")).to_contain_text(["", "swapped out for B, which needs 2 blocks"])
    parts = view.locator(".pi-memory [data-part]").evaluate_all("nodes => nodes.map(n => n.dataset.part)")
    assert parts == ["live", "shared", "slack", "reserved", "cached"]
    page.screenshot(path=artifacts / "views-states.png", full_page=True)
    assert_clean(page)


def test_a_shared_block_lights_its_owners_and_its_chain(open_view, every_state):
    page, view = open_view(every_state)
    view.locator(".pi-grid [data-block='1']").click()
    assert linked(view, "data-request") == ["A", "B"]
    assert linked(view, "data-block") == ["0", "1", "2", "3", "4"]
    expect(view.locator(".pi-piece.is-linked")).to_have_count(2)
    expect(view.locator(".pi-rows .is-linked")).to_have_count(2)
    expect(view.locator(".pi-chip.is-linked")).to_have_count(2)
    chained = view.locator("[data-chain].is-chained").evaluate_all(
        "nodes => nodes.map(n => +n.dataset.chain)"
    )
    assert sorted(chained) == [0, 1, 2, 20, 21]
    expect(view.locator(".pi-details")).to_contain_text("A and B")
    expect(view.locator(".pi-details")).to_contain_text("key 2, after key 1")
    page.keyboard.press("Escape")
    view.locator("[data-chain='23']").focus()
    page.keyboard.press("Enter")
    expect(view.locator(".pi-grid [data-block='23']")).to_have_attribute("aria-pressed", "true")
    expect(view.locator(".pi-details")).to_contain_text("cached, idle: nobody uses it")
    assert_clean(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 480])
def test_every_state_is_accessible(open_view, every_state, artifacts, scheme, width):
    from axe_playwright_python.sync_playwright import Axe

    page, view = open_view(every_state, width=width, scheme=scheme)
    view.locator(".pi-grid [data-block='1']").click()
    page.screenshot(path=artifacts / f"views-states-{scheme}-{width}.png", full_page=True)
    found = Axe().run(page, options={})
    serious = [x["id"] for x in found.response["violations"] if x["impact"] in ("serious", "critical")]
    assert not serious, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "no sideways scrolling"
    assert page.evaluate(CLIPPED) == []
    assert_clean(page)


def test_the_budget_bar_holds_the_steps_tokens(open_view, exported, recording):
    page, view = open_view(exported)
    film = film_of(recording)
    for step in range(0, recording.last_step + 1, 7):
        view.get_by_role("slider", name="Step").fill(str(step))
        at(view, step)
        pieces = view.locator(".pi-piece").evaluate_all(
            "nodes => nodes.map(n => [n.dataset.request, +n.dataset.tokens])"
        )
        assert dict(pieces) == recording.at(step).last.scheduled
        said = view.locator(".pi-card-budget .pi-sub").inner_text()
        assert said == budget_words(film.frame(step))
    view.get_by_role("slider", name="Step").fill("20")
    view.locator(".pi-piece").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert linked(view, "data-request") == [page.evaluate("document.activeElement.dataset.request")]
    assert_clean(page)


def test_stepping_does_not_move_the_panes(open_view, exported, recording):
    page, view = open_view(exported)
    tops = set()
    for step in range(0, recording.last_step + 1, 5):
        view.get_by_role("slider", name="Step").fill(str(step))
        at(view, step)
        tops.add(view.locator(".pi-card-timeline").bounding_box()["y"])
    assert len(tops) == 1
    assert_clean(page)


def test_dragging_over_the_memory_chart_goes_along(open_view, exported):
    page, view = open_view(exported)
    chart = view.locator(".pi-memory")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.mouse.down()
    first = int(view.get_attribute("data-step"))
    page.mouse.move(box["x"] + 400, box["y"] + 60, steps=5)
    page.mouse.up()
    assert int(view.get_attribute("data-step")) > first
    assert_clean(page)


def test_a_million_blocks_do_not_hang_the_page(open_view, huge_pool, tmp_path, artifacts):
    page, view = open_view(export_html(huge_pool(1_000_000, 300_000), tmp_path / "huge.html", request="A"))
    expect(view.locator(".pi-card-blocks .pi-sub").first).to_have_text(
        "300,000 of 1,000,000 blocks in use, 16 tokens each; 512 blocks a cell, live slots in a cell: least 0 %, "
        "mean 30 %, most 100 %"
    )
    spot = view.locator(".pi-spot")
    spot.focus()
    page.keyboard.press("ArrowDown")
    first = int(spot.get_attribute("data-block"))
    assert first % 512 == 0
    assert spot.get_attribute("aria-label") == (
        f"blocks {first} to {first + 511}: 100\u00a0% of token slots live, 512 in use"
    )
    page.keyboard.press("Enter")
    expect(view.locator(".pi-details")).to_contain_text(f"block {first}")
    page.screenshot(path=artifacts / "views-million-blocks.png", full_page=True)
    assert_clean(page)


def test_ten_thousand_steps_and_a_crowd_of_requests_stay_small_in_the_page(open_view, crowd, tmp_path):
    page, view = open_view(export_html(crowd(10_000, 3_000), tmp_path / "long.html", step=0))
    view.focus()
    for key, step in (
        ("End", 9_999),
        ("Home", 0),
        ("End", 9_999),
        ("ArrowLeft", 9_998),
        ("Shift+ArrowLeft", 9_988),
    ):
        page.keyboard.press(key)
        at(view, step)
    assert view.locator(".pi-rows .pi-row").count() <= 120, "rows that cannot be seen are not in the page"
    expect(view.locator(".pi-card-timeline .pi-crowd")).to_contain_text("more requests")
    view.locator(".pi-slider").fill("5000")
    at(view, 5_000)
    assert view.locator("*").count() < 6_000
    assert_clean(page)


# -- live, on a model of our own: the browser's `ask` goes to the Python view, its answer comes back --------------

HOST = """async ({ source, values, film }) => {
  const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer), listeners = {};
  Object.assign(values, { film: bytes(film), tail: null });
  const fire = (name) => (listeners['change:' + name] ?? []).forEach((act) => act());
  const model = {
    get: (name) => values[name], set(name, value) { values[name] = value; },
    on(event, act) { (listeners[event] ??= []).push(act); },
    off(event, act) { listeners[event] = (listeners[event] ?? []).filter((other) => other !== act); },
    async send({ state }) {
      if (!('ask' in state)) return;
      const reply = await window.kernel(values.ask, values.cursor);
      if (reply) window.receive(reply);
    },
  };
  window.receive = (reply) => {
    Object.assign(values, reply, { tail: bytes(reply.tail) });
    ['cursor', 'tail', 'breaks', 'answer'].forEach(fire);  // the cursor first, as in JupyterLab
  };
  const module = await import(URL.createObjectURL(new Blob([source], { type: 'text/javascript' })));
  const el = document.getElementById('view');
  module.default.render({ model, el });
  window.again = () => {
    el.replaceChildren();  // the old view is not told yet, as in Jupyter
    module.default.render({ model, el });
  };
}"""


@pytest.fixture
def live(new_page, simulated_run):
    pytest.importorskip("anywidget", reason="the live view needs the extra 'view'")
    from pagedinfer.views import EngineView

    def state(view):
        tail = base64.b64encode(bytes(view.tail)).decode()
        return {"tail": tail, "answer": view.answer, "cursor": view.cursor, "breaks": view.breaks}

    def start(advance=None, answers=True, watch=None, **config):
        run = simulated_run(**config)
        watch = watch and watch(run)
        stops = watch.stops if watch else ()
        view = EngineView(
            run.recording, (lambda: advance(run)) if advance else run.advance, watch=watch, stops=stops
        )
        if watch:
            view._advance = watch.advance
        page = new_page()
        page.set_content(
            f"<!doctype html><html lang=en><style>{style()}</style><main><div id=view></div></main></html>"
        )

        def kernel(ask, cursor):
            view.cursor = cursor
            view.ask = ask
            return state(view) if answers else None

        page.expose_function("kernel", kernel)
        names = (
            "title",
            "panes",
            "live",
            "driving",
            "cursor",
            "selected",
            "answer",
            "ask",
            "watching",
            "breaks",
        )
        film = base64.b64encode(bytes(view.film)).decode()
        page.evaluate(
            HOST, {"source": esm(), "film": film, "values": {name: getattr(view, name) for name in names}}
        )
        return page, page.get_by_test_id("pi-view"), run, view, state

    return start


def test_stepping_at_the_end_steps_the_engine(live):
    page, shown, run, _, _ = live()
    at(shown, 0)
    expect(shown.locator(".pi-live-badge")).to_be_visible()
    shown.focus()
    page.keyboard.press("ArrowRight")
    at(shown, 1)
    page.keyboard.press("Shift+ArrowRight")
    at(shown, 11)
    assert run.scheduler.step == 11
    page.keyboard.press("Shift+ArrowLeft")
    at(shown, 1)
    page.keyboard.press("ArrowRight")
    at(shown, 2)
    assert run.scheduler.step == 11, "within what is known nobody asks the kernel"
    expect(shown.locator(".pi-say")).to_have_text(describe(run.recording, 2))
    assert_clean(page)


def test_playing_advances_while_requests_are_unfinished_and_stops_at_the_end(live):
    page, shown, run, _, _ = live(requests=6, outputs=(4, 20))
    shown.get_by_label("Speed").select_option("30")
    shown.get_by_role("button", name="Play").click()
    expect(shown).not_to_have_attribute("data-step", "0")
    assert run.unfinished
    expect(shown.get_by_role("button", name="Play")).to_be_visible(timeout=20_000)
    assert not run.unfinished
    at(shown, run.recording.last_step)
    assert_clean(page)


def test_frames_pushed_by_python_are_followed_unless_one_looks_back(live):
    page, shown, _, view, state = live()
    view.step(4)
    page.evaluate("reply => window.receive(reply)", state(view))
    at(shown, 4)
    shown.focus()
    page.keyboard.press("ArrowLeft")
    at(shown, 3)
    view.cursor = 3  # the model would have told
    view.step(2)
    page.evaluate("reply => window.receive(reply)", state(view))
    expect(shown).to_have_attribute("data-last", "6")
    at(shown, 3)


def test_a_view_that_jupyter_draws_anew_goes_on_where_it_was(live):
    page, shown, run, _, _ = live()
    shown.get_by_label("Speed").select_option("100")
    shown.focus()
    page.keyboard.press("Space")
    expect(shown).not_to_have_attribute("data-step", "0")
    page.keyboard.press("Space")  # the pause keeps a picture: the output is drawn anew
    expect(shown.get_by_role("button", name="Play")).to_be_visible()
    step = run.scheduler.step
    at(shown, step)
    page.keyboard.press("ArrowLeft")
    at(shown, step - 1)
    page.evaluate("window.again()")
    at(shown, step - 1)
    expect(shown).to_have_attribute("data-last", str(step))
    expect(shown).to_be_focused()
    expect(shown.get_by_label("Speed")).to_have_value("100")
    page.keyboard.press("ArrowRight")
    at(shown, step)
    page.evaluate("window.again()")
    shown.get_by_role("button", name="Step forward").click()
    at(shown, step + 1)  # and it follows the engine
    assert run.scheduler.step == step + 1
    assert_clean(page)


def test_lost_lines_are_asked_for(live):
    page, shown, run, view, state = live()
    view.step(3)
    view.step(3)  # the first message never arrived
    assert json.loads(bytes(view.tail).split(b"\n")[0])["from"] == 3
    page.evaluate("reply => window.receive(reply)", state(view))
    at(shown, 6)
    assert run.scheduler.step == 6


def test_a_failing_engine_says_so_in_the_view(live):
    def advance(run):
        if run.scheduler.step == 2:
            raise RuntimeError("the model is gone")
        return run.advance()

    page, shown, *_ = live(advance)
    shown.get_by_label("Speed").select_option("100")
    shown.get_by_role("button", name="Play").click()
    expect(shown.get_by_role("alert")).to_have_text("RuntimeError: the model is gone")
    expect(shown.get_by_role("button", name="Play")).to_be_visible()
    at(shown, 2)
    assert_clean(page)


def test_a_silent_kernel_is_called_disconnected(live):
    page, shown, *_ = live(answers=False)
    page.clock.install()
    shown.get_by_role("button", name="Step forward").click()
    expect(shown.get_by_role("alert")).to_be_hidden()
    page.clock.fast_forward(6_000)
    expect(shown.get_by_role("alert")).to_contain_text("disconnected")
    assert_clean(page)


class Threshold:
    """Stands for a session's breakpoints: "free < N" is all it can read."""

    def __init__(self, run):
        self.run, self.texts, self.stops = run, [], []

    def add(self, text):
        if not re.fullmatch(r"free < \d+", text):
            raise ConfigError(f'"{text}" cannot be read: write "free < 4".')
        self.texts.append(text)
        return text

    def remove(self, text):
        self.texts.remove(text)

    def __iter__(self):
        return iter(self.texts)

    def advance(self):
        more, free = self.run.advance(), len(self.run.recording.at(-1).free)
        for text in self.texts:
            if free < int(text.split()[-1]):
                cause = f"{free} blocks are free"
                self.stops.append(SimpleNamespace(step=self.run.scheduler.step, cause=cause, watch=text))
        return more and not (self.stops and self.stops[-1].step == self.run.scheduler.step)


def test_a_condition_stops_the_run_and_is_marked(live, artifacts):
    page, shown, run, _, _ = live(watch=Threshold, num_blocks=16, requests=10)
    box = shown.get_by_label("Stop when", exact=True)
    box.fill("free fewer than two")
    box.press("Enter")
    expect(shown.locator(".pi-wrong")).to_have_text('"free fewer than two" cannot be read: write "free < 4".')
    expect(box).to_have_attribute("aria-invalid", "true")
    box.fill("free < 4")
    shown.get_by_role("button", name="Add").click()
    expect(shown.locator(".pi-wrong")).to_be_hidden()
    expect(shown.locator(".pi-break-list code")).to_have_text("free < 4")
    expect(box).to_have_value("")
    at(shown, 0)  # the keys in the box moved nothing
    shown.get_by_label("Speed").select_option("100")
    shown.get_by_role("button", name="Play").click()
    expect(shown.locator(".pi-notice")).to_contain_text("Stop at step")
    step = run.scheduler.step
    at(shown, step)
    assert run.unfinished
    free = len(run.recording.at(step).free)
    expect(shown.locator(".pi-notice")).to_have_text(f"Stop at step {step}: {free} blocks are free")
    expect(shown.get_by_role("button", name="Play")).to_be_visible()
    expect(shown.locator(".pi-axis [data-stop]")).to_have_attribute("data-stop", str(step))
    expect(shown.locator(".pi-live-badge")).to_have_text("live")
    page.screenshot(path=artifacts / "views-stopped.png", full_page=True)
    shown.focus()
    page.keyboard.press("Home")
    expect(shown.locator(".pi-notice")).to_be_hidden()
    shown.get_by_role("button", name="Next stop").click()
    at(shown, step)
    page.keyboard.press("Home")
    shown.get_by_role("button", name="Play").click()
    at(shown, step)  # playing what is known stops there, too
    expect(shown.get_by_role("button", name="Play")).to_be_visible()
    shown.get_by_role("button", name="Remove free < 4").click()
    expect(shown.locator(".pi-break-list li")).to_have_count(0)  # it stops nothing any more
    expect(shown.locator(".pi-axis [data-stop]")).to_have_attribute("data-stop", str(step))  # and has been
    assert_clean(page)


def test_without_anybody_to_ask_there_is_no_box(open_view, exported):
    page, view = open_view(exported)
    expect(view.locator(".pi-breaks")).to_be_hidden()
    assert_clean(page)


def test_the_queues_keep_the_room_of_the_fullest_step_and_no_more(new_page, tmp_path):
    rooms = []
    for requests in (3, 24):
        run = busy_run(requests=requests, num_blocks=16)
        page = new_page()
        page.goto(export_html(run, tmp_path / f"{requests}.html", step=0).as_uri())
        page.locator(".pi-view").focus()
        queues = page.locator(".pi-card-queues > .pi-queues")
        heights = set()
        for _ in range(20):
            heights.add(queues.evaluate("node => node.clientHeight"))
            page.keyboard.press("ArrowRight")
        assert len(heights) == 1, "nothing below it moves"
        rooms += heights
    assert 40 < rooms[0] < 130 < rooms[1] == 180
