"""Speculation: with drafts, right or wrong, each request gets the tokens that it gets without."""

import inspect
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.plan import ScheduledRequest, StepPlan, StepResult
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.errors import ConfigError, RunnerError
from pagedinfer.llm import LLM
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.tiny import ByteTokenizer, TinyWeights
from pagedinfer.runner import acceptance
from pagedinfer.runner.acceptance import choose, num_to_take
from pagedinfer.runner.inputs import InputBuffers
from pagedinfer.runner.sampler import uniform
from pagedinfer.runner.torch_runner import TorchRunner
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.simulated import SimulatedRunner, counting_rule
from pagedinfer.testing import assert_no_leak, assert_same, force_preempt, run_bounded, tiny_llm
from pagedinfer.trace.recorder import Recorder
from pagedinfer.trace.replay import fold

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = float("nan")
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, top_p=0.9)


def item(
    rid="r",
    drafts=(),
    *,
    token_ids=(1, 2, 3),
    index=0,
    seed=0,
    params=GREEDY,
    samples=True,
    start=None,
    table=(),
):
    """The last known token and its drafts, or everything from `start` on."""
    start = len(token_ids) - 1 if start is None else start
    return ScheduledRequest(
        request_id=rid, start=start, num_tokens=len(token_ids) - start + len(drafts), samples=samples,
        output_index=index, is_prefill=False, new_block_ids=(), block_table=table, token_ids=token_ids,
        params=params, seed=seed, num_prompt_tokens=len(token_ids) - index, draft_token_ids=drafts,
    )  # fmt: skip


def plan(*items):
    return StepPlan(step=1, now=1.0, token_budget=512, scheduled=list(items))


# -- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "drafts", "taken"),
    [
        ([5], [], 1),
        ([5, 6, 7], [5, 6], 3),  # all right: one token more than drafts
        ([5, 9, 7], [5, 6], 2),
        ([9, 6, 7], [5, 6], 1),  # nothing after the first difference counts
        ([5, 6], [5, 6, 7], 2),  # the last row failed
    ],
)
def test_tokens_count_up_to_the_first_that_is_no_draft(tokens, drafts, taken):
    assert num_to_take(tokens, drafts) == taken


def toy_logits(token_ids, vocab=6):
    """A model: logits that depend on all the tokens before."""
    row = random.Random(repr(list(token_ids)))
    return torch.tensor([row.gauss(0.0, 1.5) for _ in range(vocab)])


def toy_run(params, seed, num_tokens, guess):
    """Output of the toy model; `guess(token_ids)` gives drafts. Also the number of steps."""
    known, steps = [1, 2], 0
    while len(known) < 2 + num_tokens:
        drafts = guess(known)
        rows = torch.stack([toy_logits([*known, *drafts[:i]]) for i in range(len(drafts) + 1)])
        row = item(drafts=drafts, token_ids=known, index=len(known) - 2, seed=seed, params=params)
        known = [*known, *choose(rows, [row]).tokens["r"]]
        steps += 1
    return known[2 : 2 + num_tokens], steps


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([GREEDY, WARM, SamplingParams(temperature=2.0), SamplingParams(top_k=3, min_p=0.05)]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32),
    st.integers(1, 5),
)
def test_any_drafts_give_the_tokens_of_none(params, seed, luck, num_drafts):
    expected, _ = toy_run(params, seed, 12, lambda known: [])
    chance = random.Random(luck)

    def guess(known):
        right = expected[len(known) - 2 :][:num_drafts]
        return [token if chance.random() < 0.7 else chance.randrange(6) for token in right]

    assert toy_run(params, seed, 12, guess)[0] == expected


def test_right_drafts_save_steps():
    expected, steps = toy_run(WARM, 3, 12, lambda known: [])
    assert steps == 12
    assert toy_run(WARM, 3, 12, lambda known: expected[len(known) - 2 :][:3]) == (expected, 3)


# -- the distribution -------------------------------------------------------------------------------------------------

FIRST, SECOND, DRAFT, NUM = [0.3, 0.0, -1.0, 1.2, 0.5], [1.0, -0.5, 0.8, 0.0, 0.2], 3, 20_000
BOUND = 31.8
"""Chi-square with 8 degrees of freedom passes it with a probability of 1e-4; the draws here are seeded."""


