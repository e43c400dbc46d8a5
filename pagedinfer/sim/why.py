"""`why(recording, "r3")`: where a request's time went, whom it waited for, and which single change would have helped.

Every statement comes with its step numbers. What would have helped is found by running the core again over the same
requests with one setting changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from pagedinfer.config import EngineConfig
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import ConfigError, RecordingError, UnknownRequest
from pagedinfer.sim.advice import Help, growth, label_of, price_of
from pagedinfer.sim.progress import Progress
from pagedinfer.sim.report import LOST, WAITING, Cause, Report
from pagedinfer.sim.trials import Outcome, Trials
from pagedinfer.trace import events as ev
from pagedinfer.trace.moments import moments
from pagedinfer.trace.phases import PHASES, Phases, phases
from pagedinfer.trace.recording import Recording

__all__ = ["default_candidates", "why"]


def why(
    recording: Recording,
    rid: str,
    *,
    candidates: Sequence[dict[str, Any]] | None = None,
    recorded_policy: Callable[[EngineConfig], Policy] | None = None,
) -> Report:
    """Explain one request (the latest of this id).

    `candidates` are the changes to try, each some fields of `EngineConfig`; by default a handful that fit the
    settings. A recording that was made with a policy of one's own needs its class as `recorded_policy`.

    Raises:
        UnknownRequest: no request of this id was submitted while the recording ran.
    """
    everyone = phases(recording)
    mine = [one for one in everyone if one.life.rid == rid]
    if not mine:
        raise UnknownRequest(_unknown(recording, rid, everyone))
    report = Report(mine[-1])
    report.is_cut = any(one.life.finish_reason is None for one in everyone)
    report.is_imported = "imported_from" in recording.info
    _look_back(recording, report)
    if not report.phases.steps(*LOST):
        report.note = "Nothing waited, so no change of the engine's settings was tried."
        return report
    try:
        trials = Trials(recording, rid, len(mine) - 1, recorded_policy)
    except RecordingError as error:
        report.note = f"What would have helped cannot be re-simulated: {error}"
        return report
    if candidates is None:
        candidates = default_candidates(recording, set(report.phases.by_step.values()))
    _try(trials, report, candidates, recording.config)
    _price(trials, report)
    return report


def _unknown(recording: Recording, rid: str, everyone: Sequence[Phases]) -> str:
    """The sentence why there is no report about this id."""
    for event in recording.events:
        if isinstance(event, ev.Reject) and event.rid == rid:
            return f"Request {rid!r} was refused when it came, after step {event.step}: {event.why}"
    ids = list(dict.fromkeys(one.life.rid for one in everyone))
    if children := [known for known in ids if known.rpartition(".")[0] == rid]:
        return f"Request {rid!r} has several outputs, each a request; ask about one: {', '.join(children)}."
    return f"No request {rid!r} was submitted in this recording; it has {', '.join(ids[:8]) or 'none'}."


# -- what happened ----------------------------------------------------------------------------------------------------


def _look_back(recording: Recording, report: Report) -> None:
    rid, by_step = report.life.rid, report.phases.by_step
    last = max(by_step, default=0)
    causes: dict[str, Cause] = {}
    for moment in moments(recording):
        if moment.step > last:
            break
        if moment.lives.get(rid) is None or moment.step not in by_step:
            continue
        waited = by_step[moment.step] in WAITING
        ends = any(isinstance(event, ev.Finish) and event.rid == rid for event in moment.events)
        for event in moment.events:
            if isinstance(event, ev.Step) and waited:
                front, sentence = _reason(event, report, ends)
                cause = causes.setdefault(_pattern(sentence, front), Cause(sentence))
                cause.add(moment.step, front, sentence)
                if sentence.startswith("token budget of "):
                    cause.add_spent(moment.step, event.scheduled)
                for other in event.scheduled:
                    report.ran_meanwhile.setdefault(other, []).append(moment.step)
            elif isinstance(event, ev.Preempt) and event.rid == rid:
                report.preempted.append((moment.step, event.why))
            elif isinstance(event, ev.Preempt) and event.why.startswith(f"{rid} "):
                report.preempted_for_it.append((moment.step, event.rid, event.why))
            elif isinstance(event, ev.Evict) and event.why.startswith(f"{rid} "):
                report.evicted_for_it.append((moment.step, event.pblks, event.why))
    report.causes = sorted(causes.values(), key=lambda cause: -len(cause.steps))
    report.ran_meanwhile = dict(sorted(report.ran_meanwhile.items(), key=lambda item: -len(item[1])))


def _reason(step: ev.Step, report: Report, ends: bool) -> tuple[str, str]:
    """(who was in front of it, "" for nobody, the sentence why it or that one was left out of a step)."""
    rid, life = report.life.rid, report.life
    if rid in step.reasons:
        return "", step.reasons[rid]
    if ends:
        return "", f"it ended in this step ({life.finish_reason}: {life.detail})"
    front = next((r for r in reversed(step.reasons) if r not in step.scheduled), "")
    return (front, step.reasons[front]) if front else ("", "no reason was told")


def _pattern(sentence: str, front: str) -> str:
    """A sentence without its numbers and whom it is about, so that equal causes are one."""
    told = re.sub(r"\d+", "#", sentence.replace(front, "it", 1) if front else sentence)
    return ("behind " if front else "") + re.sub(r"\bblocks\b", "block", told)


# -- what would have helped -------------------------------------------------------------------------------------------


def default_candidates(recording: Recording, spent: Container[str] = PHASES) -> list[dict[str, Any]]:
    """Single changes worth a try: a larger pool, budget or batch, no watermark, other policies; aging where it is off.

    Policies are those that bear on the phases in `spent`. Chunks are capped where one took most of a budget that was
    used up.
    """
    config = recording.config
    blocks = config["num_blocks"]
    tried: list[tuple[str, dict[str, Any]]] = [
        ("", {"num_blocks": -(-blocks * 3 // 2)}),
        ("", {"num_blocks": blocks * 2}),
        ("", {"max_num_batched_tokens": config["max_num_batched_tokens"] * 2}),
        ("", {"max_num_seqs": config["max_num_seqs"] * 2}),
        ("", {"watermark": 0.0} if int(config["watermark"] * blocks) else {}),
        ("queue", {"order": "shortest-prefill"}),
        ("queue", {"admission": "fits-now"}),
        (
            "queue",
            {"aging": 1.0} if config.get("order") == "priority" and config.get("aging") is None else {},
        ),
        ("stall", {"chunking": "equal-progress"}),
        ("preempted", {"victim": "fewest-tokens-lost"}),
        ("preempted", {"admission": "full-reservation"}),
        (
            "preempted",
            {"preempt_mode": "swap", "num_host_blocks": max(blocks, config.get("num_host_blocks", 0))},
        ),
    ]
    if any(phase in spent for phase in WAITING):
        tried += [("", {"max_chunk_tokens": cap}) for cap in _chunk_caps(recording)]
    if config.get("order") == "priority":  # under another order requests with a priority are refused
        tried = [(phase, changes) for phase, changes in tried if "order" not in changes]
    return [
        changes
        for phase, changes in tried
        if (not phase or phase in spent) and _differs(config, changes) and _is_sound(config, changes)
    ]


def _chunk_caps(recording: Recording) -> list[int]:
    """Half and a quarter of the token budget, where a step used it up and more than that on one request."""
    budget = recording.config["max_num_batched_tokens"]
    plans = [event for event in recording.events if isinstance(event, ev.Step)]
    full = [plan.scheduled.values() for plan in plans if sum(plan.scheduled.values()) >= plan.budget]
    most = max(map(max, filter(None, full)), default=0)
    return [cap for cap in dict.fromkeys((-(-budget // 2), -(-budget // 4))) if cap < most]


def _differs(config: dict[str, Any], changes: dict[str, Any]) -> bool:
    """Whether any setting changes; those that the recording's engine did not have are left alone."""
    return any(name in config and config[name] != value for name, value in changes.items())


