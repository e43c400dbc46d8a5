"""Views of a run that goes on: drawn at any moment, also inside a step, they are those of what has been told so far."""

import random
import xml.etree.ElementTree as ET

import pytest
from busy_runs import busy_engine
from handmade import HandMade

from pagedinfer import Recorder
from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import ConfigError, readable
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace import events as ev
from pagedinfer.trace.recording import Recording
from pagedinfer.views import BatchComposition, FragmentationLab, Latency, PrefixTree, RunComparison
from pagedinfer.views.stepped import NARROW, WIDE

SVG = "{http://www.w3.org/2000/svg}"


class Busy:
    """An engine that shares, swaps and preempts."""

    often = 0.1

    def __init__(self, simulated_run, **options):
        settings = {"num_blocks": 24, "watermark": 0.0, "num_host_blocks": 12, "preempt_mode": "cheaper"}
        self.engine, self.submit = busy_engine(requests=7, **settings | options)
        self.recording = Recorder(self.engine).start()
        self.bus = self.engine.bus

    def advance(self):
        more = self.submit() or self.engine.has_unfinished()
        if more:
            self.engine.step()
        return more


class Fickle:
    """A scheduler whose plans are cancelled and whose requests are aborted."""

    often = 0.4

    def __init__(self, simulated_run, **options):
        settings = {"num_blocks": 24, "block_size": 4, "outputs": (4, 20), "prompts": (4, 30)}
        settings |= {"max_num_seqs": 6, "max_model_len": 80, "cancels": 0.3, "aborts": 0.08}
        self.run = simulated_run(seed=5, requests=10, **settings | options)
        self.recording, self.bus, self.advance = self.run.recording, self.run.scheduler.bus, self.run.advance


def finish(run):
    while run.advance():
        pass
    return run.recording


MAKERS = {
    "latency": lambda run, other: Latency(run, slo={"TTFT": 8, "ITL": 2}),
    "batch": lambda run, other: BatchComposition(run),
    "lab": lambda run, other: FragmentationLab([other, run]),
    "prefix": lambda run, other: PrefixTree(run),
    "compare": lambda run, other: RunComparison(run, other, step=-1),
    "compared": lambda run, other: RunComparison(other, run, step=-1),
}


@pytest.mark.parametrize("kind", [Busy, Fickle])
def test_a_view_of_a_growing_run_is_that_of_the_run_so_far(simulated_run, kind):
    chance, run = random.Random(4), kind(simulated_run)
    other = finish(kind(simulated_run, allocator="first-fit", num_host_blocks=0, preempt_mode="recompute"))
    views = {name: make(run.recording, other) for name, make in MAKERS.items()}
    wrong, inside = [], 0

    def draw(event):
        """One that raised would be detached, and the run go on: so it tells instead."""
        nonlocal inside
        if chance.random() > kind.often:
            return
        now = Recording(run.recording.events)
        step, width, name = now.last_step, chance.choice([WIDE, NARROW]), chance.choice(list(views))
        inside += now.at(step).has_open_plan
        try:
            view, fresh = views[name], MAKERS[name](now, other)
            view.update()
            if (view.svg(step, width), view.text(step)) != (fresh.svg(step, width), fresh.text(step)):
                wrong.append(f"{name} after event {event.seq} of step {event.step}")
        except Exception as error:
            wrong.append(f"{name} after event {event.seq} of step {event.step}: {error!r}")

    run.bus.subscribe(draw)
    finish(run)
    assert wrong == []
    assert inside > 10, "steps half told"
    for name, view in views.items():
        view.update()
        again = MAKERS[name](run.recording, other)
        view.cursor = again.cursor = again.last_step
        assert view.svg() == again.svg(), name
        assert view.text() == again.text(), name
        again.version = view.version
        assert view.encode() == again.encode(), name


class Ahead:
    """A scheduler that plans a step while the one before is computed, and may have to take both back."""

    def __init__(self):
        self.scheduler = Scheduler(
            EngineConfig(num_blocks=24, block_size=4, max_num_seqs=4, allocator="first-fit")
        )
        meta = ev.Meta(ev.SCHEMA, self.scheduler.config.to_dict())
        meta.step = 0
        self.recording, self.runner = Recording([meta]), SimulatedRunner()
        self.scheduler.bus.subscribe(self.recording.add)
        for number in range(5):
            self.scheduler.submit(Request(f"R{number}", 6 + number, 9), 0)

    def moments(self):
        """Stops where something has been told."""
        scheduler, number = self.scheduler, 0
        while scheduler.requests:
            plans = [scheduler.schedule(scheduler.step)]
            yield
            number += 1
            if number % 3:
                plans.append(scheduler.schedule(scheduler.step))
                yield
            if number % 5 == 1:
                while plans:
                    scheduler.cancel(plans.pop())
                    yield
            for plan in plans:
                scheduler.commit(plan, self.runner.execute(plan))
                yield


@pytest.mark.parametrize("name", MAKERS)
def test_steps_that_are_taken_back_are_forgotten(name):
    run, other = Ahead(), Ahead()
    for _ in other.moments():
        pass
    view = MAKERS[name](run.recording, other.recording)
    for _ in run.moments():
        view.update()
        assert view.text(-1) == MAKERS[name](Recording(run.recording.events), other.recording).text(-1)
        assert view.svg(-1) == MAKERS[name](Recording(run.recording.events), other.recording).svg(-1)


