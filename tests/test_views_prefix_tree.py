"""The prefix tree: a cache of our own writes the events and keeps count; the view must agree with it at every step."""

import random
import re
import xml.etree.ElementTree as ET

import pytest
from handmade import HandMade

from pagedinfer.trace import events as ev
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


def test_the_fold_is_the_cache(cache):
    view = PrefixTree(cache.recording)
    assert any(isinstance(event, ev.Evict) for event in cache.recording.events)
    assert view.last_step == 30
    for step in [*range(31), 7]:  # 7: going back
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
        for title in [node.text for node in root.iter(f"{SVG}title")][1:]:
            names, first, last = re.match(r"blocks? (.*): tokens (\d+) to (\d+),", title).groups()
            ids = []
            for part in names.split(", "):
                a, _, b = part.partition(" to ")
                ids += range(int(a), int(b or a) + 1)
            seen += ids
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


def test_moves_pins_and_resets():
    made = HandMade(num_blocks=8, block_size=4).submit("A", 8, 4, (5, 6))
    made.step(
        {"A": 8},
        ev.Admit("A", ""),
        ev.Hit("A", 0, "nothing cached"),
        ev.Alloc("A", 0, 0, (0, 1, 2)),
        tokens="A",
    )
    made.add(ev.Cache("A", (0, 1), (5, 6), -1), ev.Pin((0,), True))
    view = PrefixTree(made.recording)
    assert [p.pinned for p in view.cache().prefixes.values()] == [True, False]
    assert "0 of 1 lookups hit, 0 of 8 tokens (0.0 %)" in view.text()
    made.add(ev.Pin((0,), False), ev.Evict((0,), "needed"))
    view = PrefixTree(made.recording)
    assert (
        "block 1: tokens 0 to 3, hits 0, last used in step 1, in use by 1, what came before it is gone"
        in view.text()
    )
    assert "evicted: blocks 0: needed" in view.text()
    made.add(ev.Reset((1,), "asked for"))
    assert "Nothing is cached at this step." in PrefixTree(made.recording).svg()


def test_without_a_cache_the_view_says_so(simulated_run):
    view = PrefixTree(simulated_run(seed=1).finish())
    if not view.cache().prefixes:
        assert "Nothing is cached at this step." in view.svg()
