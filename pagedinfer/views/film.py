"""A recording as a film: one small line per step, which both the browser and the static pictures are drawn from.

A line holds what changed since the step before, as plain JSON. `Frame.apply` adds a line to a frame; the camera that
writes lines uses it too, so what is drawn is what was recorded. The browser's twin of this page is `static/film.js`.
Size grows with what happens, not with the pool.
"""

from __future__ import annotations

import threading
from operator import index
from typing import Any
from weakref import WeakKeyDictionary

from pagedinfer.errors import ConfigError, readable
from pagedinfer.trace.events import json_line
from pagedinfer.trace.recording import Recording, RecordingError
from pagedinfer.views.camera import Camera
from pagedinfer.views.frame import GONE, PREFILL, Frame, Lane

__all__ = ["Film", "film_of"]

KEYFRAME_STEPS = 64
MAX_NAMED = 8


class Film:
    """The lines of a recording, kept up to date by `update`.

    Keys of a line (all but s, b, m, say only when there is something): `s` step, `b` token budget, `m` memory
    (`Memory`, zeros at the end left out), `say` sentence, `x` texts added to the film's list, `new` lanes added (rid,
    label, prompt tokens), `gone` lanes that left, `r` lane -> (num_tokens, num_computed_tokens, status) where they are
    not as `frame.expected` has them, `t` lane -> (blocks kept, blocks added), `g` lane -> tables of groups above 0,
    `o` lane -> host slots, `c` lane -> what it did, where that changed, `n` lane -> tokens computed (left out: 1 for
    who decodes), `w` lane -> text why this one waits, where that changed (-1: no reason of its own), `h` text why the
    others in the queue wait, where that changed (-1: none), `q` changes of (running, waiting, swapped), each (lanes
    out, (position, lane) in), `k` blocks the prefix cache has got to know (block, key, key before it), `u` blocks it
    forgot, `i` (block, users beside the tables), `e` notes (kind, lane, text). Lanes and texts are numbers. So a line
    grows with what happens, not with who waits.

    Raises:
        RecordingError: the recording is empty.
    """

    def __init__(self, recording: Recording) -> None:
        if not recording.events:
            raise RecordingError("The recording is empty; record an engine first.")
        # Guards lines, texts and keyframes. Never held while an engine runs: a subscriber, under the engine's lock,
        # may read the film. `driving` is what makes views advance an engine one at a time, and readers never want it.
        self.lock, self.driving = threading.RLock(), threading.RLock()
        self._camera = Camera(recording)
        self.first_step = recording.first_step
        self.lanes: list[Lane] = self._camera.lanes
        self.lines, self.texts = self._camera.lines, self._camera.texts
        self._keyframes: dict[int, Frame] = {}
        self.update()

    def update(self) -> int:
        """Take in what the recording has got since. Returns the first step whose line is new or changed."""
        with self.lock:
            return self._camera.update()

    # -- looking ------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool: the most it has had."""
        return self._camera.num_blocks

    @property
    def version(self) -> int:
        """How often its lines have changed."""
        return self._camera.version

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._camera.state.block_size

    @property
    def last_step(self) -> int:
        """Number of the newest step."""
        return self.first_step + len(self.lines) - 1

    def opening(self, step: int | None, live: bool) -> int:
        """The step that a view opens at: `step`, or for None the newest; of a run that is over, the fullest one.

        Raises:
            RecordingError: there is no such step.
        """
        if step is not None:
            return self.clamp(step)
        frame = self.frame(self.last_step)
        is_over = not (live or frame.running or frame.waiting or frame.swapped)
        return self.fullest() if is_over else self.last_step

    def fullest(self) -> int:
        """The first step with the most blocks in use."""
        with self.lock:
            return int(max(self.lines, key=lambda line: line["m"][3])["s"])

    def clamp(self, step: int) -> int:
        """`step`, negative numbers counted from the end.

        Raises:
            RecordingError: there is no such step.
        """
        if isinstance(step, bool) or not hasattr(step, "__index__"):
            raise RecordingError(
                f"No step {step!r}: steps are numbered {self.first_step} to {self.last_step}."
            )
        step = index(step)
        step = step + self.last_step + 1 if step < 0 else step
        if not self.first_step <= step <= self.last_step:
            raise RecordingError(f"No step {step}: the recording has {self.first_step} to {self.last_step}.")
        return step

    def frame(self, step: int = -1) -> Frame:
        """What there was at the end of `step`: a copy of your own."""
        with self.lock:
            step = self.clamp(step)
            known = max((s for s in self._keyframes if s <= step), default=None)
            frame = Frame() if known is None else self._keyframes[known].copy()
            start = 0 if known is None else known + 1 - self.first_step
            for line in self.lines[start : step + 1 - self.first_step]:
                frame.apply_changes(line, self.texts)
                if line["s"] % KEYFRAME_STEPS == 0 and line["s"] < self.last_step:
                    self._keyframes.setdefault(line["s"], frame.copy())
            frame.settle(self.lines[step - self.first_step], self.texts)
            return frame

    def runs(self, first: int, last: int) -> dict[int, list[tuple[int, int, int]]]:
        """Lane -> (did, from step, to step) runs between two steps. Prefill is never merged: each chunk is a run."""
        runs: dict[int, list[tuple[int, int, int]]] = {}
        did: dict[int, int] = {}
        for line in self.lines[: last + 1 - self.first_step]:
            for key, value in line.get("c", {}).items():
                did[int(key)] = value
            if line["s"] < first:
                continue
            for lane, now in did.items():
                row = runs.setdefault(lane, [])
                if row and row[-1][0] == now != PREFILL and row[-1][2] == line["s"] - 1:
                    row[-1] = (now, row[-1][1], line["s"])
                elif now != GONE:
                    row.append((now, line["s"], line["s"]))
        return {lane: row for lane, row in runs.items() if row}

    def find(self, request: str | None) -> int:
        """The newest lane of a request id, as the recording or as the film has it; -1 for none and an unknown one."""
        if request is None:
            return -1
        if (lane := self._camera.lane_of.get(request)) is not None:
            return lane
        return next((lane.number for lane in reversed(self.lanes) if lane.rid == request), -1)

    def lane(self, request: str | None) -> int:
        """The newest lane of a request id, -1 for None.

        Raises:
            ConfigError: the recording has no such request.
        """
        if request is not None and (not isinstance(request, str) or self.find(request) < 0):
            ids = list(dict.fromkeys(lane.rid for lane in self.lanes))
            hidden = len(ids) - MAX_NAMED
            known = ", ".join(ids[:MAX_NAMED]) + (f" and {hidden} more" if hidden > 0 else "")
            raise ConfigError(
                f"request={request!r}: the recording has no such request; it has {known or 'none'}."
            )
        return self.find(request)

    def selection(self, request: str | None, *, may_come: bool = False) -> dict[str, Any]:
        """What a view selects at first: {"request": id as the film has it}, {} for None.

        Raises:
            ConfigError: the recording has no such request, nor `may_come` one: the view has no engine.
        """
        if isinstance(request, str) and may_come and self.find(request) < 0:
            return {"request": readable(request)}
        lane = self.lane(request)
        return {} if request is None else {"request": self.lanes[lane].rid}

    # -- for the browser ----------------------------------------------------------------------------------------

    def encode(self, step: int | None = None) -> bytes:
        """JSON lines: a header, then the lines from `step` (default: the first) to the end."""
        with self.lock:
            start = self.first_step if step is None else min(max(step, self.first_step), self.last_step)
            head = {
                "film": 1, "from": start, "first": self.first_step, "num_blocks": self.num_blocks,
                "block_size": self.block_size,
            }  # fmt: skip
            rows = (head, *self.lines[start - self.first_step :])
        return "\n".join(json_line(row) for row in rows).encode()


_films_lock = threading.Lock()
_films: WeakKeyDictionary[Recording, Film] = WeakKeyDictionary()


def film_of(recording: Recording) -> Film:
    """The recording's film, made once and brought up to date at each call."""
    with _films_lock:
        film = _films.get(recording)
        if film is None:
            film = _films[recording] = Film(recording)
    film.update()
    return film
