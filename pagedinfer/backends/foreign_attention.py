"""The attention function that modules of transformers call: paged, over the blocks of the step's requests.

transformers lets anyone register one (`AttentionInterface`). Which step is being computed is a context variable:
modules hand their keyword arguments on in many ways.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from pagedinfer.backends.attention import AttentionRule
from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.backends.torch_ops import StepContext, TorchOps

__all__ = ["STEP", "ForeignStep", "foreign_attention"]

_HARMLESS = {"position_ids", "cache_position"}  # tensors that modules hand on and attention needs not


@dataclass(slots=True)
class ForeignStep:
    """What the attention function needs while a step is computed, and what it saw."""

    inputs: ModelInputs
    kv: KVStorage | None
    """None: only to see the shapes."""
    contexts: dict[tuple[Any, ...], StepContext] = field(default_factory=dict)
    """By window, scale and softcap."""
    shapes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By layer: KV heads and their size."""
    windows: set[int] = field(default_factory=set)
    """Those that layers asked for."""
    complaint: str = ""
    """Why this attention cannot stand in for the module's own; "" where it can."""


STEP: ContextVar[ForeignStep] = ContextVar("step")
"""The step that is being computed."""


def foreign_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks, [1, H, T, D] to [1, T, H, D], over the blocks of the step's requests."""
    step, layer = STEP.get(), _numbered(module)
    unknown = [name for name, value in others.items() if torch.is_tensor(value) and name not in _HARMLESS]
    if attention_mask is not None or unknown:
        step.complaint = f"its attention needs {'a mask' if attention_mask is not None else unknown[0]}"
    elif not getattr(module, "is_causal", True):
        step.complaint = "its attention looks ahead"
    elif layer < 0 or key.shape != value.shape or key.shape[0] != 1:
        step.complaint = "its keys and values do not have one shape per numbered layer"
    window = sliding_window or getattr(module, "sliding_window", None) or None
    step.shapes[layer] = (key.shape[1], key.shape[3])
    if window is not None:
        step.windows.add(window)
    if step.complaint or step.kv is None:
        return torch.zeros_like(query).transpose(1, 2), None
    known = (window, scaling, softcap)
    ops = TorchOps()
    if known not in step.contexts:
        rule = AttentionRule(window=window, scale=scaling, softcap=softcap)
        step.contexts[known] = ops.prepare(step.inputs, step.kv, query.shape[1], rule)
    context = step.contexts[known]
    step.kv.write(layer, context.slot_mapping, torch.stack((key[0], value[0])).permute(2, 0, 1, 3))
    queries = query[0].transpose(0, 1)
    if step.inputs.watch is not None:
        step.inputs.watch(layer, queries, context.rule)
    attended = ops.attention(queries, layer, step.kv, context)
    return attended.view(1, query.shape[2], query.shape[1], -1), None


def _numbered(module: Any) -> int:
    """Return the number of an attention module's layer, or -1 where it has none."""
    layer = getattr(module, "layer_idx", None)
    return layer if isinstance(layer, int) else -1
