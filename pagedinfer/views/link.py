"""What the views of one recording share: the step shown, the selection, and word that the recording has grown.

Each view tells its recording's link where its user went, and the link tells the others. This runs in the kernel, so it
holds for views in different cells, of different kinds and tiers, and for front ends that give each output a frame of
its own. A page without a kernel does the same for the views on it (`static/page.js`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakMethod, WeakSet

from pagedinfer.errors import describe_error, readable
from pagedinfer.trace.bus import warn
from pagedinfer.trace.recording import Recording

__all__ = ["FOLLOW", "POSTING", "Link", "Member", "chosen", "link_of"]

POSTING = threading.RLock()
"""Held while a view sends a message: one at a time, of all views, for they tell each other.

Who listens to a view's traits is called with it held: a listener must not call an engine of which a subscriber, who has
the engine's lock, moves views.
"""

FOLLOW = -1
"""As a step: whoever shows the newest goes along to the new one."""

FRAME_S = 0.1
"""Seconds at least between two drawings of a run that goes on."""

SHARE = 4
"""A drawing of all views that took so long is left alone for so many times as long: a fifth of the time at most."""


def chosen(selected: Mapping[str, Any]) -> dict[str, Any]:
    """What is selected, as a front end or a cell says it: {"request": id}, {"block": number}, else {}."""
    if isinstance(request := selected.get("request"), str):
        return {"request": readable(request)}
    block = selected.get("block")
    return {"block": block} if isinstance(block, int) and not isinstance(block, bool) and block >= 0 else {}


class Member(Protocol):
    """A view that takes part."""

    linked: bool
    """Whether it goes where the others go."""

    def go_along(self, step: int | None, selected: Mapping[str, Any] | None) -> None:
        """Another view shows this step or has this selection now; None is as before."""

    def grow(self, step: int | None) -> None:
        """Take in what the recording has got. `step`: go to this one; None: stay; `FOLLOW`: go to the newest, if the
        newest was shown before.
        """

    def keep_picture(self) -> None:
        """Put the picture of now where a saved notebook will show it."""


class Link:
    """The views of one recording. Also a follower of runs, see `views.driver`. A page knows it by its `name`."""

    def __init__(self) -> None:
        self.name = f"{id(self):x}"
        self._members: WeakSet[Any] = WeakSet()
        self._busy = False
        self._next = 0.0
        self._advance: Callable[[], Callable[[], bool] | None] = lambda: None

    def join(self, member: Member) -> None:
        """Take part from now on."""
        with POSTING:
            self._members.add(member)

    def leave(self, member: Member) -> None:
        """Take no part any more. Harmless when called twice."""
        with POSTING:
            self._members.discard(member)

    def tell(
        self, source: Member, step: int | None = None, selected: Mapping[str, Any] | None = None
    ) -> None:
        """`source` shows this step, or has this selection."""
        if source.linked:
            self._each(source, lambda member: member.linked and member.go_along(step, selected))

    def grew(self, source: Member | None = None, step: int | None = None, rest: bool = True) -> None:
        """The recording has grown; `step` is for those that are linked, see `Member.grow`.

        While a run goes on (`rest=False`) drawings are spaced out.
        """
        if rest or time.monotonic() >= self._next:
            began = time.monotonic()
            self._each(source, lambda member: member.grow(step if member.linked else None))
            self._next = time.monotonic() + max(FRAME_S, SHARE * (time.monotonic() - began))

    def keep(self, source: Member | None = None) -> None:
        """A run has paused or ended."""
        self._each(source, lambda member: member.keep_picture())

    def _each(self, source: Member | None, act: Callable[[Any], object]) -> None:
        with POSTING:
            if self._busy:  # what the members tell in answer is no news
                return
            self._busy = True
            try:
                for member in list(self._members):
                    if member is not source:
                        self._call(member, act)
            finally:
                self._busy = False

    def _call(self, member: Any, act: Callable[[Any], object]) -> None:
        try:
            act(member)
        except Exception as error:  # neither the run nor the other views can help it
            self.leave(member)
            what = readable(describe_error(error))
            warn(f"A {type(member).__name__} raised {what}. It is not linked any more; the run goes on.")

    # -- driving ------------------------------------------------------------------------------------------------

    def driven_by(self, advance: Callable[[], bool] | None) -> None:
        """`advance`, a method that is held weakly, runs one engine step and says whether there may be more."""
        self._advance = WeakMethod(advance) if advance is not None else lambda: None
        self._each(None, lambda member: member.go_along(None, None))  # they say whether they are live

    @property
    def is_live(self) -> bool:
        """Whether the engine behind the recording can be stepped from here."""
        return self._advance() is not None or any(getattr(m, "live", False) for m in self._now())

    def _now(self) -> list[Any]:
        with POSTING:  # no set is read while another thread adds to it
            return list(self._members)

    def step(self, steps: int) -> bool:
        """Run up to `steps` engine steps, by an engine view if there is one, and show them in all views."""
        for member in self._now():
            if getattr(member, "live", False) and hasattr(member, "go_on"):
                return bool(member.go_on(steps))
        advance, more = self._advance(), True
        while advance is not None and more and steps > 0:
            more, steps = bool(advance()), steps - 1
        self.grew(step=FOLLOW)
        return more and advance is not None

    def begin(self) -> None:
        """A run begins."""

    def follow(self) -> bool:
        """Show what is new if it is time to."""
        self.grew(step=FOLLOW, rest=False)
        return True

    def end(self) -> None:
        """The run has paused or ended."""
        self.grew(step=FOLLOW)
        self.keep()


_links: WeakKeyDictionary[Recording, Link] = WeakKeyDictionary()


def link_of(recording: Recording) -> Link:
    """The link of a recording's views."""
    with POSTING:
        return _links.setdefault(recording, Link())
