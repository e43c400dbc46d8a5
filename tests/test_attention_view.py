"""Attention over blocks as a picture: well-formed, repeatable, every number the record's."""

import random
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from made_taps import SIZE, attention_of, tapped_run

from pagedinfer.errors import ConfigError
from pagedinfer.trace.tap_records import TapRecord
from pagedinfer.views import AttentionView, attention_svg
from pagedinfer.views.stepped import NARROW, WIDE
from pagedinfer.views.tap_view import percent

SVG = "{http://www.w3.org/2000/svg}"


def record(blocks=6, heads=3, window=None, seed=1, layers=(0, 3), texts=True):
    """A request of `blocks` blocks whose last one is half full."""
    chance = random.Random(seed)
    position = blocks * SIZE - 3
    kept = attention_of(chance, position, layers, heads, window)
    tokens = tuple(chance.choice(["<b>", " the", "\n", "\x00"]) for _ in range(position + 1)) if texts else ()
    return TapRecord(12, "r<0>", SIZE, position, kept, (), tokens)


CASES = {
    "one block": record(blocks=1, heads=1),
    "a few": record(),
    "no texts": record(texts=False),
    "window": record(blocks=12, window=9),
    "many": record(blocks=70, heads=9),
    "many in a window": record(blocks=300, heads=20, window=500),
}


def texts(svg):
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}text")]


def titles(svg):
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}title")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("head", [None, 0])
def test_the_picture_is_well_formed_named_and_repeatable(case, head):
    view = AttentionView(case, head=head)
    root = ET.fromstring(view.svg())
    assert root.get("role") == "img"
    assert "Attention over blocks" in root.find(f"{SVG}title").text
    assert "most goes to logical" in root.find(f"{SVG}desc").text
    assert view.svg() == attention_svg(TapRecord.from_json(case.to_json()), head=head)
    assert not re.search("NaN|inf|http(?!://www.w3.org/2000/svg)", view.svg())
    assert float(root.get("viewBox").split()[3]) < 1400
    assert ET.fromstring(view.svg(width=NARROW)).get("width") == str(NARROW + 32)


def rows(view):
    """(first logical block, one past the last, physical, share or None) of each row of the text."""
    found = []
    for line in view.text().splitlines()[1:-1]:
        alone = re.match(r"  logical (\d+), block (\w+): (.+?) ?(  \".*)?$", line)
        many = re.match(r"  logical (\d+) to (\d+), (\d+) blocks: (.+?)(  \".*)?$", line)
        if alone:
            first, last, physical, share = int(alone[1]), int(alone[1]), alone[2], alone[3]
        else:
            first, last, physical, share = int(many[1]), int(many[2]), None, many[4]
            assert int(many[3]) == last + 1 - first
        number = None if share == "outside the window" else share
        found.append((first, last + 1, physical, number))
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_number_is_the_records(case):
    for layer in case.attention:
        for head in (None, *layer.heads[:2]):
            view = AttentionView(case, layer.layer, head)
            shares = layer.mean() if head is None else layer.mass[head]
            at = 0
            drawn = texts(view.svg()) + texts(view.svg(width=NARROW))
            said = titles(view.svg(width=NARROW))
            for first, stop, physical, share in rows(view):
                assert first == at, "in logical order, none left out"
                at = stop
                if physical is not None:
                    assert physical == (
                        "freed" if layer.block_table[first] < 0 else str(layer.block_table[first])
                    )
                    assert physical in drawn
                total = sum(shares[first:stop])
                if share is None:
                    assert total == 0
                    assert stop * SIZE <= layer.first
                    assert "not seen" in drawn
                else:
                    assert share == ("<0.1 %" if 0 < total < 0.0005 else f"{100 * total:.1f} %")
                    assert share in drawn
            assert at == len(shares)
            assert view.text().splitlines()[-1] == "  most of each head: " + ", ".join(
                f"head {i} logical {row.index(max(row))} ({percent(max(row))})"
                for i, row in enumerate(layer.mass)
            )
            if len(shares) < 20:
                for i in range(len(shares)):
                    each = ", ".join(f"head {k} {percent(row[i])}" for k, row in enumerate(layer.mass))
                    assert any(words.startswith(f"logical {i}, ") and words.endswith(each) for words in said)


