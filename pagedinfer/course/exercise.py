"""What an exercise is. A judge returns the sentence of a pass, or raises `NotYet` with what is wrong."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from pagedinfer.course.cards import Verdict
from pagedinfer.errors import ConfigError

__all__ = ["Exercise", "NotStarted", "NotYet", "call", "integers", "plain", "shown"]

MAX_LINE = 600
"""Characters of a sentence on a card: an answer quoted in it may be of any length."""


class NotYet(Exception):
    """The answer does not hold: one sentence a line, the first saying what is wrong."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class NotStarted(Exception):
    """There is no answer yet: a stub was called, or an ellipsis given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """One exercise of a notebook.

    Attributes:
        id: notebook and number, "00.2".
        title: a few words.
        judge: takes the learner's answers; returns why they hold, raises `NotYet` when they do not.
        hints: three, from a nudge to nearly the answer.
        answer: the solution: code, or a function whose source is the code.
        why: what to take home, in a sentence or two.
    """

    id: str
    title: str
    judge: Callable[..., str]
    hints: tuple[str, str, str]
    answer: str | Callable[..., Any]
    why: str

    @property
    def code(self) -> str:
        """The solution as source."""
        return textwrap.dedent(
            self.answer if isinstance(self.answer, str) else inspect.getsource(self.answer)
        ).strip()

    @property
    def usage(self) -> str:
        """How `check` is called for this exercise."""
        parameters = inspect.signature(self.judge).parameters.values()
        names = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
        return f'check("{self.id}", {", ".join(names)})'

    def check(self, *answers: Any, **named: Any) -> Verdict:
        """Judge the answers.

        Raises:
            ConfigError: there are too many of them, or too few.
        """
        try:
            bound = inspect.signature(self.judge).bind(*answers, **named)
        except TypeError as error:
            raise ConfigError(f"{error}: call it as {self.usage}.") from None
        heading = f"{self.id} {self.title}"
        try:
            blank = [name for name, value in bound.arguments.items() if _is_blank(value)]
            if blank:
                raise NotStarted(f"Replace the ... of {', '.join(blank)}.")
            line = self.judge(*map(plain, answers), **{name: plain(value) for name, value in named.items()})
        except NotStarted as error:
            help_lines = (str(error), f'Stuck? hint("{self.id}") helps a little, again a little more.')
            return Verdict(mark="…", heading=f"{heading} · no answer yet", lines=help_lines, passed=False)
        except NotYet as error:
            return Verdict(
                mark="✗", heading=f"{heading} · not yet", lines=tuple(map(_clip, error.lines)), passed=False
            )
        return Verdict(mark="✓", heading=f"{heading} · passed", lines=(line, self.why), passed=True)


def call(function: Any, *arguments: Any) -> Any:
    """Call a learner's function with arguments of its own.

    Raises:
        NotStarted: it is a stub still. NotYet: it is no function, or it raised.
    """
    if not callable(function):
        raise NotYet(f"The check wants your function, and got {shown(function)}.")
    name = getattr(function, "__name__", "your function")
    asked = f"{name}({', '.join(map(shown, arguments))})"
    try:
        return plain(function(*arguments))
    except NotImplementedError:
        raise NotStarted(f"{name} is still the stub: write its body.") from None
    except (Exception, SystemExit) as error:
        raise NotYet(f"{asked} raised {type(error).__name__}: {error}") from error


def plain(value: Any) -> Any:
    """An array or tensor as lists and numbers, also within a list or tuple; anything else as it is."""
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if callable(getattr(value, "tolist", None)) and not isinstance(value, type):
        return value.tolist()
    return value


def integers(value: Any, most: int) -> list[int] | None:
    """The first `most` integers of a learner's answer, which may be an endless iterator; None if it is no such."""
    try:
        return [int(number) for number in islice(value, most)]
    except (Exception, SystemExit):  # a generator runs the learner's code only now
        return None


def shown(value: Any) -> str:
    """A learner's value for a sentence: its repr, cut to 60 characters."""
    try:
        text = repr(value)
    except (Exception, SystemExit) as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return _clip(text, 60)


def _is_blank(value: Any) -> bool:
    return value is ... or (type(value) in (list, tuple) and any(part is ... for part in value))


def _clip(text: str, most: int = MAX_LINE) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
