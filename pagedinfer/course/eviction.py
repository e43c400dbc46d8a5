"""The cache of exercise 08.4: chats that begin alike, long documents in between, and a learner's rule for evictions.

`eviction_run(rule, seed)` runs the real engine over the simulated runner, with the rule in the block pool.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.session import Session
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.events import Cache, Event, Evict, Free, Hit, Share
from pagedinfer.trace.recording import Recording

__all__ = ["EvictionRun", "IdleBlock", "eviction_run"]

NUM_BLOCKS, BLOCK_SIZE = 40, 8
SYSTEM_TOKENS = 48
REQUESTS = 80
VOCAB = 50_000


@dataclass(frozen=True, slots=True)
class IdleBlock:
    """A cached block that nobody uses.

    Attributes:
        block_id: which one.
        position: its logical block in the prompts that it is part of; 0 for their first tokens.
        hits: how many requests have found it in the cache since it was filled.
        last_used: the step after which nobody used it any more.
    """

    block_id: int
    position: int
    hits: int
    last_used: int


Rule = Callable[[Sequence[IdleBlock]], IdleBlock]


@dataclass(frozen=True, slots=True)
class EvictionRun:
    """A run and what the cache was worth in it.

    Attributes:
        recording: the run.
        found: share of the system prompt's tokens that were in the cache when a chat came; the first chat aside.
        evicted: blocks evicted.
    """

    recording: Recording
    found: float
    evicted: int

    def __repr__(self) -> str:
        return f"{self.found:.0%} of the system prompt's tokens found in the cache, {self.evicted} blocks evicted"


class Watcher:
    """Keeps count of what an `IdleBlock` says, from the engine's events, and asks the rule."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._hits: Counter[int] = Counter()
        self._last_used: dict[int, int] = {}
        self.manager: BlockManager | None = None

    def make(self, config: EngineConfig, bus: EventBus) -> BlockManager:
        """The block manager of an engine whose idle blocks go as the rule says."""
        self.manager = BlockManager(config.num_blocks, config.block_size, bus)
        self.manager.pool.eviction = self._choose
        bus.subscribe(self._look)
        return self.manager

    def _look(self, event: Event) -> None:
        if isinstance(event, Cache):
            self._hits.update({block_id: -self._hits[block_id] for block_id in event.pblks})
        elif isinstance(event, Share):
            self._hits.update(event.pblks)
        elif isinstance(event, Free):
            self._last_used.update(dict.fromkeys(event.pblks, event.step))

    def _choose(self, idle: Sequence[int]) -> int:
        blocks = [self._idle_block(block_id) for block_id in idle]
        chosen = self._rule(blocks)
        return chosen.block_id if isinstance(chosen, IdleBlock) else chosen

    def _idle_block(self, block_id: int) -> IdleBlock:
        assert self.manager is not None
        _, key = self.manager.pool.cache.keys[block_id]
        position, parent = 0, key.parent
        while parent is not None:
            position, parent = position + 1, parent.parent
        return IdleBlock(block_id, position, self._hits[block_id], self._last_used[block_id])


def eviction_run(rule: Rule, seed: int) -> EvictionRun:
    """Chats with one system prompt (6 blocks), and between them 1 to 4 documents that nobody asks for twice.

    `rule` gets the idle cached blocks, least recently used first, and returns the one that goes.
    """
    rng = random.Random(seed)
    config = EngineConfig(
        num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=2, max_num_batched_tokens=64
    )
    runner = SimulatedRunner(vocab_size=VOCAB)
    with Engine(config, runner, make_memory=Watcher(rule).make) as engine, Session(engine) as session:
        system = _text(rng, SYSTEM_TOKENS)
        chats = documents = 0
        for _ in range(REQUESTS):
            if documents:
                prompt, documents = _text(rng, rng.randint(80, 144)), documents - 1
            else:
                prompt, documents = system + _text(rng, rng.randint(9, 24)), rng.randint(1, 4)
                chats += 1
            session.submit({"prompt_token_ids": prompt}, SamplingParams(max_tokens=4, detokenize=False))
            session.run()
        events = session.recording.events
        hits = sum(event.n for event in events if isinstance(event, Hit))
        evicted = sum(len(event.pblks) for event in events if isinstance(event, Evict))
        return EvictionRun(session.recording, hits / (SYSTEM_TOKENS * (chats - 1)), evicted)


def _text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]
