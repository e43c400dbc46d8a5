"""Exercises of notebook 08: what a cache finds, who copies before a write, a fault to mend, a rule to evict by."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.course.bundled import bundled_prompts, bundled_recording
from pagedinfer.course.eviction import EvictionRun, IdleBlock, eviction_run
from pagedinfer.course.exercise import Exercise, NotStarted, NotYet, integers, shown
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import RecordingError
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.journal import Journal
from pagedinfer.session import Session
from pagedinfer.sim.shadow import ShadowFault, ShadowRunner
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.events import Copy, Hit
from pagedinfer.trace.replay import fold

__all__ = ["EXERCISES", "copies_of"]

BLOCK_SIZE = 8
LENGTHS, ANSWERS = (13, 16, 17), 4
"""The prompts of exercise 08.2, and how many answers each gets."""
RUNS = 10
SEEDS, GOAL = (3, 5), 0.8
"""The runs of exercise 08.4 and the share of the system prompt that a rule must find in them."""

MENDED = """
class Mended(BlockManager):
    def _copy_on_write(self, rid, group, logical, new):
        table = self.table(rid, group)
        old, table[logical] = table[logical], new
        if self.journal is not None:
            self.journal.record(lambda: table.__setitem__(logical, old))
        self.ops.append(BlockOp("copy", ((old, new),)))
        if self._bus.subs:
            self._bus.emit(Copy(rid, group, logical, ((old, new),)))
        self.pool.drop(old)
"""

EVICT = """
def evict(idle):
    return min(idle, key=lambda block: (block.hits, block.last_used))
"""


# -- 08.1: what the cache finds -------------------------------------------------------------------------------------


def judge_cached(r1: Any, r3: Any) -> str:
    """Tokens that r1 and r3 of the bundled recording found in the cache."""
    recording = bundled_recording("shared_prompt")
    found = {event.rid: event.n for event in recording.events if isinstance(event, Hit)}
    prompts = bundled_prompts("shared_prompt")
    same = _common(prompts["r1"], prompts["r0"])
    if r1 == same:
        raise NotYet(
            f"r1: {same} tokens are the same, but tokens are not shared one by one: only whole blocks are, "
            f"and block {same // BLOCK_SIZE} holds others, too."
        )
    if r1 != found["r1"]:
        raise NotYet(
            f"r1: not {shown(r1)}. Compare the prompts of r0 and r1 from the start, block by block, up to the first "
            "block that differs."
        )
    length = len(prompts["r3"])
    if r3 == found["r1"]:
        raise NotYet("r1 is right. r3: when it comes, not only the blocks of r0 are in the cache.")
    if r3 in (length, length - 1):
        raise NotYet(
            f"r1 is right. r3: its {length} tokens do not fill their last block, and only full blocks are cached."
        )
    if r3 != found["r3"]:
        raise NotYet(
            f"r1 is right. r3: not {shown(r3)}. Who asked the same before, and which blocks are full?"
        )
    return f"r1 found {found['r1']} tokens in the cache, r3 {found['r3']} of its {length}."


def _common(a: list[str], b: list[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- 08.2: who copies -----------------------------------------------------------------------------------------------


def copies_of(prompt_tokens: int, answers: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that are copied when a prompt gets several answers."""
    config = EngineConfig(num_blocks=64, block_size=block_size)
    with Engine(config, SimulatedRunner()) as engine, Session(engine) as session:
        params = SamplingParams(n=answers, max_tokens=4, detokenize=False)
        session.submit({"prompt_token_ids": list(range(prompt_tokens))}, params)
        session.run()
        return sum(len(event.pairs) for event in session.recording.events if isinstance(event, Copy))


