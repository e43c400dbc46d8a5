import gc
import random
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagedinfer.config import SamplingParams
from pagedinfer.engine.plan import ScheduledRequest, StepPlan
from pagedinfer.engine.protocols import Runner
from pagedinfer.errors import ConfigError, EngineClosed
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.tiny import ByteTokenizer, TinyWeights, tiny_config
from pagedinfer.runner.torch_runner import TorchRunner, pick_dtype

GREEDY = SamplingParams(temperature=0.0)
TEXTS = ["", "A", "Hello, world", "The quick brown fox jumps over the lazy dog.", "naïve 🙂"]
PROMPTS = [ByteTokenizer().encode(text) for text in TEXTS]
NEW = 20


@pytest.fixture(scope="module")
def source():
    return TinyWeights(seed=2)


@pytest.fixture(scope="module")
def decoder(source):
    return Decoder(source.config).load(source)


@pytest.fixture(scope="module")
def oracle(source):
    """Greedy continuations by transformers, one prompt at a time."""
    c = source.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            rms_norm_eps=c.rms_norm_eps,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    model.load_state_dict({name: source.read(name, torch.float32) for name in source.names()})
    outputs = []
    for prompt in PROMPTS:
        generated = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        top = torch.cat(generated.logits).topk(2).values
        assert (top[:, 0] - top[:, 1]).min() > 1e-3  # no step is a tie, so every token must follow
        outputs.append(generated.sequences[0, len(prompt) :].tolist())
    assert all(len(set(output)) > NEW // 2 for output in outputs)
    return outputs


@dataclass
class Live:
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    computed: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def output(self):
        return self.tokens[self.prompt_len :]


class Drive:
    """A scheduler by hand: every step computes what `share` says, over blocks handed out in random order."""

    def __init__(self, decoder, block_size, num_blocks=200, seed=0):
        self.runner = TorchRunner(decoder, num_blocks=num_blocks, block_size=block_size)
        self.runner.kv.poison()
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.block_size = block_size
        self.live = {}
        self.results = []

    def add(self, rid, prompt, params=GREEDY, seed=0):
        self.live[rid] = Live(list(prompt), len(prompt), params, seed)

    def preempt(self, rid):
        live = self.live[rid]
        self.free[:0] = live.table
        random.Random(len(live.tokens)).shuffle(self.free)
        live.table, live.computed = [], 0

    def step(self, share=lambda rid, left: left, only=None):
        scheduled = []
        for rid, live in self.live.items():
            if only is not None and rid not in only:
                continue
            num = min(share(rid, len(live.tokens) - live.computed), len(live.tokens) - live.computed)
            while len(live.table) * self.block_size < live.computed + num:
                live.table.append(self.free.pop())
            scheduled.append(
                ScheduledRequest(
                    request_id=rid,
                    start=live.computed,
                    num_tokens=num,
                    samples=live.computed + num == len(live.tokens),
                    output_index=len(live.output),
                    is_prefill=num > 1,
                    new_block_ids=(),
                    block_table=live.table,
                    token_ids=live.tokens,
                    params=live.params,
                    seed=live.seed,
                )
            )
        result = self.runner.execute(StepPlan(step=1, now=1.0, token_budget=10**6, scheduled=scheduled))
        for item in scheduled:
            live = self.live[item.request_id]
            live.computed = item.end
            assert (item.request_id in result.tokens) == (
                item.samples and item.request_id not in result.errors
            )
            live.tokens.extend(result.tokens.get(item.request_id, ()))
        self.results.append(result)
        return result

    def run(self, until=NEW, share=lambda rid, left: left):
        for _ in range(1000):
            busy = [rid for rid, live in self.live.items() if len(live.output) < until]
            if not busy:
                return {rid: live.output for rid, live in self.live.items()}
            self.step(share, only=busy)
        raise AssertionError("no end in 1000 steps")


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 7, 1000])
def test_greedy_equals_transformers_all_together(decoder, oracle, block_size, chunk):
    drive = Drive(decoder, block_size, seed=chunk)
    for index, prompt in enumerate(PROMPTS):
        drive.add(f"r{index}", prompt)
    outputs = drive.run(share=lambda rid, left: chunk)
    assert list(outputs.values()) == oracle


