"""Requests in lists: the queues with the sentence why each waits, and the block table of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagedinfer.trace.recording import Recording
from pagedinfer.views.film import Film, film_of
from pagedinfer.views.frame import Frame
from pagedinfer.views.marks import captioned
from pagedinfer.views.palette import colour_of
from pagedinfer.views.svg import Drawing, document, fit, rect, swatch, text, textures, translate

__all__ = [
    "details_pane",
    "details_svg",
    "draw_queues",
    "draw_table",
    "name_of",
    "queues_pane",
    "queues_svg",
]

MAX_ROWS = 14
MOST_QUEUED = 8
LINE = 20


def name_of(film: Film, lane: int, width: float) -> str:
    """The request's id where it fits, its short label where it does not."""
    rid = film.lanes[lane].rid
    return rid if fit(rid, width) == rid else film.lanes[lane].label


def draw_table(film: Film, frame: Frame, lane: int, width: int) -> Drawing:
    """Logical block, physical block and fill of each block of one request."""
    row, colour, size = frame.rows[lane], colour_of(lane), film.block_size
    head = f"{name_of(film, lane, 90)}: logical to physical"
    counts = f"{row.status}, {row.num_computed_tokens} of {row.num_tokens} tokens computed"
    out = [f"<defs>{textures([lane])}</defs>", swatch(lane, 0, 1), text(20, 12, head, "pi-ink pi-h")]
    out += [text(0, 31, counts, "pi-muted"), text(54, 54, "logical", "pi-muted pi-small", "end")]
    out += [
        text(118, 54, "physical", "pi-muted pi-small", "end"),
        text(136, 54, "tokens", "pi-muted pi-small"),
    ]
    y = 72
    for logical, block_id in enumerate(row.block_table[:MAX_ROWS]):
        fill = row.fill(logical, size)
        out += [
            text(54, y, str(logical), "pi-ink pi-num", "end"),
            text(118, y, str(block_id) if block_id >= 0 else "left", "pi-ink pi-num", "end"),
        ]
        out += [
            rect(f"pi-t{colour}", 136, y - 9, 80, 10, 2),
            rect(f"pi-c{colour}", 136, y - 9, 80 * fill / size, 10, 2),
        ]
        out.append(text(224, y, f"{fill}/{size}", "pi-muted pi-small pi-num"))
        y += LINE
    if (hidden := len(row.block_table) - MAX_ROWS) > 0:
        out.append(text(54, y, f"and {hidden} more", "pi-muted pi-small"))
    if not row.block_table:
        host = f"Host slots {', '.join(map(str, row.host))}." if row.host else "It holds no block."
        out.append(text(0, y, fit(host, width), "pi-muted"))
    return Drawing("".join(out), width, y + 8, "")


HEADS = {"running": "Running", "waiting": "Waiting", "swapped": "Swapped out"}


def draw_queues(film: Film, frame: Frame, width: int, which: Sequence[str] = tuple(HEADS)) -> Drawing:
    """Who runs, who waits and why, eight of each."""
    out, y = [f"<defs>{textures(frame.rows)}</defs>"], 12
    for name in which:
        queue: list[int] = getattr(frame, name)
        if name == "swapped" and not queue:
            continue
        out.append(text(0, y, f"{HEADS[name]}: {len(queue)}", "pi-ink pi-h"))
        y += 22
        for lane in queue[:MOST_QUEUED]:
            out += _queued(film, frame, lane, y, width)
            y += LINE + 16 * bool(frame.rows[lane].why)
        if len(queue) > MOST_QUEUED:
            out.append(text(20, y, f"and {len(queue) - MOST_QUEUED} more", "pi-muted pi-small"))
            y += LINE
        y += 14
    return Drawing("".join(out), width, y, "")


def _queued(film: Film, frame: Frame, lane: int, y: int, width: int) -> list[str]:
    """One request of a queue: who, how far, tokens of this step, and below it why it waits."""
    row = frame.rows[lane]
    counts = f"{row.num_computed_tokens} of {row.num_tokens} tokens"
    out = [swatch(lane, 0, y - 11), text(20, y, name_of(film, lane, 64), "pi-ink pi-strong")]
    out.append(text(92, y, counts, "pi-muted pi-num"))
    if row.scheduled:
        out.append(text(min(width, 272), y, f"+{row.scheduled}", "pi-ink pi-num", "end"))
    if row.why:
        out.append(text(20, y + 16, fit(row.why, width - 20, 11), "pi-muted pi-small"))
    return out


def queues_svg(recording: Recording, step: int = -1) -> str:
    """The queues at a step, each waiting request with the sentence why, as an SVG file."""
    film = film_of(recording)
    return document("Queues", queues_pane(film, film.frame(step), 940))


def queues_pane(film: Film, frame: Frame, width: int) -> Drawing:
    """The queues below a heading: those that run left, those that wait right, where there is room for both."""
    words, height = _counts(frame), 0
    body, more = captioned(f"Queues, step {frame.step}", words, width)
    wide = width >= 700
    for i, which in enumerate((("running",), ("waiting", "swapped")) if wide else (tuple(HEADS),)):
        drawn = draw_queues(film, frame, width // 2 - 20 if wide else width, which)
        body.append(translate(i * width / 2, 48 + more, drawn.body))
        height = max(height, drawn.height)
    return Drawing("".join(body), width, 48 + more + height, f"Queues: {words}.")


def _counts(frame: Frame) -> str:
    out = f"{len(frame.running)} running, {len(frame.waiting)} waiting"
    return out + (f", {len(frame.swapped)} swapped out" if frame.swapped else "")


def details_svg(recording: Recording, step: int = -1, request: str | None = None) -> str:
    """The block table of a request, or the queues where none is given, as an SVG file."""
    film = film_of(recording)
    return document("Details", details_pane(film, film.frame(step), film.lane(request), 940))


def details_pane(film: Film, frame: Frame, lane: int, width: int) -> Drawing:
    """All about one request; without one, or once it has ended, all requests in their queues."""
    if lane in frame.rows:
        drawn = draw_table(film, frame, lane, width)
        return replace(drawn, words=f"{film.lanes[lane].rid}: {frame.rows[lane].status}.")
    return draw_queues(film, frame, width)
