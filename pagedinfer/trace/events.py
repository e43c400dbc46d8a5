"""The event vocabulary: what the engine says about itself. Standard library only; everything else builds on it.

Events are facts. They carry ints, floats, strings and tuples, never tensors and never prompt text. One event per
request (or cause) and step, none per token or block. Folding them gives the engine's state (`trace.replay`);
the inputs among them re-run the core (`trace.rerun`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar

__all__ = [
    "KINDS",
    "SCHEMA",
    "Abort",
    "Admit",
    "Alloc",
    "Cancel",
    "Commit",
    "Error",
    "Event",
    "Finish",
    "Free",
    "Gap",
    "Keyframe",
    "Meta",
    "Preempt",
    "Refuse",
    "Reject",
    "Resume",
    "Step",
    "Submit",
    "event_from_dict",
    "json_line",
]

SCHEMA = "1.0"
"""Version of the vocabulary. A higher minor number adds kinds or fields; readers skip what they do not know."""

MAX_NUMBER = 2**53
"""Integers of a recording are smaller: JSON readers elsewhere keep them exactly."""

MAX_NUM_BLOCKS, MAX_BLOCK_SIZE = 10**6, 256
"""The largest pool that a recording may claim: its replay holds every block."""


KINDS: dict[str, type[Event]] = {}
"""Every kind by name."""


@dataclass(slots=True)
class Event:
    """Base of all events. The bus stamps these three:

    Attributes:
        seq: number of the event on its bus, from 0.
        step: the step it belongs to; 0 before the first.
        t: wall time in seconds, None when the bus has no wall clock. Never part of a comparison.
    """

    kind: ClassVar[str] = ""
    seq: int = field(init=False, default=-1, compare=False)
    step: int = field(init=False, default=-1)
    t: float | None = field(init=False, default=None, compare=False, repr=False)

    def __init_subclass__(cls) -> None:
        # Called twice per class: @dataclass(slots=True) builds a second one, which is the one to keep.
        cls.kind = cls.__name__.lower()
        KINDS[cls.kind] = cls

    def to_dict(self, *, wall: bool = True) -> dict[str, Any]:
        """The event as a JSON-ready dict; `wall=False` leaves `t` out, so that equal runs give equal bytes."""
        data: dict[str, Any] = {"kind": self.kind, "seq": self.seq, "step": self.step}
        if wall and self.t is not None:
            data["t"] = round(self.t, 6)
        for name in _own_fields(type(self)):
            data[name] = getattr(self, name)
        return data


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_NUMBER


def _is_real(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and isfinite(value))


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(of, value))


def _is_dict(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(_is_str, value)) and all(map(of, value.values()))


_FITS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": _is_real,
    "float | None": lambda value: value is None or _is_real(value),
    "str": _is_str,
    "tuple[int, ...]": _is_list(_is_int),
    "dict[str, int]": _is_dict(_is_int),
    "dict[str, str]": _is_dict(_is_str),
    "dict[str, list[str]]": _is_dict(_is_list(_is_str)),
    "dict[str, Any]": _is_dict(lambda value: True),
}
"""For each type that a field may have: whether a value read from JSON is of it."""


def _check_pool(config: Mapping[str, Any]) -> None:
    for name, most in (("num_blocks", MAX_NUM_BLOCKS), ("block_size", MAX_BLOCK_SIZE)):
        value = config.get(name, 1)
        if not (_is_int(value) and 1 <= value <= most):
            raise ValueError(
                f"{name} in config is {repr(value)[:60]}; it must be an integer from 1 to {most}."
            )


def json_line(data: Mapping[str, Any]) -> str:
    """`data` as one line of compact JSON that UTF-8 can hold: escaped where an id has half a surrogate pair."""
    line = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":"))
    return line


def _own_fields(cls: type[Event]) -> list[str]:
    return [f.name for f in fields(cls) if f.init]


def event_from_dict(data: Mapping[str, Any]) -> Event | None:
    """The event that `to_dict` described, or None for a kind (or a required field) unknown to this version.

    Raises:
        ValueError: a field holds something else than its type says.
    """
    cls = KINDS.get(str(data.get("kind")))
    if cls is None:
        return None
    required = [
        f.name for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING
    ]
    if any(name not in data for name in required):
        return None
    values = {name: data[name] for name in _own_fields(cls) if name in data}
    types = {f.name: str(f.type) for f in fields(cls)}
    for name in ("seq", "step", "t", *values):
        if name in data and not _FITS[types[name]](data[name]):
            raise ValueError(f"{name} of {cls.kind} is {repr(data[name])[:60]}, which is no {types[name]}.")
    if cls is Meta:
        _check_pool(data["config"])
    event = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    event.seq, event.step, event.t = data.get("seq", -1), data.get("step", -1), data.get("t")
    return event


@dataclass(slots=True)
class Meta(Event):
    """Start of a recording: schema, the engine's config, and free facts about the model and machine."""

    schema: str
    config: dict[str, Any]
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Keyframe(Event):
    """The whole state at this point, as `Engine.snapshot()` gives it. First event of a recording begun mid-run."""

    snapshot: dict[str, Any]


