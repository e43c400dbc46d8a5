"""Forks that the model runs: the same requests at the same steps in a fresh engine, with other settings from a step on.

`sim.fork` goes on from a recording with the lengths that were recorded. Here the prompts are at hand, so the tokens are
the model's own: up to the fork the very ones that were recorded (greedy or seeded, whatever their batches were).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.intake import Prompt
from pagedinfer.errors import RecordingError
from pagedinfer.sim.fork import LIVE_SETTINGS, Branch
from pagedinfer.trace import events as ev
from pagedinfer.trace.recorder import Recorder
from pagedinfer.trace.recording import Recording

__all__ = ["Asked", "fork_with_model"]


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


def fork_with_model(
    engine: Engine, recording: Recording, asked: Mapping[str, Asked], step: int, **changes: Any
) -> Branch:
    """The run as the model makes it with other settings from the end of `step` on.

    Settings in `LIVE_SETTINGS` change after `step`; any other holds from the first step, and `Branch.way` says so. The
    engine itself goes on untouched; the fork has a pool of its own beside it.

    Raises:
        RecordingError: the recording began mid-run, has no such step, or holds requests that are not in `asked`.
        ConfigError: an unknown setting or a bad value; the runner cannot be made again; the engine has another clock.
    """
    recording.at(step)  # says so if there is no such step
    if recording.first_step or any(
        isinstance(event, ev.Gap | ev.Keyframe | ev.Fork) for event in recording.events
    ):
        raise RecordingError(
            "Only a session from the engine's first step, without gaps and forks, runs again."
        )
    names = {f.name for f in fields(EngineConfig)}
    known = EngineConfig(**{name: value for name, value in recording.config.items() if name in names})
    config = EngineConfig(**{name: getattr(known, name) for name in names} | changes)
    fixed = [name for name in changes if name not in LIVE_SETTINGS]
    start = config if fixed or step == 0 else known
    inputs = _inputs(recording, asked)
    with closing(engine.twin(start)) as twin, Recorder(twin) as again:
        _play(twin, inputs, asked, step, None if start is config else config)
    way = "The model ran it again from the first step"
    way += (
        f": {' and '.join(fixed)} cannot change in a running engine."
        if fixed
        else f", with the change after step {step}."
    )
    return Branch(
        again, recording, 0 if fixed else step, dict(changes), way if changes else f"{way.split(',')[0]}."
    )


def _inputs(recording: Recording, asked: Mapping[str, Asked]) -> list[tuple[int, str, str]]:
    """(step after which it came, "submit" or "abort", request id), a request with several outputs once."""
    found: list[tuple[int, str, str]] = []
    for event in recording.events:
        if isinstance(event, ev.Submit):
            rid = event.rid if event.rid in asked else event.rid.rpartition(".")[0]
            if rid not in asked:
                raise RecordingError(
                    f"Request {event.rid!r} came past the session, so it cannot be asked again."
                )
            if rid == event.rid or event.rid.endswith(".0"):
                found.append((event.step, "submit", rid))
        elif isinstance(event, ev.Abort):
            found.append((event.step, "abort", event.rid))
    return found


def _play(
    engine: Engine,
    inputs: list[tuple[int, str, str]],
    asked: Mapping[str, Asked],
    step: int,
    config: EngineConfig | None,
) -> None:
    """Feed the inputs when their steps come, change the settings after `step`, and run until nothing is left."""
    left = list(inputs)
    while left or engine.has_unfinished():
        now = engine.scheduler.step
        if config is not None and now >= step:
            engine.scheduler.reconfigure(config, None, f"forked at step {step}")
            config = None
        while left and (left[0][0] <= now or not engine.has_unfinished()):
            _, kind, rid = left.pop(0)
            if kind == "submit":
                one = asked[rid]
                engine.add_request(one.prompt, one.params, rid, **one.options)
            elif engine.is_live(rid):
                engine.abort(rid)
        engine.step()
