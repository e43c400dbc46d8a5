"""The fragmentation lab: strips tile the address space as the states say, holes and fragmentation are counted here."""

import re
import xml.etree.ElementTree as ET

import pytest
from handmade import HandMade

from pagedinfer.errors import ConfigError
from pagedinfer.trace import events as ev
from pagedinfer.trace.recording import Recording, RecordingError
from pagedinfer.views.address_space import layout_of
from pagedinfer.views.lab import FragmentationLab, named_recordings

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def paged(simulated_run):
    return simulated_run(seed=3, num_blocks=32, prompts=(8, 90), outputs=(4, 40), max_num_seqs=6).finish()


@pytest.fixture
def holes():
    """Blocks 0 to 5 A, 6 to 8 B, 9 to 12 C of 16; then A and C end: holes of 6 and 7 around B; D needs 8."""
    made = (
        HandMade(num_blocks=16, block_size=4, allocator="first-fit")
        .submit("A", 22)
        .submit("B", 9)
        .submit("C", 15)
    )
    admitted = [ev.Admit(rid, "room") for rid in "ABC"]
    tables = [("A", range(6)), ("B", range(6, 9)), ("C", range(9, 13))]
    allocs = [ev.Alloc(rid, 0, 0, tuple(ids)) for rid, ids in tables]
    made.step({"A": 22, "B": 9, "C": 15}, *admitted, *allocs, tokens="ABC")
    made.finish("A", *range(6)).finish("C", *range(9, 13)).submit("D", 30)
    made.step({"B": 1}, tokens="B", reasons={"D": "needs 8 blocks in a row, the largest hole has 7"})
    return made


def parts_of(svg, shown):
    """(first block, blocks, words) of everything in the strips."""
    titles = [node.text for node in ET.fromstring(svg).iter(f"{SVG}title")][1:]
    found = []
    for title in titles:
        first, last = map(int, re.search(r"blocks (\d+) to (\d+)", title).groups())
        found.append((first, last - first + 1, title))
    return sorted(found)


@pytest.mark.parametrize("width", [920, 430])
def test_strips_tile_the_pool_as_the_states_say(paged, width):
    view = FragmentationLab([paged])
    for state in paged.states():
        covered, owners = [], state.owners()
        for first, count, words in parts_of(view.svg(state.step, width), 1):
            blocks = range(first, first + count)
            covered += blocks
            if "hole" in words:
                assert words.endswith(f"{count} free")
                assert not owners.keys() & set(blocks)
            else:
                rid, tokens = words.split(":")[0], int(re.search(r"(\d+) of", words)[1])
                logical = dict(zip(state.requests[rid].block_table, state.fill(rid), strict=True))
                assert tokens == sum(logical[block_id] for block_id in blocks)
        assert covered == list(range(32))
        layout, usage = view.layout("paged", state.step), state.usage()
        assert layout.free == len(state.free)
        assert layout.unwritten == usage["tail_slack_slots"]


def test_holes_and_external_fragmentation(holes):
    view = FragmentationLab({"first-fit": holes.recording})
    layout = view.layout("first-fit")
    assert layout.holes == [(0, 6), (9, 7)]
    assert layout.fragmentation == pytest.approx(1 - 7 / 13)
    assert view.fragmentation["first-fit"] == pytest.approx({0: 0, 1: 6 / 13, 2: 6 / 13})
    words = [node.text for node in ET.fromstring(view.svg()).iter(f"{SVG}text")]
    assert "largest hole: 7" in words
    assert "6" in words
    free = "13 free in 2 holes, largest 7; external fragmentation 46.2 %"
    assert f"3 of 16 blocks in use, 2 token slots of them empty; {free}" in words
    assert "D waits: needs 8 blocks in a row, the largest hole has 7" in words
    assert "step 2; external fragmentation: first-fit 46.2 %" in words
    assert "D waits: needs 8 blocks in a row, the largest hole has 7" in view.text()
    assert (
        view.layout("first-fit", 0)
        .words()
        .startswith("0 of 16 blocks in use, 0 token slots of them empty; 16 free")
    )


def test_stretches_say_whose_they_are_and_which_blocks(paged):
    view = FragmentationLab([paged])
    for state in (paged.at(9), paged.at(30)):
        root = ET.fromstring(view.svg(state.step))
        marked = [
            (n.get("data-rid"), n.get("data-blocks")) for n in root.iter(f"{SVG}g") if n.get("data-rid")
        ]
        found = [(int(block_id), rid) for rid, ids in marked for block_id in ids.split()]
        assert sorted(found) == sorted((b, owners[0][0]) for b, owners in state.owners().items())
        assert found


def test_moves_are_told_drawn_and_followed(holes):
    pairs = ((6, 0), (7, 1), (8, 2))
    holes.step({"B": 1}, ev.Move("B", 0, pairs, "D needs 8 blocks in a row"), tokens="B")
    view = FragmentationLab([holes.recording])
    layout = view.layout("first-fit")
    assert layout.moves == [("B", pairs)]
    assert [(e.rid, e.first, e.count, e.tokens) for e in layout.extents] == [("B", 0, 3, 11)]
    assert (layout.holes, layout.fragmentation) == ([(3, 13)], 0)
    root = ET.fromstring(view.svg())
    words = [node.text for node in root.iter(f"{SVG}text")]
    assert "B moved to blocks 0 to 2: D needs 8 blocks in a row" in words
    arrows = [node.get("d") for node in root.iter(f"{SVG}path") if node.get("class") == "pi-s-accent"]
    scale = 918 / 16
    numbers = [float(n) for n in re.findall(r"[\d.]+", arrows[0])]
    assert (numbers[0], numbers[3]) == pytest.approx((7.5 * scale + 1, 1.5 * scale + 1), abs=0.06), (
        "middle to middle"
    )
    places = [
        ET.fromstring(view.svg(step)).find(f".//{SVG}g[@data-k='0/B/0']").get("data-x") for step in (2, 3)
    ]
    assert [float(x) for x in places] == pytest.approx([6 * scale + 1, 1], abs=0.06), (
        "one part, another place"
    )


