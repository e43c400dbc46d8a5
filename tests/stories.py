"""A small engine told step by step, for tests with literal block ids: the shadow checks every read, the fold every
event, and at the end the recording runs again.
"""

import pytest

from pagedinfer import Recorder, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.shadow import ShadowRunner
from pagedinfer.testing import assert_no_leak, check_map
from pagedinfer.trace.replay import fold


def tokens(start, number):
    """`number` tokens that no other start has."""
    return list(range(start, start + number))


A, B, C = (tokens(start, 32) for start in (0, 40, 80))


class Story:
    """An engine over the shadow, with blocks of 4 tokens, and its events; everything is checked after each step."""

    def __init__(self, num_blocks, **options):
        self.config = EngineConfig(
            **({"num_blocks": num_blocks, "block_size": 4, "max_model_len": 128, "watermark": 0.0} | options)
        )
        self.runner = ShadowRunner(num_blocks, 4, self.config.num_host_blocks)
        self.engine = Engine(self.config, self.runner)
        self.recording = Recorder(self.engine).start()

    def add(self, prompt, request_id=None, max_tokens=1, n=1, **options):
        """Queue a request. Returns its id."""
        params = SamplingParams(max_tokens=max_tokens, seed=1, n=n)
        return self.engine.add_request(prompt, params, request_id, **options)

    def step(self, times=1):
        """Run steps, checked. Returns the last one's outputs by id."""
        for _ in range(times):
            outputs = {output.request_id: output for output in self.engine.step()}
            self.check()
        return outputs

    def check(self):
        """The invariants hold and the folded events are the engine's state."""
        check_map(self.engine)
        assert fold(self.recording.events).snapshot() == self.engine.snapshot()

    def run(self):
        """Run to the end. Returns the outputs by id."""
        done = {}
        for _ in range(300):
            if not self.engine.has_unfinished():
                return done
            done.update((rid, output) for rid, output in self.step().items() if output.finished)
        raise AssertionError("still unfinished after 300 steps")

    def ask(self, prompt, **options):
        """Send one request and run it to its end. Returns its output."""
        rid = self.add(prompt, **options)
        return self.run()[rid]

    def hit(self, prompt, **options):
        """The tokens that one request finds."""
        return self.ask(prompt, **options).num_cached_tokens

    def table(self, rid):
        """A request's block table."""
        return self.engine.snapshot()["block_tables"].get(rid)

    @property
    def refs(self):
        """Reference counts of the blocks in use."""
        return {int(block): number for block, number in self.engine.snapshot()["ref_counts"].items()}

    @property
    def cached(self):
        """Blocks in the prefix cache."""
        return sorted(map(int, self.engine.snapshot()["cached"]))

    @property
    def idle(self):
        """Cached blocks that nobody uses, by priority."""
        return self.engine.snapshot()["idle"]

    def told(self, *kinds):
        """The events of these kinds."""
        return [event for event in self.recording.events if event.kind in kinds]

    def close(self):
        """The end of a story: nothing has leaked, and its recording runs again byte for byte."""
        self.run()
        assert_no_leak(self.engine)
        again = rerun(self.recording)[1]
        assert again.to_jsonl(wall=False) == self.recording.to_jsonl(wall=False)


@pytest.fixture
def story():
    """Makes stories, and ends them."""
    told = []

    def tell(num_blocks, **options):
        told.append(Story(num_blocks, **options))
        return told[-1]

    yield tell
    for one in told:
        one.close()
