"""Exercises of notebook 02: what reserving costs, which holes are left, best-fit to write, what compaction moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from typing import Any

from pagedinfer.config import EngineConfig
from pagedinfer.course.arrivals import memory_run
from pagedinfer.course.exercise import Exercise, NotYet, call, integers, shown
from pagedinfer.errors import OutOfBlocks, count
from pagedinfer.memory.allocator import KVAllocator
from pagedinfer.memory.extents import Hole, best_fit
from pagedinfer.memory.make import make_allocator
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.events import Event, Move
from pagedinfer.trace.measures import free_extents
from pagedinfer.trace.recording import Recording

__all__ = ["EXERCISES", "empty_slots", "story"]

BLOCK_SIZE, MAX_MODEL_LEN = 8, 128
PROMPT, MAX_TOKENS, HELD = 20, 20, 30
"""The request of exercise 02.1, and the tokens that it has when we look."""
ALLOCATORS = ("reserve-max", "best-fit", "buddy", "paged")

STORY_BLOCKS = 22
STORY = (
    *(("z", 2), ("a", 6), ("b", 4), ("c", 5), ("d", 3)),
    *(("b", 0), ("d", 0)),
    ("e", 3),
    ("a", 0),
)
"""Who takes how many blocks; 0: it ends."""
NEWCOMER = ("f", 7)

CASES: tuple[tuple[tuple[Hole, ...], int], ...] = (
    (((0, 9), (12, 6), (20, 4), (30, 12), (45, 4)), 4),
    (((0, 9), (12, 6), (20, 4), (30, 12), (45, 4)), 5),
    (((2, 3), (8, 9), (20, 5)), 4),
    (((2, 3), (8, 9), (20, 5)), 10),
    (((0, 7),), 7),
    (((3, 1), (5, 2)), 3),
    ((), 1),
)
RANDOM_CASES, SEEDS = 300, (3, 5)

BEST_FIT = """
def best_fit(holes, size):
    fitting = [(length, first) for first, length in holes if length >= size]
    return min(fitting)[1] if fitting else None
