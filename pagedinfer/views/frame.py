"""One frame of a film: everything a picture shows of the end of one step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

__all__ = [
    "DECODE",
    "GONE",
    "HELD",
    "PREEMPTED",
    "PREFILL",
    "STATUSES",
    "SWAPPED",
    "WAITING",
    "Block",
    "Frame",
    "Lane",
    "Line",
    "Memory",
    "Row",
    "changed_queue",
    "expected",
]

GONE, WAITING, PREFILL, DECODE, HELD, PREEMPTED, SWAPPED = range(7)
"""What a request did in a step. HELD: it runs, but this step gave it no tokens. GONE: not there (any more)."""

STATUSES = ("waiting", "running", "preempted", "swapped")

Line = dict[str, Any]
"""What changed in a step, as JSON: see `pagedinfer.views.film.Film`."""


@dataclass(slots=True, frozen=True)
class Lane:
    """One request for the whole film: a row of the timeline, a colour. An id used again gets another lane."""

    number: int
    rid: str
    label: str
    num_prompt_tokens: int


class Memory(NamedTuple):
    """Where the pool's token slots are at the end of a step.

    `live`: slots that hold a token, a shared slot counted once; `shared`: those of them that more than one table
    holds. `slack`: the rest of blocks that hold some. `reserved`: slots of blocks held for tokens to come (contiguous
    strategies). `cached`: slots of blocks that the prefix cache keeps and nobody uses. `free`: all others.
    `used`: blocks in use (not slots); `host`: host slots in use (each as big as a block).
    """

    live: int = 0
    slack: int = 0
    free: int = 0
    used: int = 0
    shared: int = 0
    cached: int = 0
    reserved: int = 0
    host: int = 0

    @property
    def slots(self) -> int:
        """All token slots of the pool."""
        return self.allocated + self.free

    @property
    def allocated(self) -> int:
        """Token slots of blocks that are not free."""
        return self.live + self.wasted

    @property
    def wasted(self) -> int:
        """Allocated slots that hold no token of a live request: tail slack, reserved-unused, cached-idle."""
        return self.slack + self.reserved + self.cached


@dataclass(slots=True)
class Row:
    """One live request at the end of a step. `scheduled`: tokens computed in it; `why`: why it waits, or "".

    `own_why`: why where the request has a reason of its own; "" where it waits as `Frame.behind` says. `block_table`
    (that of group 0; `more` are those of other groups) and `host` (host slots, while swapped out) are never changed
    in place: frames share them.
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
    host: list[int] = field(default_factory=list)
    more: list[list[int]] = field(default_factory=list)

    def tables(self) -> list[list[int]]:
        """The block table of each group."""
        return [self.block_table, *self.more]

    def fill(self, logical: int, block_size: int) -> int:
        """Tokens written in its `logical`-th block."""
        return max(0, min(block_size, self.num_computed_tokens - logical * block_size))

    def wrote(self, logical: int, block_size: int) -> bool:
        """Whether this step wrote tokens into its `logical`-th block."""
        start, end = self.num_computed_tokens - self.scheduled, self.num_computed_tokens
        return self.scheduled > 0 and start < (logical + 1) * block_size and end > logical * block_size


@dataclass(slots=True)
class Block:
    """A physical block that is not free. `owners`: (lane, logical block) of each table that holds it; `fill` in
    tokens; `pins`: users beside the tables; `key`: what the prefix cache knows it by, -1 where it does not.
    """

    block_id: int
    owners: list[tuple[int, int]] = field(default_factory=list)
    fill: int = 0
    written: bool = False
    pins: int = 0
    key: int = -1

    @property
    def ref_count(self) -> int:
        """Users: tables that hold it, and pins."""
        return len(self.owners) + self.pins

    @property
    def is_idle(self) -> bool:
        """Whether only the prefix cache keeps it."""
        return not self.owners and not self.pins


