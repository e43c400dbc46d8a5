"""The widget behind the views with a cursor: it has the drawings of all steps and scrubs without asking the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from pagedinfer.views.sheet_page import sheet_esm, sheet_style
from pagedinfer.views.told import take_in

if TYPE_CHECKING:
    from pagedinfer.views.stepped import SteppedView

__all__ = ["SheetWidget", "widget_of"]


class SheetWidget(anywidget.AnyWidget):  # type: ignore[misc]
    """The drawings of a view, and the step shown. `film` is `SteppedView.encode`'s bytes."""

    _ipython_display_ = None  # ipywidgets 7 would bypass _repr_mimebundle_
    _esm = sheet_esm()
    _css = sheet_style()
    film = traitlets.Bytes(b"").tag(sync=True)
    title = traitlets.Unicode("").tag(sync=True)
    cursor = traitlets.Int(0).tag(sync=True, echo_update=False)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(lambda _, content, __: take_in(self, content))

    def view_reference(self) -> dict[str, Any]:
        """The part of a MIME bundle that shows this widget."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        return {"application/vnd.jupyter.widget-view+json": view}


def widget_of(view: SteppedView) -> SheetWidget:
    """A widget that shows `view`."""
    return SheetWidget(film=view.encode(), title=view.title, cursor=view.cursor)
