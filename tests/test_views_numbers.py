"""Every number that a view shows, beside the engine's own while it ran: random runs, read back from the pictures."""

import copy
import itertools
import random
import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest
from busy_runs import busy_engine

from pagedinfer import Recorder
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.views import (
    BatchComposition,
    FragmentationLab,
    Latency,
    PrefixTree,
    RunComparison,
    budget_svg,
    chains_svg,
    density,
    details_svg,
    export_html,
    memory_svg,
    picture_svg,
    queues_svg,
    timeline_svg,
)
from pagedinfer.views.film import film_of
from pagedinfer.views.static_view import StaticView

SVG = "{http://www.w3.org/2000/svg}"
SIZE = 8


def watched(seed, **fixed):
    """A random busy run: its recording, and after each step what the engine itself says."""
    chance = random.Random(seed)
    options = {
        "num_blocks": chance.choice([24, 32, 48]), "num_host_blocks": (hosts := chance.choice([0, 8, 16])),
        "preempt_mode": chance.choice(["swap", "cheaper"]) if hosts else "recompute", "watermark": 0.0,
        "victim": chance.choice(["newest", "largest"]), "order": chance.choice(["fcfs", "shortest-prefill"]),
        "max_num_batched_tokens": chance.choice([16, 64]), "max_model_len": 128, "block_size": SIZE,
    } | fixed  # fmt: skip
    engine, submit = busy_engine(seed, **options)
    facts, plans, outputs = [], [], {}

    class Noting(SimulatedRunner):
        def execute(self, plan):
            # A prompt's last token alone counts as prefill here; the engine handles it like a decode.
            known = engine.scheduler.requests
            plans.append(
                {
                    i.request_id: (
                        i.num_tokens,
                        i.is_prefill or i.start < known[i.request_id].num_prompt_tokens,
                    )
                    for i in plan.scheduled
                }
            )
            return super().execute(plan)

    engine.runner = Noting()
    with Recorder(engine) as recording:
        submit()
        while engine.has_unfinished():
            outputs |= {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
            while submit() and not engine.has_unfinished():
                pass
            queues = engine.scheduler.queues  # a step lasts until the next: who comes meanwhile belongs to it
            facts.append(
                SimpleNamespace(
                    **copy.deepcopy(engine.snapshot()), plan=plans[-1], output_tokens=sum(outputs.values()),
                    counts=dict(outputs), found=queues.num_hit_tokens, asked=queues.num_queried_tokens,
                )
            )  # fmt: skip
    assert len(plans) == len(facts) == recording.last_step
    return SimpleNamespace(recording=recording, facts=facts, num_blocks=options["num_blocks"], engine=engine)


@pytest.fixture(scope="module", params=range(3))
def run(request):
    return watched(request.param)


def steps_of(run):
    """Every seventh step with what the engine said of it, the last one too."""
    return [fact for fact in run.facts if fact.step % 7 == 0 or fact is run.facts[-1]]


def texts(svg):
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}text")]


def fills_of(fact):
    """Block -> most tokens that anybody has computed in it, and its users."""
    fills, users = {}, {}
    for rid, table in fact.block_tables.items():
        computed = fact.requests[rid]["num_computed_tokens"]
        for i, block in enumerate(table):
            fills[block] = max(fills.get(block, 0), min(SIZE, max(0, computed - SIZE * i)))
            users[block] = users.get(block, 0) + 1
    return fills, users


def test_the_runs_have_everything():
    facts = [fact for seed in range(3) for fact in watched(seed).facts]
    assert any(fact.swapped for fact in facts)
    assert any(fact.num_preemptions for fact in facts)
    assert any(max(fills_of(fact)[1].values(), default=0) > 1 for fact in facts), "shared blocks"
    assert any(fact.found for fact in facts)


def test_queues(run):
    for fact in steps_of(run):
        shown = texts(queues_svg(run.recording, fact.step))
        words = f"{len(fact.running)} running, {len(fact.waiting)} waiting"
        assert words + (f", {len(fact.swapped)} swapped out" if fact.swapped else "") in shown
        for name, queue in (
            ("Running", fact.running),
            ("Waiting", fact.waiting),
            ("Swapped out", fact.swapped),
        ):
            if queue or name != "Swapped out":
                assert f"{name}: {len(queue)}" in shown
            for rid in queue[:8]:
                at, request = shown.index(rid), fact.requests[rid]
                assert shown[at + 1] == f"{request['num_computed_tokens']} of {request['num_tokens']} tokens"
                if rid in fact.plan and name == "Running":
                    assert shown[at + 2] == f"+{fact.plan[rid][0]}"
            if len(queue) > 8:
                assert f"and {len(queue) - 8} more" in shown


