"""What a caller may say about a request beside its prompt and its sampling: how urgent, whose, for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedinfer.checks import MAX_FLOAT, check_int, check_real, check_text, options_by_name
from pagedinfer.engine.request import BACKGROUND, INTERACTIVE, Request
from pagedinfer.errors import ConfigError
from pagedinfer.memory.prefix import PINNED

__all__ = ["RequestOptions", "Retain"]

CLASSES = {"interactive": INTERACTIVE, "background": BACKGROUND}


@options_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class Retain:
    """A range of the prompt whose cached blocks stay longer than others, or less long.

    As in TensorRT-LLM's KV cache retention. A block belongs to the range that holds its first token.

    Attributes:
        start, end: the range of tokens, `end` not included; None is the prompt's end.
        priority: 0 is evicted first, 100 last, 50 is the default; "pin": not at all, unless otherwise nobody could run.
        seconds: for how long after the request came, in the engine's clock (steps by default); None for ever.
    """

    start: int = 0
    end: int | None = None
    priority: int | str = 50
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_int("start", self.start, 0)
        if self.end is not None:
            check_int("end", self.end, self.start + 1)
        if self.priority != "pin":
            check_int("priority of a retained range", self.priority, 0, 100)
        if self.seconds is not None:
            check_real("seconds", self.seconds, 0.0)

    def range(self, num_prompt_tokens: int, now: float) -> tuple[int, int, int, float]:
        """(first token, end, priority, until) for a prompt that came at `now`."""
        priority = PINNED if self.priority == "pin" else int(self.priority)
        until = -1.0 if self.seconds is None else now + self.seconds
        return self.start, num_prompt_tokens if self.end is None else self.end, priority, until


@options_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """Options of one request. Times are in the engine's clock: steps by default.

    Attributes:
        priority: lower comes in sooner, or "interactive" (0) or "background" (10); needs order "priority".
        tenant: whose request it is, for fair shares and limits per tenant.
        deadline: by when it should end, counted from now; only order "deadline" looks.
        timeout: it is given up when it has not ended after this long.
        cache_salt: it shares cached blocks only with requests of the same salt.
        retain: ranges of the prompt with another retention priority.
    """

    priority: int | str = 0
    tenant: str = ""
    deadline: float | None = None
    timeout: float | None = None
    cache_salt: str = ""
    retain: Sequence[Retain] = ()

    def __post_init__(self) -> None:
        if isinstance(self.priority, str):
            if self.priority not in CLASSES:
                raise ConfigError(f"priority={self.priority!r}: give an integer, or {' or '.join(CLASSES)}.")
            object.__setattr__(self, "priority", CLASSES[self.priority])
        check_int("priority", self.priority, -1000, 1000)
        for name in ("tenant", "cache_salt"):
            check_text(name, getattr(self, name))
        if self.deadline is not None:
            check_real("deadline", self.deadline, -MAX_FLOAT)
        if self.timeout is not None:
            check_real("timeout", self.timeout, 0.0)
        if not isinstance(self.retain, Sequence):
            raise ConfigError(
                f"retain={self.retain!r}: give a list of Retain(start=..., end=..., priority=...) objects."
            )
        wrong = [r for r in self.retain if not isinstance(r, Retain)]
        if wrong:
            raise ConfigError(
                f"retain holds {wrong[0]!r}; give Retain(start=..., end=..., priority=...) objects."
            )

    def apply(self, request: Request, now: float) -> None:
        """Put the options into a request that comes at `now`."""
        request.priority, request.tenant, request.salt = int(self.priority), self.tenant, self.cache_salt
        request.deadline = None if self.deadline is None else now + self.deadline
        request.expires = None if self.timeout is None else now + self.timeout
        request.retain = tuple(one.range(request.num_prompt_tokens, now) for one in self.retain)
