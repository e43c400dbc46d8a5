"""Random traffic through the plain scheduler (first come, first served, nothing shared), beside three witnesses.

Every call in any order. `test_core_machine` does the same with everything switched on, and says less about each plan.

- Slots: what each token slot of the pool holds. A plan that would read a slot that was never written for that request
  and position, or write past its table, is caught here (the shadow model of the paging literature). Where requests
  share and move blocks the witness is `sim.shadow`, which compares contents; where they do not, a slot must have been
  written by this request, since it last began anew.
- The fold: a `State` fed by the bus equals the scheduler's own snapshot after every rule.
- The re-run: the finished recording, run again, gives the same bytes.
"""

import random
from collections import Counter

import pytest
from core_run import Witness
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedinfer.config import EngineConfig
from pagedinfer.engine.plan import StepResult
from pagedinfer.engine.request import Request, Status
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import DuplicateRequest, OutOfBlocks, RequestError, RequestTooLong, UnknownRequest
from pagedinfer.memory.prefix import PINNED
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.shadow import ShadowMemory
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.replay import fold

MAX_OPEN_PLANS = 3
IDS = ["a", "b", "c", "d", "e", "f"]
PLAIN = {"enable_prefix_caching": False}
CACHED = {}
EVERYTHING = {"num_host_blocks": 3, "preempt_mode": "swap", "order": "priority", "victim": "lowest-priority"}
LENGTHS = st.tuples(st.integers(1, 12), st.integers(1, 12))  # prompt, max_tokens