def test_the_largest_shares_have_rows_of_their_own():
    view = AttentionView(CASES["many"])
    alone = {first for first, stop, *_ in rows(view) if stop == first + 1}
    shares = CASES["many"].attention[-1].mean()
    best = sorted(range(70), key=lambda i: -shares[i])[:15]
    assert set(best) <= alone
    assert 69 in alone, "the newest token's block, whatever its share"


def test_bars_are_as_long_as_their_shares():
    view = AttentionView(CASES["a few"], 0, 1)
    bars = [
        float(node.get("width")) for node in ET.fromstring(view.svg()).iter(f"{SVG}rect")
        if node.get("class") == "pi-live" and float(node.get("height")) == 13
    ]  # fmt: skip
    shares = CASES["a few"].attention[0].mass[1]
    assert bars == pytest.approx([220 * share / max(shares) for share in shares], abs=0.06)


def test_colour_is_never_the_only_signal():
    svg = AttentionView(CASES["window"], head=1).svg()
    assert "url(#pi-v-idle)" in svg, "what is outside the window is hatched and named"
    assert "not seen" in texts(svg)
    bold = re.findall(r'class="[^"]*pi-strong[^"]*"[^>]*>([^<]+)<', svg)
    assert bold == ["r&lt;0&gt;", "head 1"], "the request shown, the head shown"


def test_texts_are_shown_where_given():
    shown = texts(AttentionView(CASES["a few"]).svg())
    first = "".join(CASES["a few"].tokens[:SIZE]).replace("\n", "⏎").replace("\x00", "\\x00")
    assert f'"{first}"' in shown
    assert "tokens" in shown
    assert "tokens" not in texts(AttentionView(CASES["no texts"]).svg())


def parts(svg, attribute):
    return [node for node in ET.fromstring(svg).iter(f"{SVG}g") if node.get(attribute) is not None]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_parts_say_whose_blocks_they_are(width):
    case = CASES["window"]
    svg, layer = AttentionView(case, 3).svg(width=width), case.attention[1]
    for node in parts(svg, "data-blocks"):
        ids = [int(name) for name in node.get("data-blocks").split()]
        first, _, last = re.match(r"logical (\d+)( to (\d+))?, ", node.find(f"{SVG}title").text).groups()
        assert ids == [i for i in layer.block_table[int(first) : int(last or first) + 1] if i >= 0]
    named = {name for node in parts(svg, "data-blocks") for name in node.get("data-blocks").split()}
    assert named == {str(i) for i in layer.block_table if i >= 0}, "each has a part, freed ones have none"
    assert [node.get("data-rid") for node in parts(svg, "data-rid")] == ["r<0>"]


def test_a_row_stays_the_same_part_from_step_to_step():
    view = AttentionView(tapped_run(), request="A")
    (_, before), (_, after) = (view.sheet(step, WIDE).layers[4] for step in (20, 21))
    assert len(before) == 11
    assert set(before) & set(after) == set(before[:-1]), "all but the block that got tokens"


# -- steps ------------------------------------------------------------------------------------------------------------


def test_it_shows_the_newest_record_and_says_so():
    records = tapped_run()
    view = AttentionView(records, layer=0)
    assert (view.first_step, view.last_step, view.cursor) == (0, 40, 40)
    assert view.text(7).startswith(
        "Attention over blocks: step 7: A, layer 0, mean of 3 heads: the newest token, at "
    )
    assert view.record(6) is view.record(5)
    assert "step 6: the newest record is of step 5: A, layer 0" in view.text(6)
    assert view.text(5).splitlines()[1:] == view.text(6).splitlines()[1:]


