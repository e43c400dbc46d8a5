"""What a vLLM server leaves behind as a recording: formats, the cache against a model of it, requests against spans."""

import json
import random
from collections import Counter

import pytest

from pagedinfer.errors import ConfigError, RecordingError
from pagedinfer.trace import events as ev
from pagedinfer.trace.perfetto import to_perfetto
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import fold
from pagedinfer.trace.vllm_events import from_vllm, load_vllm
from pagedinfer.trace.vllm_lines import is_vllm, read_lines
from pagedinfer.views import export_html, picture_svg

SIZE = 16


def stored(hashes, parent=None, **more):
    data = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "block_size": SIZE}
    return data | {"token_ids": [], "lora_id": None, "medium": "GPU"} | more


def removed(hashes, **more):
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} | more


CLEARED = {"type": "AllBlocksCleared"}


def batch(ts, *events, **more):
    return {"ts": ts, "events": list(events), "data_parallel_rank": 0} | more


def span(rid, arrival, admitted, first, end, prompt, output, **more):
    """A line as OpenTelemetry's Python SDK writes it; times in seconds after 2026-01-02T03:04:00Z."""
    attributes = {
        "gen_ai.request.id": rid, "gen_ai.usage.prompt_tokens": prompt, "gen_ai.usage.completion_tokens": output,
        "gen_ai.latency.time_in_queue": admitted - arrival, "gen_ai.latency.time_to_first_token": first - arrival,
        "gen_ai.latency.e2e": end - arrival,
    }  # fmt: skip
    times = {"start_time": f"2026-01-02T03:04:{arrival:09.6f}Z", "end_time": f"2026-01-02T03:04:{end:09.6f}Z"}
    return {"name": "llm_request", "context": {"span_id": "0x1"}, **times, "attributes": attributes | more}


EPOCH = 1_767_323_040.0
"""2026-01-02T03:04:00Z in seconds."""


def lines(*items):
    return [json.dumps(item) for item in items]


def folded(recording):
    """The fold must not fail at any step, nor after a way through a file; everything draws."""
    again = Recording.from_jsonl(recording.to_jsonl())
    assert again.events == recording.events
    fold(again.events)
    assert [state.step for state in again.states()][1:] == again.steps["step"]
    return again


class Contents:
    """The cache as the events tell it, strictly: no block is cached twice, none leaves that is not there."""

    def __init__(self):
        self.key_of = {}
        self.held = {}
        self.parents = {}

    def apply(self, event):
        match event:
            case ev.Alloc():
                for block_id in event.pblks:
                    assert block_id not in self.key_of
                    assert block_id not in self.held
                    self.held[block_id] = event.rid
            case ev.Cache():
                parent = event.parent
                for block_id, key in zip(event.pblks, event.keys, strict=True):
                    assert self.held[block_id] == event.rid
                    assert block_id not in self.key_of
                    assert key not in self.key_of.values()
                    self.key_of[block_id] = key
                    self.parents[key] = parent
                    parent = key
            case ev.Free():
                assert set(event.pblks) == {b for b, rid in self.held.items() if rid == event.rid}
                for block_id in event.pblks:
                    del self.held[block_id]
            case ev.Evict():
                for block_id in event.pblks:
                    assert block_id not in self.held
                    del self.key_of[block_id]
            case ev.Reset():
                assert sorted(event.pblks) == sorted(self.key_of)
                assert not self.held
                self.key_of.clear()


