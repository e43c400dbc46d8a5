"""Layer groups: which layers share a block table, so that layers with a window can let go of blocks that others keep.

A block has room for `num_rows` layers. Each group has at most that many, tables of its own, and fills the rows of its
blocks from the first on: a block serves any group, and all groups draw from one pool. Grouping by equal numbers of
layers, so that little room is left empty, is the design of vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LayerGroups"]

NEAR = 1.25
"""Kinds whose numbers of layers differ by less than this factor make one group each; a few rows then stay empty."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The groups of a model's layers.

    Attributes:
        group: of each layer its group.
        row: of each layer its place in a block; layers of one group have different ones.
        windows: of each group how many tokens its layers see; None: all. Group 0 sees most.
    """

    group: tuple[int, ...]
    row: tuple[int, ...]
    windows: tuple[int | None, ...]

    @classmethod
    def one(cls, num_layers: int) -> LayerGroups:
        """All layers in one group that keeps every block, whatever their windows."""
        return cls((0,) * num_layers, tuple(range(num_layers)), (None,))

    @classmethod
    def by_window(cls, windows: Sequence[int | None]) -> LayerGroups:
        """Groups of layers with equal windows, as many layers in each as the rarest kind has.

        `windows` are the layers'; their order within a kind stays.
        """
        kinds = sorted(set(windows), key=lambda window: (window is not None, -(window or 0)))
        layers = {kind: [i for i, window in enumerate(windows) if window == kind] for kind in kinds}
        counts = [len(each) for each in layers.values()]
        size = max(counts) if max(counts) < NEAR * min(counts) else min(counts)
        group, row, found = [0] * len(windows), [0] * len(windows), []
        for kind in kinds:
            for place, layer in enumerate(layers[kind]):
                if place % size == 0:
                    found.append(kind)
                group[layer], row[layer] = len(found) - 1, place % size
        return cls(tuple(group), tuple(row), tuple(found))

    @property
    def num_groups(self) -> int:
        """How many block tables a request has."""
        return len(self.windows)

    @property
    def num_rows(self) -> int:
        """How many layers a block has room for."""
        return max(self.row) + 1
