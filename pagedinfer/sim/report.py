"""What `why` found about a request, and how it says so: every statement with the steps that show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from pagedinfer.errors import count, readable
from pagedinfer.sim.advice import Help, Price, advice, best_of
from pagedinfer.sim.trials import Outcome
from pagedinfer.trace.metrics import Life
from pagedinfer.trace.phases import Phases

__all__ = ["LOST", "WAITING", "Cause", "Report"]

WAITING = ("queue", "preempted", "stall")
LOST = (*WAITING, "recompute")
"""Phases in which a request does not come forward."""

MAX_NAMED, MAX_CAUSES, MAX_TRIED = 3, 4, 6
"""Names of a kind, causes, and changes in a report; it is to fit on a screen."""

MAX_SPENDERS, LARGE_SHARE = 2, 0.25
"""Who used a budget up is named if it took such a share of a step, and more than one token."""


@dataclass(slots=True)
class Cause:
    """Why it waited in some of the steps.

    Attributes:
        sentence: the first that said so, of the request itself or of the one in front of it.
        last: the last that did; its numbers, or whom it is about, may differ.
        spent: request -> step -> tokens of those that used the steps' budget up; empty where that was not the cause.
        steps: those with sentences like it.
        fronts: who was in front, and in how many of the steps; empty where the sentence is about the request itself.
    """

    sentence: str
    last: str = ""
    steps: list[int] = field(default_factory=list)
    fronts: Counter[str] = field(default_factory=Counter)
    spent: dict[str, dict[int, int]] = field(default_factory=dict)

    def add(self, step: int, front: str, sentence: str) -> None:
        """One step more, in which `front` ("" for nobody) was before it and `sentence` was told."""
        self.steps.append(step)
        self.last = sentence
        if front:
            self.fronts[front] += 1

    def add_spent(self, step: int, scheduled: Mapping[str, int]) -> None:
        """In this step these tokens of others left no budget."""
        for rid, num_tokens in scheduled.items():
            self.spent.setdefault(rid, {})[step] = num_tokens

    @property
    def spenders(self) -> str:
        """Who used the budget up: " (r2: 22 tokens a step in steps 5 to 9)"; "" where that was not the cause."""
        if not self.spent:
            return ""
        used: Counter[int] = Counter()
        for steps in self.spent.values():
            used.update(steps)
        large = {}
        for rid, steps in self.spent.items():
            if chunks := {step: n for step, n in steps.items() if 1 < n >= LARGE_SHARE * used[step]}:
                large[rid] = chunks
        ranked = sorted(large, key=lambda rid: -sum(large[rid].values()))[:MAX_SPENDERS]
        others = len(self.spent) - len(ranked)
        if not ranked:
            most = max(max(steps.values()) for steps in self.spent.values())
            return f" ({count(others, 'request')}, {'' if most == 1 else 'at most '}{count(most, 'token')} a step each)"
        told = [f"{rid}: {_tokens_in(large[rid])}" for rid in ranked]
        return f" ({'; '.join(told)}{f'; {others} more' if others else ''})"

    def __str__(self) -> str:
        if not self.fronts:
            behind = ""
        elif len(self.fronts) == 1:
            behind = f"behind {next(iter(self.fronts))}: "
        else:
            behind = f"behind {_most([f'{rid} in {n}' for rid, n in self.fronts.most_common()])}: "
        told = (
            self.sentence if self.sentence == self.last else f"at first {self.sentence}; at last {self.last}"
        )
        return behind + told + self.spenders


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
        price: what `best` costs the others, re-simulated to the run's end; None when there is none.
        helps: candidates, those that gain most first; empty when it cannot be re-simulated or nothing waited.
        unchanged: the re-simulation without a change, from which gains count; None when there is none.
        is_cut: whether the recording ends before everybody does.
        is_imported: whether the recording is of another engine.
        note: why there are no candidates, "" when there are.
    """

    phases: Phases
    causes: list[Cause] = field(default_factory=list)
    ran_meanwhile: dict[str, list[int]] = field(default_factory=dict)
    preempted: list[tuple[int, str]] = field(default_factory=list)
    preempted_for_it: list[tuple[int, str, str]] = field(default_factory=list)
    evicted_for_it: list[tuple[int, tuple[int, ...], str]] = field(default_factory=list)
    helps: list[Help] = field(default_factory=list)
    unchanged: Outcome | None = None
    price: Price | None = None
    is_cut: bool = False
    is_imported: bool = False
    note: str = ""

    @property
    def life(self) -> Life:
        """The request's times and counts."""
        return self.phases.life

    @property
    def drift(self) -> str:
        """In what the re-simulation without a change differs from the recording: "" when in nothing."""
        if self.unchanged is None:
            return ""
        pairs = (
            ("TTFT", self.life.steps.ttft, self.unchanged.ttft),
            ("E2E", self.life.steps.e2e, self.unchanged.e2e),
        )
        return " and ".join(
            f"{name} {_number(now)} instead of {_number(was)}"
            for name, was, now in pairs
            if was is not None and now is not None and was != now
        )

    @property
    def best(self) -> Help | None:
        """The change after which it would have come furthest, or ended or begun soonest; None when none helps.

        Of changes that help about as much (within a step, or 5%) one that costs no hardware.
        """
        return best_of(self.helps)[0]

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
    for cause in report.causes[:MAX_CAUSES]:
        yield f"It waited {count(len(cause.steps), 'step')}{_where(cause.steps)}: {cause}."
    if rest := sorted(step for cause in report.causes[MAX_CAUSES:] for step in cause.steps):
        yield f"It waited {count(len(rest), 'step')} more for other reasons{_where(rest)}."
    if report.ran_meanwhile:
        ran = [f"{rid} in {len(steps)}" for rid, steps in report.ran_meanwhile.items()]
        waited = len(report.phases.steps(*WAITING))
        when = "that step" if waited == 1 else f"those {count(waited, 'step')}"
        yield f"In {when} others were computed: {_most(ran)}."
    yield from _first(
        "It was preempted",
        [(step, f"It was preempted{_where([step])}: {why}.") for step, why in report.preempted],
    )
    if again := report.phases.num_recomputed_tokens:
        yield f"{count(again, 'token')} had to be computed again{_where(list(report.phases.recomputed))}."
    yield from _first(
        "Somebody was preempted for it",
        [
            (step, f"{rid} was preempted for it{_where([step])}: {why}.")
            for step, rid, why in report.preempted_for_it
        ],
    )
    yield from _first(
        "Cached blocks were evicted for it",
        [
            (step, f"{_evicted(blocks)} for it{_where([step])}: {why}.")
            for step, blocks, why in report.evicted_for_it
        ],
    )
    life = report.life
    if life.finish_reason in ("abort", "error") or "pool" in life.detail:
        yield f"It was ended after step {life.steps.finished}: {life.detail}."
    if report.is_imported and (times := _seconds(life)):
        yield f"By its recording's clock: {times}."
    yield from _help_sentences(report)


