"""Forks that the model runs: the same requests at the same steps in a fresh engine, with other settings from a step on.

`sim.fork` goes on from a recording with the lengths that were recorded. Here the prompts are at hand, so the tokens are
the model's own: up to the fork the very ones that were recorded (greedy or seeded, whatever their batches were).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.intake import Prompt
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import PagedInferError, RecordingError
from pagedinfer.sim.fork import LIVE_SETTINGS, Branch, check_policy, fork, fork_meta
from pagedinfer.sim.progress import Progress
from pagedinfer.trace import events as ev
from pagedinfer.trace.recorder import Recorder
from pagedinfer.trace.recording import Recording

__all__ = ["Asked", "fork_session", "fork_with_model", "own_policy", "why_not"]


@dataclass(slots=True)
class Asked:
    """What a caller asked for, to ask it again."""

    prompt: Prompt
    params: SamplingParams | None
    options: dict[str, Any]

    @classmethod
    def of(cls, prompt: Prompt, params: SamplingParams | None, options: Mapping[str, Any]) -> Asked:
        """A copy that later changes of the prompt do not reach."""
        return cls(deepcopy(prompt), params, dict(options))


def fork_session(
    engine: Engine,
    recording: Recording,
    asked: Mapping[str, Asked],
    step: int,
    *,
    model: bool | None = None,
    policy: Policy | type[Policy] | None = None,
    **changes: Any,
) -> Branch:
    """A fork that the model runs where it can (`model=None`), must (True) or shall not (False).

    Where it is simulated, `Branch.way` says why.

    Raises:
        RecordingError, ConfigError: as `fork_with_model` and `sim.fork` say.
    """
    obstacle = why_not(engine, recording, asked)
    if model or (model is None and not obstacle):
        return fork_with_model(engine, recording, asked, step, policy=policy, **changes)
    own = own_policy(engine, engine.config)
    branch = fork(recording, step, policy=policy, recorded_policy=own, **changes)
    branch.way = f"Simulated, because {obstacle or 'model=False asks for it'}: {branch.way}"
    return branch


def why_not(engine: Engine, recording: Recording, asked: Mapping[str, Asked]) -> str:
    """Why the model cannot run the session's requests again, as the end of a sentence; "" when it can."""
    if not getattr(engine.runner, "has_logits", True):
        return f"the engine has no model but a {type(engine.runner).__name__}"
    if what := engine.why_no_twin:
        return f"the engine has {what}, so it cannot be made again"
    if recording.first_step or any(isinstance(event, ev.Keyframe | ev.Gap) for event in recording.events):
        return "the recording began mid-run or has a gap"
    for event in recording.events:
        if isinstance(event, ev.Submit) and _asked_id(event.rid, asked) is None:
            return f"request {event.rid!r} came past the session, so it cannot be asked again"
        if isinstance(event, ev.Fork):
            return f"request {event.rid!r} is a copy of a live one, made past the session"
    return ""


def fork_with_model(
    engine: Engine,
    recording: Recording,
    asked: Mapping[str, Asked],
    step: int,
    *,
    policy: Policy | type[Policy] | None = None,
    **changes: Any,
) -> Branch:
    """The run as the model makes it with other settings from the end of `step` on.

    Settings in `LIVE_SETTINGS`, and `policy` (one of your own or its class), change after `step`. Any other setting
    holds from the first step, and `Branch.way` says so. The engine itself goes on untouched; the fork has a pool of
    its own beside it. Ctrl-C gives the fork up.

    Raises:
        RecordingError: the recording has no such step, or cannot be run again (`why_not`).
        ConfigError: an unknown setting or a bad value; the runner cannot be made again; the engine has another clock.
    """
    recording.at(step)  # says so if there is no such step
    if engine.why_no_twin:
        engine.twin(engine.config)  # says so
    if obstacle := why_not(engine, recording, asked):
        raise RecordingError(f"The model cannot run this session again: {obstacle}.")
    check_policy(policy)
    names = {f.name for f in fields(EngineConfig)}
    known = EngineConfig(**{name: value for name, value in recording.config.items() if name in names})
    config = EngineConfig(**{name: getattr(known, name) for name in names} | changes)
    before, after = known.to_dict(), config.to_dict()  # values as a recording holds them
    changes = {name: after[name] for name in changes if before[name] != after[name]}
    fixed = [name for name in changes if name not in LIVE_SETTINGS]
    start, at = (config, 0) if fixed or step == 0 else (known, step)
    chosen = policy(config) if isinstance(policy, type) else policy
    label = changes | ({} if chosen is None else {"policy": type(chosen).__name__})
    with closing(engine.twin(start)) as twin, Recorder(twin) as again:
        again.events[0] = fork_meta(start.to_dict(), again, at, label)
        twin.scheduler.blocks.refuse_calls |= {e.call for e in recording.events if isinstance(e, ev.Refuse)}

        def change() -> None:
            if chosen is not None or (at and label):
                own = chosen or own_policy(twin, config)
                twin.scheduler.reconfigure(config, own, f"forked at step {at}")

        notes = _play(twin, _inputs(recording), asked, at, change)
    way = "The model ran it again from the first step"
    if fixed:
        way += f": {' and '.join(fixed)} cannot change in a running engine"
    elif label:
        way += f", with the change after step {at}" if at else ", with the change"
    return Branch(again, recording, at, label, " ".join([f"{way}.", *notes]), not notes)


