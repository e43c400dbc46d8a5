"""Angles of rotary positions, plain and stretched to contexts longer than a model was trained on."""

from __future__ import annotations

import math

import torch

from pagedinfer.backends.torch_ops import rope_frequencies
from pagedinfer.model.blueprint import Rotary

__all__ = ["scaled_frequencies"]


def scaled_frequencies(
    rotary: Rotary, head_dim: int, theta: float, device: torch.device | str = "cpu", *, max_len: int = 0
) -> torch.Tensor:
    """Angle per position of each pair of dimensions that turns, [int(head_dim * share) // 2] float32.

    `max_len` is the most tokens of a request. By it longrope takes one of its lists for all requests: were it by
    the length reached, all earlier keys would have to be computed again at the border.
    """
    plain = rope_frequencies(int(head_dim * rotary.share), theta, device)
    if rotary.scaling == "linear":
        return plain / rotary.factor
    if rotary.scaling in ("divided", "longrope"):
        long = rotary.scaling == "longrope" and max_len > rotary.original_length
        factors = rotary.long_factors if long else rotary.factors
        return plain / torch.tensor(factors, device=plain.device)
    if rotary.scaling == "none":
        return plain
    kept = _llama3_kept(rotary, plain) if rotary.scaling == "llama3" else _yarn_kept(rotary, plain, theta)
    return plain * (kept + (1 - kept) / rotary.factor)


def _llama3_kept(rotary: Rotary, plain: torch.Tensor) -> torch.Tensor:
    """How much of each angle stays, 0 to 1: by its turns over the original length."""
    turns = rotary.original_length * plain / (2 * math.pi)
    return ((turns - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor)).clamp(0, 1)


def _yarn_kept(rotary: Rotary, plain: torch.Tensor, theta: float) -> torch.Tensor:
    """The same in a straight line over the pairs, between two numbers of turns over the original length."""
    dims = 2 * len(plain)

    def pair(turns: float) -> float:
        """Return which pair, as a real number, turns so often over the original length."""
        return dims * math.log(rotary.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair(rotary.beta_fast), pair(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    steps = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    return 1 - ((steps - low) / ((high - low) or 0.001)).clamp(0, 1)
