"""`why(recording, "r3")`: where a request's time went, whom it waited for, and which single change would have helped.

Every statement comes with its step numbers. What would have helped is found by running the core again over the same
requests with one setting changed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from pagedinfer.config import EngineConfig
from pagedinfer.errors import ConfigError, RecordingError, UnknownRequest, count, readable
from pagedinfer.sim.fork import fork
from pagedinfer.trace import events as ev
from pagedinfer.trace.metrics import Life, lives
from pagedinfer.trace.moments import moments
from pagedinfer.trace.phases import PHASES, Phases, phases
from pagedinfer.trace.recording import Recording

__all__ = ["Cause", "Help", "Report", "why"]

WAITING = ("queue", "preempted", "stall")
LOST = (*WAITING, "recompute")
"""Phases in which a request does not come forward."""

MAX_NAMED = 3


@dataclass(slots=True)
class Cause:
    """Why it waited in some of the steps: the first sentence that said so, and all steps with sentences like it."""

    sentence: str
    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Help:
    """One change, re-simulated from the first step: how many steps the request gains; negative: it loses."""

    changes: dict[str, Any]
    ttft: float | None
    e2e: float | None

    @property
    def name(self) -> str:
        """The change as a label: "num_blocks=20"."""
        return ", ".join(f"{name}={value}" for name, value in self.changes.items())


@dataclass(slots=True)
class Report:
    """All that `why` found; `str` and notebooks show it as sentences.

    Attributes:
        phases: every step of the request by phase.
        causes: why it waited, the longest first.
        ran_meanwhile: request -> the steps in which it computed while this one waited.
        preempted: (step, the engine's cause) of each time it lost its place.
        preempted_for_it: (step, request, cause) of those that gave way to it.
        evicted_for_it: (step, blocks, cause) of cached blocks that went for it.
        helps: candidates, those that gain most first; empty when it cannot be re-simulated or nothing waited.
        note: why there are no candidates, "" when there are.
    """

    phases: Phases
    causes: list[Cause] = field(default_factory=list)
    ran_meanwhile: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[tuple[int, str]] = field(default_factory=list)
    preempted_for_it: list[tuple[int, str, str]] = field(default_factory=list)
    evicted_for_it: list[tuple[int, tuple[int, ...], str]] = field(default_factory=list)
    helps: list[Help] = field(default_factory=list)
    note: str = ""

    @property
    def life(self) -> Life:
        """The request's times and counts."""
        return self.phases.life

    @property
    def best(self) -> Help | None:
        """The change after which it would have ended (or else begun) soonest; None when none helps."""
        return next((help_ for help_ in self.helps if _gain(help_) > (0.0, 0.0)), None)

    @property
    def sentences(self) -> list[str]:
        """The report, a sentence or two for each finding."""
        return [readable(sentence) for sentence in _sentences(self)]

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rest = self.sentences
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in rest)
        return f"<p><b>{escape(head)}</b></p><ul>{items}</ul>"


def why(recording: Recording, rid: str, *, candidates: Sequence[dict[str, Any]] | None = None) -> Report:
    """Explain one request (the latest of this id).

    `candidates` are the changes to try, each some fields of `EngineConfig`; by default a handful that fit the
    settings.

    Raises:
        UnknownRequest: no request of this id was submitted while the recording ran.
    """
    everyone = phases(recording)
    mine = [one for one in everyone if one.life.rid == rid]
    if not mine:
        known = ", ".join(list(dict.fromkeys(one.life.rid for one in everyone))[:8]) or "none"
        raise UnknownRequest(f"No request {rid!r} was submitted in this recording; it has {known}.")
    report = Report(mine[-1])
    _look_back(recording, report)
    if not report.phases.steps(*LOST):
        report.note = "Nothing waited, so no change of the engine's settings was tried."
        return report
    if candidates is None:
        candidates = default_candidates(recording, set(report.phases.by_step.values()))
    _try(recording, report, len(mine) - 1, candidates)
    return report


# -- what happened ----------------------------------------------------------------------------------------------------


def _look_back(recording: Recording, report: Report) -> None:
    rid, by_step = report.life.rid, report.phases.by_step
    causes: dict[str, Cause] = {}
    for moment in moments(recording):
        if moment.lives.get(rid) is None or moment.step not in by_step:
            continue
        waited = by_step[moment.step] in WAITING
        for event in moment.events:
            if isinstance(event, ev.Step) and waited:
                sentence = _reason(event, rid)
                causes.setdefault(_pattern(sentence), Cause(sentence)).steps.append(moment.step)
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


def _reason(step: ev.Step, rid: str) -> str:
    """Why a request was left out of a step: its own reason, or that of the one in front of it."""
    if rid in step.reasons:
        return step.reasons[rid]
    front = next((r for r in reversed(step.reasons) if r not in step.scheduled), None)
    return f"behind {front}: {step.reasons[front]}" if front is not None else "no reason was told"


def _pattern(sentence: str) -> str:
    """A sentence without its numbers, so that equal causes are one."""
    return re.sub(r"\bblocks\b", "block", re.sub(r"\d+", "#", sentence))


# -- what would have helped -------------------------------------------------------------------------------------------


def default_candidates(recording: Recording, spent: Container[str] = PHASES) -> list[dict[str, Any]]:
    """Single changes worth a try: a larger pool, budget or batch, no watermark, other policies; aging where it is off.

    Policies are those that bear on the phases in `spent`.
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
    if config.get("order") == "priority":  # under another order requests with a priority are refused
        tried = [(phase, changes) for phase, changes in tried if "order" not in changes]
    return [
        changes
        for phase, changes in tried
        if (not phase or phase in spent) and _differs(config, changes) and _is_sound(config, changes)
    ]


def _differs(config: dict[str, Any], changes: dict[str, Any]) -> bool:
    """Whether any setting changes; those that the recording's engine did not have are left alone."""
    return any(name in config and config[name] != value for name, value in changes.items())