def random_batches(seed):
    """Batches of a cache with chains of hashes, duplicates and removals, and what is cached after each of them."""
    chance = random.Random(seed)
    cached, chains, items, after = Counter(), [()], [], []
    for number in range(chance.randint(5, 60)):
        events = []
        for _ in range(chance.randint(0, 4)):
            roll = chance.random()
            if roll < 0.55:
                base = chance.choice(chains)
                new = tuple(
                    chance.choice([chance.randrange(2**64), 7, 8, 9]) for _ in range(chance.randint(1, 5))
                )
                new = tuple(h for h in dict.fromkeys(new) if h not in base)
                if not new:
                    continue
                chains.append(base + new)
                cached.update(new)
                events.append(stored(new, base[-1] if base else None))
            elif roll < 0.95:
                gone = [h for h in cached.elements() if chance.random() < 0.3] + [-1] * (
                    chance.random() < 0.2
                )
                cached -= Counter(gone)
                if gone:
                    events.append(removed(gone))
            else:
                cached.clear()
                events.append(CLEARED)
        items.append(batch(1000.0 + number, *events))
        after.append(set(cached))
    return items, after


@pytest.mark.parametrize("seed", range(30))
def test_the_cache_follows_a_model_of_it(seed):
    items, after = random_batches(seed)
    recording = folded(from_vllm(lines(*items)))
    contents, hash_of, sizes, last = Contents(), {}, {}, 0
    keys = iter(range(10**9))
    for item in items:  # keys are numbered as hashes appear, the parent before the first
        for event in item["events"]:
            if event["type"] == "BlockStored":
                parent = [event["parent_block_hash"]] if event["parent_block_hash"] is not None else []
                for value in [*parent, *event["block_hashes"]]:
                    if value not in hash_of.values():
                        hash_of[next(keys)] = value
    for event in recording.events[1:]:
        contents.apply(event)
        sizes[event.t] = {hash_of[key] for key in contents.key_of.values()}
        last = max(last, len(contents.key_of))
    for item, expected in zip(items, after, strict=True):
        if item["ts"] in sizes:
            assert sizes[item["ts"]] == expected
        else:
            assert not item["events"] or all(e["type"] == "BlockRemoved" for e in item["events"])
    assert recording.config == {"num_blocks": max(1, last), "block_size": SIZE}


@pytest.mark.parametrize("seed", range(10))
def test_the_fold_holds_the_cache_and_its_chains(seed):
    items, after = random_batches(seed)
    recording = folded(from_vllm(lines(*items)))
    contents = Contents()
    for step in range(recording.num_steps + 1):
        for event in recording.step_events(step):
            contents.apply(event)
        state = recording.at(step)
        assert {block_id: key for block_id, (_, key) in state.cached.items()} == contents.key_of
        assert all(state.parents[key] == contents.parents[key] for key in contents.key_of.values())
        assert state.usage()["cached_slots"] == len(contents.key_of) * SIZE
        assert state.usage()["kv_usage"] == 0
    assert len(contents.key_of) == len(after[-1])


def test_a_chain_by_hand():
    items = [
        batch(10.0, stored([101, 102])),
        batch(
            11.0, stored([103], 102), stored([102, 104], 101)
        ),  # 102 again: one block stands for both copies
        batch(12.0, removed([102, 103]), stored([105])),
        batch(13.0, removed([102]), CLEARED),
        batch(14.0, stored([101])),
    ]
    recording = folded(from_vllm(lines(*items)))
    told = [e for e in recording.events if isinstance(e, ev.Cache | ev.Evict | ev.Reset)]
    evicted = "vLLM removed them from its cache"
    assert told == [
        *stamped(1, ev.Cache("store 1", (0, 1), (0, 1), -1)),
        *stamped(2, ev.Cache("store 2", (2,), (2,), 1), ev.Cache("store 3", (3,), (3,), 1)),
        *stamped(3, ev.Evict((2,), evicted), ev.Cache("store 4", (2,), (4,), -1)),
        *stamped(4, ev.Evict((1,), evicted), ev.Reset((0, 3, 2), "vLLM emptied its prefix cache")),
        *stamped(6, ev.Cache("store 5", (0,), (0,), -1)),
    ]  # fmt: skip
    assert recording.requests["prompt_tokens"] == [32, 16, 32, 16, 16]
    assert recording.steps["now"] == [0.0, 1.0, 2.0, 3.0, 3.0, 4.0]
    assert recording.config["num_blocks"] == 4


