"""Random traffic on the tiny model, with everything that can go wrong going wrong.

After each step the engine's invariants hold and the folded events equal its state; what each request produced equals
its run alone in a fresh engine; at the end nothing has leaked and the recording runs again byte for byte.
"""

import random
import signal
from dataclasses import replace
from functools import cache

import pytest
import torch

from pagedinfer import Recorder, SamplingParams
from pagedinfer.errors import DuplicateRequest, RequestError, RequestTooLong
from pagedinfer.runner.sampler import sample_reference, uniform
from pagedinfer.sim.rerun import rerun
from pagedinfer.testing import (
    TIE_GAP,
    assert_no_leak,
    assert_same,
    cold_outputs,
    force_preempt,
    poison,
    refuse_allocation,
    run_bounded,
    tiny_llm,
)
from pagedinfer.trace.replay import State, fold

STEPS = 2_000
MAX_MODEL_LEN = 96
NUM_CASES = 120


@pytest.fixture(scope="module", autouse=True)
def _one_thread():  # the tiny model gains nothing from more, and loses much on a busy machine
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- what is asked, and what it gives alone ---------------------------------------------------------------------------


@cache
def case(number):
    """Prompt and parameters number `number`: the same in every run."""
    pick = random.Random(number)
    prompt = [pick.choice([256, *range(32, 127)]) for _ in range(pick.choice([1, 2, 5, 9, 16, 17, 30, 60]))]
    greedy = pick.random() < 0.4
    least = pick.choice([0, 0, 0, 2, 8])
    params = SamplingParams(
        temperature=0.0 if greedy else pick.choice([0.7, 1.0, 2.0]),
        top_k=pick.choice([0, 0, 1, 5, 40]),
        top_p=pick.choice([1.0, 1.0, 0.5, 0.95]),
        min_p=pick.choice([0.0, 0.0, 0.1]),
        seed=pick.randrange(2**32),
        max_tokens=pick.choice([None, 24, 24, 40, *range(max(1, least), 12)]),
        min_tokens=least,
        stop=pick.choice([None, None, ["a", "Zq"], ["!", "e", "ab"]]),
        stop_token_ids=pick.choice([None, None, [65, 66, 67]]),
        include_stop_str_in_output=pick.random() < 0.3,
        ignore_eos=pick.random() < 0.6,
        logprobs=pick.choice([None, None, None, 0, 2]),
    )
    return prompt, params


@cache
def cold(number, logprobs=2):
    """The case alone in a fresh engine."""
    prompt, params = case(number)
    (output,) = cold_outputs([prompt], replace(params, logprobs=logprobs), max_model_len=MAX_MODEL_LEN)
    return output


def may_follow(number, index, token):
    """The tie rule: whether rounding may have made `token` output token `index` of the case."""
    _, params = case(number)
    row = {
        candidate: value.logprob for candidate, value in cold(number, 259).outputs[0].logprobs[index].items()
    }
    if params.is_greedy:
        return max(row.values()) - row[token] < TIE_GAP
    if index < params.min_tokens:
        row |= dict.fromkeys([*([] if params.ignore_eos else [257]), *params.stop_token_ids], -float("inf"))
    u, logits = uniform(params.seed, index), [row[candidate] for candidate in range(259)]
    near = (min(max(u + delta, 0.0), 1 - 1e-9) for delta in (-1e-4, 1e-4))
    return token in {sample_reference(logits, params, value)[0] for value in near}


# -- the traffic ------------------------------------------------------------------------------------------------------