def toy_probabilities(logits, params):
    """By hand: the distribution after temperature and top-p."""
    weights = [math.exp(logit / params.temperature) for logit in logits]
    kept, share = [], 0.0
    for token in sorted(range(len(logits)), key=lambda token: -weights[token]):
        if share < params.top_p * sum(weights):
            kept.append(token)
            share += weights[token]
    return [weights[token] / share if token in kept else 0.0 for token in range(len(logits))]


def chi_square(outputs, params):
    """How far outputs are from: a first token, and if it is the draft a second. Infinite for what cannot come."""
    first, second = toy_probabilities(FIRST, params), toy_probabilities(SECOND, params)
    expected = {(token,): p for token, p in enumerate(first) if token != DRAFT}
    expected |= {(DRAFT, token): first[DRAFT] * p for token, p in enumerate(second)}
    found = Counter(outputs)
    if any(not expected.get(cell) for cell in found):
        return math.inf
    return sum((found[cell] - NUM * p) ** 2 / (NUM * p) for cell, p in expected.items() if p)


def toy_outputs(params):
    rows = torch.tensor([FIRST, SECOND]).repeat(NUM, 1)
    items = [item(str(seed), [DRAFT], seed=seed, params=params) for seed in range(NUM)]
    return list(choose(rows, items).tokens.values())


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.85)])
def test_accepted_and_rejected_tokens_have_the_targets_distribution(params):
    assert chi_square(toy_outputs(params), params) < BOUND


def draw(logits, u):
    return next(
        t for t in range(5) if sum(toy_probabilities(logits, SamplingParams())[: t + 1]) > u or t == 4
    )


def always_accept(seed):
    return DRAFT, draw(SECOND, uniform(seed, 1))


def redraw_after_rejection(seed):
    """Accepts with the right probability, but what it draws on rejection may be the draft once more."""
    if uniform(seed, 0) < toy_probabilities(FIRST, SamplingParams())[DRAFT]:
        return DRAFT, draw(SECOND, uniform(seed, 1))
    token = draw(FIRST, uniform(seed, 2))
    return (token, draw(SECOND, uniform(seed, 3))) if token == DRAFT else (token,)


def one_number_for_both(seed):
    """Takes the token after the draft by the uniform number that accepted the draft."""
    token = draw(FIRST, uniform(seed, 0))
    return (token, draw(SECOND, uniform(seed, 0))) if token == DRAFT else (token,)


@pytest.mark.parametrize("wrong", [always_accept, redraw_after_rejection, one_number_for_both])
def test_the_bound_refuses_wrong_rules(wrong):
    assert chi_square([wrong(seed) for seed in range(NUM)], SamplingParams()) > 10 * BOUND


# -- rows -------------------------------------------------------------------------------------------------------------


def rows_of(*best, vocab=8):
    """Logits in which these tokens are best; None for a row of NaN."""
    rows = torch.zeros(len(best), vocab)
    for row, token in zip(rows, best, strict=True):
        row[slice(None) if token is None else token] = NAN if token is None else 5.0
    return rows


def test_each_request_takes_from_its_own_rows():
    items = [item("a", [5, 6]), item("b"), item("c", [1, 2, 3]), item("d", [4])]
    result = choose(rows_of(5, 6, 7, 2, 1, 0, 3, 3, 3, 4), items)
    assert result.tokens == {"a": (5, 6, 7), "b": (2,), "c": (1, 0), "d": (3,)}
    assert result.errors == {}


def test_a_failed_row_counts_only_if_it_is_reached():
    items = [item("beyond", [5, 6]), item("later", [5, 6]), item("first", [5]), item("fine")]
    result = choose(rows_of(4, None, None, 5, 6, None, None, 5, 1), items)
    # What is there before a failed row is kept; the next step meets that row as its first, and then it counts.
    assert result.tokens == {"beyond": (4,), "later": (5, 6), "fine": (1,)}
    assert set(result.errors) == {"first"}
    assert "not finite" in result.errors["first"]