"""


# -- 02.1: what reserving costs ---------------------------------------------------------------------------------------


def empty_slots(allocator: str, prompt: int = PROMPT, max_tokens: int = MAX_TOKENS, held: int = HELD) -> int:
    """Token slots that a request holds and that have no token, when it has `held` tokens."""
    memory = _memory(allocator, 64)
    memory.allocate("r", prompt, max_total_tokens=prompt + max_tokens)
    memory.allocate("r", held)
    return len(memory.tables["r"]) * BLOCK_SIZE - held


def judge_reserved(empty: Any) -> str:
    """Empty slots of one request under `ALLOCATORS`."""
    got = integers(empty, len(ALLOCATORS) + 1)
    if got is None or len(got) != len(ALLOCATORS):
        raise NotYet(
            f"Give {len(ALLOCATORS)} numbers, one for each way, like (1, 2, 3, 4); yours is {shown(empty)}."
        )
    wanted = [empty_slots(name) for name in ALLOCATORS]
    for name, mine, right in zip(ALLOCATORS, got, wanted, strict=True):
        if mine == right:
            continue
        if name == "paged" and mine == 0:
            advice = f"{HELD} tokens do not end at the end of a block."
        elif name == "paged":
            advice = f"Paging reserves nothing: it holds the blocks for {HELD} tokens and no more."
        elif mine == right + HELD:
            advice = "That is all it holds; how much of it is empty?"
        elif mine == right + HELD - PROMPT:
            advice = "The tokens produced so far are in its memory as well as the prompt."
        elif name == "buddy":
            advice = "A buddy system gives a power of two: 1, 2, 4, 8, 16 blocks."
        elif name == "best-fit":
            advice = "It reserves prompt and max_tokens, in whole blocks."
        else:
            advice = f"It reserves max_model_len, {MAX_MODEL_LEN} tokens, whatever was asked for."
        raise NotYet(f"{name}: not {mine}.", advice)
    parts = [f"{name} {number}" for name, number in zip(ALLOCATORS, wanted, strict=True)]
    return f"Empty slots of one request with {HELD} tokens: {', '.join(parts)}."


def _memory(
    allocator: str, num_blocks: int, sink: Callable[[Event], None] | None = None, **settings: Any
) -> KVAllocator:
    config = EngineConfig(
        allocator=allocator,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        **settings,
    )
    bus = EventBus()
    if sink is not None:
        bus.subscribe(sink)
    return make_allocator(config, bus)


# -- 02.2 and 02.4: a story of requests -------------------------------------------------------------------------------


class Story:
    """`STORY` in a real first-fit allocator, told a line a chapter; `f` comes at the end."""

    def __init__(self, *, compaction: bool = False) -> None:
        self.lines: list[str] = []
        self.moved = 0
        self.refused = ""
        self.memory = _memory("first-fit", STORY_BLOCKS, self._look, compaction=compaction)
        for name, size in STORY:
            if size:
                self._take(name, size)
            else:
                self.memory.free(name, "it ends")
            self._tell(f"{name} takes {count(size, 'block')}" if size else f"{name} ends")
        self.holes = free_extents(set(range(STORY_BLOCKS)).difference(*self.memory.tables.values()))
        name, size = NEWCOMER
        try:
            self._take(name, size)
            self._tell(f"{name} takes {count(size, 'block')}" + f", {self.moved} moved" * compaction)
        except OutOfBlocks as error:
            self.refused = str(error)
            self._tell(f"{name} wants {count(size, 'block')}, and gets none")

    def _look(self, event: Event) -> None:
        if isinstance(event, Move):
            self.moved += len(event.pairs)

    def _take(self, name: str, size: int) -> None:
        self.memory.allocate(name, size * BLOCK_SIZE, max_total_tokens=size * BLOCK_SIZE)

    def _tell(self, what: str) -> None:
        strip = ["."] * STORY_BLOCKS
        for name, table in self.memory.tables.items():
            for block_id in table:
                strip[block_id] = name
        self.lines.append(f"{''.join(strip)}  {what}")

    def __repr__(self) -> str:
        return "\n".join(self.lines)


def story(*, compaction: bool = False) -> Story:
    """The story of exercises 02.2 and 02.4, played: a line for each chapter, a letter for each block."""
    return Story(compaction=compaction)


def judge_holes(holes: Any, fits: Any) -> str:
    """The holes after `STORY`, and whether the newcomer fits."""
    played = story()
    mine, right = _pairs(holes), played.holes
    if mine is None:
        raise NotYet(f"Give the holes as pairs, like [(0, 4), (9, 2)]; yours is {shown(holes)}.")
    if mine != right:
        raise NotYet(*_wrong_holes(sorted(mine), right))
    if not isinstance(fits, bool):
        raise NotYet(f"The holes are right. Does f fit? Say True or False, not {shown(fits)}.")
    free, largest = sum(length for _, length in right), max(length for _, length in right)
    if fits:
        raise NotYet(
            f"The holes are right. f: {free} blocks are free, but it needs {NEWCOMER[1]} in a row. How long is "
            "the largest hole?"
        )
    return f"{free} blocks are free, the largest hole has {largest}: f, which wants {NEWCOMER[1]}, must wait."


def _pairs(holes: Any) -> list[Hole] | None:
    try:
        pairs = [integers(pair, 3) for pair in islice(holes, STORY_BLOCKS + 1)]
    except (Exception, SystemExit):
        return None
    good = [(pair[0], pair[1]) for pair in pairs if pair is not None and len(pair) == 2]
    return sorted(good) if len(good) == len(pairs) else None


def _wrong_holes(mine: list[Hole], right: list[Hole]) -> tuple[str, ...]:
    if mine == [(first, first + length - 1) for first, length in right]:
        return ("You gave the first and the last block of each hole. Give the first block and the length.",)
    for (first, length), (after, _) in pairwise(mine):
        if first + length == after:
            return (
                f"The holes at {first} and {after} are neighbours: together they are one hole.",
                "What lies between two holes is taken.",
            )
    said = {block_id for first, length in mine if length < 99 for block_id in range(first, first + length)}
    true = {block_id for first, length in right for block_id in range(first, first + length)}
    if wrong := sorted(said - true):
        owner = next((n for n, table in story().memory.tables.items() if wrong[0] in table), None)
        whose = f"{owner} has it" if owner else "it is no block of the pool"
        return (
            f"Block {wrong[0]} is not free: {whose}.",
            "First-fit takes the lowest hole that is large enough.",
        )
    missing = sorted(true - said)
    if not missing:
        return ("Each free block belongs to one hole only.",)
    return (f"Block {missing[0]} is free too, and in none of your holes.", "Who had it, and did that end?")


def judge_compaction(moved: Any, first: Any) -> str:
    """Blocks that move to make room for the newcomer, and where it goes."""
    played, refused = story(compaction=True), story()
    name, size = NEWCOMER
    right = played.memory.tables[name][0]
    if type(moved) is not int or type(first) is not int:
        raise NotYet(f"Give two whole numbers, like 4 and 9; yours are {shown(moved)} and {shown(first)}.")
    everything = sum(length for rid, length in STORY if rid in ("c", "e"))
    if moved == everything:
        raise NotYet(
            f"{moved} blocks would move if everything slid down. But a copy costs time: sliding stops as soon as "
            f"{size} blocks in a row are free."
        )
    if moved == 0:
        raise NotYet("0 moved: then the largest hole stays too small.", refused.refused)
    if moved == 1:
        raise NotYet("An extent moves as a whole, and every block of it that holds tokens is copied.")
    if moved != played.moved:
        raise NotYet(
            f"Not {moved} blocks.", "Slide the lowest extent that has a hole below it, and look again."
        )
    if first != right:
        raise NotYet(f"{moved} blocks is right. But f does not start at {first}: where does e end now?")
    return f"{moved} blocks are copied, and f starts at block {right}."


# -- 02.3: best-fit ---------------------------------------------------------------------------------------------------


def judge_best_fit(best_fit: Any) -> str:
    """The learner's function on lists of holes, then in the engine, against the built-in."""
    rng = random.Random(2)
    for holes, size in (*CASES, *(_random_case(rng) for _ in range(RANDOM_CASES))):
        _judge_place(call(best_fit, list(holes), size), holes, size)
    steps = [_same_run(best_fit, seed) for seed in SEEDS]
    return (
        f"{len(CASES) + RANDOM_CASES} lists of holes, then {sum(steps)} steps of the engine: "
        "each request where the built-in best-fit puts it."
    )


