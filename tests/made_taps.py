"""Records as a tap makes them, of random numbers: attention over growing block tables, and tokens drawn."""

import random

import torch

from pagedinfer.config import SamplingParams
from pagedinfer.runner.explain import explain
from pagedinfer.runner.sampler import sample, uniform
from pagedinfer.trace.tap_records import LayerAttention, TapRecord

SIZE = 4
TEXTS = ["\n", " the", "a" * 40, "<b>", "&", "\x01", "é", "🙂"]


def attention_of(chance, position, layers=(0, 3), heads=3, window=None, table=None):
    """Random attention of the token at `position` over blocks of `SIZE`."""
    blocks, first = position // SIZE + 1, 0 if window is None else max(0, position + 1 - window)
    kept = []
    for layer in layers:
        mass = []
        for _ in range(heads):
            row = [0.0 if (i + 1) * SIZE <= first else chance.random() ** 3 for i in range(blocks)]
            mass.append(tuple(share / sum(row) for share in row))
        ids = list(table or chance.sample(range(1000), blocks))[:blocks]
        ids[: first // SIZE] = [-1] * (first // SIZE)
        kept.append(LayerAttention(layer, window, first, tuple(ids), tuple(range(heads)), tuple(mass)))
    return tuple(kept)


def choice_of(seed=1, vocab=300, top=10, texts=True, changed=(), index=4, **settings):
    """A row of random logits, changed as told, sampled and told."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(vocab, generator=generator)
    shaped = [("model", logits)]
    for name in changed:
        row = shaped[-1][1].clone()
        if name == "mask":
            row[row.topk(4).indices] = -torch.inf
        else:
            row[::3] -= 1.0
        shaped.append((name, row))
    params, u = SamplingParams(**settings), uniform(seed, 0)
    token = sample(shaped[-1][1][None], [params], [u]).tokens[0]
    return explain(
        shaped, params, output_index=index, uniform=u, token_id=token, top=top,
        text=lambda token: TEXTS[token % len(TEXTS)] if texts else "",
    )  # fmt: skip


def tapped_run(steps=range(41)):
    """Records of A, and of B from step 10 on; A's first step chooses no token, and step 6 is not kept."""
    chance, tables = random.Random(1), {"A": range(100, 160), "B": range(200, 260)}
    records = []
    for step in steps:
        for rid, start in (("A", 0), ("B", 10)):
            if step >= start and step != 6:
                position = 2 + 2 * (step - start)
                choices = (choice_of(seed=step + 1, index=step - start, top_p=0.9),) if step else ()
                tokens = tuple(TEXTS[i % len(TEXTS)] for i in range(position + 1))
                attention = attention_of(chance, position, table=tables[rid])
                records.append(TapRecord(step, rid, SIZE, position, attention, choices, tokens))
    return records
