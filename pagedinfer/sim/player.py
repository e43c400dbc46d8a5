"""Playing a recording's requests again on a scheduler that decides otherwise: the same inputs, the same lengths.

A script says how each request goes: how many tokens it produces, why it ends, which block keys its tokens complete.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count as counting

from pagedinfer.engine.plan import StepPlan
from pagedinfer.engine.request import Request
from pagedinfer.errors import PagedInferError, RequestTooLong
from pagedinfer.sim.rerun import Driver
from pagedinfer.trace import events as ev
from pagedinfer.trace.metrics import kept_events
from pagedinfer.trace.recording import Recording

__all__ = ["MAX_STEPS", "Inputs", "Player", "Script"]

MAX_STEPS = 100_000
"""A run is cut off after so many steps: a policy may keep somebody waiting for ever."""

_MAY_FAIL = (ev.Submit, ev.Reject, ev.Abort, ev.Preempt)
"""Inputs to which other settings may rightly answer otherwise: rejected, or over already."""


@dataclass(slots=True)
class Script:
    """How one request goes.

    Attributes:
        num_tokens: output tokens before `end`.
        end: (finish reason, sentence) of an end that only the engine could know; None: it goes on to its limits.
        ends_with_token: whether the end came with the last of the tokens.
        keys: ids of the full blocks of its prompt and output, as far as known.
    """

    num_tokens: int = 0
    end: tuple[str, str] | None = None
    ends_with_token: bool = True
    keys: list[int] = field(default_factory=list)


class Inputs:
    """What a recording says about its requests and the world, read once for any number of players.

    Attributes:
        block_size: tokens per block, for the scripts' keys.
        scripts: the script of each life of each id, in order of submission.
        now: the time of a step.
        refuse_calls: allocations that fault injection refused.
        has_drafts: whether guessed tokens came true.
    """

    def __init__(self, recording: Recording) -> None:
        self.block_size = int(recording.config["block_size"])
        self.scripts = scripts(recording)
        self.now = _clock(recording)
        self.refuse_calls = {event.call for event in recording.events if isinstance(event, ev.Refuse)}
        self.has_drafts = any(isinstance(event, ev.Commit) and event.drafts for event in recording.events)
        self._events = recording.events

    @cached_property
    def all(self) -> list[ev.Event]:
        """What came from outside, from the first step on."""
        return list(_inputs(self._events))

    def after(self, end: int) -> list[ev.Event]:
        """What came from outside after the first `end` events."""
        return list(_inputs(self._events[end:]))

    def begun(self, end: int) -> list[str]:
        """The ids that the first `end` events submit, in order."""
        return [event.rid for event in self._events[:end] if isinstance(event, ev.Submit | ev.Fork)]


def scripts(recording: Recording) -> dict[str, list[Script]]:
    """The script of each life of each id, in order of submission."""
    found: dict[str, list[Script]] = {}
    live: dict[str, Script] = {}
    for event in kept_events(recording.events):
        if isinstance(event, ev.Submit | ev.Fork):
            script = live[event.rid] = Script(keys=list(event.keys))
            found.setdefault(event.rid, []).append(script)
        elif isinstance(event, ev.Commit):
            for rid in {**event.tokens, **event.ends, **event.keys}:
                if script_or_none := live.get(rid):
                    _tell(script_or_none, rid, event)
        elif isinstance(event, ev.Finish) and (ended := live.pop(event.rid, None)) and event.why == "abort":
            ended.end = None  # the abort is an input of its own
    return found


def _tell(script: Script, rid: str, commit: ev.Commit) -> None:
    script.num_tokens += commit.tokens.get(rid, 0)
    script.keys += commit.keys.get(rid, ())
    if rid in commit.ends:
        why, detail = commit.ends[rid]
        script.end, script.ends_with_token = (why, detail), rid in commit.tokens


class Player:
    """Gives a driver the inputs that are left and answers its plans by the scripts.

    Attributes:
        notes: sentences about what could not be repeated.
        refused: requests that were submitted in the recording and could not be here.
    """

    def __init__(self, inputs: Inputs, driver: Driver, end: int = 0) -> None:
        """The driver has been fed the recording's first `end` events."""
        self.notes: list[str] = []
        self.refused: list[ev.Submit | ev.Fork] = []
        self._driver = driver
        self._scheduler = driver.scheduler
        self._scripts = inputs.scripts
        self._lives: Counter[str] = Counter()
        self._inputs = deque(inputs.after(end) if end else inputs.all)
        self._now = inputs.now
        self._current: dict[str, Script] = {}
        self._rekey = _Rekey(inputs.block_size, driver.scheduler.config.block_size)
        for rid in inputs.begun(end):
            self._current[rid] = self._next_script(rid)
        driver.scheduler.blocks.refuse_calls |= inputs.refuse_calls
        if inputs.has_drafts:
            self.notes.append("Guessed tokens are not repeated: a step brings one token.")

    def _next_script(self, rid: str) -> Script:
        """A copy of the next script of this id."""
        script = self._scripts[rid][self._lives[rid]]
        self._lives[rid] += 1
        return replace(script, keys=list(script.keys))

    def settle(self) -> None:
        """Close the steps that are open: the fork lies where several overlapped."""
        while self._driver.open:
            self._driver.feed(self._answer(self._driver.open[0]))

    def play(self, looks: Callable[[], bool] | None = None) -> bool:
        """Run until nothing is left, or `looks`, called after each input and each step, says that it is enough.

        False: it was cut off.
        """
        scheduler, driver = self._scheduler, self._driver
        while True:
            while self._inputs and self._inputs[0].step <= scheduler.step:
                self._feed(self._inputs.popleft())
                if looks is not None and looks():
                    return True
            if not self._inputs and not scheduler.requests:
                return True
            if scheduler.step >= MAX_STEPS:
                return False
            step = scheduler.step + 1
            driver.feed(ev.Step(step, self._now(step), 0, {}, {}))
            driver.feed(self._answer(driver.open[0]))
            if looks is not None and looks():
                return True

    def never_fit(self) -> Iterator[ev.Submit]:
        """Those of the submissions still to come that this engine would refuse whenever they came."""
        for event in self._inputs:
            if isinstance(event, ev.Submit):
                request = Request(event.rid, event.num_prompt_tokens, event.max_tokens)
                if isinstance(self._scheduler.admission.refusal(request), RequestTooLong):
                    yield event

    def _feed(self, event: ev.Event) -> None:
        if isinstance(event, ev.Submit | ev.Fork):
            self._current[event.rid] = script = self._next_script(event.rid)
            script.keys = self._rekey(script.keys)
            prompt_blocks = getattr(event, "num_prompt_tokens", 0) // self._scheduler.config.block_size
            event = replace(event, keys=tuple(script.keys[:prompt_blocks]))
        elif isinstance(event, ev.Reject):
            self._current[event.rid] = Script()  # should it be accepted now: nobody knows its length
        came = event
        try:
            self._driver.feed(event)
        except (PagedInferError, LookupError) as error:
            if isinstance(came, ev.Submit | ev.Fork):
                self.refused.append(came)
            if not isinstance(event, _MAY_FAIL):
                self.notes.append(f"The {event.kind} after step {event.step} could not be repeated: {error}")

    def _answer(self, plan: StepPlan) -> ev.Commit:
        commit = ev.Commit({})
        for item in plan.scheduled:
            rid, request = item.request_id, self._scheduler.requests[item.request_id]
            script = self._current[rid]
            if item.samples:
                done = request.num_output_tokens
                if script.end is not None and done + script.ends_with_token >= script.num_tokens:
                    commit.ends[rid] = list(script.end)
                if rid not in commit.ends or script.ends_with_token:
                    commit.tokens[rid] = 1
            known = len(getattr(request, "keys", ()))
            full = (request.num_tokens + commit.tokens.get(rid, 0)) // self._scheduler.config.block_size
            if script.keys and full > known:
                script.keys += [self._rekey.new() for _ in range(full - len(script.keys))]
                commit.keys[rid] = script.keys[known:full]
        return commit


