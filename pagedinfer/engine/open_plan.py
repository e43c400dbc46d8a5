"""A plan from `schedule` until it is committed or cancelled: what it touches, and how to take it back."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedinfer.engine.plan import ScheduledRequest, StepPlan
from pagedinfer.memory.journal import Journal

__all__ = ["OpenPlan"]


@dataclass(slots=True)
class OpenPlan:
    """A plan that is neither committed nor cancelled.

    Attributes:
        plan: what the runner gets.
        journal: how to take it back.
        touched: requests that it works on, or that lost their place in it; they do not end before it closes.
        placed: the plan's requests by id.
        budget: tokens left.
        promised: blocks that running requests still need for tokens they have; None before anybody asked.
        num_admitted: requests that joined the batch in it.
        yielded: requests preempted for a more urgent one that waits; others preempted forbid admissions.
    """

    plan: StepPlan
    journal: Journal = field(default_factory=Journal)
    touched: set[str] = field(default_factory=set)
    placed: dict[str, ScheduledRequest] = field(default_factory=dict)
    budget: int = 0
    promised: int | None = None
    num_admitted: int = 0
    yielded: set[str] = field(default_factory=set)
