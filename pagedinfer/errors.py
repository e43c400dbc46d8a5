"""Errors that users of pagedinfer can meet. Each message says what came, what is allowed, and what to do."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DuplicateRequest",
    "EngineClosed",
    "ModelError",
    "OutOfBlocks",
    "PagedInferError",
    "QueueFull",
    "RecordingError",
    "RequestError",
    "RequestTooLong",
    "RunnerError",
    "UnknownArchitecture",
    "UnknownOption",
    "UnknownRequest",
    "WatchError",
    "WorkloadError",
    "count",
    "describe_error",
    "kind_of",
    "readable",
]


def count(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`: a number and its noun, for sentences."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def kind_of(value: object) -> str:
    """`an int`, `a list`: what something is, for sentences."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def readable(text: str) -> str:
    """`text` as UTF-8 can hold it: half of a surrogate pair (a request id may have one) becomes its escape.

    For text that leaves for a reader: messages, reprs, HTML, pictures. Recordings keep every character as it came.
    """
    return text.encode(errors="backslashreplace").decode()


def describe_error(error: BaseException, doing: str = "") -> str:
    """`ValueError: text`, or `ValueError while doing: text`; never raises, whatever the error's own `str` does."""
    try:
        text = str(error)
    except BaseException:  # a foreign class may do anything here, and this is called where nothing may raise
        text = "(its text cannot be shown)"
    return f"{type(error).__name__}{doing and f' while {doing}'}: {text}"


class PagedInferError(Exception):
    """Base of every error that pagedinfer raises on purpose."""

    def __str__(self) -> str:
        return readable(super().__str__())


class ConfigError(PagedInferError, ValueError):
    """A setting is out of its range, contradicts another one, or is not supported (yet)."""


class UnknownOption(ConfigError, TypeError):
    """No option has this name, or one that must be given is missing; Python's own word for that is `TypeError`."""


class WatchError(ConfigError):
    """A condition of a breakpoint cannot be read, or a predicate raised; the run stopped and nothing is lost."""


class RequestError(PagedInferError, ValueError):
    """One request cannot be accepted; the engine and all other requests are untouched."""


class RequestTooLong(RequestError):
    """The request can never fit the model's context or the KV pool, however long it waits."""


class DuplicateRequest(RequestError):
    """A live request already has this id."""


class QueueFull(RequestError):
    """As many requests wait as `max_num_waiting` allows; try again later."""


class UnknownRequest(PagedInferError, KeyError):
    """No live request has this id."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return readable(str(self.args[0])) if self.args else ""


class EngineClosed(PagedInferError, RuntimeError):
    """The engine was closed; its KV pool is gone."""


class ModelError(PagedInferError, ValueError):
    """A model file or folder cannot be used: the message names the field or tensor."""


class UnknownArchitecture(ModelError):
    """The model's architecture is none of those that the decoder computes."""


class RunnerError(PagedInferError, RuntimeError):
    """A runner's answer does not fit the plan it was given; the step was cancelled."""


class RecordingError(PagedInferError, ValueError):
    """A file is not a recording that this version can read, a step is not in it, or its events do not fit."""


class WorkloadError(PagedInferError, ValueError):
    """A file is not a request trace of a known format: the message names the line."""


class OutOfBlocks(PagedInferError, RuntimeError):
    """The pool has fewer free blocks than asked for, or not in a row. Nothing was allocated.

    Attributes:
        needed: blocks asked for.
        free: blocks that were free.
    """

    def __init__(self, needed: int, free: int, why: str = "") -> None:
        super().__init__(why or f"needs {count(needed, 'block')}, {free} free")
        self.needed = needed
        self.free = free
