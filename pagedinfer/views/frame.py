"""One frame of a film: everything a picture shows of the end of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "DECODE",
    "GONE",
    "HELD",
    "PREEMPTED",
    "PREFILL",
    "STATUSES",
    "WAITING",
    "Block",
    "Frame",
    "Lane",
    "Line",
    "Row",
]

GONE, WAITING, PREFILL, DECODE, HELD, PREEMPTED = range(6)
"""What a request did in a step. HELD: it runs, but this step gave it no tokens. GONE: not there (any more)."""

STATUSES = ("waiting", "running", "preempted")

Line = dict[str, Any]
"""What changed in a step, as JSON: see `pagedinfer.views.film.Film`."""


@dataclass(slots=True, frozen=True)
class Lane:
    """One request for the whole film: a row of the timeline, a colour. An id used again gets another lane."""

    number: int
    rid: str
    label: str
    num_prompt_tokens: int


@dataclass(slots=True)
class Row:
    """One live request at the end of a step. `scheduled`: tokens computed in it; `why`: why it waits, or "".

    `own_why`: why where the request has a reason of its own; "" where it waits as `Frame.behind` says.
    """

    lane: int
    num_tokens: int = 0
    num_computed_tokens: int = 0
    status: str = "waiting"
    did: int = GONE
    scheduled: int = 0
    why: str = ""
    own_why: str = ""
    block_table: list[int] = field(default_factory=list)

    def fill(self, logical: int, block_size: int) -> int:
        """Tokens written in its `logical`-th block."""
        return max(0, min(block_size, self.num_computed_tokens - logical * block_size))

    def wrote(self, logical: int, block_size: int) -> bool:
        """Whether this step wrote tokens into its `logical`-th block."""
        start, end = self.num_computed_tokens - self.scheduled, self.num_computed_tokens
        return self.scheduled > 0 and start < (logical + 1) * block_size and end > logical * block_size


@dataclass(slots=True)
class Block:
    """A physical block in use. `owners`: (lane, logical block) of each table that holds it; `fill` in tokens."""

    block_id: int
    owners: list[tuple[int, int]]
    fill: int
    written: bool

    @property
    def ref_count(self) -> int:
        """Tables that hold it."""
        return len(self.owners)


@dataclass(slots=True)
class Frame:
    """Everything a picture shows of the end of one step.

    Attributes:
        rows: live requests by lane. did: lane -> what it did, also for requests that ended in this step.
        scheduled: lane -> tokens computed in this step.
        running, waiting: lanes in queue order.
        behind: why those in the queue wait that have no reason of their own.
        notes: (kind, lane or -1, sentence): admitted, resumed, preempted, finished, rejected, error, cancelled, gap.
        memory: token slots live, tail slack, free; and blocks in use.
        sentence: the step in words.
    """

    step: int = 0
    budget: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    did: dict[int, int] = field(default_factory=dict)
    scheduled: dict[int, int] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    behind: str = ""
    notes: list[tuple[str, int, str]] = field(default_factory=list)
    memory: tuple[int, int, int, int] = (0, 0, 0, 0)
    sentence: str = ""

    def apply(self, line: Line, texts: list[str]) -> None:
        """Turn the frame of the step before into this step's. Keys of a line: see `Film`."""
        self.step, self.budget, self.memory, self.sentence = (
            line["s"],
            line["b"],
            tuple(line["m"]),
            line["say"],
        )
        for lane in line.get("gone", ()):
            del self.rows[lane]
        for key, (num_tokens, computed, status) in line.get("r", {}).items():
            row = self.rows.setdefault(int(key), Row(int(key)))
            row.num_tokens, row.num_computed_tokens, row.status = num_tokens, computed, STATUSES[status]
        for key, (keep, added) in line.get("t", {}).items():
            self.rows[int(key)].block_table[keep:] = added
        for key, did in line.get("c", {}).items():
            self.did[int(key)] = did
        self.did = {lane: did for lane, did in self.did.items() if did != GONE}
        if "q" in line:
            self.running, self.waiting = map(changed_queue, (self.running, self.waiting), line["q"])
        if "h" in line:
            self.behind = texts[line["h"]] if line["h"] >= 0 else ""
        for key, text in line.get("w", {}).items():
            self.rows[int(key)].own_why = texts[text] if text >= 0 else ""
        self.scheduled = {int(key): n for key, n in line.get("n", {}).items()}
        for lane, row in self.rows.items():
            row.did, row.scheduled = self.did.get(lane, GONE), self.scheduled.get(lane, 0)
            row.why = row.own_why
            if not row.why and row.status != "running" and not row.scheduled:
                row.why = self.behind
        self.notes = [(kind, lane, texts[text]) for kind, lane, text in line.get("e", ())]

    def blocks(self, block_size: int) -> dict[int, Block]:
        """The blocks in use, by id."""
        found: dict[int, Block] = {}
        for lane, row in self.rows.items():
            for logical, block_id in enumerate(row.block_table):
                block = found.setdefault(block_id, Block(block_id, [], 0, False))
                block.owners.append((lane, logical))
                block.fill = max(block.fill, row.fill(logical, block_size))
                block.written = block.written or row.wrote(logical, block_size)
        return found

    @property
    def kv_waste(self) -> float:
        """1 - live slots / allocated slots, 0 to 1."""
        live, slack = self.memory[:2]
        return slack / (live + slack) if live + slack else 0.0


def changed_queue(queue: list[int], change: tuple[list[int], list[tuple[int, int]]]) -> list[int]:
    """A queue after a change: lanes taken out, then (position, lane) put in, front to back."""
    gone = set(change[0])
    now = [lane for lane in queue if lane not in gone]
    for position, lane in change[1]:
        now.insert(position, lane)
    return now