def test_log_probabilities_come_for_each_token_taken():
    asks = SamplingParams(temperature=0.0, logprobs=1)
    rows = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    best = rows.argmax(-1).tolist()
    result = choose(rows.clone(), [item("a", [best[0], (best[1] + 1) % 8], params=asks), item("b", [0])])
    alone = [choose(rows[i : i + 1].clone(), [item("a", params=asks)]).logprobs["a"][0] for i in range(2)]
    assert result.tokens["a"] == (best[0], best[1])
    assert result.logprobs == {"a": tuple(alone)}


def test_a_bias_is_every_rows():
    biased = SamplingParams(temperature=0.0, logit_bias={7: 9.0}, allowed_token_ids=[6, 7], logprobs=0)
    result = choose(rows_of(6, 2, 6), [item("a", [7, 7], params=biased)])
    assert result.tokens == {"a": (7, 7, 7)}
    assert [row[7][1] for row in result.logprobs["a"]] == [2, 2, 2]  # raw: second to the best, among equals


def test_a_mixed_plan_in_numbers():
    inputs, sampled = InputBuffers(4).update(
        plan(
            item("drafts", [77, 78], token_ids=[10, 11, 12, 13, 14, 15], table=(5, 0)),
            item("chunk", token_ids=list(range(20, 29)), start=2, table=(7, 2, 9), samples=False),
            item("decode", token_ids=[30, 31], table=(1,)),
            item("late", [88], token_ids=[40, 41, 42, 43], start=1, table=(3, 8)),
        )
    )
    assert [one.request_id for one in sampled] == ["decode", "drafts", "late"]
    assert inputs.token_ids.tolist() == [31, 15, 77, 78, *range(22, 29), 41, 42, 43, 88]
    assert inputs.positions.tolist() == [1, 5, 6, 7, *range(2, 9), 1, 2, 3, 4]
    assert inputs.slot_mapping.tolist() == [5, 1, 2, 3, 30, 31, 8, 9, 10, 11, 36, 13, 14, 15, 32]
    assert inputs.context_lens.tolist() == [2, 8, 9, 5]
    assert inputs.logits_indices.tolist() == [0, 1, 2, 3, 13, 14]
    assert inputs.num_single == 1


# -- the answer must fit the drafts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [(1,), (5,), (5, 1), (5, 6), (5, 6, 1)])
def test_some_drafts_and_one_token_more_fit_a_plan(tokens):
    plan(item("r", [5, 6])).check_result(StepResult({"r": tokens}), 10)


@pytest.mark.parametrize("tokens", [(6, 1), (5, 5, 1), (5, 6, 1, 2), (1, 2)])
def test_other_tokens_do_not(tokens):
    with pytest.raises(RunnerError, match=r"as tokens of r with drafts \[5, 6\]"):
        plan(item("r", [5, 6])).check_result(StepResult({"r": tokens}), 10)
    with pytest.raises(RunnerError, match=r"as tokens of r with drafts \[\]"):
        plan(item("r")).check_result(StepResult({"r": tokens}), 10)


def test_a_plan_tells_its_drafts():
    assert "r: decode (2 drafts) tokens 2..4" in str(plan(item("r", [5, 6])))
    assert "(1 draft)" in plan(item("r", [5]))._repr_html_()


# -- the simulated runner ---------------------------------------------------------------------------------------------


def test_the_simulated_runner_accepts_what_its_rule_gives():
    first, second, third = (counting_rule(256)(item(index=i, seed=2)) for i in range(3))
    drafts = {"right": [first, second], "half": [first, 0], "wrong": [0, second], "none": []}
    runner = SimulatedRunner()
    result = runner.execute(plan(*(item(rid, row, seed=2) for rid, row in drafts.items())))
    assert result.tokens == {
        "right": (first, second, third), "half": (first, second), "wrong": (first,), "none": (first,),
    }  # fmt: skip


def test_a_rule_sees_accepted_drafts_as_known_tokens():
    seen = []

    def rule(one):
        seen.append((list(one.token_ids), one.output_index, one.end))
        return one.token_ids[-1] + 1

    result = SimulatedRunner(rule=rule).execute(plan(item("r", [4, 5, 9], token_ids=[1, 2, 3], index=1)))
    assert result.tokens == {"r": (4, 5, 6)}
    assert seen == [([1, 2, 3], 1, 3), ([1, 2, 3, 4], 2, 4), ([1, 2, 3, 4, 5], 3, 5)]


