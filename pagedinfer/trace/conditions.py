"""What a condition can say about a step, and how each one is judged. `trace.watch` reads the text they come from.

Each condition answers with what makes it true: a dict from a key (a request, a block, "" where there is only one) to
a sentence; empty when it is false. Keys tell what is new from what was true a step ago.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from json import dumps
from typing import ClassVar, Self

from pagedinfer.trace import events as ev
from pagedinfer.trace.moments import Moment

__all__ = [
    "BLOCK_VERBS", "LATENCIES", "OPERATORS", "QUANTITIES", "VERBS", "And", "Block", "Condition", "Happened",
    "Latency", "Not", "Or", "Quantity", "Who",
]  # fmt: skip

Matches = dict[str, str]

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_OPERATOR_WORDS = {
    "<": "fewer than", "<=": "at most", ">": "more than", ">=": "at least", "==": "exactly", "!=": "anything but",
}  # fmt: skip


@dataclass(slots=True)
class Condition(ABC):
    """Base of all. Remembers one step: what was true in it."""

    _before: Matches = field(default_factory=dict, init=False, repr=False, compare=False)

    def look(self, moment: Moment) -> tuple[Matches, Matches]:
        """What is true now, and the part of it that is new. Once for each step, in order."""
        true = self.matches(moment)
        new = {key: why for key, why in true.items() if key not in self._before}
        self._before = true
        return true, new

    def fresh(self) -> Self:
        """The same condition without a memory."""
        return replace(self)

    @abstractmethod
    def matches(self, moment: Moment) -> Matches:
        """What makes it true now."""

    @abstractmethod
    def describe(self) -> str:
        """In plain words, to follow "stop when"."""


@dataclass(slots=True)
class Who:
    """Which requests are meant: one by name, in any case of its letters unless `exact`; or any (no name)."""

    name: str | None = None
    exact: bool = False

    def fits(self, rid: str) -> bool:
        """Whether the request is meant."""
        return (
            self.name is None
            or rid == self.name
            or (not self.exact and rid.casefold() == self.name.casefold())
        )

    def __str__(self) -> str:
        return (
            "any" if self.name is None else dumps(self.name, ensure_ascii=False) if self.exact else self.name
        )

    @property
    def words(self) -> str:
        """For a sentence."""
        return "any request" if self.name is None else f"request {self}"


# -- what happened ----------------------------------------------------------------------------------------------------

VERBS: dict[str, tuple[type[ev.Event], ...]] = {
    "submitted": (ev.Submit,), "rejected": (ev.Reject,), "admitted": (ev.Admit,), "resumed": (ev.Resume,),
    "preempted": (ev.Preempt,), "swapped": (ev.Swap,), "forked": (ev.Fork,), "finished": (ev.Finish,),
    "aborted": (ev.Finish,), "failed": (ev.Finish,),
}  # fmt: skip
"""What can happen to a request. "aborted" and "failed" are ends of that kind, "finished" is any end."""

_END_OF = {"aborted": "abort", "failed": "error"}


@dataclass(slots=True)
class Happened(Condition):
    """As in "r3 preempted": true in each step in which it happened, so also twice running."""

    who: Who
    verb: str

    def matches(self, moment: Moment) -> Matches:
        """The requests it happened to, with the engine's cause."""
        found: Matches = {}
        for event in moment.events:
            rid: str = getattr(event, "rid", "")
            if isinstance(event, VERBS[self.verb]) and self.who.fits(rid) and self._is_end(event):
                cause = getattr(event, "detail", "") or getattr(event, "why", "")
                found[rid] = f"{rid} {self.verb}{cause and f': {cause}'}"
        return found

    def _is_end(self, event: ev.Event) -> bool:
        wanted = _END_OF.get(self.verb)
        return wanted is None or getattr(event, "why", "") == wanted

    def look(self, moment: Moment) -> tuple[Matches, Matches]:
        """What happened is always new."""
        true = self.matches(moment)
        return true, true

    def describe(self) -> str:
        """In plain words."""
        return f"{self.who.words} is {self.verb}"

    def __str__(self) -> str:
        return f"{self.who} {self.verb}"


BLOCK_VERBS = ("allocated", "cached", "copied", "evicted", "freed", "moved", "shared", "written")


