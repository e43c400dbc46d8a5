"""Colours and textures. Found by a search for the largest difference between neighbours under normal, protan, deutan
and tritan vision (Machado, Oliveira and Fernandes 2009) at 3:1 contrast against the page; a test recomputes both.

A request keeps its colour and texture for the whole film: lane i has colour i mod 8 and texture (i + i div 8) mod 4,
so that the 32 nearest lanes differ, and no two neighbours differ in colour alone.
"""

from __future__ import annotations

__all__ = [
    "DARK",
    "LIGHT",
    "NUM_COLOURS",
    "NUM_TEXTURES",
    "Theme",
    "colour_of",
    "css",
    "ink_on",
    "texture_of",
]

from dataclasses import dataclass

NUM_COLOURS = 8
NUM_TEXTURES = 4


@dataclass(frozen=True, slots=True)
class Theme:
    """One colour scheme, as hex strings. `lanes` are the requests' colours."""

    page: str
    card: str
    ink: str
    muted: str
    line: str
    free: str
    accent: str
    live: str
    slack: str
    alarm: str
    cached: str
    lanes: tuple[str, ...]


LIGHT = Theme(
    page="#ffffff", card="#ffffff", ink="#1b2430", muted="#566170", line="#d7dce3", free="#eef1f4", accent="#0b57d0",
    live="#3a6a94", slack="#d08a1c", alarm="#b3261e", cached="#c9d0d8",
    lanes=("#08497a", "#ab4a0e", "#669d74", "#6b3357", "#009dc5", "#97071d", "#ad8d10", "#9a7fec"),
)  # fmt: skip
DARK = Theme(
    page="#14171c", card="#14171c", ink="#e6eaf0", muted="#a2acb9", line="#39414c", free="#20252d", accent="#8ab4f8",
    live="#6fa3cf", slack="#e0a646", alarm="#ff8a80", cached="#4a5361",
    lanes=("#099bfb", "#c28f1f", "#01ca87", "#9e5ac0", "#39edf7", "#d1454b", "#cbe267", "#836f96"),
)  # fmt: skip


def colour_of(lane: int) -> int:
    """Number of the lane's colour."""
    return lane % NUM_COLOURS


def texture_of(lane: int) -> int:
    """Number of the lane's texture: 0 plain, 1 rising stripes, 2 dots, 3 falling stripes."""
    return (lane + lane // NUM_COLOURS) % NUM_TEXTURES


def luminance(colour: str) -> float:
    """Relative luminance of a hex colour (WCAG 2)."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two hex colours, 1 to 21 (WCAG 2)."""
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    return max(("#ffffff", "#000000"), key=lambda ink: contrast(ink, colour))


def mix(colour: str, other: str, share: float) -> str:
    """`share` of `colour` in `other`."""
    pairs = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in pairs)


_NAMES = ("page", "card", "ink", "muted", "line", "free", "accent", "live", "slack", "alarm", "cached")
TINT = 0.2


def css(root: str) -> str:
    """The widget's colours as CSS variables on `root` that follow its `color-scheme`."""
    rules = [f"--pi-{n}:light-dark({getattr(LIGHT, n)},{getattr(DARK, n)});" for n in _NAMES]
    out = [f"{root}{{{''.join(rules)}}}"]
    for i, (light, dark) in enumerate(zip(LIGHT.lanes, DARK.lanes, strict=True)):
        tint = f"light-dark({mix(light, LIGHT.card, TINT)},{mix(dark, DARK.card, TINT)})"
        on = f"light-dark({ink_on(light)},{ink_on(dark)})"
        (a, x), (b, y) = hatch_on(light), hatch_on(dark)
        hatch = f"light-dark(rgb(from {a} r g b / {x}),rgb(from {b} r g b / {y}))"
        out.append(
            f".pi-c{i}{{--pi-lane:light-dark({light},{dark});--pi-tint:{tint};--pi-on:{on};--pi-hatch:{hatch}}}"
        )
    return "\n".join(out)


def hatch_on(colour: str) -> tuple[str, float]:
    """Colour and opacity of texture on `colour`: away from the label's ink, so that labels stay readable."""
    return ("#000000", 0.24) if ink_on(colour) == "#ffffff" else ("#ffffff", 0.3)


def static_css() -> str:
    """Classes of the static pictures, light, and dark where the reader's browser asks for it."""
    return _static_rules(LIGHT) + f"@media (prefers-color-scheme:dark){{{_static_rules(DARK)}}}"


def _static_rules(theme: Theme) -> str:
    fills = {n: getattr(theme, n) for n in _NAMES} | {f"c{i}": c for i, c in enumerate(theme.lanes)}
    fills |= {f"t{i}": mix(c, theme.card, TINT) for i, c in enumerate(theme.lanes)}
    fills |= {f"o{i}": ink_on(c) for i, c in enumerate(theme.lanes)}
    rules = [f".pi-{name}{{fill:{colour}}}" for name, colour in fills.items()]
    strokes = {
        "line": theme.line,
        "accent": theme.accent,
        "alarm": theme.alarm,
        "muted": theme.muted,
        "ink": theme.ink,
    }
    strokes |= {"slack": theme.slack, "page": theme.page}
    rules += [f".pi-s-{name}{{stroke:{colour}}}" for name, colour in strokes.items()]
    for i, colour in enumerate(theme.lanes):
        stroke, opacity = hatch_on(colour)
        rules.append(f".pi-h{i}{{stroke:{stroke};stroke-opacity:{opacity}}}")
    return "".join(rules)
