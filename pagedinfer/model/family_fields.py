"""The fields of a family's `config.json`, read into the parts of its blueprint: windows, experts, rotary positions.

A field that asks for what the decoder does not compute is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagedinfer.errors import ModelError
from pagedinfer.model.blueprint import Experts, Rotary
from pagedinfer.model.checked import Fields, config_error, finite, flag, shown, whole

__all__ = ["FamilyFields"]

_MAX_EXPERTS = 100_000  # of all layers together; each is three tensors to list

_MAX_LAYERS = 10_000
_MAX_EXPERTS = 100_000  # in all layers together; each has three tensors, and a claim is checked by name
_KINDS = ("full_attention", "sliding_attention")
# What a scaled rotary may say, beyond its type and base.
_SCALED: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
                       "truncate"}),
    "longrope": frozenset({"factor", "original_max_position_embeddings", "attention_factor", "short_factor",
                           "long_factor"}),
}  # fmt: skip


class FamilyFields(Fields):
    """What a family's blueprint is made from.

    Args:
        name: the model's.
        values: the config, with the family's defaults.
        theta: the family's usual rotary base.
        partial: whether the family's rotary may leave dimensions out.

    """

    def __init__(self, name: str, values: Mapping[str, Any], *, theta: float, partial: bool) -> None:
        super().__init__(name, values, "config.json")
        self._theta, self._partial = theta, partial
        self.layers = self.whole("num_hidden_layers", high=_MAX_LAYERS)

    def optional(self, key: str) -> float | None:
        """Return a positive number, or None where there is none."""
        return self.positive(key) if self.has(key) else None

    def positive(self, key: str) -> float:
        """Return a number above 0."""
        number = self.real(key)
        if number <= 0:
            raise self.error(f"{key} {number}; it must be positive")
        return number

    def error(self, text: str) -> ModelError:
        """Make the error of a field: "the model ... has" and the text."""
        return config_error(self._name, f"has {text}")

    # -- windows ------------------------------------------------------------------------------------------------

    def windows(self, usual: Sequence[bool]) -> tuple[int | None, ...]:
        """The window of each layer: by `layer_types`, else where `usual` says so; () where there is none."""
        kinds = self._values.get("layer_types")
        if kinds is not None:
            if not isinstance(kinds, list) or len(kinds) != self.layers:
                raise self.error(f"layer_types {shown(kinds)}; it must be a list of {self.layers}")
            others = [kind for kind in kinds if kind not in _KINDS]
            if others:
                raise self.error(f"layer_types with {shown(others[0])}; supported: {' and '.join(_KINDS)}")
            usual = [kind == "sliding_attention" for kind in kinds]
        has_window = self.flag("use_sliding_window", True) and self.has("sliding_window")
        if kinds is not None and any(usual) and not has_window:
            raise self.error('layer_types with "sliding_attention", but no sliding_window in use')
        if not any(usual) or not has_window:
            return ()
        window = self.whole("sliding_window")
        return tuple(window if slides else None for slides in usual)

    def every_layer(self) -> tuple[int | None, ...]:
        """The same window in all layers, or ()."""
        return self.windows([True] * self.layers)

    def layers_from(self, key: str) -> list[bool]:
        """Say of each layer whether it is this field's number or a later one."""
        first = whole(self._get(key, None), self._what(key))
        return [layer >= first for layer in range(self.layers)]

    # -- experts ------------------------------------------------------------------------------------------------

    def experts(
        self, count: str, size: str, *, shared: str = "", normalized: bool | None = None
    ) -> Experts | None:
        """Read a mixture of experts, given the fields that hold its numbers; None where all layers are dense."""
        listed = self._values.get("mlp_only_layers") or []
        if not isinstance(listed, list):
            raise self.error(f"mlp_only_layers {shown(listed)}; it must be a list of layers")
        plain = {whole(layer, self._what("mlp_only_layers")) for layer in listed}
        step = self.whole("decoder_sparse_step", 1)
        dense = tuple(layer for layer in range(self.layers) if layer in plain or (layer + 1) % step)
        if len(dense) == self.layers:
            return None
        found = self.whole(count, high=max(1, _MAX_EXPERTS // self.layers))
        used = self.whole("num_experts_per_tok")
        if used > found:
            raise self.error(f"num_experts_per_tok {used}, but {found} experts in {count}")
        return Experts(
            count=found,
            used=used,
            size=self.whole(size),
            normalized=self.flag("norm_topk_prob", False) if normalized is None else normalized,
            shared_size=self.whole(shared) if shared else 0,
            dense_layers=dense,
        )

    # -- rotary positions ---------------------------------------------------------------------------------------

    def theta(self) -> float:
        """The rotary base: top level (transformers 4), or inside `rope_parameters` (transformers 5)."""
        what = self._what("rope_theta")
        said = [self._values.get("rope_theta"), *(inner.get("rope_theta") for inner in self._rotaries())]
        found = {finite(base, what) for base in said if base is not None}
        if len(found) > 1:
            raise config_error(self._name, f"names two rotary bases, {sorted(found)}; there must be one")
        return found.pop() if found else self._theta

    def local_theta(self) -> float:
        """The rotary base of windowed layers, where they have their own."""
        inner = self._nested("sliding_attention")
        kind = inner.get("rope_type", "default")
        if kind != "default" or inner.keys() - {"rope_type", "rope_theta"}:
            raise self.error(
                f"rope_parameters with sliding_attention {shown(inner)}; windowed layers are not scaled here"
            )
        base = inner.get("rope_theta")
        base = (
            self.positive("rope_local_base_freq") if base is None else finite(base, self._what("rope_theta"))
        )
        if base <= 0:
            raise self.error(f"rope_theta {base} of windowed layers; it must be positive")
        return base

    def rotary(self) -> Rotary:
        """How positions turn queries and keys, beyond the base."""
        scaled = [inner for inner in self._rotaries() if _kind(inner) != "default"]
        inner = scaled[0] if scaled else {}
        if any(other != inner for other in scaled):
            raise self.error(f"two ways to scale rotary positions, {shown(scaled)}; there must be one")
        kind = _kind(inner)
        known = _SCALED.get(kind, frozenset()) | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        unknown = sorted(key for key in inner if key not in known and inner[key] is not None)
        if kind not in _SCALED or unknown:
            why = "" if kind not in _SCALED else f", without {shown(unknown[0])}"
            raise self.error(
                f"{self._rotary_key()} {shown(inner)}, which is not supported; types: {', '.join(_SCALED)}{why}"
            )
        share = self._share()
        if kind == "default":
            return Rotary(share=share)
        return self._scaled(kind, inner, share)

    def _scaled(self, kind: str, inner: Mapping[str, Any], share: float) -> Rotary:
        """Read the numbers of a scaling; a missing one is an error, except where transformers has a default."""

        def number(key: str, default: float | None = None) -> float:
            value = inner.get(key, default)
            found = finite(default if value is None else value, self._what(f"{key} in {self._rotary_key()}"))
            if found <= 0:
                raise self.error(f"{key} {found} in {self._rotary_key()}; it must be positive")
            return found

        longest = self.whole("max_position_embeddings", 2048)
        first = self.whole("original_max_position_embeddings", longest)
        length = int(number("original_max_position_embeddings", first))
        factor = number("factor", longest / length if kind == "longrope" else None)
        scaled = Rotary(share=share, scaling=kind, factor=factor, original_length=length)
        if kind == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if high <= low:
                raise self.error(f"low_freq_factor {low}, which is not below high_freq_factor {high}")
            return replace(scaled, low_freq_factor=low, high_freq_factor=high)
        if kind == "yarn":
            magnitude = number("attention_factor", 0.1 * math.log(max(factor, 1)) + 1)
            fast, slow = number("beta_fast", 32), number("beta_slow", 1)
            whole_dims = flag(inner, "truncate", True)
            return replace(scaled, beta_fast=fast, beta_slow=slow, truncate=whole_dims, magnitude=magnitude)
        if kind == "longrope":
            usual = math.sqrt(1 + math.log(max(factor, 1)) / math.log(max(length, 2)))
            short, long = (self._factors(inner, key, share) for key in ("short_factor", "long_factor"))
            magnitude = number("attention_factor", usual)
            return replace(scaled, factors=short, long_factors=long, magnitude=magnitude)
        return scaled

    def _factors(self, inner: Mapping[str, Any], key: str, share: float) -> tuple[float, ...]:
        """Read longrope's list of divisors, one for each pair of dimensions that turns."""
        size = (
            self.whole("head_dim")
            if self.has("head_dim")
            else self.whole("hidden_size") // self.whole("num_attention_heads")
        )
        pairs, listed = int(size * share) // 2, inner.get(key)
        if not isinstance(listed, list) or len(listed) != pairs:
            raise self.error(
                f"{key} {shown(listed)} in {self._rotary_key()}; it must be a list of {pairs} numbers"
            )
        factors = tuple(finite(factor, self._what(f"{key} in {self._rotary_key()}")) for factor in listed)
        if min(factors) <= 0:
            raise self.error(f"{key} with {min(factors)} in {self._rotary_key()}; all must be positive")
        return factors

    def _rotary_key(self) -> str:
        return "rope_scaling" if self.has("rope_scaling") else "rope_parameters"

    def _share(self) -> float:
        """Read the share of each head that turns."""
        said = [self._values.get("partial_rotary_factor")]
        said += [inner.get("partial_rotary_factor") for inner in self._rotaries()]
        what = self._what("partial_rotary_factor")
        shares = {finite(share, what) for share in said if share is not None} or {1.0}
        if len(shares) > 1 or not all(0 < share <= 1 for share in shares):
            raise self.error(f"partial_rotary_factor {sorted(shares)}; it must be one number up to 1")
        if shares != {1.0} and not self._partial:
            raise self.error(
                f"partial_rotary_factor {shares.pop()} in rope_parameters; its family turns whole heads"
            )
        return shares.pop()

    def _rotaries(self) -> list[Mapping[str, Any]]:
        """What is said of rotary positions, under both names; of a nested one the part of full layers."""
        found = []
        for key in ("rope_parameters", "rope_scaling"):
            inner = self._values.get(key)
            inner = {} if inner is None else inner
            if not isinstance(inner, Mapping):
                raise self.error(f"{key} {shown(inner)}; it must be an object")
            if inner.keys() & set(_KINDS):
                if "rope_local_base_freq" not in self._values:
                    raise self.error(f"{key} {shown(inner)}; its family has one kind of rotary positions")
                inner = self._nested("full_attention")
            found.append(inner)
        return found

    def _nested(self, kind: str) -> Mapping[str, Any]:
        inner = self._values.get("rope_parameters") or {}
        nested = inner.get(kind) if isinstance(inner, Mapping) else None
        nested = {} if nested is None else nested
        if not isinstance(nested, Mapping):
            raise self.error(f"rope_parameters with {kind} {shown(nested)}; it must be an object")
        return nested


def _kind(inner: Mapping[str, Any]) -> str:
    kind = str(inner.get("rope_type") or inner.get("type") or "default")
    return "longrope" if kind == "su" else kind
