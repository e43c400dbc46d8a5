"""Files that come from strangers: read within bounds, their values checked, and shown safely in messages.

What a file says of itself is a claim. Nothing is allocated for a claim, and each error names the field.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pagedinfer.errors import ModelError

__all__ = [
    "MAX_INT",
    "Fields",
    "check_regular",
    "config_error",
    "finite",
    "flag",
    "parse_json",
    "printable",
    "read_into",
    "read_json",
    "read_text",
    "shown",
    "text_of",
    "texts",
    "whole",
]

MAX_INT = 2**31 - 1
"""The largest size or id that is taken from a file."""

_MAX_TEXT = 1 << 26  # bytes of a config, an index or a template; the largest in use have ten million
_SHOWN = 160  # characters of a value in a message

_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _SHOWN


def printable(text: str) -> str:
    """Cut a name to a message's length, with control characters written out (a terminal would obey them)."""
    cut = text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in cut)


def shown(value: object) -> str:
    """Write a file's value for a message: quoted when it is text, and short whatever its size and depth."""
    return f'"{printable(value)}"' if isinstance(value, str) else _short.repr(value)


def whole(value: object, what: str, *, low: int = 0, high: int = MAX_INT) -> int:
    """Return a whole number; 64.0 is one, True is none.

    Raises:
        ModelError: it is something else, or outside `low` to `high`; the message names `what`.

    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelError(f"{what} is {shown(value)}; it must be a whole number from {low} to {high}")
    return value


def finite(value: object, what: str) -> float:
    """Return a number as a float.

    Raises:
        ModelError: it is none, or is infinite or NaN; the message names `what`.

    """
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ModelError(f"{what} is {shown(value)}; it must be a finite number")
    return number


def config_error(name: str, text: str) -> ModelError:
    """Make the error of a config field: the model's name, and what is wrong."""
    return ModelError(f'the model "{name}" {text}')


def text_of(value: object, what: str) -> str:
    """Return a text that can be written as UTF-8 (JSON may hold half of a surrogate pair).

    Raises:
        ModelError: it is none; the message names `what`.

    """
    if isinstance(value, str) and not _HALF.search(value):
        return value
    raise ModelError(f"{what} is {shown(value)}; it must be text")


def texts(value: object, what: str) -> list[str]:
    """Return a list of texts.

    Raises:
        ModelError: it is none; the message names `what`, and the first entry that is no text.

    """
    if not isinstance(value, (list, tuple)):
        raise ModelError(f"{what} is {shown(value)}; it must be a list of texts")
    for index, entry in enumerate(value):
        if not isinstance(entry, str):
            raise ModelError(f"{what}[{index}] is {shown(entry)}; it must be text")
    return list(value)


def flag(values: Mapping[str, Any], key: str, default: bool) -> bool:
    """Return a field that is true or false; null counts as absent.

    Raises:
        ModelError: it is something else; the message names the key.

    """
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ModelError(f"{key} is {shown(value)}; it must be true or false")
    return value


class Fields:
    """The fields of a model's config by key; what is missing without a default, or wrong, is named by its key.

    Args:
        name: the model's.
        values: the fields.
        where: what holds them, for messages.
        prefix: what the file puts before each key.

    """

    def __init__(self, name: str, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._name = name
        self._values = values
        self._where = where
        self._prefix = prefix

    def has(self, key: str) -> bool:
        """Say whether the key is there, with a value other than null."""
        return self._values.get(key) is not None

    def whole(self, key: str, default: int | None = None, *, high: int = MAX_INT) -> int:
        """Return a size: 1 or more."""
        return whole(self._get(key, default), self._what(key), low=1, high=high)

    def real(self, key: str, default: float | None = None) -> float:
        """Return a finite number."""
        return finite(self._get(key, default), self._what(key))

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return flag(self._values, key, default)

    def uniform(self, key: str, default: int | None = None) -> int:
        """Return a size that may be a list with one entry per layer; all must agree."""
        value = self._get(key, default)
        values = value if isinstance(value, (list, tuple)) else [value]
        sizes = {whole(size, self._what(key), low=1) for size in values}
        if len(sizes) != 1:
            raise ModelError(f"{self._what(key)} differs by layer ({shown(value)}); it must be one number")
        return sizes.pop()

    def _get(self, key: str, default: object) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelError(f'the model "{self._name}" lacks {self._prefix}{key} in {self._where}')
        return value

    def _what(self, key: str) -> str:
        return f'{self._prefix}{key} of the model "{self._name}"'


def check_regular(file: Path) -> None:
    """Refuse what is no regular file: opening a pipe would wait for ever, and a device has no end.

    Raises:
        ModelError: it is missing, or a folder, a pipe, a device.

    """
    if not file.exists():
        raise ModelError(f'"{file.parent}" has no {printable(file.name)}; a model folder needs one')
    if not file.is_file():
        raise ModelError(f'"{file}" is not a regular file')


def read_text(file: Path) -> str:
    """Read a UTF-8 file of up to 64 MB.

    Raises:
        ModelError: there is no such file, it is larger, or it is not UTF-8.

    """
    check_regular(file)
    try:
        with file.open("rb") as opened:
            data = opened.read(_MAX_TEXT + 1)
    except OSError as error:
        raise ModelError(f'"{file}" cannot be read ({error.strerror})') from error
    if len(data) > _MAX_TEXT:
        raise ModelError(f'"{file}" has more than {_MAX_TEXT >> 20} MB, too much for a file of its kind')
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f'"{file}" is not UTF-8 text (byte {error.start})') from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: there is no such file, it holds something else, or a key stands twice with two values.

    """
    return parse_json(read_text(file), f'"{file}"', _agreeing)


def parse_json(
    text: str | bytes, what: str, pairs_hook: Callable[[list[tuple[str, Any]]], dict[str, Any]]
) -> dict[str, Any]:
    """Parse a JSON object; `pairs_hook` makes each object of it and may raise `ValueError`.

    Raises:
        ModelError: it is no JSON object, or nested too deeply.

    """
    try:
        value = json.loads(text, object_pairs_hook=pairs_hook)
    except RecursionError as error:
        raise ModelError(f"{what} is nested too deeply for a model's file") from error
    except ValueError as error:
        raise ModelError(f"{what} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{what} holds a {type(value).__name__}; it must be a JSON object")
    return value


def _agreeing(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of pairs whose keys may repeat, but not with different values: which one counts?"""
    found = dict(pairs)
    if len(found) < len(pairs):
        for key, value in pairs:
            if value != found[key]:
                raise ValueError(f"{shown(key)} stands there twice, with different values")
    return found


def read_into(file: Any, view: memoryview, what: str) -> None:
    """Fill `view` from an unbuffered file, whose reads may return less than asked for.

    Raises:
        ModelError: the file has become shorter.

    """
    while view:
        count = file.readinto(view)
        if not count:
            raise ModelError(f"the file became shorter while {what} was read; download it again")
        view = view[count:]
