"""A request: five counts that say all the scheduler needs, and the token ids that only a runner looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pagedinfer.config import SamplingParams
from pagedinfer.engine.plan import TokenRules

__all__ = ["Request", "Status"]


class Status(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # in `waiting` again, without keys and values
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
        priority: reserved for priority scheduling; 0 under first come, first served.
        seed: seed of the request's draws.
        end_token_ids: ids that end the output; not to be sampled before `params.min_tokens`.
        rules: what else the sampler needs to know; the scheduler does not look.
        arrival: number of the submission, set by the scheduler.
        num_tokens: prompt and output tokens so far.
        num_computed_tokens: tokens whose keys and values are written (or planned in an open step).
        num_preemptions: how often it lost its place.
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
    arrival: int = -1
    status: Status = Status.WAITING
    num_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens whose keys and values are still to compute."""
        return self.num_tokens - self.num_computed_tokens

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
        }

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status}, prompt {self.num_prompt_tokens}, output "
            f"{self.num_output_tokens} of {self.max_tokens}, computed {self.num_computed_tokens} of {self.num_tokens})"
        )

    def _repr_html_(self) -> str:
        from html import escape

        rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in self.state().items())
        return f"<table><caption>Request {escape(self.request_id)}</caption><tbody>{rows}</tbody></table>"
