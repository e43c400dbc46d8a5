"""What two runs do differently in a step, in a sentence: requests first, then tokens, then blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedinfer.errors import readable
from pagedinfer.trace import events as ev
from pagedinfer.trace.differences import Facts, amount_apart, deed_apart, quoted
from pagedinfer.trace.moments import Moment

__all__ = ["Divergence", "difference"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step in which a run does something else than the first run, and what, in a sentence."""

    step: int
    sentence: str
    names: tuple[str, str]

    def __str__(self) -> str:
        first, second = map(quoted, self.names)
        return readable(f"{first} and {second} part at step {self.step}: {self.sentence}")


def _happened(*kinds: type[ev.Event]) -> Callable[[Moment], Facts]:
    """Request -> the cause, where one is told."""

    def look(moment: Moment) -> Facts:
        found = [event for event in moment.events if isinstance(event, kinds)]
        return {getattr(e, "rid", ""): getattr(e, "detail", "") or getattr(e, "why", "") for e in found}

    return look


def _computed(moment: Moment) -> Facts:
    return {rid: end - start for rid, (start, end) in moment.spans.items()}


def _new_blocks(moment: Moment) -> Facts:
    """Request -> the blocks that it got; where runs were equal so far, they now hold the same if these are the same."""
    found: dict[str, tuple[int, ...]] = {}
    for event in moment.events:
        if isinstance(event, ev.Alloc | ev.Share):
            found[event.rid] = found.get(event.rid, ()) + tuple(event.pblks)
        elif isinstance(event, ev.Copy | ev.Move):
            found[event.rid] = found.get(event.rid, ()) + tuple(target for _, target in event.pairs)
    return found


def _tokens(moment: Moment) -> Facts:
    return {
        rid: n for event in moment.events if isinstance(event, ev.Commit) for rid, n in event.tokens.items()
    }


_DEEDS: list[tuple[str, Callable[[Moment], Facts]]] = [
    ("gets", _happened(ev.Submit)), ("rejects", _happened(ev.Reject)), ("aborts", _happened(ev.Abort)),
    ("preempts", _happened(ev.Preempt)), ("resumes", _happened(ev.Resume)), ("admits", _happened(ev.Admit)),
    ("ends", _happened(ev.Finish)),
]  # fmt: skip
"""What a run can do to a request and the other not; causes differ by their numbers and are only told."""

_AMOUNTS: list[tuple[str, str, str, Callable[[Moment], Facts]]] = [
    ("computes", "of", "token", _computed), ("gives", "to", "token", _tokens), ("takes", "for", "block", _new_blocks),
]  # fmt: skip


def difference(first: Moment, second: Moment, names: tuple[str, str]) -> str | None:
    """The first thing that two runs do differently in a step, None when they do the same."""
    if first.events == second.events and first.spans == second.spans:
        return None
    reasons = _reasons(first), _reasons(second)
    for verb, look in _DEEDS:
        if said := deed_apart(verb, (look(first), look(second)), names, reasons):
            return said
    for verb, link, noun, look in _AMOUNTS:
        if said := amount_apart(verb, link, noun, (look(first), look(second)), names, reasons):
            return said
    return None


def _reasons(moment: Moment) -> Facts:
    """Request -> why the step left it out."""
    return {rid: why for e in moment.events if isinstance(e, ev.Step) for rid, why in e.reasons.items()}
