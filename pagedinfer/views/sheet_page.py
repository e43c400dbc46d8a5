"""Script and style of the views with a cursor, and their place on an offline page."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from pagedinfer.views.assets import read_static
from pagedinfer.views.page import PageView
from pagedinfer.views.palette import css, static_css

if TYPE_CHECKING:
    from pagedinfer.views.stepped import SteppedView

__all__ = ["page_view", "sheet_esm", "sheet_style"]

SCRIPTS = ("dom", "controls", "sheet")


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


def page_view(view: SteppedView) -> PageView:
    """`view` with the drawings of its steps, for a page."""
    model = {"title": view.title, "cursor": view.cursor, "selected": view.selected}
    return PageView("sheet", view.title, model, view.encode(), view.svg(), sheet_esm(), sheet_style())
