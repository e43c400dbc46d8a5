"""The widget behind the views with a cursor: it holds the drawings of many steps and scrubs without asking the kernel.

The drawing of a step that it does not hold, in a long run or one that has grown since, comes from the kernel as soon
as the cursor is there (`tail`), but none before the browser has drawn the last one (`seen`): a view that nobody sees
costs nothing.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import anywidget
import traitlets

from pagedinfer.errors import describe_error
from pagedinfer.views.link import POSTING
from pagedinfer.views.sheet import NARROW, WIDE
from pagedinfer.views.sheet_page import sheet_esm, sheet_style
from pagedinfer.views.stepped import MAX_FRAMES, SteppedView
from pagedinfer.views.told import MAX_STEPS, take_in, whole

__all__ = ["SheetWidget", "widget_of"]

FILM_S = 4.0
"""Seconds at most, about, that a view takes to draw its film before it is shown."""


class SheetWidget(anywidget.AnyWidget):  # type: ignore[misc]
    """The drawings of a view, and the step shown: `SteppedView.encode`'s bytes, deflated in `film`, plain in `tail`."""

    tier = "anywidget"
    _ipython_display_ = None  # ipywidgets 7 would bypass _repr_mimebundle_
    _esm = sheet_esm()
    _css = sheet_style()
    film = traitlets.Bytes(b"").tag(sync=True)
    tail = traitlets.Bytes(b"").tag(sync=True)
    title = traitlets.Unicode("").tag(sync=True)
    links = traitlets.Unicode("").tag(sync=True)  # names of the links that it is a member of
    exact = traitlets.Bool(True).tag(sync=True)  # somebody draws what the film does not hold
    live = traitlets.Bool(False).tag(sync=True)
    cursor = traitlets.Int(0).tag(sync=True, echo_update=False)
    selected = traitlets.Dict().tag(sync=True, echo_update=False)
    ask = traitlets.Dict().tag(sync=True, echo_update=False)
    answer = traitlets.Dict().tag(sync=True)
    seen = traitlets.Int(0).tag(sync=True, echo_update=False)  # number of the last `tail` that a browser drew

    def __init__(self, view: SteppedView) -> None:
        self._view = view
        self._showing = False
        self._sent = self._drawn = 0  # drawings sent in `tail`, and those of them that some browser has drawn
        self._held: tuple[int, int] | None = None  # step and version of the last one
        most = _affordable(view)
        self._steps, self._film_version = frozenset(view.frames(most)), view.version
        super().__init__(
            film=zlib.compress(view.encode(most=most), 1),
            title=view.title,
            links=" ".join(link.name for link in view.links()),
            cursor=view.cursor,
            selected=view.selected,
            live=view.is_live,
        )
        self.observe(self._on_move, ["cursor", "selected"])
        self.observe(lambda change: self.hear(change["new"]), "ask")
        self.observe(self._on_seen, "seen")
        self.on_msg(lambda _, content, __: take_in(self, content))

    def view_reference(self) -> dict[str, Any]:
        """The part of a MIME bundle that shows this widget."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {"application/vnd.jupyter.widget-view+json": view}

    def show(self, view: SteppedView) -> None:
        """Cursor, selection and, where the film does not hold it, the drawing of the view's step: one message."""
        now = view.cursor, view.version
        is_held = now == self._held or (view.cursor in self._steps and view.version == self._film_version)
        with POSTING, self.hold_sync():
            self._showing = True
            try:
                self.cursor, self.selected, self.live = view.cursor, view.selected, view.is_live
                if not is_held and self._drawn >= self._sent:
                    self._sent, self._held = self._sent + 1, now
                    self.tail = view.encode(step=view.cursor, number=self._sent)
            finally:
                self._showing = False

    def _on_move(self, change: Any) -> None:
        if not self._showing:
            self._view.moved(**{"step" if change["name"] == "cursor" else "selected": change["new"]})

    def _on_seen(self, change: Any) -> None:
        self._drawn = max(self._drawn, min(change["new"], self._sent))  # of two pages one may be late
        self.show(self._view)

    def hear(self, ask: dict[str, Any]) -> None:
        """Run steps, or keep the picture, as a page asks."""
        answer = {"id": ask.get("id"), "more": False, "error": ""}
        try:
            if steps := whole(ask.get("steps"), 0, MAX_STEPS, 0):
                answer["more"] = self._view.advance(steps)
        except Exception as error:
            answer["error"] = describe_error(error)  # the view shows it
        with POSTING:
            self.answer = answer
        if ask.get("keep"):
            for link in self._view.links():
                link.keep()


def _affordable(view: SteppedView) -> int:
    """How many steps are drawn beforehand: what `FILM_S` allows. The kernel draws the others as they are asked for."""
    began = time.perf_counter()
    for width in (WIDE, NARROW):
        view.related(view.cursor, width)
    each = time.perf_counter() - began
    return max(2, min(MAX_FRAMES, int(FILM_S / each)))


def widget_of(view: SteppedView) -> SheetWidget:
    """A widget that shows `view`."""
    return SheetWidget(view)
