"""Watches: conditions over a run that say when they have come true, and why. `parse` reads the text of one.

parse("r3 preempted")    parse("free blocks < 4 and not any preempted")    watch(lambda event: event.kind == "evict")

A watch fires on news. What happened (a preemption, a write) is news in every step in which it happens. How things
stand (`free blocks < 4`) is news in the step in which it becomes true, and again only after it was false; for `any`
each request is news of its own. `and` and `or` fire when they are true and a part of them is news.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedinfer.errors import WatchError, describe_error, kind_of, readable
from pagedinfer.trace.conditions import Condition, Matches
from pagedinfer.trace.grammar import parse_condition
from pagedinfer.trace.moments import Moment

__all__ = ["Stop", "Watch", "as_watch", "parse", "watch"]

MAX_NAMED = 3
"""So many facts a cause names; the rest are counted."""


class Watch:
    """A condition and its memory of the step before. `str` gives its text in the normal form, which `parse` reads."""

    def __init__(self, condition: Condition) -> None:
        self.condition = condition

    def check(self, moment: Moment) -> str | None:
        """The sentence why it fires at this step, None when it does not. Once for each step, in order.

        Raises:
            WatchError: the predicate raised.
        """
        news = list(self.condition.look(moment)[1].values())
        if not news:
            return None
        more = f" and {len(news) - MAX_NAMED} more" if len(news) > MAX_NAMED else ""
        return "; ".join(news[:MAX_NAMED]) + more

    def describe(self) -> str:
        """In plain words: "stop when request r3 is preempted"."""
        return f"stop when {self.condition.describe()}"

    def fresh(self) -> Watch:
        """The same without a memory, to look at another run or at this one from its beginning."""
        return Watch(self.condition.fresh())

    def __str__(self) -> str:
        return readable(str(self.condition))

    def __repr__(self) -> str:
        return f"Watch({str(self)!r})"


@dataclass(frozen=True, slots=True)
class Stop:
    """A watch fired: at which step, and the sentence why."""

    step: int
    cause: str
    watch: Watch

    def __str__(self) -> str:
        return readable(f"stopped at step {self.step}: {self.cause}")


def parse(text: str) -> Watch:
    """The watch that `text` describes; `trace.grammar` holds the grammar.

    Raises:
        WatchError: a sentence with the place of the fault and what may stand there.
    """
    return Watch(parse_condition(text))


def watch(predicate: Callable[..., Any], name: str = "") -> Watch:
    """A watch of your own: `predicate(event)` or `predicate(state, events)`, true when it holds.

    Of an event it fires in each step in which it is true of any; of the state it fires when it becomes true. A text
    that it returns is the cause. It looks and changes nothing.

    Raises:
        WatchError: it cannot be called with one or two arguments.
    """
    if not callable(predicate):
        raise WatchError(
            f"A predicate is a function of (event) or (state, events), not {kind_of(predicate)}."
        )
    known = getattr(predicate, "__name__", type(predicate).__name__)
    return Watch(Predicate(predicate, name or known, _num_arguments(predicate)))


def as_watch(what: Watch | str | Callable[..., Any]) -> Watch:
    """A watch, the watch that a text describes, or that of a predicate."""
    if isinstance(what, Watch):
        return what
    return watch(what) if callable(what) else parse(what)


def _num_arguments(predicate: Callable[..., Any]) -> int:
    try:
        signature = inspect.signature(predicate)
    except (TypeError, ValueError):  # some built-in functions do not tell
        return 1
    for number in (1, 2):
        try:
            signature.bind(*[None] * number)
        except TypeError:
            continue
        return number
    raise WatchError(f"A predicate takes (event) or (state, events); this one takes {signature}.")


@dataclass(slots=True)
class Predicate(Condition):
    """A function as a condition. `num_arguments` 1: it judges events; 2: the state and the step's events."""

    predicate: Callable[..., Any]
    name: str
    num_arguments: int

    def look(self, moment: Moment) -> tuple[Matches, Matches]:
        """An event is always new, a state only when it was not true before."""
        if self.num_arguments == 2:
            # Named outright: `super()` does not work in a dataclass with slots before Python 3.14.
            return Condition.look(self, moment)
        true = self.matches(moment)
        return true, true

    def matches(self, moment: Moment) -> Matches:
        """What it says, with the name of the predicate where it says only yes."""
        if self.num_arguments == 2:
            return self._ask(moment, "", f"{self.name} is true", moment.state, moment.events)
        found: Matches = {}
        for number, event in enumerate(moment.events):
            found |= self._ask(moment, str(number), f"{self.name} is true: {event.kind}", event)
        return found

    def _ask(self, moment: Moment, key: str, cause: str, *arguments: Any) -> Matches:
        try:
            said = self.predicate(*arguments)
            return {key: said if isinstance(said, str) else cause} if said else {}
        except Exception as error:
            raise WatchError(
                f"The predicate {self.name} raised {describe_error(error)} at step {moment.step}. The run stopped "
                "there and nothing is lost; mend the predicate or remove it."
            ) from error

    def describe(self) -> str:
        """In plain words."""
        return f"the predicate {self.name} is true"

    def __str__(self) -> str:
        return f"<{self.name}>"
