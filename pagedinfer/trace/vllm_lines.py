"""Lines that a vLLM server leaves behind, read and checked: KV-cache events and request spans, both as JSON lines.

KV-cache events are `KVEventBatch`es as vLLM publishes them, decoded from msgpack and written as JSON: a dict with `ts`,
`events` and perhaps `data_parallel_rank`, each event a dict with its class name as `type`; older versions gave lists,
[ts, [[class name, field, ...], ...], rank]. A key `seq` that a subscriber adds (the message's number) shows losses.
Source: vLLM's vllm/distributed/kv_events.py and examples/online_serving/kv_events_subscriber.py.

Spans are OpenTelemetry's, one a line as `ReadableSpan.to_json(indent=None)` writes them, or in the lines of an OTLP
JSON file exporter (`resourceSpans`). One that has `gen_ai.usage.*` tokens is a request; vLLM calls it `llm_request`.
Source: vLLM's vllm/tracing/utils.py (`SpanAttributes`) and vllm/v1/engine/output_processor.py (`do_tracing`): the span
begins at arrival; `time_in_queue`, `time_to_first_token` and `e2e` are seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedinfer.errors import RecordingError

__all__ = ["Batch", "Cleared", "Removed", "RequestSpan", "Stored", "is_vllm", "read_lines"]

Hash = int | str
"""A block hash: 64 bits of it, or all of it as text."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Full blocks came into the cache: `hashes` in order, after `parent`; `block_size` tokens each."""

    hashes: tuple[Hash, ...]
    parent: Hash | None
    block_size: int
    medium: str
    group: int


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks left the cache."""

    hashes: tuple[Hash, ...]
    medium: str
    group: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was emptied."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What happened in one step of vLLM's scheduler. `ts`: seconds since the epoch; `seq`: number of the message."""

    ts: float
    events: tuple[Stored | Removed | Cleared, ...]
    rank: int = 0
    seq: int | None = None


@dataclass(slots=True)
class RequestSpan:
    """A request from arrival to end. Times are seconds since the epoch; `arrival <= admitted <= first_token <= end`."""

    rid: str
    arrival: float
    admitted: float
    first_token: float
    end: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    why: str
    detail: str
    model: str = ""


@dataclass(slots=True)
class Lines:
    """What files held. `num_other_spans`: spans that are no request, or lack what a request needs."""

    batches: list[Batch] = field(default_factory=list)
    spans: list[RequestSpan] = field(default_factory=list)
    num_other_spans: int = 0


def is_vllm(line: str) -> bool:
    """Whether a file that begins with this line is one of these (and not a recording of ours)."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if isinstance(data, list):
        return True
    return isinstance(data, dict) and ("events" in data or "attributes" in data or "resourceSpans" in data)


def read_lines(lines: Iterable[str], name: str = "the text", into: Lines | None = None) -> Lines:
    """Sort the lines of a file into batches and spans, adding to `into` where given.

    Raises:
        RecordingError: a line is neither.
    """
    found = Lines() if into is None else into
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            _read_line(json.loads(line), found)
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            raise RecordingError(
                f"{name}, line {number} is neither a batch of vLLM's KV-cache events nor a span: {error}."
            ) from error
    return found


def _read_line(data: Any, found: Lines) -> None:
    if isinstance(data, list):
        rank = data[2] if len(data) > 2 else None
        found.batches.append(_batch({"ts": data[0], "events": data[1], "data_parallel_rank": rank}))
    elif isinstance(data, dict) and isinstance(data.get("events"), list) and "ts" in data:
        found.batches.append(_batch(data))
    elif isinstance(data, dict) and ("attributes" in data or "resourceSpans" in data):
        for span in _spans_of(data):
            request = _request(span)
            if request is None:
                found.num_other_spans += 1
            else:
                found.spans.append(request)
    else:
        raise ValueError("it has neither `ts` and `events` nor `attributes` nor `resourceSpans`")


# -- KV-cache events ----------------------------------------------------------------------------------------------

FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Order of the fields in versions that wrote lists."""


def _batch(data: Mapping[str, Any]) -> Batch:
    seq = data.get("seq")
    return Batch(
        float(data["ts"]),
        tuple(map(_event, data["events"])),
        int(data.get("data_parallel_rank") or 0),
        None if seq is None else int(seq),
    )


def _event(data: Any) -> Stored | Removed | Cleared:
    if isinstance(data, list):
        kind, values = data[0], data[1:]
        data = dict(zip(FIELDS.get(kind, ()), values, strict=False))
    else:
        kind = data["type"]
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in FIELDS:
        raise ValueError(f"an event of type {kind!r}; known are {', '.join(FIELDS)}")
    hashes = tuple(map(_hash, data["block_hashes"]))
    medium, group = str(data.get("medium") or "GPU"), int(data.get("group_idx") or 0)
    if kind == "BlockRemoved":
        return Removed(hashes, medium, group)
    parent = data.get("parent_block_hash")
    return Stored(hashes, None if parent is None else _hash(parent), int(data["block_size"]), medium, group)