def own_policy(engine: Engine, config: EngineConfig) -> Policy | None:
    """The engine's policy of one's own, made anew with these settings; None where settings name its policy."""
    policy = type(engine.scheduler.guard.policy)
    return None if policy.__name__ in ("ConfiguredPolicy", "Policy") else policy(config)


def _asked_id(rid: str, asked: Mapping[str, Asked]) -> str | None:
    """The id under which a request was asked for: its own, or that of which it is one of several outputs."""
    return next((known for known in (rid, rid.rpartition(".")[0]) if known in asked), None)


Input = ev.Submit | ev.Preempt | ev.Reset | ev.Resize | ev.Compact


def _inputs(recording: Recording) -> deque[ev.Event]:
    """What came from outside, in order. Preemptions and time-outs of its own the engine does again."""
    is_open, found = False, deque[ev.Event]()
    for event in recording.events:
        if isinstance(event, ev.Step | ev.Commit | ev.Cancel):
            is_open = isinstance(event, ev.Step)
        elif isinstance(event, ev.Abort):
            if not event.why.startswith("timed out"):
                found.append(event)
        elif isinstance(event, Input) and not (is_open and isinstance(event, ev.Preempt)):
            found.append(event)
    return found


def _play(
    engine: Engine,
    left: deque[ev.Event],
    asked: Mapping[str, Asked],
    step: int,
    change: Callable[[], None],
) -> list[str]:
    """Feed the inputs when their steps come, `change` at the end of `step`, and run until nothing is left.

    Returns sentences about what could not be repeated.
    """
    notes: list[str] = []
    is_changed = False
    with Progress("The model runs it again", "step") as progress:
        while left or engine.has_unfinished():
            now = engine.scheduler.step
            if not step and not is_changed:
                change()
                is_changed = True
            while left and (left[0].step <= now or not engine.has_unfinished()):
                notes += _feed(engine, left.popleft(), asked)
            if now >= step and not is_changed:
                change()
                is_changed = True
            engine.step()
            progress(engine.scheduler.step)
    return notes


def _feed(engine: Engine, event: ev.Event, asked: Mapping[str, Asked]) -> list[str]:
    """Give one input to the engine; a sentence when it cannot take it."""
    try:
        match event:
            case ev.Submit():
                rid = _asked_id(event.rid, asked) or event.rid
                if rid == event.rid or event.rid == f"{rid}.0":  # one with several outputs comes once
                    one = asked[rid]
                    engine.add_request(one.prompt, one.params, rid, **one.options)
            case ev.Abort():
                if engine.is_live(event.rid):
                    engine.abort(event.rid)
            case ev.Preempt():
                engine.preempt(event.rid, event.why)
            case ev.Reset():
                engine.reset_prefix_cache(event.why)
            case ev.Resize():
                engine.resize_pool(event.num_blocks)
            case ev.Compact():
                engine.compact(event.why)
    except PagedInferError as error:
        return [f"The {event.kind} after step {event.step} could not be repeated: {error}"]
    return []
