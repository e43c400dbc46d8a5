"""The step's values: what the scheduler wants done (`StepPlan`) and what came of it (`StepResult`).

Both are plain data. A notebook can print a plan before it runs; a test can compare it with a literal; a runner
needs nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pagedinfer.config import SamplingParams, TokenMask
from pagedinfer.errors import RunnerError, count, readable
from pagedinfer.memory.ops import BlockOp

__all__ = ["BlockOp", "ScheduledRequest", "StepPlan", "StepResult", "TokenLogprobs", "TokenRules"]

TokenLogprobs: TypeAlias = Mapping[int, tuple[float, int]]
"""Token id -> (log-probability, rank from 1), most likely first, the token that came among them."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What was made of a request's parameters, once, when it came in.

    Attributes:
        masks: hooks that say which tokens may follow; all of them must agree.
        bad_words: rows of token ids; the last of a row may not follow when the output ends with the others.
    """

    masks: tuple[TokenMask, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: compute `num_tokens` tokens from position `start` on.

    Attributes:
        request_id: whose tokens they are.
        start: position of the first token, equal to `num_computed_tokens` before this step.
        num_tokens: tokens to compute, at least 1.
        samples: True when the last of them is the request's last known token, so a new token is sampled from it.
            False for a prefill chunk that ends before.
        output_index: index of the output token that would be sampled, 0 for the first.
        is_prefill: True when more than the newest token was still to compute, however much of it fits this step.
        new_block_ids: blocks handed out for this step, appended to the request's table.
        block_table: the request's whole table, read-only; block `i` holds tokens `i * block_size` and on.
        token_ids: the request's token ids, prompt and output, read-only; empty for requests that carry only lengths.
        params: how to sample.
        seed: the request's sampling seed.
        forbidden_token_ids: ids that must not be sampled now (end ids before `min_tokens`).
        num_prompt_tokens: how many of `token_ids` are the prompt; the others are output, also after a preemption.
        rules: what else the sampler needs to know, opaque to the core.
        draft_token_ids: guessed tokens that follow `token_ids`; the last `len(draft_token_ids)` of the `num_tokens`
            computed are theirs, and each asks for one more sampled token. Only where `samples`.
        group_tables: the tables of groups 1 and on (layers of another kind), -1 where a window has left a block.
    """

    request_id: str
    start: int
    num_tokens: int
    samples: bool
    output_index: int
    is_prefill: bool
    new_block_ids: tuple[int, ...]
    block_table: Sequence[int] = field(repr=False, compare=False)
    token_ids: Sequence[int] = field(repr=False, compare=False)
    params: SamplingParams = field(repr=False, compare=False)
    seed: int = field(repr=False, compare=False)
    forbidden_token_ids: tuple[int, ...] = field(default=(), repr=False, compare=False)
    num_prompt_tokens: int = field(default=0, repr=False, compare=False)
    rules: TokenRules | None = field(default=None, repr=False, compare=False)
    draft_token_ids: Sequence[int] = field(default=(), compare=False)
    group_tables: Sequence[Sequence[int]] = field(default=(), repr=False, compare=False)

    @property
    def end(self) -> int:
        """Number of tokens with keys and values once the step has run."""
        return self.start + self.num_tokens