def stamped(step, *events):
    for event in events:
        event.step = step
    return events


def test_both_ways_in_which_vllm_wrote_batches():
    as_dicts = [batch(10.0, stored([1, 2]), removed([2])), batch(11.0, CLEARED)]
    as_lists = [
        [10.0, [["BlockStored", [1, 2], None, [], SIZE, None, "GPU"], ["BlockRemoved", [2], "GPU"]], 0],
        [11.0, [["AllBlocksCleared"]]],
    ]
    older = [
        [10.0, [["BlockStored", [1, 2], None, [], SIZE, None], ["BlockRemoved", [2]]]],
        [11.0, [["AllBlocksCleared"]]],
    ]
    texts = json.loads(json.dumps(as_dicts).replace("[1, 2]", '["ab", "cd"]').replace("[2]", '["cd"]'))
    recordings = [from_vllm(lines(*items)) for items in (as_dicts, as_lists, older, texts)]
    assert len({recording.to_jsonl() for recording in recordings}) == 1


def test_what_has_no_place_is_counted():
    items = [
        batch(
            10.0, stored([1]), stored([1, 2], medium="CPU"), stored([5, 6, 7], group_idx=1, block_size=999)
        ),
        batch(11.0, removed([4, 1]), removed([1], medium="CPU")),
    ]
    other = span("x", 0, 0, 1, 2, 3, 4)
    other["attributes"] = {"http.method": "POST"}
    recording = from_vllm(lines(*items, other))
    assert recording.info == {
        "model": "vLLM", "imported_from": "vLLM",
        "skipped": {"blocks of CPU": 3, "blocks of cache group 1": 3, "removals of unknown blocks": 1,
                    "spans that are no request": 1},
    }  # fmt: skip


def test_lost_messages_are_a_gap():
    items = [batch(10.0, stored([1]), seq=4), batch(11.0, seq=5), batch(12.0, stored([2]), seq=9)]
    recording = folded(from_vllm(lines(*items)))
    assert [(e.kind, e.dropped, e.step) for e in recording.events if e.kind == "gap"] == [("gap", 3, 1)]


def test_one_engine_of_several():
    items = [
        batch(10.0, stored([1]), data_parallel_rank=0),
        batch(11.0, stored([2, 3]), data_parallel_rank=1),
    ]
    with pytest.raises(
        RecordingError, match=r"^The KV-cache events come from the engines \[0, 1\]; choose one with rank=\.$"
    ):
        from_vllm(lines(*items))
    assert from_vllm(lines(*items), rank=1).requests["prompt_tokens"] == [32]


def test_a_story_of_spans():
    items = [span("b", 1, 4, 5, 7, 30, 3), span("a", 0, 0.5, 2.5, 6.5, 100, 5)]
    recording = folded(from_vllm(lines(*items), seconds_per_step=1.0))
    a, b = recording.requests.rows()
    for name, value in {
        "request": "a", "prompt_tokens": 100, "output_tokens": 5, "submitted": 0, "admitted": 1, "first_token": 3,
        "finished": 7, "ttft_s": 3.0, "tpot_s": 1.0, "finish_reason": "stop",
    }.items():  # fmt: skip
        assert a[name] == pytest.approx(value) if isinstance(value, float) else a[name] == value, name
    for name, value in {
        "request": "b", "prompt_tokens": 30, "output_tokens": 3, "submitted": 1, "admitted": 5, "first_token": 6,
        "finished": 8,
    }.items():  # fmt: skip
        assert b[name] == value, name
    steps = recording.steps
    assert steps["num_scheduled_tokens"] == [33, 33, 34, 1, 16, 16, 2, 1]
    assert steps["new_tokens"] == [0, 0, 1, 1, 1, 2, 2, 1]
    assert [e.t - EPOCH for e in recording.events if e.kind == "submit"] == [0.0, 1.0]
    reasons = [e.reasons for e in recording.events if e.kind == "step"]
    assert reasons[2] == {"b": "in vLLM's queue; its spans say how long, not why"}
    assert all(not reason for reason in reasons[4:])


