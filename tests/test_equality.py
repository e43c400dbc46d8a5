"""Greedy float32 output equals `transformers`, token for token, whatever the batch, the chunks and the pool.

Each setting also shows, by its recording, that what it is about happened. The one tie rule is
`testing.first_difference`; for these fixed prompts no tie may occur.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pagedinfer import Recorder, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import ModelError
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.sources import resolve
from pagedinfer.model.tiny import TinyWeights
from pagedinfer.model.tokenizer import open_tokenizer
from pagedinfer.model.weights import open_weights
from pagedinfer.runner.torch_runner import TorchRunner
from pagedinfer.testing import assert_no_leak, first_difference, poison, run_bounded

# -- the reference ----------------------------------------------------------------------------------------------------


@dataclass
class Reference:
    """A prompt, its greedy continuation by transformers, and the gap between the two best logits at each token."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


def continue_greedily(model, prompt, num_tokens):
    model.generation_config.eos_token_id = None  # go on after an end
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(generated.logits)
    tokens = generated.sequences[0, len(prompt) :]
    assert torch.equal(tokens, logits.argmax(-1)), "the reference is not greedy"
    best, second = logits.topk(2).values.unbind(-1)
    return Reference(list(prompt), tokens.tolist(), (best - second).tolist())


# -- one setting ------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a run's recording says happened.

    Attributes:
        preemptions: how often a request lost its place.
        chunked: requests whose prompt took more than one step, preemptions not counted.
        mixed_steps: steps that computed prompts of some and decoded others.
        widest: most requests in one step.
    """

    preemptions: int = 0
    chunked: int = 0
    mixed_steps: int = 0
    widest: int = 0


def look(recording):
    """Read the steps of a recording."""
    seen, computed, chunks, chunked = Seen(sum(recording.requests["preemptions"])), {}, {}, set()
    lengths = dict(zip(recording.requests["request"], recording.requests["prompt_tokens"], strict=True))
    for event in recording.events:
        if event.kind == "preempt":
            computed[event.rid] = chunks[event.rid] = 0
        if event.kind == "share":  # what the cache holds is computed
            computed[event.rid] = computed.get(event.rid, 0) + event.num_tokens
        if event.kind != "step":
            continue
        prefills = {rid for rid in event.scheduled if computed.get(rid, 0) < lengths[rid]}
        for rid, n in event.scheduled.items():
            computed[rid] = computed.get(rid, 0) + n
            chunks[rid] = chunks.get(rid, 0) + (rid in prefills)
        chunked |= {rid for rid in prefills if chunks[rid] > 1}
        seen.mixed_steps += 0 < len(prefills) < len(event.scheduled)
        seen.widest = max(seen.widest, len(event.scheduled))
    seen.chunked = len(chunked)
    return seen


def run(decoder, references, *, num_blocks, block_size, budget, seats=64, **settings):
    """All prompts at once through an engine with a poisoned pool; compares, and returns what was seen."""
    return look(record(decoder, references, num_blocks, block_size, budget, seats, **settings))


def record(decoder, references, num_blocks, block_size, budget, seats=64, **settings):
    """The recording of such a run, compared."""
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=seats,
        **settings,
    )
    runner = TorchRunner(
        decoder, num_blocks=num_blocks, block_size=block_size, num_host_blocks=config.num_host_blocks
    )
    with Engine(config, runner) as engine:
        poison(engine)
        with Recorder(engine) as recording:
            for reference in references:
                params = SamplingParams(temperature=0.0, max_tokens=len(reference.tokens), ignore_eos=True)
                engine.add_request(reference.prompt, params)
            done = run_bounded(engine, 20_000)
        assert_no_leak(engine)
    compare([done[f"r{i}"] for i in range(len(references))], references)
    return recording


def compare(outputs, references):
    ties = 0
    for output, reference in zip(outputs, references, strict=True):
        ids = list(output.outputs[0].token_ids)
        verdict, at = first_difference(ids, reference.tokens, reference.gaps)
        assert verdict != "different", (
            f"prompt of {len(reference.prompt)} tokens, output {at}: {ids[at : at + 3]}, transformers gives "
            f"{reference.tokens[at : at + 3]} with a gap of {reference.gaps[at]}"
        )
        ties += verdict == "tie"
    assert ties == 0


def alone(decoder, references, **options):
    for reference in references:
        run(decoder, [reference], **options)


def pool_for(references, block_size, share):
    """Blocks for `share` of what all requests hold at their end, but never less than the longest needs."""
    needed = [-(-(len(r.prompt) + len(r.tokens)) // block_size) for r in references]
    return max(max(needed), int(sum(needed) * share))


# -- the tiny model: every combination --------------------------------------------------------------------------------

TINY_LENGTHS = (17, 100, 3, 64, 8, 15, 1, 129, 31, 65, 4, 48, 2, 63, 16, 7)


@pytest.fixture(scope="module")
def _one_thread():  # the tiny model gains nothing from more, and loses much on a busy machine
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(_one_thread):
    """The decoder and 16 references, 24 new tokens each."""
    source = TinyWeights(seed=1)
    c = source.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            rms_norm_eps=c.rms_norm_eps, bos_token_id=None, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    model.load_state_dict({name: source.read(name, torch.float32) for name in source.names()})
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 259, (n,), generator=generator).tolist() for n in TINY_LENGTHS]
    return Decoder(c).load(source), [continue_greedily(model, prompt, 24) for prompt in prompts]


SMALL = 0.2
"""A pool that preempts: this share of what all requests hold at their end."""


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("budget", [7, 64, 2048])
@pytest.mark.parametrize("room", ["big", "small"])
def test_tiny_equals_transformers(tiny, block_size, budget, room):
    decoder, references = tiny
    num_blocks = pool_for(references, block_size, 1.0 if room == "big" else SMALL)
    seen = run(decoder, references, num_blocks=num_blocks, block_size=block_size, budget=budget)
    assert (seen.preemptions > 0) == (room == "small"), seen
    assert (seen.chunked > 0) == (budget < max(TINY_LENGTHS)), seen
    assert seen.mixed_steps > 0 or (budget, room) == (2048, "big"), seen  # there all prompts fit one step
    assert seen.widest >= (min(budget, len(references)) if room == "big" else 3), seen


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("budget", [7, 64, 2048])
def test_tiny_alone_equals_transformers(tiny, block_size, budget):
    decoder, references = tiny
    alone(decoder, references, num_blocks=160, block_size=block_size, budget=budget)


def test_the_comparison_can_fail(tiny):
    decoder, references = tiny
    changed = Reference(references[3].prompt, [*references[3].tokens[:-1], 0], references[3].gaps)
    with pytest.raises(AssertionError, match="prompt of 64 tokens, output 23"):
        run(decoder, [references[0], changed], num_blocks=64, block_size=4, budget=64)
    tie = Reference(changed.prompt, changed.tokens, [0.0] * 24)
    with pytest.raises(AssertionError, match="1 == 0"):
        run(decoder, [tie], num_blocks=64, block_size=4, budget=64)


# -- SmolLM2 ----------------------------------------------------------------------------------------------------------

TEXTS = (
    "A",
    "Hello!",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "¿Dónde está la biblioteca? Traduce al inglés:",
    "Water boils at 100 degrees Celsius because",
    "List three reasons why people enjoy walking in the forest:\n1.",
    "😀 naïve café — “quoted” …\n\n\tTabs and\r\nline ends; then",
    "Dear Sir or Madam,\n\nI am writing to you about the broken clock in the town hall.",
    "SELECT name, COUNT(*) FROM visits WHERE year = 2021 GROUP BY",
)
STORY = (
    "The lighthouse keeper counted the ships as they passed, and wrote each one down in a heavy book. "
    "On the first day there were seven; on the second, none, for the fog lay thick over the water. "
    "He wondered whether anybody would ever read what he had written, and he sharpened his pencil. "
    "When his daughter came to visit she asked him why he did not simply count the waves instead. "
    "Because, he said, a wave does not know where it is going, and a ship has somebody waiting for it. "
)
STORY_LENGTHS = (64, 65, 100, 128, 200, 333, 512, 600)
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def smollm2():
    """Path, tokenizer and decoder of the pinned file, and transformers' reading of the same file."""
    try:
        path = resolve("smollm2-135m", progress=False)
    except ModelError as error:
        pytest.skip(f"SmolLM2 is not here and cannot be fetched: {error}")
    tokenizer = open_tokenizer(path)
    source = open_weights(path)
    decoder = Decoder(source.config, dtype=torch.float32).load(source)
    source.close()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    prompts = [tokenizer.encode(text) for text in TEXTS]
    prompts += [tokenizer.encode(STORY * 8)[i : i + n] for i, n in enumerate(STORY_LENGTHS)]
    prompts = random.Random(1).sample(prompts, 20)
    assert sorted(map(len, prompts))[::19] == [1, 600]
    return decoder, model, prompts


