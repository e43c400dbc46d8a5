"""The callers' side of the books: who waits for which request, and what they get from each step.

The scheduler knows requests; a caller knows what it asked for. Here the two meet: live requests with their text, the
groups of several outputs, and the outputs on their way out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pagedinfer.config import SamplingParams
from pagedinfer.engine.group import Group
from pagedinfer.engine.live import LiveRequest
from pagedinfer.engine.output import RequestOutput
from pagedinfer.engine.plan import StepResult
from pagedinfer.engine.scheduler import Update
from pagedinfer.errors import describe_error

__all__ = ["Callers", "Outbox"]

Outbox = deque[RequestOutput]
"""Where one caller's outputs go."""


class Callers:
    """What callers wait for.

    Attributes:
        live: every live request, children included, by its id.
        groups: requests with several outputs, by the caller's id.
        parents: the group of each live child, by the child's id.
        undelivered: outputs for whoever steps next.
    """

    def __init__(self, forget: Callable[[str], None] = lambda request_id: None) -> None:
        """`forget` is told the id of each request that has ended."""
        self._forget = forget
        self.live: dict[str, LiveRequest] = {}
        self.groups: dict[str, Group] = {}
        self.parents: dict[str, Group] = {}
        self.undelivered: list[RequestOutput] = []

    def add(self, live: LiveRequest) -> None:
        """A request was submitted."""
        self.live[live.request.request_id] = live

    def add_group(
        self, request_id: str, params: SamplingParams, children: Sequence[str], outbox: Outbox | None
    ) -> None:
        """The children were submitted that the caller of `request_id` sees as one."""
        group = Group(request_id, params, [self.live[child] for child in children], outbox)
        self.groups[request_id] = group
        self.parents.update((child, group) for child in children)

    def look_for_ends(self, result: StepResult) -> tuple[StepResult, dict[str, tuple[str, str]]]:
        """Cut each request's new tokens at its end, if it is there. One request's fault ends that request only.

        Returns the result to commit, and the ends: request id -> (finish reason, sentence).
        """
        ends: dict[str, tuple[str, str]] = {}
        tokens: dict[str, Sequence[int]] = {}
        errors = dict(result.errors)
        for rid, new in result.tokens.items():
            live = self.live[rid]
            try:
                tokens[rid], end = live.take(new)
                if rid in result.logprobs:
                    live.add_logprobs(result.logprobs[rid][: len(tokens[rid])], tokens[rid])
                if end is not None:
                    ends[rid] = end
            except BaseException as error:  # a tokenizer of others, and the plan is open: the step must go on
                room = live.request.max_tokens - live.request.num_output_tokens
                tokens[rid], errors[rid] = new[:room], describe_error(error, "making text")
        for rid, (first, rows) in result.prompt_logprobs.items():
            try:
                self.live[rid].add_prompt_logprobs(first, rows)
            except Exception as error:
                errors[rid] = describe_error(error, "making text")
        return replace(result, tokens=tokens, errors=errors), ends

    def deliver(self, updates: Iterable[Update]) -> None:
        """Put the updates' outputs where their requests' outputs go."""
        for outbox, output in self.collect(updates):
            (self.undelivered if outbox is None else outbox).append(output)

    def collect(self, updates: Iterable[Update]) -> list[tuple[Outbox | None, RequestOutput]]:
        """An output of each request that was updated, one for all its children, and the outbox that it goes to."""
        outputs: list[tuple[Outbox | None, RequestOutput]] = []
        groups: dict[str, Group] = {}
        for update in updates:
            request_id = update.request.request_id
            live = self.live.get(request_id)
            if live is None or live.request is not update.request:
                continue  # a subscriber has aborted it while this step closed
            group, ended = self.parents.get(request_id), update.finish_reason is not None
            if ended:
                del self.live[request_id]
                self._forget(request_id)
            if group is None:
                outputs.append((live.outbox, live.output(update)))
                continue
            groups[group.request_id] = group
            if ended:
                del self.parents[request_id]
                group.note(update)
        for group in groups.values():
            if group.finished:
                del self.groups[group.request_id]
            outputs.append((group.outbox, group.output()))
        return outputs

    def check(self, request_ids: Iterable[str]) -> None:
        """Assert that the books fit the scheduler's live requests, and each other."""
        assert self.live.keys() == set(request_ids), "live requests and their outputs differ"
        children = [rid for group in self.groups.values() for rid in group.live]
        assert sorted(children) == sorted(self.parents), "groups and their live children differ"
        assert self.parents.keys() <= self.live.keys(), "a live child is no live request"