def _random_case(rng: random.Random) -> tuple[tuple[Hole, ...], int]:
    holes, block_id = [], rng.randint(0, 3)
    for _ in range(rng.randint(0, 8)):
        length = rng.randint(1, 12)
        holes.append((block_id, length))
        block_id += length + rng.randint(1, 6)
    return tuple(holes), rng.randint(1, 12)


def _judge_place(mine: Any, holes: Sequence[Hole], size: int) -> None:
    """Whether it is the first block of the smallest hole that is large enough."""
    right = best_fit(holes, size)
    if mine == right and type(mine) is type(right):
        return
    asked = f"holes {list(holes)}, {count(size, 'block')}: your function returned {shown(mine)}"
    if right is None:
        raise NotYet(f"{asked}. No hole is large enough; then return None.")
    lengths = dict(holes)
    best = lengths[right]
    if mine is None:
        exact = ", exactly what is needed" if best == size else ""
        raise NotYet(f"{asked}. But the hole at {right} has {count(best, 'block')}{exact}.")
    if isinstance(mine, tuple | list):
        raise NotYet(f"{asked}. Return the first block of the hole, one number.")
    if type(mine) is not int:
        raise NotYet(f"{asked}. That is no block id.")
    if mine not in lengths:
        raise NotYet(f"{asked}. No hole starts there. Return the first block of one.")
    length = lengths[mine]
    if length < size:
        raise NotYet(f"{asked}. That hole has only {count(length, 'block')}.")
    if length == best:
        raise NotYet(f"{asked}. The hole at {right} is as small; of equal ones take the lowest.")
    fitting = [first for first, blocks in holes if blocks >= size]
    if mine == fitting[0]:
        kind = "Yours is the first that is large enough: first-fit."
    elif length == max(lengths.values()):
        kind = "Yours is the largest hole: worst-fit."
    else:
        kind = "Is a hole of exactly `size` blocks large enough for you?" if best == size else ""
    raise NotYet(
        f"{asked}. The hole at {right} has {best}, and would leave less over.", *filter(None, [kind])
    )


