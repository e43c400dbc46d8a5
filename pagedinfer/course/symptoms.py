"""What notebook 10 measures in a run: the steps of an incident, its symptom as a number, and evidence in sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pagedinfer.errors import count
from pagedinfer.trace.events import Evict, Hit, Preempt, Share, Step, Submit
from pagedinfer.trace.metrics import Life, lives
from pagedinfer.trace.recording import Recording

__all__ = [
    "EVIDENCE", "blocked_steps", "eviction_steps", "late_wait", "longest_wait", "num_hit_tokens", "preemption_steps",
    "shared_evictions", "waiting_steps",
]  # fmt: skip

LARGE = 8
"""A request is in the way of others when it has at least so many times the tokens of the smallest behind it."""


# -- steps ----------------------------------------------------------------------------------------------------------


def blocked_steps(recording: Recording) -> tuple[int, int]:
    """First and last step at whose end somebody waits behind a much larger request."""
    steps = _blocked(recording)
    return steps[0], steps[-1]


def preemption_steps(recording: Recording) -> tuple[int, int]:
    """First and last step with a preemption."""
    steps = [event.step for event in recording.events if isinstance(event, Preempt)]
    return steps[0], steps[-1]


def eviction_steps(recording: Recording) -> tuple[int, int]:
    """First and last step in which blocks are evicted that had been shared."""
    steps = [step for step, lost in _shared_evictions(recording) if lost]
    return steps[0], steps[-1]


def waiting_steps(recording: Recording) -> tuple[int, int]:
    """First and last step in which the request that waits longest waits."""
    slowest = max(lives(recording), key=_queue_time)
    assert slowest.steps.submitted is not None and slowest.steps.admitted is not None
    return int(slowest.steps.submitted) + 1, int(slowest.steps.admitted) - 1


# -- symptoms -------------------------------------------------------------------------------------------------------


def late_wait(recording: Recording) -> float:
    """The longest TTFT in steps, the largest prompt left out."""
    everyone = sorted(lives(recording), key=lambda life: life.num_prompt_tokens)
    return max(_ttft(life) for life in everyone[:-1])


def longest_wait(recording: Recording) -> float:
    """The longest TTFT in steps."""
    return max(map(_ttft, lives(recording)))


def shared_evictions(recording: Recording) -> int:
    """Blocks evicted that had been shared since they were written."""
    return sum(lost for _, lost in _shared_evictions(recording))


def num_hit_tokens(recording: Recording) -> int:
    """Prompt tokens found in the prefix cache."""
    return sum(event.n for event in recording.events if isinstance(event, Hit))


def _shared_evictions(recording: Recording) -> Iterator[tuple[int, int]]:
    shared: set[int] = set()
    for event in recording.events:
        if isinstance(event, Share):
            shared.update(event.pblks)
        elif isinstance(event, Evict):
            yield event.step, len(shared.intersection(event.pblks))
            shared.difference_update(event.pblks)


def _ttft(life: Life) -> float:
    return life.steps.ttft if life.steps.ttft is not None else float("inf")


def _queue_time(life: Life) -> float:
    return life.steps.queue_time or 0.0


def _blocked(recording: Recording) -> list[int]:
    """Steps at whose end the first in the queue has at least `LARGE` times the tokens of somebody behind it."""
    found = []
    for state in recording.states():
        sizes = [state.requests[rid].num_tokens for rid in state.waiting]
        if len(sizes) > 1 and sizes[0] >= LARGE * min(sizes[1:]):
            found.append(state.step)
    return found


# -- evidence -------------------------------------------------------------------------------------------------------


def _of_blocking(recording: Recording) -> str:
    return (
        f"in {len(_blocked(recording))} of {recording.num_steps} steps somebody waits behind a request of "
        f"{LARGE} times its size or more."
    )


def _of_storm(recording: Recording) -> str:
    return f"{count(sum(recording.steps['preempted']), 'preemption')} in {recording.num_steps} steps."


def _of_wipe(recording: Recording) -> str:
    return f"{count(shared_evictions(recording), 'block')} that had been shared lost their content."


def _of_starvation(recording: Recording) -> str:
    everyone = lives(recording)
    most = max(sum(_overtakes(other, life) for other in everyone) for life in everyone)
    return f"the most that anybody is overtaken by is {count(most, 'request')} that came later."


def _overtakes(other: Life, life: Life) -> bool:
    """Whether `other` came later and was admitted earlier."""
    one, two = life.steps, other.steps
    if one.submitted is None or two.submitted is None or one.admitted is None or two.admitted is None:
        return False
    return two.submitted > one.submitted and two.admitted < one.admitted


def _of_budget(recording: Recording) -> str:
    full = sum(
        sum(event.scheduled.values()) >= event.budget for event in recording.events if isinstance(event, Step)
    )
    return f"{full} of {recording.num_steps} steps used up their token budget."


def _of_pool(recording: Recording) -> str:
    size, blocks = recording.config["block_size"], recording.config["num_blocks"]
    most = max(e.num_prompt_tokens + e.max_tokens for e in recording.events if isinstance(e, Submit))
    return f"the largest request needs {-(-most // size)} of {blocks} blocks at most."


EVIDENCE: dict[str, Callable[[Recording], str]] = {
    "head-of-line blocking": _of_blocking,
    "preemption storm": _of_storm,
    "cache wipe": _of_wipe,
    "starvation": _of_starvation,
    "token budget too small": _of_budget,
    "pool too small for a request": _of_pool,
}
"""The causes to choose from, each with what a run says for or against it."""
