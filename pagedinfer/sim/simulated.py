"""The simulated runner: tokens by a rule, no model. The scheduler and the pool above it are the real ones."""

from __future__ import annotations

from collections.abc import Callable

from pagedinfer.engine.plan import ScheduledRequest, StepPlan, StepResult

__all__ = ["SimulatedRunner", "counting_rule"]

TokenRule = Callable[[ScheduledRequest], int]


def counting_rule(vocab_size: int) -> TokenRule:
    """A rule that gives each request its own repeatable row of tokens, whatever its batch looks like."""

    def rule(item: ScheduledRequest) -> int:
        return (item.seed * 31 + item.output_index * 7 + 1) % vocab_size

    return rule


class SimulatedRunner:
    """Implements `engine.protocols.Runner`: one token per sampling request, from `rule`.

    A rule has no logits. What only shapes them (temperature, filters, penalties, bias) plays no part; what promises
    something about the output (log-probabilities, allowed ids, masks, structured outputs) the engine refuses.

    Attributes:
        has_logits: False.
        vocab_size: token ids are below this.
        num_steps: plans executed so far.
    """

    has_logits = False

    def __init__(self, *, vocab_size: int = 256, rule: TokenRule | None = None) -> None:
        self.vocab_size = vocab_size
        self.num_steps = 0
        self._rule = rule or counting_rule(vocab_size)

    def execute(self, plan: StepPlan) -> StepResult:
        """Tokens for the plan's sampling requests; ids that `forbidden_token_ids` names are stepped over."""
        self.num_steps += 1
        return StepResult({item.request_id: (self._token(item),) for item in plan.scheduled if item.samples})

    def _token(self, item: ScheduledRequest) -> int:
        token = self._rule(item)
        while token in item.forbidden_token_ids:
            token = (token + 1) % self.vocab_size
        return token

    def close(self) -> None:
        """Nothing to free."""