def test_shared_blocks_belong_to_the_one_that_came_first():
    made = HandMade(num_blocks=8, block_size=4).submit("A", 8).submit("B", 9)
    made.step({"A": 8}, ev.Admit("A", ""), ev.Alloc("A", 0, 0, (0, 1, 2)), tokens="A")
    made.step(
        {"B": 1}, ev.Admit("B", ""), ev.Share("B", 0, 0, (0, 1), 8), ev.Alloc("B", 0, 2, (3,)), tokens="B"
    )
    layout = layout_of(made.recording, 2)
    assert [(e.rid, e.first, e.count, e.tokens) for e in layout.extents] == [("A", 0, 3, 8), ("B", 3, 1, 1)]
    assert layout.holes == [(4, 4)]


def test_paged_allocation_has_no_external_fragmentation(paged, holes):
    view = FragmentationLab([paged, holes.recording, holes.recording])
    assert list(view.fragmentation) == ["first-fit", "first-fit (2)"]
    assert "paged: " in view.text()
    assert "no external fragmentation: any free block will do" in view.text()
    assert view.text().count("(at step 2, its last)") == 2
    assert view.last_step == paged.last_step


def test_a_full_pool_and_a_wide_one():
    made = HandMade(num_blocks=4, block_size=1, allocator="buddy").submit("A", 4)
    made.step({"A": 4}, ev.Admit("A", ""), ev.Alloc("A", 0, 0, (0, 1, 2, 3)))
    assert "nothing free; external fragmentation 0.0 %" in FragmentationLab([made.recording]).text()
    wide = HandMade(num_blocks=100_000, block_size=1).submit("A", 5000)
    wide.step({"A": 5000}, ev.Admit("A", ""), ev.Alloc("A", 0, 0, tuple(range(0, 100_000, 20))))
    svg = FragmentationLab([wide.recording]).svg()
    heights = [
        float(node.get("height"))
        for node in ET.fromstring(svg).iter(f"{SVG}rect")
        if node.get("class") == "pi-live"
    ]
    assert len(heights) == 459
    assert sum(heights) / len(heights) == pytest.approx(34 / 20, rel=0.05), (
        "a twentieth of the pool is in use"
    )
    assert len(svg) < 60_000


@pytest.mark.parametrize("num_blocks", [400, 1000, 4001])
def test_a_full_column_fills_the_strip(num_blocks):
    """More pieces than pixels: every second block is in use, but for the last fifth of the pool, which is full."""
    ids = [*range(0, num_blocks * 4 // 5, 2), *range(num_blocks * 4 // 5, num_blocks)]
    made = HandMade(num_blocks=num_blocks, block_size=1).submit("A", len(ids))
    made.step({"A": len(ids)}, ev.Admit("A", ""), ev.Alloc("A", 0, 0, tuple(ids)))
    root = ET.fromstring(FragmentationLab([made.recording]).svg(width=430))
    tops = [float(n.get("y")) for n in root.iter(f"{SVG}rect") if n.get("class") == "pi-live"]
    assert min(tops) == 0
    assert tops[-40:] == [0] * 40
    assert sum(top > 5 for top in tops) > 100 or num_blocks == 400


def test_recordings_are_named_and_checked(paged):
    assert list(named_recordings([paged, paged])) == ["paged", "paged (2)"]
    assert list(named_recordings({"before": paged})) == ["before"]
    for none in ([], {}, [paged] * 9):
        with pytest.raises(ConfigError, match=f"{len(none)} recordings: give 1 to 8"):
            FragmentationLab(none)
    with pytest.raises(RecordingError, match="empty"):
        FragmentationLab([Recording()])


def test_an_extent_grows_with_its_tokens(holes):
    holes.step({"B": 1}, tokens="B")
    layout = layout_of(holes.recording, 3)
    assert [(e.rid, e.first, e.count, e.tokens) for e in layout.extents] == [("B", 6, 3, 11)]


@pytest.mark.parametrize("allocator", ["reserve-max", "first-fit", "best-fit", "buddy", "grow-by-move"])
def test_on_real_contiguous_runs_the_numbers_are_those_of_the_state(simulated_run, allocator):
    pytest.importorskip(
        "pagedinfer.memory.contiguous", reason="the contiguous allocators are not in this tree"
    )
    recording = simulated_run(
        seed=4, requests=16, num_blocks=48, block_size=4, max_model_len=96, prompts=(8, 50), outputs=(4, 40),
        allocator=allocator, compaction=allocator == "first-fit",
    ).finish()  # fmt: skip
    view, moved = FragmentationLab([recording]), 0
    for state in recording.states():
        layout, usage = view.layout(allocator, state.step), state.usage()
        assert layout.fragmentation == pytest.approx(usage["external_fragmentation"])
        assert layout.unwritten == usage["tail_slack_slots"] + usage["reserved_slots"]
        assert layout.free == len(state.free)
        moved += len(layout.moves)
    assert moved or allocator not in ("grow-by-move", "first-fit")