def _is_sound(config: dict[str, Any], changes: dict[str, Any]) -> bool:
    try:
        EngineConfig(**(config | changes))
    except ConfigError:  # it does not go with the other settings
        return False
    return True


def _try(
    trials: Trials, report: Report, candidates: Sequence[dict[str, Any]], config: Mapping[str, Any]
) -> None:
    """Re-simulate each candidate and note what the request gains against the same without a change."""
    with Progress("Re-simulating without a change", "step") as progress:
        before = trials.run({}, progress)
        if before is None:
            report.note = "What would have helped cannot be re-simulated: run again, the engine refuses it."
            return
        report.unchanged = before
        for number, changes in enumerate(candidates, 1):
            progress.what = f"Re-simulating {label_of(changes)} ({number} of {len(candidates)})"
            after = trials.run(changes, progress)
            if after is None or after.refused - before.refused:
                continue  # it refuses requests; those that are left would seem to gain by it
            ttft, e2e = _minus(_ttft(before), _ttft(after)), _minus(before.e2e, after.e2e)
            first = after.ttft if before.ttft is None else None
            more = after.num_tokens - before.num_tokens
            report.helps.append(Help(changes, ttft, e2e, more, first, growth(config, changes)))
    report.helps.sort(key=lambda help_: help_.gain, reverse=True)  # stable: the first tried stays in front


def _price(trials: Trials, report: Report) -> None:
    """Run the best change and none to the end, and note what the others lose."""
    if (best := report.best) is None:
        return
    with Progress(f"Re-simulating {best.name} to the end", "step") as progress:
        before, after = trials.everyone({}, progress), trials.everyone(best.changes, progress)
    if before is not None and after is not None:
        report.price = price_of(report.life, before, after)


def _ttft(outcome: Outcome) -> float | None:
    """TTFT; of a request that ended without a token its whole life, which its TTFT would have passed."""
    return outcome.e2e if outcome.ttft is None else outcome.ttft


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
