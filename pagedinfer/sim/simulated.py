"""The simulated runner: tokens by a rule, no model. The scheduler and the pool above it are the real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from pagedinfer.config import EngineConfig
from pagedinfer.engine.plan import BlockOp, ScheduledRequest, StepPlan, StepResult

__all__ = ["SimulatedRunner", "counting_rule"]

TokenRule = Callable[[ScheduledRequest], int]


def counting_rule(vocab_size: int) -> TokenRule:
    """A rule that gives each request its own repeatable row of tokens, whatever its batch looks like."""

    def rule(item: ScheduledRequest) -> int:
        return (item.seed * 31 + item.output_index * 7 + 1) % vocab_size

    return rule


class SimulatedRunner:
    """Implements `engine.protocols.Runner`: one token per sampling request, from `rule`, and one more for each draft
    that is what the rule gives in its place.

    A rule has no logits. What only shapes them (temperature, filters, penalties, bias) plays no part; what promises
    something about the output (log-probabilities, allowed ids, masks, structured outputs) the engine refuses.

    Attributes:
        has_logits: False.
        vocab_size: token ids are below this.
        num_steps: plans executed so far.
        num_moved: blocks copied so far, by kind of block operation.

    Args:
        vocab_size: ids that the rule may give.
        rule: the token of a request, `counting_rule` if left out.
        bytes_per_block: what a copied block counts for; there is no memory that holds it.
    """

    has_logits = False

    def __init__(
        self, *, vocab_size: int = 256, rule: TokenRule | None = None, bytes_per_block: int = 0
    ) -> None:
        self.vocab_size = vocab_size
        self.num_steps = 0
        self.num_moved: Counter[str] = Counter()
        self._bytes_per_block = bytes_per_block
        self._rule = rule or counting_rule(vocab_size)

    def execute(self, plan: StepPlan) -> StepResult:
        """Tokens for the plan's sampling requests; ids that `forbidden_token_ids` names are stepped over."""
        self.num_steps += 1
        tokens = {item.request_id: self._tokens(item) for item in plan.scheduled if item.samples}
        return StepResult(tokens, op_bytes=self._count(plan.ops))

    def run_ops(self, ops: Sequence[BlockOp]) -> tuple[int, float]:
        """Count block operations. Returns the bytes they stand for, and 0.0 seconds."""
        return self._count(ops), 0.0

    def _count(self, ops: Sequence[BlockOp]) -> int:
        for op in ops:
            self.num_moved[op.kind] += len(op.pairs)
        return sum(len(op.pairs) for op in ops) * self._bytes_per_block

    def take_back(self, plan: StepPlan) -> None:
        """Nothing to take back: no block holds anything."""

    def resize(self, num_blocks: int) -> None:
        """Nothing to make larger or smaller."""

    def _tokens(self, item: ScheduledRequest) -> tuple[int, ...]:
        if not item.draft_token_ids:
            return (self._token(item),)
        tokens: list[int] = []
        for draft in (*item.draft_token_ids, None):  # nothing equals the end
            tokens.append(self._token(_after(item, len(tokens))))
            if tokens[-1] != draft:
                break
        return tuple(tokens)

    def _token(self, item: ScheduledRequest) -> int:
        token = self._rule(item)
        while token in item.forbidden_token_ids:
            token = (token + 1) % self.vocab_size
        return token

    def twin(self, config: EngineConfig) -> SimulatedRunner:
        """Another of its kind; no setting of an engine matters to it."""
        return SimulatedRunner(
            vocab_size=self.vocab_size, rule=self._rule, bytes_per_block=self._bytes_per_block
        )

    def close(self) -> None:
        """Nothing to free."""


def _after(item: ScheduledRequest, num_drafts: int) -> ScheduledRequest:
    """The request as it would be scheduled without drafts, if the first `num_drafts` of them were known tokens."""
    return replace(
        item,
        num_tokens=item.num_tokens - len(item.draft_token_ids) + num_drafts,
        output_index=item.output_index + num_drafts,
        token_ids=[*item.token_ids, *item.draft_token_ids[:num_drafts]],
        draft_token_ids=(),
    )
