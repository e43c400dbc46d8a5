"""Names and shapes of a model's tensors: one set of names for all families, and where checkpoints keep them.

The names are Hugging Face's for a Llama (`model.layers.0.self_attn.q_proj.weight`), each matrix [out, in] and one
for each part: what a family stores fused, stacked or transposed is taken apart here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pagedinfer.model.config import ModelConfig

__all__ = ["EMBEDDING", "NORMS", "OUTPUT", "POSITIONS", "Place", "expected_shapes", "find_places"]

EMBEDDING = "model.embed_tokens.weight"
POSITIONS = "model.position_embeddings.weight"
OUTPUT = "lm_head.weight"

NORMS: dict[str, tuple[str, str, str, str]] = {
    "before": ("input_layernorm", "", "post_attention_layernorm", ""),
    "after": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
             "post_feedforward_layernorm"),
}  # fmt: skip
"""Names of a layer's norms by their place: before and after attention, before and after the MLP; "" for none."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this config has; linear weights are [out, in]."""
    plan, hidden = config.blueprint, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    if plan.rotary is None:
        shapes[POSITIONS] = (config.max_position_embeddings, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config, layer)}
    shapes["model.norm.weight"] = (hidden,)
    if plan.norm == "layer":
        shapes["model.norm.bias"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[OUTPUT] = (config.vocab_size, hidden)
    return shapes


def _layer_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    plan, hidden = config.blueprint, config.hidden_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    before, after, mlp_before, mlp_after = NORMS[plan.norm_place]
    yield from _norm(before, hidden, plan.norm)
    for part, rows in (("q", query), ("k", kv), ("v", kv)):
        yield from _matrix(f"self_attn.{part}_proj", rows, hidden, plan.qkv_bias)
    if plan.qk_norm != "none":
        for part, rows in (("q", query), ("k", kv)):
            yield f"self_attn.{part}_norm.weight", (rows if plan.qk_norm == "whole" else config.head_dim,)
    yield from _matrix("self_attn.o_proj", hidden, query, plan.output_bias)
    yield from _norm(after, hidden, plan.norm)
    yield from _norm(mlp_before, hidden, plan.norm)
    if plan.experts is None or not plan.has_experts(layer):
        yield from _mlp("mlp.", config, config.intermediate_size)
    else:
        yield "mlp.gate.weight", (plan.experts.count, hidden)
        for expert in range(plan.experts.count):
            yield from _mlp(f"mlp.experts.{expert}.", config, plan.experts.size)
        if plan.experts.shared_size:
            yield from _mlp("mlp.shared_expert.", config, plan.experts.shared_size)
            yield "mlp.shared_expert_gate.weight", (1, hidden)
    yield from _norm(mlp_after, hidden, plan.norm)


def _mlp(prefix: str, config: ModelConfig, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    plan, hidden = config.blueprint, config.hidden_size
    for part in ("gate_proj", "up_proj") if plan.gated else ("up_proj",):
        yield from _matrix(prefix + part, inner, hidden, plan.mlp_bias)
    yield from _matrix(prefix + "down_proj", hidden, inner, plan.mlp_bias)


def _matrix(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, size: int, kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    if name:
        yield f"{name}.weight", (size,)
        if kind == "layer":
            yield f"{name}.bias", (size,)


# -- where a folder keeps them --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where one of our tensors lies in a checkpoint: a stored tensor, or a part of one."""

    stored: str
    shape: tuple[int, ...]
    """Of our tensor."""
    transposed: bool = False
    """The stored matrix is [in, out]."""
    expert: int | None = None
    """Which entry of a stack."""
    first_row: int | None = None
    """Where our rows begin, once transposed; None: all rows are ours."""


_Rules = tuple[tuple[str, str], ...]
_MIXTRAL: _Rules = (
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"(\.experts\.\d+\.)w1\.", r"\1gate_proj."),
    (r"(\.experts\.\d+\.)w2\.", r"\1down_proj."),
    (r"(\.experts\.\d+\.)w3\.", r"\1up_proj."),
)
_GPT2: _Rules = (
    (r"^transformer\.", ""),
    (r"^wte\.", "model.embed_tokens."),
    (r"^wpe\.", "model.position_embeddings."),
    (r"^ln_f\.", "model.norm."),
    (r"^h\.(\d+)\.ln_1\.", r"model.layers.\1.input_layernorm."),
    (r"^h\.(\d+)\.ln_2\.", r"model.layers.\1.post_attention_layernorm."),
    (r"^h\.(\d+)\.attn\.c_attn\.", r"model.layers.\1.self_attn.qkv_proj."),
    (r"^h\.(\d+)\.attn\.c_proj\.", r"model.layers.\1.self_attn.o_proj."),
    (r"^h\.(\d+)\.mlp\.c_fc\.", r"model.layers.\1.mlp.up_proj."),
    (r"^h\.(\d+)\.mlp\.c_proj\.", r"model.layers.\1.mlp.down_proj."),
)
_GEMMA3: _Rules = (
    (r"^language_model\.model\.", "model."),
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
)
_RENAMED = {"gpt2": _GPT2, "mixtral": _MIXTRAL, "gemma3_text": _GEMMA3}
_TRANSPOSED = {"gpt2": r"\.(qkv|o|up|down)_proj\.weight$"}
# Masks that old GPT-2 files saved, and what sees pictures in front of a Gemma 3 that reads text.
_DROPPED = {
    "gpt2": r"^(transformer\.)?h\.\d+\.attn\.(masked_)?bias$",
    "gemma3_text": r"^(model\.)?(vision_tower|multi_modal_projector)\.",
}


def find_places(config: ModelConfig, stored: Mapping[str, tuple[int, ...]]) -> dict[str, list[Place]]:
    """Find our tensors among the stored ones (name to shape): our name to its places, of which there should be one.

    A stored tensor that means nothing to the family keeps its name, so that a check can report it.
    """
    found: dict[str, list[Place]] = {}
    dropped = _DROPPED.get(config.architecture, r"(?!)")
    transposed = _TRANSPOSED.get(config.architecture, r"(?!)")
    for name, shape in stored.items():
        if re.search(dropped, name):
            continue
        ours = name
        for pattern, replacement in _RENAMED.get(config.architecture, ()):
            ours = re.sub(pattern, replacement, ours)
        turned = len(shape) == 2 and re.search(transposed, ours) is not None
        place = Place(name, shape[::-1] if turned else shape, turned)
        for part, where in _parts(config, ours, place):
            found.setdefault(part, []).append(where)
    return found


def _parts(config: ModelConfig, name: str, place: Place) -> Iterator[tuple[str, Place]]:
    """Take a fused or stacked tensor apart; any other, or one of another size, is itself."""
    stack = re.fullmatch(r"(.+\.mlp\.experts\.)(gate_up|down)_proj", name)
    if stack and config.blueprint.experts and len(place.shape) == 3:
        for expert in range(place.shape[0]):
            entry = replace(place, shape=place.shape[1:], expert=expert)
            yield from _rows(config, f"{stack[1]}{expert}.{stack[2]}_proj.weight", entry)
    else:
        yield from _rows(config, name, place)


def _rows(config: ModelConfig, name: str, place: Place) -> Iterator[tuple[str, Place]]:
    fused = re.fullmatch(r"(.+\.)(qkv|gate_up)_proj\.(weight|bias)", name)
    if fused and fused[2] == "qkv":
        kv = config.num_kv_heads * config.head_dim
        sizes = {"q": config.num_heads * config.head_dim, "k": kv, "v": kv}
    elif fused:
        sizes = {"gate": place.shape[0] // 2, "up": place.shape[0] // 2}
    if not fused or sum(sizes.values()) != place.shape[0]:
        yield name, place
        return
    first = 0
    for part, size in sizes.items():
        shape = (size, *place.shape[1:])
        yield f"{fused[1]}{part}_proj.{fused[3]}", replace(place, shape=shape, first_row=first)
        first += size
