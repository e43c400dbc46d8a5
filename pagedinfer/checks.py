"""Checks that settings share: a value outside its range is a `ConfigError` that names it and its bounds."""

from __future__ import annotations

import sys
from typing import Any

from pagedinfer.errors import ConfigError

__all__ = ["check_flags", "check_int", "check_real", "check_text"]

MAX_FLOAT = sys.float_info.max


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
