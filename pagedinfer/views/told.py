"""What a page tells its widget: messages of our own with changed traits, see `teller` in `static/dom.js`."""

from __future__ import annotations

from typing import Any, Protocol

from pagedinfer.views.link import POSTING

__all__ = ["MAX_STEPS", "take_in", "whole"]

MAX_STEPS = 100
"""Most steps that a page may ask for at once: it asks again, and can be told to pause in between."""

TOLD = ("cursor", "selected", "seen")
"""Traits that a page may change. `ask` is heard after them: it may run an engine, and no message waits for that."""


class _Widget(Protocol):
    keys: Any

    def set_state(self, state: dict[str, Any]) -> None:
        """Take in traits as if the front end had synced them: all at once, none sent back."""

    def hear(self, ask: dict[str, Any]) -> None:
        """Do what a page asks, and answer."""


def take_in(widget: _Widget, content: Any) -> None:
    """Set the traits that a message names, `{"state": {"cursor": 3}}`. Other traits and messages are not for us."""
    state = content.get("state") if isinstance(content, dict) else None
    if isinstance(state, dict):
        with POSTING:  # traits are not made for several threads
            widget.set_state({name: state[name] for name in TOLD if name in state and name in widget.keys})
        if isinstance(state.get("ask"), dict):
            widget.hear(state["ask"])


def whole(number: Any, least: int, most: int, default: int) -> int:
    """A whole number from a page, not below or above these; `default` for what is none."""
    return min(max(number, least), most) if isinstance(number, int) else default