class _Rekey:
    """Block keys for blocks of another size.

    A key stands for a block's tokens and all before it. So a block of another size is known where an old block ends
    at or after its end, and the two are the same whenever those old blocks are; sharing is never overstated.
    """

    def __init__(self, old: int, new: int) -> None:
        self._old, self._new = old, new
        self._ids: dict[tuple[int, int], int] = {}
        self._unknown = counting(2**40)

    def __call__(self, keys: list[int]) -> list[int]:
        """The ids of the full blocks of the new size."""
        if self._old == self._new:
            return keys
        ends = range(self._new, len(keys) * self._old + 1, self._new)
        covering = ((keys[-(-end // self._old) - 1], end) for end in ends)
        return [self._ids.setdefault(pair, len(self._ids)) for pair in covering]

    def new(self) -> int:
        """An id that no other block has: of tokens that nobody knows."""
        return next(self._unknown)


def _inputs(events: list[ev.Event]) -> Iterator[ev.Event]:
    """What came from outside, in order, without plans and how they closed."""
    open_plans = 0
    for event in kept_events(events):
        if isinstance(event, ev.Step):
            open_plans += 1
        elif isinstance(event, ev.Commit):
            open_plans = max(0, open_plans - 1)  # its plan may lie before the fork
        elif event.kind in ("submit", "fork", "reject", "abort", "reset", "resize", "compact") or (
            isinstance(event, ev.Preempt) and not open_plans
        ):
            yield event


def _clock(recording: Recording) -> Callable[[int], float]:
    """The time of a step: the recorded one; after the last, on by the mean gap."""
    times = {event.i: event.now for event in recording.events if isinstance(event, ev.Step)}
    if len(times) < 2:
        return lambda step: times.get(step, float(step - 1))
    first, last = min(times), max(times)
    gap = (times[last] - times[first]) / (last - first)
    return lambda step: times[step] if step in times else times[last] + (step - last) * gap
