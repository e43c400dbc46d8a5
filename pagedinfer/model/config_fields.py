"""Fields of `ModelConfig`, read from the two places where checkpoints keep them.

A field that asks for what the decoder does not compute is refused by name; the tables list the values that
change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pagedinfer.errors import ModelError

__all__ = ["config_error", "eos_ids", "gguf_fields", "hf_fields", "refuse_architecture"]

_SUPPORTED = ("llama",)

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
    name = name or str(config.get("_name_or_path") or "model")
    architecture = str(config.get("model_type", "missing"))
    refuse_architecture(name, architecture)
    _refuse(name, config, _HF_NEUTRAL)
    layer_types = set(config.get("layer_types") or ()) - {"full_attention"}
    if layer_types:
        raise config_error(name, f'has layer_types {sorted(layer_types)}; only "full_attention" is supported')
    get = _required(config, name, "config.json")
    heads = int(get("num_attention_heads"))
    hidden = int(get("hidden_size"))
    generation = generation_config or {}
    return {
        "architecture": architecture,
        "name": name,
        "vocab_size": int(get("vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": int(get("intermediate_size")),
        "num_layers": int(get("num_hidden_layers")),
        "num_heads": heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or _divide(name, hidden, heads)),
        "rope_theta": _hf_rope_theta(name, config),
        "max_position_embeddings": int(config.get("max_position_embeddings") or 2048),
        "rms_norm_eps": float(config.get("rms_norm_eps") or 1e-6),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "bos_token_id": _first_id(config.get("bos_token_id"), generation.get("bos_token_id")),
        "eos_token_ids": eos_ids(
            config.get("eos_token_id"), generation.get("eos_token_id"), tuple(eos_token_ids)
        ),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    }


def gguf_fields(metadata: Mapping[str, Any], *, tie_word_embeddings: bool, dtype: str) -> dict[str, Any]:
    """Read GGUF metadata; see `ModelConfig.from_gguf`."""
    name = str(metadata.get("general.name") or metadata.get("general.basename") or "model")
    architecture = str(metadata.get("general.architecture", "missing"))
    refuse_architecture(name, architecture)
    prefix = architecture + "."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    unknown = sorted(own.keys() - _GGUF_READ - _GGUF_NEUTRAL.keys())
    if unknown:
        raise config_error(name, f"sets {prefix}{unknown[0]}, which pagedinfer does not know")
    _refuse(name, own, _GGUF_NEUTRAL, prefix=prefix)
    get = _required(own, name, "the GGUF metadata", prefix=prefix)
    heads = _uniform(name, prefix + "attention.head_count", get("attention.head_count"))
    hidden = int(get("embedding_length"))
    head_dim = int(own.get("attention.key_length") or _divide(name, hidden, heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(own.get(key, head_dim)) != head_dim:
            raise config_error(
                name, f"has {prefix}{key} {own[key]} and head size {head_dim}; they must be equal"
            )
    tokens = metadata.get("tokenizer.ggml.tokens")
    return {
        "architecture": architecture,
        "name": name,
        "vocab_size": len(tokens) if tokens else int(get("vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": _uniform(name, prefix + "feed_forward_length", get("feed_forward_length")),
        "num_layers": int(get("block_count")),
        "num_heads": heads,
        "num_kv_heads": _uniform(
            name, prefix + "attention.head_count_kv", own.get("attention.head_count_kv", heads)
        ),
        "head_dim": head_dim,
        "rope_theta": float(own.get("rope.freq_base", 10000.0)),
        "max_position_embeddings": int(get("context_length")),
        # The file holds a float32 (9.99999975e-06); the model was made with the decimal (1e-05).
        "rms_norm_eps": float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        "tie_word_embeddings": tie_word_embeddings,
        "bos_token_id": _first_id(metadata.get("tokenizer.ggml.bos_token_id")),
        "eos_token_ids": eos_ids(
            *(metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
        ),
        "dtype": dtype,
    }


def eos_ids(*sources: object) -> tuple[int, ...]:
    """Unite end ids: each source is an id, a list of ids or None.

    Raises:
        ModelError: a source is something else.

    """
    found: set[int] = set()
    for source in sources:
        if isinstance(source, int):
            found.add(source)
        elif isinstance(source, (list, tuple)):
            found.update(int(token_id) for token_id in source)
        elif source is not None:
            raise ModelError(f"eos_token_id is {source!r}; it must be an id, a list of ids or null")
    return tuple(sorted(found))


def config_error(name: str, text: str) -> ModelError:
    """Make the error of a config field: the model's name, and what is wrong."""
    return ModelError(f'the model "{name}" {text}')


def refuse_architecture(name: str, architecture: str) -> None:
    """Raise for a family whose decoder we do not have.

    Raises:
        ModelError: naming the families that are supported.

    """
    if architecture not in _SUPPORTED:
        raise config_error(name, f'has architecture "{architecture}"; supported: {", ".join(_SUPPORTED)}')


def _refuse(
    name: str, config: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]], *, prefix: str = ""
) -> None:
    """Raise for the first field whose value asks for something that the decoder does not do."""
    for key, allowed in neutral.items():
        value = config.get(key)
        if value is not None and value not in allowed:
            choices = " or ".join([*(repr(item) for item in allowed), "none"])
            raise config_error(
                name, f"has {prefix}{key} {value!r}, which is not supported; allowed: {choices}"
            )


def _required(config: Mapping[str, Any], name: str, where: str, *, prefix: str = "") -> Callable[[str], Any]:
    def get(key: str) -> Any:
        value = config.get(key)
        if value is None:
            raise config_error(name, f"lacks {prefix}{key} in {where}")
        return value

    return get


def _divide(name: str, hidden: int, heads: int) -> int:
    if heads <= 0 or hidden % heads:
        raise config_error(
            name, f"has hidden size {hidden} and {heads} heads, which do not divide, and no head_dim"
        )
    return hidden // heads


def _uniform(name: str, key: str, value: Any) -> int:
    """Reduce a GGUF number that may be a list with one entry per layer; all must agree."""
    values = set(value) if isinstance(value, (list, tuple)) else {value}
    if len(values) != 1:
        raise config_error(name, f"has {key} that differs by layer ({sorted(values)}); it must be one number")
    return int(values.pop())


def _first_id(*candidates: object) -> int | None:
    return next((token_id for token_id in candidates if isinstance(token_id, int)), None)


def _hf_rope_theta(name: str, config: Mapping[str, Any]) -> float:
    """Find the rotary base: top level (transformers 4), or inside `rope_parameters` (transformers 5)."""
    found = {float(config["rope_theta"])} if config.get("rope_theta") is not None else set()
    for key in ("rope_parameters", "rope_scaling"):
        inner = config.get(key) or {}
        kind = inner.get("rope_type", inner.get("type", "default"))
        extra = {
            field: value for field, value in inner.items() if field not in ("rope_type", "type", "rope_theta")
        }
        if kind != "default" or extra not in (
            {},
            {"partial_rotary_factor": 1},
            {"partial_rotary_factor": None},
        ):
            raise config_error(
                name,
                f"has {key} {dict(inner)!r}; scaled or partial rotary positions are not supported, "
                'only rope_type "default" with rope_theta',
            )
        if inner.get("rope_theta") is not None:
            found.add(float(inner["rope_theta"]))
    if len(found) > 1:
        raise config_error(name, f"names two rotary bases, {sorted(found)}; there must be one")
    return found.pop() if found else 10000.0
