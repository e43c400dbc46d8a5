"""The second driver: a cell that awaits a run, while the views follow it and their buttons work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Follower", "drive"]


class Follower(Protocol):
    """A view that goes along with a run."""

    def begin(self) -> None:
        """A run begins."""

    def follow(self) -> bool:
        """Show what is new if it is time to. Returns False to pause the run."""

    def end(self) -> None:
        """The run has paused or ended: show the last of it."""


async def drive(advance: Callable[[], bool], views: Sequence[Follower], steps: int | None = None) -> bool:
    """Run `steps` engine steps, or until nothing is left, a breakpoint is reached, or a view pauses.

    Each step runs in a worker thread, one after the other, so the event loop is free between and during them; views
    are called on the loop. Cancelling the task ends the run after the step it is in.

    Returns:
        Whether there may be more.
    """
    more = True
    for view in views:
        view.begin()
    try:
        while more and (steps is None or steps > 0):
            more = await asyncio.to_thread(advance)
            steps = None if steps is None else steps - 1
            going_on = [view.follow() for view in views]  # all of them, whoever pauses
            if not all(going_on):
                break
            await asyncio.sleep(0)  # messages of the browser come in here
    finally:
        for view in views:
            view.end()
    return more
