"""The middle tier of the views with a cursor: their drawings with ipywidgets' own buttons, drawn in the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pagedinfer.views.core_frame import CoreFrame
from pagedinfer.views.sheet import WIDE
from pagedinfer.views.svg import document

if TYPE_CHECKING:
    from pagedinfer.views.stepped import SteppedView

__all__ = ["CoreSheet", "core_of"]


class CoreSheet(CoreFrame):
    """Shows a view, see `stepped.Front`; the view's `why` says why this is not the full one."""

    def __init__(self, view: SteppedView) -> None:
        super().__init__(view.title, view.why)
        self._view = view
        self._shown: object = None
        self.show(view)

    def show(self, view: SteppedView) -> None:
        """Draw the view's cursor, selection and newest steps."""
        now = view.cursor, view.version, view.selected, view.is_live
        if now == self._shown:
            return
        self._shown = now
        sheet = view.related(view.cursor, WIDE)
        picture = document(view.title, sheet.drawing(view.selected))
        steps = view.first_step, view.last_step
        self.draw(view.cursor, steps, view.is_live, sheet.selections(), view.selected, sheet.words, picture)

    def go(self, step: int) -> bool:
        """Show this step; past the end, run one where the recording's engine can be driven from here."""
        if step > self._view.last_step and self._view.is_live:
            return self._view.advance(1)
        self._view.moved(step)
        return True

    def choose(self, selected: Mapping[str, Any]) -> None:
        """Select, here and in the linked views."""
        self._view.moved(selected=selected)


def core_of(view: SteppedView) -> CoreSheet:
    """A widget of core ipywidgets that shows `view`."""
    return CoreSheet(view)
