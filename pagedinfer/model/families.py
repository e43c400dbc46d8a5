"""Which families the decoder computes, and what each one's `config.json` says about its block.

One entry per family: what its fields mean when a config leaves them out, which fields its blueprint is made of
(all others that would change the model stay refused), and how. Defaults and meaning follow `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pagedinfer.model.blueprint import Blueprint
from pagedinfer.model.family_fields import FamilyFields

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How the configs of one family are read."""

    blueprint: Callable[[FamilyFields], Blueprint]
    reads: frozenset[str] = frozenset()
    """Fields that change the model and that `blueprint` understands."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values that a field may have; all others are refused."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a field means when the config does not have it."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The family's own names of common fields."""
    inner: int | None = None
    """The MLP's inner size, in hidden sizes, where a config does not give it."""
    theta: float = 10000.0
    """The usual rotary base."""
    partial: bool = False
    """Whether rotary positions may turn a part of each head."""


def _llama(fields: FamilyFields) -> Blueprint:
    bias = fields.flag("attention_bias", False)
    return Blueprint(
        rotary=fields.rotary(), qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False)
    )


def _mistral(fields: FamilyFields) -> Blueprint:
    return Blueprint(rotary=fields.rotary(), windows=fields.every_layer())


def _qwen2(fields: FamilyFields) -> Blueprint:
    windows = fields.windows(fields.layers_from("max_window_layers"))
    return Blueprint(rotary=fields.rotary(), qkv_bias=True, windows=windows)


def _qwen3(fields: FamilyFields) -> Blueprint:
    bias = fields.flag("attention_bias", False)
    return replace(_qwen2(fields), qk_norm="head", qkv_bias=bias, output_bias=bias)


def _gemma2(fields: FamilyFields) -> Blueprint:
    bias = fields.flag("attention_bias", False)
    return Blueprint(
        norm="rms_plus_one",
        norm_place="both",
        rotary=fields.rotary(),
        qkv_bias=bias,
        output_bias=bias,
        windows=fields.windows([layer % 2 == 0 for layer in range(fields.layers)]),
        attention_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        attention_softcap=fields.optional("attn_logit_softcapping"),
        logit_softcap=fields.optional("final_logit_softcapping"),
        activation="gelu_tanh",
        embedding_scale=fields.whole("hidden_size") ** 0.5,
    )


def _gemma3(fields: FamilyFields) -> Blueprint:
    every = fields.whole("sliding_window_pattern")
    return replace(
        _gemma2(fields),
        qk_norm="head",
        windows=fields.windows([(layer + 1) % every != 0 for layer in range(fields.layers)]),
        local_theta=fields.local_theta(),
    )


def _olmo2(fields: FamilyFields) -> Blueprint:
    bias = fields.flag("attention_bias", False)
    return Blueprint(
        norm_place="after", qk_norm="whole", rotary=fields.rotary(), qkv_bias=bias, output_bias=bias
    )


def _gpt2(fields: FamilyFields) -> Blueprint:
    return Blueprint(
        norm="layer",
        rotary=None,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
        gated=False,
        attention_scale=None if fields.flag("scale_attn_weights", True) else 1.0,
    )


def _mixtral(fields: FamilyFields) -> Blueprint:
    experts = fields.experts("num_local_experts", "intermediate_size", normalized=True)
    return replace(_mistral(fields), experts=experts)


def _qwen2_moe(fields: FamilyFields) -> Blueprint:
    late = fields.layers_from("max_window_layers")
    shared = "shared_expert_intermediate_size"
    return Blueprint(
        rotary=fields.rotary(),
        qkv_bias=fields.flag("qkv_bias", True),
        windows=fields.windows([layer % 2 == 0 and not late[layer] for layer in range(fields.layers)]),
        experts=fields.experts("num_experts", "moe_intermediate_size", shared=shared),
    )


def _qwen3_moe(fields: FamilyFields) -> Blueprint:
    bias = fields.flag("attention_bias", False)
    experts = fields.experts("num_experts", "moe_intermediate_size")
    return replace(_mistral(fields), qk_norm="head", qkv_bias=bias, output_bias=bias, experts=experts)


def _olmoe(fields: FamilyFields) -> Blueprint:
    bias = fields.flag("attention_bias", False)
    return Blueprint(
        qk_norm="whole",
        qkv_clip=fields.optional("clip_qkv"),
        rotary=fields.rotary(),
        qkv_bias=bias,
        output_bias=bias,
        experts=fields.experts("num_experts", "intermediate_size"),
    )


_WINDOWS = frozenset({"sliding_window", "use_sliding_window", "layer_types"})
_SLIDING = frozenset({"sliding_window"})
_BIAS = frozenset({"attention_bias"})
_EXPERTS = frozenset({"num_experts", "num_local_experts"})
_LONG = {"max_position_embeddings": 32768}
_VERY_LONG = {"max_position_embeddings": 131072}
_QWEN = _LONG | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = _VERY_LONG | {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
_TANH = ("gelu_pytorch_tanh",)

FAMILIES: dict[str, Family] = {
    "llama": Family(blueprint=_llama, reads=_BIAS | {"mlp_bias"}),
    "mistral": Family(
        blueprint=_mistral,
        reads=_SLIDING,
        defaults=_VERY_LONG | {"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "qwen2": Family(blueprint=_qwen2, reads=_WINDOWS, defaults=_QWEN),
    "qwen3": Family(blueprint=_qwen3, reads=_WINDOWS | _BIAS, defaults=_QWEN | {"head_dim": 128}),
    "gemma2": Family(
        blueprint=_gemma2,
        reads=_WINDOWS | _BIAS | {"attn_logit_softcapping", "final_logit_softcapping", "hidden_act"},
        only={"hidden_activation": _TANH},
        defaults=_GEMMA
        | {
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        blueprint=_gemma3,
        reads=_WINDOWS | _BIAS | {"final_logit_softcapping", "hidden_act"},
        only={"hidden_activation": _TANH},
        defaults=_GEMMA | {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
        theta=1e6,
    ),
    "phi3": Family(
        blueprint=_mistral,
        reads=_SLIDING | {"partial_rotary_factor"},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        partial=True,
    ),
    "olmo2": Family(blueprint=_olmo2, reads=_BIAS, defaults={"rms_norm_eps": 1e-5}),
    "gpt2": Family(
        blueprint=_gpt2,
        only={"activation_function": ("gelu_new", *_TANH)},
        defaults={
            "tie_word_embeddings": True,
            "n_positions": 1024,
            "layer_norm_epsilon": 1e-5,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        renamed={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        inner=4,
    ),
    "mixtral": Family(
        blueprint=_mixtral,
        reads=_EXPERTS | _SLIDING,
        defaults=_VERY_LONG
        | {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
        },
        theta=1e6,
    ),
    "qwen2_moe": Family(
        blueprint=_qwen2_moe,
        reads=_EXPERTS | _WINDOWS | {"qkv_bias"},
        defaults=_QWEN
        | {
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": Family(
        blueprint=_qwen3_moe,
        reads=_EXPERTS | _BIAS | {"sliding_window", "use_sliding_window"},
        defaults=_QWEN
        | {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "num_key_value_heads": 4,
        },
        renamed={"num_experts": "num_local_experts"},
    ),
    "olmoe": Family(
        blueprint=_olmoe,
        reads=_EXPERTS | _BIAS | {"clip_qkv"},
        defaults={
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
        },
        renamed={"num_experts": "num_local_experts"},
    ),
}
