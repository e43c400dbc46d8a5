"""Offline page: the views, their script and their film in one HTML file that asks nothing of any network."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path

from pagedinfer.trace.recording import Recording
from pagedinfer.views.assets import esm, read_static, style
from pagedinfer.views.film import film_of
from pagedinfer.views.frame import Frame
from pagedinfer.views.page import KEYS, PAGE
from pagedinfer.views.picture import PANES, check_panes, picture_svg

__all__ = ["export_html"]

# Stands in for anywidget's model: the same module runs on it.
_MODEL = """
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = Uint8Array.from(atob(data.film), (c) => c.charCodeAt(0));
const values = { ...data.model, film: new DataView(bytes.buffer), tail: null }, listeners = {};
const model = {
  get: (name) => values[name],
  set(name, value) { values[name] = value; },
  send() {},
  on(event, act) { (listeners[event] ??= []).push(act); },
  off(event, act) { listeners[event] = (listeners[event] ?? []).filter((other) => other !== act); },
};
render({ model, el: document.getElementById("view") });
"""


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
) -> Path:
    """Write the views as one self-contained page, and return its path.

    Args:
        recording: what to show.
        path: the file to write.
        title: the page's heading.
        step: the step to open at; by default the one with the most blocks in use.
        request: a request to select.
        panes: which views.
        texts: request id -> generated text, shown as a table.
        summary: name -> number with unit, shown on top; by default what the recording says of itself.
    """
    film = film_of(recording)
    fullest = max(film.lines, key=lambda line: line["m"][3])["s"]
    step = film.clamp(fullest if step is None else step)
    model = {
        "title": title, "panes": list(check_panes(panes)), "live": False, "driving": False, "cursor": step,
        "selected": film.selection(request), "answer": {}, "ask": {}, "watching": False, "breaks": [],
    }  # fmt: skip
    data = json.dumps({"model": model, "film": base64.b64encode(film.encode()).decode()}).replace(
        "<", "\\u003c"
    )
    page = PAGE.format(
        title=escape(title), style=style() + read_static("page.css"),
        summary=_summary(summary or _own_summary(recording)),
        picture=picture_svg(recording, step, request, panes), data=data,
        rest=f"{_texts(texts or {})}\n<footer>{KEYS} Click a block or a request.</footer>",
        script=esm().replace("export default { render };", "") + _MODEL,
    )  # fmt: skip
    target = Path(path)
    target.write_text(
        page, encoding="utf-8", errors="backslashreplace"
    )  # half a surrogate pair becomes its escape
    return target


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


def _summary(items: Mapping[str, str]) -> str:
    cells = "".join(
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in items.items()
    )
    return f'<dl class="pi-summary">{cells}</dl>'


def _texts(texts: Mapping[str, str]) -> str:
    if not texts:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{escape(str(r))}</th><td>{escape(str(text))}</td></tr>'
        for r, text in texts.items()
    )
    head = '<thead><tr><th scope="col">Request</th><th scope="col">Text</th></tr></thead>'
    return f'<h2>What was generated</h2><table class="pi-texts">{head}<tbody>{rows}</tbody></table>'
