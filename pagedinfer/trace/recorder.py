"""Recording: a subscriber that keeps what the bus says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pagedinfer.errors import ConfigError, RecordingError
from pagedinfer.trace.bus import Subscription
from pagedinfer.trace.events import SCHEMA, Event, Keyframe, Meta
from pagedinfer.trace.recording import Recording

__all__ = ["Recordable", "Recorder"]


class Recordable(Protocol):
    """What a recorder needs of an engine."""

    def attach(
        self, fn: Callable[[Event], None], begin: Callable[[dict[str, Any], dict[str, Any]], None]
    ) -> Subscription | None:
        """Call `begin` with the settings for `meta` ({"config": ..., "info": ...}) and the whole state as plain
        data, then subscribe `fn`; no event comes between. Where a change may be half told: None, and nothing done.
        """
        ...


class Recorder:
    """`with Recorder(engine) as recording:` keeps every event of the block in a `Recording`.

    Begun on a fresh engine, a recording can be re-run from its first step; begun later, it starts with a keyframe
    and can be replayed. The recording may be looked at, drawn and saved at any time, also while it grows.
    """

    def __init__(self, engine: Recordable, *, max_events: int | None = None) -> None:
        if not hasattr(engine, "attach"):
            what = type(engine).__name__
            raise ConfigError(
                f"A recorder listens to an engine, not to a {what}; give llm.engine or an Engine."
            )
        self._engine = engine
        self._subscription: Subscription | None = None
        self.recording = Recording(max_events=max_events)

    def start(self) -> Recording:
        """Begin to record. Harmless when already recording.

        Raises:
            RecordingError: called inside a step or by a subscriber, where a step may be half told; or stopped before.
        """
        if self._subscription is None:
            if self.recording.events:
                raise RecordingError(
                    "This recorder was stopped, and what came since is missing; make a new one."
                )
            self._subscription = self._engine.attach(self.recording.add, self._begin)
            if self._subscription is None:
                raise RecordingError(
                    "A recording cannot begin inside a step or a subscriber; start it between two steps."
                )
        return self.recording

    def _begin(self, facts: dict[str, Any], snapshot: dict[str, Any]) -> None:
        meta = Meta(SCHEMA, dict(facts["config"]), dict(facts.get("info", {})))
        keyframe = Keyframe(snapshot)
        meta.step = keyframe.step = int(snapshot["step"])
        self.recording.add(meta)
        if snapshot["num_submitted"] or snapshot["step"]:
            self.recording.add(keyframe)

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
