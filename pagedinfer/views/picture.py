"""Several panes in one static picture, below the step's sentence."""

from __future__ import annotations

from collections.abc import Sequence

from pagedinfer.errors import ConfigError
from pagedinfer.trace.recording import Recording
from pagedinfer.views.blocks import draw_blocks
from pagedinfer.views.budget import draw_budget
from pagedinfer.views.chains import draw_chains
from pagedinfer.views.film import Film, film_of
from pagedinfer.views.frame import Frame
from pagedinfer.views.marks import wrapped
from pagedinfer.views.memory import draw_memory
from pagedinfer.views.panels import details_pane, queues_pane
from pagedinfer.views.svg import Drawing, document, translate
from pagedinfer.views.timeline import draw_timeline

__all__ = ["PANES", "check_panes", "describe", "lane_picture", "picture_svg"]

PANES = ("blocks", "budget", "queues", "timeline", "memory", "chains", "details")
"""Every pane of the engine view, in its order."""

TITLES = {
    "blocks": "Block map", "budget": "Token budget", "queues": "Queues", "timeline": "Batch timeline",
    "memory": "Memory", "chains": "Prefix chains", "details": "Details",
}  # fmt: skip
GAP = 30


def check_panes(panes: Sequence[str]) -> tuple[str, ...]:
    """The panes as a tuple.

    Raises:
        ConfigError: none, or one that does not exist.
    """
    panes = (panes,) if isinstance(panes, str) else tuple(panes)
    if not panes or any(pane not in PANES for pane in panes):
        raise ConfigError(f"panes={panes!r}: name one or more of {', '.join(PANES)}.")
    return panes


def _draw(film: Film, pane: str, step: int, lane: int, width: int) -> Drawing:
    if pane == "timeline":
        return draw_timeline(film, step, lane, width)
    if pane == "memory":
        return draw_memory(film, step, width)
    frame = film.frame(step)
    if pane == "queues":
        return queues_pane(film, frame, width)
    draw = {"blocks": draw_blocks, "budget": draw_budget, "chains": draw_chains, "details": details_pane}[
        pane
    ]
    return draw(film, frame, lane, width)


def shown_panes(frame: Frame, panes: Sequence[str], lane: int) -> list[str]:
    """The panes without those that would say nothing, or what stands beside the block map already: chains where no
    block is cached; details, or the queues where no request is selected.
    """
    beside = ("details", *(() if lane in frame.rows else ("queues",))) if "blocks" in panes else ()
    empty = ("chains",) if not frame.cached and len(panes) > 1 else ()
    return [pane for pane in panes if pane not in (*beside, *empty)]


def picture_svg(
    recording: Recording,
    step: int = -1,
    request: str | None = None,
    panes: Sequence[str] = ("blocks", "timeline"),
    width: int = 940,
) -> str:
    """The step's sentence and below it the panes as one SVG file, `width` pixels wide; all mark `request`.

    Raises:
        ConfigError: no such pane or request, or a width out of its range. RecordingError: no such step.
    """
    return lane_picture(recording, step, film_of(recording).lane(request), panes, width)


def lane_picture(recording: Recording, step: int, lane: int, panes: Sequence[str], width: int = 940) -> str:
    """`picture_svg` with a lane marked, none for -1. Raises what that raises."""
    if isinstance(width, bool) or not isinstance(width, int) or not 240 <= width <= 20_000:
        raise ConfigError(f"width={width!r}: it must be an integer from 240 to 20000, in pixels.")
    film = film_of(recording)
    panes = check_panes(panes)
    with film.lock:  # all panes of the same moment
        step = film.clamp(step)
        panes = shown_panes(film.frame(step), panes, lane)
        drawings = [_draw(film, pane, step, lane, width) for pane in panes]
        said, high = wrapped(_said(film, step), 12, width, "pi-ink")
    body, y = said, round(high) + 12
    for drawing in drawings:
        body.append(translate(0, y, drawing.body))
        y += drawing.height + GAP
    whole = Drawing("".join(body), width, y - GAP, " ".join(drawing.words for drawing in drawings))
    return document(", ".join(TITLES[pane] for pane in panes), whole)


def describe(recording: Recording, step: int = -1) -> str:
    """A step in one sentence: "step 12: 3 running, 2 waiting, 61 of 64 tokens; R3 preempted because ..."."""
    film = film_of(recording)
    with film.lock:
        return _said(film, film.clamp(step))


def _said(film: Film, step: int) -> str:
    return str(film.lines[step - film.first_step]["say"])
