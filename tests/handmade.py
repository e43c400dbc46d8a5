"""Recordings written by hand, for events that a test wants in a certain order."""

from pagedinfer.trace import events as ev
from pagedinfer.trace.recording import Recording


class HandMade:
    """Adds events with their step; `step` opens and commits a plan around those of the plan."""

    def __init__(self, num_blocks=16, block_size=4, **config):
        self.recording, self.now, self._seq = Recording(), 0, 0
        settings = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
        }
        self.add(ev.Meta(ev.SCHEMA, settings | config))

    def add(self, *events):
        """Add events of the step that is open."""
        for event in events:
            event.step, event.seq = self.now, self._seq
            self._seq += 1
            self.recording.add(event)
        return self

    def submit(self, rid, prompt=8, output=8, keys=()):
        """A request comes."""
        return self.add(ev.Submit(rid, prompt, output, 0, float(self.now), tuple(keys)))

    def step(self, scheduled, *events, tokens=(), reasons=None, cancel=False):
        """One step: its plan, the plan's events, and its commit with a new token for each of `tokens`."""
        self.now += 1
        self.add(ev.Step(self.now, float(self.now), 64, dict(scheduled), dict(reasons or {})), *events)
        if cancel:
            self.add(ev.Cancel("tried out"))
            self.now -= 1
            return self
        return self.add(ev.Commit(dict.fromkeys(tokens, 1)))

    def finish(self, rid, *blocks):
        """A request ends and gives back its blocks, last first."""
        return self.add(
            ev.Free(rid, blocks[::-1], "finish"), ev.Finish(rid, "length", "all its tokens are there")
        )
