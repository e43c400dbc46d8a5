"""Colours told apart by colour-blind eyes, checked with the formulas of the papers, written down here afresh.

Colour vision: Machado, Oliveira, Fernandes, "A Physiologically-based Model for Simulation of Color Vision
Deficiency", 2009, matrices of severity 1. Difference: Euclidean distance in CIE L*a*b* (CIE 1976).
"""

import itertools
import math

import pytest

from pagedinfer.views import palette
from pagedinfer.views.assets import esm, style

VISION = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritan": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE = (0.95047, 1.0, 1.08883)
THEMES = {"light": palette.LIGHT, "dark": palette.DARK}


def times(matrix, vector):
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def linear(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def lab(colour, vision):
    seen = [min(1.0, max(0.0, c)) for c in times(VISION[vision], linear(colour))]
    x, y, z = (
        t ** (1 / 3) if (t := a / w) > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29
        for a, w in zip(times(TO_XYZ, seen), WHITE, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(a, b):
    high, low = sorted((times(TO_XYZ, linear(c))[1] for c in (a, b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_formulas_know_their_landmarks():
    assert contrast("#000000", "#ffffff") == pytest.approx(21, abs=0.01)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert math.dist(lab("#ff0000", "normal"), lab("#00ff00", "normal")) == pytest.approx(170.6, abs=0.5)
    red_green = math.dist(lab("#c0504d", "deutan"), lab("#6f8f3c", "deutan"))
    assert red_green < math.dist(lab("#c0504d", "normal"), lab("#6f8f3c", "normal")) / 2, (
        "a deutan eye confuses them"
    )


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("vision", VISION)
def test_lanes_differ_for_every_eye(theme, vision):
    colours = [lab(colour, vision) for colour in THEMES[theme].lanes]
    neighbours = zip(colours, colours[1:] + colours[:1], strict=True)
    assert min(math.dist(a, b) for a, b in neighbours) >= 30
    assert min(math.dist(a, b) for a, b in itertools.combinations(colours, 2)) >= 15


@pytest.mark.parametrize("theme", THEMES)
def test_contrast(theme):
    theme = THEMES[theme]
    fills = {**{f"lane {i}": c for i, c in enumerate(theme.lanes)}, "live": theme.live, "alarm": theme.alarm}
    for name, colour in fills.items():
        assert contrast(colour, theme.page) >= 3, f"{name} as a shape on the page"
    assert contrast(theme.slack, theme.page) >= 2.5, "the slack is hatched too"
    for name in ("ink", "muted", "alarm", "accent"):
        assert contrast(getattr(theme, name), theme.page) >= 4.5, f"{name} as text"
        assert contrast(getattr(theme, name), theme.free) >= 4.5 or name == "alarm", f"{name} on a free block"
    for i, colour in enumerate(theme.lanes):
        assert contrast(palette.ink_on(colour), colour) >= 4.5, f"label on lane {i}"
        assert contrast(theme.ink, palette.mix(colour, theme.card, palette.TINT)) >= 4.5, (
            f"label on the tint of lane {i}"
        )


def test_a_request_is_never_known_by_colour_alone():
    looks = [(palette.colour_of(lane), palette.texture_of(lane)) for lane in range(64)]
    assert len(set(looks[:32])) == 32
    assert all(a[0] != b[0] and a[1] != b[1] for a, b in itertools.pairwise(looks))


def test_the_style_sheet_has_both_themes_and_the_script_the_same_numbers():
    css = style()
    for theme in THEMES.values():
        assert all(colour in css for colour in theme.lanes)
    assert css.count("light-dark(") >= 40
    assert "prefers-reduced-motion" in css
    assert f"NUM_COLOURS = {palette.NUM_COLOURS}, NUM_TEXTURES = {palette.NUM_TEXTURES};" in esm()