@pytest.mark.parametrize("seed", range(15))
def test_random_spans_keep_their_counts_and_times(seed):
    chance = random.Random(seed)
    items, known = [], []
    for number in range(chance.randint(1, 12)):
        times = sorted(chance.uniform(0, 50) for _ in range(4))
        if chance.random() < 0.2:
            times[1:3] = times[0], times[3]  # all at the end
        prompt, output = chance.randint(1, 400), chance.randint(0, 60)
        items.append(span(f"r{number}", *times, prompt, output))
        known.append((f"r{number}", *times, prompt, output))
    cache, _ = random_batches(seed)
    for item in cache:
        item["ts"] = EPOCH + (item["ts"] - 1000) * 0.7
    both = seed % 2 == 1
    items += cache if both else []
    recording = folded(from_vllm(lines(*items), seconds_per_step=0.3 if seed % 5 else None))
    rows = {
        row["request"]: row for row in recording.requests.rows() if not row["request"].startswith("store")
    }
    times = {event.i: event.t for event in recording.events if event.kind == "step"}
    length = step_length(recording) if not both else None
    assert rows.keys() == {rid for rid, *_ in known}
    for rid, arrival, _admitted, first, end, prompt, output in known:
        row = rows[rid]
        assert (row["prompt_tokens"], row["output_tokens"]) == (prompt, output)
        assert row["submitted"] < row["admitted"] <= row["finished"]
        assert times[row["finished"]] <= EPOCH + end + 1e-3
        if output:
            assert row["admitted"] <= row["first_token"] <= row["finished"]
            assert times[row["first_token"]] <= EPOCH + first + 1e-3
            if length is not None:
                assert row["ttft_s"] == pytest.approx(first - arrival, abs=length + 1e-3)
    computed = Counter()
    for event in recording.events:
        if event.kind == "step":
            computed.update(event.scheduled)
    assert all(computed[rid] == prompt + max(0, output - 1) for rid, *_, prompt, output in known)
    assert {e.kind for e in recording.events} >= {"submit", "step", "admit", "commit", "finish"}
    to_perfetto(recording)


def step_length(recording):
    """Seconds of a step: from a plan to its commit."""
    plan = next(e for e in recording.events if e.kind == "step")
    return next(e for e in recording.events if e.kind == "commit").t - plan.t


def test_an_otlp_line_is_the_same_request():
    line = span("r", 1, 2, 3, 9, 40, 7)
    wrap = {int: ("intValue", str), float: ("doubleValue", float), str: ("stringValue", str)}
    wrapped = {k: {wrap[type(v)][0]: wrap[type(v)][1](v)} for k, v in line["attributes"].items()}
    inner = {
        "name": "llm_request", "spanId": "ab",
        "startTimeUnixNano": str(round((EPOCH + 1) * 1e9)), "endTimeUnixNano": str(round((EPOCH + 9) * 1e9)),
        "attributes": [{"key": k, "value": v} for k, v in wrapped.items()],
    }  # fmt: skip
    otlp = {"resourceSpans": [{"scopeSpans": [{"spans": [inner]}]}]}
    assert read_lines(lines(otlp)).spans == read_lines(lines(line)).spans
    assert is_vllm(json.dumps(otlp))


def test_why_a_request_ended():
    def end(**more):
        found = span("r", 0, 0, 1, 2, 3, 4)
        found["attributes"] |= more.pop("attributes", {})
        (request,) = read_lines(lines(found | more)).spans
        return request.why, request.detail

    assert end() == ("stop", "the span does not say why")
    assert end(attributes={"gen_ai.request.max_tokens": 4}) == ("length", "4 of 4 tokens")
    assert end(attributes={"gen_ai.request.max_tokens": 9}) == ("stop", "the span does not say why")
    assert end(attributes={"gen_ai.response.finish_reasons": ["tool_calls"]}) == (
        "stop",
        "the span says tool_calls",
    )
    assert end(attributes={"gen_ai.response.finish_reasons": ["abort"]}) == ("abort", "the span says abort")
    assert end(status={"status_code": "ERROR", "description": "no memory"}) == ("error", "no memory")
    assert end(status={"code": 2}) == ("error", "the span's status is ERROR")


