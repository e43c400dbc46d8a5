"""One run of the torch-free core with everything switched on, driven call by call, beside three witnesses.

- The shadow memory: what each slot of the pool holds, and for which token; each read of each plan is checked.
- The fold: a `State` fed by the bus equals the scheduler's own snapshot after every call, also while plans are open.
- The re-run: the finished recording, run again, gives the same bytes.

`test_core_machine` drives it, by Hypothesis and by random walks.
"""

import random

from pagedinfer.config import (
    ADMISSIONS,
    ALLOCATORS,
    CHUNKINGS,
    ORDERS,
    PREEMPT_MODES,
    VICTIMS,
    EngineConfig,
    SamplingParams,
)
from pagedinfer.engine.plan import StepResult
from pagedinfer.engine.policies import make_policy
from pagedinfer.engine.policy import Policy
from pagedinfer.engine.request import BACKGROUND, INTERACTIVE, Request, Status
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import DuplicateRequest, OutOfBlocks, QueueFull, RequestTooLong
from pagedinfer.memory.prefix import PINNED
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.shadow import ShadowRunner
from pagedinfer.testing import unused_blocks
from pagedinfer.trace.events import SCHEMA, Meta, Step
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import State, fold

MAX_OPEN_PLANS = 3
VOCAB = 7
PREFIXES = [[1] * 40, [2, 3] * 20, [1] * 5 + [4] * 35]
"""What prompts begin with: the first and the last have their first tokens in common."""
IDS = [f"q{i}" for i in range(8)]


def draw_config(draw, **fixed):
    """Any config that is allowed, small enough that requests crowd each other."""
    pick, chance = draw.choice, lambda share: draw.random() < share
    options = {
        "num_blocks": pick([3, 4, 5, 6, 8, 10, 12, 16, 24]),
        "block_size": pick([1, 2, 3, 4, 5]),
        "max_num_seqs": pick([1, 2, 3, 4, 4, 5]),
        "max_num_batched_tokens": pick([1, 2, 3, 5, 7, 16, 16, 24]),
        "max_model_len": pick([20, 45, 60]),
        "watermark": pick([0.0, 0.0, 0.01, 0.25, 0.5]),
        "enable_prefix_caching": chance(0.75),
        "num_host_blocks": pick([0, 1, 2, 4, 8, 20]),
        "order": pick(ORDERS),
        "victim": pick(VICTIMS),
        "admission": pick(ADMISSIONS),
        "chunking": pick(CHUNKINGS),
        "max_chunk_tokens": pick([None, None, 1, 3, 8]),
        "swap_cost_tokens": pick([0.0, 1.0, 2.0, 5.0]),
        "pressure": pick([0.3, 0.6, 0.9]),
        "num_draft_tokens": pick([0, 0, 1, 2, 3]),
        "max_num_waiting": pick([None, None, 2, 5]),
        "tenant_max_running": pick([None, None, None, 1, 2]),
        "tenant_max_blocks": pick([None, None, None, 2, 6]),
    } | fixed
    options.setdefault("allocator", pick(ALLOCATORS) if chance(0.25) else "paged")
    if options["allocator"] == "paged":
        windows = [(None,)] * 4 + [(None, 4), (3,), (5, None), (None, None)]
        options.setdefault("group_windows", pick(windows))
    else:
        options.setdefault("compaction", chance(0.5))
    if options["num_host_blocks"]:
        options.setdefault("preempt_mode", pick(PREEMPT_MODES))
    if options["order"] == "priority":
        options.setdefault("aging", pick([None, None, 0.5, 2.0]))
    if options["admission"] == "expected-length":
        options.setdefault("expected_output_tokens", pick([1, 4, 10]))
    return EngineConfig(**options)


class Moody(Policy):
    """A learner's policy: now and then it raises or answers nonsense, the same way in every run."""

    NONSENSE = (None, "", "swop", -1, float("nan"), [], {}, {"nobody": 3}, {"q0": -2}, object)

    def __init__(self, policy, seed):
        super().__init__(policy.config)
        self._policy, self._seed, self._calls = policy, seed, 0

    def __repr__(self):
        return "Moody()"


