"""A recording as tables: dicts of equally long columns, ready for pandas, polars or a plain loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedinfer.trace import data_frames
from pagedinfer.trace import events as ev

if TYPE_CHECKING:
    from pagedinfer.trace.recording import Recording

__all__ = ["Table", "block_table", "event_table", "request_table", "step_table"]

MAX_SHOWN_ROWS = 20

FLOATS = ("now", "t", "kv_usage", "kv_waste", "tpot_steps", "ttft_s", "tpot_s")
TEXTS = ("request", "finish_reason", "why", "kind", "fields")
TYPES: dict[str, type] = {**dict.fromkeys(FLOATS, float), **dict.fromkeys(TEXTS, str)}
"""Types that a recording's values may not show: nothing there yet, or only whole numbers. The others show theirs."""


class Table(Mapping[str, list[Any]]):
    """Columns by name. `len` is the number of rows; iterate `rows()` for dicts.

    For other tools: `to_pandas`, `to_polars`, `to_parquet` (extra "tables"), `to_csv`. A column's type is the same in
    all of them: see `pagedinfer.trace.data_frames`.

    Attributes:
        types: int, float or str by column name.
    """

    def __init__(self, columns: dict[str, list[Any]], types: Mapping[str, type] | None = None) -> None:
        self._columns = columns
        self.types = data_frames.column_types(columns, types or {})

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), []))

    def keys(self) -> Any:
        """Column names."""
        return self._columns.keys()

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict a row."""
        for values in zip(*self._columns.values(), strict=True):
            yield dict(zip(self._columns, values, strict=True))

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`.

        Raises:
            ConfigError: pandas is not installed (extra "tables").
        """
        return data_frames.pandas_frame(self._columns, self.types)

    def to_polars(self) -> Any:
        """A `polars.DataFrame`.

        Raises:
            ConfigError: polars is not installed (extra "tables").
        """
        return data_frames.polars_frame(self._columns, self.types)

    def to_parquet(self, path: str | PathLike[str]) -> Path:
        """Write a Parquet file and return its path.

        Raises:
            ConfigError: pyarrow is not installed (extra "tables").
        """
        table, parquet = data_frames.arrow_table(self._columns, self.types)
        parquet.write_table(table, path)
        return Path(path)

    def to_csv(self, path: str | PathLike[str]) -> Path:
        """Write comma-separated values (UTF-8, a line of names first) and return the path."""
        target = Path(path)
        target.write_text(data_frames.csv_text(self._columns), encoding="utf-8", errors="backslashreplace")
        return target

    def __repr__(self) -> str:
        rows = [[_cell(v) for v in row.values()] for row in self.rows()]
        shown = [list(self._columns), *rows[:MAX_SHOWN_ROWS]]
        widths = [max(len(row[i]) for row in shown) for i in range(len(self._columns))]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in shown]
        hidden = len(rows) - MAX_SHOWN_ROWS
        return "\n".join(lines + ([f"... {hidden} more rows"] if hidden > 0 else []))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self._columns)
        rows = list(self.rows())
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_cell(v))}</td>" for v in row.values()) + "</tr>"
            for row in rows[:MAX_SHOWN_ROWS]
        )
        hidden = len(rows) - MAX_SHOWN_ROWS
        note = f"<p>{hidden} more rows</p>" if hidden > 0 else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) and not value.is_integer() else str(value)


def _columns(rows: list[dict[str, Any]], names: list[str]) -> Table:
    return Table({name: [row[name] for row in rows] for name in names}, TYPES)


def step_table(recording: Recording) -> Table:
    """One row a step. `kv_usage` and `kv_waste` are shares, 0 to 1; see `State.usage`."""
    rows = []
    for step, state in enumerate(recording.states(), recording.first_step):
        # No step: what came before the first plan, or a cancelled plan whose number was not used again.
        if step == recording.first_step or state.step != step:
            continue
        last, usage = state.last, state.usage()
        rows.append(
            {
                "step": state.step,
                "now": last.now,
                "num_scheduled_tokens": sum(last.scheduled.values()),
                "prefill_tokens": last.prefill_tokens,
                "num_requests": len(last.scheduled),
                "new_tokens": sum(last.tokens.values()),
                "running": len(state.running),
                "waiting": len(state.waiting),
                "preempted": len(last.preempted),
                "finished": len(last.finished),
                "used_blocks": len(state.ref_counts),
                "kv_usage": usage["kv_usage"],
                "kv_waste": usage["kv_waste"],
            }
        )
    names = "step now num_scheduled_tokens prefill_tokens num_requests new_tokens running waiting preempted finished"
    return _columns(rows, [*names.split(), "used_blocks", "kv_usage", "kv_waste"])


