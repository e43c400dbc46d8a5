"""Layers in groups with block tables of their own: windows let go of blocks, and no logit changes."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from pagedinfer.backends.layer_groups import LayerGroups
from pagedinfer.config import SamplingParams
from pagedinfer.engine.plan import ScheduledRequest, StepPlan
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.weights import open_weights
from pagedinfer.runner.inputs import InputBuffers
from pagedinfer.runner.taps import Tap
from pagedinfer.runner.torch_runner import TorchRunner

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GEMMA = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
MODELS = {
    # Alternating layers, scores softly capped: 2 groups.
    "gemma2": GEMMA | {"num_hidden_layers": 4, "attn_logit_softcapping": 3.0},
    # Two windowed layers before each full one: groups of 2 layers, one full and two with a window.
    "gemma3_text": GEMMA | {"num_hidden_layers": 6, "layer_types": [LOCAL, LOCAL, GLOBAL] * 2},
    # All alike: one group that lets go.
    "mistral": {"num_hidden_layers": 3, "sliding_window": 9, "head_dim": 16},
    # Windows at the end only, an odd number of layers: 1 in a group.
    "qwen2": {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    },
}
WINDOWS = {
    "gemma2": (None, 7), "gemma3_text": (None, 7, 7), "mistral": (9,), "qwen2": (None, 6, 6),
}  # fmt: skip


def prompt(seed, length):
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(length)]


@pytest.fixture(scope="module")
def built(random_model, tmp_path_factory):
    made = {}

    def build(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            theirs = random_model(AutoConfig.for_model(family, **(COMMON | MODELS[family])))
            theirs.save_pretrained(folder)
            source = open_weights(folder)
            made[family] = Decoder(source.config).load(source), theirs
        return made[family]

    return build


# -- the groups -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "groups", "rows"),
    [
        ([None] * 4, (None,), 4),
        ([8, 8, 8], (8,), 3),
        ([8, None] * 13, (None, 8), 13),  # Gemma 2
        (
            [*[8] * 5, None] * 4 + [8, 8],
            (None, *[8] * 6),
            4,
        ),  # Gemma 3 1B: 22 and 4; the last group has 2 of 4
        ([None] * 9 + [8] * 8, (None, 8), 9),  # near enough: a row stays empty in one of two groups
        ([16, 8, None, 8], (None, 16, 8, 8), 1),
    ],
)
def test_groups_by_hand(windows, groups, rows):
    found = LayerGroups.by_window(windows)
    assert (found.windows, found.num_rows, found.num_groups) == (groups, rows, len(groups))


@given(st.lists(st.sampled_from([None, 4, 9]), min_size=1, max_size=40))
def test_every_layer_has_a_place_of_its_own_in_a_group_with_its_window(windows):
    groups = LayerGroups.by_window(windows)
    places = list(zip(groups.group, groups.row, strict=True))
    assert len(set(places)) == len(windows)
    assert [groups.windows[group] for group in groups.group] == windows
    assert max(groups.row) + 1 == groups.num_rows
    assert set(groups.group) == set(range(groups.num_groups)), "no group without layers"
    one = LayerGroups.one(len(windows))
    assert (set(one.group), one.row, one.windows) == ({0}, tuple(range(len(windows))), (None,))


# -- a core by hand ---------------------------------------------------------------------------------------------------


class Core:
    """Hands out blocks of one pool to all groups, takes back those that a window has left, and poisons them at once.

    What was freed last goes out first, so that a stale read would meet another's keys.
    """

    def __init__(self, groups, kv, block_size, early=0):
        self.groups, self.kv, self.size, self.early = groups, kv, block_size, early
        self.free = list(range(kv.num_blocks))
        random.Random(1).shuffle(self.free)
        self.tables = {}
        self.most = 0
        kv.poison()

    def schedule(self, rid, start, num):
        """Tables of all groups for tokens from `start` on."""
        tables = self.tables.setdefault(rid, [[] for _ in self.groups.windows])
        for table, window in zip(tables, self.groups.windows, strict=True):
            if window is not None:
                for place in range(max(0, start - window + 1 + self.early) // self.size):
                    if place < len(table) and table[place] >= 0:
                        self.kv.pool[:, table[place]] = float("nan")
                        self.free.append(table[place])
                        table[place] = -1
            while len(table) * self.size < start + num:
                table.append(self.free.pop())
        self.most = max(self.most, self.kv.num_blocks - len(self.free))
        return tables


def scheduled(rid, tokens, start, num, tables):
    return ScheduledRequest(
        request_id=rid, start=start, num_tokens=num, samples=True, output_index=0, is_prefill=True, new_block_ids=(),
        block_table=tuple(tables[0]), group_tables=tuple(map(tuple, tables[1:])), token_ids=tokens,
        params=SamplingParams(temperature=0.0), seed=0,
    )  # fmt: skip


def grouped_logits(decoder, prompts, chunks, block_size, num_blocks, early=0):
    """All logits of the prompts, computed in chunks of changing sizes side by side; and the core."""
    groups = decoder.layer_groups
    kv = decoder.new_kv(num_blocks, block_size, groups)
    core = Core(groups, kv, block_size, early)
    buffers = InputBuffers(block_size, num_groups=groups.num_groups)
    logits, turn = [[] for _ in prompts], 0
    while any(len(done) < len(tokens) for done, tokens in zip(logits, prompts, strict=True)):
        items = []
        for row, tokens in enumerate(prompts):
            start = len(logits[row])
            num = min(chunks[(turn + row) % len(chunks)], len(tokens) - start)
            if num:
                items.append(scheduled(str(row), tokens, start, num, core.schedule(str(row), start, num)))
        inputs, order = buffers.update(StepPlan(step=1, now=0, token_budget=999, scheduled=items))
        inputs.logits_indices = torch.arange(sum(inputs.query_lens))
        for item, part in zip(order, decoder.forward(inputs, kv).split(inputs.query_lens), strict=True):
            logits[int(item.request_id)] += list(part)
        turn += 1
    return [torch.stack(parts) for parts in logits], core


PROMPTS = [prompt(0, 45), prompt(1, 3), prompt(2, 60), prompt(3, 20)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_whole_tables(built, paged_batch, family, block_size):
    decoder, theirs = built(family)
    assert decoder.layer_groups.windows == WINDOWS[family]
    whole = paged_batch(decoder, PROMPTS, block_size=block_size).finish(9)
    for chunks in ((1,), (7, 1, 2), (64,)):
        logits, core = grouped_logits(decoder, PROMPTS, chunks, block_size, num_blocks=600)
        for tokens, ours, expected in zip(PROMPTS, logits, whole, strict=True):
            # Float32 in tiles and batches of other shapes; NaN of a freed block would be no small difference.
            assert (ours - expected).abs().max() < 1e-4
            with torch.inference_mode():
                assert (ours - theirs(torch.tensor([tokens])).logits[0]).abs().max() < 1e-4
        if block_size < 16 and chunks != (64,):
            left = [table.count(-1) for table in core.tables["2"]]
            assert [count > 0 for count in left] == [window is not None for window in WINDOWS[family]]


@pytest.mark.parametrize("family", MODELS)
def test_a_block_freed_too_early_is_seen(built, family):
    decoder, _ = built(family)
    with pytest.raises(IndexError):  # a table's -1 is no row of the pool
        grouped_logits(decoder, PROMPTS, (1,), 1, num_blocks=600, early=1)


def test_windows_save_blocks_and_a_block_is_smaller(built):
    decoder, _ = built("gemma2")
    whole, parts = decoder.new_kv(1, 4), decoder.new_kv(1, 4, decoder.layer_groups)
    assert parts.bytes_per_block * 2 == whole.bytes_per_block
    assert parts.pool.shape[0] == 2
    tokens = [prompt(5, 120)]
    _, core = grouped_logits(decoder, tokens, (1,), 4, num_blocks=60)
    # 30 blocks of the layers that see all, and 3 at most of those with a window of 7: not 60 of half the size.
    assert core.most == 30 + 3


def test_the_runner_takes_tables_of_groups_and_taps_follow_them(built):
    decoder, _ = built("gemma3_text")
    tokens = prompt(7, 30)
    found = []
    for grouped in (False, True):
        runner = TorchRunner(decoder, num_blocks=80, block_size=4, grouped=grouped)
        assert runner.group_windows == (WINDOWS["gemma3_text"] if grouped else (None,))
        core = Core(runner.kv.groups, runner.kv, 4)
        known, attention = list(tokens), []
        with Tap(sampling=False).attach(runner) as tap:
            for step in range(1, 26):
                start, num = (0, 30) if step == 1 else (len(known) - 1, 1)
                item = scheduled("r", tuple(known), start, num, core.schedule("r", start, num))
                result = runner.execute(StepPlan(step=step, now=0, token_budget=99, scheduled=[item]))
                known += result.tokens["r"]
                attention.append([layer.mass for layer in tap.last().attention])
        found.append((known, attention))
        tables = [layer.block_table for layer in tap.last().attention]
        assert [-1 in table for table in tables] == ([True, True, False] * 2 if grouped else [False] * 6)
    assert found[0][0] == found[1][0]
    for whole, parts in zip(found[0][1], found[1][1], strict=True):
        for one, other in zip(whole, parts, strict=True):
            assert torch.tensor(one).sub(torch.tensor(other)).abs().max() < 1e-5
