"""Two or more runs side by side: where they part, what differs in the block map, and the numbers of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from typing import Any

from pagedinfer.errors import ConfigError, RecordingError, readable
from pagedinfer.sim.fork import Branch
from pagedinfer.trace import events as ev
from pagedinfer.trace.metrics import mean, percentile
from pagedinfer.trace.moments import Moment, moments
from pagedinfer.trace.phases import phases
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State
from pagedinfer.trace.tables import Table

__all__ = ["BlockDifference", "Comparison", "Divergence", "compare", "summary"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first step in which a run does something else than the first run, and what, in a sentence."""

    step: int
    sentence: str
    names: tuple[str, str]

    def __str__(self) -> str:
        return readable(f"{self.names[0]} and {self.names[1]} part at step {self.step}: {self.sentence}")


@dataclass(frozen=True, slots=True)
class BlockDifference:
    """A block that two runs use differently. `owners`: of each run, the (request, logical block) that hold it."""

    block_id: int
    owners: tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]

    def __str__(self) -> str:
        first, second = (
            " and ".join(f"{rid}, logical block {logical}" for rid, logical in held) or "free"
            for held in self.owners
        )
        return readable(f"block {self.block_id}: {first} | {second}")


def compare(*runs: Recording | Branch, names: Sequence[str] | None = None) -> Comparison:
    """Compare runs with the first of them. Names are those of branches, or "run 1", "run 2".

    Raises:
        ConfigError: fewer than two runs, runs that begin at different steps, or names that do not fit.
        RecordingError: an empty recording.
    """
    return Comparison(runs, names)


