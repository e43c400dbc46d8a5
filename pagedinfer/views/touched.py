"""Whom the events since the last step may have changed: what the camera has to look at, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pagedinfer.trace import events as ev

__all__ = ["Touched"]

COUNTS_ONLY = {"cache", "hit", "reject"}
"""Events that name a request and leave its table and its place in the queues as they are."""

NO_REQUEST = {
    "step",
    "commit",
    "evict",
    "retain",
    "pin",
    "expire",
    "reset",
    "refuse",
    "error",
    "gap",
    "cancel",
}
"""Events without a request of their own; of any other such event it is not known whom it touches."""

EVERYBODY = {"keyframe", "resize", "compact", "move", "cancel"}
"""Events that may change more tables than they name."""

NO_QUEUE = COUNTS_ONLY | NO_REQUEST - {"cancel"} | {"alloc", "share", "copy", "free", "trim", "slide", "move"}
"""Events that leave the queues as they are."""


class Touched:
    """Requests (as lanes) and blocks to look at.

    Attributes:
        counted: lanes whose numbers of tokens may have changed. moved: lanes whose table, status or place may have.
        blocks: blocks that events named. queues: whether a queue may have changed.
    """

    def __init__(self) -> None:
        self.counted: set[int] = set()
        self.moved: set[int] = set()
        self.blocks: set[int] = set()
        self.queues = False

    def note(
        self, event: ev.Event, lane_of: Mapping[str, int], everybody: Callable[[], Iterable[int]]
    ) -> None:
        """Take in an event, before it changes anything."""
        rid, kind = getattr(event, "rid", ""), event.kind
        if rid in lane_of:
            (self.counted if kind in COUNTS_ONLY else self.moved).add(lane_of[rid])
        if kind in EVERYBODY or not (rid or kind in NO_REQUEST):
            self.moved.update(everybody())
        if isinstance(event, ev.Step | ev.Commit):
            named = event.scheduled if isinstance(event, ev.Step) else event.tokens
            self.counted.update(lane_of[rid] for rid in named if rid in lane_of)
        self.blocks.update(getattr(event, "pblks", ()))
        for pair in getattr(event, "pairs", ()):
            self.blocks.update(pair)
        self.queues |= kind not in NO_QUEUE
