"""A request: a few counts that say all the scheduler needs, and the token ids that only a runner looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pagedinfer.config import SamplingParams
from pagedinfer.engine.look import RequestView
from pagedinfer.engine.plan import TokenRules
from pagedinfer.errors import readable
from pagedinfer.memory.keys import BlockKey

__all__ = ["BACKGROUND", "INTERACTIVE", "Request", "Status"]

INTERACTIVE, BACKGROUND = 0, 10
"""Priorities by name; lower comes in sooner, as in vLLM."""


class Status(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # in `waiting` again, without keys and values
    SWAPPED = "swapped"  # its keys and values are in the host pool
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its growing output.

        0          num_computed_tokens       num_tokens
        |---- keys and values written ----|-- to do --|
        |-- num_prompt_tokens --|-- num_output_tokens -|

    Prefill, decode, a chunk and the way back from preemption are one thing: `num_computed_tokens` catching up with
    `num_tokens` (the rule of vLLM's V1 scheduler).

    Attributes:
        request_id: unique among live requests.
        num_prompt_tokens: tokens of the prompt.
        max_tokens: the most output tokens, already cut to the context's end.
        params: how to sample; the scheduler does not look.
        token_ids: prompt and output ids; empty for requests that carry only lengths (simulation, re-runs).
        priority: lower comes in sooner, under order "priority"; 0 otherwise.
        seed: seed of the request's draws.
        end_token_ids: ids that end the output; not to be sampled before `params.min_tokens`.
        rules: what else the sampler needs to know; the scheduler does not look.
        key_ids: ids of the prompt's full blocks, for requests without token ids (a trace's, a recording's).
        tenant: whose request it is, for fair shares and limits.
        deadline: the time by which it should end, for order "deadline". expires: the time at which it is given up.
        parent: the live request that computes the same prompt and whose blocks it shares (`n > 1`); "" for none.
        retain: ranges of the prompt that stay cached longer, or less long: (first token, end, priority, until).
        salt: the cache's tag; requests share blocks only with others of the same.
        arrival: number of the submission, set by the scheduler. arrived_at: its time.
        num_tokens: prompt and output tokens so far.
        num_computed_tokens: tokens whose keys and values are written (or planned in an open step).
        num_preemptions: how often it lost its place.
        num_cached_tokens: tokens found in the prefix cache when it was first admitted; -1 before.
        cache_note: why they were not more.
        keys: keys of the full blocks among the known tokens; empty without prefix caching.
        draft_token_ids: tokens guessed to come next, to be computed and checked in its next step.
        order_key: its place among the waiting, as the policy gave it.
        publish_at: written tokens from which another block is full.
        shares_with: the request that `parent` named when this one came; the name may be another's later.
        view: what a policy sees of it.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    token_ids: list[int] = field(default_factory=list)
    priority: int = 0
    seed: int = 0
    end_token_ids: tuple[int, ...] = ()
    rules: TokenRules | None = None
    key_ids: Sequence[int] = ()
    tenant: str = ""
    deadline: float | None = None
    expires: float | None = None
    parent: str = ""
    retain: tuple[tuple[int, int, int, float], ...] = ()
    salt: str = ""
    arrival: int = -1
    arrived_at: float = 0.0
    status: Status = Status.WAITING
    num_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = -1
    cache_note: str = ""
    keys: list[BlockKey] = field(init=False, default_factory=list)
    draft_token_ids: Sequence[int] = ()
    order_key: Any = None
    publish_at: int = 0
    shares_with: Request | None = None
    view: RequestView = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens
        self.view = RequestView(self)

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Known and guessed tokens whose keys and values are still to compute."""
        return self.num_tokens + len(self.draft_token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token (and guesses) are to be computed."""
        return self.num_tokens - self.num_computed_tokens == 1

    @property
    def max_total_tokens(self) -> int:
        """Tokens that it may grow to: prompt and `max_tokens`."""
        return self.num_prompt_tokens + self.max_tokens

    def fork(self, request_id: str, *, seed: int = 0, rules: TokenRules | None = None) -> Request:
        """A copy as it stands, under another id: everything that a caller asked of it, and its tokens so far."""
        twin = Request(
            request_id, self.num_prompt_tokens, self.max_tokens, self.params, list(self.token_ids), self.priority,
            seed, self.end_token_ids, rules, tenant=self.tenant, deadline=self.deadline, expires=self.expires,
            retain=self.retain, salt=self.salt,
        )  # fmt: skip
        twin.num_tokens = self.num_tokens
        return twin

    def append(self, new_token_ids: Sequence[int]) -> None:
        """Add output tokens."""
        if self.token_ids:
            self.token_ids.extend(new_token_ids)
        self.num_tokens += len(new_token_ids)

    def state(self) -> dict[str, int | str]:
        """The counts as plain data, for snapshots."""
        return {
            "status": str(self.status),
            "num_prompt_tokens": self.num_prompt_tokens,
            "max_tokens": self.max_tokens,
            "priority": self.priority,
            "arrival": self.arrival,
            "num_tokens": self.num_tokens,
            "num_computed_tokens": self.num_computed_tokens,
            "num_preemptions": self.num_preemptions,
            "num_cached_tokens": self.num_cached_tokens,
            "num_draft_tokens": len(self.draft_token_ids),
            "tenant": self.tenant,
        }

    def __repr__(self) -> str:
        return readable(
            f"Request({self.request_id}, {self.status}, prompt {self.num_prompt_tokens}, output "
            f"{self.num_output_tokens} of {self.max_tokens}, computed {self.num_computed_tokens} of {self.num_tokens})"
        )

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(
            f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>" for name, value in self.state().items()
        )
        caption = f"<caption>Request {escape(self.request_id)}</caption>"
        return readable(f"<table>{caption}<tbody>{rows}</tbody></table>")
