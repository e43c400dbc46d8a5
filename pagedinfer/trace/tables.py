"""A recording as tables: dicts of equally long columns, ready for pandas, polars or a plain loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedinfer.errors import readable
from pagedinfer.trace import data_frames
from pagedinfer.trace import events as ev
from pagedinfer.trace.metrics import Life, kept_events, lives

if TYPE_CHECKING:
    from pagedinfer.trace.recording import Recording

__all__ = ["Table", "block_table", "event_table", "request_table", "step_table"]

MAX_SHOWN_ROWS = 20

USAGE = (
    "kv_usage", "kv_waste", "shared_slots", "cached_slots", "reserved_slots", "sharing_ratio", "external_fragmentation",
)  # fmt: skip
"""What a row of `step_table` tells of `State.usage`: slots are places for one token, the others are shares."""

FLOATS = (
    "now", "t", "kv_usage", "kv_waste", "sharing_ratio", "external_fragmentation", "tpot_steps", "ttft_s", "tpot_s",
)  # fmt: skip
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
        return readable("\n".join(lines + ([f"... {hidden} more rows"] if hidden > 0 else [])))

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(name)}</th>" for name in self._columns)
        rows = list(self.rows())
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(_cell(v))}</td>" for v in row.values()) + "</tr>"
            for row in rows[:MAX_SHOWN_ROWS]
        )
        hidden = len(rows) - MAX_SHOWN_ROWS
        note = f"<p>{hidden} more rows</p>" if hidden > 0 else ""
        return readable(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) and not value.is_integer() else str(value)


def _columns(rows: list[dict[str, Any]], names: list[str]) -> Table:
    return Table({name: [row[name] for row in rows] for name in names}, TYPES)


def step_table(recording: Recording) -> Table:
    """One row a step. The last columns are what `State.usage` says at its end: shares are 0 to 1, slots hold a token
    each, and `sharing_ratio` is above 1 where requests share.
    """
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
                **{name: usage[name] for name in USAGE},
            }
        )
    names = "step now num_scheduled_tokens prefill_tokens num_requests new_tokens running waiting preempted finished"
    return _columns(rows, [*names.split(), "used_blocks", *USAGE])


def request_table(recording: Recording) -> Table:
    """One row a request. Steps are step numbers; `ttft_steps` counts from submission to the first token.

    `tpot_steps` is the mean gap between tokens after the first; times in seconds (`ttft_s`, `tpot_s`) are there
    when the recording has wall time, None otherwise.
    """
    names = [
        "request", "prompt_tokens", "output_tokens", "submitted", "admitted", "first_token", "finished",
        "preemptions", "ttft_steps", "tpot_steps", "ttft_s", "tpot_s", "finish_reason",
    ]  # fmt: skip
    return _columns([dict(zip(names, _request_row(life), strict=True)) for life in lives(recording)], names)


def _request_row(life: Life) -> tuple[Any, ...]:
    steps, seconds = life.steps, life.seconds
    return (
        life.rid, life.num_prompt_tokens, life.num_output_tokens, steps.submitted, steps.admitted,
        steps.tokens[0] if steps.tokens else None, steps.finished, life.num_preemptions, steps.ttft, steps.tpot,
        seconds.ttft, seconds.tpot, life.finish_reason,
    )  # fmt: skip


def block_table(recording: Recording) -> Table:
    """One row for each time a block was taken: who took it as which logical block, when, until when, and why."""
    rows: list[dict[str, Any]] = []
    held: dict[int, dict[str, Any]] = {}
    names = ["block", "request", "logical", "allocated", "freed", "why"]
    for event in kept_events(recording.events):
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
