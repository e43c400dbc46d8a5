"""Two or more runs side by side: where they part, what differs in the block map, and the numbers of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from typing import Any

from pagedinfer.errors import ConfigError, RecordingError, kind_of, readable
from pagedinfer.sim.divergence import Divergence, difference
from pagedinfer.sim.fork import Branch
from pagedinfer.sim.progress import Progress
from pagedinfer.trace.differences import ended_apart, not_ended, quoted
from pagedinfer.trace.metrics import mean, percentile
from pagedinfer.trace.moments import Follower, Moment
from pagedinfer.trace.phases import PhaseBook, Phases
from pagedinfer.trace.recording import Recording, recording_of
from pagedinfer.trace.replay import State
from pagedinfer.trace.tables import Table

__all__ = ["BlockDifference", "Comparison", "Divergence", "compare", "summary"]

LONG_NAME = 24
"""Letters of a run's name that a column's head takes on one line."""


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


def compare(*runs: Any, names: Sequence[str] | None = None) -> Comparison:
    """Compare runs with the first of them: recordings, or what has one (a session, a branch).

    Names are those of branches, or "run 1", "run 2".

    Raises:
        ConfigError: something that has no recording, fewer than two runs, runs that begin at different steps, or names
            that do not fit.
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
        unended: name -> last step of each run that has requests left, while another has none or goes further.
    """

    def __init__(self, runs: Sequence[Any], names: Sequence[str] | None = None) -> None:
        self.recordings = [_recording_of(run) for run in runs]
        if len(runs) < 2:
            raise ConfigError(f"A comparison needs at least two runs; {len(runs) or 'none'} came.")
        if any(not recording.events for recording in self.recordings):
            raise RecordingError("A recording to compare is empty; record an engine first.")
        starts = [recording.first_step for recording in self.recordings]
        if len(set(starts)) > 1:
            raise ConfigError(
                f"The runs begin after steps {', '.join(map(str, starts))}; compare runs that begin together."
            )
        self.names = _names(runs, names)
        total = sum(recording.num_steps for recording in self.recordings)
        with Progress(f"Comparing {len(runs)} runs", "step", total) as progress:
            followed = [_Followed(recording, progress) for recording in self.recordings]
            self.divergences = _partings(followed, self.names)
            self.metrics = {name: one.summary() for name, one in zip(self.names, followed, strict=True)}
        self.unended = {
            name: one.last_step
            for name, one in zip(self.names, followed, strict=True)
            if one.has_requests
            and not all(other.has_requests and other.last_step <= one.last_step for other in followed)
        }

    @property
    def first_divergence(self) -> Divergence | None:
        """The earliest of `divergences`; None when all runs are the same."""
        return min(filter(None, self.divergences), key=lambda d: d.step, default=None)

    @property
    def last_step(self) -> int:
        """The last step of the longest run."""
        return max(recording.last_step for recording in self.recordings)

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
        """Where each run parts from the first, and which of them has not ended."""
        first = quoted(self.names[0])
        parted = [
            f"{first} and {quoted(name)} do the same in every step."
            if divergence is None
            else f"{divergence}."
            for name, divergence in zip(self.names[1:], self.divergences, strict=True)
        ]
        more = "its numbers are those up to there"
        return parted + [f"{not_ended(name, last)}, and {more}." for name, last in self.unended.items()]

    def __repr__(self) -> str:
        return readable("\n".join([*self.sentences, _text(self.table)]))

    def _repr_html_(self) -> str:
        table = self.table
        head = "".join(f"<th>{escape(name)}</th>" for name in table)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row)) + "</tr>"
            for row in table.rows()
        )
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return readable(f"{said}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _recording_of(run: Any) -> Recording:
    try:
        return recording_of(run)
    except ConfigError:
        raise ConfigError(
            f"compare takes recordings and what has one (a session, a branch), not {kind_of(run)}."
        ) from None


def _names(runs: Sequence[Any], names: Sequence[str] | None) -> list[str]:
    if names is None:
        given = [run.name if isinstance(run, Branch) else f"run {i}" for i, run in enumerate(runs, 1)]
        return [name if given.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(given, 1)]
    if len(names) != len(runs) or len({*names, "metric"}) != len(runs) + 1:
        raise ConfigError(
            f"names={list(names)!r}: {len(runs)} runs need as many different names, and none is metric."
        )
    return list(names)


def _cells(row: dict[str, Any]) -> list[str]:
    """A row of the table as texts, all its numbers with as many decimals."""
    label, *values = row.values()
    broken = any(isinstance(value, float) and not value.is_integer() for value in values)
    told = ["-" if value is None else f"{value:.3f}" if broken else f"{value:.0f}" for value in values]
    return [str(label), *told]


def _text(table: Table) -> str:
    heads = [_lines(name) for name in table]
    rows = [list(line) for line in zip_longest(*heads, fillvalue="")] + [_cells(row) for row in table.rows()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _lines(name: str) -> list[str]:
    """A column's name; a long one, which names several changes, on a line for each."""
    return name.replace(", ", ",\n").split("\n") if len(name) > LONG_NAME else [name]


# -- one run in numbers -----------------------------------------------------------------------------------------------


def summary(recording: Recording) -> dict[str, float | None]:
    """A run in numbers, each name with its unit. None where there is nothing to measure.

    KV usage is the mean and the most over all steps; KV waste the mean over the steps that hold any block. Makespan
    counts from the first submission to the last end.
    """
    return _Followed(recording).summary()


def _summary(recording: Recording, everyone: Sequence[Phases]) -> dict[str, float | None]:
    steps = recording.steps
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


class _Followed:
    """A run gone through once: for its phases, and for whoever looks at its steps."""

    def __init__(self, recording: Recording, progress: Progress | None = None) -> None:
        self._recording = recording
        self._progress = progress
        self._follower = follower = Follower(recording)
        self._moments = follower.catch_up(rest=True)
        self._book = PhaseBook(follower.ledger)

    def next(self) -> Moment | None:
        """The next step; None after the last."""
        for moment in self._moments:
            self._book.add(moment)
            if moment.is_done:
                if self._progress is not None:
                    self._progress.step()
                return moment
        return None

    @property
    def last_step(self) -> int:
        """The last step of the run."""
        return self._recording.last_step

    @property
    def has_requests(self) -> bool:
        """Whether anybody is left; at the run's end: it has not ended."""
        return self._follower.now is not None and bool(self._follower.now.state.requests)

    def summary(self) -> dict[str, float | None]:
        """The numbers of the whole run, whatever has been looked at."""
        while self.next() is not None:
            pass
        return _summary(self._recording, self._book.read())


def _partings(runs: Sequence[_Followed], names: Sequence[str]) -> list[Divergence | None]:
    """Where each run but the first parts from it. No run is followed further than need be."""
    found: list[Divergence | None] = [None] * (len(runs) - 1)
    together = list(range(1, len(runs)))
    while together:
        first, others = runs[0].next(), {i: runs[i].next() for i in together}
        for i, second in others.items():
            both = names[0], names[i]
            said = None
            if first and second:
                said = difference(first, second, both)
            elif (first or second) and not runs[0 if first is None else i].has_requests:
                said = ended_apart(*(both if first is None else both[::-1]))
            if (moment := first or second) and said is not None:
                found[i - 1] = Divergence(moment.step, said, both)
        together = [i for i, second in others.items() if first and second and found[i - 1] is None]
    return found