@dataclass(slots=True)
class Submit(Event):
    """Input: a request was accepted into `waiting`."""

    rid: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    now: float


@dataclass(slots=True)
class Reject(Event):
    """Input: a request was refused at submission, with the sentence why."""

    rid: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    now: float
    why: str


@dataclass(slots=True)
class Abort(Event):
    """Input: the caller gave a request up."""

    rid: str


@dataclass(slots=True)
class Step(Event):
    """Input (its clock) and decision: a plan was made. Precedes the plan's other events.

    `scheduled` maps request to tokens; `reasons` maps request to the sentence why it was left out (running ones
    and the head of `waiting`, behind which the others wait).
    """

    i: int
    now: float
    budget: int
    scheduled: dict[str, int]
    reasons: dict[str, str]


@dataclass(slots=True)
class Commit(Event):
    """Input: a plan ran. `tokens` maps request to the number of new tokens (requests without any are left out).

    `ends` holds the ends that the core cannot know: request -> [finish reason, the sentence why].
    """

    tokens: dict[str, int]
    ends: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class Cancel(Event):
    """Input: a plan was given up; the state before it is back."""

    why: str


@dataclass(slots=True)
class Admit(Event):
    """A waiting request joined the batch for the first time."""

    rid: str
    why: str


@dataclass(slots=True)
class Resume(Event):
    """A preempted request joined the batch again."""

    rid: str
    why: str


@dataclass(slots=True)
class Alloc(Event):
    """Blocks `pblks` were appended to the request's table, from logical block `first` on."""

    rid: str
    group: int
    first: int
    pblks: tuple[int, ...]


@dataclass(slots=True)
class Free(Event):
    """The request gave its blocks back, in this order; `why` is "preempt" or "finish"."""

    rid: str
    pblks: tuple[int, ...]
    why: str


@dataclass(slots=True)
class Preempt(Event):
    """A running request lost its place and its keys and values; it waits at the head of the queue."""

    rid: str
    mode: str
    why: str


@dataclass(slots=True)
class Finish(Event):
    """A request ended. `why` is the finish reason (stop, length, abort, error), `detail` the sentence."""

    rid: str
    why: str
    detail: str


@dataclass(slots=True)
class Refuse(Event):
    """Input: fault injection refused the allocator's `call`-th allocation."""

    call: int
    needed: int


@dataclass(slots=True)
class Error(Event):
    """Something outside the core failed (a subscriber, a callback, a runner); the run went on."""

    where: str
    what: str


@dataclass(slots=True)
class Gap(Event):
    """A recorder dropped `dropped` events here: a hole, never a silent one."""

    dropped: int
