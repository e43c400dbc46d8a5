"""Fields of `ModelConfig`, read from the two places where checkpoints keep them.

A field that asks for what the decoder does not compute is refused by name; the tables list the values that
change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pagedinfer.errors import UnknownArchitecture
from pagedinfer.model.blueprint import Blueprint
from pagedinfer.model.checked import Fields, config_error, printable, shown, texts, whole
from pagedinfer.model.families import FAMILIES, Family
from pagedinfer.model.family_fields import FamilyFields

__all__ = ["config_error", "eos_ids", "first_id", "gguf_fields", "hf_fields", "refuse_architecture"]

# Architectures of GGUF files, which keep biases and norms of their own as tensors.
_GGUF_FAMILIES = {
    "llama": Blueprint(),
    "qwen2": Blueprint(qkv_bias=True),
    "qwen3": Blueprint(qk_norm="head"),
}
_MAX_LAYERS = 10_000

_HF_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
)

# Fields of a Hugging Face config that change what the model computes, with the values that change nothing.
_HF_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "quantization_config": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "use_qk_norm": (False,),
    "clip_qkv": (),
    "use_bidirectional_attention": (False,),
    "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
}

# GGUF metadata of the same kind, below the architecture's prefix. Keys that are in neither list are refused.
_GGUF_NEUTRAL: dict[str, tuple[object, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.finetuned": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.layer_norm_epsilon": (0,),
    "use_parallel_residual": (False,),
    "logit_scale": (1,),
    "residual_scale": (1,),
    "embedding_scale": (1,),
    "tensor_data_layout": ("Meta AI original pth", "Meta AI original"),
}
_GGUF_READ = frozenset(
    {
        "vocab_size",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.original_context_length",  # means nothing without a scaling type, which is refused
    }
)


def hf_fields(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    *,
    name: str | None,
    eos_token_ids: Iterable[int],
) -> dict[str, Any]:
    """Read `config.json` and `generation_config.json`; see `ModelConfig.from_hf`."""
    name = printable(name or str(config.get("_name_or_path") or "model"))
    config = _flat(name, config)
    architecture = str(config.get("model_type", "missing"))
    refuse_architecture(name, architecture)
    family = FAMILIES[architecture]
    config = _completed(config, family)
    neutral = {key: allowed for key, allowed in _HF_NEUTRAL.items() if key not in family.reads}
    _refuse(name, config, neutral | dict(family.only))
    if "layer_types" not in family.reads:
        _refuse_layer_types(name, config.get("layer_types"))
    fields = FamilyFields(name, config, theta=family.theta, partial=family.partial)
    heads = fields.whole("num_attention_heads")
    hidden = fields.whole("hidden_size")
    generation = generation_config or {}
    return {
        "architecture": architecture,
        "name": name,
        "vocab_size": fields.whole("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.whole("intermediate_size", family.inner and family.inner * hidden),
        "num_layers": fields.layers,
        "num_heads": heads,
        "num_kv_heads": fields.whole("num_key_value_heads", heads),
        "head_dim": _head_dim(fields, "head_dim", name, hidden, heads),
        "rope_theta": fields.theta(),
        "max_position_embeddings": fields.whole("max_position_embeddings", 2048),
        "rms_norm_eps": fields.real("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        "bos_token_id": first_id(config.get("bos_token_id"), generation.get("bos_token_id")),
        "eos_token_ids": eos_ids(
            config.get("eos_token_id"), generation.get("eos_token_id"), tuple(eos_token_ids)
        ),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        "blueprint": family.blueprint(fields),
    }


def gguf_fields(metadata: Mapping[str, Any], *, tie_word_embeddings: bool, dtype: str) -> dict[str, Any]:
    """Read GGUF metadata; see `ModelConfig.from_gguf`."""
    name = printable(str(metadata.get("general.name") or metadata.get("general.basename") or "model"))
    architecture = str(metadata.get("general.architecture", "missing"))
    refuse_architecture(name, architecture, _GGUF_FAMILIES)
    prefix = architecture + "."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    unknown = sorted(own.keys() - _GGUF_READ - _GGUF_NEUTRAL.keys())
    if unknown:
        raise config_error(name, f"sets {prefix}{printable(unknown[0])}, which pagedinfer does not know")
    _refuse(name, own, _GGUF_NEUTRAL, prefix=prefix)
    fields = Fields(name, own, "the GGUF metadata", prefix)
    heads = fields.uniform("attention.head_count")
    hidden = fields.whole("embedding_length")
    head_dim = _head_dim(fields, "attention.key_length", name, hidden, heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.whole(key, head_dim) != head_dim:
            raise config_error(
                name, f"has {prefix}{key} {own[key]} and head size {head_dim}; they must be equal"
            )
    return {
        "architecture": architecture,
        "name": name,
        "vocab_size": _gguf_vocab_size(metadata, fields),
        "hidden_size": hidden,
        "intermediate_size": fields.uniform("feed_forward_length"),
        "num_layers": fields.whole("block_count", high=_MAX_LAYERS),
        "num_heads": heads,
        "num_kv_heads": fields.uniform("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_theta": fields.real("rope.freq_base", 10000.0),
        "max_position_embeddings": fields.whole("context_length"),
        # The file holds a float32 (9.99999975e-06); the model was made with the decimal (1e-05).
        "rms_norm_eps": float(f"{fields.real('attention.layer_norm_rms_epsilon'):.6g}"),
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": first_id(metadata.get("tokenizer.ggml.bos_token_id")),
        "eos_token_ids": eos_ids(
            *(metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
        ),
        "dtype": dtype,
        "blueprint": _GGUF_FAMILIES[architecture],
    }


def eos_ids(*sources: object) -> tuple[int, ...]:
    """Unite end ids: each source is an id, a list of ids or None.

    Raises:
        ModelError: a source is something else, or a negative number.

    """
    found: set[int] = set()
    for source in sources:
        ids = source if isinstance(source, (list, tuple)) else [] if source is None else [source]
        found.update(whole(token_id, "eos_token_id") for token_id in ids)
    return tuple(sorted(found))


def refuse_architecture(name: str, architecture: str, supported: Iterable[str] = FAMILIES) -> None:
    """Raise for a family whose decoder we do not have.

    Raises:
        UnknownArchitecture: naming the families that are supported.

    """
    if architecture not in supported:
        raise UnknownArchitecture(
            f'the model "{name}" has architecture {shown(architecture)}; supported: {", ".join(supported)}'
        )


def _completed(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Add what a family's config leaves out: common names for its own, then its defaults."""
    own = {
        common: values[key]
        for values in (family.defaults, config)
        for common, key in family.renamed.items()
        if values.get(key) is not None
    }
    given = {key: value for key, value in config.items() if value is not None or key not in own}
    return {**family.defaults, **own, **given}