# -- a real model, scheduled by hand ----------------------------------------------------------------------------------

TEXTS = ["A", "Hello, world", "The quick brown fox jumps over the lazy dog.", "naïve 🙂"]
PROMPTS = [ByteTokenizer().encode(text) for text in TEXTS]
NEW = 18


@pytest.fixture(scope="module")
def decoder():
    source = TinyWeights(seed=2)
    return Decoder(source.config).load(source)


@dataclass
class Live:
    tokens: list[int]
    params: SamplingParams
    seed: int
    computed: int = 0
    table: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    num_prompt_tokens: int = 0

    def __post_init__(self):
        self.num_prompt_tokens = len(self.tokens)

    @property
    def output(self):
        return self.tokens[self.num_prompt_tokens :]


def run(decoder, params, guess=lambda index, output: [], block_size=4, chunk=1000):
    """Output and log-probabilities of each prompt, all in one batch, with `guess(prompt's number, output)` as drafts.

    The pool is poisoned, and after each step the slots of rejected drafts are again.
    """
    runner = TorchRunner(decoder, num_blocks=300, block_size=block_size)
    runner.kv.poison()
    free = list(range(300))
    random.Random(7).shuffle(free)
    live = [Live(list(prompt), params, seed) for seed, prompt in enumerate(PROMPTS)]
    num_steps = 0
    while any(len(one.output) < NEW for one in live):
        items = []
        for index, one in enumerate(live):
            if len(one.output) >= NEW:
                continue
            num = min(chunk, len(one.tokens) - one.computed)
            samples = one.computed + num == len(one.tokens)
            drafts = guess(index, one.output) if samples and one.output else []
            while len(one.table) * block_size < one.computed + num + len(drafts):
                one.table.append(free.pop())
            items.append(
                ScheduledRequest(
                    str(index), one.computed, num + len(drafts), samples, len(one.output), num > 1, (), one.table,
                    one.tokens, one.params, one.seed, num_prompt_tokens=one.num_prompt_tokens, draft_token_ids=drafts,
                )
            )  # fmt: skip
        step = plan(*items)
        result = runner.execute(step)
        step.check_result(result, runner.vocab_size)
        assert not result.errors
        num_steps += 1
        for item in items:
            one = live[int(item.request_id)]
            one.tokens += result.tokens.get(item.request_id, ())
            one.logprobs += result.logprobs.get(item.request_id, ())
            one.computed = min(item.end, len(one.tokens) - 1) if item.samples else item.end
            for position in range(one.computed, item.end):
                block, offset = divmod(position, block_size)
                runner.kv.pool[:, one.table[block], offset] = NAN
    return [one.output[:NEW] for one in live], [one.logprobs[:NEW] for one in live], num_steps


def right(expected, num):
    return lambda index, output: expected[index][len(output) :][:num]


def wrong(expected, num):
    return lambda index, output: [(token + 1) % 256 for token in right(expected, num)(index, output)]


def partly(expected, num):
    return lambda index, output: [
        (token + ((len(output) + i) % 3 == 2)) % 256
        for i, token in enumerate(right(expected, num)(index, output))
    ]


def some(expected, num):
    """Some requests speculate, with rows of different lengths; the others do not."""
    return lambda index, output: right(expected, num)(index, output)[: (index + len(output)) % (num + 1)]


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, logprobs=2)], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize("drafts", [right, wrong, partly, some])
def test_tokens_of_a_real_model_are_those_without_drafts(decoder, params, num, drafts):
    expected, logprobs, num_steps = run(decoder, params)
    assert num_steps == NEW
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    got, got_logprobs, num_steps = run(decoder, params, drafts(expected, num), chunk=1000 if num == 1 else 7)
    assert got == expected
    for rows, others in zip(got_logprobs, logprobs, strict=True):
        assert [list(row) for row in rows] == [list(row) for row in others]
        for row, other in zip(rows, others, strict=True):
            assert [rank for _, rank in row.values()] == [rank for _, rank in other.values()]
            assert [value for value, _ in row.values()] == pytest.approx(
                [v for v, _ in other.values()], abs=1e-4
            )
    if drafts is right:
        assert num_steps <= math.ceil((NEW - 1) / (num + 1)) + 1 + (num > 1) * len(PROMPTS[2]) // 7