@dataclass(slots=True)
class Block(Condition):
    """As in "block 17 written": true in each step in which it happened. `block_id` None: any block."""

    block_id: int | None
    verb: str

    def matches(self, moment: Moment) -> Matches:
        """The blocks it happened to, with who did it."""
        found: Matches = {}
        for block_id, why in _written(moment) if self.verb == "written" else _touched(moment, self.verb):
            if self.block_id in (None, block_id):
                found.setdefault(str(block_id), f"block {block_id} {self.verb}{why}")
        return found

    def look(self, moment: Moment) -> tuple[Matches, Matches]:
        """What happened is always new."""
        true = self.matches(moment)
        return true, true

    def describe(self) -> str:
        """In plain words."""
        which = "any block" if self.block_id is None else f"block {self.block_id}"
        return f"{which} is {self.verb}"

    def __str__(self) -> str:
        return f"{'any block' if self.block_id is None else f'block {self.block_id}'} {self.verb}"


def _written(moment: Moment) -> Iterator[tuple[int, str]]:
    for block_id, (rid, first, end) in moment.written.items():
        which = f"token {first}" if end == first + 1 else f"tokens {first} to {end - 1}"
        yield block_id, f" by {rid}: {which}"


def _touched(moment: Moment, verb: str) -> Iterator[tuple[int, str]]:
    """(block, who and how) for every block that `verb` fits."""
    for event in moment.events:
        if verb in _OF_TABLES and isinstance(event, _OF_TABLES[verb]):
            for logical, block_id in enumerate(event.pblks, event.first):
                whose = "to" if verb == "allocated" else "by"
                yield block_id, f" {whose} {event.rid} as logical block {logical}"
        elif verb == "freed" and isinstance(event, ev.Free | ev.Trim | ev.Slide):
            why = event.why if isinstance(event, ev.Free) else _GIVEN_BACK[event.kind]
            yield from ((block_id, f" by {event.rid}: {why}") for block_id in event.pblks)
        elif verb == "evicted" and isinstance(event, ev.Evict):
            yield from ((block_id, f": {event.why}") for block_id in event.pblks)
        elif verb == "cached" and isinstance(event, ev.Cache):
            yield from ((block_id, f" by {event.rid}") for block_id in event.pblks)
        elif verb in _OF_PAIRS and isinstance(event, _OF_PAIRS[verb]):
            for source, target in event.pairs:
                yield source, f" to block {target} for {event.rid}"
                yield target, f" from block {source} for {event.rid}"


_OF_TABLES: dict[str, type[ev.Alloc | ev.Share]] = {"allocated": ev.Alloc, "shared": ev.Share}
_OF_PAIRS: dict[str, type[ev.Copy | ev.Move]] = {"copied": ev.Copy, "moved": ev.Move}
_GIVEN_BACK = {"trim": "guessed tokens did not come", "slide": "the window left it"}


# -- how things stand -------------------------------------------------------------------------------------------------

QUANTITIES: dict[str, Callable[[Moment], float]] = {
    "free blocks": lambda m: len(m.state.free),
    "used blocks": lambda m: len(m.state.ref_counts),
    "waiting": lambda m: len(m.state.waiting),
    "running": lambda m: len(m.state.running),
    "swapped": lambda m: len(getattr(m.state, "swapped", ())),
    "kv_usage": lambda m: m.state.usage()["kv_usage"],
    "kv_waste": lambda m: m.state.usage()["kv_waste"],
    "tokens": lambda m: sum(end - start for start, end in m.spans.values()),
    "preemptions": lambda m: m.state.num_preemptions,
    "step": lambda m: m.step,
}
"""What can be compared with a number. "tokens" are those computed in the step, "preemptions" all so far."""


@dataclass(slots=True)
class Quantity(Condition):
    """As in "free blocks < 4": new in the step in which it becomes true."""

    name: str
    op: str
    number: float

    def matches(self, moment: Moment) -> Matches:
        """The value, when it fits."""
        value = QUANTITIES[self.name](moment)
        if not OPERATORS[self.op](value, self.number):
            return {}
        return {"": f"{self.name} is {_short(value)} ({self.op} {_short(self.number)})"}

    def describe(self) -> str:
        """In plain words."""
        return f"{self.name} becomes {_OPERATOR_WORDS[self.op]} {_short(self.number)}"

    def __str__(self) -> str:
        return f"{self.name} {self.op} {_exact(self.number)}"


