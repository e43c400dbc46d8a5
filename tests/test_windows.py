"""Sliding windows in the whole engine: layers let go of blocks that have left their window, and no token changes."""

import random

import pytest
from test_families import byte_tokenizer
from test_layer_groups import COMMON, MODELS, VOCAB, WINDOWS
from transformers import AutoConfig

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.llm import LLM
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.weights import open_weights
from pagedinfer.runner.torch_runner import TorchRunner
from pagedinfer.sim.rerun import rerun
from pagedinfer.testing import assert_no_leak
from pagedinfer.trace import events as ev
from pagedinfer.trace.recorder import Recorder
from pagedinfer.trace.replay import fold

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(random_model, tmp_path_factory):
    made = {}

    def build(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            random_model(AutoConfig.for_model(family, **(COMMON | MODELS[family]))).save_pretrained(
                made[family]
            )
        return made[family]

    return build


def prompts(seed=1, number=6):
    generator = random.Random(seed)
    shared = [generator.randrange(3, VOCAB) for _ in range(12)]
    return [
        shared[: 4 * (i % 4)] + [generator.randrange(3, VOCAB) for _ in range(generator.randrange(3, 30))]
        for i in range(number)
    ]


def run(folder, grouped, **settings):
    """Tokens, and the recording, of a small engine over a random mixed model."""
    source = open_weights(folder)
    decoder = Decoder(source.config).load(source)
    config = EngineConfig(
        **{"num_blocks": 60, "block_size": 4, "max_model_len": 96, "max_num_batched_tokens": 16,
           "group_windows": decoder.layer_groups.windows if grouped else (None,)} | settings
    )  # fmt: skip
    runner = TorchRunner(
        decoder,
        num_blocks=config.num_blocks,
        block_size=4,
        grouped=grouped,
        num_host_blocks=config.num_host_blocks,
    )
    runner.kv.poison()
    engine = Engine(config, runner)
    ids, tokens = [], {}
    with Recorder(engine) as recording:
        for i, prompt in enumerate(prompts()):
            ids.append(
                engine.add_request(
                    prompt, SamplingParams(temperature=0.0, max_tokens=20 + i, ignore_eos=True)
                )
            )
        while engine.has_unfinished():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            engine.check()
            assert fold(recording.events).snapshot() == engine.snapshot()
    assert_no_leak(engine)
    return [tokens[rid] for rid in ids], recording


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_blocks": 34}, {"num_blocks": 34, "num_host_blocks": 40, "preempt_mode": "swap"},
     {"enable_prefix_caching": False}],
    ids=["large pool", "preemptions", "swaps", "no cache"],
)  # fmt: skip
def test_tokens_are_those_of_whole_tables(folders, family, settings):
    whole, _ = run(folders(family), grouped=False, num_blocks=200, enable_prefix_caching=False)
    found, recording = run(folders(family), grouped=True, **settings)
    assert found == whole
    kinds = [event.kind for event in recording.events]
    assert kinds.count("slide") > 0
    if "num_blocks" in settings and len(WINDOWS[family]) > 1:
        assert kinds.count("preempt") > 0
    swaps = [event for event in recording.events if isinstance(event, ev.Swap)]
    assert bool(swaps) == ("preempt_mode" in settings and "preempt" in kinds)
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


def test_a_window_keeps_no_more_than_it_sees(folders):
    """Mistral's one group: a request of 90 tokens with a window of 9 never holds more than 5 blocks of 4 tokens."""
    source = open_weights(folders("mistral"))
    decoder = Decoder(source.config).load(source)
    config = EngineConfig(
        num_blocks=6, block_size=4, max_model_len=96, max_num_batched_tokens=8, group_windows=(9,)
    )
    engine = Engine(config, TorchRunner(decoder, num_blocks=6, block_size=4, grouped=True))
    engine.add_request(prompts()[0][:20], SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True))
    most = 0
    while engine.has_unfinished():
        outputs = engine.step()
        most = max(most, 6 - engine.metrics()["num_free_blocks"])
    assert outputs[0].outputs[0].finish_reason == "length"
    assert 3 <= most <= 5


def test_llm_groups_layers_by_itself(folders):
    byte_tokenizer(folders("gemma2"))
    llm = LLM(str(folders("gemma2")), dtype="float32", block_size=4, num_blocks=60, max_model_len=96)
    assert llm.engine.config.group_windows == (None, 7)
    short = LLM(str(folders("gemma2")), dtype="float32", block_size=4, num_blocks=60, max_model_len=7)
    assert short.engine.config.group_windows == (None,)  # nobody outgrows the window
