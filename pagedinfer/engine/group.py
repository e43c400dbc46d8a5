"""Several outputs of one prompt. Each is a request of its own for the scheduler; the caller sees one.

The first child computes the prompt; the others wait for that and share its blocks, the last one perhaps partly
filled. Whoever writes there first gets a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from pagedinfer.config import SamplingParams
from pagedinfer.engine.live import LiveRequest
from pagedinfer.engine.output import CompletionOutput, RequestOutput
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Update
from pagedinfer.randomness import mix

__all__ = ["Group", "child_ids", "child_seed", "split"]


class Group:
    """A request that its caller sees, and the children that the scheduler sees.

    Attributes:
        request_id: the caller's id.
        children: in order; child i draws with the seed that (request's seed, i) gives.
        outbox: where outputs go; None for the step's return value.
    """

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        children: Sequence[LiveRequest],
        outbox: deque[RequestOutput] | None,
    ) -> None:
        self.request_id = request_id
        self.children = list(children)
        self.outbox = outbox
        self._params = params
        self._ends: dict[str, Update] = {}

    def note(self, update: Update) -> None:
        """A child has ended."""
        self._ends[update.request.request_id] = update

    @property
    def finished(self) -> bool:
        """Whether every child has ended."""
        return len(self._ends) == len(self.children)

    @property
    def live(self) -> list[str]:
        """Ids of the children that go on."""
        ids = [child.request.request_id for child in self.children]
        return [rid for rid in ids if rid not in self._ends]

    def output(self) -> RequestOutput:
        """Everything so far, as an independent value: finished when all children are."""
        ends = [self._ends.get(child.request.request_id) for child in self.children]
        whole = self.children[0].output(ends[0])
        completions = [
            whole.outputs[0],
            *(child.completion(end) for child, end in zip(self.children[1:], ends[1:], strict=True)),
        ]
        failed = [end.detail for end in ends if end is not None and end.finish_reason == "error"]
        details = dict.fromkeys(end.detail for end in ends if end is not None)
        return replace(
            whole,
            request_id=self.request_id,
            outputs=self._best(completions),
            finished=self.finished,
            error=failed[0] if failed else None,
            detail="; ".join(details),
        )

    def _best(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        wanted, hide = self._params.n, self._params.logprobs is None
        if wanted < len(completions):
            # Failed and aborted ones come last. Sorting is stable: of equals the earlier child wins.
            completions.sort(
                key=lambda c: (c.finish_reason in ("error", "abort"), -(c.cumulative_logprob or 0.0))
            )
        return [
            replace(completion, index=index, logprobs=None if hide else completion.logprobs)
            for index, completion in enumerate(completions[:wanted])
        ]


def split(request: Request) -> list[Request]:
    """The children of a request: "r0.0", "r0.1", ..., each with one output and a seed of its own.

    Only the first computes and scores the prompt. Where the best of more are wanted, ranking needs log-probabilities.
    """
    how = request.params
    ranked = how.num_children > how.n
    ids = child_ids(request.request_id, how.num_children)
    return [
        replace(
            request,
            request_id=child_id,
            params=replace(
                how,
                n=1,
                best_of=None,
                prompt_logprobs=how.prompt_logprobs if index == 0 else None,
                logprobs=0 if ranked and how.logprobs is None else how.logprobs,
            ),
            token_ids=list(request.token_ids),
            seed=child_seed(request.seed, index),
            parent=ids[0] if index else "",
        )
        for index, child_id in enumerate(ids)
    ]


def child_ids(request_id: str, num_children: int) -> list[str]:
    """The ids of a request's children; none for a request with one output, which has no children."""
    return [f"{request_id}.{index}" for index in range(num_children)] if num_children > 1 else []


def child_seed(seed: int, index: int) -> int:
    """A child's seed: the first has the request's own, so that it equals the only output of n=1."""
    return seed if index == 0 else mix(mix(seed, index), index)
