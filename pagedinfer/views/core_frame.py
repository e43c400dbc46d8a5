"""What the views of core ipywidgets share: buttons, a slider, a choice, the words, and one picture below them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any

import ipywidgets

from pagedinfer.errors import describe_error, readable
from pagedinfer.views.link import POSTING

__all__ = ["CoreFrame"]

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"

ENDLESS = 10**6
"""Where Play ends when an engine can be stepped on."""

NOTHING = "nothing selected"


class CoreFrame(ipywidgets.VBox):  # type: ignore[misc]
    """Back, Play, step, what is selected, a slider, the words and the picture. Subclasses say what is shown (`draw`).

    Args:
        title: the view's name, above it.
        why: a sentence that says why this is not the full view, below the words.
    """

    tier = "ipywidgets"

    def __init__(self, title: str, why: str = "") -> None:
        self._why, self._placed = why, (0, (0, 0), False)
        self._showing = self._idle = False
        self._back, self._forward = _button("◀ back", "Step back"), _button("step ▶", "Step forward")
        self._play = ipywidgets.Play(interval=500, description="Play")
        self._slider = ipywidgets.IntSlider(description="Step", layout={"width": "100%"})
        self._select = ipywidgets.Dropdown(options=[(NOTHING, {})], description="Select")
        self._said, self._trouble, self._picture = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self._back.on_click(lambda _: self._user(self._placed[0] - 1))
        self._forward.on_click(lambda _: self._user(self._placed[0] + 1))
        for moving in (self._play, self._slider):
            moving.observe(lambda change: self._user(change["new"]), "value")
        self._select.observe(lambda change: self._user(selected=change["new"]), "value")
        name = ipywidgets.HTML(f"<b>{_html(title)}</b>")
        self._buttons = ipywidgets.HBox([self._back, self._play, self._forward, self._select])
        super().__init__([name, self._buttons, self._slider, self._said, self._trouble, self._picture])

    # -- what a view says ---------------------------------------------------------------------------------------

    def go(self, step: int) -> bool:
        """Show this step, or the nearest there is; past the end, run one if there is an engine.

        Returns:
            Whether Play may go on past the end.
        """
        raise NotImplementedError

    def choose(self, selected: Mapping[str, Any]) -> None:
        """Select: {"request": id}, {"block": number} or {}."""
        raise NotImplementedError

    # -- drawing ------------------------------------------------------------------------------------------------

    def draw(
        self,
        step: int,
        steps: tuple[int, int],
        live: bool,
        choices: Iterable[Mapping[str, Any]],
        selected: Mapping[str, Any],
        words: str,
        picture: str,
    ) -> None:
        """Show all this.

        Args:
            step: the step shown.
            steps: the first and the last there is.
            live: whether steps can be run past the last.
            choices: the selections to choose from.
            selected: the one there is.
            words: what the step is, in a sentence.
            picture: an SVG.
        """
        note = f"<br><small>{_html(self._why)}</small>" if self._why else ""
        with self._by_itself():
            self._placed = step, steps, live
            self._place()
            self._offer(choices, selected)
            self._said.value, self._picture.value = _html(words) + note, picture

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """What happens here is not the user's doing."""
        with POSTING:
            self._showing = True
            try:
                yield
            finally:
                self._showing = False

    def _place(self) -> None:
        step, (first, last), live = self._placed
        endless = max(last, ENDLESS) if live and not self._idle else last
        for widget, end in ((self._slider, last), (self._play, endless)):
            with widget.hold_sync(), widget.hold_trait_notifications():
                widget.min, widget.max, widget.value = first, end, step

    def _offer(self, choices: Iterable[Mapping[str, Any]], selected: Mapping[str, Any]) -> None:
        offered = [{}, *map(dict, choices)]
        if selected not in offered:
            offered.append(dict(selected))
        options = [(_name(one), one) for one in offered]
        if list(self._select.options) != options:
            self._select.options = options
        self._select.value = dict(selected)

    def _user(self, step: int | None = None, selected: Mapping[str, Any] | None = None) -> None:
        """Somebody used a button, the slider, Play or the choice."""
        with POSTING:
            if self._showing:
                return
        try:
            if selected is not None:
                self.choose(selected)
            elif step is not None:
                self._idle = not self.go(step)
            self._trouble.value = ""
        except Exception as error:  # there is nobody above a callback to tell
            self._idle = True
            self._trouble.value = f"<b>{_html(describe_error(error))}</b>"
        with self._by_itself():
            self._place()  # Play may have run ahead

    def close(self) -> None:
        """Take all its parts off the page; ipywidgets would keep them, and what they show, for good."""
        for part in (*self._buttons.children, *self.children):
            part.close()
        super().close()

    def __del__(self) -> None:
        super().close()  # not ours: it may be half built, and nothing is published from the garbage collector

    def view_reference(self) -> dict[str, Any]:
        """The part of a MIME bundle that shows this widget."""
        return {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}}


def _button(name: str, tip: str) -> Any:
    return ipywidgets.Button(description=name, tooltip=tip, layout={"width": "auto"})


def _name(selected: Mapping[str, Any]) -> str:
    if "request" in selected:
        return readable(str(selected["request"]))
    return f"block {selected['block']}" if "block" in selected else NOTHING


def _html(text: str) -> str:
    return escape(readable(text))
