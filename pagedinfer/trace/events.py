"""The event vocabulary: what the engine says about itself. Standard library only; everything else builds on it.

Events are facts. They carry ints, floats, strings and tuples, never tensors and never prompt text. One event per
request (or cause) and step, none per token or block. Folding them gives the engine's state (`trace.replay`);
the inputs among them re-run the core (`sim.rerun`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pagedinfer.trace.schema import KINDS, SCHEMA, Event, event_from_dict, json_line

__all__ = [
    "KINDS",
    "SCHEMA",
    "Abort",
    "Admit",
    "Alloc",
    "Cache",
    "Cancel",
    "Commit",
    "Compact",
    "Copy",
    "Error",
    "Event",
    "Evict",
    "Expire",
    "Finish",
    "Fork",
    "Free",
    "Gap",
    "Hit",
    "Keyframe",
    "Meta",
    "Move",
    "Preempt",
    "Refuse",
    "Reject",
    "Reset",
    "Resize",
    "Resume",
    "Retain",
    "Share",
    "Slide",
    "Step",
    "Submit",
    "Swap",
    "Trim",
    "event_from_dict",
    "json_line",
]


@dataclass(slots=True)
class Meta(Event):
    """Start of a recording: schema, the engine's config, and free facts about the model and machine."""

    schema: str
    config: dict[str, Any]
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Keyframe(Event):
    """The whole state at this point, as `Engine.snapshot()` gives it. First event of a recording begun mid-run."""

    snapshot: dict[str, Any]


@dataclass(slots=True)
class Submit(Event):
    """Input: a request was accepted into `waiting`.

    `keys` are the ids of the prompt's full blocks (equal ids: equal tokens after equal tokens), empty when the
    request takes no part in the prefix cache. `parent` is the live request whose prompt it shares (`n > 1`).
    `deadline` and `expires` are times in the clock of `now`: by when it should end, and when it is given up.
    `retain` holds ranges of the prompt: (first token, end, priority, until).
    """

    rid: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    now: float
    keys: tuple[int, ...] = ()
    tenant: str = ""
    deadline: float | None = None
    expires: float | None = None
    parent: str = ""
    retain: tuple[tuple[int, int, int, float], ...] = ()


@dataclass(slots=True)
class Fork(Event):
    """Input: a live request was copied as it stands. The copy `rid` has as many tokens and shares the blocks of
    `parent`; `share` or `admit` say the rest. `keys` are those of its full blocks before the last token.
    """

    rid: str
    parent: str
    max_tokens: int
    now: float
    keys: tuple[int, ...] = ()


@dataclass(slots=True)
class Reject(Event):
    """Input: a request was refused at submission, with the sentence why. `room_for` counts those that came with it."""

    rid: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    now: float
    why: str
    room_for: int = 1


@dataclass(slots=True)
class Abort(Event):
    """Input: a request was given up, by its caller or because its time was over."""

    rid: str
    why: str = "aborted by the caller"


@dataclass(slots=True)
class Step(Event):
    """Input (its clock) and decision: a plan was made. Precedes the plan's other events.

    `scheduled` maps request to tokens; `reasons` maps request to the sentence why it was left out (running ones
    and the head of `waiting`, behind which the others wait).
    """

    i: int
    now: float
    budget: int
    scheduled: dict[str, int]
    reasons: dict[str, str]


@dataclass(slots=True)
class Commit(Event):
    """Input: a plan ran. `tokens` maps request to the number of new tokens (requests without any are left out).

    `ends` holds the ends that the core cannot know: request -> [finish reason, the sentence why]. `keys` holds the
    ids of blocks that the new tokens completed, `drafts` how many tokens were guessed for the next step.
    """

    tokens: dict[str, int]
    ends: dict[str, list[str]] = field(default_factory=dict)
    keys: dict[str, list[int]] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Cancel(Event):
    """Input: a plan was given up; the state before it is back."""

    why: str


@dataclass(slots=True)
class Admit(Event):
    """A waiting request joined the batch for the first time."""

    rid: str
    why: str


@dataclass(slots=True)
class Resume(Event):
    """A preempted request joined the batch again."""

    rid: str
    why: str


