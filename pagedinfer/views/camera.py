"""The camera: turns the events of a recording into the lines of a film, and keeps up while the recording grows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagedinfer.errors import readable
from pagedinfer.trace import events as ev
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import RequestState, State
from pagedinfer.views.frame import (
    DECODE,
    GONE,
    HELD,
    PREEMPTED,
    PREFILL,
    STATUSES,
    SWAPPED,
    WAITING,
    Frame,
    Lane,
    Line,
    Row,
    expected,
)
from pagedinfer.views.pool import Pool, equal_start
from pagedinfer.views.sentences import short_label, step_sentence
from pagedinfer.views.touched import Touched

__all__ = ["Camera"]

NEW = Row(-1)
"""Stands for the row of a request that was not there in the step before."""

RESTS = {"waiting": WAITING, "preempted": PREEMPTED, "swapped": SWAPPED}
"""What a request without tokens did, by its status; HELD where none of these."""

CANCELLED = "the plan was cancelled"


class Camera:
    """Folds events and writes a line per step: the difference between the frame before and the state now.

    The newest line is written again whenever events come in, because what comes in before the next plan belongs to it.
    Only requests and blocks that events named since the line before are looked at.

    What it writes is for readers: ids and sentences are `readable` there.

    Attributes:
        version: how often lines have changed.
        lanes, lines, texts: what the film consists of. lane_of: the newest lane of each id, as the recording has it.
        state: the state after the last event. num_blocks: the most blocks the pool has had.
    """

    def __init__(self, recording: Recording) -> None:
        self.first_step = recording.first_step
        self.lanes: list[Lane] = []
        self._rids: list[str] = []  # of each lane, as the recording has it
        self.lines: list[Line] = []
        self.texts: list[str] = []
        self.state = State()
        self.num_blocks = 0
        self.lane_of: dict[str, int] = {}
        self._events = recording.events
        self._num_read = self.version = 0
        self._base, self._base_texts, self._base_lanes = Frame(), 0, 0  # as of the step before the newest
        self._pool = Pool(1)
        self._parents: dict[
            int, int
        ] = {}  # key of a cached block -> the key before it, -1 at a prompt's start
        self._notes: list[tuple[str, int, str]] = []
        self._plan: dict[
            int, tuple[int, int, int]
        ] = {}  # lane -> (start, tokens, tokens known) of the newest plan
        self._plan_lanes = self._plan_notes = 0  # lanes and notes there were when it was made
        self._excused: set[int] = set()  # lanes with a reason of their own in the step before
        self._planned: set[int] = set()  # lanes with tokens in the step before
        self._touched = Touched()

    def update(self) -> int:
        """Take in what the recording has got since. Returns the first step whose line is new or changed."""
        newest = self.first_step + len(self.lines) - 1
        if self.lines and self._num_read == len(self._events) and not self._gap_grew():
            return newest + 1
        self.version += 1
        if self.lines:
            self._drop_newest()
        step = self.first_step + len(self.lines)
        while self._num_read < len(self._events):
            event = self._events[self._num_read]
            if isinstance(event, ev.Step) and event.i > step:
                self._add_line(step)
                self._close_step()
                step += 1
            self._num_read += 1
            self._touched.note(event, self.lane_of, self._everybody)
            self._note_before(event)
            self.state.apply(event)
            self.num_blocks = max(self.num_blocks, self.state.num_blocks)
            self._note_after(event)
        self._add_line(step)
        return max(newest, self.first_step)

    def _gap_grew(self) -> bool:
        """Whether a full recording has dropped more: its last event counts on."""
        gap = self._events[-1]
        if not isinstance(gap, ev.Gap) or (note := _gap_note(gap)) in self._notes:
            return False
        self._notes = [note if each[0] == "gap" else each for each in self._notes]
        return True

    def _everybody(self) -> Iterable[int]:
        return [*self._base.rows, *range(self._base_lanes, len(self.lanes))]

    def _drop_newest(self) -> None:
        """The newest step may still change, by what comes in before the next plan: its line is made again."""
        self.lines.pop()
        del self.texts[self._base_texts :]

    def _close_step(self) -> None:
        line = self.lines[-1]
        self._base.apply_changes(line, self.texts)
        self._base_texts, self._base_lanes = len(self.texts), len(self.lanes)
        self._excused -= set(line.get("gone", ()))
        for key, text in line.get("w", {}).items():
            (self._excused.discard if text < 0 else self._excused.add)(int(key))
        self._planned = set(self._plan)
        self._notes, self._plan = [], {}
        self._plan_lanes = self._plan_notes = 0
        self._touched = Touched()
        self._pool.touched.clear()

    def _note_before(self, event: ev.Event) -> None:
        lane = self.lane_of.get(getattr(event, "rid", ""), -1)
        match event:
            case ev.Admit() | ev.Resume() | ev.Preempt():
                kind = {"admit": "admitted", "resume": "resumed", "preempt": "preempted"}[event.kind]
                self._notes.append((kind, lane, event.why))
            case ev.Finish():
                self._notes.append(
                    ("finished", lane, f"{event.why}: {event.detail}" if event.detail else event.why)
                )
            case ev.Reject():
                self._notes.append(("rejected", -1, event.why))
            case ev.Error():
                self._notes.append(("error", -1, f"{event.where}: {event.what}"))
            case ev.Gap():
                self._notes.append(_gap_note(event))
            case ev.Cancel():
                del self._notes[self._plan_notes :]
                self._notes.append(("cancelled", -1, event.why))
                self._plan = {}

    def _note_after(self, event: ev.Event) -> None:
        match event:
            case ev.Meta():
                self._pool = Pool(self.state.block_size)
            case ev.Submit() | ev.Fork():
                self._add_lane(event.rid)
            case ev.Keyframe():
                self._touched.blocks.update(self.state.cached, self.state.ref_counts)
                for rid in sorted(self.state.requests, key=lambda r: self.state.requests[r].arrival):
                    self._add_lane(rid)
            case ev.Step():
                self._plan_lanes, self._plan_notes = len(self.lanes), len(self._notes)
                self._plan = {}
                for rid, n in event.scheduled.items():
                    request = self.state.requests[rid]
                    self._plan[self.lane_of[rid]] = (request.num_computed_tokens - n, n, request.num_tokens)

    def _add_lane(self, rid: str) -> None:
        number = self.lane_of[rid] = len(self.lanes)
        self._rids.append(rid)
        name = readable(rid)
        self.lanes.append(
            Lane(number, name, short_label(name, number), self.state.requests[rid].num_prompt_tokens)
        )
        self._touched.moved.add(number)

    # -- one line: the difference between the frame before and the state now ------------------------------------

    def _add_line(self, step: int) -> None:
        state, base = self.state, self._base
        changes: Line = {key: {} for key in "rtgocnw"}
        changes["new"] = [[a.rid, a.label, a.num_prompt_tokens] for a in self.lanes[self._base_lanes :]]
        lanes = sorted(self._touched.moved | self._touched.counted)
        live = {lane: state.requests[rid] for lane in lanes if (rid := self._rid(lane))}
        changes["gone"] = [lane for lane in lanes if lane in base.rows and lane not in live]
        for lane in self._touched.moved - live.keys():
            for holder in self._holders(lane):
                self._pool.hold(holder, (), 0)
        for lane, request in live.items():
            self._add_request(changes, lane, request)
        self._add_causes(changes)
        self._add_blocks(changes)
        line: Line = {"s": step, "b": state.last.budget, "m": self._memory()}
        if (behind := readable(self._behind())) != base.behind:
            line["h"] = self._text(behind) if behind else -1
        if self._touched.queues:
            self._add_queues(changes)
        notes = [(kind, lane, readable(text)) for kind, lane, text in self._notes]
        changes["e"] = [[kind, lane, self._text(text)] for kind, lane, text in notes]
        changes["x"] = self.texts[self._base_texts :]
        line |= {key: value for key, value in changes.items() if value}
        line["say"] = step_sentence(step, len(state.running), len(state.waiting), self._num_planned(),
                                    state.last.budget, notes, self.lanes)  # fmt: skip
        self.lines.append(line)

    def _rid(self, lane: int) -> str:
        """The id of the live request that this lane is of, "" when it has none (any more)."""
        rid = self._rids[lane]
        return rid if self.lane_of[rid] == lane and rid in self.state.requests else ""

    def _add_request(self, changes: Line, lane: int, request: RequestState) -> None:
        """How the request differs from the step before: counts, table, host slots."""
        row = self._base.rows.get(lane, NEW)
        now = (request.num_tokens, request.num_computed_tokens, request.status)
        counts = expected(row, self._plan[lane][1] if lane in self._plan else 0)
        if row is NEW or now != (*counts, row.status):
            changes["r"][str(lane)] = [*now[:2], STATUSES.index(request.status)]
        holders = self._holders(lane)
        if lane not in self._touched.moved:
            for holder in holders:
                self._pool.compute(holder, request.num_computed_tokens)
            return
        for holder, table in zip(holders, request.tables(), strict=True):
            self._pool.hold(holder, table, request.num_computed_tokens)
        if request.block_table != row.block_table:
            keep = equal_start(row.block_table, request.block_table)
            changes["t"][str(lane)] = [keep, request.block_table[keep:]]
        if any(request.group_tables) and request.group_tables != row.more:
            changes["g"][str(lane)] = [list(table) for table in request.group_tables]
        elif any(row.more) and not any(request.group_tables):
            changes["g"][str(lane)] = []
        host = list(self.state.host_tables.get(request.rid, ()))
        if host != row.host:
            changes["o"][str(lane)] = host

    def _holders(self, lane: int) -> list[int | tuple[int, int]]:
        """The lane's table in each group, as the pool knows it."""
        return [lane, *((lane, group) for group in range(1, self.state.num_groups))]

    def _add_causes(self, changes: Line) -> None:
        """What each did, and why it got no tokens, where that changed."""
        state, base = self.state, self._base
        named = {self.lane_of[rid] for rid in state.last.reasons if rid in self.lane_of}
        lanes = self._touched.moved | self._touched.counted | self._planned | self._plan.keys()
        lanes |= self._excused | named
        if state.last.cancelled or base.behind == CANCELLED:
            lanes |= {self.lane_of[rid] for rid in state.running}
        for lane in sorted(lanes):
            rid = self._rid(lane)
            did = self._did(lane, rid)
            if lane in self._plan and (did == PREFILL or self._plan[lane][1] != 1):
                changes["n"][str(lane)] = self._plan[lane][1]
            if did != base.did.get(lane, GONE):
                changes["c"][str(lane)] = did
            if rid and (why := readable(self._own_why(lane, rid))) != base.rows.get(lane, NEW).own_why:
                changes["w"][str(lane)] = self._text(why) if why else -1

    def _add_blocks(self, changes: Line) -> None:
        """What the prefix cache knows and who uses blocks beside the tables, where that changed."""
        state = self.state
        base, holders, counts = self._base, self._pool.holders, state.ref_counts
        changes["k"], changes["u"], changes["i"] = [], [], []
        for block_id in sorted(self._touched.blocks | self._pool.touched):
            count, known = counts.get(block_id, 0), state.cached.get(block_id)
            pins = count - len(holders.get(block_id, ()))
            # What came before a block that was cached when the recording began is not in it.
            now = known and (self._key(*known), self._key(known[0], state.parents.get(known[1], -1)))
            if now != base.cached.get(block_id):
                changes["u" if now is None else "k"].append(block_id if now is None else [block_id, *now])
            if pins != base.pins.get(block_id, 0):
                changes["i"].append([block_id, pins])
            if pins != self._pool.pins.get(block_id, 0):
                self._pool.pin(block_id, pins)
            self._pool.mark(block_id, known is not None and not count)

    def _key(self, group: int, key: int) -> int:
        """The key id as a film has it: groups have keys of their own."""
        return key if key < 0 else key * self.state.num_groups + group

    def _add_queues(self, changes: Line) -> None:
        state, base = self.state, self._base
        now = [
            [self.lane_of[rid] for rid in queue] for queue in (state.running, state.waiting, state.swapped)
        ]
        before = [base.running, base.waiting, base.swapped]
        if now != before:
            changes["q"] = [queue_change(old, new) for old, new in zip(before, now, strict=True)]

    def _memory(self) -> list[int]:
        """The pool's accounts; what is 0 at the end is left out, but for the first four."""
        state = self.state
        host = sum(map(len, state.host_tables.values()))
        memory = list(self._pool.memory(state.num_blocks, len(state.ref_counts), host))
        while len(memory) > 4 and not memory[-1]:
            memory.pop()
        return memory

    def _num_planned(self) -> int:
        return sum(n for _, n, _ in self._plan.values())

    def _text(self, text: str) -> int:
        try:
            return self.texts.index(text, max(0, len(self.texts) - 64))
        except ValueError:
            self.texts.append(text)
            return len(self.texts) - 1

    def _did(self, lane: int, rid: str) -> int:
        if lane in self._plan:
            start, _, known = self._plan[lane]
            return PREFILL if start < max(self.lanes[lane].num_prompt_tokens, known - 1) else DECODE
        if not rid:
            return GONE
        return RESTS.get(self.state.requests[rid].status, HELD)

    def _own_why(self, lane: int, rid: str) -> str:
        """Why this very request got no tokens in the newest plan; "" if it got some, or waits as `_behind` says."""
        state = self.state
        if lane in self._plan:
            return ""
        if rid in state.last.reasons:
            return state.last.reasons[rid]
        if rid in state.last.preempted:
            return state.last.causes[rid]
        if lane >= self._plan_lanes:
            return (
                "came after this step was planned" if state.step > self.first_step else "no step planned yet"
            )
        return CANCELLED if state.last.cancelled and state.requests[rid].status == "running" else ""

    def _behind(self) -> str:
        """Why those in the queue wait that have no reason of their own: one sentence for all, however many."""
        if self.state.last.cancelled:
            return CANCELLED
        named = self.state.last.reasons.keys() | self.state.last.preempted
        if not named:
            return ""
        for queue, place in (
            (self.state.waiting, "in the queue"),
            (self.state.swapped, "among those swapped out"),
        ):
            if (ahead := next((rid for rid in queue if rid in named), None)) is not None:
                return f"behind {ahead} {place}"
        return ""


def _gap_note(gap: ev.Gap) -> tuple[str, int, str]:
    return "gap", -1, f"{gap.dropped} events were dropped from here on"


def queue_change(old: list[int], new: list[int]) -> list[Any]:
    """What makes `old` into `new`: lanes to take out, then (position, lane) to put in, front to back."""
    before, after = set(old), set(new)
    if [lane for lane in old if lane in after] != [lane for lane in new if lane in before]:
        before = after = set()  # what stays has changed places: all out, all in
    out = [lane for lane in old if lane not in after]
    return [out, [[i, lane] for i, lane in enumerate(new) if lane not in before]]