def judge_copies(copies: Any) -> str:
    """Copies for prompts of `LENGTHS` tokens with `ANSWERS` answers."""
    got = integers(copies, len(LENGTHS) + 1)
    if got is None or len(got) != len(LENGTHS):
        raise NotYet(
            f"Give {len(LENGTHS)} numbers, one for each prompt, like (1, 2, 3); yours is {shown(copies)}."
        )
    wanted = [copies_of(length, ANSWERS) for length in LENGTHS]
    for length, mine, theirs in zip(LENGTHS, got, wanted, strict=True):
        if mine == theirs:
            continue
        if mine == ANSWERS:
            advice = "The first answer's request filled that block itself and keeps it; who else needs one?"
        elif length % BLOCK_SIZE == 0:
            advice = "Each of the others computes the prompt's last token itself. Whose block is that in?"
        elif length % BLOCK_SIZE == 1:
            advice = f"The others share {length - 1} tokens. Do these end in the middle of a block?"
        else:
            advice = "Who writes first into the block that is partly filled, and who has to leave it?"
        raise NotYet(f"A prompt of {length} tokens: not {mine}.", advice)
    return f"Prompts of {', '.join(map(str, LENGTHS))} tokens: {', '.join(map(str, wanted))} copies."


# -- 08.3: mend the copy --------------------------------------------------------------------------------------------


def judge_mended(mended: Any) -> str:
    """The learner's block manager under random traffic: every read is checked, and a copy taken back."""
    if not (isinstance(mended, type) and issubclass(mended, BlockManager)):
        raise NotYet(f"The check wants your class, made from BlockManager; it got {shown(mended)}.")
    _attempt(lambda: _take_back(mended))
    copies = sum(_run_with(mended, seed) for seed in range(RUNS))
    assert copies > RUNS, "the traffic should copy"
    return f"{copies} copies in {RUNS} runs: every read found its own token, and no block was lost."


def _run_with(mended: type[BlockManager], seed: int) -> int:
    """One run; returns its copies."""
    rng = random.Random(seed)
    config = EngineConfig(
        num_blocks=rng.randint(12, 24),
        block_size=rng.choice((2, 4, 8)),
        max_num_seqs=6,
        max_num_batched_tokens=32,
    )

    def make_memory(config: EngineConfig, bus: Any) -> BlockManager:
        return mended(config.num_blocks, config.block_size, bus)

    engine = Engine(config, ShadowRunner(config.num_blocks, config.block_size), make_memory=make_memory)
    session = Session(engine)
    for number in range(rng.randint(3, 6)):
        params = SamplingParams(
            n=rng.randint(1, 4), seed=number, max_tokens=rng.randint(2, 9), detokenize=False
        )
        session.submit({"prompt_token_ids": [rng.randrange(4) for _ in range(rng.randint(2, 12))]}, params)
    while engine.has_unfinished():
        _attempt(lambda: _step(session))
    return sum(len(event.pairs) for event in session.recording.events if isinstance(event, Copy))


def _attempt(do: Callable[[], object]) -> None:
    """Run a learner's code within the engine; what it raises, or breaks, becomes a sentence."""
    try:
        do()
    except NotYet:
        raise
    except NotImplementedError:
        raise NotStarted("_copy_on_write is still the stub: write its body.") from None
    except ShadowFault as fault:
        raise NotYet(f"In {fault}", "So somebody's tokens are not where its block table says.") from fault
    except AssertionError as error:
        raise NotYet(f"The books do not add up: {error}.") from error
    except (Exception, SystemExit) as error:
        raise NotYet(f"_copy_on_write raised {type(error).__name__}: {error}") from error


def _step(session: Session) -> None:
    session.step()
    session.engine.check()
    try:
        told = fold(session.recording.events).snapshot()
    except RecordingError as error:
        raise NotYet("The recording does not fit what happened: is the event right?", str(error)) from error
    if told != session.engine.snapshot():
        raise NotYet("The recording tells something else than what happened: is the event there, and right?")


def _take_back(mended: type[BlockManager]) -> None:
    """A copy within a plan that is cancelled: nothing may be left of it."""
    manager = mended(8, 4, EventBus())
    manager.allocate("a", 6)
    manager.fork("a", "b", 6)
    before = manager.snapshot()
    manager.journal = journal = Journal()
    manager.allocate("b", 7, start=6)
    journal.undo()
    manager.journal = None
    if manager.snapshot() != before:
        raise NotYet(
            "A plan with a copy was cancelled, and the block tables are not as they were before it.",
            "What is changed while a plan is made must be told to the journal, with the way back.",
        )