@dataclass(slots=True)
class Alloc(Event):
    """Blocks `pblks` were appended to the request's table, from logical block `first` on."""

    rid: str
    group: int
    first: int
    pblks: tuple[int, ...]


@dataclass(slots=True)
class Share(Event):
    """The request's table begins with blocks `pblks`, whose tokens are written already.

    They stand from logical block `first` on (before it, -1: a window has left those), and hold its first `num_tokens`
    tokens.
    """

    rid: str
    group: int
    first: int
    pblks: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True)
class Hit(Event):
    """The prefix cache was asked at an admission: `n` tokens need no computing; `why` says why not more."""

    rid: str
    n: int
    why: str


@dataclass(slots=True)
class Copy(Event):
    """Copy-on-write: logical block `first` of the request is now `pairs[0][1]`, a copy of `pairs[0][0]`."""

    rid: str
    group: int
    first: int
    pairs: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Cache(Event):
    """Full, written blocks were published: `pblks[i]` holds the tokens that `keys[i]` stands for.

    `parent` is the key before the first of them, -1 at the start of a prompt.
    """

    rid: str
    pblks: tuple[int, ...]
    keys: tuple[int, ...]
    parent: int
    group: int = 0


@dataclass(slots=True)
class Evict(Event):
    """Cached blocks that nobody used lost their content, in this order."""

    pblks: tuple[int, ...]
    why: str


@dataclass(slots=True)
class Retain(Event):
    """Cached blocks got another retention priority until the time `until` (-1: no end).

    0 is evicted first, 100 last; 101 is pinned: not evicted unless otherwise nobody could run.
    """

    pblks: tuple[int, ...]
    priority: int
    until: float


@dataclass(slots=True)
class Expire(Event):
    """Retention of these blocks ran out, or pins had to yield: they are ordinary cached blocks again."""

    pblks: tuple[int, ...]


@dataclass(slots=True)
class Reset(Event):
    """Input: the prefix cache was emptied (`pblks` in the order of the free list)."""

    pblks: tuple[int, ...]
    why: str


@dataclass(slots=True)
class Trim(Event):
    """The last blocks of the request's table were given back: guessed tokens that did not come."""

    rid: str
    group: int
    pblks: tuple[int, ...]


@dataclass(slots=True)
class Slide(Event):
    """Blocks that a sliding window has left were given back; the table says -1 from logical block `first` on."""

    rid: str
    group: int
    first: int
    pblks: tuple[int, ...]


@dataclass(slots=True)
class Move(Event):
    """Blocks of the request went elsewhere, contents and all: (from, to), in order of its table."""

    rid: str
    group: int
    pairs: tuple[tuple[int, int], ...]
    why: str


@dataclass(slots=True)
class Swap(Event):
    """Blocks were copied to host slots (`dir` "out": block, slot) or back ("in": slot, block)."""

    rid: str
    dir: str
    pairs: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Resize(Event):
    """Input: the pool has `num_blocks` blocks from now on; moves out of the part that went away come before."""

    num_blocks: int


@dataclass(slots=True)
class Compact(Event):
    """Input: a compaction was asked for between two steps; its moves follow."""

    why: str


@dataclass(slots=True)
class Free(Event):
    """The request gave its blocks back; `pblks` are those that nobody else holds, in this order.

    `why` is "preempt" or "finish".
    """

    rid: str
    pblks: tuple[int, ...]
    why: str


@dataclass(slots=True)
class Preempt(Event):
    """A running request lost its place and its keys and values; it waits at the head of the queue."""

    rid: str
    mode: str
    why: str


@dataclass(slots=True)
class Finish(Event):
    """A request ended. `why` is the finish reason (stop, length, abort, error), `detail` the sentence."""

    rid: str
    why: str
    detail: str


@dataclass(slots=True)
class Refuse(Event):
    """Input: fault injection refused the allocator's `call`-th allocation."""

    call: int
    needed: int


@dataclass(slots=True)
class Error(Event):
    """Something outside the core failed (a subscriber, a callback, a runner); the run went on."""

    where: str
    what: str


@dataclass(slots=True)
class Gap(Event):
    """A recorder dropped `dropped` events here: a hole, never a silent one."""

    dropped: int