def _same_run(fit: Any, seed: int) -> int:
    """Steps of a run with the learner's function; they must be those of the built-in."""
    mine = _run_with(fit, seed)
    if mine.errors:
        raise NotYet(f"In the engine, step {mine.errors[0].step}: {mine.errors[0].what}.")
    theirs = memory_run("best-fit", seed)
    for a, b in zip(mine.events, theirs.events, strict=False):
        if a != b:
            raise NotYet(
                f"In the engine, with seed {seed}, the runs part in step {b.step}: {shown(a)} in place of {shown(b)}.",
                "Does your function remember something from call to call?",
            )
    return theirs.last_step


def _run_with(fit: Any, seed: int) -> Recording:
    return memory_run("best-fit", seed, make_memory=lambda config, bus: make_allocator(config, bus, fit=fit))


EXERCISES = (
    Exercise(
        id="02.1",
        title="What reserving costs",
        judge=judge_reserved,
        hints=(
            "How many blocks does each way give when the request comes? A block has 8 slots. Take off the 30 tokens.",
            "reserve-max: 128 slots. best-fit: prompt and max_tokens are 40 tokens, 5 blocks. buddy: 5 blocks, "
            "rounded up to a power of two.",
            "128 - 30, 40 - 30, 64 - 30; and 30 tokens paged are 4 blocks, 32 - 30.",
        ),
        answer="empty = 98, 10, 34, 2",
        why="Who needs memory in a row must reserve before it is known how long the answer gets. A paged request "
        "wastes less than one block, however long it gets.",
    ),
    Exercise(
        id="02.2",
        title="Which holes?",
        judge=judge_holes,
        hints=(
            "Draw 22 boxes and write the letters in. Rub out those that end.",
            "e takes the lowest hole of at least 3 blocks: that is b's old place, and one block of it is left.",
            "d's place and the two blocks behind it are one hole, (17, 5). a's place is another, (2, 6).",
        ),
        answer="holes = [(2, 6), (11, 1), (17, 5)]\nfits = False",
        why="That is external fragmentation: enough is free, and nothing of it in one piece. External fragmentation "
        "is 1 - largest hole / free blocks; here 1 - 6 / 12.",
    ),
    Exercise(
        id="02.3",
        title="Best-fit",
        judge=judge_best_fit,
        hints=(
            "First drop the holes that are too small; a hole of exactly `size` is not.",
            "Of those left, which has the smallest length? Of two equal ones, the lower first block.",
            "min() of pairs (length, first) does both. Nothing left: None.",
        ),
        answer=BEST_FIT,
        why="Best-fit keeps large holes whole, and leaves slivers that fit nobody. No rule for choosing a hole gets "
        "rid of holes.",
    ),
    Exercise(
        id="02.4",
        title="What compaction moves",
        judge=judge_compaction,
        hints=(
            "The strip of the story is above. From the left: which extent has a hole below it?",
            "e, 3 blocks, slides down to block 2. How long is the hole behind it now?",
            "Seven: a's 6 blocks and the one that e had left over. So nobody else moves, and f goes behind e.",
        ),
        answer="moved, first = 3, 5",
        why="Compaction buys a hole with copies, while everybody waits. With block tables the blocks of f need not be "
        "in a row, so there is nothing to move.",
    ),
)
