"""Recording: a subscriber that keeps what the bus says."""

from __future__ import annotations

from typing import Any, Protocol

from pagedinfer.trace.bus import EventBus, Subscription
from pagedinfer.trace.events import SCHEMA, Keyframe, Meta
from pagedinfer.trace.recording import Recording, RecordingError

__all__ = ["Recordable", "Recorder"]


class Recordable(Protocol):
    """What a recorder needs of an engine."""

    bus: EventBus

    def describe(self) -> dict[str, Any]:
        """The settings for `meta`: {"config": ..., "info": ...}."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain data."""
        ...


class Recorder:
    """`with Recorder(engine) as recording:` keeps every event of the block in a `Recording`.

    Begun on a fresh engine, a recording can be re-run from its first step; begun later, it starts with a keyframe
    and can be replayed. The recording may be looked at, drawn and saved at any time, also while it grows.
    """

    def __init__(self, engine: Recordable, *, max_events: int | None = None) -> None:
        self._engine = engine
        self._subscription: Subscription | None = None
        self.recording = Recording(max_events=max_events)

    def start(self) -> Recording:
        """Begin to record. Harmless when already recording.

        Raises:
            RecordingError: called by a subscriber, where a step may be half told.
        """
        if self._subscription is None:
            if self._engine.bus.is_delivering:
                raise RecordingError("A recording cannot begin inside a subscriber; start it between two steps.")
            facts, snapshot = self._engine.describe(), self._engine.snapshot()
            meta = Meta(SCHEMA, dict(facts["config"]), dict(facts.get("info", {})))
            keyframe = Keyframe(snapshot)
            meta.step = keyframe.step = int(snapshot["step"])
            self.recording.add(meta)
            if snapshot["num_submitted"] or snapshot["step"]:
                self.recording.add(keyframe)
            self._subscription = self._engine.bus.subscribe(self.recording.add)
        return self.recording

    def stop(self) -> Recording:
        """End the recording. Harmless when called twice."""
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        return self.recording

    def __enter__(self) -> Recording:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()
