"""Offline pages: heading, summary, views with their pictures where scripts are off, and their scripts.

All views on a page are linked, as in a notebook: `static/page.js` stands for the kernel.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pagedinfer.views.assets import read_static

__all__ = ["KEYS", "PageView", "write_page"]

KEYS = "Left and Right step, Shift for ten, Home and End, Space plays. Click a block or a request."

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body class="pi-page-body">
<main>
<h1>{title}</h1>
{summary}
{views}
{rest}
</main>
{scripts}
</body>
</html>
"""

VIEW = """<h2 class="pi-unseen">{title}</h2>
<noscript>{picture}</noscript>
<div class="pi-place"></div>
<script type="application/json" data-view="{kind}">{data}</script>"""

SCRIPT = """<script type="module">
const PAGE_KIND = "{kind}";
{script}
</script>"""


@dataclass(frozen=True, slots=True)
class PageView:
    """A view on a page.

    Attributes:
        kind: which script draws it. model: the values of its model. film: its drawings or lines.
        picture: an SVG for where scripts are off. script, style: what the kind needs, once for all views of it.
    """

    kind: str
    title: str
    model: Mapping[str, Any]
    film: bytes
    picture: str
    script: str
    style: str


def write_page(
    target: Path,
    title: str,
    views: Sequence[PageView],
    summary: Mapping[str, str],
    rest: str = "",
    note: str = "",
) -> Path:
    """Write a page with these views below each other, and return its path.

    Args:
        target: the file.
        title: the page's heading.
        views: the views.
        summary: name -> number with unit, shown on top.
        rest: HTML below the views.
        note: words for the foot of the page, before those on the keys.
    """
    kinds = {view.kind: view for view in views}
    page = PAGE.format(
        title=escape(title),
        style="\n".join([*(view.style for view in kinds.values()), read_static("page.css")]),
        summary=_summary(summary),
        views="\n".join(map(_view, views)),
        rest=f"{rest}<footer>{escape(note + KEYS)}</footer>",
        scripts="\n".join(_script(view) for view in kinds.values()),
    )
    # Half a surrogate pair becomes its escape.
    target.write_text(page, encoding="utf-8", errors="backslashreplace")
    return target


def _view(view: PageView) -> str:
    film = base64.b64encode(zlib.compress(view.film, 9)).decode()
    data = json.dumps({"model": dict(view.model), "film": film}).replace("<", "\\u003c")
    return VIEW.format(title=escape(view.title), picture=view.picture, kind=view.kind, data=data)


def _script(view: PageView) -> str:
    script = view.script.replace("export default { render };", "")
    return SCRIPT.format(kind=view.kind, script=f"{script}\n{read_static('page.js')}")


def _summary(items: Mapping[str, str]) -> str:
    cells = "".join(
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in items.items()
    )
    return f'<dl class="pi-summary">{cells}</dl>' if cells else ""
