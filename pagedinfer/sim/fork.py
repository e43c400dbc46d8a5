"""Forking a recording: go back to a step, change a setting, and run on without the model.

The core runs again over the recorded inputs; from the fork on it decides anew. Each request comes after the step
after which it came, produces as many tokens as it did, ends for the reason for which it did, and is aborted after the
step after which it was. A request whose own end is not in the recording (it was aborted, cut by the pool, or lives
yet) may go on to its `max_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from html import escape
from typing import Any

from pagedinfer.config import EngineConfig
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import ConfigError, readable
from pagedinfer.sim.player import MAX_STEPS, Inputs, Player
from pagedinfer.sim.progress import Progress
from pagedinfer.sim.rerun import Driver
from pagedinfer.trace import events as ev
from pagedinfer.trace.recording import Recording, RecordingError

__all__ = ["LIVE_SETTINGS", "Branch", "changed_config", "check_policy", "fork", "fork_meta"]

LIVE_SETTINGS = frozenset(
    ("max_num_batched_tokens", "max_num_seqs", "watermark", "order", "victim", "preempt_mode", "admission", "chunking",
     "max_chunk_tokens", "aging", "swap_cost_tokens", "expected_output_tokens", "pressure", "max_num_waiting",
     "tenant_max_running", "tenant_max_blocks")
)  # fmt: skip
"""Settings that a running engine can take; any other change means another engine from the first step."""


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
        return readable(f"Branch({self.name}: {self.way} {self.recording!r})")

    def _repr_html_(self) -> str:
        said = readable(f"<p><b>{escape(self.name)}</b>: {escape(self.way)}</p>")
        return said + self.recording._repr_html_()


def fork(
    recording: Recording, step: int, *, policy: Policy | type[Policy] | None = None,
    recorded_policy: Policy | None = None, **changes: Any,
) -> Branch:  # fmt: skip
    """The run as it would have gone on from the end of `step` with other settings (fields of `EngineConfig`).

    Settings in `LIVE_SETTINGS` change after `step`. Any other (`num_blocks`, `block_size`, ...) cannot change in a
    running engine: it holds from the first step, with the recorded requests at their recorded steps, and `Branch.way`
    says so. Where fewer seats are left than requests run, the newest are preempted first.

    `policy` decides from the fork on, a policy of your own or its class. A recording that was made with one needs an
    equal one as `recorded_policy`, which also goes on deciding when there is no other.

    Raises:
        RecordingError: the recording began mid-run or has a gap, or has no such step.
        ConfigError: an unknown setting or a bad value.
    """
    known, config = recording.config, changed_config(recording, changes)
    now = config.to_dict()  # values as a recording holds them
    changes = {name: now[name] for name in changes if known.get(name) != now[name]}
    check_policy(policy)
    chosen = policy(config) if isinstance(policy, type) else policy or recorded_policy
    label = changes | ({"policy": type(chosen).__name__} if policy is not None else {})
    fixed = [name for name in changes if name not in LIVE_SETTINGS]
    end = _end_of(recording, step)
    way = f"re-run to step {step}, then run on{' with the change' if label else ''}."
    if fixed:
        way = f"{' and '.join(fixed)} cannot change in a running engine: re-run from the first step."
        step = recording.first_step
    if step == recording.first_step:
        end = 0
        driver = Driver([], config, chosen)
        driver.recording.add(fork_meta(config.to_dict(), recording, step, label))
    else:
        driver = Driver(recording.events[:end], EngineConfig(**known), recorded_policy)
        driver.run()
        driver.recording.events[0] = fork_meta(known, recording, step, label)
    player = Player(Inputs(recording), driver, end)
    player.settle()
    if step > recording.first_step and label:
        driver.scheduler.reconfigure(config, chosen, f"forked at step {step}")
    with Progress("Running on without the model", "step") as progress:

        def looks() -> bool:
            progress(driver.scheduler.step)
            return False

        is_done = player.play(looks)
    notes = player.notes + ([] if is_done else [f"It was cut off after {MAX_STEPS} steps."])
    return Branch(driver.recording, recording, step, label, " ".join([way, *notes]), not notes)


def changed_config(recording: Recording, changes: dict[str, Any]) -> EngineConfig:
    """The recorded settings with changes.

    Raises:
        RecordingError: the recording cannot be forked. ConfigError: an unknown setting or a bad value.
    """
    known = {f.name for f in fields(EngineConfig)}
    if "imported_from" in recording.info:
        raise RecordingError(
            "This recording is of another engine, imported; only our own runs can be forked."
        )
    if not recording.config or any(isinstance(event, ev.Keyframe | ev.Gap) for event in recording.events):
        raise RecordingError("Only a recording from the engine's first step, without gaps, can be forked.")
    made = recording.info.get("fork")
    if isinstance(made, dict) and len(made) > 1 and made.get("step") != recording.first_step:
        raise RecordingError(
            f"This recording is a branch whose settings changed at step {made.get('step')}; fork the one it came from."
        )
    return EngineConfig(**{name: v for name, v in recording.config.items() if name in known} | changes)


def check_policy(policy: Any) -> None:
    """Refuse what is no policy.

    Raises:
        ConfigError: it is neither None, nor a policy of one's own, nor its class.
    """
    own = issubclass(policy, Policy) if isinstance(policy, type) else isinstance(policy, Policy)
    if policy is not None and not own:
        raise ConfigError(f"policy={policy!r:.80}: give a policy of your own or its class, made from Policy.")


def fork_meta(config: dict[str, Any], origin: Recording, step: int, changes: dict[str, Any]) -> ev.Meta:
    """The first event of a branch: the settings with which it begins, and what changed when."""
    meta = ev.Meta(ev.SCHEMA, config, origin.info | {"fork": {"step": step, **changes}})
    meta.step = origin.first_step
    return meta


def _end_of(recording: Recording, step: int) -> int:
    """Index after the last event of a step."""
    last = recording.step_events(step)[-1]
    return next(i for i in range(len(recording.events), 0, -1) if recording.events[i - 1] is last)
