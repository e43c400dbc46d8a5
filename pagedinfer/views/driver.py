"""The second driver: a cell that awaits a run, while the views follow it and their buttons work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Driven", "Follower", "drive"]


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


class Driven:
    """`step`, `play` and `run_async` of a view that draws when steps have been run."""

    def go_on(self, steps: int) -> bool:
        """`step`, without keeping the picture."""
        raise NotImplementedError

    def keep_picture(self) -> None:
        """Put the picture of now where a saved notebook will show it, if there is such a place."""

    def step(self, steps: int = 1) -> bool:
        """Run up to `steps` engine steps and show the newest. Returns whether there may be more."""
        try:
            return self.go_on(steps)
        finally:
            self.keep_picture()

    def play(self, steps: int | None = None) -> bool:
        """Run `steps` engine steps, or until the engine has nothing left to do."""
        more = True
        try:
            while more and (steps is None or steps > 0):
                more, steps = self.go_on(1), None if steps is None else steps - 1
        finally:
            self.keep_picture()
        return more

    async def run_async(self, steps: int | None = None) -> bool:
        """`play` for `await`, in a worker thread."""
        try:
            return await drive(lambda: self.go_on(1), [], steps)
        finally:
            self.keep_picture()