# -- 08.4: which block goes -----------------------------------------------------------------------------------------


def judge_eviction(evict: Any) -> str:
    """The learner's rule in the engine's pool, on two runs that the notebook does not show."""
    if not callable(evict):
        raise NotYet(f"The check wants your function, and got {shown(evict)}.")
    results = []
    for seed in SEEDS:
        lru = eviction_run(lambda idle: idle[0], seed)
        mine = _evict_with(evict, seed)
        results.append(mine.found)
        if mine.found < GOAL:
            than = "no better than" if mine.found <= lru.found else "better than"
            raise NotYet(
                f"Seed {seed}: with your rule {mine.found:.0%} of the system prompt's tokens were found; the goal is "
                f"{GOAL:.0%}. That is {than} the least recently used block's {lru.found:.0%}.",
                "Which blocks will never be asked for again, and how can one tell?",
            )
    found = " and ".join(f"{share:.0%}" for share in results)
    return f"{found} of the system prompt's tokens were found, on two runs that you had not seen."


def _evict_with(evict: Any, seed: int) -> EvictionRun:
    stubs = []

    def rule(idle: Any) -> IdleBlock:
        try:
            chosen: IdleBlock = evict(idle)
        except NotImplementedError:
            stubs.append(True)
            raise
        except SystemExit as error:
            raise RuntimeError(f"it left with {error!r}") from None
        return chosen

    mine = eviction_run(rule, seed)
    if stubs:
        raise NotStarted("evict is still the stub: write its body.")
    if errors := mine.recording.errors:
        what = errors[0].what.removeprefix("_choose: ").split("; the least")[0]
        raise NotYet(f"In step {errors[0].step} your rule gave no block that could go: {what}.")
    return mine


EXERCISES = (
    Exercise(
        id="08.1",
        title="What is in the cache?",
        judge=judge_cached,
        hints=(
            "Go through both prompts from the start. The first token that differs ends what can be shared.",
            "Blocks are shared whole, or not at all: how many blocks hold no token that differs?",
            "r1: five blocks of 8. r3 asks word for word what r1 asked, so all of r1's full prompt blocks are there; "
            "54 // 8 = 6.",
        ),
        answer="r1, r3 = 40, 48",
        why="A cached block stands for its 8 tokens and for all tokens before them. So a look-up goes block by block "
        "from the start and ends at the first that is not there.",
    ),
    Exercise(
        id="08.2",
        title="Who copies?",
        judge=judge_copies,
        hints=(
            "The first request computes the prompt. The others share all of it but the last token, whose output they "
            "need: they share 12, 15 and 16 tokens.",
            "12 and 15 tokens end in the middle of block 1: whoever writes there needs a block of its own. 16 tokens "
            "fill two blocks, and the next token goes into a new one.",
            "Three of the four copy, or none does.",
        ),
        answer="copies = 3, 3, 0",
        why="Full blocks are never written again, so they can be shared for good. A copy is needed only where a "
        "shared block is written, and that is at most the last one of what is shared.",
    ),
    Exercise(
        id="08.3",
        title="Mend the copy",
        judge=judge_mended,
        hints=(
            "The shadow says that a slot holds nothing. Which block was new, and held nothing, before the copy?",
            "Tables, reference counts and events are right. So it is what the runner is told to do.",
            "A block operation names its source first: (old, new).",
        ),
        answer=MENDED,
        why="One swapped pair, no crash, and every answer is nonsense. That is why the engine's own tests run under a "
        "shadow that knows what each slot must hold.",
    ),
    Exercise(
        id="08.4",
        title="Which block goes?",
        judge=judge_eviction,
        hints=(
            "A long document leaves many blocks behind, all used more recently than the system prompt. Will anybody "
            "ask for them again?",
            "The system prompt's blocks have been found before: look at .hits.",
            "Take the block with the fewest hits, and of equals the one that was used least recently.",
        ),
        answer=EVICT,
        why="The least recently used block is a good guess until one long scan comes through. Counting hits tells "
        "what is asked for again from what is read once. (What is counted for ever becomes stale: real caches let "
        "counts fade.)",
    ),
)