LATENCIES = {"TTFT": "time to first token", "ITL": "gap between two tokens", "stall": "steps without a token"}
"""Latencies of requests, in steps. A stall counts the steps since the newest token, of requests that have one."""


@dataclass(slots=True)
class Latency(Condition):
    """As in "TTFT of any > 20": new once for each request.

    Against > and >= a TTFT counts as far as it has come, so that it stops while the request still waits; against the
    others the first token must have come. An ITL is looked at in the step that ends the gap.
    """

    name: str
    who: Who
    op: str
    number: float

    def matches(self, moment: Moment) -> Matches:
        """Every request whose latency fits."""
        found: Matches = {}
        for rid, life in moment.lives.items():
            value = self._value(moment, rid) if self.who.fits(rid) else None
            if value is not None and OPERATORS[self.op](value, self.number):
                so_far = " so far" if self.name == "TTFT" and not life.steps.tokens else ""
                found[rid] = (
                    f"{self.name} of {rid} is {_short(value)} steps{so_far} ({self.op} {_short(self.number)})"
                )
        return found

    def _value(self, moment: Moment, rid: str) -> float | None:
        times = moment.lives[rid].steps
        if self.name == "TTFT":
            if times.tokens or self.op not in (">", ">="):
                return times.ttft
            return (
                None
                if times.submitted is None or times.finished is not None
                else moment.step - times.submitted
            )
        if self.name == "ITL":
            return max(times.itl[-1:], default=None) if times.tokens[-1:] == [moment.step] else None
        return moment.step - times.tokens[-1] if times.tokens and times.finished is None else None

    def describe(self) -> str:
        """In plain words."""
        return (
            f"the {self.name} ({LATENCIES[self.name]}) of {self.who.words} becomes "
            f"{_OPERATOR_WORDS[self.op]} {_short(self.number)} steps"
        )

    def __str__(self) -> str:
        return f"{self.name} of {self.who} {self.op} {_exact(self.number)}"


def _exact(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else repr(number)


def _short(number: float) -> str:
    return _exact(round(number, 4))


# -- joined -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Joined(Condition):
    parts: tuple[Condition, ...]
    word: ClassVar[str] = ""

    def fresh(self) -> Self:
        """The same, down to its parts."""
        return replace(self, parts=tuple(part.fresh() for part in self.parts))

    def matches(self, moment: Moment) -> Matches:
        """What is true of the parts."""
        return self.look(moment)[0]

    def describe(self) -> str:
        """In plain words."""
        return f" {self.word} ".join(_inside(part, part.describe()) for part in self.parts)

    def __str__(self) -> str:
        return f" {self.word} ".join(_inside(part, str(part)) for part in self.parts)


def _inside(part: Condition, text: str) -> str:
    """`text` of a part, in parentheses where it is joined itself."""
    return f"({text})" if isinstance(part, _Joined) else text


@dataclass(slots=True)
class And(_Joined):
    """All of them; new when any part is new and the others are true."""

    word: ClassVar[str] = "and"

    def look(self, moment: Moment) -> tuple[Matches, Matches]:
        """Every part is asked, so that each remembers the step."""
        seen = [part.look(moment) for part in self.parts]
        if not all(true for true, _ in seen):
            return {}, {}
        true = {f"{i} {key}": why for i, (t, _) in enumerate(seen) for key, why in t.items()}
        return true, true if any(new for _, new in seen) else {}


@dataclass(slots=True)
class Or(_Joined):
    """Any of them; new when a part that is true is new."""

    word: ClassVar[str] = "or"

    def look(self, moment: Moment) -> tuple[Matches, Matches]:
        """Every part is asked, so that each remembers the step."""
        seen = [part.look(moment) for part in self.parts]
        true, new = (
            {f"{i} {key}": why for i, both in enumerate(seen) for key, why in both[which].items()}
            for which in (0, 1)
        )
        return true, new


@dataclass(slots=True)
class Not(Condition):
    """The opposite; new in the step in which it becomes true."""

    part: Condition

    def fresh(self) -> Self:
        """The same, down to its part."""
        return replace(self, part=self.part.fresh())

    def matches(self, moment: Moment) -> Matches:
        """True when nothing makes the part true."""
        return {} if self.part.look(moment)[0] else {"": str(self)}

    def describe(self) -> str:
        """In plain words."""
        return f"it is not so that {_inside(self.part, self.part.describe())}"

    def __str__(self) -> str:
        return f"not {_inside(self.part, str(self.part))}"