@dataclass(slots=True)
class Frame:
    """Everything a picture shows of the end of one step.

    Attributes:
        rows: live requests by lane. did: lane -> what it did, also for requests that ended in this step.
        decoding: lanes of `did` that decoded. scheduled: lane -> tokens computed in this step.
        prefill: lanes of `scheduled` whose tokens are prefill.
        running, waiting, swapped: lanes in queue order.
        behind: why those in the queue wait that have no reason of their own.
        notes: (kind, lane or -1, sentence): admitted, resumed, preempted, finished, rejected, error, cancelled, gap.
        memory: token slots by what they are used for.
        cached: block -> (key, key before it or -1) for blocks that the prefix cache knows.
        pins: block -> users beside the tables.
        sentence: the step in words.
    """

    step: int = 0
    budget: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    did: dict[int, int] = field(default_factory=dict)
    decoding: set[int] = field(default_factory=set)
    scheduled: dict[int, int] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    behind: str = ""
    notes: list[tuple[str, int, str]] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    cached: dict[int, tuple[int, int]] = field(default_factory=dict)
    pins: dict[int, int] = field(default_factory=dict)
    sentence: str = ""

    def apply(self, line: Line, texts: list[str]) -> None:
        """Turn the frame of the step before into this step's. Keys of a line: see `Film`."""
        self.apply_changes(line, texts)
        self.settle(line, texts)

    def settle(self, line: Line, texts: list[str]) -> None:
        """Fill in what belongs to this step alone, once all changes up to its line are applied."""
        self.scheduled = self.tokens(line)
        for lane, row in self.rows.items():
            row.did, row.scheduled = self.did.get(lane, GONE), self.scheduled.get(lane, 0)
            row.why = row.own_why
            if not row.why and row.status != "running" and not row.scheduled:
                row.why = self.behind
        self.notes = [(kind, lane, texts[text]) for kind, lane, text in line.get("e", ())]
        self.memory, self.sentence = Memory(*line["m"]), line["say"]

    def apply_changes(self, line: Line, texts: list[str]) -> None:
        """Only what lasts beyond the step: the cost is that of what changed, not of what there is."""
        self.step, self.budget = line["s"], line["b"]
        for key, did in line.get("c", {}).items():
            self._set_did(int(key), did)
        for lane in line.get("gone", ()):
            del self.rows[lane]
        for lane, n in self.tokens(line).items():
            if lane in self.rows:
                row = self.rows[lane]
                row.num_tokens, row.num_computed_tokens = expected(row, n)
        for key, (num_tokens, computed, status) in line.get("r", {}).items():
            row = self.rows.setdefault(int(key), Row(int(key)))
            row.num_tokens, row.num_computed_tokens, row.status = num_tokens, computed, STATUSES[status]
        for key, (keep, added) in line.get("t", {}).items():
            row = self.rows[int(key)]
            row.block_table = row.block_table[:keep] + added
        for key, tables in line.get("g", {}).items():
            self.rows[int(key)].more = tables
        for key, slots in line.get("o", {}).items():
            self.rows[int(key)].host = slots
        if "q" in line:
            queues = (self.running, self.waiting, self.swapped)
            self.running, self.waiting, self.swapped = map(changed_queue, queues, line["q"])
        if "h" in line:
            self.behind = texts[line["h"]] if line["h"] >= 0 else ""
        for key, text in line.get("w", {}).items():
            self.rows[int(key)].own_why = texts[text] if text >= 0 else ""
        for block_id in line.get("u", ()):
            self.cached.pop(block_id, None)
        for block_id, key, parent in line.get("k", ()):
            self.cached[block_id] = (key, parent)
        for block_id, pins in line.get("i", ()):
            self.pins[block_id] = pins
            if not pins:
                del self.pins[block_id]

    def _set_did(self, lane: int, did: int) -> None:
        (self.decoding.add if did == DECODE else self.decoding.discard)(lane)
        if did == GONE:
            self.did.pop(lane, None)
        else:
            self.did[lane] = did

    def tokens(self, line: Line) -> dict[int, int]:
        """Lane -> tokens computed in the step; the line leaves out who decoded one."""
        tokens = {int(key): n for key, n in line.get("n", {}).items()}
        return dict.fromkeys(sorted(self.decoding), 1) | tokens

    def copy(self) -> Frame:
        """An independent frame; lists that never change in place are shared."""
        return replace(
            self,
            rows={lane: replace(row) for lane, row in self.rows.items()},
            did=dict(self.did),
            decoding=set(self.decoding), cached=dict(self.cached), pins=dict(self.pins),
        )  # fmt: skip

    def blocks(self, block_size: int) -> dict[int, Block]:
        """The blocks that are not free, by id."""
        found: dict[int, Block] = {}
        for lane, row in self.rows.items():
            for logical, block_id in (pair for table in row.tables() for pair in enumerate(table)):
                if block_id < 0:  # a sliding window has left it
                    continue
                block = found.get(block_id) or found.setdefault(block_id, Block(block_id))
                block.owners.append((lane, logical))
                block.fill = max(block.fill, row.fill(logical, block_size))
                block.written = block.written or row.wrote(logical, block_size)
        for block_id, pins in self.pins.items():
            found.setdefault(block_id, Block(block_id)).pins = pins
        for block_id, (key, _) in self.cached.items():
            block = found.setdefault(block_id, Block(block_id))
            block.key = key
            if not block.owners:
                block.fill = block_size  # only full blocks are cached
        return found

    @property
    def prefill(self) -> list[int]:
        """Lanes whose tokens of this step are prefill."""
        return [lane for lane in self.scheduled if self.did.get(lane) == PREFILL]

    @property
    def kv_waste(self) -> float:
        """1 - live slots / allocated slots, 0 to 1."""
        return self.memory.wasted / self.memory.allocated if self.memory.allocated else 0.0


def expected(row: Row, n: int) -> tuple[int, int]:
    """(num_tokens, num_computed_tokens) after a step that computes `n` tokens and samples one once all are computed.

    Lines leave counts out that are as expected.
    """
    computed = row.num_computed_tokens + n
    return row.num_tokens + (computed == row.num_tokens), computed


def changed_queue(queue: list[int], change: tuple[list[int], list[tuple[int, int]]]) -> list[int]:
    """A queue after a change: lanes taken out, then (position, lane) put in, front to back."""
    gone = set(change[0])
    now = [lane for lane in queue if lane not in gone]
    for position, lane in change[1]:
        now.insert(position, lane)
    return now
