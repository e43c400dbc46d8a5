"""What a page tells its widget: messages of our own with changed traits, see `teller` in `static/dom.js`."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["take_in"]

TOLD = ("cursor", "selected", "seen", "ask")
"""Traits that a page may change."""


class _Widget(Protocol):
    keys: Any

    def set_state(self, state: dict[str, Any]) -> None:
        """Take in traits as if the front end had synced them: all at once, none sent back."""


def take_in(widget: _Widget, content: Any) -> None:
    """Set the traits that a message names, `{"state": {"cursor": 3}}`. Other traits and messages are not for us."""
    state = content.get("state") if isinstance(content, dict) else None
    if isinstance(state, dict):
        widget.set_state({name: state[name] for name in TOLD if name in state and name in widget.keys})