def _first(what: str, told: Sequence[tuple[int, str]]) -> Iterator[str]:
    """The first sentences of (step, sentence), and one about those that are left."""
    shown = len(told) if len(told) == MAX_NAMED + 1 else MAX_NAMED  # one that is left takes a line, too
    for _, sentence in told[:shown]:
        yield sentence
    if rest := [step for step, _ in told[shown:]]:
        yield f"{what} {count(len(rest), 'time')} more{_where(sorted(set(rest)))}."


def _evicted(blocks: Sequence[int]) -> str:
    return f"{count(len(blocks), 'cached block')} {'was' if len(blocks) == 1 else 'were'} evicted"


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
    now = report.unchanged
    if report.life.finish_reason is None and now is not None:
        first = "no first token" if now.ttft is None else f"TTFT {_number(now.ttft)}"
        end = "no end" if now.e2e is None else f"E2E {_number(now.e2e)}"
        yield (
            "The recording ends before it does. Re-simulated, everybody runs on to the most tokens asked for; without "
            f"a change it then has {first} and {end}, from which gains count."
        )
    elif report.drift:
        yield (
            f"The re-simulation does not repeat this run exactly: without a change it gives {report.drift}. "
            "Gains count from there."
        )
    yield from advice(report.helps, report.price, report.life.finish_reason is None, report.is_cut)
    if told := [f"{help_.name} ({help_.effect})" for help_ in report.helps if help_.effect]:
        yield f"Re-simulated from the first step: {_most(told, MAX_TRIED)}."
    if same := [help_.name for help_ in report.helps if not help_.effect]:
        yield f"Re-simulated without a difference to it: {', '.join(same)}."


def _seconds(life: Life) -> str:
    times = life.seconds
    told = (("queue time", times.queue_time), ("TTFT", times.ttft), ("E2E", times.e2e))
    return ", ".join(f"{name} {value:.3g} s" for name, value in told if value is not None)


def _most(items: Sequence[str], most: int = MAX_NAMED) -> str:
    """The first of them, and how many more there are."""
    hidden = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + hidden


def _tokens_in(steps: Mapping[int, int]) -> str:
    """Tokens by step: "22 tokens a step in steps 5 to 9"."""
    least, most = min(steps.values()), max(steps.values())
    many = count(most, "token") if least == most else f"{least} to {most} tokens"
    return f"{many}{' a step' if len(steps) > 1 else ''} in {_where(list(steps)).removeprefix(', ')}"


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
    left = len(runs) - 4
    more = f" and {left} more stretch{'' if left == 1 else 'es'}" if left > 0 else ""
    return f", {'step' if len(steps) == 1 else 'steps'} {', '.join(said)}{more}"
