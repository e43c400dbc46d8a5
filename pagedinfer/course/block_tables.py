"""Exercises of notebook 01: predict a block table, translate positions to slots, grow a table token by token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pagedinfer.course.exercise import Exercise, NotStarted, NotYet, call, integers, plain, shown
from pagedinfer.course.sixty_seconds import simulated_recording
from pagedinfer.errors import OutOfBlocks, count
from pagedinfer.trace.events import Alloc, Commit, Free, Meta, Step
from pagedinfer.trace.recording import Recording

if TYPE_CHECKING:
    from pagedinfer.engine.engine import Engine

__all__ = ["EXERCISES", "append_token", "slot_mapping"]

CASES = 200
RUNS = 12
PREDICTED_STEP = 8
"""Notebook 01 asks for a block table after this step."""


def slot_mapping(block_table: list[int], start: int, num_tokens: int, block_size: int) -> list[int]:
    """The slots of positions `start` to `start + num_tokens - 1`."""
    slots = []
    for position in range(start, start + num_tokens):
        logical, offset = divmod(position, block_size)
        slots.append(block_table[logical] * block_size + offset)
    return slots


def append_token(block_table: list[int], free: list[int], num_tokens: int, block_size: int) -> int:
    """Make room for one more token after `num_tokens` stored ones; return its slot.

    Takes the first block of `free` when, and only when, the last block is full.
    """
    if num_tokens == len(block_table) * block_size:
        if not free:
            raise OutOfBlocks(1, 0)
        block_table.append(free.pop(0))
    return block_table[num_tokens // block_size] * block_size + num_tokens % block_size


# -- 01.1: predict a table ------------------------------------------------------------------------------------------


def judge_table(prediction: Any, session: Any) -> str:
    """The predicted block table of r0 after `PREDICTED_STEP`, against the engine's own in that run."""
    recording: Any = getattr(session, "recording", session)
    if not isinstance(recording, Recording):
        raise NotYet(f"The check wants your session, which holds the run; it got {shown(session)}.")
    if recording.last_step < PREDICTED_STEP:
        raise NotStarted(
            f"The run is at step {recording.last_step}; let it come to step {PREDICTED_STEP} first."
        )
    if recording.first_step > PREDICTED_STEP:
        raise NotYet(
            f"This recording begins after step {recording.first_step}; the check needs step {PREDICTED_STEP}."
        )
    state = recording.at(PREDICTED_STEP)
    if "r0" not in state.requests:
        raise NotYet(
            f"There is no r0 after step {PREDICTED_STEP} of this run: run the cells above once more, unchanged."
        )
    table = state.requests["r0"].block_table
    answer = integers(prediction, len(table) + 1)
    if answer is None:
        raise NotYet(f"A block table is a list of block ids, like [4, 2]; yours is {shown(prediction)}.")
    tokens = state.requests["r0"].num_computed_tokens
    if len(answer) != len(table):
        raise NotYet(
            f"r0 has stored {tokens} tokens after step {PREDICTED_STEP}. In blocks of {state.block_size} that does "
            f"not take {f'{len(table) + 1} or more' if len(answer) > len(table) else len(answer)} of them."
        )
    if answer != table:
        wrong = next(i for i, (ours, theirs) in enumerate(zip(answer, table, strict=True)) if ours != theirs)
        owner = state.owners().get(answer[wrong])
        holder = f"belongs to {owner[0][0]}" if owner else "is free"
        raise NotYet(
            f"Logical block {wrong} of r0 is not block {shown(answer[wrong])}: after step {PREDICTED_STEP} "
            f"that one {holder}."
        )
    return f"r0 stores {tokens} tokens in blocks {table}."


# -- 01.2: from positions to slots ----------------------------------------------------------------------------------

