"""Random traffic with everything that can go wrong going wrong: the harness of `test_traffic`, and a command.

After each step the engine's invariants hold and the folded events equal its state; what each request produced equals
its run alone in a fresh engine; at the end nothing has leaked and the recording runs again byte for byte.

    python tests/torture.py --seed 0 --steps 100000

runs seed after seed, each with options of its own and up to 2,000 steps. A failure names its seed, and running that
seed again gives it again. Options drawn: family, block size, pool size, chunk size, batch, watermark, memory, prefix
cache, host pool, drafts, all policies, classes, tenants and their limits; and policies that fail (`draw_policy`).
"""

import argparse
import gc
import random
import signal
import time
import warnings
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagedinfer import Recorder, SamplingParams, StructuredOutputsParams
from pagedinfer.config import ADMISSIONS, CHUNKINGS, ORDERS, VICTIMS, EngineConfig
from pagedinfer.engine.completion import complete
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.group import child_seed
from pagedinfer.engine.intake import make_rules
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import DuplicateRequest, OutOfBlocks, QueueFull, RequestError, RequestTooLong
from pagedinfer.model.blueprint import Blueprint, Experts
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.tiny import ByteTokenizer, TinyWeights, tiny_config
from pagedinfer.runner.logits import shape_reference
from pagedinfer.runner.sampler import sample_reference, uniform
from pagedinfer.runner.structured import StructuredOutputs
from pagedinfer.runner.torch_runner import TorchRunner
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.shadow import ShadowMemory
from pagedinfer.testing import TIE_GAP, assert_no_leak, force_preempt, poison, refuse_allocation, run_bounded
from pagedinfer.trace.replay import State, fold

STEPS = 2_000
MAX_MODEL_LEN = 96
NUM_CASES = 160
TOKENIZER = ByteTokenizer()

# -- engines ----------------------------------------------------------------------------------------------------------

FAMILIES = {
    "llama": Blueprint(),
    "qwen3": Blueprint(qk_norm="head", qkv_bias=True, output_bias=True),
    "gemma3_text": Blueprint(
        norm="rms_plus_one", norm_place="both", qk_norm="head", windows=(7, None), local_theta=500.0,
        attention_scale=24**-0.5, logit_softcap=20.0, activation="gelu_tanh", embedding_scale=8.0,
    ),
    "gpt2": Blueprint(norm="layer", rotary=None, qkv_bias=True, output_bias=True, mlp_bias=True, gated=False,
                      activation="gelu_tanh"),
    "mixtral": Blueprint(windows=(9, 9), experts=Experts(count=4, used=2, size=48, normalized=True)),
}  # fmt: skip


@cache
def decoder(family):
    config = tiny_config(architecture=family, blueprint=FAMILIES[family], max_position_embeddings=128)
    return Decoder(config).load(TinyWeights(config))


class Sick:
    """A decoder that can give one row of NaN logits when told to."""

    def __init__(self, decoder):
        self._decoder = decoder
        self._last = None
        self.row = None

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def forward(self, inputs, kv):
        return self._strike(self._decoder.forward(inputs, kv))

    def hidden(self, inputs, kv):
        self._last = inputs.logits_indices
        return self._decoder.hidden(inputs, kv)

    def logits(self, x, rows):
        logits = self._decoder.logits(x, rows)
        return self._strike(logits) if rows is self._last else logits

    def _strike(self, logits):
        if self.row is not None and len(logits):
            logits[self.row % len(logits)] = float("nan")
        return logits


@cache
def structured():
    return StructuredOutputs(TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.eos_token_ids)


def make_engine(family, policy=None, **options):
    model = Sick(decoder(family))
    if grouped := options.get("allocator", "paged") == "paged" and model.layer_groups.windows != (None,):
        options = options | {"group_windows": model.layer_groups.windows}
    config = EngineConfig(max_model_len=MAX_MODEL_LEN, **options)
    runner = TorchRunner(
        model, num_blocks=config.num_blocks, block_size=config.block_size,
        num_host_blocks=config.num_host_blocks, grouped=grouped,
    )  # fmt: skip
    engine = Engine(
        config, runner, tokenizer=TOKENIZER, make_mask=structured(), policy=policy and policy(config)
    )
    poison(engine)
    return engine