def _is_sound(config: dict[str, Any], changes: dict[str, Any]) -> bool:
    try:
        EngineConfig(**(config | changes))
    except ConfigError:  # it does not go with the other settings
        return False
    return True


def _try(recording: Recording, report: Report, number: int, candidates: Sequence[dict[str, Any]]) -> None:
    """Re-simulate each candidate and note what life `number` of this id gains against the same without a change."""
    try:
        plain = lives(fork(recording, recording.first_step).recording)
    except RecordingError as error:
        report.note = f"What would have helped cannot be re-simulated: {error}"
        return
    before = [life for life in plain if life.rid == report.life.rid][number]
    for changes in candidates:
        others = lives(fork(recording, recording.first_step, **changes).recording)
        if len(others) < len(plain):
            continue  # it refuses requests; those that are left would seem to gain by it
        after = [life for life in others if life.rid == report.life.rid][number]
        ttft, e2e = _minus(_ttft(before), _ttft(after)), _minus(before.steps.e2e, after.steps.e2e)
        report.helps.append(Help(changes, ttft, e2e))
    report.helps.sort(key=_gain, reverse=True)  # stable: of equal ones the first tried stays in front


def _ttft(life: Life) -> float | None:
    """TTFT; of a request that ended without a token its whole life, which its TTFT would have passed."""
    return life.steps.e2e if life.steps.ttft is None else life.steps.ttft


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _gain(help_: Help) -> tuple[float, float]:
    return (help_.e2e or 0.0, help_.ttft or 0.0)


# -- in words ---------------------------------------------------------------------------------------------------------


def _sentences(report: Report) -> Iterator[str]:
    by_phase = report.phases.counts
    total = len(report.phases.by_step)
    yield _headline(report, total)
    if not total:
        return
    if not report.phases.steps(*LOST):
        yield f"Nothing waited: it was computed in every step{_where(report.phases.steps(*by_phase))}."
    else:
        spent = [(n, phase) for phase, n in by_phase.items() if n]
        parts = [f"{phase} {n} ({n / total:.0%}{_where(report.phases.steps(phase))})" for n, phase in spent]
        yield f"Its {count(total, 'step')}: {', '.join(parts)}."
    for cause in report.causes:
        yield f"It waited {count(len(cause.steps), 'step')}{_where(cause.steps)}: {cause.sentence}."
    if report.ran_meanwhile:
        ran = [f"{rid} in {len(steps)}" for rid, steps in report.ran_meanwhile.items()]
        waited = len(report.phases.steps(*WAITING))
        hidden = f" and {len(ran) - MAX_NAMED} more" if len(ran) > MAX_NAMED else ""
        yield f"In those {count(waited, 'step')} others were computed: {', '.join(ran[:MAX_NAMED])}{hidden}."
    for step, cause_told in report.preempted:
        yield f"It was preempted{_where([step])}: {cause_told}."
    if again := report.phases.num_recomputed_tokens:
        yield f"{count(again, 'token')} had to be computed again{_where(list(report.phases.recomputed))}."
    for step, rid, cause_told in report.preempted_for_it:
        yield f"{rid} was preempted for it{_where([step])}: {cause_told}."
    for step, blocks, cause_told in report.evicted_for_it:
        yield f"{count(len(blocks), 'cached block')} went for it{_where([step])}: {cause_told}."
    yield from _help_sentences(report)


def _headline(report: Report, total: int) -> str:
    life = report.life
    if not total:
        return f"{life.rid} was there for no step{f' ({life.finish_reason})' if life.finish_reason else ''}."
    ttft = "no token came" if life.steps.ttft is None else f"TTFT {_number(life.steps.ttft)}"
    end = f"ended ({life.finish_reason})" if life.finish_reason else "is still live"
    return f"{life.rid} {end} after {count(total, 'step')}: {ttft}, {count(life.num_output_tokens, 'token')} produced."


def _help_sentences(report: Report) -> Iterator[str]:
    if report.note:
        yield report.note
        return
    if best := report.best:
        yield f"What would have helped most: {best.name}, {_effect(best)}."
    elif report.helps:
        yield "No single change that was tried would have helped."
    if told := [f"{help_.name} ({_effect(help_)})" for help_ in report.helps if help_.ttft or help_.e2e]:
        yield f"Re-simulated from the first step: {', '.join(told)}."
    if same := [help_.name for help_ in report.helps if not (help_.ttft or help_.e2e)]:
        yield f"Re-simulated without a difference to it: {', '.join(same)}."


def _effect(help_: Help) -> str:
    parts = [
        f"{name} {_number(abs(gain))} {'step' if abs(gain) == 1 else 'steps'} {'shorter' if gain > 0 else 'longer'}"
        for name, gain in (("TTFT", help_.ttft), ("E2E", help_.e2e))
        if gain
    ]
    return " and ".join(parts)


def _number(value: float) -> str:
    return f"{value:g}"


def _where(steps: Sequence[int]) -> str:
    """Evidence: ", steps 3 to 7 and 9"; long lists are cut."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][1] == step - 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    if not runs:
        return ""
    said = [str(a) if a == b else f"{a} to {b}" for a, b in runs[:4]]
    more = f" and {len(runs) - 4} more stretches" if len(runs) > 4 else ""
    return f", {'step' if len(steps) == 1 else 'steps'} {', '.join(said)}{more}"
