"""Memory chart: what the pool's token slots are used for over steps, stacked, and the KV waste."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagedinfer.trace.recording import Recording
from pagedinfer.views.film import Film, film_of
from pagedinfer.views.frame import Memory
from pagedinfer.views.marks import captioned
from pagedinfer.views.svg import (
    CROSSED,
    DOTTED,
    GUTTER,
    TAIL,
    UPRIGHT,
    Drawing,
    Scale,
    document,
    legend,
    number,
    path,
    rect,
    short,
    text,
    translate,
)

__all__ = ["draw_memory", "memory_svg", "memory_words", "percent"]

TOP, TALL, STRIP, BETWEEN = 46, 120, 36, 18
BASE = TOP + TALL + BETWEEN
BOTTOM = BASE + STRIP
SMALL = "pi-muted pi-small"


class Part(NamedTuple):
    """One layer of the stack: its name, the slots of it in a step, its fill and its pattern ("" for none)."""

    name: str
    slots: Callable[[Memory], int]
    fill: str
    pattern: str


PATTERNS = {"": "", "dotted": DOTTED, "tail": TAIL, "upright": UPRIGHT, "crossed": CROSSED}

# From the bottom up; live and slack are always explained, the others where the film has them.
PARTS = (
    Part("live tokens", lambda m: m.live - m.shared, "pi-live", ""),
    Part("live, shared by several requests", lambda m: m.shared, "pi-live", "dotted"),
    Part("tail slack: allocated, holds no token", lambda m: m.slack, "pi-slack", "tail"),
    Part("reserved, unused", lambda m: m.reserved, "pi-page", "upright"),
    Part("cached, idle", lambda m: m.cached, "pi-cached", "crossed"),
)


def memory_words(film: Film, step: int) -> str:
    """The numbers of one step: "613 live, 27 tail slack, 384 free of 1024 token slots; KV waste 4.2 %"."""
    m = Memory(*film.lines[step - film.first_step]["m"])
    parts = [f"{m.live} live" + (f" ({m.shared} shared)" if m.shared else ""), f"{m.slack} tail slack"]
    parts += [f"{m.reserved} reserved"] if m.reserved else []
    parts += [f"{m.cached} cached and idle"] if m.cached else []
    words = f"{', '.join(parts)}, {m.free} free of {m.slots} token slots; KV waste {percent(m.wasted, m.allocated)}"
    return words + (f"; {m.host} block{'' if m.host == 1 else 's'} in host memory" if m.host else "")


def percent(part: int, whole: int) -> str:
    """A share in per cent with one decimal, halves up: as `static/dom.js` rounds."""
    tenths = (2000 * part + whole) // (2 * whole) if whole else 0
    return f"{tenths // 10}.{tenths % 10} %"


def draw_memory(film: Film, step: int, width: int) -> Drawing:
    """Stacked areas over steps, and a strip with the KV waste below, on the timeline's scale."""
    scale = Scale.around(film.first_step, film.last_step, step, width)
    lines = film.lines[scale.first - film.first_step : scale.last + 1 - film.first_step]
    memory = [Memory(*line["m"]) for line in lines]
    words = memory_words(film, step)
    head, more = captioned("Memory", words, width)
    shown = [part for i, part in enumerate(PARTS) if i in (0, 2) or any(part.slots(m) for m in memory)]
    out = [f"<defs>{''.join(PATTERNS[part.pattern] for part in shown)}</defs>"]
    out += _slots(scale, memory, shown, max(1, film.num_blocks * film.block_size))
    out += _waste_strip(scale, [100 * m.wasted / m.allocated if m.allocated else 0.0 for m in memory])
    out.append(scale.cursor(step, TOP, BOTTOM))
    out += [text(scale.x(s + 0.5), BOTTOM + 16, str(s), f"{SMALL} pi-num", "middle") for s in scale.ticks()]
    key, below = _legend(shown, width - GUTTER)
    out.append(translate(GUTTER, BOTTOM + 40, key))
    body = "".join([*head, translate(0, more, "".join(out))])
    return Drawing(body, width, BOTTOM + 50 + more + below, words + ".")


def _slots(scale: Scale, memory: Sequence[Memory], parts: Sequence[Part], total: int) -> list[str]:
    """The parts on top of each other, free above."""
    out = [rect("pi-free", scale.left, TOP, scale.right - scale.left, TALL)]
    below = [0.0] * len(memory)
    for part in parts:
        above = [low + part.slots(m) / total for low, m in zip(below, memory, strict=True)]
        area = _area(scale, below, above)
        out.append(path(part.fill, area))
        out += [path("", area, f'fill="url(#pi-{part.pattern})"')] if part.pattern else []
        below = above
    for share in (0, 0.5, 1):
        y = TOP + TALL * (1 - share)
        out += [
            _rule(scale, y),
            text(GUTTER - 8, y + 4, short(round(total * share)), f"{SMALL} pi-num", "end"),
        ]
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


def _legend(parts: Sequence[Part], width: float) -> tuple[str, int]:
    box = (0, -10, 14, 12, 2)
    marks = [
        (p.name, rect(p.fill, *box) + (rect("", *box, f'fill="url(#pi-{p.pattern})"') if p.pattern else ""))
        for p in parts
    ]
    return legend([*marks, ("free", rect("pi-free pi-s-line", *box))], width)


def memory_svg(recording: Recording, step: int = -1) -> str:
    """The memory chart as an SVG file, with the column of `step` marked."""
    film = film_of(recording)
    return document("Memory", draw_memory(film, film.clamp(step), 940))