@pytest.mark.parametrize("block_size", [1, 16])
def test_drafts_across_blocks(decoder, block_size):
    expected, _, _ = run(decoder, GREEDY)
    assert run(decoder, GREEDY, partly(expected, 5), block_size)[0] == expected


def test_a_runner_that_keeps_rejected_keys_and_values_would_be_seen(decoder, monkeypatch):
    """The comparison can fail: were wrong drafts accepted, the output would be another."""
    expected, _, _ = run(decoder, GREEDY)
    monkeypatch.setattr(acceptance, "num_to_take", lambda tokens, drafts: len(tokens))
    monkeypatch.setattr(StepPlan, "check_result", lambda *_: None)
    assert run(decoder, GREEDY, wrong(expected, 2))[0] != expected


# -- the whole engine -------------------------------------------------------------------------------------------------

scheduled = pytest.mark.skipif(
    "drafts" not in inspect.signature(Scheduler.commit).parameters, reason="the scheduler takes no drafts yet"
)
LOOPS = [[256, *b"one two one two one two one"], [256, *b"aaaaaaaaaaaa"], [256, *b"no loop"], [256, *b"xyz"]]
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class Poisoning(TorchRunner):
    """Fills the slots of rejected drafts with NaN as soon as they are rejected. Counts what it saw."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kv.poison()
        self.rejected = self.accepted = 0
        self.with_drafts = set()

    def execute(self, plan):
        result = super().execute(plan)
        for item in plan.scheduled:
            num_drafts = len(item.draft_token_ids)
            if num_drafts:
                self.with_drafts.add(item.request_id)
                taken = len(result.tokens[item.request_id]) - 1
                self.accepted += taken
                self.rejected += num_drafts - taken
                for position in range(item.end - num_drafts + taken, item.end):
                    block, offset = divmod(position, self.kv.block_size)
                    self.kv.pool[:, item.block_table[block], offset] = NAN
        return result


class Oracle:
    """Knows each request's output and tells it, but for every third token, three times out of four."""

    def __init__(self, outputs, num=3):
        self.outputs, self.num, self.live = outputs, num, set()

    def propose(self, request, new_token_ids, limit):
        self.live.add(request.request_id)
        at = request.num_output_tokens + len(new_token_ids)
        right = self.outputs[request.request_id][at:][: self.num if at % 4 else 0]
        return [(token + ((at + i) % 3 == 2)) % 256 for i, token in enumerate(right)]

    def forget(self, request_id):
        self.live.discard(request_id)


def serve(decoder, params, drafter=None, *, prompts=LOOPS, disturb=lambda engine, step: None, **settings):
    """Outputs by id, and the engine. `params` for all or one each; `disturb` is called before each step."""
    config = EngineConfig(**{"num_blocks": 200, "block_size": 4} | settings)
    runner = Poisoning(decoder, num_blocks=config.num_blocks, block_size=config.block_size)
    engine = Engine(config, runner, tokenizer=ByteTokenizer(), drafter=drafter)
    every = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    for prompt, how in zip(prompts, every, strict=True):
        engine.add_request(prompt, how)
    done = {}
    for step in range(2000):
        if not engine.has_unfinished():
            assert_no_leak(engine)
            return [done[rid] for rid in sorted(done)], engine
        disturb(engine, step)
        done.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.check()
    raise AssertionError("no end in 2000 steps")


@scheduled
@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize(
    "params", [LONG, SamplingParams(temperature=0.8, top_p=0.9, max_tokens=40, ignore_eos=True)]
)
def test_n_grams_change_no_output(decoder, params, num):
    expected, plain = serve(decoder, params)
    outputs, engine = serve(decoder, params, num_draft_tokens=num)
    assert_same(outputs, expected)
    now = engine.metrics()
    assert now["num_draft_tokens"] == engine.runner.accepted + engine.runner.rejected
    assert now["num_accepted_tokens"] == engine.runner.accepted
    assert engine.runner.rejected > 0
    if params is LONG:
        assert engine.runner.accepted > 0
        assert now["num_steps"] < plain.metrics()["num_steps"]


