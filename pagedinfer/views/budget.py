"""Budget bar: the tokens of one step by request. Low pieces decode, tall ones prefill; what is left is unused."""

from __future__ import annotations

from pagedinfer.trace.recording import Recording
from pagedinfer.views.film import Film, film_of
from pagedinfer.views.frame import Frame
from pagedinfer.views.marks import captioned
from pagedinfer.views.palette import colour_of, texture_of
from pagedinfer.views.svg import Drawing, document, legend, path, rect, text, textures, translate

__all__ = ["budget_svg", "budget_words", "draw_budget"]

TOP, TALL, LOW = 44, 34, 17
BOTTOM = TOP + TALL


def pieces(frame: Frame) -> list[tuple[int, int, bool]]:
    """(lane, tokens, whether they are prefill) in drawing order: decode first."""
    prefill = set(frame.prefill)
    found = [(lane, n, lane in prefill) for lane, n in frame.scheduled.items()]
    return sorted(found, key=lambda piece: (piece[2], piece[0]))


def budget_words(frame: Frame) -> str:
    """In words: "61 of 64 tokens, 13 decode (13 requests), 48 prefill (2 requests), 3 unused"."""
    found = pieces(frame)
    total = sum(n for _, n, _ in found)
    out = [f"{total} of {_plural(frame.budget, 'token')}"]
    for is_prefill, name in ((False, "decode"), (True, "prefill")):
        if part := [n for _, n, prefill in found if prefill == is_prefill]:
            out.append(f"{sum(part)} {name} ({_plural(len(part), 'request')})")
    return ", ".join([*out, f"{max(0, frame.budget - total)} unused"])


def _plural(n: int, word: str) -> str:
    return f"{n} {word}{'' if n == 1 else 's'}"


def draw_budget(film: Film, frame: Frame, lane: int, width: int) -> Drawing:
    """One bar as wide as the step's budget; the piece of `lane` is ringed."""
    found, words = pieces(frame), budget_words(frame)
    total = max(frame.budget, sum(n for _, n, _ in found), 1)
    unit, x = width / total, 0.0
    head, more = captioned(f"Token budget, step {frame.step}", words, width)
    out = [f"<defs>{textures(lane for lane, _, _ in found)}</defs>"]
    out.append(rect("pi-free pi-s-line", 0, TOP, width, TALL, 3, 'stroke-width=".75"'))
    rings = []
    for owner, n, prefill in found:
        w, high = n * unit, TALL - 2 if prefill else LOW
        box = (x, BOTTOM - 1 - high, max(w - (w > 4), 0.5), high, 2 if w > 6 else 0)
        colour, texture = colour_of(owner), texture_of(owner)
        out.append(rect(f"pi-c{colour}", *box))
        if texture:
            out.append(rect("", *box, f'fill="url(#pi-x{colour}-{texture})"'))
        label = film.lanes[owner].label
        if name := next((t for t in (f"{label} {n}", label) if len(t) * 6.6 + 4 <= w), ""):
            y = TOP + TALL / 2 + 4 if prefill else BOTTOM - 6
            out.append(text(x + w / 2, y, name, f"pi-o{colour} pi-small pi-strong", "middle"))
        if owner == lane:
            rings.append(rect("pi-s-accent", *box, 'fill="none" stroke-width="2.2"'))
        x += w
    out += [*rings, text(0, BOTTOM + 15, "0", "pi-muted pi-small pi-num")]
    out.append(text(width, BOTTOM + 15, _plural(total, "token"), "pi-muted pi-small pi-num", "end"))
    key, below = _legend(width)
    out.append(translate(0, BOTTOM + 40, key))
    body = "".join([*head, translate(0, more, "".join(out))])
    return Drawing(body, width, BOTTOM + 46 + more + below, f"Token budget of step {frame.step}: {words}.")


def _legend(width: float) -> tuple[str, int]:
    items = [
        ("decode", path("pi-c0", "M0 -5h14v8h-14z")), ("prefill", rect("pi-c0", 0, -11, 14, 14)),
        ("unused", rect("pi-free pi-s-line", 0, -11, 14, 14)),
    ]  # fmt: skip
    return legend(items, width)


def budget_svg(recording: Recording, step: int = -1, request: str | None = None) -> str:
    """The budget bar of a step as an SVG file."""
    film = film_of(recording)
    return document("Token budget", draw_budget(film, film.frame(step), film.lane(request), 940))