def test_greedy_equals_transformers_alone_and_arriving_late(decoder, oracle):
    late = Drive(decoder, 4)
    for index, prompt in enumerate(PROMPTS):
        alone = Drive(decoder, 4, num_blocks=20)
        alone.add("a", prompt)
        assert alone.run()["a"] == oracle[index]
        late.add(f"r{index}", prompt)
        late.step()  # the newcomer's prefill beside the others' decodes
    outputs = late.run()
    assert [outputs[f"r{index}"][:NEW] for index in range(len(PROMPTS))] == oracle


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.0), SamplingParams(top_k=20, top_p=0.9)]
)
@pytest.mark.parametrize("chunk", [1000, 5])
def test_preemption_after_any_token_changes_nothing(decoder, params, chunk):
    cold = Drive(decoder, 4)
    cold.add("a", PROMPTS[2], params, seed=9)
    expected = cold.run()["a"]
    for after in range(1, NEW):
        drive = Drive(decoder, 4, num_blocks=30, seed=after)
        drive.add("a", PROMPTS[2], params, seed=9)
        drive.add("b", PROMPTS[3], SamplingParams(temperature=2.0), seed=after)
        while len(drive.live["a"].output) < after:
            drive.step(lambda rid, left: chunk)
        drive.preempt("a")
        drive.runner.kv.pool[:, drive.free] = float("nan")
        assert drive.run(share=lambda rid, left: chunk)["a"][:NEW] == expected


def test_seeds_decide_and_neighbours_do_not(decoder):
    params = SamplingParams(temperature=1.0)
    drive = Drive(decoder, 4)
    for rid, seed in (("a", 1), ("b", 1), ("c", 2)):
        drive.add(rid, PROMPTS[2], params, seed)
    outputs = drive.run()
    assert outputs["a"] == outputs["b"] != outputs["c"]


def test_a_chunk_that_does_not_sample_returns_no_token(decoder):
    drive = Drive(decoder, 4)
    drive.add("a", PROMPTS[3])
    result = drive.step(lambda rid, left: 7)
    assert result.tokens == {}
    assert result.errors == {}
    assert result.seconds > 0.0
    assert decoder.config.vocab_size == drive.runner.vocab_size


def test_tokens_are_python_integers(decoder):
    drive = Drive(decoder, 4)
    drive.add("a", PROMPTS[1])
    (token,) = drive.step().tokens["a"]
    assert type(token) is int


def test_one_poisoned_request_ends_alone(decoder, oracle):
    drive = Drive(decoder, 4)
    for index in (2, 3):
        drive.add(f"r{index}", PROMPTS[index])
    drive.step()
    drive.runner.kv.pool[:, drive.live["r2"].table] = float("nan")
    result = drive.step()
    assert set(result.errors) == {"r2"}
    assert "not finite" in result.errors["r2"]
    del drive.live["r2"]
    assert drive.run()["r3"] == oracle[3]


def test_logprobs_come_for_those_who_asked(decoder, oracle):
    drive = Drive(decoder, 4)
    drive.add("a", PROMPTS[2], SamplingParams(temperature=0.0, logprobs=3))
    drive.add("b", PROMPTS[2])
    result = drive.step()
    assert set(result.logprobs) == {"a"}
    (values,) = result.logprobs["a"]
    assert next(iter(values)) == oracle[2][0]
    assert len(values) == 3
    assert all(value < 0 < rank for value, rank in values.values())


def test_a_plan_without_work_runs(decoder):
    runner = TorchRunner(decoder, num_blocks=4, block_size=4)
    assert isinstance(runner, Runner)
    plan = StepPlan(step=1, now=1.0, token_budget=8, exhausted={"a": "too long"})
    assert runner.execute(plan).tokens == {}


def test_close_frees_the_pool_and_a_second_runner_is_fine(decoder, oracle):
    for _ in range(3):
        drive = Drive(decoder, 4)
        drive.add("a", PROMPTS[2])
        assert drive.run()["a"] == oracle[2]
        pool, runner = weakref.ref(drive.runner.kv.pool), drive.runner
        runner.close()
        runner.close()
        with pytest.raises(EngineClosed):
            drive.step()
        gc.collect()
        assert pool() is None
    gone = weakref.ref(runner)
    del runner, drive
    gc.collect()
    assert gone() is None


def test_a_deleted_runner_frees_its_pool(decoder):
    drive = Drive(decoder, 4)
    drive.add("a", PROMPTS[2])
    drive.run()
    pool = weakref.ref(drive.runner.kv.pool)
    del drive
    assert pool() is None  # at once: no reference cycle holds it


def test_kv_bytes_follow_the_explicit_head_dim():
    source = TinyWeights(tiny_config(head_dim=32))
    runner = TorchRunner(Decoder(source.config).load(source), num_blocks=5, block_size=4)
    assert runner.kv.bytes_per_block == 2 * 2 * 4 * 2 * 32 * 4
    assert runner.kv.total_bytes == 5 * runner.kv.bytes_per_block


def test_auto_is_float32_on_a_cpu_and_the_checkpoints_type_on_a_gpu():
    config = tiny_config(dtype="bfloat16")
    assert pick_dtype("auto", config) == torch.float32
    assert pick_dtype("auto", config, "cuda") == torch.bfloat16
    assert pick_dtype("bfloat16", config) == torch.bfloat16
    with pytest.raises(ConfigError, match=r"dtype='int3'.*auto, bfloat16"):
        pick_dtype("int3", config)