def request_table(recording: Recording) -> Table:
    """One row a request. Steps are step numbers; `ttft_steps` counts from submission to the first token.

    `tpot_steps` is the mean gap between tokens after the first; times in seconds (`ttft_s`, `tpot_s`) are there
    when the recording has wall time, None otherwise.
    """
    rows: list[dict[str, Any]] = []
    live: dict[str, dict[str, Any]] = {}
    times: dict[str, list[float | None]] = {}
    cancelled = _cancelled_events(recording)
    names = [
        "request", "prompt_tokens", "output_tokens", "submitted", "admitted", "first_token", "finished",
        "preemptions", "ttft_steps", "tpot_steps", "ttft_s", "tpot_s", "finish_reason",
    ]  # fmt: skip
    for event in recording.events:
        if id(event) in cancelled:
            continue
        if isinstance(event, ev.Submit):
            row: dict[str, Any] = dict.fromkeys(names)
            live[event.rid] = row
            row |= {"request": event.rid, "prompt_tokens": event.num_prompt_tokens, "output_tokens": 0}
            row |= {"submitted": event.step, "preemptions": 0}
            rows.append(row)
            times[event.rid] = [event.t]
        elif isinstance(event, ev.Commit):
            for rid, n in event.tokens.items():
                if rid in live:
                    _count_tokens(live[rid], times[rid], n, event)
        elif isinstance(event, ev.Admit | ev.Preempt | ev.Finish) and event.rid in live:
            row = live[event.rid]
            if isinstance(event, ev.Admit):
                row["admitted"] = event.step
            elif isinstance(event, ev.Preempt):
                row["preemptions"] += 1
            else:
                row |= {"finished": event.step, "finish_reason": event.why}
    return _columns(rows, names)


def _count_tokens(row: dict[str, Any], times: list[float | None], n: int, event: ev.Commit) -> None:
    """Add a step's tokens to a request's row; `times` holds wall time of submission, first and newest token."""
    if row["first_token"] is None:
        row["first_token"], row["ttft_steps"] = event.step, event.step - row["submitted"]
        times.append(event.t)
        if times[0] is not None and event.t is not None:
            row["ttft_s"] = event.t - times[0]
    row["output_tokens"] += n
    gaps = row["output_tokens"] - 1
    if gaps > 0:
        row["tpot_steps"] = (event.step - row["first_token"]) / gaps
        if times[1] is not None and event.t is not None:
            row["tpot_s"] = (event.t - times[1]) / gaps


def block_table(recording: Recording) -> Table:
    """One row for each time a block was taken: who took it as which logical block, when, until when, and why."""
    rows: list[dict[str, Any]] = []
    held: dict[int, dict[str, Any]] = {}
    names = ["block", "request", "logical", "allocated", "freed", "why"]
    cancelled = _cancelled_events(recording)
    for event in recording.events:
        if id(event) in cancelled:
            continue
        if isinstance(event, ev.Alloc):
            for logical, block_id in enumerate(event.pblks, event.first):
                row = dict(zip(names, (block_id, event.rid, logical, event.step, None, None), strict=True))
                rows.append(row)
                held[block_id] = row
        elif isinstance(event, ev.Free):
            for block_id in event.pblks:
                if row := held.pop(block_id, {}):
                    row |= {"freed": event.step, "why": event.why}
    return _columns(rows, names)


def event_table(recording: Recording) -> Table:
    """One row an event. `request` is None where it is about none; `fields` holds its own fields as JSON."""
    rows = []
    for event in recording.events:
        own = event.to_dict(wall=False)
        number, step, kind = own.pop("seq"), own.pop("step"), own.pop("kind")
        row = {"seq": number, "step": step, "t": event.t, "kind": kind, "request": own.pop("rid", None)}
        rows.append(row | {"fields": ev.json_line(own)})
    return _columns(rows, ["seq", "step", "t", "kind", "request", "fields"])


def _cancelled_events(recording: Recording) -> set[int]:
    """Identities of the events of plans that were cancelled: they changed nothing in the end."""
    gone: set[int] = set()
    open_plans: list[list[ev.Event]] = []
    for event in recording.events:
        if isinstance(event, ev.Step):
            open_plans.append([event])
        elif isinstance(event, ev.Commit) and open_plans:
            open_plans.pop(0)
        elif isinstance(event, ev.Cancel) and open_plans:
            gone.update(map(id, open_plans.pop()))
        elif isinstance(event, ev.Free) and event.why == "finish":
            continue  # an end is no part of a plan
        elif open_plans and isinstance(event, ev.Admit | ev.Resume | ev.Alloc | ev.Free | ev.Preempt):
            open_plans[-1].append(event)
    return gone
