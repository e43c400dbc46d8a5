"""Offline page: the views, their script and their film in one HTML file that asks nothing of any network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path

from pagedinfer.trace.recording import Recording
from pagedinfer.views.assets import esm, style
from pagedinfer.views.film import film_of
from pagedinfer.views.frame import Frame
from pagedinfer.views.page import PageView, write_page
from pagedinfer.views.picture import PANES, check_panes, picture_svg
from pagedinfer.views.sheet_page import page_view
from pagedinfer.views.stepped import SteppedView

__all__ = ["export_html"]


def export_html(
    recording: Recording,
    path: str | PathLike[str],
    *,
    title: str = "Inside the engine",
    step: int | None = None,
    request: str | None = None,
    panes: Sequence[str] = PANES,
    texts: Mapping[str, str] | None = None,
    summary: Mapping[str, str] | None = None,
    more: Sequence[SteppedView] = (),
) -> Path:
    """Write the engine view as one self-contained page, and return its path.

    Args:
        recording: what to show.
        path: the file to write.
        title: the page's heading.
        step: the step to open at; by default the one with the most blocks in use.
        request: a request to select.
        panes: which views.
        texts: request id -> generated text, shown as a table.
        summary: name -> number with unit, shown on top; by default what the recording says of itself.
        more: further views below it, `Latency(recording)` for one; all go to the same step and show one selection.
    """
    opened = "" if step is not None else "Opens at step {}, the first with the most blocks in use. "
    film = film_of(recording)
    step = film.fullest() if step is None else film.clamp(step)
    model = {
        "title": title, "panes": list(check_panes(panes)), "live": False, "driving": False, "cursor": step,
        "selected": film.selection(request), "answer": {}, "ask": {}, "watching": False, "breaks": [],
    }  # fmt: skip
    view = PageView(
        "engine", title, model, film.encode(), picture_svg(recording, step, request, panes), esm(), style()
    )
    views = [view, *map(page_view, more)]
    told = summary or _own_summary(recording)
    return write_page(Path(path), title, views, told, _texts(texts or {}), opened.format(step))


def _own_summary(recording: Recording) -> dict[str, str]:
    film = film_of(recording)
    steps = film.last_step - film.first_step
    frame, tokens = Frame(), 0
    for line in film.lines:
        frame.apply_changes(line, film.texts)
        tokens += sum(frame.tokens(line).values())
    lost = sum(kind == "preempted" for line in film.lines for kind, _, _ in line.get("e", ()))
    return {
        "requests": str(len(film.lanes)), "steps": str(steps), "tokens computed": f"{tokens:,}",
        "preemptions": str(lost),
        "pool": f"{film.num_blocks:,} × {film.block_size} tokens",
    }  # fmt: skip


def _texts(texts: Mapping[str, str]) -> str:
    if not texts:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(str(r))}</th><td>{escape(str(text))}</td></tr>'
        for r, text in texts.items()
    )
    head = '<thead><tr><th scope="col">Request</th><th scope="col">Text</th></tr></thead>'
    return f'<h2>What was generated</h2><table class="pi-texts">{head}<tbody>{rows}</tbody></table>'
