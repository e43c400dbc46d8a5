"""Attention over blocks as a picture: well-formed, repeatable, every number the record's."""

import base64
import random
import re
import struct
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from pagedinfer.errors import ConfigError
from pagedinfer.trace.tap_records import LayerAttention, TapRecord
from pagedinfer.views import AttentionView, attention_svg

SVG = "{http://www.w3.org/2000/svg}"
SIZE = 4


def record(blocks=6, heads=3, window=None, seed=1, layers=(0, 3), texts=True):
    """A request of `blocks` blocks whose last one is half full."""
    chance = random.Random(seed)
    position = blocks * SIZE - 3
    first = 0 if window is None else max(0, position + 1 - window)
    kept = []
    for layer in layers:
        mass = []
        for _ in range(heads):
            row = [0.0 if (i + 1) * SIZE <= first else chance.random() ** 3 for i in range(blocks)]
            mass.append(tuple(share / sum(row) for share in row))
        table = chance.sample(range(1000), blocks)
        table[: first // SIZE] = [-1] * (first // SIZE)
        kept.append(LayerAttention(layer, window, first, tuple(table), tuple(range(heads)), tuple(mass)))
    tokens = tuple(chance.choice(["<b>", " the", "\n", "\x00"]) for _ in range(position + 1)) if texts else ()
    return TapRecord(12, "r<0>", SIZE, position, tuple(kept), (), tokens)


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


def rows(view):
    """(first logical block, one past the last, physical, share or None) of each row of the text."""
    found = []
    for line in view.text().splitlines()[1:]:
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
            drawn = texts(view.svg())
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


def test_the_largest_shares_have_rows_of_their_own():
    view = AttentionView(CASES["many"])
    alone = {first for first, stop, *_ in rows(view) if stop == first + 1}
    best = sorted(range(70), key=lambda i: -view.shares[i])[:15]
    assert set(best) <= alone
    assert 69 in alone, "the newest token's block, whatever its share"


def test_bars_are_as_long_as_their_shares():
    view = AttentionView(CASES["a few"], 0, 1)
    bars = [
        float(node.get("width")) for node in ET.fromstring(view.svg()).iter(f"{SVG}rect")
        if node.get("class") == "pi-live" and float(node.get("height")) == 13
    ]  # fmt: skip
    shares = view.layer.mass[1]
    assert bars == pytest.approx([220 * share / max(shares) for share in shares], abs=0.06)


def test_colour_is_never_the_only_signal():
    svg = AttentionView(CASES["window"], head=1).svg()
    assert "url(#pi-gone)" in svg, "what is outside the window is hatched and named"
    assert "not seen" in texts(svg)
    (bold,) = re.findall(r'class="[^"]*pi-strong[^"]*"[^>]*>([^<]+)<', svg)
    assert bold == "head 1"


def test_texts_are_shown_where_given():
    shown = texts(AttentionView(CASES["a few"]).svg())
    first = "".join(CASES["a few"].tokens[:SIZE]).replace("\n", "⏎").replace("\x00", "\\x00")
    assert f'"{first}"' in shown
    assert "tokens" in shown
    assert "tokens" not in texts(AttentionView(CASES["no texts"]).svg())


def test_the_png_has_a_row_per_head_and_a_column_per_block():
    view = AttentionView(CASES["a few"])
    data = view.png()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert height == 3 * 30
    assert width == 6 + 6 * 40
    assert len(data) < 2000
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"image/svg+xml", "image/png", "text/plain"}
    assert base64.b64decode(bundle["image/png"]) == data
    assert bundle["text/plain"] == view.text() == repr(view)


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
    with pytest.raises(ConfigError, match="one TapRecord, not a list"):
        AttentionView([CASES["a few"]])


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
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_label_is_clipped_or_lies_on_another(new_page, artifacts, scheme):
    page = new_page(scheme=scheme)
    for name, case in CASES.items():
        page.set_content(f"<body style='margin:0'>{AttentionView(case, head=0).svg()}</body>")
        assert page.evaluate(OVERLAPS) == [], name
        page.locator("svg").screenshot(path=artifacts / f"attention-{name.replace(' ', '-')}-{scheme}.png")
    assert not page.errors
    assert not page.external
