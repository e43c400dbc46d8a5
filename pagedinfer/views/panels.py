"""What stands beside the block map: the block table of a request, or the queues."""

from __future__ import annotations

from pagedinfer.views.film import Film
from pagedinfer.views.frame import Frame
from pagedinfer.views.palette import colour_of
from pagedinfer.views.svg import Drawing, fit, rect, swatch, text, textures

__all__ = ["draw_queues", "draw_table", "name_of"]

MAX_ROWS = 14
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
            text(118, y, str(block_id), "pi-ink pi-num", "end"),
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
        out.append(text(0, y, "It holds no block.", "pi-muted"))
    return Drawing("".join(out), width, y + 8, "")


def draw_queues(film: Film, frame: Frame, width: int) -> Drawing:
    """Who runs, who waits and why, eight of each."""
    out, y = [f"<defs>{textures(frame.rows)}</defs>"], 12
    for name, queue in (("Running", frame.running), ("Waiting", frame.waiting)):
        out.append(text(0, y, f"{name}: {len(queue)}", "pi-ink pi-h"))
        y += 22
        for lane in queue[:8]:
            row = frame.rows[lane]
            counts = f"{row.num_computed_tokens} of {row.num_tokens} tokens"
            out += [swatch(lane, 0, y - 11), text(20, y, name_of(film, lane, 64), "pi-ink pi-strong")]
            out.append(text(92, y, counts, "pi-muted pi-num"))
            if row.scheduled:
                out.append(text(width, y, f"+{row.scheduled}", "pi-ink pi-num", "end"))
            if row.why:
                y += 16
                out.append(text(20, y, fit(row.why, width - 20, 11), "pi-muted pi-small"))
            y += LINE
        if len(queue) > 8:
            out.append(text(20, y, f"and {len(queue) - 8} more", "pi-muted pi-small"))
            y += LINE
        y += 14
    return Drawing("".join(out), width, y, "")