class SchedulerMachine(RuleBasedStateMachine):
    # -- set up ---------------------------------------------------------------------------------------------------

    @initialize(
        # Most draws give several requests that crowd each other; the corners are there too.
        num_blocks=st.sampled_from([6, 8, 7, 5, 4, 3, 2, 1]),
        block_size=st.sampled_from([2, 3, 4, 1, 5]),
        max_num_seqs=st.sampled_from([4, 4, 4, 3, 2, 1]),
        budget=st.sampled_from([16, 16, 7, 5, 3, 2, 1]),
        max_model_len=st.sampled_from([45, 45, 45, 20, 7, 2]),
        watermark=st.sampled_from([0.0, 0.0, 0.0, 0.25, 0.5]),
        crowd=st.lists(LENGTHS, min_size=2, max_size=4),
        options=st.sampled_from([PLAIN, CACHED, CACHED, EVERYTHING]),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, max_model_len, watermark, crowd, options):
        self.config = EngineConfig(
            num_blocks=num_blocks, block_size=block_size, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget, max_model_len=max_model_len, watermark=watermark, **options,
        )  # fmt: skip
        self.plain = options is PLAIN
        self.shadow = ShadowMemory(num_blocks, block_size, self.config.num_host_blocks)
        self.scheduler = Scheduler(self.config)
        self.runner = SimulatedRunner()
        self.requests = {}  # live ones by id, and what the model knows of them
        self.open = []  # (plan, snapshot before it, number of changes before it)
        self.num_changes = 0  # everything but schedule and cancel
        self.num_submitted = 0
        self.slots = {}  # (block_id, offset) -> what was written there
        self.seen = Witness(self.config)
        self.scheduler.bus.subscribe(self.seen)
        self.submit_some(crowd, None)

    @property
    def num_blocks(self):
        """Of the pool as it is now."""
        return self.scheduler.blocks.num_blocks

    # -- requests come and go -------------------------------------------------------------------------------------

    @rule(
        wishes=st.lists(LENGTHS, min_size=1, max_size=3),
        whole=st.sampled_from([None, None, 1, 0]),
    )
    def submit_some(self, wishes, whole):
        """Requests of ordinary length under unused ids; with `whole` the first is as long as the pool, or 1 less."""
        pool = self.num_blocks * self.config.block_size
        unused = [rid for rid in IDS if rid not in self.requests]
        for index, (rid, (prompt, max_tokens)) in enumerate(zip(unused, wishes, strict=False)):
            if whole is not None and index == 0:
                prompt = max(1, pool - whole)
            self.submit(rid, min(prompt, pool), max_tokens)

    @rule(rid=st.sampled_from(IDS), prompt=st.integers(0, 46), max_tokens=st.integers(0, 12))
    def submit_anything(self, rid, prompt, max_tokens):
        self.submit(rid, prompt, max_tokens)

    def submit(self, rid, prompt, max_tokens):
        self.num_submitted += 1
        request = Request(rid, prompt, max_tokens, token_ids=self.tokens(prompt), seed=self.num_submitted)
        if self.config.order == "priority":
            request.priority = self.num_submitted % 3
        if not self.plain and self.num_submitted % 4 == 0:
            priority = (0, 80, PINNED)[self.num_submitted % 3]
            request.retain = (
                (0, prompt, priority, -1.0 if self.num_submitted % 8 else self.scheduler.step + 4.0),
            )
        before = self.scheduler.snapshot()
        if rid in self.requests:
            expected = DuplicateRequest
        elif prompt < 1 or max_tokens < 1:
            expected = RequestError
        elif prompt >= self.config.max_model_len or prompt > self.num_blocks * self.config.block_size:
            expected = RequestTooLong
        else:
            self.scheduler.submit(request, float(self.num_submitted))
            self.requests[rid] = request
            self.num_changes += 1
            return
        with pytest.raises(expected):
            self.scheduler.submit(request, float(self.num_submitted))
        assert self.scheduler.snapshot() == before

    def tokens(self, prompt):
        """Two kinds of prompt, equal from the start within a kind, but for the last few tokens of some."""
        kind, tail = self.num_submitted % 2, self.num_submitted % 5
        return [-1 - kind if i < prompt - tail else -3 - self.num_submitted for i in range(prompt)]

    @precondition(lambda self: not self.plain)
    @rule(parent=st.sampled_from(IDS), rid=st.sampled_from(IDS))
    def fork(self, parent, rid):
        if parent not in self.requests or rid in self.requests or self.open:
            return
        known = self.requests[parent]
        if known.num_prompt_tokens > self.num_blocks * self.config.block_size:
            return  # the pool has shrunk: it is refused
        twin = known.fork(rid, seed=known.seed)
        self.scheduler.fork(parent, twin, 0.0)
        self.requests[rid] = twin
        self.num_changes += 1

    @precondition(lambda self: not self.plain and not self.open)
    @rule(num_blocks=st.integers(1, 8))
    def resize(self, num_blocks):
        """Another size of the pool, with the moves that it takes."""
        held = self.num_blocks - self.scheduler.blocks.pool.num_unused
        if held > num_blocks:
            with pytest.raises(OutOfBlocks):
                self.scheduler.plan_resize(num_blocks)
            return
        ops = self.scheduler.plan_resize(num_blocks)
        self.shadow.run_ops(ops)
        self.shadow.resize(num_blocks)
        self.scheduler.resize(num_blocks, ops)
        self.num_changes += 1

    @rule()
    def reset_the_cache(self):
        used = self.scheduler.blocks.pool.num_unused < self.num_blocks or self.scheduler.queues.swapped
        idle = not used and not self.open
        assert self.scheduler.reset_prefix_cache() == idle
        if idle:
            self.shadow.poison()
            self.num_changes += 1

    @rule(rid=st.sampled_from(IDS))
    def abort(self, rid):
        if rid not in self.requests:
            with pytest.raises(UnknownRequest):
                self.scheduler.abort(rid)
            return
        self.num_changes += 1
        self.take_ends(self.scheduler.abort(rid))

    @rule(rid=st.sampled_from(IDS))
    def force_preemption(self, rid):
        runs = rid in self.requests and self.requests[rid].status == Status.RUNNING
        if self.open or not runs:
            with pytest.raises(RequestError):
                self.scheduler.preempt(rid, "forced")
            return
        self.num_changes += 1
        self.scheduler.preempt(rid, "forced")

    @rule(ahead=st.integers(0, 3))
    def refuse_an_allocation_soon(self, ahead):
        self.scheduler.blocks.refuse_calls.add(self.scheduler.blocks.num_calls + ahead)

    # -- plans ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.open) < MAX_OPEN_PLANS)
    @rule()
    def schedule(self):
        before = self.scheduler.snapshot()
        plan = self.scheduler.schedule(self.scheduler.step / 2)
        self.open.append((plan, before, self.num_changes))
        self.look_at(plan, before)

    def look_at(self, plan, before):
        """Budget, seats, who is in it, and that each row goes on where its request stands."""
        scheduler, config = self.scheduler, self.config
        rids = [item.request_id for item in plan.scheduled]
        running = [request.request_id for request in scheduler.running]
        assert plan.step == before["step"] + 1 == scheduler.step
        assert (
            plan.num_tokens
            == sum(item.num_tokens for item in plan.scheduled)
            <= config.max_num_batched_tokens
        )
        assert len(set(rids)) == len(rids) <= len(running) <= config.max_num_seqs
        assert set(rids) <= set(running)
        assert set(plan.preempted) <= set(before["running"]) | set(before["swapped"])
        back = set(plan.preempted) & set(
            running
        )  # gave way to a more urgent one, and the cache has most of it
        assert not back or config.order == "priority"
        assert not set(plan.exhausted) & set(rids)
        left_out = set(running) - set(rids)
        waits = {request.request_id for request in (*scheduler.waiting, *scheduler.queues.swapped)}
        assert set(plan.reasons) <= left_out | waits
        assert all(plan.reasons.values())
        admitted = [rid for rid in running if rid in before["waiting"]]
        still_waiting = [
            rid for rid in before["waiting"] if rid not in admitted and rid not in plan.exhausted
        ]
        ending = set(scheduler.ending)
        assert not admitted or before["waiting"].index(admitted[-1]) < min(
            (before["waiting"].index(rid) for rid in still_waiting if rid not in ending), default=99
        ), f"{admitted} overtook {still_waiting}"
        for item in plan.scheduled:
            was = before["requests"][item.request_id]
            if item.request_id in back or (item.request_id in admitted and config.enable_prefix_caching):
                assert item.start % config.block_size == 0  # found in the cache
            else:
                assert item.start == was["num_computed_tokens"]
            assert 1 <= item.num_tokens <= was["num_tokens"] - item.start
            assert item.samples == (item.end == was["num_tokens"])
            assert item.is_prefill == (item.start == 0 or was["num_tokens"] - item.start > 1)
            assert item.output_index == was["num_tokens"] - was["num_prompt_tokens"]
            held = -(-item.start // config.block_size)
            fresh = tuple(b for b in item.new_block_ids if b not in item.block_table[:held])  # others: copies
            assert len(fresh) == -(-item.end // config.block_size) - held
            assert tuple(item.block_table[held:]) == fresh
            assert set(item.new_block_ids) <= set(item.block_table)

    @rule(count=st.integers(1, 9), ahead=st.integers(0, MAX_OPEN_PLANS - 1))
    def whole_steps(self, count, ahead):
        """Plain steps; with `ahead`, each plan is made before the one so many steps back has run."""
        for _ in range(count):
            if len(self.open) < MAX_OPEN_PLANS:
                self.schedule()
            while len(self.open) > ahead:
                self.close_oldest(self.runner.execute(self.open[0][0]), {})
                self.all_is_well()

    @precondition(lambda self: self.open)
    @rule(row=st.integers(0, 3), what=st.sampled_from(["goes on", "goes on", "stops", "fails"]))
    def commit(self, row, what):
        """Close the oldest plan; one row of it may meet a stop condition or fail."""
        plan, *_ = self.open[0]
        result, ends = self.runner.execute(plan), {}
        item = plan.scheduled[row] if row < len(plan.scheduled) else None
        if item and what == "stops" and item.samples:
            ends[item.request_id] = ("stop", "end id 7")
        if item and what == "fails":
            tokens = {rid: new for rid, new in result.tokens.items() if rid != item.request_id}
            result = StepResult(tokens, {item.request_id: "logits are NaN"})
        self.close_oldest(result, ends)

    def close_oldest(self, result, ends):
        plan, *_ = self.open.pop(0)
        self.num_changes += 1
        self.write_and_read_slots(plan)
        lengths = {rid: len(request.token_ids) for rid, request in self.requests.items()}
        updates = self.scheduler.commit(plan, result, ends)
        for rid, new in result.tokens.items():
            assert self.requests[rid].token_ids[lengths.pop(rid) :] == list(new)
        assert all(len(self.requests[rid].token_ids) == n for rid, n in lengths.items()), (
            "tokens from nowhere"
        )
        self.take_ends(updates)

    def write_and_read_slots(self, plan):
        """Do what a runner does: write the row's positions, then read all positions up to its end."""
        self.shadow.run(plan)
        if not self.plain:
            return
        size = self.config.block_size
        for item in plan.scheduled:
            life = (self.requests[item.request_id].seed, self.requests[item.request_id].num_preemptions)
            for position in range(item.start, item.end):
                self.slots[item.block_table[position // size], position % size] = (*life, position)
        for item in plan.scheduled:
            life = (self.requests[item.request_id].seed, self.requests[item.request_id].num_preemptions)
            for position in range(item.end):
                slot = item.block_table[position // size], position % size
                assert self.slots.get(slot) == (*life, position), (
                    f"{item} reads {slot}: {self.slots.get(slot)}"
                )

    @precondition(lambda self: self.open)
    @rule(after_it_ran=st.booleans())
    def cancel(self, after_it_ran):
        if after_it_ran and len(self.open) == 1:
            plan, *_ = self.open[0]
            self.shadow.run(plan)
            self.shadow.take_back(plan)
        plan, before, num_changes = self.open.pop()
        updates = self.scheduler.cancel(plan, "changed my mind")
        self.take_ends(updates)
        if num_changes == self.num_changes:
            assert updates == []
            assert self.scheduler.snapshot() == before

    def take_ends(self, updates):
        """Requests that have ended: each once, with a reason, with the tokens that the rule gives it."""
        for update in updates:
            if update.finish_reason is None:
                continue
            request = self.requests.pop(update.request.request_id)
            assert request is update.request
            assert update.finish_reason in ("stop", "length", "abort", "error")
            assert update.detail
            assert request.status == Status.FINISHED
            output = request.token_ids[request.num_prompt_tokens :]
            assert output == [(request.seed * 31 + i * 7 + 1) % 256 for i in range(len(output))]
            assert len(output) == request.num_output_tokens <= request.max_tokens
            assert request.num_tokens <= self.config.max_model_len

    # -- after each rule ------------------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        assert self.scheduler.requests == self.requests
        assert self.seen.state.snapshot() == self.scheduler.snapshot()
        assert self.seen.state.has_open_plan == bool(self.open)

    # -- the end --------------------------------------------------------------------------------------------------

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        self.drain()
        assert self.scheduler.reset_prefix_cache()  # refused while anybody holds a block
        assert self.scheduler.blocks.num_free == self.num_blocks
        assert not self.scheduler.ending
        recording = self.seen.recording
        assert fold(recording.events).snapshot() == self.scheduler.snapshot()
        self.seen.check_every_step()
        again, second = rerun(recording)
        assert second.to_jsonl(wall=False) == recording.to_jsonl(wall=False)
        assert again.snapshot() == self.scheduler.snapshot()
        text = recording.to_jsonl()
        loaded = Recording.from_jsonl(text)
        assert loaded.events == recording.events
        assert loaded.to_jsonl() == text

    def drain(self):
        """Close what is open, then step to the end within a bound: each step must do something."""
        scheduler = self.scheduler
        scheduler.blocks.refuse_calls.clear()
        while self.open:
            self.close_oldest(self.runner.execute(self.open[0][0]), {})
        bound = sum(r.num_prompt_tokens + r.max_tokens for r in self.requests.values()) * (
            1 + len(self.requests)
        )
        for _ in range(bound):
            if not self.requests:
                break
            self.schedule()
            assert self.open[0][0], f"nothing to run and nothing to end, {scheduler.snapshot()}"
            self.close_oldest(self.runner.execute(self.open[0][0]), {})
            self.all_is_well()
        assert not self.requests, f"not done after {bound} steps: {scheduler.snapshot()}"


def run(examples, steps):
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            print_blob=True,
        ),
    )


def test_random_traffic():
    run(examples=100, steps=30)


@pytest.mark.slow
def test_random_traffic_long():
    run(examples=300, steps=100)


def walk(seed, actions):
    """The same machine driven by a plain random walk, busier than shrinkable examples can be; returns it drained."""
    draw = random.Random(seed)
    machine = SchedulerMachine()
    machine.start(
        num_blocks=draw.randint(2, 8), block_size=draw.randint(1, 5), max_num_seqs=draw.choice([1, 2, 3, 4, 4, 4]),
        budget=draw.randint(1, 16), max_model_len=45, watermark=draw.choice([0.0, 0.0, 0.25]), crowd=[],
        options=(PLAIN, CACHED, EVERYTHING)[seed % 3],
    )  # fmt: skip
    half = machine.num_blocks * machine.config.block_size // 2 or 1
    for _ in range(actions):
        name = draw.choices(
            ["submit", "whole_steps", "schedule", "commit", "cancel", "abort", "preempt", "refuse", "more"],
            [20, 20, 20, 16, 10, 3, 3, 3, 10],
        )[0]
        if name == "submit":
            machine.submit_some(
                [(draw.randint(1, half), draw.randint(1, half + 1))], draw.choice([None] * 9 + [0, 1])
            )
        elif name == "whole_steps":
            machine.whole_steps(draw.randint(1, 6), draw.randrange(MAX_OPEN_PLANS))
        elif name == "schedule" and len(machine.open) < MAX_OPEN_PLANS:
            machine.schedule()
        elif name == "commit" and machine.open:
            machine.commit(draw.randrange(4), draw.choice(["goes on"] * 6 + ["stops", "fails"]))
        elif name == "cancel" and machine.open:
            machine.cancel(draw.random() < 0.5)
        elif name == "abort":
            machine.abort(draw.choice(IDS))
        elif name == "preempt":
            machine.force_preemption(draw.choice(IDS))
        elif name == "refuse":
            machine.refuse_an_allocation_soon(draw.randrange(4))
        elif name == "more" and not machine.plain:
            machine.whole_steps(1, 0)  # neither is possible while a plan is open
            unused = [rid for rid in IDS if rid not in machine.requests]
            if machine.requests and unused:
                machine.fork(draw.choice(list(machine.requests)), draw.choice(unused))
            if draw.random() < 0.3:
                machine.resize(draw.randint(2, 8))
            machine.reset_the_cache()
        machine.all_is_well()
    machine.teardown()
    return machine


@pytest.mark.parametrize("seed", range(12))
def test_random_walk(seed):
    machine = walk(seed, actions=400)
    kinds = Counter(event.kind for event in machine.seen.recording.events)
    assert kinds["cancel"] > 10
    assert kinds["finish"] == kinds["submit"] + kinds["fork"] > 10
    if not machine.plain:
        assert min(kinds[kind] for kind in ("share", "cache", "evict", "fork", "resize")) > 0, kinds
    if machine.config.num_host_blocks:
        assert kinds["swap"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 106))
def test_random_walk_long(seed):
    walk(seed, actions=2000)
