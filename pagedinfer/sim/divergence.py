"""What two runs do differently in a step, in a sentence: requests first, then tokens, then blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedinfer.errors import readable
from pagedinfer.trace import events as ev
from pagedinfer.trace.moments import Moment

__all__ = ["Divergence", "difference"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step in which a run does something else than the first run, and what, in a sentence."""

    step: int
    sentence: str
    names: tuple[str, str]

    def __str__(self) -> str:
        return readable(f"{self.names[0]} and {self.names[1]} part at step {self.step}: {self.sentence}")


Facts = Mapping[str, Any]


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
    ("gets {}", _happened(ev.Submit)), ("rejects {}", _happened(ev.Reject)), ("aborts {}", _happened(ev.Abort)),
    ("preempts {}", _happened(ev.Preempt)), ("resumes {}", _happened(ev.Resume)), ("admits {}", _happened(ev.Admit)),
    ("ends {}", _happened(ev.Finish)),
]  # fmt: skip
"""What a run can do to a request and the other not; causes differ by their numbers and are only told."""

_AMOUNTS: list[tuple[str, Callable[[Moment], Facts]]] = [
    ("computes {} of {}", _computed), ("gives {} to {}", _tokens), ("takes {} for {}", _new_blocks),
]  # fmt: skip


def difference(first: Moment | None, second: Moment | None, names: tuple[str, str]) -> str | None:
    """The first thing that two runs do differently in a step, None when they do the same."""
    if first is None or second is None:
        ended, other = names if first is None else names[::-1]
        return f"{ended} has ended, {other} goes on"
    if first.events == second.events and first.spans == second.spans:
        return None
    for words, look in _DEEDS:
        ours, theirs = look(first), look(second)
        for rid in [*ours, *theirs]:
            if (rid in ours) != (rid in theirs):
                who, other, why = (*names, ours[rid]) if rid in ours else (*names[::-1], theirs[rid])
                return f"{who} {words.format(rid)}{f' ({why})' if why else ''}, {other} does not"
    for (words, look), unit in zip(_AMOUNTS, ("token", "token", "block"), strict=True):
        ours, theirs = look(first), look(second)
        for rid in [*ours, *theirs]:
            if ours.get(rid) != theirs.get(rid):
                return (
                    f"{names[0]} {words.format(_amount(ours.get(rid), unit), rid)}, "
                    f"{names[1]} {_amount(theirs.get(rid), unit)}"
                )
    return None


def _amount(value: Any, unit: str) -> str:
    if not value:
        return f"no {unit}s"
    if isinstance(value, tuple):
        return f"{unit}{'' if len(value) == 1 else 's'} {', '.join(map(str, value))}"
    return f"{value} {unit}{'' if value == 1 else 's'}"