# -- what is asked, and what it gives alone ---------------------------------------------------------------------------


class EveryThird:
    """A mask that changes with each token: a third of the vocabulary is ruled out, the end never."""

    def allowed(self, token_ids):
        ids = torch.arange(TOKENIZER.vocab_size)
        return ((ids + sum(token_ids)) % 3 != 0) | (ids == 257)


FORMS = [
    {"choice": ["yes", "no", "maybe ☕"]},
    {"regex": r"[a-d]{3,12}(, [A-Z]+)?"},
    {"grammar": 'start: "a" start "b" | "c"'},
    {"json": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"],
              "additionalProperties": False}, "disable_any_whitespace": True},
]  # fmt: skip


SHARED = [[random.Random(salt).randrange(32, 127) for _ in range(30)] for salt in (1, 2)]
"""Beginnings that many prompts have in common."""


class Moody(Policy):
    """A learner's policy that answers, raises or talks nonsense, by the step."""

    def order(self, request, view):
        return [1 / 0, "soon", request.num_tokens][view.step % 3] if view.step % 5 == 0 else -request.arrival

    def admit(self, request, view):
        return ["no", None, 7][view.step % 3] if view.step % 7 == 0 else super().admit(request, view)

    def chunk(self, requests, budget, view):
        return {} if view.step % 6 == 0 else super().chunk(requests, budget, view)

    def victim(self, request, candidates, view):
        return None if view.step % 4 == 0 else candidates[0]

    def preempt_mode(self, victim, view):
        return ["swap", "recompute", "elsewhere"][view.step % 3]


def draw_policy(draw):
    """Settings of memory and scheduling: whatever they are, each request's tokens are those of its cold run."""
    pick = draw.choice
    settings = {"enable_prefix_caching": draw.random() < 0.7}
    if draw.random() < 0.25:
        settings["allocator"] = pick(["first-fit", "best-fit", "next-fit", "buddy", "grow-by-move"])
        settings["compaction"] = draw.random() < 0.5
    if draw.random() < 0.5:
        settings |= {"num_host_blocks": pick([1, 4, 40]), "preempt_mode": pick(["swap", "cheaper"])}
    if draw.random() < 0.6:
        settings |= {
            "order": pick(ORDERS),
            "victim": pick(VICTIMS),
            "admission": pick(ADMISSIONS),
            "chunking": pick(CHUNKINGS),
            "max_chunk_tokens": pick([None, 3, 16]),
            "tenant_max_running": pick([None, None, 1, 3]),
            "tenant_max_blocks": pick([None, None, 10]),
            "max_num_waiting": pick([None, None, 4]),
        }
        if settings["order"] == "priority":
            settings["aging"] = pick([None, 1.5])
        if settings["admission"] == "expected-length":
            settings["expected_output_tokens"] = pick([2, 10])
    if draw.random() < 0.3:
        settings["num_draft_tokens"] = pick([1, 3])
    return settings


@cache
def case(number):
    """Prompt and parameters number `number`: the same in every run."""
    draw = random.Random(number)
    pick, chance = draw.choice, lambda share: draw.random() < share
    shared = SHARED[number % 2][: pick([0, 0, 3, 8, 16, 17, 30])]
    prompt = shared + [pick([256, *range(32, 127)]) for _ in range(pick([1, 2, 5, 9, 16, 17, 30, 60]))]
    greedy, least = chance(0.4), pick([0, 0, 0, 2, 8])
    options = {
        "temperature": 0.0 if greedy else pick([0.7, 1.0, 2.0]),
        "top_k": pick([0, 0, 1, 5, 40]),
        "top_p": pick([1.0, 1.0, 0.5, 0.95]),
        "min_p": pick([0.0, 0.0, 0.1]),
        "seed": draw.randrange(2**32),
        "max_tokens": pick([None, 24, 24, 40, *range(max(1, least), 12)]),
        "min_tokens": least,
        "stop": pick([None, None, ["a", "Zq"], ["!", "e", "ab"]]),
        "stop_token_ids": pick([None, None, [65, 66, 67]]),
        "include_stop_str_in_output": chance(0.3),
        "ignore_eos": chance(0.6),
        "logprobs": pick([None, None, None, 0, 2]),
        "prompt_logprobs": pick([None, None, None, 0, 2]),
        "n": 1 if greedy else pick([1, 1, 2, 3]),
    }
    if chance(0.3):
        options |= {
            "repetition_penalty": pick([1.0, 1.3, 0.8]),
            "frequency_penalty": pick([0.0, 0.5]),
            "presence_penalty": pick([0.0, 1.0, -1.0]),
        }
    if chance(0.15):
        options["logit_bias"] = {draw.randrange(32, 127): pick([-100.0, 5.0, 2.0]) for _ in range(4)}
    if chance(0.15):
        options["bad_words"] = pick([["a"], ["e", "th", "!!"], ["abc", " "]])
    limit = pick([None] * 6 + ["allowed", "mask", "form"])
    if limit == "allowed":
        options["allowed_token_ids"] = sorted({257, *draw.sample(range(32, 127), 30)})
    elif limit == "mask":
        options["token_mask"] = EveryThird()
    elif limit == "form":
        form = StructuredOutputsParams(**pick(FORMS))
        options |= {"structured_outputs": form, "ignore_eos": False, "min_tokens": 0, "bad_words": None}
    return prompt, SamplingParams(**options)