class Comparison:
    """Runs side by side; made by `compare`.

    Attributes:
        names: of the runs.
        recordings: the runs.
        divergences: for each run but the first, where it parts from the first; None where it never does.
        metrics: name of a run -> its `summary`.
    """

    def __init__(self, runs: Sequence[Recording | Branch], names: Sequence[str] | None = None) -> None:
        for run in runs:
            if not isinstance(run, Recording | Branch):
                raise ConfigError(f"compare takes recordings and branches, not a {type(run).__name__}.")
        if len(runs) < 2:
            raise ConfigError(f"A comparison needs at least two runs; {len(runs) or 'none'} came.")
        self.recordings = [run.recording if isinstance(run, Branch) else run for run in runs]
        if any(not recording.events for recording in self.recordings):
            raise RecordingError("A recording to compare is empty; record an engine first.")
        starts = [recording.first_step for recording in self.recordings]
        if len(set(starts)) > 1:
            raise ConfigError(
                f"The runs begin after steps {', '.join(map(str, starts))}; compare runs that begin together."
            )
        self.names = _names(runs, names)
        self.metrics = {name: summary(rec) for name, rec in zip(self.names, self.recordings, strict=True)}
        self.divergences = [self._part(index) for index in range(1, len(runs))]

    @property
    def first_divergence(self) -> Divergence | None:
        """The earliest of `divergences`; None when all runs are the same."""
        return min(filter(None, self.divergences), key=lambda d: d.step, default=None)

    @property
    def last_step(self) -> int:
        """The last step of the longest run."""
        return max(recording.last_step for recording in self.recordings)

    def _part(self, index: int) -> Divergence | None:
        names = self.names[0], self.names[index]
        done = ((m for m in moments(self.recordings[i]) if m.is_done) for i in (0, index))
        for first, second in zip_longest(*done):
            sentence = _difference(first, second, names)
            if sentence is not None:
                return Divergence((first or second).step, sentence, names)
        return None

    # -- step by step -----------------------------------------------------------------------------------------------

    def lockstep(self) -> Iterator[tuple[int, tuple[State | None, ...]]]:
        """(step, the state of each run at its end) for every step, None for a run that has ended.

        Each run's state is one object that changes, so read them before going on.
        """
        first = self.recordings[0].first_step
        yield from enumerate(zip_longest(*(recording.states() for recording in self.recordings)), first)

    def states(self, step: int) -> list[State]:
        """The state of each run at the end of a step; of one that has ended, its last."""
        return [recording.at(min(step, recording.last_step)) for recording in self.recordings]

    def block_differences(self, step: int, run: int = 1) -> list[BlockDifference]:
        """The blocks that the first run and run number `run` (from 0) use differently at the end of a step."""
        states = self.states(step)
        first, second = states[0].owners(), states[run].owners()
        return [
            BlockDifference(block_id, (tuple(first.get(block_id, ())), tuple(second.get(block_id, ()))))
            for block_id in sorted(first.keys() | second.keys())
            if sorted(first.get(block_id, ())) != sorted(second.get(block_id, ()))
        ]

    # -- showing ----------------------------------------------------------------------------------------------------

    @property
    def table(self) -> Table:
        """One row a number, one column a run."""
        rows = list(self.metrics[self.names[0]])
        columns: dict[str, list[Any]] = {"metric": rows}
        columns |= {name: [self.metrics[name][row] for row in rows] for name in self.names}
        return Table(columns)

    @property
    def sentences(self) -> list[str]:
        """Where each run parts from the first."""
        return [
            f"{self.names[0]} and {name} do the same in every step."
            if divergence is None
            else f"{divergence}."
            for name, divergence in zip(self.names[1:], self.divergences, strict=True)
        ]

    def __repr__(self) -> str:
        return readable("\n".join([*self.sentences, _text(self.table)]))

    def _repr_html_(self) -> str:
        table = self.table
        head = "".join(f"<th>{escape(name)}</th>" for name in table)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in row.values()) + "</tr>"
            for row in table.rows()
        )
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return readable(f"{said}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _names(runs: Sequence[Recording | Branch], names: Sequence[str] | None) -> list[str]:
    if names is None:
        given = [run.name if isinstance(run, Branch) else f"run {i}" for i, run in enumerate(runs, 1)]
        return [name if given.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(given, 1)]
    if len(names) != len(runs) or len({*names, "metric"}) != len(runs) + 1:
        raise ConfigError(
            f"names={list(names)!r}: {len(runs)} runs need as many different names, and none is metric."
        )
    return list(names)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{value:.3f}"
        if isinstance(value, float) and not value.is_integer()
        else f"{value:g}"
        if not isinstance(value, str)
        else value
    )