def test_one_request_of_several():
    records = tapped_run()
    both, only = AttentionView(records), AttentionView(records, request="B")
    assert (only.first_step, only.last_step) == (10, 40)
    assert both.record(20).request_id == "A", "the first by id"
    assert [node.get("data-rid") for node in parts(both.svg(20), "data-rid")] == ["A", "B"]
    assert [node.get("data-rid") for node in parts(only.svg(20), "data-rid")] == ["B"]
    crowd = [replace(records[20], request_id=f"r{i}") for i in range(11)]
    view = AttentionView(crowd[::-1])
    assert view.record().request_id == "r0"
    view.selected = {"request": "r10"}
    for width in (WIDE, NARROW):
        svg = view.svg(width=width)
        assert [node.get("data-rid") for node in parts(svg, "data-rid")] == ["r8", "r9", "r10"]
        assert "and 8 more" in texts(svg)
    with pytest.raises(ConfigError, match="request='C': these records are of A, B"):
        AttentionView(records, request="C")


def test_a_selected_request_is_shown_where_it_has_records():
    view, only = AttentionView(tapped_run()), AttentionView(tapped_run(), request="A")
    before, version = view.svg(20), view.version
    for each in (view, only):
        each.selected = {"request": "B"}
    assert view.record(20).request_id == "B"
    assert view.version == version + 1, "what a browser holds is out of date"
    assert "step 9: no record of B up to this step" in view.text(9)
    assert only.record(20).request_id == "A"
    for other in ({"request": "C"}, {"block": 101}, {}):
        view.selected = other
        assert view.record(20).request_id == "A"
    assert view.svg(20) == before


def test_records_may_come_while_it_is_shown():
    records = tapped_run()
    shown = records[:3]
    view = AttentionView(shown, head=2)
    assert not view.update()
    shown += records[3:30]
    assert view.update()
    assert view.cursor == view.last_step == records[29].step
    shown.append(replace(records[29], step=records[29].step + 1, attention=()))
    assert view.update()
    assert "holds no attention" in view.text(), "a record that cannot be shown is no error any more"
    assert view._repr_mimebundle_()["text/plain"] == repr(view)
    view.cursor = view.first_step
    shown[:28] = []
    assert view.update()
    assert view.cursor == view.first_step == records[28].step, "what is forgotten is not shown"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"layer": 1}, r"layer=1: this record has 0, 3"), ({"head": 3}, r"head=3: this record has 0, 1, 2")],
)
def test_what_is_not_there_is_named(options, message):
    with pytest.raises(ConfigError, match=message):
        AttentionView(CASES["a few"], **options)


def test_other_things_are_refused():
    with pytest.raises(ConfigError, match="holds no attention"):
        AttentionView(replace(CASES["a few"], attention=()))
    for given, what in (([], "an empty list"), (["x"], "a list"), (CASES, "a dict")):
        with pytest.raises(ConfigError, match=f"a TapRecord or several in a list, not {what}; give"):
            AttentionView(given)


OVERLAPS = """() => {
  const svg = document.querySelector("svg"), frame = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll("text")].map(node => [node.textContent, node.getBoundingClientRect()]);
  const wrong = boxes.filter(([, b]) => b.left < frame.left || b.right > frame.right || b.bottom > frame.bottom)
    .map(([name]) => `outside: ${name}`);
  boxes.forEach(([name, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
      wrong.push(`${name} over ${other}`);
  }));
  return wrong;
}"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_no_label_is_clipped_or_lies_on_another(new_page, artifacts, width):
    page = new_page()
    for name, case in CASES.items():
        page.set_content(f"<body style='margin:0'>{AttentionView(case, head=0).svg(width=width)}</body>")
        assert page.evaluate(OVERLAPS) == [], name
        page.locator("svg").screenshot(path=artifacts / f"attention-{name.replace(' ', '-')}-{width}.png")
    assert not page.errors
    assert not page.external
