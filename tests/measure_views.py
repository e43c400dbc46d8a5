"""What the views cost, measured; by hand, on a quiet machine (about five minutes):

    python tests/measure_views.py

prints the table that stands in the README, with the load that the machine had. Times are medians; the overhead is a
ratio within one run, in which stretches with and without a view alternate; on a busy machine only the processor time
says something, for the browser and the engine then take turns.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from conftest import CHROMIUM_ARGS
from playwright.sync_api import sync_playwright
from test_browser_lab import ERRORS, IDLE, IN_KERNEL, notebook, running_lab

from pagedinfer import Recorder, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.views import export_html
from pagedinfer.views.film import film_of


def long_run(num_blocks, steps, seats=64, seed=1):
    """A recording of `steps` steps with a full batch, its last step, and the length of each message of a live view."""
    chance = random.Random(seed)
    config = EngineConfig(
        num_blocks=num_blocks, max_num_seqs=seats, max_model_len=4096, max_num_batched_tokens=512
    )
    engine, number = Engine(config, SimulatedRunner()), 0
    with Recorder(engine) as recording:
        for _ in range(steps):
            while len(engine.scheduler.requests) < seats + 4:
                number += 1
                params = SamplingParams(
                    max_tokens=chance.randint(400, 2000), ignore_eos=True, detokenize=False
                )
                engine.add_request([number % 256, number // 256] * chance.randint(50, 750), params)
            engine.step()
    return recording


def message_bytes(recording, every=1):
    """Bytes of the message that a live view sends for each of the last 500 steps: the new lines and the answer."""
    film = film_of(recording)
    answer = len(json.dumps({"id": time.time_ns(), "more": True, "error": ""}))
    last = recording.last_step
    return [
        len(film.encode(step)) - len(film.encode(step + 1)) + answer
        for step in range(last - 500, last, every)
    ]


@contextmanager
def browser():
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGS)
        yield chromium
        chromium.close()


# Each act is timed until the second frame after it has begun: then it has been painted.
TIMED = """async ([acts, count]) => {
  const view = document.querySelector("[data-testid=pi-view]"), slider = view.querySelector(".pi-slider");
  const frame = () => new Promise(requestAnimationFrame);
  const press = (key) => view.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const jump = () => {
    slider.value = Math.floor(Math.random() * (+slider.max + 1));
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const doing = { step: () => press("ArrowRight"), back: () => press("ArrowLeft"), jump }, out = {};
  slider.value = slider.max / 2;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  for (const act of acts) {
    const script = [], painted = [];
    for (let i = 0; i < count; i++) {
      await frame();
      const begun = performance.now();
      doing[act]();
      script.push(performance.now() - begun);
      await frame(); await frame();
      painted.push(performance.now() - begun);
    }
    out[act] = [script, painted];
  }
  slider.value = slider.max / 2;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  const begun = performance.now();
  let frames = 0;
  while (performance.now() - begun < 5000) { press("ArrowRight"); await frame(); frames++; }
  out.rate = (1000 * frames) / (performance.now() - begun);
  return out;
}"""


def scrubbing(page_path):
    """Opens an exported page: seconds until it shows its step, then milliseconds of each act and frames per second."""
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        begun = time.perf_counter()
        page.goto(page_path.as_uri(), wait_until="commit")
        page.locator("[data-testid=pi-view][data-step]").wait_for()
        opened = time.perf_counter() - begun
        return opened, page.evaluate(TIMED, [["step", "back", "jump"], 60])


KERNEL = """
import statistics, time
import pagedinfer
from pagedinfer.views import Latency, PrefixTree
from pagedinfer.views.driver import drive

llm = pagedinfer.LLM("tiny", num_blocks=1024, max_num_seqs=8)
session = pagedinfer.Session(llm)
for number in range(80):
    session.submit(f"request number {number}", temperature=0.0, max_tokens=1900, ignore_eos=True)
view = session.view()

class Timed:  # the view, with the time that it takes of the kernel's
    frames, seconds, wall = 0, 0.0, 0.0
    begin, end = view.begin, view.end
    def follow(self):
        begun, sent = time.thread_time(), view._sent
        go_on = view.follow()
        if view._sent != sent:
            Timed.frames += 1
            Timed.seconds += time.thread_time() - begun
        return go_on

async def mean_step(views, steps):
    starts = []
    def advance():
        starts.append(time.perf_counter())
        return session.advance()
    await drive(advance, views, steps)
    Timed.wall += (starts[-1] - starts[0]) * len(views)
    return (starts[-1] - starts[0]) / (len(starts) - 1)

async def compare(rounds, steps):
    await mean_step([Timed()], 20)
    Timed.frames, Timed.seconds, Timed.wall = 0, 0.0, 0.0
    pairs = [(await mean_step([], steps), await mean_step([Timed()], steps)) for _ in range(rounds)]
    without, with_view = (statistics.median(part) for part in zip(*pairs))
    ratio, cost = statistics.median(b / a for a, b in pairs), 1000 * Timed.seconds / (rounds * steps)
    print(1000 * without, 1000 * with_view, ratio, cost, Timed.frames / (Timed.wall or 1))
"""

SLOW = (
    "() => { setInterval(() => { const t = performance.now(); while (performance.now() - t < 400); }, 450); }"
)


def overhead(rounds, steps, cells, slow):
    """In JupyterLab: ms of a step of the tiny model without views and with some that follow, and the ratio."""
    folder = Path(tempfile.mkdtemp(prefix="pagedinfer-measure-"))
    try:
        with running_lab(folder) as (address, root), browser() as chromium:
            (root / "n.ipynb").write_text(notebook(KERNEL, *cells))
            page = chromium.new_page(viewport={"width": 1280, "height": 1500 * len(cells)})
            page.goto(f"{address}/doc/workspaces/n/tree/n.ipynb")
            page.wait_for_function(IDLE, timeout=90_000)
            done = page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
            assert done, page.evaluate(ERRORS)
            page.get_by_test_id("pi-view").wait_for()
            if slow:
                page.evaluate(SLOW)
            said = page.evaluate(IN_KERNEL, f"await compare({rounds}, {steps})")
            return [float(word) for word in said.split()]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def recorded_rows(num_blocks, steps):
    """What a long recording costs: to make, to send, to look at."""
    what, begun = f"{num_blocks:,} blocks and {steps:,} steps", time.perf_counter()
    recording = long_run(num_blocks, steps)
    ran = time.perf_counter()
    film = film_of(recording)
    filmed = time.perf_counter()
    yield f"a run of {what}, without a model", f"{1000 * (ran - begun) / steps:.2f} ms a step"
    size = f"{1e-6 * len(film.encode()):.1f} MB"
    yield f"its film for the browser, {size}", f"{1000 * (filmed - ran) / steps:.2f} ms a step"
    sizes = message_bytes(recording)
    yield "a frame of a live view", f"{statistics.median(sizes):,.0f} bytes (at most {max(sizes):,})"
    with tempfile.TemporaryDirectory() as folder:
        opened, timed = scrubbing(export_html(recording, Path(folder) / "page.html"))
    yield "its exported page, opened", f"{opened:.1f} s"
    for act, name in (("step", "a step forward"), ("back", "a step back"), ("jump", "a jump anywhere")):
        script, painted = map(statistics.median, timed[act])
        yield f"{name} in it", f"{script:.0f} ms of script, painted after {painted:.0f} ms"
    yield "frames a second, stepping as fast as it goes", f"{timed['rate']:.0f}"


LIVE = {
    "a view that follows": (("view",), False),
    "a view in a page that is busy 90 % of the time": (("view",), True),
    "engine view, latency and prefix tree that follow": (
        ("view", "Latency(session)", "PrefixTree(session)"),
        False,
    ),
}


def live_rows(rounds):
    """What views that follow cost an engine."""
    for name, (cells, slow) in LIVE.items():
        without, with_views, ratio, cost, rate = overhead(rounds, 800, cells, slow)
        yield (
            f"a step of `tiny` without and with {name}",
            f"{without:.1f} and {with_views:.1f} ms, ratio {ratio:.2f}",
        )
        yield (
            "of these, processor time in the kernel for it",
            f"{cost:.2f} ms a step, {rate:.0f} frames a second",
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--blocks", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=4, help="stretches with and without a view")
    options, load = parser.parse_args(), os.getloadavg()[0]
    rows = [*recorded_rows(options.blocks, options.steps), *live_rows(options.rounds)]
    print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores\n")
    print("| what | measured |\n|---|---|")
    for what, value in rows:
        print(f"| {what} | {value} |")


if __name__ == "__main__":
    main()
