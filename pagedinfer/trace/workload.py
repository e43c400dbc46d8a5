"""Workloads of others: request traces of production services, read into plain records.

Two published formats. Mooncake (Qin et al., FAST 2025): JSON lines with `timestamp` in milliseconds, `input_length`,
`output_length` and `hash_ids`, one id per 512 tokens of the prompt, equal where the keys and values could be reused.
Azure (Patel et al., "Splitwise", ISCA 2024): CSV with `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pagedinfer.errors import WorkloadError

__all__ = ["MOONCAKE_BLOCK_SIZE", "TraceRequest", "read_azure", "read_mooncake", "read_workload"]

MOONCAKE_BLOCK_SIZE = 512
"""Tokens that one of Mooncake's `hash_ids` stands for."""

_AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_AZURE_TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,7}))?(?:\+00:00|Z)?")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival: seconds since the trace's first request.
        num_prompt_tokens, num_output_tokens: its lengths.
        key_ids: ids of the prompt's full blocks, first to last; empty where the trace says nothing about sharing.
    """

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    key_ids: tuple[int, ...] = ()


def read_workload(path: str | Path, *, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests (default: all) of a trace, by the file's name: `.jsonl` Mooncake, `.csv` Azure.

    Raises:
        WorkloadError: the name ends otherwise, or a line is not of the format; the sentence names the line.
    """
    readers = {".jsonl": read_mooncake, ".csv": read_azure}
    if (reader := readers.get(Path(path).suffix)) is None:
        raise WorkloadError(f"{Path(path).name}: give a Mooncake trace (.jsonl) or an Azure trace (.csv).")
    return reader(path, limit=limit)


def read_mooncake(path: str | Path, *, limit: int | None = None) -> list[TraceRequest]:
    """Requests of a Mooncake trace. An id of a prompt's partly filled last block is left out: it is never shared.

    Raises:
        WorkloadError: a line is not of the format; the sentence names it.
    """
    requests: list[TraceRequest] = []
    first: float | None = None
    for where, line in _lines(path):
        if limit is not None and len(requests) >= limit:
            break
        try:
            row = json.loads(line)
        except ValueError as error:
            raise WorkloadError(f"{where} is not JSON: {error}.") from None
        if not isinstance(row, dict):
            raise WorkloadError(
                f"{where} is a {type(row).__name__}; a Mooncake trace has one object per line."
            )
        prompt = _natural(where, "input_length", row.get("input_length"))
        output = _natural(where, "output_length", row.get("output_length"))
        milliseconds = row.get("timestamp")
        if isinstance(milliseconds, bool) or not isinstance(milliseconds, int | float):
            raise WorkloadError(f"{where} has timestamp {milliseconds!r}; it must be milliseconds.")
        ids, blocks = row.get("hash_ids"), -(-prompt // MOONCAKE_BLOCK_SIZE)
        if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise WorkloadError(f"{where} has hash_ids {ids!r:.60}; it must be a list of integers.")
        if len(ids) != blocks:
            raise WorkloadError(
                f"{where} has {len(ids)} hash_ids for {prompt} prompt tokens; blocks of {MOONCAKE_BLOCK_SIZE} "
                f"make {blocks}."
            )
        first = milliseconds if first is None else first
        arrival = (milliseconds - first) / 1000
        requests.append(TraceRequest(arrival, prompt, output, tuple(ids[: prompt // MOONCAKE_BLOCK_SIZE])))
    return requests


def read_azure(path: str | Path, *, limit: int | None = None) -> list[TraceRequest]:
    """Requests of an Azure trace, which says nothing about sharing.

    Raises:
        WorkloadError: the header or a line is not of the format; the sentence names it.
    """
    rows = csv.reader(line for _, line in _lines(path))
    name, header = Path(path).name, next(rows, [])
    if header != _AZURE_HEADER:
        raise WorkloadError(
            f"{name} begins with {','.join(header)!r}; an Azure trace begins with {','.join(_AZURE_HEADER)!r}."
        )
    requests: list[TraceRequest] = []
    first: int | None = None
    for number, row in enumerate(islice(rows, limit), 2):
        where = f"{name}, line {number},"
        if len(row) != len(_AZURE_HEADER):
            raise WorkloadError(f"{where} has {len(row)} fields; an Azure trace has {len(_AZURE_HEADER)}.")
        ticks = _ticks(where, row[0])
        first = ticks if first is None else first
        prompt, output = (
            _natural(where, column, int(value) if value.isdecimal() else value)
            for column, value in zip(_AZURE_HEADER[1:], row[1:], strict=True)
        )
        requests.append(TraceRequest((ticks - first) / 10**7, prompt, output))
    return requests


def _lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """(where it is, the line) for each line that is not empty."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{Path(path).name}, line {number},", line
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{Path(path).name} is not text: {error.reason} at byte {error.start}.") from None


def _natural(where: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise WorkloadError(f"{where} has {name} {value!r}; it must be an integer of at least 1.")
    return value


def _ticks(where: str, text: str) -> int:
    """Units of 100 ns since the start of the year 0, without a calendar: the core has none at hand."""
    if (match := _AZURE_TIME.fullmatch(text)) is None:
        raise WorkloadError(f"{where} has TIMESTAMP {text!r}; it must look like 2023-11-16 18:15:46.6805900.")
    year, month, day, hour, minute, second = map(int, match.groups()[:6])
    year, month = (year, month - 3) if month > 2 else (year - 1, month + 9)  # a leap day ends its year
    days = 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day
    return (days * 86400 + hour * 3600 + minute * 60 + second) * 10**7 + int((match[7] or "").ljust(7, "0"))
