"""Parts that the views with a cursor share: wrapped lines, step axes, hatching, rounded numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from pagedinfer.views.svg import GUTTER, Scale, number, path, rect, text

__all__ = [
    "PATTERNS", "SMALL", "attribute", "block_names", "captioned", "cursor", "flow", "hatched", "heading", "part_of",
    "plain", "round_up", "runs_of", "scale_around", "scale_of", "share", "step_axis", "wrapped",
]  # fmt: skip

SMALL = "pi-muted pi-small"

PATTERNS = (
    '<defs><pattern id="pi-v-lost" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path class="pi-s-alarm" d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5" stroke-width="1.3"/></pattern>'
    '<pattern id="pi-v-tail" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path class="pi-s-page" stroke-opacity=".7" stroke-width="1.4" d="M-1 7L7 -1M2 10L10 2M-4 4L4 -4"/></pattern>'
    '<pattern id="pi-v-idle" width="7" height="7" patternUnits="userSpaceOnUse">'
    '<path class="pi-s-muted" stroke-opacity=".75" stroke-width="1" d="M-1 8L8 -1M-1 1L1 -1M6 8L8 6"/></pattern></defs>'
)
"""Hatchings, each its own: what was lost (alarm), what is allocated and empty (on amber), what is idle (muted)."""


_SPACES = str.maketrans({"\n": "&#10;", "\r": "&#13;", "\t": "&#9;"})
"""Characters that a parser would turn into spaces in an attribute."""


def attribute(value: str) -> str:
    """`value` as it stands between the quotes of an attribute."""
    return escape(value).translate(_SPACES)


def part_of(
    body: str, rid: str | None = None, blocks: Iterable[int] = (), *, title: str = "", more: str = ""
) -> str:
    """The part of a drawing that stands for a request, for blocks, or for blocks of a request.

    A page selects them by a click on it, and highlights it with its relatives. Such parts must not lie in each other.
    `title` is what the mouse says there, `more` are further attributes.
    """
    ids = " ".join(map(str, blocks))
    at = f' data-blocks="{ids}"' if ids else ""
    at += "" if rid is None else f' data-rid="{attribute(rid)}"'
    return (
        f"<g{at}{' ' + more if more else ''}>{f'<title>{escape(title)}</title>' if title else ''}{body}</g>"
    )


def hatched(name: str, x: float, y: float, w: float, h: float) -> str:
    """A rectangle of one of `PATTERNS`."""
    return rect("", x, y, w, h, 0, f'fill="url(#pi-v-{name})"')


def plain(value: float) -> str:
    """A number with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def share(part: float, whole: float) -> str:
    """A share in per cent with one decimal; of nothing, "0.0 %"."""
    return f"{100 * part / whole if whole else 0:.1f} %"


def round_up(value: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is not below `value`."""
    base = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(base * a for a in (1, 2, 5, 10) if base * a >= value * (1 - 1e-9))


def runs_of(ids: Iterable[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive numbers, in the order given."""
    runs: list[tuple[int, int]] = []
    for block_id in ids:
        if runs and block_id == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block_id, 1))
    return runs


def block_names(ids: Iterable[int]) -> str:
    """Block ids in words: "4, 7 to 9"."""
    return ", ".join(f"{a} to {a + n - 1}" if n > 1 else str(a) for a, n in runs_of(ids))


def flow(content: str, width: float, size: float = 12) -> list[str]:
    """`content` as lines of about `width` pixels, broken between words."""
    room, lines = max(8, int(width / (size * 0.54))), [""]
    for word in content.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append(word)
        else:
            lines[-1] += (" " if lines[-1] else "") + word
    return lines


def wrapped(content: str, y: float, width: float, classes: str = "pi-muted") -> tuple[list[str], float]:
    """Text lines from `y` on, and the height that they take."""
    lines = flow(content, width, 11 if "small" in classes else 12)
    return [text(0, y + 16 * i, line, classes) for i, line in enumerate(lines)], 16.0 * len(lines)


def heading(title: str, words: str, width: float) -> tuple[list[str], float]:
    """A view's name over a sentence, and the height of both."""
    lines, tall = wrapped(words, 31, width)
    return [text(0, 12, title, "pi-ink pi-h"), *lines], 24 + tall


def captioned(title: str, words: str, width: float) -> tuple[list[str], int]:
    """As `heading`, and how many pixels lower all that follows is than below a single line of words."""
    lines, tall = heading(title, words, width)
    return lines, round(tall) - 40


def scale_of(first: int, last: int, room: float) -> Scale:
    """An axis of all steps, right of the gutter and `room` pixels wide at most.

    It may end a little after `last`, so that a run that grows moves what is drawn only now and then.
    """
    steps = max(1, last - first + 1)
    grain = 1 << max(0, steps.bit_length() - 5)
    steps = -(-steps // grain) * grain
    return Scale(first, first + steps - 1, GUTTER, min(28.0, room / steps))


def scale_around(first: int, last: int, step: int, room: float) -> Scale:
    """As `scale_of`; where a step would get less than a pixel, of a stretch of steps that holds `step`.

    It moves by a quarter of its length: a cursor that moves, and a run that grows, leave it in place for long.
    """
    whole = scale_of(first, last, room)
    if whole.column >= 1:
        return whole
    quarter = max(1, int(room) // 4)
    start = first + max(0, (step - first) // quarter - 3) * quarter
    return Scale(start, start + 4 * quarter - 1, GUTTER, room / (4 * quarter))


def cursor(scale: Scale, step: int, height: float) -> str:
    """The column of the current step, from 0 down, with an edge that shows over anything."""
    box = (scale.x(step), 0, max(scale.column, 3), height)
    return rect("pi-accent pi-s-accent", *box, 0, 'fill-opacity=".14" stroke-width="1.3"')


def step_axis(scale: Scale, y: float) -> list[str]:
    """The numbers of steps at a baseline `y`, and a rule over them."""
    names = [text(scale.x(s + 0.5), y, str(s), f"{SMALL} pi-num", "middle") for s in scale.ticks()]
    rule = path(
        "pi-s-line", f"M{number(scale.left)} {number(y - 13)}H{number(scale.right)}", 'stroke-width=".75"'
    )
    return [rule, text(scale.left - 8, y, "step", SMALL, "end"), *names]
