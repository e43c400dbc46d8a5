"""The PNG of a picture: letters that tell cases apart, what shows through, and whose stripes are whose."""

import string
import xml.etree.ElementTree as ET
import zlib

import pytest

from pagedinfer.course import bundled_recording
from pagedinfer.views import picture_svg
from pagedinfer.views.glyphs import CAPITAL, drawn_letter, plain_letters
from pagedinfer.views.palette import LIGHT, hatch_on, mix
from pagedinfer.views.raster import png_of
from pagedinfer.views.svg import Drawing, document, rect, text, textures, translate

ZOOM, PAD = 1.3, 16
SIGNS = string.digits + string.ascii_letters + string.punctuation


def pixels(body, width=120, height=60):
    """Rows of colours of a drawing's PNG."""
    png = png_of(document("x", Drawing(body, width, height, "x")))
    size, parts, at = (int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")), {}, 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        parts[png[at + 4 : at + 8]] = png[at + 8 : at + 8 + length]
        at += 12 + length
    raw, palette = zlib.decompress(parts[b"IDAT"]), parts[b"PLTE"]
    names = ["#" + palette[i : i + 3].hex() for i in range(0, len(palette), 3)]
    lines = [raw[y * (size[0] + 1) + 1 : (y + 1) * (size[0] + 1)] for y in range(size[1])]
    return [[names[place] for place in line] for line in lines]


def at(rows, x, y):
    return rows[round((PAD + y) * ZOOM)][round((PAD + x) * ZOOM)]


@pytest.mark.parametrize("bold", [False, True])
def test_no_two_signs_look_alike(bold):
    drawn = {sign: drawn_letter(sign, bold) for sign in SIGNS}
    assert all(rows for _, rows in drawn.values())
    assert len(set(drawn.values())) == len(SIGNS)
    for width, rows in drawn.values():
        assert all(0 <= down < CAPITAL + 2 and right + length <= width for down, right, length in rows)


def test_letters_that_we_do_not_have_are_made_plain_or_boxed():
    assert plain_letters("“Élan” – it’s 5 × 3 …") == '"Elan" – it\'s 5 × 3 …'
    assert plain_letters("日a") == "□a"
    assert drawn_letter("□", False)[1]
    assert drawn_letter(" ", True)[1] == ()


def test_every_sign_of_our_pictures_can_be_drawn():
    svg = picture_svg(bundled_recording(), 24, "r3", ("blocks", "timeline", "memory", "queues", "budget"))
    for node in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        assert "□" not in plain_letters(node.text)


@pytest.mark.parametrize(
    "classes", ["pi-ink", "pi-ink pi-small", "pi-ink pi-strong", "pi-ink pi-small pi-strong"]
)
@pytest.mark.parametrize(
    "words", ["r12 needs 3 blocks, 1 free, watermark 2", "0123456789", "Waiting: 12 of 64 tokens"]
)
def test_text_stays_within_the_width_that_the_svg_counts_on(classes, words):
    """0.54 em a letter: see `views.svg.fit`."""
    room = len(words) * 0.54 * (11 if "small" in classes else 12)
    for anchor, left in (("", 0), ("middle", room / 2), ("end", room)):
        rows = pixels(text(left, 30, words, classes, anchor), 320)
        columns = [i for row in rows for i, colour in enumerate(row) if colour == LIGHT.ink]
        assert min(columns) >= PAD * ZOOM - 1
        assert max(columns) <= (PAD + room) * ZOOM + 1


def test_what_is_seen_through_is_blended():
    body = rect("pi-live", 0, 0, 50, 20) + rect("pi-accent", 10, 0, 20, 40, 0, 'fill-opacity=".16"')
    rows = pixels(body + f'<g opacity=".3">{rect("pi-alarm", 60, 0, 20, 20)}</g>')
    assert at(rows, 5, 10) == LIGHT.live
    assert at(rows, 20, 10) == mix(LIGHT.accent, LIGHT.live, 0.16)
    assert at(rows, 20, 30) == mix(LIGHT.accent, LIGHT.page, 0.16)
    assert at(rows, 70, 10) == mix(LIGHT.alarm, LIGHT.page, 0.3)


def test_each_texture_has_its_own_stripes():
    seen = set()
    for lane in range(4):
        colour = LIGHT.lanes[lane]
        stripe = mix(hatch_on(colour)[0], colour, hatch_on(colour)[1])
        fill = rect(f"pi-c{lane}", 0, 0, 40, 40) + rect(
            "", 0, 0, 40, 40, 0, f'fill="url(#pi-x{lane}-{lane})"'
        )
        rows = pixels(f"<defs>{textures([lane])}</defs>" + translate(0, 0, fill))
        seen.add(tuple(at(rows, x / ZOOM, y / ZOOM) == stripe for x in range(6, 18) for y in range(6, 18)))
        assert at(rows, 20, 20) in (colour, stripe)
    assert len(seen) == 4


def test_lines_are_as_thick_as_they_are_said_to_be():
    rows = pixels('<path class="pi-s-ink" fill="none" stroke-width="2.2" d="M10 20H60"/>')
    column = [row[round((PAD + 30) * ZOOM)] for row in rows]
    assert column.count(LIGHT.ink) == 3
    dashed = pixels('<path class="pi-s-ink" stroke-width="2" stroke-dasharray="2 4" d="M10 20H60"/>')
    assert 0.2 < sum(row.count(LIGHT.ink) for row in dashed) / (50 * ZOOM * 3) < 0.7


def test_more_colours_than_a_palette_holds_are_drawn_in_the_nearest():
    cells = [(i % 20 * 5, i // 20 * 5, i) for i in range(300)]
    body = "".join(
        rect(f"pi-c{i % 8}", x, y, 4, 4, 0, f'fill-opacity="{0.2 + i / 400:.3f}"') for x, y, i in cells
    )
    rows = pixels(body, 120, 90)
    for x, y, i in cells:
        wanted = mix(LIGHT.lanes[i % 8], LIGHT.page, round(0.2 + i / 400, 3))
        found = at(rows, x + 2, y + 2)
        far = max(abs(int(found[k : k + 2], 16) - int(wanted[k : k + 2], 16)) for k in (1, 3, 5))
        assert far <= 40