def _text(table: Table) -> str:
    rows = [list(table), *([_cell(value) for value in row.values()] for row in table.rows())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


# -- one run in numbers -----------------------------------------------------------------------------------------------


def summary(recording: Recording) -> dict[str, float | None]:
    """A run in numbers, each name with its unit. None where there is nothing to measure.

    KV usage is the mean and the most over all steps; KV waste the mean over the steps that hold any block. Makespan
    counts from the first submission to the last end.
    """
    everyone, steps = phases(recording), recording.steps
    times = [one.life.steps for one in everyone]
    measured: dict[str, list[float]] = {
        "TTFT": [t.ttft for t in times if t.ttft is not None],
        "TPOT": [t.tpot for t in times if t.tpot is not None],
        "E2E": [t.e2e for t in times if t.e2e is not None],
    }
    found: dict[str, float | None] = {
        "steps": recording.num_steps,
        "requests": len(times),
        "requests finished": len(measured["E2E"]),
        "output tokens": sum(one.life.num_output_tokens for one in everyone),
    }
    for name, values in measured.items():
        found |= {f"{name} mean, steps": mean(values)}
        found |= {f"{name} p{q}, steps": percentile(values, q) for q in (50, 99)}
    starts = [t.submitted for t in times if t.submitted is not None]
    ends = [t.finished for t in times if t.finished is not None]
    waste = [w for w, used in zip(steps["kv_waste"], steps["used_blocks"], strict=True) if used]
    return found | {
        "makespan, steps": max(ends) - min(starts) if ends else None,
        "preemptions": sum(one.life.num_preemptions for one in everyone),
        "recomputed tokens": sum(one.num_recomputed_tokens for one in everyone),
        "KV usage mean, share": mean(steps["kv_usage"]),
        "KV usage max, share": max(steps["kv_usage"], default=None),
        "KV waste mean, share": mean(waste),
    }


# -- what differs in a step -------------------------------------------------------------------------------------------

Facts = Mapping[str, Any]


def _happened(*kinds: type[ev.Event]) -> Callable[[Moment], Facts]:
    """Request -> the cause, where one is told."""

    def look(moment: Moment) -> Facts:
        found = [event for event in moment.events if isinstance(event, kinds)]
        return {getattr(e, "rid", ""): getattr(e, "detail", "") or getattr(e, "why", "") for e in found}

    return look


def _computed(moment: Moment) -> Facts:
    return {rid: end - start for rid, (start, end) in moment.spans.items()}


def _new_blocks(moment: Moment) -> Facts:
    """Request -> the blocks that it got; where runs were equal so far, they now hold the same if these are the same."""
    found: dict[str, tuple[int, ...]] = {}
    for event in moment.events:
        if isinstance(event, ev.Alloc | ev.Share):
            found[event.rid] = found.get(event.rid, ()) + tuple(event.pblks)
        elif isinstance(event, ev.Copy | ev.Move):
            found[event.rid] = found.get(event.rid, ()) + tuple(target for _, target in event.pairs)
    return found


def _tokens(moment: Moment) -> Facts:
    return {
        rid: n for event in moment.events if isinstance(event, ev.Commit) for rid, n in event.tokens.items()
    }


_DEEDS: list[tuple[str, Callable[[Moment], Facts]]] = [
    ("gets {}", _happened(ev.Submit)), ("rejects {}", _happened(ev.Reject)), ("aborts {}", _happened(ev.Abort)),
    ("preempts {}", _happened(ev.Preempt)), ("resumes {}", _happened(ev.Resume)), ("admits {}", _happened(ev.Admit)),
    ("ends {}", _happened(ev.Finish)),
]  # fmt: skip
"""What a run can do to a request and the other not; causes differ by their numbers and are only told."""

_AMOUNTS: list[tuple[str, Callable[[Moment], Facts]]] = [
    ("computes {} of {}", _computed), ("gives {} to {}", _tokens), ("takes {} for {}", _new_blocks),
]  # fmt: skip


def _difference(first: Moment | None, second: Moment | None, names: tuple[str, str]) -> str | None:
    """The first thing that two runs do differently in a step, None when they do the same."""
    if first is None or second is None:
        ended, other = names if first is None else names[::-1]
        return f"{ended} has ended, {other} goes on"
    for words, look in _DEEDS:
        ours, theirs = look(first), look(second)
        for rid in [*ours, *theirs]:
            if (rid in ours) != (rid in theirs):
                who, other, why = (*names, ours[rid]) if rid in ours else (*names[::-1], theirs[rid])
                return f"{who} {words.format(rid)}{f' ({why})' if why else ''}, {other} does not"
    for (words, look), unit in zip(_AMOUNTS, ("token", "token", "block"), strict=True):
        ours, theirs = look(first), look(second)
        for rid in [*ours, *theirs]:
            if ours.get(rid) != theirs.get(rid):
                return (
                    f"{names[0]} {words.format(_amount(ours.get(rid), unit), rid)}, "
                    f"{names[1]} {_amount(theirs.get(rid), unit)}"
                )
    return None


def _amount(value: Any, unit: str) -> str:
    if not value:
        return f"no {unit}s"
    if isinstance(value, tuple):
        return f"{unit}{'' if len(value) == 1 else 's'} {', '.join(map(str, value))}"
    return f"{value} {unit}{'' if value == 1 else 's'}"
