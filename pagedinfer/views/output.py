"""Outputs of a notebook's cells that can be changed later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from IPython import get_ipython
from IPython.display import publish_display_data

from pagedinfer.views.bundle import alt_texts

__all__ = ["publish"]


def publish(bundle: Mapping[str, Any], display_id: str, update: bool = False) -> None:
    """Show a MIME bundle in an output of this id, or change the output that has it (a terminal has none to change)."""
    if update and not hasattr(get_ipython(), "kernel"):
        return
    more = {"update": True} if update else {}
    publish_display_data(dict(bundle), alt_texts(bundle), transient={"display_id": display_id}, **more)
