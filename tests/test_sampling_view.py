"""Sampling as a picture: well-formed, repeatable, every number the record's, every cut with its reason."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from made_taps import choice_of, tapped_run

from pagedinfer.errors import ConfigError
from pagedinfer.trace.tap_records import TapRecord
from pagedinfer.views import SamplingView, sampling_svg
from pagedinfer.views.stepped import NARROW, WIDE

SVG = "{http://www.w3.org/2000/svg}"


def record(**settings):
    return TapRecord(7, "r<0>", 16, 20, (), (choice_of(**settings),))


CASES = {
    "plain": record(),
    "greedy": record(temperature=0.0, top_k=3),
    "top-k": record(seed=2, top_k=4),
    "top-p": record(seed=3, top_p=0.8, temperature=1.4),
    "all": record(
        seed=4, min_p=0.02, top_k=6, top_p=0.75, temperature=0.9, changed=("mask", "logit_bias", "penalties")
    ),
    "masked": record(seed=5, changed=("mask",), texts=False),
    "one token": record(vocab=1),
    "far u": record(seed=8, vocab=9, temperature=2.0),
}


def texts(svg):
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}text")]


def titles(svg):
    return [node.text for node in ET.fromstring(svg).iter(f"{SVG}title")]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_picture_is_well_formed_named_and_repeatable(case):
    view = SamplingView(case)
    root = ET.fromstring(view.svg())
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text == "Sampling"
    assert "output token 4" in root.find(f"{SVG}desc").text
    assert view.svg() == sampling_svg(TapRecord.from_json(case.to_json()))
    assert not re.search("NaN|http(?!://www.w3.org/2000/svg)", view.svg())


def written(share):
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_number_is_the_records(case):
    view, (choice,) = SamplingView(case), case.choices
    own = ("model", "temperature", "min_p", "top_k", "top_p", "greedy")
    changes = [i for i, stage in enumerate(choice.stages) if stage.name not in own]
    columns = [i for i, stage in enumerate(choice.stages) if stage.name in own or i == changes[-1]]
    lines = view.text().splitlines()
    drawn, small = texts(view.svg()), texts(view.svg(width=NARROW))
    assert [part.rpartition(": ")[2] for part in lines[1].split(" -> ")] == [
        f"{choice.stages[i].left} left" for i in columns
    ]
    rows = lines[3:] if changes else lines[2:]
    if changes:
        assert lines[2].strip() == f"Logits changed by {', '.join(choice.stages[i].name for i in changes)}."
    for row, one in zip(rows, choice.candidates, strict=False):
        shares = [written(one.shares[i]) for i in columns]
        assert " -> ".join(shares) in row
        assert all((share in drawn and share in small) or share == "0.0 %" for share in shares)
        assert row.strip() in titles(view.svg(width=NARROW))
        if one.why:
            assert row.endswith(one.why)
            head, _, tail = one.why.partition(": ")
            assert head in drawn
            assert not tail or tail in drawn, f"cut short: {tail}"
            assert one.why in small
    assert rows[-1].strip() == "all others: " + " -> ".join(written(choice.stages[i].rest) for i in columns)
    (marked,) = [row for row in rows if "drawn" in row or "chosen" in row]
    assert rows.index(marked) == [one.token_id for one in choice.candidates].index(choice.token_id)
    if choice.stages[-1].name != "greedy":
        low, high = map(float, re.search(r"u in ([\d.]+) to ([\d.]+)", marked).groups())
        assert low - 1e-4 <= choice.uniform <= high + 1e-4
        assert f"u = {choice.uniform:.4f}" in drawn


def test_u_points_into_the_interval_of_the_token_that_came():
    for case in CASES.values():
        (choice,) = case.choices
        root = ET.fromstring(SamplingView(case).svg())
        boxes = [node for node in root.iter(f"{SVG}rect") if node.get("class") == "pi-accent"]
        if choice.stages[-1].name == "greedy":
            assert not boxes
            continue
        (box,) = boxes
        (mark,) = [node for node in root.iter(f"{SVG}path") if node.get("class") == "pi-s-ink"]
        x = float(re.match(r"M([\d.]+) ", mark.get("d"))[1])
        assert float(box.get("x")) - 0.1 <= x <= float(box.get("x")) + float(box.get("width")) + 1.1


def test_colour_is_never_the_only_signal():
    svg = SamplingView(CASES["all"]).svg()
    assert "url(#pi-v-idle)" in svg
    assert "–" in texts(svg), "what was dropped is hatched, has a dash for its number, and a sentence"
    assert "dropped by top-p" in texts(svg)
    assert "ruled out by mask" in texts(svg)


def test_a_step_that_chose_no_token_says_so():
    view = SamplingView(tapped_run())
    assert (view.first_step, view.last_step) == (0, 40)
    assert view.text(0) == (
        "Sampling: step 0: A chose no token in this step (a chunk of its prompt, a failure, or a tap with "
        "sampling=False)"
    )
    assert view.text(1).startswith("Sampling: step 1: A, output token 1: u = ")
    assert "step 6: the newest record is of step 5: A, output token 5" in view.text(6)
    for step in (0, 1, 6):
        for width in (WIDE, NARROW):
            assert 'data-rid="A"' in view.svg(step, width)
    assert SamplingView(tapped_run(), request="B").record(20).request_id == "B"


def test_what_is_not_there_is_named():
    case = CASES["plain"]
    with pytest.raises(ConfigError, match=r"r<0> chose no token in this step .*; show another"):
        SamplingView(replace(case, choices=()))
    for choice in (1, -2):
        with pytest.raises(ConfigError, match=f"choice={choice}: this record has 1 choice"):
            SamplingView(case, choice)
    for choice in (True, 0.5):
        with pytest.raises(ConfigError, match=f"choice={choice}: it must be an integer"):
            SamplingView(case, choice)
    with pytest.raises(ConfigError, match="a TapRecord or several in a list, not a str"):
        SamplingView("case")
    two = replace(case, step=8, choices=case.choices * 2)
    view = SamplingView([case, two], 1)
    assert view.text(7) == "Sampling: step 7: choice=1: this record has 1 choice"


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
        page.set_content(f"<body style='margin:0'>{SamplingView(case).svg(width=width)}</body>")
        assert page.evaluate(OVERLAPS) == [], name
        page.locator("svg").screenshot(path=artifacts / f"sampling-{name.replace(' ', '-')}-{width}.png")
    assert not page.errors
    assert not page.external
