"""A histogram with a limit: bars from 0 up, those beyond the limit hatched, the limit as a dashed line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from pagedinfer.views.marks import SMALL, hatched, round_up
from pagedinfer.views.svg import number, path, rect, short, text

__all__ = ["bins", "draw_histogram"]

BARS = 24
TALL, LEFT, TOP = 84, 34, 20
BASE = TALL + TOP
"""Above the bars there is a row for the limit's name."""


def bins(values: Sequence[float], limit: float | None) -> tuple[float, list[int]]:
    """Width of a bar and how many values each holds, from 0 up; whole numbers get whole widths, the limit fits in."""
    known = Counter(values)  # gaps in steps are many, and few are different
    most = max([*known, limit or 0]) or 1
    whole = all(value == int(value) for value in known) and (limit is None or limit >= 1)
    size = max(1.0, round_up((most + 1) / BARS)) if whole else round_up(most / BARS)
    counts = [0] * (int(most / size + 1e-9) + 1)
    for value, times in known.items():
        counts[int(value / size + 1e-9)] += times
    return size, counts


def draw_histogram(
    values: Sequence[float], limit: float | None, unit: str, say: Callable[[float], str], width: float
) -> tuple[list[str], float]:
    """The bars with axes, and the height of all; `say` writes a value."""
    size, counts = bins(values, limit)
    most, room = round_up(max([*counts, 1])), width - LEFT - 12
    bar = room / len(counts)
    rules = f"M{LEFT} {BASE}H{number(LEFT + room)}M{LEFT} {TOP}H{number(LEFT + room)}"
    out = [path("pi-s-line", rules)]
    for y, value in ((TOP + 4, int(most)), (BASE + 4, 0)):
        out.append(text(LEFT - 6, y, short(value), f"{SMALL} pi-num", "end"))
    for i, count in enumerate(counts):
        if count:
            high = max(2, TALL * count / most)
            box = (LEFT + i * bar + 1, BASE - high, max(1, bar - 2), high)
            beyond = limit is not None and i * size > limit
            mark = (
                rect("pi-page pi-s-alarm", *box) + hatched("lost", *box) if beyond else rect("pi-live", *box)
            )
            words = say(i * size) if size == 1 else f"{say(i * size)} to under {say((i + 1) * size)}"
            out.append(f"<g><title>{words} {unit}: {count}</title>{mark}</g>")
    names = range(0, len(counts) + 1, max(1, -(-len(counts) * 38 // max(1, int(room)))))
    out += [text(LEFT + i * bar, BASE + 16, say(i * size), f"{SMALL} pi-num", "middle") for i in names]
    if limit is not None:
        x = LEFT + min(limit / size + (0.5 if size == 1 else 0), len(counts)) * bar
        line = f"M{number(x)} {TOP - 14}V{BASE}"
        out.append(path("pi-s-accent", line, 'fill="none" stroke-width="2" stroke-dasharray="5 3"'))
        x, anchor = (x - 5, "end") if x > LEFT + room - 60 else (x + 5, "")
        out.append(text(x, TOP - 6, f"SLO {say(limit)}", "pi-accent pi-small pi-strong", anchor))
    return out, BASE + 22