def test_who_comes_and_goes_between_steps_is_counted():
    made = HandMade().submit("A").submit("B")
    view = Latency(made.recording)
    assert "step 0: 2 requests, 0 ended" in view.text()
    made.step({"A": 8}, ev.Admit("A", ""), ev.Alloc("A", 0, 0, (0, 1, 2)), tokens="A")
    made.finish("B").submit("C")
    view.update()
    assert "step 1: 3 requests, 1 ended" in view.text()
    made.add(ev.Finish("C", "abort", "")).step({"A": 1}, tokens="A")
    view.update()
    assert "step 2: 3 requests, 2 ended" in view.text()


def begun_late():
    """A recording that begins in the middle of a run, and what goes on in it."""
    run = Busy(None)
    for _ in range(9):
        run.advance()
    run.recording = Recorder(run.engine).start()
    return run


@pytest.mark.parametrize("name", MAKERS)
def test_there_may_be_nothing_yet(name):
    for run in (Busy(None), begun_late()):
        other = Recording(run.recording.events)
        view = MAKERS[name](run.recording, other)
        for width in (WIDE, NARROW):
            ET.fromstring(view.svg(width=width))
        first = view.last_step
        run.advance()
        assert view.update()
        assert (view.first_step, view.last_step) == (first, view.cursor)
        assert view.cursor > first or name == "batch"
        assert view.svg() == MAKERS[name](run.recording, other).svg(view.cursor)


def test_slots_grow_with_the_run(simulated_run):
    run = Busy(simulated_run)
    some, two = BatchComposition(run.recording), BatchComposition(run.recording, num_slots=2)
    assert (some.num_slots, two.num_slots) == (1, 2)
    finish(run)
    some.update()
    two.update()
    used = max(len(state.last.scheduled) for state in run.recording.states())
    assert some.num_slots == two.num_slots == used > 2
    assert "; 2 were asked for, the engine used more" in two.text()
    assert f"slots computing, of {used}: static" in two.text()
    assert "asked" not in some.text()
    with pytest.raises(
        ConfigError, match=f"num_slots=2: it must be an integer from {used}, which this run used, to 64"
    ):
        BatchComposition(run.recording, num_slots=2)


def test_wall_time_that_never_came_is_told(simulated_run):
    run = Fickle(simulated_run)
    view = Latency(Recording(run.recording.events[:1]), unit="seconds")
    for event in finish(run).events[1:]:
        view.recording.add(event)
    view.update()
    assert "latencies in seconds, which the recording does not have" in view.text()
    with pytest.raises(ConfigError, match='unit=\'days\': it must be "steps" or "seconds"'):
        Latency(run.recording, unit="days")


def long_run(steps, slots=8):
    """Short requests one after the other in every slot."""
    made = HandMade(num_blocks=2 * slots, block_size=64, max_num_seqs=slots)
    for step in range(steps):
        live = {f"R{slot}.{step // 30}": 1 for slot in range(slots)}
        new = [] if step % 30 else list(live)
        for rid in new:
            made.submit(rid, 1, 30)
        events = [ev.Admit(rid, "") for rid in new] + [ev.Alloc(rid, 0, 0, (i,)) for i, rid in enumerate(new)]
        made.step(live, *events, tokens=live)
        if step % 30 == 29:
            for slot, rid in enumerate(live):
                made.finish(rid, slot)
    return made.recording


def test_more_slots_than_are_drawn():
    view = BatchComposition(long_run(3, slots=70))
    assert view.num_slots == 70
    words = [node.text for node in ET.fromstring(view.svg()).iter(f"{SVG}text")]
    assert words.count("and 6 more slots") == 2


def test_a_long_run_is_drawn_around_the_cursor():
    """Not smaller than a pixel a step: the picture of the newest step stays small however long the run is."""
    recording = long_run(2000)
    assert recording.at(2000).step == 2000
    for view, most in ((BatchComposition(recording), 250_000), (Latency(recording), 40_000)):
        for step in (0, 700, 1999, 2000):
            svg = view.svg(step)
            assert len(svg) < most
            titles = [node.text for node in ET.fromstring(svg).iter(f"{SVG}title")][1:]
            here = [title for title in titles if "R3." in title and "decode, steps" in title]
            ranges = [tuple(map(int, title.split("steps ")[1].split(",")[0].split(" to "))) for title in here]
            assert any(a <= step <= b for a, b in ranges) or step == 0


ODD = "a\"b'<c>&amp;\n\td\x00\ud800"


def odd(blocks=(0, 1, 2)):
    keys = (5, 6)
    made = HandMade(num_blocks=8, allocator="first-fit").submit(ODD, 8, 8, keys).submit("B", 8)
    made.step({ODD: 8}, ev.Admit(ODD, ""), ev.Hit(ODD, 0, ODD), ev.Alloc(ODD, 0, 0, blocks), tokens=[ODD])
    made.add(ev.Cache(ODD, blocks[:2], keys, -1))
    return made.step({ODD: 1}, tokens=[ODD], reasons={"B": ODD}).recording


@pytest.mark.parametrize("name", MAKERS)
def test_any_request_id_is_drawn_and_found_again(name):
    view = MAKERS[name](odd(), odd((3, 4, 5)))
    marked = set()
    for width in (WIDE, NARROW):
        for node in ET.fromstring(view.svg(width=width)).iter():
            if node.get("data-rid") is not None:
                marked.add(node.get("data-rid"))
                inside = [inner for inner in node.iter() if inner is not node]
                assert not any(inner.get("data-rid") or inner.get("data-blocks") for inner in inside)
    seen = readable(ODD).replace("\x00", "")  # XML has no such character
    assert seen in marked or name == "prefix"
    assert {"request": readable(ODD)} in view.sheet(2, WIDE).selections() or name == "prefix"
    view.png()
