"""The grammar of conditions: from text to `trace.conditions`, by hand, without evaluating anything.

    condition = all { "or" all }          all = one { "and" one }          one = "not" one | "(" condition ")" | fact
    fact      = request verb                          r3 preempted · "my id" finishes · any aborted
              | ("block" number | "any block") verb   block 17 written
              | quantity operator number              free blocks < 4 · kv_usage > 0.9 · step == 40
              | latency "of" request operator number  TTFT of any > 20 steps · stall of r3 > 5

Words may be in any case. Names of requests too, unless they stand in double quotes, which also serve for names that
are words of the grammar or hold other characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from pagedinfer.errors import WatchError, kind_of
from pagedinfer.trace.conditions import (
    BLOCK_VERBS,
    LATENCIES,
    OPERATORS,
    QUANTITIES,
    VERBS,
    And,
    Block,
    Condition,
    Happened,
    Latency,
    Not,
    Or,
    Quantity,
    Who,
)

__all__ = ["parse_condition"]

MAX_LENGTH, MAX_DEPTH = 500, 40
MAX_NUMBER = 10**15

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"""
    r"""|(?P<word>[^\W\d][\w.:#@/+-]*)|(?P<op>[<>=!]=|[<>=])|(?P<paren>[()])|(?P<end>\Z)|(?P<other>.))""",
    re.DOTALL,
)