@cache
def cold(family, number, child):
    """One output of the case, alone in a fresh engine with a big pool and no chunks."""
    prompt, params = case(number)
    params = replace(params, n=1, seed=child_seed(params.seed, child), logprobs=2)
    engine = make_engine(family, num_blocks=64, block_size=4, max_num_batched_tokens=2048)
    with engine:
        rid = engine.add_request(prompt, params)
        return run_bounded(engine, 200)[rid]


def raw_logits(family, token_ids):
    """The model's logits for the token that follows."""
    kept = []
    params = SamplingParams(
        max_tokens=1, logits_processors=[lambda _, logits: kept.append(logits.tolist()) or logits]
    )
    with make_engine(family, num_blocks=64, block_size=4, max_num_batched_tokens=2048) as engine:
        engine.add_request(token_ids, params)
        engine.step()
    return kept[0]


class AsBools:
    """A mask as a list of bools, whatever the layout of the one inside."""

    def __init__(self, mask):
        self._mask = mask

    def allowed(self, token_ids):
        mask = np.asarray(self._mask.allowed(token_ids))
        if mask.dtype == np.int32:
            mask = np.unpackbits(mask.view(np.uint8), bitorder="little")[: TOKENIZER.vocab_size].astype(bool)
        return mask.tolist()


def may_follow(family, number, child, index, token):
    """The tie rule: whether rounding may have made `token` output token `index` of the case."""
    prompt, params = case(number)
    known = [*prompt, *cold(family, number, child).outputs[0].token_ids[:index]]
    rules = make_rules(params, TOKENIZER, structured())
    if rules is not None:
        rules = replace(rules, masks=tuple(map(AsBools, rules.masks)))
    ends = [*([] if params.ignore_eos else [257]), *params.stop_token_ids]
    item = SimpleNamespace(
        params=params, token_ids=known, num_prompt_tokens=len(prompt), end=len(known), rules=rules,
        forbidden_token_ids=ends if index < params.min_tokens else (),
    )  # fmt: skip
    logits = shape_reference(raw_logits(family, known), item)
    if params.is_greedy:
        return max(logits) - logits[token] < TIE_GAP
    u = uniform(child_seed(params.seed, child), index)
    return any(between(logits, how, u, token) for how in nearly(params))


def between(logits, params, u, token):
    """Whether a draw from `logits` with a number near `u` gives `token`."""
    (low, kept), (high, _) = (
        sample_reference(logits, params, min(max(u + delta, 0.0), 1 - 1e-9)) for delta in (-1e-4, 1e-4)
    )
    return low <= token <= high and token in kept


def nearly(params):
    """The parameters, and those whose filters cut one token more or less where rounding decides."""
    yield params
    for delta in (-1e-4, 1e-4):
        for name in ("top_p", "min_p"):
            if 0.0 < (value := getattr(params, name)) < 1.0:
                yield replace(params, **{name: value + delta})


# -- the traffic ------------------------------------------------------------------------------------------------------


class MadeToFail(Exception):
    """What we inject; any other error is a finding."""