def test_block_tables(run):
    for fact in steps_of(run):
        for rid, table in fact.block_tables.items():
            shown = texts(details_svg(run.recording, fact.step, rid))
            request, found = fact.requests[rid], shown[shown.index("tokens") + 1 :]
            computed = request["num_computed_tokens"]
            assert f"{request['status']}, {computed} of {request['num_tokens']} tokens computed" in shown
            rows = [
                [str(i), str(block), f"{min(SIZE, max(0, computed - SIZE * i))}/{SIZE}"]
                for i, block in enumerate(table[:14])
            ]
            assert found[: 3 * len(rows)] == [word for row in rows for word in row]
        for rid, slots in fact.host_tables.items():
            assert f"Host slots {', '.join(map(str, slots))}." in texts(
                details_svg(run.recording, fact.step, rid)
            )


def test_budget(run):
    budget = run.engine.config.max_num_batched_tokens
    for fact in steps_of(run):
        (words,) = [text for text in texts(budget_svg(run.recording, fact.step)) if " unused" in text]
        total = sum(n for n, _ in fact.plan.values())
        assert words.startswith(f"{total} of {budget} tokens")
        assert words.endswith(f"{budget - total} unused")
        for name, prefill in (("decode", False), ("prefill", True)):
            part = [n for n, is_prefill in fact.plan.values() if is_prefill == prefill]
            found = re.search(rf"(\d+) {name} \((\d+) request", words)
            assert (tuple(map(int, found.groups())) if found else (0, 0)) == (sum(part), len(part))


def test_timeline(run):
    shown = texts(timeline_svg(run.recording.until(20)))
    for rid in run.facts[19].requests:
        row = itertools.takewhile(str.isdigit, shown[shown.index(rid) + 1 :])
        chunks = [fact.plan[rid] for fact in run.facts[:20] if rid in fact.plan]
        assert list(row) == [str(n) for n, is_prefill in chunks if is_prefill]


def test_memory(run):
    slots = SIZE * run.num_blocks
    for fact in steps_of(run):
        (words,) = [
            text
            for text in texts(memory_svg(run.recording, fact.step))
            if "KV waste" in text and "live" in text
        ]
        fills, users = fills_of(fact)
        idle = SIZE * len({int(block) for block in fact.cached} - fills.keys())
        shared = sum(fill for block, fill in fills.items() if users[block] > 1)
        reserved = sum(SIZE for fill in fills.values() if not fill)
        live = sum(fills.values())
        expected = {
            "live": live, "shared": shared, "tail slack": SIZE * len(fills) - live - reserved, "reserved": reserved,
            "cached and idle": idle, "free of": slots - SIZE * len(fills) - idle,
        }  # fmt: skip
        for name, value in expected.items():
            found = re.search(rf"(\d+) {name}", words)
            assert int(found[1] if found else 0) == value, (name, words)
        allocated = SIZE * len(fills) + idle  # as defined in trace.usage
        waste = 100 * (1 - live / allocated) if allocated else 0
        assert float(re.search(r"waste ([\d.]+) %", words)[1]) == pytest.approx(waste, abs=0.051)
        hosted = sum(map(len, fact.host_tables.values()))
        assert (f"{hosted} block" in words) == bool(hosted)


def test_chains_and_prefix_tree(run):
    tree = PrefixTree(run.recording)
    for fact in steps_of(run):
        cached, used = {int(block) for block in fact.cached}, fills_of(fact)[0].keys()
        shown = texts(chains_svg(run.recording, fact.step))
        if cached:
            assert any(text.startswith(f"{len(cached)} cached blocks in ") for text in shown)
        named = {int(text.split("×")[0]) for text in shown if re.fullmatch(r"\d+(×\d+)?", text or "")}
        assert named <= cached
        if not any("more" in text or text.startswith("+") for text in shown):
            assert named == cached
        users = fills_of(fact)[1]
        for text in shown:
            if found := re.fullmatch(r"(\d+)×(\d+)", text):
                assert users[int(found[1])] == int(found[2])
        assert (
            f"{len(cached)} cached blocks, {len(cached & used)} in use, {len(cached - used)} idle; "
            in tree.text(fact.step)
        )
        assert f"{fact.found} of {fact.asked} tokens" in tree.text(fact.step)


def test_density(run, monkeypatch):
    monkeypatch.setattr(density, "MOST_DENSITY_CELLS", 8)
    for fact in steps_of(run):
        film = film_of(run.recording)
        found = density.density_of(film, film.frame(fact.step), -1)
        fills, _ = fills_of(fact)
        each = found.each
        assert len(found.live) == -(-run.num_blocks // each) <= 8
        for cell, live in enumerate(found.live):
            assert live == sum(fill for block, fill in fills.items() if block // each == cell)
        shares = [live / slots for live, slots in zip(found.live, found.slots, strict=True)]
        assert sum(found.slots) == SIZE * run.num_blocks
        mean = sum(shares) / len(shares)
        assert f"least {round(100 * min(shares))} %, mean {round(100 * mean)} %" in density.density_words(
            found
        )


def test_block_map_and_text(run):
    for fact in steps_of(run):
        fills, _ = fills_of(fact)
        words = f"{len(fills)} of {run.num_blocks} blocks in use"
        assert any(words in text for text in texts(picture_svg(run.recording, fact.step)) if text)
        said = repr(StaticView(run.recording, step=fact.step))
        assert f"blocks: {len(fills)} of {run.num_blocks} in use" in said
        for rid in [*fact.running, *fact.waiting][:12]:
            request = fact.requests[rid]
            counts = f"{request['num_computed_tokens']} of {request['num_tokens']} tokens"
            assert f"  {rid}: {request['status']}, {counts}" in said


def test_latency_and_batch(run):
    came = {event.rid: event.step for event in run.recording.events if event.kind == "submit"}
    steps, before = {}, {}
    for fact in run.facts:
        for rid, count in fact.counts.items():
            steps.setdefault(rid, []).extend([fact.step] * (count - before.get(rid, 0)))
        before = fact.counts
    latency = Latency(run.recording)
    text = latency.text()
    for rid, at in steps.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {rid}:")] or [""]
        if line:
            assert f"TTFT {at[0] - came[rid]} " in line
            assert f"E2E {at[-1] - came[rid]};" in line
    assert sorted(latency.values("TTFT")) == sorted(at[0] - came[rid] for rid, at in steps.items())
    gaps = [b - a for at in steps.values() for a, b in itertools.pairwise(at)]
    assert sorted(latency.values("ITL")) == sorted(gaps)

    busy = sum(len(fact.plan) for fact in run.facts)
    batch = BatchComposition(run.recording)
    giving = sum(len(set(at)) for at in steps.values())
    words = f"{giving} of {batch.num_slots * len(run.facts)} slot-steps gave a token"
    assert words in batch.text()
    assert f"continuous: {len(run.facts)} steps" in batch.text()
    assert batch.continuous.busy == busy


def test_the_fragmentation_lab(run):
    lab = FragmentationLab({"paged": run.recording})
    for fact in steps_of(run):
        fills, _ = fills_of(fact)
        empty = SIZE * len(fills) - sum(fills.values())
        assert (
            f"{len(fills)} of {run.num_blocks} blocks in use, {empty} token slots of them empty"
            in lab.text(fact.step)
        )


def test_a_comparison():
    runs = [watched(1, num_blocks=n) for n in (24, 40)]
    view = RunComparison(*(run.recording for run in runs))
    for step in range(1, view.last_step + 1, 9):
        ends = [run.facts[min(step, len(run.facts)) - 1] for run in runs]
        expected = {
            "running": [len(fact.running) for fact in ends], "waiting": [len(fact.waiting) for fact in ends],
            "tokens in this step": [
                sum(n for n, _ in fact.plan.values()) if fact.step == step else 0 for fact in ends
            ],
            "blocks in use": [len(fills_of(fact)[0]) for fact in ends],
            "output tokens so far": [fact.output_tokens for fact in ends],
            "requests ended so far": [fact.num_finished for fact in ends],
            "preemptions so far": [fact.num_preemptions for fact in ends],
        }  # fmt: skip
        text = view.text(step)
        for name, (first, second) in expected.items():
            assert f"  {name}: {first} | {second}" in text


def test_the_exported_page_sums_the_run_up(run, tmp_path):
    page = export_html(run.recording, tmp_path / "page.html").read_text()
    found = dict(re.findall(r"<div><dt>([^<]+)</dt><dd>([^<]+)</dd></div>", page))
    assert found == {
        "requests": str(run.facts[-1].num_submitted), "steps": str(len(run.facts)),
        "tokens computed": f"{sum(n for fact in run.facts for n, _ in fact.plan.values()):,}",
        "preemptions": str(run.facts[-1].num_preemptions), "pool": f"{run.num_blocks} × {SIZE} tokens",
    }  # fmt: skip