def _refuse_layer_types(name: str, layer_types: object) -> None:
    if not isinstance(layer_types, (list, type(None))):
        raise config_error(name, f"has layer_types {shown(layer_types)}; it must be a list")
    others = [kind for kind in layer_types or () if kind != "full_attention"]
    if others:
        raise config_error(
            name, f'has layer_types with {shown(others[0])}; only "full_attention" is supported'
        )


def _refuse(
    name: str, config: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], *, prefix: str = ""
) -> None:
    """Raise for the first field whose value asks for something that the decoder does not do."""
    for key, allowed in neutral.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            choices = " or ".join([*(repr(item) for item in allowed), "none"])
            raise config_error(
                name, f"has {prefix}{key} {shown(value)}, which is not supported; allowed: {choices}"
            )


def _head_dim(fields: Fields, key: str, name: str, hidden: int, heads: int) -> int:
    """Read the head size, which is a number of its own; without one the heads share the hidden size."""
    if fields.has(key):
        return fields.whole(key)
    if hidden % heads:
        raise config_error(
            name, f"has hidden size {hidden} and {heads} heads, which do not divide, and no head_dim"
        )
    return hidden // heads


def first_id(*candidates: object) -> int | None:
    """Return the first id that is given; raises ModelError where it is none."""
    given = [token_id for token_id in candidates if token_id is not None]
    return whole(given[0], "bos_token_id") if given else None


def _gguf_vocab_size(metadata: Mapping[str, Any], fields: Fields) -> int:
    key = "tokenizer.ggml.tokens"
    return len(texts(metadata[key], key)) if metadata.get(key) else fields.whole("vocab_size")


def _flat(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lift the fields of a nested `text_config`; it wins, but must not contradict a size at the top."""
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, Mapping):
        raise config_error(name, f"has text_config {shown(nested)}; it must be an object")
    inner = {key: value for key, value in nested.items() if value is not None or key not in config}
    for key in _HF_SIZES:
        if config.get(key) is not None and inner.get(key) is not None and config[key] != inner[key]:
            raise config_error(
                name,
                f"has {key} {shown(config[key])} and, in text_config, {shown(inner[key])}; which counts?",
            )
    return {**config, **inner}
