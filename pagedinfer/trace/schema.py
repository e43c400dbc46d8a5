"""What an event is: the base class, how it becomes a JSON line, and how a line becomes an event again, checked.

Standard library only, and nothing of ours: everything else builds on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from math import isfinite
from typing import Any, ClassVar

__all__ = ["KINDS", "MAX_BLOCK_SIZE", "MAX_NUM_BLOCKS", "SCHEMA", "Event", "event_from_dict", "json_line"]

SCHEMA = "1.0"
"""Version of the vocabulary. A higher minor number adds kinds or fields; readers skip what they do not know."""

MAX_NUMBER = 2**53
"""Integers of a recording are smaller: JSON readers elsewhere keep them exactly."""

MAX_NUM_BLOCKS, MAX_BLOCK_SIZE = 10**6, 512
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


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_int, value))


def _is_range(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 4 and all(map(_is_real, value))


def _is_dict(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(_is_str, value)) and all(map(of, value.values()))


_FITS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "bool": lambda value: isinstance(value, bool),
    "float": _is_real,
    "float | None": lambda value: value is None or _is_real(value),
    "str": _is_str,
    "tuple[int, ...]": _is_list(_is_int),
    "tuple[tuple[int, int], ...]": _is_list(_is_pair),
    "tuple[tuple[int, int, int, float], ...]": _is_list(_is_range),
    "dict[str, list[int]]": _is_dict(_is_list(_is_int)),
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
    if cls.kind == "meta":
        _check_pool(data["config"])
    event = cls(**{name: _frozen(value) for name, value in values.items()})
    event.seq, event.step, event.t = data.get("seq", -1), data.get("step", -1), data.get("t")
    return event


def _frozen(value: Any) -> Any:
    """Lists as tuples, also inside one another; JSON has no tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