class Traffic:
    """One seeded run. `step()` is one round: perhaps a new request, perhaps trouble, one engine step, all checks."""

    def __init__(self, seed, family=None, **options):
        self.seed = seed
        self.random = random.Random(seed)
        pick = self.random.choice
        block_size = pick([1, 2, 3, 4, 8, 16])
        capacity = pick([40, 70, 110, 200])
        drawn = pick(list(FAMILIES))
        self.family = family or drawn
        self.options = (
            {
                "block_size": block_size,
                "num_blocks": max(2, capacity // block_size),
                "max_num_batched_tokens": pick([1, 3, 7, 16, 32, 64]),
                "max_num_seqs": pick([1, 2, 4, 8, 16]),
                "watermark": pick([0.0, 0.01, 0.2]),
            }
            | draw_policy(self.random)
            | options
        )
        self.policy = Moody if self.random.random() < 0.2 else None
        self.engine = make_engine(self.family, self.policy, **self.options)
        self.recorder = Recorder(self.engine)
        self.recording = self.recorder.start()
        self.state, self.num_folded = State(), 0
        self.numbers, self.shown, self.sick = {}, {}, set()
        kinds = ("same", "tie", "outgrown", "aborted", "sick", "streams", "streams closed", "subscribers")
        self.counts = dict.fromkeys(kinds, 0)
        self.trouble = self.victim = None
        config = self.engine.config
        self.shadow = ShadowMemory(
            config.num_blocks, config.block_size, config.num_host_blocks, windows=config.group_windows
        )
        self.shadow.watch(self.engine.runner)
        execute = self.engine.runner.execute
        self.engine.runner.execute = lambda plan: self.execute(execute, plan)
        self.engine.bus.subscribe(self.listen)

    def execute(self, execute, plan):
        trouble, self.trouble = self.trouble, None
        if trouble == "raise before":
            raise MadeToFail
        if trouble == "ctrl-c":
            signal.raise_signal(signal.SIGINT)
        sick = self.engine.runner._decoder
        sick.row = self.random.randrange(16) if trouble == "nan" else None
        result = execute(plan)
        failed = {rid for rid, why in result.errors.items() if "not finite" in why}
        sampling = [item.request_id for item in plan.scheduled if item.samples]
        assert len(failed) == (trouble == "nan" and bool(sampling)), f"NaN logits: {failed} of {sampling}"
        self.sick |= failed
        if trouble in ("raise after", "interrupt"):
            raise MadeToFail if trouble == "raise after" else KeyboardInterrupt
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
        if rid in self.numbers and not self.engine.is_live(rid):
            return  # it has ended while a stream stepped; its output comes with the next step
        try:
            self.engine.add_request(prompt, params, request_id=rid, **self.wishes())
        except DuplicateRequest:
            assert rid in self.numbers
        except QueueFull:
            assert len(self.engine.scheduler.waiting) + params.n > self.options["max_num_waiting"]
        except RequestTooLong:
            assert self.is_too_long(prompt, params)
        else:
            assert rid not in self.numbers
            self.numbers[rid] = number

    def wishes(self):
        """Class, tenant, deadline and timeout: nothing that changes a token."""
        pick, chance = self.random.choice, self.random.random
        wishes = {"tenant": pick(["", "a", "b"])}
        if self.options.get("order") == "priority":
            wishes["priority"] = pick(["interactive", "background", 3])
        if chance() < 0.2:
            wishes["deadline"] = pick([2, 50])
        if chance() < 0.05:
            wishes["timeout"] = pick([1, 10, 40])
        if chance() < 0.1:
            wishes["cache_salt"] = "salt"
        return wishes

    def is_too_long(self, prompt, params):
        room = MAX_MODEL_LEN - len(prompt)
        most = len(prompt) + min(room, params.max_tokens or room)
        return self.engine.scheduler.blocks.why_never(len(prompt), most) is not None

    def submit_nonsense(self):
        bad = self.random.choice([[], [259], [-1], [True], None, [1] * 300])
        with pytest.raises(RequestError):
            self.engine.add_request(bad)

    def stream(self):
        """A caller that reads some outputs of a request of its own and leaves; the others' outputs are not lost."""
        number, count = self.random.randrange(NUM_CASES), self.random.choice([1, 2, 5, 300])
        prompt, params = case(number)
        self.counts["streams"] += 1
        output = None
        try:
            with closing(complete(self.engine, [prompt], [params], single=True)) as outputs:
                for _, output in islice(outputs, count):
                    self.grows(output)
                    self.compare()
        except RequestTooLong:
            assert self.is_too_long(prompt, params)
        except QueueFull:
            assert self.options["max_num_waiting"] is not None
        except (MadeToFail, KeyboardInterrupt):
            pass
        if output is not None:
            assert not self.engine.is_live(output.request_id)
            self.shown.pop(output.request_id, None)
            if output.finished:
                self.verify_as(number, output)
            else:
                self.counts["streams closed"] += 1

    def abort(self):
        live = list(self.engine.scheduler.requests)
        if live:
            output = self.engine.abort(self.random.choice(live))
            # A stream's output goes to the stream as well; of a group one child may be gone and the others go on.
            if output is not None and output.finished and output.request_id in self.numbers:
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

    def resize(self):
        num_blocks = max(2, self.options["num_blocks"] + self.random.choice([-2, -1, 0, 0, 3]))
        try:
            self.engine.resize_pool(num_blocks)
        except OutOfBlocks:
            assert len(self.engine.snapshot()["ref_counts"]) > 0

    def reset_cache(self):
        done = self.engine.reset_prefix_cache()
        assert done == (not self.engine.snapshot()["ref_counts"] and not self.engine.snapshot()["swapped"])

    def compact(self):
        if self.engine.config.allocator != "paged":
            self.engine.compact()

    def poison_free(self):
        free = self.engine.snapshot()["free"]
        self.engine.runner.kv.pool[:, free] = float("nan")
        self.shadow.poison(free)

    def fail(self):
        kinds = ["raise before", "raise after", "interrupt", "ctrl-c", "ctrl-c twice"]
        if not self.engine.config.num_draft_tokens:  # the row of a draft that is not taken may fail unseen
            kinds += ["nan", "nan"]
        self.trouble = self.random.choice(kinds)

    def abort_inside(self):
        self.victim = self.random.choice(["step", "commit", "alloc", "finish", "free"])

    def break_subscriber(self):
        """A subscriber that raises at a later event: it is detached, an error event says so, the run goes on."""
        left = self.random.randrange(12)
        kind = self.random.choice([MadeToFail, KeyboardInterrupt])

        def broken(event):
            nonlocal left
            left -= 1
            if left < 0:
                self.counts["subscribers"] += 1
                raise kind

        self.engine.bus.subscribe(broken)

    CHANCES = (
        ("submit_nonsense", 0.01), ("abort", 0.01), ("preempt", 0.03), ("refuse", 0.03), ("cancel", 0.03),
        ("poison_free", 0.05), ("fail", 0.04), ("abort_inside", 0.01), ("break_subscriber", 0.01), ("stream", 0.01),
        ("resize", 0.01), ("reset_cache", 0.02), ("compact", 0.02),
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
        except (MadeToFail, KeyboardInterrupt):
            outputs = []
        for output in outputs:
            self.grows(output)
            if output.finished:
                self.verify(output)
        self.compare()

    def grows(self, output):
        """What a stream shows is never taken back, child by child."""
        before = self.shown.get(output.request_id, [""] * len(output.outputs))
        now = [completion.text for completion in output.outputs]
        assert all(new.startswith(old) for new, old in zip(now, before, strict=True)), (before, now)
        self.shown[output.request_id] = now

    def compare(self):
        self.engine.check()
        for event in self.recording.events[self.num_folded :]:
            self.state.apply(event)
        self.num_folded = len(self.recording.events)
        assert self.state.snapshot() == self.engine.snapshot(), "the folded events are not the engine's state"

    # What came of a request:

    def verify(self, output):
        self.shown.pop(output.request_id, None)
        self.verify_as(self.numbers.pop(output.request_id), output)

    def verify_as(self, number, output):
        _, params = case(number)
        assert len(output.outputs) == params.n
        for child, got in enumerate(output.outputs):
            rid = output.request_id if params.n == 1 else f"{output.request_id}.{child}"
            expected = cold(self.family, number, child)
            self.counts[self.judge(number, child, output, rid, expected)] += 1
            assert (got.logprobs is None) == (params.logprobs is None)
        self.verify_prompt_logprobs(output, params, cold(self.family, number, 0).prompt_logprobs)

    def judge(self, number, child, output, rid, expected):
        """How one output relates to its cold run. Anything but a known reason to differ is a failure."""
        got, want = output.outputs[child], expected.outputs[0]
        ids, reference = list(got.token_ids), list(want.token_ids)
        where = f"case {number}.{child} as {rid}, {case(number)[1]}: {got} is not {want}"
        sick = rid in self.sick
        self.sick.discard(rid)  # ids come again
        pairs = list(zip(ids, reference, strict=False))
        same = next((i for i, (token, other) in enumerate(pairs) if token != other), len(pairs))
        self.verify_logprobs(got, want, same)
        if same < len(pairs):
            assert may_follow(self.family, number, child, same, ids[same]), where
            return "tie"
        if got.finish_reason == "error" and sick:
            assert output.error, output
            assert len(ids) <= len(reference), where
            return "sick"
        if got.finish_reason == "abort":
            assert want.text.startswith(got.text.rstrip("\ufffd")), where
            return "aborted"
        if "the whole pool has" in output.detail and len(ids) < len(reference):
            assert got.finish_reason == "length", where
            return "outgrown"
        assert (ids, got.text, got.finish_reason) == (reference, want.text, want.finish_reason), where
        assert not sick, where
        return "same"

    def verify_logprobs(self, got, want, count):
        if got.logprobs is None:
            return
        assert len(got.logprobs) == len(got.token_ids)
        rows = zip(got.logprobs, got.token_ids, want.logprobs, strict=False)
        for row, token, theirs in islice(rows, count):
            assert row[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)

    def verify_prompt_logprobs(self, output, params, expected):
        got, prompt = output.prompt_logprobs, output.prompt_token_ids
        assert (got is None) == (params.prompt_logprobs is None)
        if got is None:
            return
        if output.outputs[0].token_ids:
            assert len(got) == len(prompt)
        assert got[0] is None
        for row, token, theirs in list(zip(got, prompt, expected, strict=False))[1:]:
            assert len(row) >= max(1, params.prompt_logprobs)
            assert row[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)

    # All of it:

    def run(self, steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(steps):
                self.step()
            self.trouble = self.victim = None
            for output in run_bounded(self.engine, 3_000).values():
                self.verify(output)
        self.compare()
        assert not self.numbers, f"requests without an output: {self.numbers}"
        assert_no_leak(self.engine)
        self.check_recording()
        detached = [str(w.message) for w in caught if "It is detached" in str(w.message)]
        faults = [e.what for e in self.recording.events if e.kind == "error" and e.where == "subscriber"]
        assert len(detached) == len(faults) == self.counts["subscribers"], (self.counts, faults)
        self.engine.close()
        outputs = sum(self.counts[kind] for kind in ("same", "tie", "outgrown", "aborted", "sick"))
        assert self.counts["tie"] <= 0.01 * outputs, self.counts

    def check_recording(self):
        events = self.recording.events
        assert fold(events).snapshot() == self.engine.snapshot()
        policy = self.policy and self.policy(self.engine.config)
        scheduler, again = rerun(self.recording, policy=policy)
        assert again.to_jsonl(wall=False) == self.recording.to_jsonl(wall=False), "the re-run differs"
        assert scheduler.snapshot() == self.engine.snapshot()


def run(seed, steps=STEPS, **options):
    """Run one seed. Whatever fails names it."""
    traffic = Traffic(seed, **options)
    try:
        traffic.run(steps)
    except BaseException as error:
        step = traffic.engine.scheduler.step
        raise AssertionError(
            f"seed {seed}, step {step}, {traffic.family}, {traffic.policy}, {traffic.options}: {error!r}"
        ) from error
    return traffic


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=100_000, help="rounds altogether")
    args = parser.parse_args()
    torch.set_num_threads(1)
    total, seed, left, start = {}, args.seed, args.steps, time.perf_counter()
    while left > 0:
        traffic = run(seed, min(STEPS, left))
        for kind, count in traffic.counts.items():
            total[kind] = total.get(kind, 0) + count
        left -= STEPS
        done, seconds = args.steps - max(0, left), time.perf_counter() - start
        print(f"seed {seed} {traffic.family:12} {done:7} steps {seconds:6.0f} s  {total}", flush=True)
        seed += 1
        del traffic
        gc.collect()


if __name__ == "__main__":
    main()
