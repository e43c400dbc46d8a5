"""The weights of one layer, and how they are read from a source by the model's blueprint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagedinfer.backends.torch_ops import BiasedLinear, DenseLinear, Linear, TorchOps
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.layout import NORMS, expected_shapes
from pagedinfer.model.weights import WeightSource

__all__ = ["Layer", "LayerReader", "MakeLinear", "Mixture", "Mlp", "Norm", "dense_linear"]

MakeLinear = Callable[[WeightSource, Sequence[str], torch.dtype, torch.device], Linear]
"""Makes one Linear of the named weights, stacked by output; decides how they are held."""


def dense_linear(
    source: WeightSource, names: Sequence[str], dtype: torch.dtype, device: torch.device
) -> DenseLinear:
    """Read the named weights one at a time into one dense matrix; at most one of them is held beside it."""
    if len(names) == 1:
        return DenseLinear(source.read(names[0], dtype).to(device))
    rows = [source.info(name).shape[0] for name in names]
    weight = torch.empty(sum(rows), source.info(names[0]).shape[1], dtype=dtype, device=device)
    first = 0
    for name, count in zip(names, rows, strict=True):
        weight[first : first + count] = source.read(name, dtype)
        first += count
    return DenseLinear(weight)


@dataclass(slots=True)
class Norm:
    """A norm's weight [C], and its bias [C] where it takes the mean away."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(slots=True)
class Mlp:
    """down(activate(up)), where `up` holds gate and up in one matrix if the MLP is gated."""

    ops: TorchOps
    up: Linear
    activate: Callable[[torch.Tensor], torch.Tensor]
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, C]."""
        return self.ops.linear(self.activate(self.ops.linear(x, self.up)), self.down)


@dataclass(slots=True)
class Mixture:
    """A mixture of experts: each token goes to the `used` ones that its router likes best."""

    ops: TorchOps
    router: Linear
    experts: list[Mlp]
    used: int
    normalized: bool
    shared: Mlp | None
    shared_gate: Linear | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, C]."""
        weights, chosen = self.ops.route(self.ops.linear(x, self.router), self.used, self.normalized)
        out = self.ops.experts(x, weights, chosen, self.experts)
        if self.shared is not None and self.shared_gate is not None:
            out += self.ops.linear(x, self.shared_gate).sigmoid() * self.shared(x)
        return out


@dataclass(slots=True)
class Layer:
    """The weights of one layer; a norm that the family does not have is None."""

    attention_norm: Norm | None
    qkv: Linear
    qk_norm: tuple[torch.Tensor, torch.Tensor] | None
    output: Linear
    after_attention: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Mixture
    after_mlp: Norm | None
    rule: int
    """Which of the model's kinds of attention this layer has."""


class LayerReader:
    """Reads tensors one after the other and counts their bytes."""

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        ops: TorchOps,
        make_linear: MakeLinear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._source, self._config, self._ops, self._make_linear = source, config, ops, make_linear
        self._dtype, self._device = dtype, device
        self._shapes = expected_shapes(config)
        self.nbytes = 0

    def layer(self, index: int, rule: int) -> Layer:
        """Read one layer."""
        prefix = f"model.layers.{index}."
        before, after, mlp_before, mlp_after = (
            prefix + name if name else "" for name in NORMS[self._config.blueprint.norm_place]
        )
        attention = prefix + "self_attn."
        return Layer(
            attention_norm=self.norm(before),
            qkv=self.linear(*(f"{attention}{part}_proj" for part in "qkv")),
            qk_norm=self._qk_norm(attention),
            output=self.linear(attention + "o_proj"),
            after_attention=self.norm(after),
            mlp_norm=self.norm(mlp_before),
            mlp=self._mixture(prefix + "mlp.")
            if self._has(prefix + "mlp.gate")
            else self._mlp(prefix + "mlp."),
            after_mlp=self.norm(mlp_after),
            rule=rule,
        )

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read one tensor."""
        tensor = self._source.read(name, dtype or self._dtype).to(self._device)
        self.nbytes += tensor.nbytes
        return tensor

    def linear(self, *names: str) -> Linear:
        """Read matrices into one, stacked by output, with their biases where the model has them."""
        linear = self._make_linear(
            self._source, [f"{name}.weight" for name in names], self._dtype, self._device
        )
        self.nbytes += linear.nbytes
        if f"{names[0]}.bias" not in self._shapes:
            return linear
        return BiasedLinear(linear, torch.cat([self.tensor(f"{name}.bias") for name in names]))

    def norm(self, name: str) -> Norm | None:
        """Read a norm; "" is none."""
        if not name:
            return None
        bias = self.tensor(f"{name}.bias") if f"{name}.bias" in self._shapes else None
        return Norm(self._norm_weight(f"{name}.weight"), bias)

    def _norm_weight(self, name: str) -> torch.Tensor:
        # What is added to one may be smaller than one's last bit, so the sum is held in float32.
        plus_one = self._config.blueprint.norm == "rms_plus_one"
        return self.tensor(name, torch.float32) + 1 if plus_one else self.tensor(name)

    def _qk_norm(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._has(prefix + "q_norm"):
            return None
        return self._norm_weight(prefix + "q_norm.weight"), self._norm_weight(prefix + "k_norm.weight")

    def _mlp(self, prefix: str) -> Mlp:
        return self._assemble(self._up(prefix), self.linear(prefix + "down_proj"))

    def _up(self, prefix: str) -> Linear:
        gated = self._config.blueprint.gated
        return self.linear(*([prefix + "gate_proj"] * gated), prefix + "up_proj")

    def _assemble(self, up: Linear, down: Linear) -> Mlp:
        plan, ops = self._config.blueprint, self._ops
        gated = ops.gelu_mul if plan.activation == "gelu_tanh" else ops.silu_mul
        return Mlp(ops, up, gated if plan.gated else ops.gelu, down)

    def _mixture(self, prefix: str) -> Mixture:
        plan = self._config.blueprint.experts
        assert plan is not None, f"{prefix} has a router, the blueprint no experts"
        router = self.linear(prefix + "gate")
        # All of one kind before the next: a checkpoint may hold them stacked, and keeps only its last tensor.
        ups = [self._up(f"{prefix}experts.{expert}.") for expert in range(plan.count)]
        downs = [self.linear(f"{prefix}experts.{expert}.down_proj") for expert in range(plan.count)]
        experts = [self._assemble(up, down) for up, down in zip(ups, downs, strict=True)]
        shared = self._mlp(prefix + "shared_expert.") if plan.shared_size else None
        gate = self.linear(prefix + "shared_expert_gate") if plan.shared_size else None
        return Mixture(self._ops, router, experts, plan.used, plan.normalized, shared, gate)

    def _has(self, name: str) -> bool:
        return f"{name}.weight" in self._shapes
