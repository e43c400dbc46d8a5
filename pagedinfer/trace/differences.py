"""What two runs do differently in a step, in words: for the comparison of recordings and for the view of two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagedinfer.errors import count

__all__ = ["Facts", "amount_apart", "deed_apart", "ended_apart", "not_ended", "quoted"]

Facts = Mapping[str, Any]
"""Request -> what a run did to it in a step: of a deed its cause ("" for none), of an amount a number or block ids."""

MAX_NAMED = 3


def quoted(name: str) -> str:
    """The name of a run, set apart from the words around it."""
    return f'"{name}"'


def deed_apart(
    verb: str, facts: tuple[Facts, Facts], names: Sequence[str], reasons: tuple[Facts, Facts] = ({}, {})
) -> str | None:
    """Whom one run did something to ("preempts") and the other did not, None where both did it to the same.

    Says whom the other did it to instead, or why it did not do it, where `reasons` (request -> sentence) of that run
    have it.
    """
    for mine, other in ((0, 1), (1, 0)):
        only = [rid for rid in facts[mine] if rid not in facts[other]]
        if only:
            who, whom, why = quoted(names[mine]), quoted(names[other]), _cause(verb, facts[mine][only[0]])
            if instead := [rid for rid in facts[other] if rid not in facts[mine]]:
                return f"{who} {verb} {only[0]}{why}, {whom} {verb} {_listed(instead)} instead"
            return f"{who} {verb} {only[0]}{why}, {whom} does not{_in_brackets(reasons[other].get(only[0]))}"
    return None


def amount_apart(
    verb: str, link: str, noun: str, facts: tuple[Facts, Facts], names: Sequence[str],
    reasons: tuple[Facts, Facts] = ({}, {}),
) -> str | None:  # fmt: skip
    """Of which request the runs do unequal amounts ("computes 3 tokens of r1"), None where all are equal."""
    for rid in [*facts[0], *facts[1]]:
        first, second = (told.get(rid) or None for told in facts)
        if first != second:
            nothing = "" if second else _in_brackets(reasons[1].get(rid))
            return (
                f"{quoted(names[0])} {verb} {_amount(first, noun)} {link} {rid}, "
                f"{quoted(names[1])} {verb} {_short(second)}{nothing}"
            )
    return None


def ended_apart(ended: str, other: str) -> str:
    """That one run has ended, in whose place the other goes on."""
    return f"{quoted(ended)} has ended, {quoted(other)} goes on"


def not_ended(name: str, last_step: int) -> str:
    """That a run is shorter because nobody has run it on."""
    return f"{quoted(name)} has not ended: it is compared up to step {last_step}"


def _cause(verb: str, why: str) -> str:
    """The cause of a deed. Who comes into the batch has taken its blocks already when it says what is free."""
    is_left = verb in ("admits", "resumes") and why.endswith(" free")
    return _in_brackets(f"{why} after that" if is_left else why)


def _in_brackets(why: str | None) -> str:
    return f" ({why})" if why else ""


def _listed(rids: Sequence[str]) -> str:
    more = len(rids) - MAX_NAMED
    return ", ".join(rids[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _amount(value: Any, noun: str) -> str:
    if not value:
        return f"no {noun}s"
    if isinstance(value, tuple):
        return f"{noun}{'' if len(value) == 1 else 's'} {_short(value)}"
    return count(value, noun)


def _short(value: Any) -> str:
    """An amount whose noun has just been said."""
    if not value:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
