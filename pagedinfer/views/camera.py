"""The camera: turns the events of a recording into the lines of a film, and keeps up while the recording grows."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from pagedinfer.trace import events as ev
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State
from pagedinfer.views.frame import (
    DECODE,
    GONE,
    HELD,
    PREEMPTED,
    PREFILL,
    STATUSES,
    WAITING,
    Frame,
    Lane,
    Line,
    Row,
)
from pagedinfer.views.sentences import short_label, step_sentence

__all__ = ["Camera"]

NEW = Row(-1)
"""Stands for the row of a request that was not there in the step before."""

CANCELLED = "the plan was cancelled"


class Camera:
    """Folds events and writes a line per step: the difference between the frame before and the state now.

    The newest line is written again whenever events come in, because what comes in before the next plan belongs to it.

    Attributes:
        lanes, lines, texts: what the film consists of.
        state: the state after the last event.
    """

    def __init__(self, recording: Recording) -> None:
        self.first_step = recording.first_step
        self.lanes: list[Lane] = []
        self.lines: list[Line] = []
        self.texts: list[str] = []
        self.state = State()
        self.lane_of: dict[str, int] = {}
        self._events = recording.events
        self._num_read = 0
        self._base, self._base_texts, self._base_lanes = Frame(), 0, 0  # as of the step before the newest
        self._notes: list[tuple[str, int, str]] = []
        self._plan: dict[int, tuple[int, int]] = {}  # lane -> (start, tokens) of the newest plan
        self._plan_lanes = self._plan_notes = 0  # lanes and notes there were when it was made

    def update(self) -> int:
        """Take in what the recording has got since. Returns the first step whose line is new or changed."""
        newest = self.first_step + len(self.lines) - 1
        if self.lines and self._num_read == len(self._events):
            return newest + 1
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
            self._note_before(event)
            self.state.apply(event)
            self._note_after(event)
        self._add_line(step)
        return max(newest, self.first_step)

    def _drop_newest(self) -> None:
        """The newest step may still change, by what comes in before the next plan: its line is made again."""
        self.lines.pop()
        del self.texts[self._base_texts :]

    def _close_step(self) -> None:
        self._base.apply(self.lines[-1], self.texts)
        self._base_texts, self._base_lanes = len(self.texts), len(self.lanes)
        self._notes, self._plan = [], {}
        self._plan_lanes = self._plan_notes = 0

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
                self._notes.append(("gap", -1, f"{event.dropped} events were dropped from here on"))
            case ev.Cancel():
                del self._notes[self._plan_notes :]
                self._notes.append(("cancelled", -1, event.why))
                self._plan = {}

    def _note_after(self, event: ev.Event) -> None:
        match event:
            case ev.Submit():
                self._add_lane(event.rid)
            case ev.Keyframe():
                for rid in sorted(self.state.requests, key=lambda r: self.state.requests[r].arrival):
                    self._add_lane(rid)
            case ev.Step():
                self._plan_lanes, self._plan_notes = len(self.lanes), len(self._notes)
                self._plan = {}
                for rid, n in event.scheduled.items():
                    self._plan[self.lane_of[rid]] = (self.state.requests[rid].num_computed_tokens - n, n)

    def _add_lane(self, rid: str) -> None:
        number = self.lane_of[rid] = len(self.lanes)
        self.lanes.append(
            Lane(number, rid, short_label(rid, number), self.state.requests[rid].num_prompt_tokens)
        )

    # -- one line: the difference between the frame before and the state now ------------------------------------

    def _add_line(self, step: int) -> None:
        state, base = self.state, self._base
        usage = state.usage()
        live = {self.lane_of[rid]: request for rid, request in state.requests.items()}
        names = ("live_slots", "tail_slack_slots", "free_slots")
        line: Line = {
            "s": step,
            "b": state.last.budget,
            "m": [*(usage[n] for n in names), len(state.ref_counts)],
        }
        changes: Line = {
            "r": {},
            "t": {},
            "c": {},
            "n": {str(k): n for k, (_, n) in self._plan.items()},
            "w": {},
        }
        changes["new"] = [[a.rid, a.label, a.num_prompt_tokens] for a in self.lanes[self._base_lanes :]]
        changes["gone"] = [lane for lane in base.rows if lane not in live]
        for lane, request in live.items():
            row = base.rows.get(lane, NEW)
            now = (request.num_tokens, request.num_computed_tokens, request.status)
            if row is NEW or now != (row.num_tokens, row.num_computed_tokens, row.status):
                changes["r"][str(lane)] = [*now[:2], STATUSES.index(request.status)]
            if (table := request.block_table) != (old := row.block_table):
                keep = next((i for i, (a, b) in enumerate(zip(old, table, strict=False)) if a != b), None)
                keep = min(len(old), len(table)) if keep is None else keep
                changes["t"][str(lane)] = [keep, table[keep:]]
            if (why := self._own_why(lane, request.status)) != row.own_why:
                changes["w"][str(lane)] = self._text(why) if why else -1
        if (behind := self._behind()) != base.behind:
            line["h"] = self._text(behind) if behind else -1
        for lane in live.keys() | base.did.keys() | self._plan.keys():
            if (did := self._did(lane, live.keys())) != base.did.get(lane, GONE):
                changes["c"][str(lane)] = did
        queues = [[self.lane_of[rid] for rid in queue] for queue in (state.running, state.waiting)]
        if queues != [base.running, base.waiting]:
            changes["q"] = [queue_change(base.running, queues[0]), queue_change(base.waiting, queues[1])]
        changes["e"] = [[kind, lane, self._text(text)] for kind, lane, text in self._notes]
        changes["x"] = self.texts[self._base_texts :]
        line |= {key: value for key, value in changes.items() if value}
        line["say"] = step_sentence(step, len(state.running), len(state.waiting), self._num_planned(),
                                    state.last.budget, self._notes, self.lanes)  # fmt: skip
        self.lines.append(line)

    def _num_planned(self) -> int:
        return sum(n for _, n in self._plan.values())

    def _text(self, text: str) -> int:
        try:
            return self.texts.index(text, max(0, len(self.texts) - 64))
        except ValueError:
            self.texts.append(text)
            return len(self.texts) - 1

    def _did(self, lane: int, live: Container[int]) -> int:
        if lane in self._plan:
            start, n = self._plan[lane]
            return PREFILL if n > 1 or start < self.lanes[lane].num_prompt_tokens else DECODE
        if lane not in live:
            return GONE
        return {"waiting": WAITING, "preempted": PREEMPTED}.get(
            self.state.requests[self.lanes[lane].rid].status, HELD
        )

    def _own_why(self, lane: int, status: str) -> str:
        """Why this very request got no tokens in the newest plan; "" if it got some, or waits as `_behind` says."""
        rid, state = self.lanes[lane].rid, self.state
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
        return CANCELLED if state.last.cancelled and status == "running" else ""

    def _behind(self) -> str:
        """Why those in the queue wait that have no reason of their own: one sentence for all, however many."""
        if self.state.last.cancelled:
            return CANCELLED
        reasons = self.state.last.reasons
        ahead = next((rid for rid in self.state.waiting if rid in reasons), None) if reasons else None
        return f"behind {ahead} in the queue" if ahead is not None else ""


def queue_change(old: list[int], new: list[int]) -> list[Any]:
    """What makes `old` into `new`: lanes to take out, then (position, lane) to put in, front to back."""
    before, after = set(old), set(new)
    if [lane for lane in old if lane in after] != [lane for lane in new if lane in before]:
        before = after = set()  # what stays has changed places: all out, all in
    out = [lane for lane in old if lane not in after]
    return [out, [[i, lane] for i, lane in enumerate(new) if lane not in before]]
