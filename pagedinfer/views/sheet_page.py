"""Script, style and offline page of the views with a cursor."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pagedinfer.views.assets import read_static
from pagedinfer.views.page import KEYS, PAGE
from pagedinfer.views.palette import css, static_css

if TYPE_CHECKING:
    from pagedinfer.views.stepped import SteppedView

__all__ = ["sheet_esm", "sheet_style", "write_page"]

SCRIPTS = ("dom", "controls", "sheet")

# Stands in for anywidget's model: the same module runs on it.
_MODEL = """
const data = JSON.parse(document.getElementById("data").textContent);
const bytes = Uint8Array.from(atob(data.film), (c) => c.charCodeAt(0));
const whole = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
const values = { ...data.model, film: new DataView(await new Response(whole).arrayBuffer()) };
const model = {
  get: (name) => values[name],
  set(name, value) { values[name] = value; },
  send() {}, on() {}, off() {},
};
render({ model, el: document.getElementById("view") });
"""


@cache
def sheet_esm() -> str:
    """The ES module whose default export is `{ render({ model, el }) }`."""
    return "\n".join([*(read_static(f"{name}.js") for name in SCRIPTS), "export default { render };\n"])


@cache
def sheet_style() -> str:
    """The style sheet: that of the engine view, and the colours of the static pictures in either scheme."""
    light, dark = static_css().split("@media (prefers-color-scheme:dark){")
    schemes = f".pi-sheet.is-light{{{light}}}\n.pi-sheet.is-dark{{{dark[:-1]}}}"
    return "\n".join([css(".pi-view"), read_static("view.css"), schemes, read_static("sheet.css")])


def write_page(view: SteppedView, target: Path, summary: Mapping[str, str]) -> Path:
    """Write the offline page of `view`."""
    model = {"title": view.title, "cursor": view.cursor}
    data = json.dumps({"model": model, "film": base64.b64encode(zlib.compress(view.encode(), 9)).decode()})
    cells = "".join(
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in summary.items()
    )
    page = PAGE.format(
        title=escape(view.title), style=sheet_style() + read_static("page.css"),
        summary=f'<dl class="pi-summary">{cells}</dl>' if cells else "", picture=view.svg(),
        rest=f"<footer>{KEYS}</footer>",
        data=data.replace("<", "\\u003c"), script=sheet_esm().replace("export default { render };", "") + _MODEL,
    )  # fmt: skip
    target.write_text(page, encoding="utf-8", errors="backslashreplace")
    return target
