"""Checks that settings share: a value outside its range is a `ConfigError` that names it and its bounds."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection, Iterable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, TypeVar

from pagedinfer.errors import ConfigError, UnknownOption

__all__ = [
    "check_flags", "check_int", "check_names", "check_real", "check_text", "nearest", "options_by_name",
]  # fmt: skip

MAX_FLOAT = sys.float_info.max

Settings = TypeVar("Settings")


def check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuse all but integers from `low` to `high`, both included; True and False are none."""
    bounds = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < low
        or (high is not None and value > high)
    ):
        raise ConfigError(f"{name}={value!r}: it must be {bounds}.")


def check_real(name: str, value: Any, low: float, high: float | None = None) -> None:
    """Refuse all but finite numbers from `low` to `high`, both included."""
    if high is not None:
        bounds = f"a number from {low} to {high}"
    else:
        bounds = "a finite number" if low == -MAX_FLOAT else f"a finite number of at least {low}"
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not low <= value <= (MAX_FLOAT if high is None else high):  # refuses NaN and infinity too
        raise ConfigError(f"{name}={value!r}: it must be {bounds}.")


def check_flags(settings: Any, *names: str) -> None:
    """Refuse all but True and False for the named attributes of `settings`."""
    for name in names:
        if not isinstance(getattr(settings, name), bool):
            raise ConfigError(f"{name}={getattr(settings, name)!r}: it must be True or False.")


def check_text(name: str, value: Any) -> None:
    """Refuse all but strings."""
    if not isinstance(value, str):
        raise ConfigError(f"{name}={value!r}: it must be a string.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Text to end a sentence with: the known name that is most like `name`, "" when none is."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def check_names(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse options that `owner` does not have: the sentence names them, the nearest known one, and all known.

    Raises:
        UnknownOption: one of `names` is not `known`.
    """
    if unknown := [name for name in names if name not in known]:
        said = " ".join(f"{owner} has no option {name}{nearest(name, known) or '.'}" for name in unknown)
        raise UnknownOption(f"{said} There are {', '.join(known)}.")


def options_by_name(cls: type[Settings]) -> type[Settings]:
    """Class decorator for a keyword-only dataclass: what does not fit its fields is refused in a sentence.

    Raises (the class that is returned, when it is called):
        UnknownOption: an unknown option, one that is missing, or a value without a name.
    """
    make: Any = cls.__init__
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    needed = [
        field.name
        for field in fields(cls)  # type: ignore[arg-type]
        if field.default is MISSING and field.default_factory is MISSING
    ]

    @wraps(make)
    def by_name(self: Settings, *values: Any, **options: Any) -> None:
        if values:
            raise UnknownOption(f"{cls.__name__} takes options by name only; {values[0]!r:.80} has none.")
        check_names(cls.__name__, options, known)
        if missing := [name for name in needed if name not in options]:
            raise UnknownOption(f"{cls.__name__} needs {' and '.join(missing)}.")
        make(self, **options)

    cls.__init__ = by_name  # type: ignore[assignment, method-assign]
    return cls