@scheduled
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_size": 1, "num_blocks": 400},
        {"block_size": 16},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 2},
        {"num_blocks": 22},  # preemptions: 4 requests of up to 67 tokens each
    ],
)
def test_drafts_right_and_wrong_change_no_output(decoder, settings):
    params = [LONG, SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)] * 2
    expected, _ = serve(decoder, params)
    oracle = Oracle({output.request_id: output.outputs[0].token_ids for output in expected})
    outputs, engine = serve(decoder, params, oracle, **settings)
    assert_same(outputs, expected)
    assert engine.runner.accepted > 20
    assert engine.runner.rejected > 20
    assert bool(engine.metrics()["num_preemptions"]) == (settings.get("num_blocks") == 22)
    assert not oracle.live


@scheduled
def test_preemption_at_any_step_changes_no_output(decoder):
    expected, _ = serve(decoder, LONG)
    oracle = Oracle({output.request_id: output.outputs[0].token_ids for output in expected})

    def disturb(engine, step):
        for request in engine.scheduler.running[step % 3 :: 5]:
            force_preempt(engine, request.request_id)

    outputs, engine = serve(decoder, LONG, oracle, disturb=disturb)
    assert_same(outputs, expected)
    assert engine.metrics()["num_preemptions"] > 5
    assert engine.runner.accepted > 0


@scheduled
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 9])
def test_an_output_ends_where_it_ended_without(decoder, max_tokens):
    whole, _ = serve(decoder, LONG)
    token_ids = whole[0].outputs[0].token_ids
    letters = ByteTokenizer().decode(token_ids)[5:7]
    params = [
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[token_ids[max_tokens]]),
        SamplingParams(temperature=0.0, max_tokens=40, stop=[letters], ignore_eos=True),
        SamplingParams(
            temperature=0.0, max_tokens=40, min_tokens=8, stop_token_ids=list(range(100)), ignore_eos=True
        ),
    ]
    prompts = [LOOPS[0]] * 4
    expected, _ = serve(decoder, params, prompts=prompts)
    oracle = Oracle({output.request_id: [*output.outputs[0].token_ids, 1, 2, 3] for output in expected})
    outputs, _ = serve(decoder, params, oracle, prompts=prompts)
    assert_same(outputs, expected)
    assert [o.outputs[0].stop_reason for o in outputs] == [o.outputs[0].stop_reason for o in expected]


@scheduled
def test_log_probabilities_are_those_without(decoder):
    params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    expected, _ = serve(decoder, params)
    outputs, engine = serve(decoder, params, num_draft_tokens=3)
    assert engine.runner.accepted > 0
    for output, other in zip(outputs, expected, strict=True):
        got, want = output.outputs[0], other.outputs[0]
        assert len(got.logprobs) == len(got.token_ids) == 30
        assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=1e-3)
        for rows, others in (
            (got.logprobs, want.logprobs),
            (output.prompt_logprobs[1:], other.prompt_logprobs[1:]),
        ):
            assert [list(row) for row in rows] == [list(row) for row in others]
            for row, reference in zip(rows, others, strict=True):
                assert [e.logprob for e in row.values()] == pytest.approx(
                    [e.logprob for e in reference.values()], abs=1e-4
                )


@scheduled
def test_requests_whose_rows_would_differ_get_no_drafts(decoder):
    class Letters:
        def allowed(self, token_ids):
            return [97 <= token < 123 for token in range(decoder.config.vocab_size)]

    common = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    params = [
        SamplingParams(**common),
        SamplingParams(**common, frequency_penalty=0.5),
        SamplingParams(**common, token_mask=Letters()),
        SamplingParams(**common, bad_words=["a"]),
        SamplingParams(**common, logits_processors=[lambda ids, logits: logits]),
    ]
    prompts = [LOOPS[1]] * 5
    expected, _ = serve(decoder, params, prompts=prompts)
    outputs, engine = serve(decoder, params, prompts=prompts, num_draft_tokens=3)
    assert_same(outputs, expected)
    assert engine.runner.with_drafts == {"r0"}


