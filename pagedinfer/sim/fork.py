"""Forking a recording: go back to a step, change a setting, and run on without the model.

The core runs again over the recorded inputs; from the fork on it decides anew. Each request comes after the step
after which it came, produces as many tokens as it did, ends for the reason for which it did, and is aborted after the
step after which it was. A request whose own end is not in the recording (it was aborted, cut by the pool, or lives
yet) may go on to its `max_tokens`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from html import escape
from typing import Any

from pagedinfer.config import EngineConfig
from pagedinfer.engine.plan import StepPlan, StepResult
from pagedinfer.engine.request import Request, Status
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import ConfigError, RequestError
from pagedinfer.sim.rerun import rerun
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.metrics import Life, kept_events, lives
from pagedinfer.trace.recording import Recording, RecordingError

__all__ = ["LIVE_SETTINGS", "Branch", "fork"]

LIVE_SETTINGS = frozenset(("max_num_batched_tokens", "max_num_seqs", "watermark"))
"""Settings that a running engine can take; any other change means another engine from the first step."""

MAX_STEPS = 100_000
"""A branch is cut off after so many steps: a policy may keep somebody waiting for ever."""


@dataclass(slots=True)
class Branch:
    """What would have happened.

    Attributes:
        recording: the whole run, from its first step; the part before the fork equals the origin's.
        origin: the recording it was forked from.
        step: the step after which the two may differ; 0 where the change holds from the beginning.
        changes: the settings that changed, by name.
        way: how it was made, in a sentence.
        is_complete: False when it was cut off, or inputs could not be repeated; `way` says so.
    """

    recording: Recording
    origin: Recording
    step: int
    changes: dict[str, Any]
    way: str
    is_complete: bool = True

    @property
    def name(self) -> str:
        """The changes as a label: "num_blocks=20"; "as recorded" without any."""
        return ", ".join(f"{name}={value}" for name, value in self.changes.items()) or "as recorded"

    def __repr__(self) -> str:
        return f"Branch({self.name}: {self.way} {self.recording!r})"

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(self.name)}</b>: {escape(self.way)}</p>{self.recording._repr_html_()}"


def fork(recording: Recording, step: int, **changes: Any) -> Branch:
    """The run as it would have gone on from the end of `step` with other settings (fields of `EngineConfig`).

    Settings in `LIVE_SETTINGS` change after `step`. Any other (`num_blocks`, `block_size`, ...) cannot change in a
    running engine: it holds from the first step, with the recorded requests at their recorded steps, and `Branch.way`
    says so. Where fewer seats are left than requests run, the newest are preempted first.

    Raises:
        RecordingError: the recording began mid-run or has a gap, or has no such step.
        ConfigError: an unknown setting or a bad value.
    """
    known = recording.config
    config = _changed(recording, changes)
    changes = {name: value for name, value in changes.items() if known.get(name) != value}
    fixed = [name for name in changes if name not in LIVE_SETTINGS]
    recording.step_events(step)  # raises where there is no such step
    if fixed:
        way = f"{' and '.join(fixed)} cannot change in a running engine: re-run from the first step."
        scheduler, branch = _from_the_start(recording, config)
        step = recording.first_step
        inputs = recording.events
    else:
        scheduler, branch = rerun(recording, until_step=step)
        way = f"re-run to step {step}, then run on{' with the change' if changes else ''}."
        inputs = recording.events[_end_of(recording, step) :]
        _reconfigure(scheduler, config, step)
    meta = ev.Meta(ev.SCHEMA, branch.config, recording.info | {"fork": {"step": step, **changes}})
    meta.step = recording.first_step
    branch.events[0] = meta
    player = _Player(recording, scheduler, inputs)
    is_cut = not player.play()
    if is_cut:
        way += f" Cut off after {MAX_STEPS} steps."
    if player.left_out:
        way += f" Not repeated: {', '.join(sorted(player.left_out))}."
    return Branch(branch, recording, step, changes, way, not is_cut and not player.left_out)


def _changed(recording: Recording, changes: dict[str, Any]) -> EngineConfig:
    known = {f.name for f in fields(EngineConfig)}
    if not recording.config or any(isinstance(event, ev.Keyframe | ev.Gap) for event in recording.events):
        raise RecordingError("Only a recording from the engine's first step, without gaps, can be forked.")
    if wrong := [name for name in changes if name not in known]:
        raise ConfigError(f"No setting {', '.join(wrong)}; EngineConfig has {', '.join(sorted(known))}.")
    return EngineConfig(**{name: v for name, v in recording.config.items() if name in known} | changes)


def _end_of(recording: Recording, step: int) -> int:
    """Index after the last event of a step."""
    last = recording.step_events(step)[-1]
    return next(i for i in range(len(recording.events), 0, -1) if recording.events[i - 1] is last)


def _from_the_start(recording: Recording, config: EngineConfig) -> tuple[Scheduler, Recording]:
    meta = ev.Meta(ev.SCHEMA, config.to_dict(), recording.info)
    meta.step = recording.first_step
    branch, bus = Recording([meta]), EventBus()
    bus.subscribe(branch.add)
    return Scheduler(config, bus), branch


def _reconfigure(scheduler: Scheduler, config: EngineConfig, step: int) -> None:
    """Give a scheduler between two steps other settings."""
    for part in (scheduler.queues, scheduler.admission):
        part._config = config  # ours, and between two steps
    scheduler.config = config
    while len(scheduler.running) > config.max_num_seqs:
        why = f"forked at step {step}: max_num_seqs is {config.max_num_seqs} now"
        scheduler.preempt(scheduler.running[-1].request_id, why)


# -- running on -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Script:
    """How a request goes: `num_tokens` output tokens, then `end`; None where only the core ends it."""

    num_tokens: int = 0
    end: tuple[str, str] | None = None
    ends_with_token: bool = True


def _scripts(recording: Recording) -> dict[str, deque[_Script]]:
    """A script for each life of each id, in order."""
    told: dict[str, tuple[list[str], bool]] = {}
    found: dict[str, deque[_Script]] = {}
    by_life: dict[int, _Script] = {}
    for life in lives(recording):
        script = by_life[id(life)] = _script(life)
        found.setdefault(life.rid, deque()).append(script)
    for event in recording.events:
        if isinstance(event, ev.Commit):
            told |= {rid: (end, rid in event.tokens) for rid, end in event.ends.items()}
        elif isinstance(event, ev.Finish) and (end := told.pop(event.rid, None)):
            for script in found.get(event.rid, ()):
                if script.end == (event.why, event.detail):
                    script.ends_with_token = end[1]
    return found


def _script(life: Life) -> _Script:
    own = life.finish_reason in ("stop", "error")
    return _Script(life.num_output_tokens, (str(life.finish_reason), life.detail) if own else None)


@dataclass(slots=True)
class _Player:
    """Feeds a scheduler the inputs that are left and answers its plans by the scripts."""

    recording: Recording
    scheduler: Scheduler
    events: list[ev.Event]
    left_out: set[str] = field(default_factory=set)
    _scripts: dict[str, deque[_Script]] = field(init=False)
    _inputs: deque[ev.Event] = field(init=False)
    _running: dict[str, _Script] = field(init=False, default_factory=dict)
    _now: Callable[[int], float] = field(init=False)

    def __post_init__(self) -> None:
        self._scripts = _scripts(self.recording)
        self._inputs = deque(_inputs(self.events, self.left_out))
        self._now = _clock(self.recording)
        refused = {event.call for event in self.recording.events if isinstance(event, ev.Refuse)}
        self.scheduler.blocks.refuse_calls |= refused
        for event in self.recording.events[: len(self.recording.events) - len(self.events)]:
            if isinstance(event, ev.Submit):
                self._running[event.rid] = self._scripts[event.rid].popleft()

    def play(self) -> bool:
        """Run until nothing is left. False: it was cut off."""
        scheduler = self.scheduler
        while True:
            while self._inputs and self._inputs[0].step <= scheduler.step:
                self._feed(self._inputs.popleft())
            if not self._inputs and not scheduler.requests:
                return True
            if scheduler.step >= MAX_STEPS:
                return False
            plan = scheduler.schedule(self._now(scheduler.step + 1))
            scheduler.commit(plan, *self._answer(plan))

    def _feed(self, event: ev.Event) -> None:
        scheduler = self.scheduler
        match event:
            case ev.Submit() | ev.Reject():
                request = Request(
                    event.rid, event.num_prompt_tokens, event.max_tokens, priority=event.priority
                )
                script = self._scripts[event.rid].popleft() if isinstance(event, ev.Submit) else _Script()
                try:
                    scheduler.submit(request, event.now)
                except RequestError:
                    return  # other settings, another answer: the branch has a `reject` event that says why
                self._running[event.rid] = script
            case ev.Abort(rid=rid) if rid in scheduler.requests:
                scheduler.abort(rid)
            case ev.Preempt(rid=rid, why=why):
                request_or_none = scheduler.requests.get(rid)
                if request_or_none is not None and request_or_none.status == Status.RUNNING:
                    scheduler.preempt(rid, why)

    def _answer(self, plan: StepPlan) -> tuple[StepResult, dict[str, tuple[str, str]]]:
        tokens: dict[str, tuple[int, ...]] = {}
        ends: dict[str, tuple[str, str]] = {}
        for item in plan.scheduled:
            if not item.samples:
                continue
            rid, done = item.request_id, self.scheduler.requests[item.request_id].num_output_tokens
            script = self._running[rid]
            if script.end is not None and done + script.ends_with_token >= script.num_tokens:
                ends[rid] = script.end
            if rid not in ends or script.ends_with_token:
                tokens[rid] = (0,)  # token ids do not matter here
        return StepResult(tokens), ends


def _inputs(events: list[ev.Event], left_out: set[str]) -> list[ev.Event]:
    """What came from outside, in order; kinds that cannot be repeated are named in `left_out`."""
    found: list[ev.Event] = []
    open_plans = 0
    for event in kept_events(events):
        if isinstance(event, ev.Step):
            open_plans += 1
        elif isinstance(event, ev.Commit):
            open_plans -= 1
        elif isinstance(event, ev.Submit | ev.Reject | ev.Abort) or (
            isinstance(event, ev.Preempt) and not open_plans
        ):
            found.append(event)
        elif event.kind in ("fork", "reset", "resize", "compact"):
            left_out.add(event.kind)
    return found


def _clock(recording: Recording) -> Callable[[int], float]:
    """The time of a step: the recorded one; after the last, on by the mean gap."""
    times = {event.i: event.now for event in recording.events if isinstance(event, ev.Step)}
    last = max(times, default=0)
    if len(times) < 2:
        return lambda step: times.get(step, float(step - 1))
    gap = (times[last] - times[min(times)]) / (last - min(times))
    return lambda step: times[step] if step in times else times[last] + (step - last) * gap
