"""Conditions that stop a run, as a view knows them: their texts, and the steps where they came true.

The view knows no grammar. It hands texts to whoever watches the run (a session's breakpoints, say), shows the sentence
of the error where a text cannot be read, and reads the stops that come of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from pagedinfer.errors import PagedInferError, readable

__all__ = ["Breaks", "Stop", "Watching"]

MOST_MARKS = 500
"""Of one condition so many marks are shown: where it is true more often, it tells little."""


class Stop(Protocol):
    """A condition came true. `watch`: the condition; its `str` is the text."""

    @property
    def step(self) -> int:
        """At the end of which step."""

    @property
    def cause(self) -> str:
        """The sentence why."""

    @property
    def watch(self) -> object:
        """The condition."""


class Watching(Protocol):
    """Who knows the conditions: a session's `breakpoints`, for one."""

    def add(self, what: str) -> object:
        """Stop when this comes true. Returns the condition; its `str` is the text in normal form.

        Raises:
            PagedInferError: the sentence to show: the text cannot be read.
        """

    def remove(self, what: str) -> None:
        """Take away the condition of this text."""

    def __iter__(self) -> Iterator[object]:
        """The conditions."""


class _Found:
    """Stands for `Watching` over a recording that nobody drives: conditions are only looked for in it."""

    def __init__(self, find: Callable[[Any], Iterable[Stop]]) -> None:
        self._find, self._texts = find, list[str]()

    def add(self, what: str) -> str:
        self._find(what)
        self._texts += [what] if what not in self._texts else []
        return what

    def remove(self, what: str) -> None:
        self._texts.remove(what)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._texts))


class Breaks:
    """What the box, the list and the marks of a view show.

    Args:
        watch: who knows the conditions; None: they are looked for in the recording, if `find` can.
        find: all stops of a condition in the recording so far (`Recording.find_all`); None: no marks of the past.
        stops: a list that grows with each stop of the run.
    """

    def __init__(
        self, watch: Watching | None, find: Callable[[Any], Iterable[Stop]] | None, stops: Sequence[Stop] = ()
    ) -> None:
        self._watch = watch if watch is not None else _Found(find) if find else None
        self._find, self._stops = find, stops
        self._past: dict[str, list[tuple[int, str]]] = {}

    @property
    def is_possible(self) -> bool:
        """Whether there is anybody to hand a text to."""
        return self._watch is not None

    def add(self, text: str) -> tuple[bool, str]:
        """Add a condition. Returns whether that went well, and its text in normal form or the sentence why not."""
        if self._watch is None:
            return False, "Nobody watches this run: make the view with session.view()."
        try:
            return True, str(self._watch.add(text))
        except PagedInferError as error:
            return False, str(error)

    def remove(self, text: str) -> tuple[bool, str]:
        """Take a condition away. Returns as `add`."""
        try:
            if self._watch is not None:
                self._watch.remove(text)
        except (PagedInferError, ValueError) as error:
            return False, str(error)
        self._past.pop(text, None)
        return True, text

    def count(self) -> int:
        """Stops of the run so far."""
        return len(self._stops)

    def newest(self, since: int) -> list[Any] | None:
        """[step, cause] of the first stop after the `since`-th, None when there was none."""
        if len(self._stops) <= since:
            return None
        return [self._stops[since].step, readable(self._stops[since].cause)]

    def data(self) -> list[dict[str, Any]]:
        """Each condition's text and marks ([step, cause] in order), for the browser.

        One that has gone, as that of `run(until=...)` has, keeps its marks and is `past`: it stops nothing any more.
        """
        found = {str(known): self._marks_of(known) for known in self._watch or ()}
        watched = set(found)
        for stop in self._stops:
            found.setdefault(str(stop.watch), {})[stop.step] = readable(stop.cause)
        return [
            {"text": text, "marks": [[step, marks[step]] for step in sorted(marks)[:MOST_MARKS]]}
            | ({} if text in watched else {"past": True})
            for text, marks in found.items()
        ]

    def _marks_of(self, condition: object) -> dict[int, str]:
        """Where the condition was true when it was added; what comes later is among the stops."""
        text = str(condition)
        if text not in self._past:
            try:
                found = self._find(condition) if self._find else ()
                self._past[text] = [(stop.step, readable(stop.cause)) for stop in found]
            except PagedInferError:  # a predicate that fails here fails the run, too, and is shown there
                self._past[text] = []
        return dict(self._past[text])