_VERBS = {**{verb: verb for verb in VERBS}, "finishes": "finished"}
_LATENCIES = {name.casefold(): name for name in LATENCIES}
_OPERATORS = {**{op: op for op in OPERATORS}, "=": "=="}
_RESERVED = frozenset(
    ("and", "or", "not", "any", "block", "blocks", "free", "used", "of", "is", "step", "steps", *_VERBS, *_LATENCIES,
     *BLOCK_VERBS, *QUANTITIES)
)  # fmt: skip
_START = 'a request (r3, "my id" or any), block 17, any block, ' + ", ".join(
    [*QUANTITIES, *(f"{name} of" for name in LATENCIES), "not", "("]
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # string, number, word, op, paren, end
    text: str
    at: int

    @property
    def word(self) -> str:
        """The word in lower case; "" when it is none."""
        return self.text.casefold() if self.kind == "word" else ""


def parse_condition(text: str) -> Condition:
    """The condition that `text` says.

    Raises:
        WatchError: it says none; the message shows the place and what may stand there.
    """
    if not isinstance(text, str):
        raise WatchError(f'A condition is a text such as "r3 preempted", not {kind_of(text)}.')
    if len(text) > MAX_LENGTH:
        raise WatchError(
            f"The condition has {len(text)} characters; at most {MAX_LENGTH} are read. Use a Python predicate."
        )
    return _Parser(text).whole()


class _Parser:
    """Recursive descent: a method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = re.sub(r"\s", " ", text)
        self.tokens = list(self._split())
        self.next = 0
        self.depth = 0

    def _split(self) -> Sequence[_Token]:
        found: list[_Token] = []
        at = 0
        while not found or found[-1].kind != "end":
            match = _TOKEN.match(self.text, at)
            assert match is not None, "the last alternatives match anything"
            kind = match.lastgroup or "end"
            start, at = match.span(kind)
            found.append(_Token(kind, self.text[start:at], start))
            if kind == "other":
                what = (
                    'a quoted name needs its second "' if self.text[start] == '"' else "nothing here uses it"
                )
                self._fail(found[-1], f"{what}. Allowed are names, numbers, comparisons and parentheses")
        return found

    # -- tokens ---------------------------------------------------------------------------------------------------

    @property
    def token(self) -> _Token:
        return self.tokens[self.next]

    def take(self) -> _Token:
        self.next += 1
        return self.tokens[self.next - 1]

    def accept(self, *words: str) -> bool:
        """Whether the next token is one of these words; it is then taken."""
        if self.token.word in words:
            self.next += 1
            return True
        return False

    def _fail(self, token: _Token, allowed: str, known: Sequence[str] = ()) -> NoReturn:
        what = _quoted(token.text) if token.kind != "end" else "it ends there"
        close = get_close_matches(token.text.casefold(), known, 1)
        hint = f' (did you mean "{close[0]}"?)' if close else ""
        raise WatchError(
            f"Cannot read the condition at character {token.at + 1}, {what}{hint}: {allowed}.\n"
            f"  {self.text}\n  {' ' * token.at}^"
        )

    # -- rules ----------------------------------------------------------------------------------------------------

    def whole(self) -> Condition:
        condition = self.any_of()
        if self.token.kind != "end":
            self._fail(self.token, "after a whole condition comes and, or, or its end", ("and", "or"))
        return condition

    def any_of(self) -> Condition:
        parts = [self.all_of()]
        while self.accept("or"):
            parts.append(self.all_of())
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def all_of(self) -> Condition:
        parts = [self.one()]
        while self.accept("and"):
            parts.append(self.one())
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def one(self) -> Condition:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._fail(self.token, f"conditions lie at most {MAX_DEPTH} deep in one another")
        try:
            if self.accept("not"):
                return Not(self.one())
            if self.token.text == "(" and self.token.kind == "paren":
                self.take()
                inner = self.any_of()
                if self.token.text != ")" or self.token.kind != "paren":
                    self._fail(self.token, "this place is inside parentheses: and, or, or )", ("and", "or"))
                self.take()
                return inner
            return self.fact()
        finally:
            self.depth -= 1

    def fact(self) -> Condition:
        token = self.token
        if token.word in _LATENCIES:
            self.take()
            if not self.accept("of"):
                self._fail(self.token, f"after {_LATENCIES[token.word]} comes of and a request", ("of",))
            who = self.who()
            op, number = self.comparison(f"after the request of a {_LATENCIES[token.word]}")
            self.accept("step", "steps")
            return Latency(_LATENCIES[token.word], who, op, number)
        if name := self.quantity():
            return Quantity(name, *self.comparison(f"after {name}"))
        if self.accept("block"):
            block_id = self.number("after block comes its number, as in block 17")
            if block_id != int(block_id) or block_id < 0:
                self._fail(self.tokens[self.next - 1], "block ids are whole numbers from 0")
            return self.block(int(block_id))
        if token.word == "any" and self.tokens[self.next + 1].word == "block":
            self.next += 2
            return self.block(None)
        who = self.who()
        return Happened(who, self.verb(_VERBS, "after a request comes what happens to it"))

    def quantity(self) -> str | None:
        word, following = self.token.word, self.tokens[min(self.next + 1, len(self.tokens) - 1)]
        if word in ("free", "used"):
            if following.word != "blocks":
                self._fail(following, f"after {word} comes blocks", ("blocks",))
            self.next += 2
            return f"{word} blocks"
        if word in QUANTITIES:
            self.next += 1
            return word
        return None

    def who(self) -> Who:
        token = self.token
        if token.kind == "string":
            self.take()
            try:
                return Who(json.loads(token.text, strict=False), exact=True)
            except ValueError:
                self._fail(
                    token, 'inside quotes \\" and \\\\ stand for " and \\, other escapes are as in JSON'
                )
        if token.word == "any":
            self.take()
            return Who()
        if token.word in _RESERVED:
            self._fail(token, f"here may stand {_START}. A request of this name goes in double quotes")
        if token.kind != "word":
            self._fail(token, f"here may stand {_START}")
        return Who(self.take().text)

    def block(self, block_id: int | None) -> Block:
        verbs = {verb: verb for verb in BLOCK_VERBS}
        return Block(block_id, self.verb(verbs, "after a block comes what happens to it"))

    def verb(self, verbs: dict[str, str], place: str) -> str:
        self.accept("is")
        if self.token.word not in verbs:
            self._fail(self.token, f"{place}: {', '.join(verbs)}", tuple(verbs))
        return verbs[self.take().word]

    def comparison(self, place: str) -> tuple[str, float]:
        if self.token.kind != "op":
            self._fail(self.token, f"{place} comes {', '.join(OPERATORS)} and a number")
        if self.token.text not in _OPERATORS:
            self._fail(self.token, f"a comparison is one of {', '.join(OPERATORS)}")
        op = _OPERATORS[self.take().text]
        return op, self.number(f"after {op} comes a number")

    def number(self, place: str) -> float:
        if self.token.kind != "number":
            self._fail(self.token, place)
        token = self.take()
        number = float(token.text)
        if not abs(number) < MAX_NUMBER:
            self._fail(token, f"numbers are below {MAX_NUMBER}")
        return number


def _quoted(text: str) -> str:
    """`text` in quotes, cut when long."""
    return f'"{text}"' if len(text) <= 40 else f'"{text[:37]}..."'