def _moody(name):
    def method(self, *args):
        self._calls += 1
        mood = random.Random(self._seed * 1_000_003 + self._calls).random()
        if mood < 0.05:
            raise ValueError(f"{name} is in a bad mood")
        if mood < 0.1:
            return Moody.NONSENSE[self._calls % len(Moody.NONSENSE)]
        return getattr(self._policy, name)(*args)

    return method


for _name in ("order", "admit", "chunk", "victim", "preempt_mode"):
    setattr(Moody, _name, _moody(_name))


def make_moody(config, seed):
    policy = make_policy(config)
    moody = Moody(policy, seed)
    moody.moving_key, moody.waiting_first = policy.moving_key, policy.waiting_first
    return moody


class Run:
    """A scheduler under test, with its shadow runner and its witnesses. Every method is one call, checked."""

    def __init__(self, seed, *, moods=None, **fixed):
        self.draw = draw = random.Random(seed)
        self.config = draw_config(draw, **fixed)
        self.moods = moods if moods is not None else (seed if draw.random() < 0.2 else 0)
        self.scheduler = Scheduler(self.config, policy=self.make_policy())
        self.runner = self.make_runner()
        self.live = {}  # request id -> request
        self.open = []  # [plan, snapshot before it, number of changes before it, result or None]
        self.num_changes = 0  # everything but schedule and cancel
        self.num_seeds = 0
        self.now = 0.0
        self.work = 0  # tokens that were ever asked for, for the bound
        self.seen = Witness(self.config)
        self.scheduler.bus.subscribe(self.seen)

    def make_policy(self):
        return make_moody(self.config, self.moods) if self.moods else None

    def make_runner(self):
        config = self.config
        return ShadowRunner(
            config.num_blocks, config.block_size, config.num_host_blocks, windows=config.group_windows,
            vocab_size=VOCAB,
        )  # fmt: skip

    def __repr__(self):
        return f"{self.config}, moods {self.moods}"

    # -- requests come and go -------------------------------------------------------------------------------------

    def submit(self, length, max_tokens, *, prefix=0, shared=0, n=1, **options):
        """A prompt of `length` tokens, `shared` of them a common beginning; with `n` a group that shares it."""
        unused = [rid for rid in IDS if rid not in self.live][:n]
        tail = [self.draw.randrange(VOCAB) for _ in range(max(0, length - shared))]
        prompt = (PREFIXES[prefix][:shared] + tail)[:length]
        before = self.scheduler.snapshot()
        for index, rid in enumerate(unused):
            self.num_seeds += 1
            request = Request(rid, length, max_tokens, token_ids=list(prompt), seed=self.num_seeds, **options)
            request.parent = unused[0] if index else ""
            try:
                self.scheduler.submit(request, self.now, len(unused) if not index else 1)
            except QueueFull:
                assert self.config.max_num_waiting is not None
                assert len(before["waiting"]) + len(unused) > self.config.max_num_waiting
                assert self.scheduler.snapshot() == before
                return
            except RequestTooLong:
                assert self.scheduler.snapshot() == before
                return
            self.live[rid] = request
            self.work += length + max_tokens
            self.num_changes += 1

    def submit_any(self):
        """A request with options of all kinds."""
        pick, chance = self.draw.choice, lambda share: self.draw.random() < share
        pool = self.config.num_blocks * self.config.block_size
        length = min(pick([1, 2, 3, 5, 8, 11, 15, pool, pool - 1]), max(1, pool), 40) or 1
        options = {"tenant": pick(["", "a", "b"])}
        if self.config.order == "priority":
            options["priority"] = pick([INTERACTIVE, INTERACTIVE, 3, BACKGROUND])
        if chance(0.2):
            options["deadline"] = self.now + pick([1, 5, 50])
        if chance(0.1):
            options["expires"] = self.now + pick([0, 3, 20])
        if chance(0.15):
            until = pick([-1.0, self.now + 4])
            options["retain"] = ((0, pick([2, length]), pick([0, 80, PINNED]), until),)
        if chance(0.1):
            options["salt"] = "x"
        if chance(0.05):
            options["params"] = SamplingParams(prompt_logprobs=0)
        shared = pick([0, length // 2, length - 1, length, length])
        n = pick([1, 1, 1, 1, 2, 3])
        self.submit(length, pick([1, 2, 4, 7, 12]), prefix=pick([0, 1, 2]), shared=shared, n=n, **options)

    def submit_twice(self, rid):
        if rid not in self.live:
            return
        before = self.scheduler.snapshot()
        try:
            self.scheduler.submit(Request(rid, 2, 2, token_ids=[1, 2]), self.now)
        except DuplicateRequest:
            assert self.scheduler.snapshot() == before
            return
        raise AssertionError(f"{rid} was taken twice")

    def fork(self, rid):
        """A live request is copied as it stands."""
        unused = [other for other in IDS if other not in self.live]
        if rid not in self.live or not unused or self.open:
            return
        twin = self.live[rid].fork(unused[0], seed=self.live[rid].seed)
        try:
            self.scheduler.fork(rid, twin, self.now)
        except (QueueFull, RequestTooLong):
            return
        self.live[twin.request_id] = twin
        self.work += twin.num_prompt_tokens + twin.max_tokens
        self.num_changes += 1

    def abort(self, rid):
        if rid in self.live:
            self.num_changes += 1
            self.take_ends(self.scheduler.abort(rid))

    def preempt(self, rid, mode):
        if not self.open and rid in self.live and self.live[rid].status == Status.RUNNING:
            self.num_changes += 1
            self.scheduler.preempt(rid, "forced", mode)

    def refuse(self, ahead):
        self.scheduler.blocks.refuse_calls.add(self.scheduler.blocks.num_calls + ahead)

    def wait(self, time):
        """Time goes by; whoever is overdue is given up."""
        self.now += time
        for rid in self.scheduler.overdue(self.now):
            assert self.live[rid].expires <= self.now
            self.num_changes += 1
            self.take_ends(self.scheduler.abort(rid, "timed out"))

    # -- the pool between steps -----------------------------------------------------------------------------------

    def reset_cache(self):
        held = self.scheduler.snapshot()["ref_counts"]
        if self.scheduler.reset_prefix_cache():
            assert not held
            assert not self.open
            self.num_changes += 1

    def resize(self, num_blocks):
        if self.open or self.scheduler.blocks.ops:
            return
        try:
            ops = self.scheduler.plan_resize(num_blocks)
        except OutOfBlocks:
            return
        self.num_changes += 1
        self.runner.run_ops(ops)
        self.runner.resize(num_blocks)
        self.scheduler.resize(num_blocks, ops)

    def compact(self):
        if self.config.allocator == "paged" or self.open or self.scheduler.blocks.ops:
            return
        ops = self.scheduler.plan_compact()
        self.num_changes += 1
        self.runner.run_ops(ops)
        self.scheduler.compact(ops, "asked for")

    def poison(self):
        """Whoever reads a block that is free and not cached finds nothing."""
        if not self.open and not self.scheduler.blocks.ops:
            self.runner.memory.poison(self.scheduler.snapshot()["free"])

    # -- plans ----------------------------------------------------------------------------------------------------

    def schedule(self):
        if len(self.open) == MAX_OPEN_PLANS:
            return
        before = self.scheduler.snapshot()
        plan = self.scheduler.schedule(self.now)
        self.open.append([plan, before, self.num_changes, None])
        self.look_at(plan, before)

    def look_at(self, plan, before):
        """Budget, seats, who is in it, and that each row goes on where its request stands."""
        config = self.config
        rids = [item.request_id for item in plan.scheduled]
        running = {request.request_id for request in self.scheduler.running}
        tokens = sum(item.num_tokens for item in plan.scheduled)
        assert plan.step == before["step"] + 1 == self.scheduler.step
        assert plan.num_tokens == tokens <= config.max_num_batched_tokens
        assert len(set(rids)) == len(rids) <= len(running) <= config.max_num_seqs
        assert set(rids) <= running, "a request is scheduled that does not run"
        assert not set(plan.exhausted) & set(rids)
        assert all(plan.reasons.values())
        assert not set(plan.reasons) & set(rids), "scheduled, with a reason why not"
        for item in plan.scheduled:
            request = self.live[item.request_id]
            known, drafts = request.num_tokens, len(item.draft_token_ids)
            assert item.num_tokens >= 1
            assert item.end == request.num_computed_tokens <= known + drafts
            assert item.samples == (item.end >= known)
            assert not drafts or item.end == known + drafts
            assert item.output_index == known - request.num_prompt_tokens
            assert list(item.block_table[-len(item.new_block_ids) :] if item.new_block_ids else []) == [
                b for b in item.block_table[-len(item.new_block_ids) :] if item.new_block_ids
            ]

    def execute(self):
        """The runner runs the oldest plan."""
        if self.open and self.open[0][3] is None:
            self.open[0][3] = self.runner.execute(self.open[0][0])

    def commit(self, row=99, what="goes on"):
        """Close the oldest plan; one row of it may meet a stop condition or fail."""
        if not self.open:
            return
        self.execute()
        plan, _, _, result = self.open.pop(0)
        self.num_changes += 1
        item, ends = plan.scheduled[row] if row < len(plan.scheduled) else None, {}
        if item and what == "stops" and item.samples:
            ends[item.request_id] = ("stop", "end id 7")
        if item and what == "fails":
            tokens = {rid: new for rid, new in result.tokens.items() if rid != item.request_id}
            result = StepResult(tokens, {item.request_id: "logits are NaN"})
        drafts = self.guess(result, ends)
        self.take_ends(self.scheduler.commit(plan, result, ends, drafts))

    def guess(self, result, ends):
        """Drafts, right and wrong."""
        drafts = {}
        for rid, new in result.tokens.items():
            request = self.live[rid]
            index = request.num_output_tokens + len(new)
            number = min(self.config.num_draft_tokens, request.max_tokens - index - 1)
            number = self.draw.randint(0, number) if number > 0 else 0
            if number and rid not in ends:
                right = [self.rule(request, index + i) for i in range(number)]
                drafts[rid] = [t if self.draw.random() < 0.7 else (t + 1) % VOCAB for t in right]
        return drafts

    @staticmethod
    def rule(request, index):
        return (request.seed * 31 + index * 7 + 1) % VOCAB

    def cancel(self):
        """Take the newest plan back. One that the runner has run is taken back there first."""
        if not self.open:
            return
        plan, before, num_changes, result = self.open.pop()
        if result is not None:
            self.runner.take_back(plan)
        self.take_ends(self.scheduler.cancel(plan, "changed my mind"))
        if num_changes == self.num_changes:
            assert self.scheduler.snapshot() == before, "cancel did not restore the state"

    def take_ends(self, updates):
        """Requests that have ended: each once, with a reason, with the tokens that the rule gives it."""
        for update in updates:
            if update.finish_reason is None:
                continue
            request = self.live.pop(update.request.request_id)
            assert request is update.request
            assert update.finish_reason in ("stop", "length", "abort", "error")
            assert update.detail
            assert request.status == Status.FINISHED
            output = request.token_ids[request.num_prompt_tokens :]
            assert output == [self.rule(request, i) for i in range(len(output))], "wrong tokens"
            assert len(output) == request.num_output_tokens <= request.max_tokens
            assert request.num_tokens <= self.config.max_model_len

    # -- after each call ------------------------------------------------------------------------------------------

    def check(self):
        self.scheduler.check()
        assert self.scheduler.requests == self.live
        ours, theirs = self.scheduler.snapshot(), self.seen.state.snapshot()
        if ours != theirs:
            raise AssertionError(
                f"the folded events are not the state (core, fold): {difference(ours, theirs)}"
            )
        assert self.seen.state.has_open_plan == bool(self.open)

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self):
        """Drain within the bound; nothing leaks; the recording folds and runs again byte for byte."""
        self.drain()
        snapshot = self.scheduler.snapshot()
        num_blocks, num_slots = self.scheduler.blocks.num_blocks, self.config.num_host_blocks
        for name in (
            "waiting",
            "running",
            "swapped",
            "requests",
            "block_tables",
            "ref_counts",
            "host_tables",
        ):
            assert not snapshot[name], f"{name} is not empty: {snapshot[name]}"
        assert sorted(unused_blocks(snapshot)) == list(range(num_blocks))
        assert sorted(snapshot["host_free"]) == list(range(num_slots))
        recording = self.seen.recording
        assert fold(recording.events).snapshot() == snapshot
        self.seen.check_every_step()
        again, second = rerun(recording, policy=self.make_policy())
        assert second.to_jsonl(wall=False) == recording.to_jsonl(wall=False), "the re-run differs"
        assert again.snapshot() == snapshot
        text = recording.to_jsonl()
        assert Recording.from_jsonl(text).to_jsonl() == text

    @property
    def bound(self):
        """Steps in which all live requests end when nobody else comes.

        The first of the batch is never preempted and gets a token, so each step computes one of the tokens that were
        asked for; what the others lose to it they compute again, each time at most all of it.
        """
        tokens = sum(r.num_prompt_tokens + r.max_tokens for r in self.live.values())
        return 10 + tokens * (1 + len(self.live))

    def drain(self):
        self.scheduler.blocks.refuse_calls.clear()
        while self.open:
            self.commit()
            self.check()
        bound = self.bound
        for _ in range(bound):
            if not self.live:
                return
            self.now += 1
            self.schedule()
            self.check()
            self.commit()
            self.check()
        assert not self.live, f"not done after {bound} steps: {self.scheduler.snapshot()}"

    # -- any of it ------------------------------------------------------------------------------------------------

    def act(self, name):
        """One call by name, its arguments drawn."""
        draw = self.draw
        rid = draw.choice(IDS)
        match name:
            case "submit":
                self.submit_any()
            case "steps":
                ahead = draw.randrange(MAX_OPEN_PLANS)
                for _ in range(draw.randint(1, 6)):
                    self.now += 1
                    self.schedule()
                    self.check()
                    while len(self.open) > ahead:
                        self.commit()
                        self.check()
            case "commit":
                self.commit(draw.randrange(4), draw.choice(["goes on"] * 6 + ["stops", "fails"]))
            case "fail":  # the runner raises after the oldest plan has run: all open ones are taken back
                self.execute()
                while self.open:
                    self.cancel()
                    self.check()
            case "twice":
                self.submit_twice(rid)
            case "fork" | "abort":
                live = sorted(self.live)
                getattr(self, name)(draw.choice(live) if live else rid)
            case "preempt":
                running = [request.request_id for request in self.scheduler.running]
                if running:
                    self.preempt(draw.choice(running), draw.choice(["recompute", "swap"]))
            case "refuse":
                self.refuse(draw.randrange(4))
            case "wait":
                self.wait(draw.choice([0.5, 1, 3]))
            case "resize":
                self.resize(max(1, self.config.num_blocks + draw.choice([-3, -2, -1, 0, 1, 4])))
            case _:
                getattr(self, name)()


def difference(ours, theirs):
    """Where two nested values differ."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return ours, theirs
    return {
        key: difference(ours.get(key), theirs.get(key))
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key)
    }


ACTIONS = {
    "submit": 20, "steps": 20, "schedule": 20, "execute": 4, "commit": 16, "cancel": 8, "fail": 3, "abort": 3,
    "preempt": 4, "refuse": 3, "wait": 6, "fork": 3, "twice": 1, "reset_cache": 2, "resize": 2, "compact": 2,
    "poison": 4,
}  # fmt: skip


class Witness:
    """A subscriber that records, folds, and remembers which events were there when each step ended."""

    def __init__(self, config):
        meta = Meta(SCHEMA, config.to_dict())
        meta.step = 0
        self.recording, self.state = Recording(), State()
        self.ends = {}  # step -> number of events before the next step's plan
        self.last_step = 0
        self(meta)

    def __call__(self, event):
        if isinstance(event, Step):
            if event.i - 1 not in self.ends or event.i > self.last_step:
                self.ends[event.i - 1] = len(self.recording)
            self.ends = {step: end for step, end in self.ends.items() if step < event.i}
            self.last_step = event.i
        self.recording.add(event)
        self.state.apply(event)

    def check_every_step(self):
        """`at(k)`, backwards, equals the fold of everything up to the end of step k."""
        self.ends[self.last_step] = len(self.recording)
        assert self.recording.last_step == self.last_step
        for step in sorted(self.ends, reverse=True):
            there = fold(self.recording.events[: self.ends[step]])
            assert self.recording.at(step).snapshot() == there.snapshot()