@dataclass(slots=True)
class StepPlan:
    """What one step does. Open until `Scheduler.commit` or `Scheduler.cancel`.

    Attributes:
        step: number of the step, counted from 1.
        now: the time given to `schedule`, in the clock of the caller (steps by default).
        token_budget: the most tokens the step may compute (`max_num_batched_tokens`).
        scheduled: the requests of the batch, in running order.
        preempted: requests that lost their blocks in this step.
        exhausted: requests that can never grow within the pool, with the sentence why; `commit` ends them.
        reasons: for each running request left out, and for the head of `waiting` (the others wait behind it), the
            sentence why.
        ops: block operations, to be run in order before the forward pass.
        overwritten: blocks that lose their content to this plan and get it back if it is cancelled: those that a
            cached prefix or a request gave up in it and that it hands out again. The runner keeps a copy.
    """

    step: int
    now: float
    token_budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    exhausted: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    ops: list[BlockOp] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the whole batch, at most `token_budget`."""
        return sum(item.num_tokens for item in self.scheduled)

    def __bool__(self) -> bool:
        """Whether there is anything to run or to end."""
        return bool(self.scheduled or self.exhausted or self.ops)

    def check_result(self, result: StepResult, vocab_size: int) -> None:
        """Refuse a runner's answer that does not fit the plan, before it changes anything.

        Raises:
            RunnerError: the answer or a part of it is of another type, speaks of requests outside the plan, or has
                ids outside the vocabulary; a request that samples got neither a token nor an error, or another one
                got a token; tokens other than the last are not the request's drafts.
        """
        self._check_form(result, vocab_size)
        sampling = {item.request_id for item in self.scheduled if item.samples}
        extra = sorted(map(str, result.tokens.keys() - sampling))
        silent = sorted(rid for rid in sampling if not result.tokens.get(rid) and rid not in result.errors)
        if extra or silent:
            what = f"tokens for {', '.join(extra)}, which did not sample" if extra else ""
            what += " and " if extra and silent else ""
            what += f"neither a token nor an error for {', '.join(silent)}" if silent else ""
            raise RunnerError(
                f"The runner's answer to step {self.step} has {what}; it must hold a token or an error for each "
                "request of the plan with `samples`, and for no other."
            )
        self._check_drafts(result)

    def _check_form(self, result: StepResult, vocab_size: int) -> None:
        answer = f"The runner's answer to step {self.step}"
        if not isinstance(result, StepResult):
            raise RunnerError(f"{answer} is a {type(result).__name__}; it must be a StepResult.")
        planned = {item.request_id for item in self.scheduled}
        for name in ("tokens", "errors", "logprobs", "prompt_logprobs"):
            if not isinstance(part := getattr(result, name), Mapping):
                raise RunnerError(f"{answer} has {name} as a {type(part).__name__}; it must be a mapping.")
            if name != "tokens" and (strangers := sorted(map(str, part.keys() - planned))):
                raise RunnerError(f"{answer} has {name} for {', '.join(strangers)}, outside its plan.")
        for rid, why in result.errors.items():
            if not isinstance(why, str):
                raise RunnerError(f"{answer} has a {type(why).__name__} as error of {rid}; give a sentence.")
        for rid, row in result.tokens.items():
            if not isinstance(row, list | tuple):
                raise RunnerError(
                    f"{answer} has a {type(row).__name__} as tokens of {rid}; give a list of ids."
                )
            for token_id in row:
                if (
                    isinstance(token_id, bool)
                    or not isinstance(token_id, int)
                    or not 0 <= token_id < vocab_size
                ):
                    raise RunnerError(
                        f"{answer} has {token_id!r} among the tokens of {rid}; ids are integers from 0 to "
                        f"{vocab_size - 1}."
                    )

    def _check_drafts(self, result: StepResult) -> None:
        """The keys and values of all new tokens but the last were computed in this step: as those of the drafts."""
        for item in self.scheduled:
            new, drafts = result.tokens.get(item.request_id, ()), item.draft_token_ids
            if len(new) > 1 and list(new[:-1]) != list(drafts[: len(new) - 1]):
                raise RunnerError(
                    f"The runner's answer to step {self.step} has {list(new)} as tokens of {item.request_id} with "
                    f"drafts {list(drafts)}; it must hold drafts from the first on, or none, and one token after those."
                )

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                item.request_id,
                ("prefill" if item.is_prefill else "decode")
                + ("" if item.samples else " (chunk)")
                + (f" ({count(len(item.draft_token_ids), 'draft')})" if item.draft_token_ids else ""),
                f"{item.start}..{item.end - 1}",
                ", ".join(map(str, item.new_block_ids)) or "-",
            )
            for item in self.scheduled
        ]

    def __str__(self) -> str:
        head = f"step {self.step}: {self.num_tokens} of {self.token_budget} tokens, {len(self.scheduled)} requests"
        rows = [f"  {rid}: {what} tokens {span}, new blocks {new}" for rid, what, span, new in self._rows()]
        rows += [f"  {rid}: preempted" for rid in self.preempted]
        rows += [f"  {rid}: ends: {why}" for rid, why in self.exhausted.items()]
        rows += [f"  {rid}: waits: {why}" for rid, why in self.reasons.items()]
        return readable("\n".join([head, *rows]))

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in self._rows()
        )
        notes = [f"{rid} preempted" for rid in self.preempted]
        notes += [f"{rid} ends: {why}" for rid, why in self.exhausted.items()]
        notes += [f"{rid} waits: {why}" for rid, why in self.reasons.items()]
        return readable(
            f"<table><caption>Step {self.step}: {self.num_tokens} of {self.token_budget} tokens</caption>"
            "<thead><tr><th>request</th><th>work</th><th>tokens</th><th>new blocks</th></tr></thead>"
            f"<tbody>{rows}</tbody></table>" + "".join(f"<p>{escape(note)}</p>" for note in notes)
        )


@dataclass(slots=True)
class StepResult:
    """What a runner returns for a plan.

    Attributes:
        tokens: new token ids per request that samples: one, or with drafts those accepted and one more; none where
            its row failed.
        errors: requests whose row failed (for example NaN logits), with a sentence; they end, the others go on.
        logprobs: per request and new token, token id -> (log-probability, rank); only where asked for.
        prompt_logprobs: per request the position of the first prompt token scored, and the same for it and the
            prompt tokens that follow; only where asked for. A chunk that is computed again is scored again.
        seconds: wall time of the forward pass, 0.0 where it has no meaning.
        op_seconds: wall time of the block operations.
        op_bytes: bytes that the block operations copied.
    """

    tokens: Mapping[str, Sequence[int]]
    errors: Mapping[str, str] = field(default_factory=dict)
    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[int, Sequence[TokenLogprobs]]] = field(default_factory=dict)
    seconds: float = 0.0
    op_seconds: float = 0.0
    op_bytes: int = 0