class Traffic:
    """One seeded run. `step()` is one round: perhaps a new request, perhaps trouble, one engine step, all checks."""

    def __init__(self, seed, **options):
        self.seed = seed
        self.random = random.Random(seed)
        pick = self.random.choice
        block_size = pick([1, 2, 3, 4, 8, 16])
        capacity = pick([40, 70, 110, 200])
        self.options = {
            "block_size": block_size,
            "num_blocks": max(2, capacity // block_size),
            "max_num_batched_tokens": pick([1, 3, 7, 16, 32, 64]),
            "max_num_seqs": pick([1, 2, 4, 8, 16]),
            "watermark": pick([0.0, 0.01, 0.2]),
            "max_model_len": MAX_MODEL_LEN,
        } | options
        self.llm = tiny_llm(**self.options)
        self.engine = self.llm.engine
        self.recorder = Recorder(self.engine)
        self.recording = self.recorder.start()
        self.state, self.num_folded = State(), 0
        self.numbers, self.counts = {}, dict.fromkeys(("same", "tie", "outgrown", "aborted"), 0)
        self.trouble = None
        execute = self.engine.runner.execute
        self.engine.runner.execute = lambda plan: self.execute(execute, plan)
        self.engine.bus.subscribe(self.listen)
        self.victim = None

    def execute(self, execute, plan):
        trouble, self.trouble = self.trouble, None
        if trouble == "raise before":
            raise RuntimeError("made to fail")
        if trouble == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        result = execute(plan)
        if trouble in ("raise after", "interrupt"):
            raise RuntimeError("made to fail") if trouble == "raise after" else KeyboardInterrupt
        if trouble == "ctrl-c twice":
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return result

    def listen(self, event):
        """A subscriber that aborts a request in the middle of a step."""
        if self.victim and event.kind == self.victim and self.engine.scheduler.requests:
            self.victim = None
            self.abort()

    # What may happen between two steps:

    def submit(self):
        number = self.random.randrange(NUM_CASES)
        prompt, params = case(number)
        rid = f"q{self.random.randrange(40)}"
        too_long = len(prompt) > self.options["num_blocks"] * self.options["block_size"]
        try:
            self.engine.add_request(prompt, params, request_id=rid)
        except DuplicateRequest:
            assert rid in self.numbers
        except RequestTooLong:
            assert too_long
        else:
            assert rid not in self.numbers
            self.numbers[rid] = number

    def submit_nonsense(self):
        bad = self.random.choice([[], [259], [-1], [True], None, [1] * 300])
        with pytest.raises(RequestError):
            self.engine.add_request(bad)

    def abort(self):
        live = list(self.engine.scheduler.requests)
        if live:
            output = self.engine.abort(self.random.choice(live))
            if output is not None:
                self.verify(output)

    def preempt(self):
        if self.engine.scheduler.running:
            force_preempt(self.engine, self.random.choice(self.engine.scheduler.running).request_id)

    def refuse(self):
        refuse_allocation(self.engine, at=[self.random.randrange(4) for _ in range(2)])

    def cancel(self):
        if self.victim:
            return  # the abort would be a change that outlives the cancel
        before = self.engine.snapshot()
        scheduler = self.engine.scheduler
        plan = scheduler.schedule(scheduler.step)
        scheduler.cancel(plan, "changed my mind")
        assert self.engine.snapshot() == before, "cancel did not restore the state"

    def poison_free(self):
        free = self.engine.snapshot()["free"]
        self.engine.runner.kv.pool[:, free] = float("nan")

    def fail(self):
        self.trouble = self.random.choice(
            ["raise before", "raise after", "interrupt", "ctrl-c", "ctrl-c twice"]
        )

    def abort_inside(self):
        self.victim = self.random.choice(["step", "commit", "alloc", "finish", "free"])

    CHANCES = (
        ("submit_nonsense", 0.01), ("abort", 0.01), ("preempt", 0.03), ("refuse", 0.03), ("cancel", 0.03),
        ("poison_free", 0.05), ("fail", 0.04), ("abort_inside", 0.01),
    )  # fmt: skip

    # One round:

    def step(self, *, submitting=True):
        queued = len(self.engine.scheduler.waiting)
        if submitting and self.random.random() < (0.4 if queued < 3 else 0.05):
            self.submit()
        for name, chance in self.CHANCES:
            if self.random.random() < chance:
                getattr(self, name)()
                self.compare()
        try:
            outputs = self.engine.step()
        except (RuntimeError, KeyboardInterrupt):
            outputs = []
        for output in outputs:
            if output.finished:
                self.verify(output)
        self.compare()

    def compare(self):
        self.engine.check()
        for event in self.recording.events[self.num_folded :]:
            self.state.apply(event)
        self.num_folded = len(self.recording.events)
        assert self.state.snapshot() == self.engine.snapshot(), "the folded events are not the engine's state"

    def verify(self, output):
        number = self.numbers.pop(output.request_id)
        got, expected = output.outputs[0], cold(number)
        ids, reference = list(got.token_ids), list(expected.outputs[0].token_ids)
        assert output.error is None, output.error
        for index, (token, other) in enumerate(zip(ids, reference, strict=False)):
            if token != other:
                assert may_follow(number, index, token), f"case {number}: {ids} is not {reference}"
                self.counts["tie"] += 1
                return
        if got.finish_reason == "abort":
            assert expected.outputs[0].text.startswith(got.text.rstrip("\ufffd"))
            self.counts["aborted"] += 1
        elif "the whole pool has" in output.detail:
            assert got.finish_reason == "length"
            assert ids == reference[: len(ids)]
            self.counts["outgrown"] += 1
        else:
            assert_same([output], [expected])
            self.counts["same"] += 1
        asked = case(number)[1].logprobs
        assert (got.logprobs is None) == (asked is None)
        if asked is not None:
            assert len(got.logprobs) == len(ids)
            for row, token, theirs in zip(got.logprobs, ids, expected.outputs[0].logprobs, strict=False):
                assert row[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)

    def run(self, steps):
        poison(self.engine)
        for _ in range(steps):
            self.step()
        self.trouble = self.victim = None
        for output in run_bounded(self.engine, 3_000).values():
            self.verify(output)
        self.compare()
        assert not self.numbers, f"requests without an output: {self.numbers}"
        assert_no_leak(self.engine)
        self.check_recording()
        self.llm.close()
        assert self.counts["tie"] <= 0.01 * sum(self.counts.values()), self.counts

    def check_recording(self):
        events = self.recording.events
        assert fold(events).snapshot() == self.engine.snapshot()
        scheduler, again = rerun(self.recording)
        assert again.to_jsonl(wall=False) == self.recording.to_jsonl(wall=False), "the re-run differs"
        assert scheduler.snapshot() == self.engine.snapshot()


def run(seed, steps=STEPS, **options):
    traffic = Traffic(seed, **options)
    try:
        traffic.run(steps)
    except BaseException as error:
        step = traffic.engine.scheduler.step
        raise AssertionError(f"seed {seed}, step {step}, {traffic.options}: {error}") from error
    return traffic


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(seed):
    traffic = run(seed)
    assert traffic.counts["same"] > 20, traffic.counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_more_random_traffic(seed):
    run(seed)


def test_traffic_reaches_what_it_is_for():
    """A pool, budget and batch that meet everything: else the other runs prove little."""
    traffic = run(1, block_size=4, num_blocks=24, max_num_batched_tokens=16, max_num_seqs=8, watermark=0.0)
    kinds = {event.kind for event in traffic.recording.events}
    assert {"preempt", "resume", "refuse", "cancel", "abort", "reject", "error", "finish"} <= kinds
    steps = [event for event in traffic.recording.events if event.kind == "step"]
    assert any(len(event.scheduled) > 4 for event in steps)
    whys = {
        event.why.split()[1]
        for event in traffic.recording.events
        if event.kind == "preempt" and event.why != "forced"
    }
    assert whys  # preempted for want of blocks, not only by force
    assert traffic.counts["same"] > 100
    assert traffic.counts["aborted"] > 10
    texts = {cold(number).outputs[0].finish_reason for number in range(NUM_CASES)}
    assert texts == {"stop", "length"}


def test_a_fault_names_its_seed(monkeypatch):
    """The harness can fail: one wrong token in one step of one request is found, and the message holds the seed."""
    execute = Traffic.execute

    def wrong(self, real, plan):
        result = execute(self, real, plan)
        if plan.step == 20 and result.tokens:
            rid, (token,) = next(iter(result.tokens.items()))
            result.tokens[rid] = ((token + 1) % 256,)
        return result

    monkeypatch.setattr(Traffic, "execute", wrong)
    with pytest.raises(AssertionError, match="seed 3, step"):
        run(3, steps=60)