@pytest.fixture(scope="module")
def few(smollm2):
    """Four prompts of 128, 65, 12 and 1 tokens, 16 new tokens each."""
    decoder, model, prompts = smollm2
    by_length = {len(prompt): prompt for prompt in prompts}
    return decoder, [continue_greedily(model, by_length[n], 16) for n in (128, 65, 12, 1)]


@pytest.fixture(scope="module")
def all_twenty(smollm2):
    decoder, model, prompts = smollm2
    return decoder, [continue_greedily(model, prompt, NEW_TOKENS) for prompt in prompts]


def test_a_few_prompts_equal_transformers(few):
    decoder, references = few
    alone(decoder, references[1:3], num_blocks=64, block_size=64, budget=2048)
    seen = run(decoder, references, num_blocks=64, block_size=16, budget=48)
    assert seen.chunked > 0
    assert seen.mixed_steps > 0
    assert seen.preemptions == 0
    seen = run(decoder, references, num_blocks=200, block_size=1, budget=64)
    assert seen.chunked > 0
    assert seen.mixed_steps > 0
    assert seen.preemptions > 0


# Each block size and each budget once in a big pool and once in a small one; the tiny model runs all combinations.
TOGETHER = [
    (1, 7, "big"), (16, 64, "big"), (64, 2048, "big"),
    (16, 7, "small"), (64, 64, "small"), (1, 2048, "small"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("block_size", "budget", "room"), TOGETHER)
def test_twenty_prompts_together_equal_transformers(all_twenty, block_size, budget, room):
    decoder, references = all_twenty
    num_blocks = pool_for(references, block_size, 1.0 if room == "big" else SMALL)
    seen = run(decoder, references, num_blocks=num_blocks, block_size=block_size, budget=budget)
    assert (seen.preemptions > 0) == (room == "small"), seen
    assert seen.chunked > 0 or (budget, room) == (2048, "small"), seen
    assert seen.mixed_steps > 0, seen
    assert seen.widest >= (min(budget, 20) if room == "big" else 6), seen


# The main ways to give memory and turns, and the event that shows that each was used.
WAYS = {
    "swap": ({"num_host_blocks": 400, "preempt_mode": "swap"}, "swap"),
    "cheaper": ({"num_host_blocks": 60, "preempt_mode": "cheaper", "victim": "largest"}, "preempt"),
    "grow-by-move": ({"allocator": "grow-by-move", "compaction": True}, "move"),
    "best-fit": ({"allocator": "best-fit", "compaction": True}, "alloc"),
    "speculation": ({"num_draft_tokens": 3}, "trim"),
    "equal-progress": ({"chunking": "equal-progress", "order": "shortest-prefill"}, "preempt"),
    "prefill-first": (
        {"chunking": "prefill-first", "admission": "fits-now", "victim": "fewest-tokens-lost"},
        "preempt",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_main_ways_equal_transformers(all_twenty, way):
    decoder, references = all_twenty
    settings, shown = WAYS[way]
    room = pool_for(references, 16, SMALL)
    recording = record(decoder, references, room, 16, 64, **settings)
    assert shown in {event.kind for event in recording.events}
    modes = {event.mode for event in recording.events if event.kind == "preempt"}
    assert way not in ("swap", "cheaper") or "swap" in modes


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_prompts_alone_equal_transformers(all_twenty):
    decoder, references = all_twenty
    alone(decoder, references, num_blocks=44, block_size=16, budget=512)