@scheduled
def test_several_outputs_of_a_prompt_speculate_each_for_itself():
    params = SamplingParams(temperature=0.7, seed=3, n=3, max_tokens=30, ignore_eos=True)
    with tiny_llm() as plain, tiny_llm(num_draft_tokens=3) as llm:
        (expected,) = plain.generate(LOOPS[:1], params)
        (output,) = llm.generate(LOOPS[:1], params)
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in expected.outputs]
        assert llm.engine.metrics()["num_draft_tokens"] > 0
        assert_no_leak(llm.engine)


def test_drafts_are_counted_before_a_model_is_loaded():
    with pytest.raises(ConfigError, match="num_draft_tokens=-1"):
        LLM("no such model", num_draft_tokens=-1)


@scheduled
def test_a_drafter_that_fails_costs_no_request():
    class Broken:
        def propose(self, request, new_token_ids, limit):
            raise ValueError("lost")

        def forget(self, request_id):
            raise ValueError("lost")

    engine = Engine(EngineConfig(num_blocks=16, block_size=4), SimulatedRunner(), drafter=Broken())
    engine.add_request([1, 2, 3], SamplingParams(max_tokens=4, detokenize=False))
    with Recorder(engine) as recording:
        (output,) = run_bounded(engine, 10).values()
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 4)
    assert {event.where for event in recording.errors} == {"drafter"}
    assert_no_leak(engine)


# -- traffic over the simulated runner: short loops, so that n-grams are often right and sometimes wrong --------------


def circling(item):
    """Loops of three to six tokens, with a slip now and then."""
    index = item.output_index
    return (item.seed + index % (3 + item.seed % 4) + 7 * (index % 11 == 10)) % 50


def traffic(seed, num_draft_tokens, disturb=lambda engine, step: None):
    """Random arrivals, aborts and preemptions in a small pool. Outputs of those that ran to their end."""
    chance = random.Random(seed)
    config = EngineConfig(num_blocks=chance.choice([14, 30]), block_size=chance.choice([2, 4]), max_num_seqs=6,
                          max_num_batched_tokens=chance.choice([5, 24]), max_model_len=40,
                          num_draft_tokens=num_draft_tokens)  # fmt: skip
    engine = Engine(config, SimulatedRunner(vocab_size=50, rule=circling), seed=seed)
    arrivals = {chance.randrange(30): chance.randrange(1, 12) for _ in range(8)}
    aborted, done = [f"r{chance.randrange(8)}"], {}
    with Recorder(engine) as recording:
        for step in range(500):
            if step in arrivals:
                engine.add_request([step] * arrivals[step], SamplingParams(max_tokens=25, detokenize=False))
            if step == 20 and engine.is_live(aborted[0]):
                engine.abort(aborted[0])
            disturb(engine, step)
            if step > 30 and not engine.has_unfinished():
                break
            done.update((o.request_id, list(o.outputs[0].token_ids)) for o in engine.step() if o.finished)
            engine.check()
            assert fold(recording.events).snapshot() == engine.snapshot()
    assert_no_leak(engine)
    assert not engine._speculation.drafter or not engine._speculation.drafter._indices
    done.pop(aborted[0], None)
    return done, engine, recording


@scheduled
@pytest.mark.parametrize("seed", range(12))
def test_traffic_with_drafts_has_the_outputs_of_traffic_without(seed):
    expected, _, _ = traffic(seed, 0)
    outputs, engine, recording = traffic(seed, 3)
    assert {rid: outputs[rid] for rid in expected.keys() & outputs.keys()} == expected
    now = engine.metrics()
    assert 0 < now["num_accepted_tokens"] < now["num_draft_tokens"]
    assert rerun(recording)[1].events == recording.events


@scheduled
def test_a_cancelled_step_takes_its_drafts_back():
    expected, _, _ = traffic(3, 0)

    class Once(Exception):
        pass

    def disturb(engine, step):
        if step % 3 == 2 and engine.scheduler.requests:
            before, execute = engine.snapshot(), engine.runner.execute
            engine.runner.execute = lambda plan: (_ for _ in ()).throw(Once)
            try:
                engine.hand_back(engine.step())  # a plan that only ends a request runs nothing
            except Once:
                assert engine.snapshot() == before
            engine.runner.execute = execute

    outputs, engine, _ = traffic(3, 3, disturb)
    assert {rid: outputs[rid] for rid in expected.keys() & outputs.keys()} == expected
    assert engine.metrics()["num_accepted_tokens"] > 0
