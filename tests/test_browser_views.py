"""The views in a real browser, without Jupyter: the exported page, and the module on a model of our own."""

import base64
import json

import pytest

from pagedinfer.views import describe, export_html
from pagedinfer.views.assets import esm, style
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


# -- live, on a model of our own: the browser's `ask` goes to the Python view, its answer comes back --------------

HOST = """async ({ source, values, film }) => {
  const bytes = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer), listeners = {};
  Object.assign(values, { film: bytes(film), tail: null });
  let changed = [];
  const fire = (name) => (listeners['change:' + name] ?? []).forEach((act) => act());
  const model = {
    get: (name) => values[name], set(name, value) { values[name] = value; changed.push(name); },
    on(event, act) { (listeners[event] ??= []).push(act); }, off() {}, send() {},
    async save_changes() {
      const names = changed; changed = [];
      if (!names.includes('ask')) return;
      const reply = await window.kernel(values.ask);
      if (reply) window.receive(reply);
    },
  };
  window.receive = (reply) => {
    Object.assign(values, reply, { tail: bytes(reply.tail) });
    ['tail', 'cursor', 'answer'].forEach(fire);
  };
  const module = await import(URL.createObjectURL(new Blob([source], { type: 'text/javascript' })));
  window.cleanup = module.default.render({ model, el: document.getElementById('view') });
}"""


@pytest.fixture
def live(new_page, simulated_run):
    pytest.importorskip("anywidget", reason="the live view needs the extra 'view'")
    from pagedinfer.views import EngineView

    def state(view):
        tail = base64.b64encode(bytes(view.tail)).decode()
        return {"tail": tail, "answer": view.answer, "cursor": view.cursor}

    def start(advance=None, answers=True, **config):
        run = simulated_run(**config)
        view = EngineView(run.recording, (lambda: advance(run)) if advance else run.advance)
        page = new_page()
        page.set_content(
            f"<!doctype html><html lang=en><style>{style()}</style><main><div id=view></div></main></html>"
        )

        def kernel(ask):
            view.ask = ask
            return state(view) if answers else None

        page.expose_function("kernel", kernel)
        names = ("title", "panes", "live", "driving", "cursor", "selected", "answer", "ask")
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