_SUSPECTS: tuple[tuple[str, Callable[[list[int], int, int, int], list[int]]], ...] = (
    ("Those are positions. Slots would equal them only if logical block i lay in block i.",
     lambda table, start, n, size: list(range(start, start + n))),
    ("That is right where the blocks lie side by side from the first one on. They need not.",
     lambda table, start, n, size: [table[0] * size + p for p in range(start, start + n)]),
    ("That is right for start=0. The first of your tokens is at position `start`.",
     lambda table, start, n, size: slot_mapping(table, 0, n, size)),
    ("Those are the blocks' first slots. The place within the block is missing.",
     lambda table, start, n, size: [table[p // size] * size for p in range(start, start + n)]),
    ("Those are block ids. A block has `block_size` slots; block b begins at slot b * block_size.",
     lambda table, start, n, size: [table[p // size] for p in range(start, start + n)]),
)  # fmt: skip
"""Plausible wrong answers, each with the sentence that helps."""


def judge_slots(slot_mapping: Any, engine: Any = None) -> str:
    """The learner's mapping on random tables, then on a real pool: the keys that it finds must be the request's."""
    rng = random.Random(1)
    for _ in range(CASES):
        table, start, num_tokens, block_size = _random_case(rng)
        _compare_slots(slot_mapping, table, start, num_tokens, block_size)
    where = _judge_on_pool(slot_mapping, _engine_with_keys(engine))
    return f"Right on {CASES} random tables. {where}"


def _random_case(rng: random.Random) -> tuple[list[int], int, int, int]:
    block_size = rng.choice((1, 2, 3, 4, 8, 16))
    table = rng.sample(range(64), rng.randint(1, 6))
    start = rng.randrange(len(table) * block_size)
    return table, start, rng.randint(1, len(table) * block_size - start), block_size


def _compare_slots(
    function: Any, table: list[int], start: int, num_tokens: int, block_size: int
) -> list[int]:
    given = list(table)
    got = call(function, given, start, num_tokens, block_size)
    slots = integers(got, num_tokens + 1)
    if slots is None:
        raise NotYet(
            f"slot_mapping should return a list of {num_tokens} integers; yours returned {shown(got)}."
        )
    if given != table:
        raise NotYet(
            f"slot_mapping changed the block table from {table} to {shown(given)}; it should only read it."
        )
    wanted = slot_mapping(table, start, num_tokens, block_size)
    if slots == wanted:
        return slots
    asked = f"slot_mapping({table}, start={start}, num_tokens={num_tokens}, block_size={block_size})"
    if len(slots) != num_tokens:
        has = len(slots) if len(slots) < num_tokens else "more"
        raise NotYet(f"{asked} should return {num_tokens} slots; yours has {has}.")
    place = next(i for i, (a, b) in enumerate(zip(slots, wanted, strict=True)) if a != b)
    advice = [text for text, suspect in _SUSPECTS if suspect(table, start, num_tokens, block_size) == slots]
    raise NotYet(
        f"{asked}: position {start + place} is in slot {wanted[place]}; yours says {shown(slots[place])}.",
        *advice[:1],
    )


def _engine_with_keys(engine: Any) -> Engine | None:
    """The learner's engine, when a request there has keys stored; else None."""
    from pagedinfer.engine.engine import Engine

    if engine is None:
        return None
    found: Any = getattr(engine, "engine", engine)
    if not isinstance(found, Engine):
        raise NotYet(f"The check wants your session or engine, or nothing; it got {shown(engine)}.")
    if not hasattr(found.runner, "kv"):
        return None
    return found if any(r["num_computed_tokens"] for r in found.snapshot()["requests"].values()) else None


def _judge_on_pool(function: Any, engine: Engine | None) -> str:
    """Read keys out of a real KV pool through the learner's slots, and compare with the pool's own `gather`."""
    if engine is not None:
        return _read_keys(function, engine)
    from pagedinfer.config import SamplingParams
    from pagedinfer.testing import tiny_llm

    with tiny_llm(num_blocks=16) as llm:
        for length in (13, 6, 9):
            prompt = {"prompt_token_ids": list(range(1, length + 1))}
            llm.engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        for _ in range(7):
            llm.engine.step()
        return _read_keys(function, llm.engine)


def _read_keys(function: Any, engine: Engine) -> str:
    import torch

    kv: Any = engine.runner.kv  # type: ignore[attr-defined]
    snapshot, count = engine.snapshot(), 0
    for rid, table in snapshot["block_tables"].items():
        num_tokens = snapshot["requests"][rid]["num_computed_tokens"]
        slots = _compare_slots(function, table, 0, num_tokens, engine.config.block_size)
        for layer in range(kv.num_layers):
            keys, _ = kv.gather(layer, table, num_tokens)
            if not torch.equal(kv.slots(layer)[slots][:, 0], keys):
                raise NotYet(f"Through your slots, layer {layer} gives other keys than those of {rid}.")
        count += num_tokens
    return f"In the real pool they lead to the right keys: {count} tokens, {kv.num_layers} layers."


# -- 01.3: grow a table ---------------------------------------------------------------------------------------------


def judge_append(append_token: Any) -> str:
    """The learner's allocator in the engine's place: it must build the engine's own tables, token by token."""
    tokens = 0
    for seed in range(RUNS):
        tokens += _follow(append_token, simulated_recording(seed))
    _judge_empty(append_token)
    return f"{tokens} tokens in {RUNS} runs: your tables equal the engine's after every step."


def _follow(function: Any, recording: Recording) -> int:
    """Replay a run: the learner's function stores each token, the judge gives blocks back as the engine did."""
    size, tables, stored, total = 1, dict[str, list[int]](), dict[str, int](), 0
    free: list[int] = []
    scheduled: dict[str, int] = {}
    for event in recording.events:
        if isinstance(event, Meta):
            size, free = event.config["block_size"], list(range(event.config["num_blocks"]))
        elif isinstance(event, Step):
            scheduled = dict(event.scheduled)
        elif isinstance(event, Free):
            tables[event.rid], stored[event.rid] = [], 0
            free.extend(event.pblks)
        elif isinstance(event, Alloc | Commit):
            # A request that took blocks stores its tokens now; those that needed none, before the step closes.
            due = [event.rid] if isinstance(event, Alloc) else list(scheduled)
            for rid in due:
                count = scheduled.pop(rid)
                table = tables.setdefault(rid, [])
                for _ in range(count):
                    _append_one(function, table, free, stored.get(rid, 0), size)
                    stored[rid] = stored.get(rid, 0) + 1
                total += count
            if isinstance(event, Commit):
                _compare_tables(recording, event.step, tables)
    return total


def _append_one(function: Any, table: list[int], free: list[int], num_tokens: int, size: int) -> None:
    before, before_free = list(table), list(free)
    slot = call(function, table, free, num_tokens, size)
    asked = f"append_token({before}, free={_head(before_free)}, num_tokens={num_tokens}, block_size={size})"
    wanted_table, wanted_free = list(before), list(before_free)
    wanted = append_token(wanted_table, wanted_free, num_tokens, size)
    if plain(table) != wanted_table:
        raise NotYet(
            f"{asked} should leave the table {wanted_table}; yours left {shown(table)}.",
            *_why_table(table, before, size, num_tokens),
        )
    if plain(free) != wanted_free:
        raise NotYet(f"{asked} should leave free={_head(wanted_free)}; yours left {_head(free)}.")
    if slot != wanted:
        raise NotYet(f"{asked} should return slot {wanted}; yours returned {shown(slot)}.")


def _why_table(table: Sequence[int], before: Sequence[int], size: int, num_tokens: int) -> tuple[str, ...]:
    room = len(before) * size - num_tokens
    if len(table) > len(before) and room:
        return (f"The last block has room for {room} more; a new one is too early.",)
    if len(table) == len(before) and not room:
        return (
            f"{num_tokens} tokens fill the table's {count(len(before), 'block')}: this token needs a new one.",
        )
    return ("The block to take is the first of the free list.",)


def _compare_tables(recording: Recording, step: int, tables: dict[str, list[int]]) -> None:
    """Our own replay must agree with the engine: a fault here is ours, not the learner's."""
    state = recording.at(step)
    for rid, request in state.requests.items():
        assert tables.get(rid, []) == request.block_table, f"step {step}: {rid}"


def _judge_empty(function: Any) -> None:
    """With nothing free the table must stay as it is and `OutOfBlocks` must be raised."""
    table, free = [3, 1], list[int]()
    try:
        slot = function(table, free, 8, 4)
    except OutOfBlocks:
        if plain(table) != [3, 1]:
            raise NotYet(
                f"With no free block the table must stay [3, 1]; yours left {shown(table)}."
            ) from None
        return
    except (Exception, SystemExit) as error:
        raise NotYet(
            f"With no free block append_token should raise OutOfBlocks(1, 0), not {type(error).__name__}."
        ) from error
    raise NotYet(
        f"With no free block append_token should raise OutOfBlocks(1, 0); yours returned {shown(slot)}."
    )


def _head(free: Sequence[int]) -> str:
    return f"[{', '.join(map(str, free[:4]))}{', ...' if len(free) > 4 else ''}]"


EXERCISES = (
    Exercise(
        id="01.1",
        title="Predict a block table",
        judge=judge_table,
        hints=(
            "How many tokens has r0 stored after step 8? Its prompt in step 1, then one in each step.",
            "The pool hands blocks out in the order 0, 1, 2, ... Write down, step by step, who fills a block and asks "
            "for the next one.",
            "After step 1 the tables are [0, 1, 2], [3, 4] and [5]. r2 asks first (step 4), then r1 (step 5), then r0 "
            "(step 6).",
        ),
        answer="prediction = [0, 1, 2, 8]",
        why="A block is taken when a token needs it, by whoever needs it first. So the blocks of one request end up "
        "far apart, and the block table is what keeps them in order.",
    ),
    Exercise(
        id="01.2",
        title="From positions to slots",
        judge=judge_slots,
        hints=(
            "For one position: which logical block is it in, and how far into that block?",
            "divmod(position, block_size) gives both. The block table turns the logical block into a block id.",
            "slot = block_table[position // block_size] * block_size + position % block_size, for each position from "
            "start to start + num_tokens - 1.",
        ),
        answer=slot_mapping,
        why="This is the whole address translation of paged attention. The engine does it for every token of a step "
        "at once.",
    ),
    Exercise(
        id="01.3",
        title="Append a token",
        judge=judge_append,
        hints=(
            "When does a table need another block? Compare num_tokens with what the blocks of the table can hold.",
            "The table is full when num_tokens == len(block_table) * block_size. Then take free.pop(0), but look first "
            "whether there is one.",
            "After that, the new token is at position num_tokens: find its slot as in 01.2. No free block: raise "
            "OutOfBlocks(1, 0), with the table untouched.",
        ),
        answer=append_token,
        why="One token at a time, one block at a time, never earlier than needed: so a request wastes less than one "
        "block, however long it grows.",
    ),
)
