"""How a family's decoder block is built: the description that the one decoder reads.

A plain `Blueprint()` is Llama's block: RMS norms before attention and before a gated SiLU MLP, rotary
positions on whole heads, no biases. Every other family is a Blueprint with some fields changed
(`model/families.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Blueprint", "Experts", "Rotary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """How rotary angles depend on position (RoFormer, arXiv 2104.09864), beyond their base."""

    share: float = 1.0
    """Share of each head's dimensions that turn, from the first on; the others carry no position."""
    scaling: str = "none"
    """"none"; "linear": all angles divided by `factor`; "llama3" (Llama 3.1): slow angles divided, fast ones kept;
    "yarn" (arXiv 2309.00071): the same with a ramp over dimensions; "divided": each pair by a number of its own;
    "longrope" (arXiv 2402.13753): by that up to `original_length` tokens, and by another beyond."""
    factor: float = 1.0
    original_length: int = 0
    """The context length before scaling: llama3 and yarn measure wavelengths by it, longrope changes its list."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """llama3: angles that turn less than `low` times over `original_length` are divided, above `high` kept."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """yarn: the ramp runs between these numbers of turns over `original_length`."""
    truncate: bool = True
    """yarn: whether the ramp's ends are whole dimensions."""
    factors: tuple[float, ...] = ()
    """divided and longrope: what the angle of each pair is divided by."""
    long_factors: tuple[float, ...] = ()
    magnitude: float = 1.0
    """Cosines and sines are multiplied by this (the attention factor of yarn and longrope)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """A mixture of experts in place of the MLP (Mixtral, arXiv 2401.04088; OLMoE, arXiv 2409.02060)."""

    count: int
    used: int
    """Experts that each token goes to, those with the largest router weights."""
    size: int
    """The inner size of one expert."""
    normalized: bool
    """Whether the weights of the used experts are divided by their sum."""
    shared_size: int = 0
    """Inner size of an expert that every token goes to, through a sigmoid gate; 0 for none."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have a plain MLP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Blueprint:
    """One family's block, embedding and output. Defaults are Llama's."""

    norm: str = "rms"
    """"rms", "rms_plus_one" (the weight is what is added to one: Gemma) or "layer" (mean removed, with bias)."""
    norm_place: str = "before"
    """"before" attention and MLP; "after" them, inside the residual sum (OLMo-2); or "both" (Gemma 2 and 3)."""
    qk_norm: str = "none"
    """RMS norm of queries and keys before they turn: "none", per "head" (Qwen3), or over the "whole" row (OLMo-2)."""
    qkv_clip: float | None = None
    """Queries, keys and values are cut to this magnitude (OLMoE)."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    rotary: Rotary | None = Rotary()
    """None: a learned vector per position is added to the embedding instead (GPT-2)."""
    local_theta: float | None = None
    """Rotary base of windowed layers, whose angles are not scaled; None: they turn like the others (Gemma 3)."""
    windows: tuple[int | None, ...] = ()
    """Per layer, how many tokens a token sees, itself included; None: all. Empty: all in every layer."""
    attention_scale: float | None = None
    """What scores are multiplied with; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Scores become cap * tanh(score / cap)."""
    activation: str = "silu"
    """"silu" or "gelu_tanh"."""
    gated: bool = True
    """Whether the MLP is down(activation(gate) * up), or down(activation(up))."""
    experts: Experts | None = None
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    """Logits become cap * tanh(logit / cap)."""

    def window(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees; None: all before it."""
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers
