"""The prefix tree: a cache of our own writes the events and keeps count; the view must agree with it at every step."""

import random
import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from handmade import HandMade

from pagedinfer.engine.request import Request
from pagedinfer.trace import events as ev
from pagedinfer.trace.metrics import kept_events
from pagedinfer.views.prefix_tree import PrefixTree

SVG = "{http://www.w3.org/2000/svg}"
SIZE = 4


class Cache(HandMade):
    """A prefix cache with leaf-first eviction; `truth` holds, by step, key -> [parent, block, hits, last used]."""

    def __init__(self, seed, steps=30, num_blocks=28):
        super().__init__(num_blocks=num_blocks, block_size=SIZE)
        self.rng, self.cached, self.live, self.truth = random.Random(seed), {}, {}, {0: {}}
        self.free, self.found = list(range(num_blocks)), 0
        for _ in range(steps):
            self.one()
            self.truth[self.now] = {key: list(entry) for key, entry in self.cached.items()}

    def prompt(self):
        """Keys of a prompt: a system part, a user, a turn. A key holds its whole path, as digits."""
        rng, path, keys = self.rng, 0, []
        for depth in range(rng.randint(1, 7)):
            path = path * 10 + 1 + (rng.random() < 0.25 * depth) * rng.randint(1, 2)
            keys.append(path)
        return keys

    def one(self):
        rid, keys, step = f"R{self.now}", self.prompt(), self.now + 1
        length = SIZE * len(keys) + 2
        self.submit(rid, length, 4, keys)
        hit = next((i for i, key in enumerate(keys) if key not in self.cached), len(keys))
        self.found += SIZE * hit
        for key in keys[:hit]:
            self.cached[key][2:] = self.cached[key][2] + 1, step
        events = [ev.Admit(rid, "room"), ev.Hit(rid, SIZE * hit, "")]
        gone = []
        while len(self.free) < len(keys) + 1:
            used = {block for blocks in self.live.values() for block in blocks}
            parents = {entry[0] for entry in self.cached.values()}
            leaf = min(
                (
                    k
                    for k, e in self.cached.items()
                    if k not in parents and e[1] not in used and k not in keys[:hit]
                ),
                key=lambda k: self.cached[k][3],
            )
            gone.append(self.cached.pop(leaf)[1])
            self.free.append(gone[-1])
        if gone:
            events.append(ev.Evict(tuple(gone), "least recently used"))
        blocks = [self.free.pop(0) for _ in range(len(keys) + 1)]
        events.append(ev.Alloc(rid, 0, 0, tuple(blocks)))
        if self.rng.random() < 0.2:  # a plan given up leaves no trace
            self.step({rid: length}, ev.Admit(rid, "room"), ev.Hit(rid, SIZE * hit, ""), cancel=True)
        self.step({rid: length}, *events, tokens=[rid])
        if new := keys[hit:]:
            self.add(ev.Cache(rid, tuple(blocks[hit : len(keys)]), tuple(new), keys[hit - 1] if hit else -1))
        for i, key in enumerate(new):
            self.cached[key] = [([-1, *keys])[hit + i], blocks[hit + i], 0, step]
        self.live[rid] = blocks
        if len(self.live) > 2:
            old = next(iter(self.live))
            blocks = self.live.pop(old)
            self.finish(old, *blocks)
            kept = {entry[1] for entry in self.cached.values()}
            self.free += [block for block in blocks if block not in kept]


@pytest.fixture(scope="module", params=range(4))
def cache(request):
    return Cache(request.param)


def test_the_fold_is_the_cache(cache, monkeypatch):
    monkeypatch.setattr("pagedinfer.views.prefix_cache.KEPT_STEPS", 4)
    view = PrefixTree(cache.recording)
    assert any(isinstance(event, ev.Evict) for event in cache.recording.events)
    assert view.last_step == 30
    for step in [*range(31), 7, 29, 12, 30]:  # also going back
        prefixes = view.cache(step).prefixes
        assert {k: [p.parent, p.block_id, p.hits, p.used] for k, p in prefixes.items()} == cache.truth[step]
    hits = view.cache(-1)
    assert (hits.lookups, hits.num_cached_tokens) == (30, cache.found)


@pytest.mark.parametrize("width", [920, 430])
def test_every_cell_says_what_the_cache_knows(cache, width):
    view = PrefixTree(cache.recording)
    for step in (3, 12, 30):
        root = ET.fromstring(view.svg(step, width))
        truth, in_use = cache.truth[step], cache.recording.at(step).ref_counts
        blocks = {entry[1]: (key, entry) for key, entry in truth.items()}
        seen = []
        marked = Counter(ids for node in root.iter(f"{SVG}g") if (ids := node.get("data-blocks")))
        for title in [node.text for node in root.iter(f"{SVG}title")][1:]:
            names, first, last = re.match(r"blocks? (.*): tokens (\d+) to (\d+),", title).groups()
            ids = []
            for part in names.split(", "):
                a, _, b = part.partition(" to ")
                ids += range(int(a), int(b or a) + 1)
            seen += ids
            assert marked.pop(" ".join(map(str, ids))) == 2, "the cell and its age"
            assert int(last) - int(first) + 1 == SIZE * len(ids)
            for i, block_id in enumerate(ids):
                key, (_, _, hits, used) = blocks[block_id]
                assert len(str(key)) - 1 == int(first) // SIZE + i, "its depth is the length of its path"
                assert f"hits {hits}, last used in step {used}, " in title
                assert ("idle" in title) == (block_id not in in_use)
        hidden = len([k for k in truth if k not in {e[0] for e in truth.values()}]) > 16
        assert len(seen) == len(set(seen))
        assert set(seen) == set(blocks) or (hidden and set(seen) < set(blocks))
        words = " ".join(node.text for node in root.iter(f"{SVG}text"))
        busy = sum(entry[1] in in_use for entry in truth.values())
        assert f"step {step}: {len(truth)} cached blocks, {busy} in use, {len(truth) - busy} idle" in words
        prompts = [event for event in cache.recording.until(step).events if isinstance(event, ev.Submit)]
        asked = sum(event.num_prompt_tokens for event in prompts[:step])
        assert f"of {step} lookups hit" in words
        assert f"of {asked} tokens" in words


def test_cells_do_not_overlap(cache):
    root = ET.fromstring(PrefixTree(cache.recording).svg())
    boxes = []
    for node in root.iter(f"{SVG}g"):
        if node.get("data-k"):
            box = next(child for child in node if child.tag == f"{SVG}rect")
            boxes.append([float(box.get(name)) for name in ("x", "y", "width", "height")])
    assert len(boxes) > 3
    for i, (x, y, w, h) in enumerate(boxes):
        assert w > 4
        for x2, y2, w2, h2 in boxes[i + 1 :]:
            assert x + w <= x2 + 0.11 or x2 + w2 <= x + 0.11 or y + h <= y2 + 0.11 or y2 + h2 <= y + 0.11


def test_retention_moves_and_resets():
    made = HandMade(num_blocks=8, block_size=4).submit("A", 8, 4, (5, 6))
    admitted = [ev.Admit("A", ""), ev.Hit("A", 0, "nothing cached"), ev.Alloc("A", 0, 0, (0, 1, 2))]
    made.step({"A": 8}, *admitted, tokens="A")
    made.add(ev.Cache("A", (0, 1), (5, 6), -1), ev.Retain((0,), 101, -1), ev.Retain((1,), 80, -1))
    text = PrefixTree(made.recording).text()
    assert "block 0: tokens 0 to 3, hits 0, last used in step 1, in use by 1, pinned" in text
    assert "block 1: tokens 4 to 7, hits 0, last used in step 1, in use by 1, retention priority 80" in text
    assert "0 of 1 lookups hit, 0 of 8 tokens (0.0 %)" in text
    made.add(ev.Expire((0, 1))).step({"A": 1}, ev.Move("A", 0, ((0, 4), (1, 5)), "compaction"), tokens="A")
    assert (
        "blocks 4 to 5: tokens 0 to 7, hits 0, last used in step 1, in use by 1"
        in PrefixTree(made.recording).text()
    )
    made.finish("A", 4, 5, 2).add(ev.Evict((4,), "needed"))
    text = PrefixTree(made.recording).text()
    assert "block 5: tokens 0 to 3, hits 0, last used in step 1, idle, what came before it is gone" in text
    assert "evicted: block 4: needed" in text
    made.add(ev.Reset((5,), "asked for"))
    assert "Nothing is cached at this step." in PrefixTree(made.recording).svg()


class SharedPrompts:
    """Requests of the real scheduler whose prompts share beginnings."""

    def __init__(self, simulated_run, seed):
        rng, run = (
            random.Random(seed),
            simulated_run(seed=seed, requests=0, num_blocks=24, block_size=4, aborts=0),
        )
        texts = [[rng.randint(1, 50) for _ in range(40)] for _ in range(3)]
        for number in range(24):
            tokens = rng.choice(texts)[: rng.randint(4, 30)] + [
                rng.randint(60, 90) for _ in range(rng.randint(1, 9))
            ]
            run.scheduler.submit(
                Request(f"Q{number}", len(tokens), rng.randint(2, 9), token_ids=tokens), run.scheduler.step
            )
            run.advance()
        self.recording = run.finish()


@pytest.mark.parametrize("seed", range(3))
def test_on_real_runs_the_fold_is_the_recorded_state(simulated_run, seed):
    recording = SharedPrompts(simulated_run, seed).recording
    view, hits = PrefixTree(recording), 0
    for state in recording.states():
        cache = view.cache(state.step)
        assert {p.block_id: (0, key) for key, p in cache.prefixes.items()} == state.cached
        for key, prefix in cache.prefixes.items():
            assert prefix.parent in (state.parents[key], -1)
        hits = cache.hits
        text = view.text(state.step)
        assert (
            f"{len(state.cached)} cached blocks, {len(state.cached.keys() & state.ref_counts.keys())} in use"
            in text
        )
    assert hits > 3
    first = {}
    for event in kept_events(recording.events):
        if isinstance(event, ev.Hit):
            first.setdefault(event.rid, event.n)
    found = list(first.values())
    assert (cache.lookups, cache.hits, cache.num_cached_tokens) == (
        len(found),
        sum(map(bool, found)),
        sum(found),
    )
    assert any(isinstance(event, ev.Evict) for event in recording.events)