def _hash(value: Any) -> Hash:
    if isinstance(value, int | str) and not isinstance(value, bool):
        return value
    raise ValueError(f"a block hash is {repr(value)[:40]}; it must be a number or text")


# -- spans --------------------------------------------------------------------------------------------------------


def _spans_of(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The line itself, or the spans of an OTLP line."""
    if "resourceSpans" not in data:
        yield data
        return
    for resource in data["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            yield from scope.get("spans", ())


def _attributes(span: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes as a dict; OTLP wraps each value as {"intValue": "3"}."""
    found = span.get("attributes") or {}
    if isinstance(found, dict):
        return found
    return {item["key"]: _otlp_value(item["value"]) for item in found}


def _otlp_value(value: Mapping[str, Any]) -> Any:
    (kind, content), *_ = value.items()
    if kind == "arrayValue":
        return [_otlp_value(item) for item in content.get("values", ())]
    return int(content) if kind == "intValue" else content


def _request(span: Mapping[str, Any]) -> RequestSpan | None:
    """The request that a span tells of; None where it tells of none, or lacks its tokens or its start."""
    of = _attributes(span)
    prompt = of.get("gen_ai.usage.prompt_tokens", of.get("gen_ai.usage.input_tokens"))
    output = of.get("gen_ai.usage.completion_tokens", of.get("gen_ai.usage.output_tokens"))
    start, stop = (
        _seconds(span, *names)
        for names in (("start_time", "startTimeUnixNano"), ("end_time", "endTimeUnixNano"))
    )
    if not prompt or output is None or start is None:
        return None
    e2e, ttft = of.get("gen_ai.latency.e2e"), of.get("gen_ai.latency.time_to_first_token")
    end = start + float(e2e) if e2e is not None else stop
    if end is None:
        return None
    end = max(end, start)
    first = min(end, start + max(0.0, float(ttft))) if ttft is not None else end
    queued = max(0.0, float(of.get("gen_ai.latency.time_in_queue") or 0.0))
    context = span.get("context") or {}
    rid = of.get("gen_ai.request.id") or context.get("span_id") or span.get("spanId") or "request"
    limit = of.get("gen_ai.request.max_tokens")
    why, detail = _end(span, of, int(output), limit)
    return RequestSpan(
        str(rid), start, min(first, start + queued), first, end, int(prompt), int(output),
        max(1, int(limit or output)), why, detail, str(of.get("gen_ai.response.model") or ""),
    )  # fmt: skip


def _end(span: Mapping[str, Any], of: Mapping[str, Any], output: int, limit: Any) -> tuple[str, str]:
    """Finish reason and sentence; spans of vLLM itself do not say, so that a used-up limit speaks for "length"."""
    status = span.get("status") or {}
    if status.get("status_code") == "ERROR" or status.get("code") in (2, "STATUS_CODE_ERROR"):
        return "error", str(
            status.get("description") or status.get("message") or "the span's status is ERROR"
        )
    said = of.get("gen_ai.response.finish_reasons")
    reason = said[0] if isinstance(said, list | tuple) and said else said
    if isinstance(reason, str) and reason:
        known = reason if reason in ("stop", "length", "abort", "error") else "stop"
        return known, f"the span says {reason}"
    if limit is not None and output >= int(limit):
        return "length", f"{output} of {limit} tokens"
    return "stop", "the span does not say why"


TIME = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d(?:\.\d+)?)(?:Z|\+00:?00)?")


def _seconds(span: Mapping[str, Any], text_name: str, nano_name: str) -> float | None:
    """A time of the span in seconds since the epoch, from nanoseconds or from UTC text."""
    value = span.get(nano_name, span.get(text_name))
    if value is None:
        return None
    if isinstance(value, int | float) or str(value).isdigit():
        return int(value) / 1e9
    match = TIME.fullmatch(str(value))
    if match is None:
        raise ValueError(
            f"{text_name} is {str(value)[:40]!r}; it must be nanoseconds or like 2026-01-31T12:00:00.5Z"
        )
    year, month, day, hour, minute = map(int, match.groups()[:5])
    return _days(year, month, day) * 86400.0 + hour * 3600 + minute * 60 + float(match[6])


def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 in the Gregorian calendar: years begin in March, so that a leap day comes last.

    (`datetime` is not imported here: this package never reads a clock, and a test holds it to that by the module.)
    """
    year, month = (year - 1, month + 9) if month < 3 else (year, month - 3)
    return 365 * year + year // 4 - year // 100 + year // 400 + (153 * month + 2) // 5 + day - 1 - 719468
