"""Memory chart: where the pool's token slots are (live, tail slack, free) over steps, and the KV waste."""

from __future__ import annotations

from collections.abc import Sequence

from pagedinfer.trace.recording import Recording
from pagedinfer.views.film import Film, film_of
from pagedinfer.views.svg import GUTTER, Drawing, Scale, document, legend, number, path, rect, text, translate

__all__ = ["draw_memory", "memory_svg", "memory_words", "percent"]

TOP, TALL, STRIP, BETWEEN = 46, 120, 36, 18
BASE = TOP + TALL + BETWEEN
BOTTOM = BASE + STRIP
SMALL = "pi-muted pi-small"


def memory_words(film: Film, step: int) -> str:
    """The numbers of one step: "613 live, 27 tail slack, 384 free of 1024 token slots; KV waste 4.2 %"."""
    live, slack, free, _ = film.lines[step - film.first_step]["m"]
    slots = f"{live} live, {slack} tail slack, {free} free of {live + slack + free} token slots"
    return f"{slots}; KV waste {percent(slack, live + slack)}"


def percent(part: int, whole: int) -> str:
    """A share in per cent with one decimal, halves up: as `static/dom.js` rounds."""
    tenths = (2000 * part + whole) // (2 * whole) if whole else 0
    return f"{tenths // 10}.{tenths % 10} %"


def _waste(live: int, slack: int) -> float:
    return 100 * slack / (live + slack) if live + slack else 0.0


def draw_memory(film: Film, step: int, width: int) -> Drawing:
    """Stacked areas over steps, and a strip with the KV waste below, on the timeline's scale."""
    scale = Scale.around(film.first_step, film.last_step, step, width)
    memory = [
        line["m"] for line in film.lines[scale.first - film.first_step : scale.last + 1 - film.first_step]
    ]
    words = memory_words(film, step)
    out = [
        text(0, 12, "Memory", "pi-ink pi-h"),
        text(0, 31, words, "pi-muted pi-num"),
        f"<defs>{_HATCH}</defs>",
    ]
    out += _slots(scale, memory, max(1, film.num_blocks * film.block_size))
    out += _waste_strip(scale, [_waste(m[0], m[1]) for m in memory])
    out.append(scale.cursor(step, TOP, BOTTOM))
    out += [text(scale.x(s + 0.5), BOTTOM + 16, str(s), f"{SMALL} pi-num", "middle") for s in scale.ticks()]
    out.append(translate(GUTTER, BOTTOM + 40, _legend()))
    return Drawing("".join(out), width, BOTTOM + 50, words + ".")


_HATCH = (
    '<pattern id="pi-tail" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path class="pi-s-page" stroke-opacity=".7" stroke-width="1.4" d="M-1 7L7 -1M2 10L10 2M-4 4L4 -4"/></pattern>'
)


def _slots(scale: Scale, memory: Sequence[Sequence[int]], total: int) -> list[str]:
    """Live tokens, tail slack on top of them, free above."""
    lives = [m[0] / total for m in memory]
    tops = [(m[0] + m[1]) / total for m in memory]
    live, slack = _area(scale, [0.0] * len(lives), lives), _area(scale, lives, tops)
    out = [rect("pi-free", scale.left, TOP, scale.right - scale.left, TALL), path("pi-live", live)]
    out += [path("pi-slack", slack), path("", slack, 'fill="url(#pi-tail)"')]
    for share in (0, 0.5, 1):
        y = TOP + TALL * (1 - share)
        out += [_rule(scale, y), text(GUTTER - 8, y + 4, str(round(total * share)), f"{SMALL} pi-num", "end")]
    return [*out, text(0, TOP + TALL / 2 - 14, "token", SMALL), text(0, TOP + TALL / 2, "slots", SMALL)]


def _waste_strip(scale: Scale, waste: Sequence[float]) -> list[str]:
    most = next(m for m in (10, 25, 50, 100) if max(waste) <= m)
    line = _stairs(scale, [w / most for w in waste], BASE, STRIP)
    out = [
        _rule(scale, BASE),
        _rule(scale, BOTTOM),
        path("pi-s-slack", line, 'fill="none" stroke-width="1.8"'),
    ]
    out += [text(0, BASE + 14, "KV", SMALL), text(0, BASE + 28, "waste", SMALL)]
    out.append(text(GUTTER - 8, BASE + 8, f"{most} %", f"{SMALL} pi-num", "end"))
    return [*out, text(GUTTER - 8, BOTTOM + 2, "0 %", f"{SMALL} pi-num", "end")]


def _rule(scale: Scale, y: float) -> str:
    return path("pi-s-line", f"M{scale.left} {number(y)}H{number(scale.right)}", 'stroke-width=".75"')


def _area(scale: Scale, low: Sequence[float], high: Sequence[float]) -> str:
    """The area between two rows of shares (0 to 1) of the chart's height."""
    back = (
        f"V{number(TOP + TALL * (1 - v))}H{number(scale.x(scale.first + i))}"
        for i, v in reversed(list(enumerate(low)))
    )
    return f"{_stairs(scale, high, TOP, TALL)}{''.join(back)}Z"


def _stairs(scale: Scale, values: Sequence[float], top: float, tall: float) -> str:
    """A row of shares as stairs, one per column."""
    parts = (
        f"V{number(top + tall * (1 - v))}H{number(scale.x(scale.first + i + 1))}"
        for i, v in enumerate(values)
    )
    return f"M{number(scale.left)} {number(top + tall * (1 - values[0]))}{''.join(parts)}"


def _legend() -> str:
    tail = rect("pi-slack", 0, -10, 14, 12, 2) + rect("", 0, -10, 14, 12, 2, 'fill="url(#pi-tail)"')
    free = rect("pi-free pi-s-line", 0, -10, 14, 12, 2)
    names = ("live tokens", "tail slack: allocated, holds no token", "free")
    return legend(zip(names, (rect("pi-live", 0, -10, 14, 12, 2), tail, free), strict=True))


def memory_svg(recording: Recording, step: int = -1) -> str:
    """The memory chart as an SVG file, with the column of `step` marked."""
    film = film_of(recording)
    return document("Memory", draw_memory(film, film.clamp(step), 940))
