"""The front-end sources as the two strings that anywidget and the exported page take: one module, one style sheet."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from pagedinfer.views.palette import css

__all__ = ["esm", "read_static", "style"]

SCRIPTS = (
    "film", "dom", "words", "blocks", "cells", "canvas", "density", "queues", "budget", "timeline", "memory", "chains",
    "details", "controls", "breaks", "view",
)  # fmt: skip
"""Files of `static/`, in the order of reading; they share one module scope."""


def read_static(name: str) -> str:
    """Text of a file in `static/`."""
    return files("pagedinfer.views").joinpath("static", name).read_text(encoding="utf-8")


@cache
def esm() -> str:
    """The ES module whose default export is `{ render({ model, el }) }`."""
    return "\n".join([*(read_static(f"{name}.js") for name in SCRIPTS), "export default { render };\n"])


@cache
def style() -> str:
    """The style sheet, colours included."""
    return css(".pi-view") + "\n" + read_static("view.css")
