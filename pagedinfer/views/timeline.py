"""Batch timeline: requests by step. Tall bars prefill, low bars decode, dots wait, hatched bars were preempted."""

from __future__ import annotations

from pagedinfer.trace.recording import Recording
from pagedinfer.views.film import Film, film_of
from pagedinfer.views.frame import DECODE, HELD, PREEMPTED, PREFILL, SWAPPED, WAITING
from pagedinfer.views.palette import colour_of
from pagedinfer.views.panels import name_of
from pagedinfer.views.svg import (
    GUTTER,
    Drawing,
    Scale,
    document,
    legend,
    number,
    path,
    rect,
    swatch,
    text,
    textures,
    translate,
)  # fmt: skip

__all__ = ["draw_timeline", "timeline_svg"]

ROW = 20
TOP = 44
MAX_ROWS = 40

Run = tuple[int, int, int]  # did, from step, to step


def draw_timeline(film: Film, step: int, lane: int, width: int) -> Drawing:
    """The rows that have something to show around `step`, at most `MAX_ROWS`; `lane` is ringed."""
    scale = Scale.around(film.first_step, film.last_step, step, width)
    runs = film.runs(scale.first, scale.last)
    nearest = sorted(runs, key=lambda n: min(_distance(run, step) for run in runs[n]))
    shown = sorted(nearest[:MAX_ROWS])
    height = TOP + len(shown) * ROW
    away = any(did == SWAPPED for n in shown for did, _, _ in runs[n])
    defs = f"<defs>{textures(shown)}{_HATCH}{_AWAY if away else ''}</defs>"
    out = [text(0, 12, "Batch timeline", "pi-ink pi-h"), defs]
    out += [
        text(scale.x(s + 0.5), TOP - 10, str(s), "pi-muted pi-small pi-num", "middle") for s in scale.ticks()
    ]
    out.append(text(GUTTER - 10, TOP - 10, "step", "pi-muted pi-small", "end"))
    out.append(scale.cursor(step, TOP - 4, height))
    out += [
        translate(0, TOP + i * ROW, _row(film, n, runs[n], scale, n == lane)) for i, n in enumerate(shown)
    ]
    out += _ends(film, shown, scale)
    if (hidden := len(runs) - len(shown)) > 0:
        height += 20
        out.append(text(scale.left, height - 4, f"and {hidden} more requests", "pi-muted pi-small"))
    key, below = _legend(away, width - GUTTER)
    out.append(translate(GUTTER, height + 20, key))
    words = f"Requests by step, steps {scale.first} to {scale.last}, {len(runs)} requests."
    return Drawing("".join(out), width, height + 30 + below, words)


def _distance(run: Run, step: int) -> int:
    return max(run[1] - step, step - run[2], 0)


_HATCH = (
    '<pattern id="pi-lost" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<path class="pi-s-alarm" d="M-1 6L6 -1" stroke-width="1.3"/></pattern>'
)
_AWAY = (
    '<pattern id="pi-away" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<path class="pi-s-alarm" d="M0 3h6" stroke-width="1.6"/></pattern>'
)


def _row(film: Film, lane: int, runs: list[Run], scale: Scale, linked: bool) -> str:
    colour, end = colour_of(lane), scale.x(scale.last + 1)
    out = [swatch(lane, 0, 4)]
    out.append(text(20, 14, name_of(film, lane, GUTTER - 30), "pi-ink pi-strong" if linked else "pi-ink"))
    out.append(path("pi-s-line", f"M{scale.left} 19.5H{number(end)}", 'stroke-width=".75"'))
    for did, a, b in runs:
        x, w = scale.x(a), (b - a + 1) * scale.column
        out.append(_bar(did, x, w, colour))
        if did == PREFILL and len(n := str(film.lines[a - film.first_step]["n"][str(lane)])) * 6.4 + 2 <= w:
            out.append(text(x + w / 2, 14, n, f"pi-o{colour} pi-small pi-num", "middle"))
    if linked:
        out.append(rect("pi-s-accent", -3, 1, end + 5, 18, 3, 'fill="none" stroke-width="1.6"'))
    return "".join(out)


def _bar(did: int, x: float, w: float, colour: int) -> str:
    inset = min(0.75, w / 8)
    a, b = x + inset, w - 2 * inset
    if did == WAITING:
        dots = f"M{number(x + 2)} 10.5H{number(x + w - 1)}"
        return path("pi-s-muted", dots, 'stroke-width="2" stroke-dasharray="2 4"')
    if did == PREEMPTED:
        return rect("pi-s-alarm", a, 5, b, 11, 2, 'fill="url(#pi-lost)"') + path(
            "pi-alarm", f"M{number(x)} 1h8l-4 5z"
        )
    if did == SWAPPED:
        return rect("pi-s-alarm", a, 5, b, 11, 2, 'fill="url(#pi-away)"') + path(
            "pi-alarm", f"M{number(x)} 19h8l-4 -5z"
        )
    if did == HELD:
        return rect(f"pi-t{colour} pi-s-muted", a, 7, b, 7, 0, 'stroke-width=".75" stroke-dasharray="2 2"')
    y, height = (2, 16) if did == PREFILL else (6.5, 8)
    return rect(f"pi-c{colour}", a, y, b, height, 2)


def _ends(film: Film, shown: list[int], scale: Scale) -> list[str]:
    """A mark behind each request that ended: a tick, or a cross where it was aborted or failed."""
    out = []
    for line in film.lines[scale.first - film.first_step : scale.last + 1 - film.first_step]:
        for kind, lane, why in line.get("e", ()):
            if kind == "finished" and lane in shown:
                at, y = number(scale.x(line["s"] + 1) + 3), TOP + shown.index(lane) * ROW
                cross = film.texts[why].split(":")[0] in ("abort", "error")
                shape = f"M{at} {y + 7}l6 6m0 -6l-6 6" if cross else f"M{at} {y + 10}l3 3.5l5 -7"
                out.append(path("pi-s-alarm" if cross else "pi-s-ink", shape, _THIN))
    return out


_THIN = 'fill="none" stroke-width="1.8"'


def _legend(away: bool, width: float) -> tuple[str, int]:
    named = {
        WAITING: "waiting", PREFILL: "prefill (its tokens, where they fit)", DECODE: "decode",
        HELD: "running, no tokens", PREEMPTED: "preempted, waiting again",
    } | ({PREEMPTED: "preempted", SWAPPED: "swapped out"} if away else {})  # fmt: skip
    items = [(name, translate(0, -14, _bar(did, 0, 22, 0))) for did, name in named.items()]
    return legend([*items, ("finished", path("pi-s-ink", "M8 -4l3 3.5l5 -7", _THIN))], width, 28)


def timeline_svg(recording: Recording, step: int = -1, request: str | None = None) -> str:
    """The batch timeline as an SVG file, with the column of `step` marked."""
    film = film_of(recording)
    drawing = draw_timeline(film, film.clamp(step), film.lane(request), 940)
    return document("Batch timeline", drawing)
