"""A scheduler with a simulated runner, for stories: submit, step, look at who computed how much."""

from pagedinfer.config import EngineConfig
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.testing import unused_blocks

BOUND = 2_000


class Story:
    """One scheduler from the first request to the last; each step is checked.

    Attributes:
        steps: tokens by request, for each step.
        events: all that were told, but steps and submissions.
        ends: finish reason by request.
    """

    def __init__(self, policy=None, **config):
        settings = {
            "num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 200,
            "watermark": 0.0, "enable_prefix_caching": False,
        } | config  # fmt: skip
        self.scheduler = Scheduler(EngineConfig(**settings), policy=policy)
        self.runner = SimulatedRunner()
        self.steps, self.events, self.ends, self.requests = [], [], {}, {}
        self.scheduler.bus.subscribe(self.events.append)

    def submit(self, rid, prompt, max_tokens=1, *, tokens=None, **options):
        """A request of `prompt` tokens, different from all others' unless `tokens` says which."""
        token_ids = list(tokens) if tokens else [len(self.requests) + 1] * prompt
        self.requests[rid] = Request(rid, len(token_ids), max_tokens, token_ids=token_ids, **options)
        self.scheduler.submit(self.requests[rid], float(self.scheduler.step))
        return self.requests[rid]

    def step(self):
        """One whole step; returns its plan."""
        plan = self.scheduler.schedule(float(self.scheduler.step))
        self.scheduler.check()
        for update in self.scheduler.commit(plan, self.runner.execute(plan)):
            if update.finish_reason:
                self.ends[update.request.request_id] = update.finish_reason
        self.scheduler.check()
        self.steps.append({item.request_id: item.num_tokens for item in plan.scheduled})
        return plan

    def run(self, num_steps=None):
        """So many steps, or until nobody is left; returns the tokens by request of these steps."""
        before = len(self.steps)
        for _ in range(num_steps or BOUND):
            if num_steps is None and not self.scheduler.requests:
                break
            self.step()
        if num_steps is None:
            self.assert_drained()
        return self.steps[before:]

    def assert_drained(self):
        snapshot = self.scheduler.snapshot()
        assert not self.scheduler.requests, f"not done after {BOUND} steps: {snapshot}"
        assert sorted(unused_blocks(snapshot)) == list(range(self.scheduler.blocks.num_blocks))
        assert not snapshot["host_tables"]
        assert len(snapshot["host_free"]) == self.scheduler.config.num_host_blocks

    def told(self, kind):
        """The events of a kind."""
        return [event for event in self.events if event.kind == kind]

    def first_steps(self):
        """The requests in the order in which they got their first tokens, those of one step by name."""
        seen = {}
        for number, scheduled in enumerate(self.steps):
            for rid in sorted(scheduled):
                seen.setdefault(rid, number)
        return list(seen)

    def outputs(self):
        """Output tokens by request."""
        return {rid: r.token_ids[r.num_prompt_tokens :] for rid, r in self.requests.items()}

    @property
    def num_preemptions(self):
        return self.scheduler.queues.num_preemptions
