"""The engine's side of a drafter: which requests may have drafts, how many, and what is made of a bad guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from pagedinfer.engine.drafter import Drafter
from pagedinfer.engine.interrupt import interruptible
from pagedinfer.engine.plan import StepPlan, StepResult
from pagedinfer.engine.request import Request
from pagedinfer.errors import describe_error
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.events import Error

__all__ = ["Speculation", "may_speculate"]


def may_speculate(request: Request, num_output_tokens: int) -> bool:
    """Whether drafts may follow a request's first `num_output_tokens` output tokens.

    The runner gives every row of a request one treatment, so drafts need a distribution that depends on the past by way
    of the model alone. Masks (structured outputs), bad words, penalties and logits processors look at the output so
    far, which would differ from row to row; end ids forbidden before `min_tokens` are so for some rows only. Such
    requests get their tokens one by one, the last kind from `min_tokens` on no longer. A bias and allowed ids
    are the same for every row. So are log-probabilities; and a prompt is scored before its first output token, when
    nothing is drafted yet. Requests that carry only lengths have nothing to guess from.
    """
    how = request.params
    changes = request.rules is not None or how.has_penalties or how.logits_processors
    return bool(request.token_ids) and not changes and num_output_tokens >= how.min_tokens


class Speculation:
    """Asks a drafter about the right requests, and trusts it with nothing.

    Attributes:
        drafter: who guesses; None for no speculation.
        num_draft_tokens: drafts that steps have computed.
        num_accepted_tokens: those that became output.
    """

    def __init__(self, drafter: Drafter | None, vocab_size: int, bus: EventBus) -> None:
        self.drafter = drafter
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self._vocab_size = vocab_size
        self._bus = bus

    def count(self, plan: StepPlan, result: StepResult) -> None:
        """Note what came of the drafts of a step that is about to be committed."""
        for item in plan.scheduled:
            if item.draft_token_ids:
                self.num_draft_tokens += len(item.draft_token_ids)
                self.num_accepted_tokens += max(0, len(result.tokens.get(item.request_id, ())) - 1)

    def propose(
        self, requests: Mapping[str, Request], result: StepResult, ends: Mapping[str, object]
    ) -> dict[str, list[int]]:
        """Drafts to follow each request's new tokens, of those that go on. At most the tokens left to it, less one:
        a step gives one token more than it accepts drafts.
        """
        drafts: dict[str, list[int]] = {}
        if self.drafter is None:
            return drafts
        for rid, new in result.tokens.items():
            request = requests[rid]
            num_output_tokens = request.num_output_tokens + len(new)
            limit = request.max_tokens - num_output_tokens - 1
            goes_on = limit > 0 and rid not in ends and rid not in result.errors
            if goes_on and may_speculate(request, num_output_tokens):
                try:
                    with interruptible():
                        guess = list(islice(self.drafter.propose(request, new, limit), limit))
                        self._check(guess)
                except BaseException as error:  # the plan is open: whatever it is, the step must go on
                    self._report(f"no drafts for {rid}: {describe_error(error)}")
                else:
                    drafts |= {rid: guess} if guess else {}
        return drafts

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        if self.drafter is None:
            return
        try:
            self.drafter.forget(request_id)
        except Exception as error:
            self._report(f"forgetting {request_id}: {describe_error(error)}")

    def _check(self, guess: Sequence[object]) -> None:
        for token_id in guess:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise TypeError(f"{token_id!r} is a {type(token_id).__name__}; a draft is an integer")
            if not 0 <= token_id < self._vocab_size:
                raise ValueError(f"{token_id} is outside the vocabulary (0 to {self._vocab_size - 1})")

    def _report(self, what: str) -> None:
        if self._bus.subs:
            self._bus.emit(Error("drafter", what))
