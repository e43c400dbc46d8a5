"""What an exercise is. A judge returns the sentence of a pass, or raises `NotYet` with what is wrong."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedinfer.course.cards import Verdict
from pagedinfer.errors import ConfigError

__all__ = ["Exercise", "NotStarted", "NotYet", "call"]


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
            blank = [name for name, value in bound.arguments.items() if value is ...]
            if blank:
                raise NotStarted(f"Replace the ... of {', '.join(blank)}.")
            line = self.judge(*answers, **named)
        except NotStarted as error:
            help_lines = (str(error), f'Stuck? hint("{self.id}") helps a little, again a little more.')
            return Verdict(mark="…", heading=f"{heading} · no answer yet", lines=help_lines, passed=False)
        except NotYet as error:
            return Verdict(mark="✗", heading=f"{heading} · not yet", lines=error.lines, passed=False)
        return Verdict(mark="✓", heading=f"{heading} · passed", lines=(line, self.why), passed=True)


def call(function: Any, *arguments: Any) -> Any:
    """Call a learner's function with arguments of its own.

    Raises:
        NotStarted: it is a stub still. NotYet: it is no function, or it raised.
    """
    if not callable(function):
        raise NotYet(f"The check wants your function, and got {function!r}.")
    name = getattr(function, "__name__", "your function")
    shown = f"{name}({', '.join(map(_short, arguments))})"
    try:
        return function(*arguments)
    except NotImplementedError:
        raise NotStarted(f"{name} is still the stub: write its body.") from None
    except Exception as error:
        raise NotYet(f"{shown} raised {type(error).__name__}: {error}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