def test_several_outputs_of_one_request_are_requests_of_their_own():
    recording = folded(from_vllm(lines(*[span("r", i / 4, 1, 2, 3, 5, 4) for i in range(3)])))
    assert recording.requests["request"] == ["r", "r #2", "r #3"]


def test_days_of_the_calendar():
    import datetime

    from pagedinfer.trace.vllm_lines import _days

    day = datetime.date(1970, 1, 1)
    for number in range(0, 60_000, 17):
        date = day + datetime.timedelta(days=number)
        assert _days(date.year, date.month, date.day) == number


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hello", "line 1 is neither a batch of vLLM's KV-cache events nor a span: Expecting value"),
        ("{}", "it has neither `ts` and `events` nor `attributes` nor `resourceSpans`"),
        ("3", "it has neither `ts`"),
        (json.dumps(batch(1.0, {"type": "BlockMoved"})), "an event of type 'BlockMoved'; known are BlockStored, "),
        (json.dumps(batch(1.0, removed([None]))), "a block hash is None; it must be a number or text"),
        (json.dumps(batch(1.0, {"type": "BlockStored"})), "'block_hashes'"),
        ('{"attributes": {"gen_ai.usage.prompt_tokens": 1, "gen_ai.usage.completion_tokens": 1}, "start_time": "now"}',
         "start_time is 'now'; it must be nanoseconds or like 2026-01-31T12:00:00.5Z"),
        (json.dumps(batch(1.0, stored([1], block_size=4096))), "block_size 4096: a recording holds blocks of 1 to"),
        (json.dumps(batch(1.0, stored([1]), stored([2], block_size=8))), "Blocks of 16 and of 8 tokens"),
        ('{"attributes": {}}', "These lines hold neither KV-cache events nor spans of requests."),
    ],
)  # fmt: skip
def test_lines_that_are_none(line, said):
    with pytest.raises(RecordingError) as caught:
        from_vllm([line])
    assert said in str(caught.value)


def test_options_out_of_range(tmp_path):
    item = lines(batch(1.0, stored([1, 2])))
    with pytest.raises(
        ConfigError, match=r"^num_blocks=1: 2 blocks were cached at once; give at least that\.$"
    ):
        from_vllm(item, num_blocks=1)
    with pytest.raises(ConfigError, match=r"^seconds_per_step=0: it must be above 0\.$"):
        from_vllm(item, seconds_per_step=0)
    with pytest.raises(RecordingError, match="Cannot read"):
        load_vllm(tmp_path / "none.jsonl")
    assert from_vllm(item, num_blocks=64).config["num_blocks"] == 64


def test_views_show_it(tmp_path):
    cache, _ = random_batches(3)
    spans = [span(f"r{i}", i, i + 1, i + 2, i + 9, 40, 20) for i in range(4)]
    for item in cache:
        item["ts"] = EPOCH + (item["ts"] - 1000) / 4
    (tmp_path / "all.jsonl").write_text("\n".join(lines(*cache, *spans)))
    recording = load_vllm(tmp_path / "all.jsonl")
    assert picture_svg(recording).startswith("<svg")
    assert export_html(recording, tmp_path / "a.html").stat().st_size > 10_000


def test_many_requests_over_a_long_time_make_no_more_steps_than_they_should():
    items = [span("long", 0, 0, 1, 59, 10, 2), span("quick", 5, 5, 5.0001, 5.0002, 10, 50)]
    assert 5_000 < from_vllm(lines(*items)).num_steps <= 10_002
