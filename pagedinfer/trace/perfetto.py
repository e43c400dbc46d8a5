"""A recording as a Perfetto trace: protobuf TrackEvents, for ui.perfetto.dev and for Perfetto's own tools.

One process, "pagedinfer <model>", holds a track of steps, a counter track for each number of the pool and the batch,
and a track for each request: its life as one slice, and within it what it did: `waiting` (and within that the sentence
why), `prefill` (a slice a chunk), `decode` (one slice for steps in a row), `held` (running, but left out of the plan),
`preempted`, `swapped`. Numbers are the slices' arguments. A cancelled plan leaves a mark on the track of steps.

Times are the recording's wall time where it has some; else 1 step = 1 ms. The process's label and the mark "recording"
say which. Field numbers are those of Perfetto's protos/perfetto/trace: trace_packet.proto, track_event/*.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pagedinfer.errors import RecordingError
from pagedinfer.trace.lives import Lives, Mark
from pagedinfer.trace.protobuf import double, integer, message, text

if TYPE_CHECKING:
    from pagedinfer.trace.recording import Recording

__all__ = ["COUNTERS", "to_perfetto"]

COUNTERS = {
    "running": "requests",
    "waiting": "requests",
    "used_blocks": "blocks",
    "free_blocks": "blocks",
    "kv_usage": "share of the pool",
    "num_scheduled_tokens": "tokens",
}
"""Counter tracks and their units: columns of `Recording.steps`, and `free_blocks`, which is what they leave."""

PROCESS, STEPS, FIRST_COUNTER, FIRST_REQUEST = 1, 2, 10, 1000
"""Track ids."""

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
"""TrackEvent.Type"""

EXPLICIT, NEVER_MERGE, SEQUENCE, CLEARED = 3, 2, 1, 1
"""TrackDescriptor.ChildTracksOrdering and .SiblingMergeBehavior, our one packet sequence and its first flag."""


def to_perfetto(recording: Recording) -> bytes:
    """The whole trace file.

    Raises:
        RecordingError: the recording is empty.
    """
    if not recording.events:
        raise RecordingError("The recording is empty; record an engine first.")
    lives = Lives(recording.events, recording.first_step)
    head = [_descriptor(PROCESS, process=(_name(recording.info), str(lives.clock)))]
    head.append(_descriptor(STEPS, "steps", rank=0))
    for i, (name, unit) in enumerate(COUNTERS.items()):
        head.append(_descriptor(FIRST_COUNTER + i, name, rank=1 + i, unit=unit))
    for i, rid in enumerate(lives.requests):
        head.append(_descriptor(FIRST_REQUEST + i, rid, rank=FIRST_REQUEST + i))
    about = {"clock": str(lives.clock), **recording.info, **recording.config}
    body = [(lives.clock.start, _event(lives.clock.start, STEPS, INSTANT, "recording", about))]
    body += ((m.at, _event(m.at, _track(m), _TYPES[m.kind], m.name, m.facts)) for m in lives.marks)
    body += _counters(recording, lives)
    body.sort(key=lambda timed: timed[0])  # stable: within a track the order is right already
    return b"".join(head) + b"".join(packet for _, packet in body)


_TYPES = {"begin": BEGIN, "end": END, "instant": INSTANT}


def _name(info: Mapping[str, Any]) -> str:
    return f"pagedinfer {info['model']}" if "model" in info else "pagedinfer"


def _track(mark: Mark) -> int:
    return STEPS if mark.request is None else FIRST_REQUEST + mark.request


def _counters(recording: Recording, lives: Lives) -> Iterator[tuple[int, bytes]]:
    """A sample of each counter at the end of each step that the recording's table has."""
    num_blocks = int(recording.config.get("num_blocks", 0))
    for row in recording.steps.rows():
        at = lives.clock.steps[row["step"]][1]
        row["free_blocks"] = num_blocks - row["used_blocks"]
        for i, name in enumerate(COUNTERS):
            value = row[name]
            field = double(44, value) if isinstance(value, float) else integer(30, value)
            yield at, _packet(at, message(11, integer(9, COUNTER), integer(11, FIRST_COUNTER + i), field))


# -- messages, by field number ------------------------------------------------------------------------------------


def _packet(at: int, payload: bytes) -> bytes:
    """Trace.packet: a TracePacket with timestamp (8) and trusted_packet_sequence_id (10)."""
    return message(1, integer(8, at), integer(10, SEQUENCE), payload)


def _descriptor(
    track: int, name: str = "", *, rank: int = 0, unit: str = "", process: tuple[str, str] | None = None
) -> bytes:
    """Trace.packet with a TrackDescriptor (60): the process (its name and label), or a track within it."""
    if process is not None:
        what = message(3, integer(1, PROCESS), text(6, process[0]), text(8, process[1])) + integer(
            11, EXPLICIT
        )
        return message(1, integer(10, SEQUENCE), integer(13, CLEARED), message(60, integer(1, track), what))
    parts = [
        integer(1, track),
        integer(5, PROCESS),
        text(2, name),
        integer(12, rank),
        integer(15, NEVER_MERGE),
    ]
    if unit:
        parts.append(message(8, text(6, unit)))
    return message(1, integer(10, SEQUENCE), message(60, *parts))


def _event(at: int, track: int, kind: int, name: str, facts: Mapping[str, Any]) -> bytes:
    """Trace.packet with a TrackEvent (11) and its arguments (DebugAnnotation, 4)."""
    parts = [integer(9, kind), integer(11, track)]
    if kind != END:
        parts.append(text(23, name))
    parts += (_argument(key, value) for key, value in facts.items())
    return _packet(at, message(11, *parts))


def _argument(name: str, value: object) -> bytes:
    """TrackEvent.debug_annotations (4): a name (10) and a value by its type; what is no number or flag as text."""
    match value:
        case bool():
            field = integer(2, value)
        case int():
            field = integer(4, value)
        case float():
            field = double(5, value)
        case _:
            field = text(6, value if isinstance(value, str) else repr(value))
    return message(4, text(10, name), field)
