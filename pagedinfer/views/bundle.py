"""What every view shows without JavaScript: one picture, one block grid, and the numbers as text."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from pagedinfer.trace.recording import Recording
from pagedinfer.views.film import film_of
from pagedinfer.views.memory import memory_words
from pagedinfer.views.picture import lane_picture
from pagedinfer.views.raster import png_of

__all__ = ["alt_texts", "static_bundle", "text_of"]

MAX_LINES = 12


def static_bundle(
    recording: Recording, step: int, request: str | None, panes: Sequence[str], name: str
) -> dict[str, Any]:
    """The static part of a view's MIME bundle: SVG, the same as a PNG for who trusts no SVG, and text.

    `request` is marked if it is there; a live view's may be one that is yet to come.
    """
    lane = film_of(recording).find(request)
    svg = lane_picture(recording, step, lane, panes)
    png = base64.b64encode(png_of(svg)).decode()
    return {"image/svg+xml": svg, "image/png": png, "text/plain": text_of(recording, step, panes, name)}


def alt_texts(bundle: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The metadata that goes with a MIME bundle: for each picture the first line of the view's text as its `alt`.

    By Jupyter's convention (`IPython.display.Image(alt=...)`, nbconvert's templates "classic" and "basic").
    """
    alt = bundle["text/plain"].partition("\n")[0]
    return {kind: {"alt": alt} for kind in bundle if kind.startswith("image/")}


def text_of(recording: Recording, step: int, panes: Sequence[str], name: str) -> str:
    """The view in words and numbers: equal for equal runs."""
    film = film_of(recording)
    with film.lock:
        frame = film.frame(step)
        memory = memory_words(film, frame.step)
    used = frame.memory[3]
    out = [f"{name}({', '.join(panes)}): {frame.sentence}"]
    out.append(f"  blocks: {used} of {film.num_blocks} in use, {film.block_size} tokens each")
    out.append(f"  memory: {memory}")
    for lane in [*frame.running, *frame.waiting][:MAX_LINES]:
        row = frame.rows[lane]
        tokens = f"{row.num_computed_tokens} of {row.num_tokens} tokens"
        table = f", blocks {' '.join(map(str, row.block_table[:16]))}" if row.block_table else ""
        more = f" and {len(row.block_table) - 16} more" if len(row.block_table) > 16 else ""
        out.append(
            f"  {film.lanes[lane].rid}: {row.status}, {tokens}{table}{more}{f' ({row.why})' if row.why else ''}"
        )
    if (hidden := len(frame.rows) - MAX_LINES) > 0:
        out.append(f"  and {hidden} more requests")
    return "\n".join(out)
