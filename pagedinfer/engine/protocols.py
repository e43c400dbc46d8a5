"""What the engine asks of the parts that it is given: a runner and, for text, a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from pagedinfer.engine.plan import BlockOp, StepPlan, StepResult

__all__ = ["Runner", "Tokenizer"]


@runtime_checkable
class Runner(Protocol):
    """Computes a step: the torch runner with a model, the simulated runner with a rule.

    A runner that has no logits says so with `has_logits = False`; the engine then refuses what only logits can give.
    """

    vocab_size: int
    """Token ids are below this; the engine refuses others before a runner sees them."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan: its block operations, then the forward pass. New tokens for each request with `samples`.

        May raise: the operations done so far are taken back, and the plan is cancelled. A plan may have operations
        and no requests.
        """
        ...

    def take_back(self, plan: StepPlan) -> None:
        """The plan is cancelled after `execute`: blocks hold again what they held before.

        Harmless when `execute` never ran, or has taken its work back itself. Only for the plan executed last.
        """
        ...

    def run_ops(self, ops: Sequence[BlockOp]) -> tuple[int, float]:
        """Block operations between two steps (compaction, a new pool size): all of them, or none and an error.

        Returns the bytes copied and the seconds it took.
        """
        ...

    def resize(self, num_blocks: int) -> None:
        """Make the pool larger or smaller, between two steps. Blocks below `num_blocks` keep their content.

        May raise `ConfigError` for want of memory: the pool is as it was.
        """
        ...

    def close(self) -> None:
        """Free what the runner holds, the KV pool first. Harmless when called twice."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back.

    One with byte fallback (a bad byte changes the text of the byte tokens before it) names, as `bad_byte_id`, a token
    that does so: its one byte is no character. See `engine.text`.
    """

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens` what the model expects around a prompt (a begin token)."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no text become the replacement mark."""
        ...
