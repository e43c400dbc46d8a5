"""The KV pool of the torch backend: one tensor that holds every block of every layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from pagedinfer.backends.layer_groups import LayerGroups
from pagedinfer.errors import ConfigError, EngineClosed

__all__ = ["BlockData", "KVStorage"]

BlockData: TypeAlias = tuple[torch.Tensor, ...]
"""Whole blocks outside the pool: each tensor that a block consists of, [num_layers, number of blocks, ...]."""


class KVStorage:
    """Keys and values of `num_blocks` blocks.

    Layout [num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim], keys before values. A token's keys
    and values of a layer are one contiguous row, so a step writes a layer with one scatter and decode
    attention reads it with one gather. Slot `block_id * block_size + offset` is a row of the layer seen as
    [num_slots, 2, num_kv_heads, head_dim].

    With `groups` a block has room for fewer layers than the model has (`num_layers` counts that room): layers of
    different groups use the same place, each in blocks of its own. Layers are still named by the model's numbers.

    Raises:
        ConfigError: the machine has no memory for a pool of this size.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        groups: LayerGroups | None = None,
    ) -> None:
        self.groups = groups or LayerGroups.one(num_layers)
        assert self.groups.num_rows == num_layers, f"{num_layers} layers to a block, {self.groups}"
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim, self.dtype = num_kv_heads, head_dim, dtype
        self._use(self._new_pool(num_blocks, device))

    def _new_pool(self, num_blocks: int, device: torch.device | str) -> torch.Tensor:
        shape = (self.num_layers, num_blocks, self.block_size, 2, self.num_kv_heads, self.head_dim)
        try:
            with torch.inference_mode(False):  # it is written in and out of that mode
                return torch.zeros(shape, dtype=self.dtype, device=device)
        except (RuntimeError, TypeError) as error:  # torch's word for a size beyond 64 bits is TypeError
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks needs {num_blocks * self.bytes_per_block:,} bytes, "
                "more than this machine gives; ask for fewer blocks."
            ) from error

    def _use(self, pool: torch.Tensor) -> None:
        self._pool: torch.Tensor | None = pool
        self._layers: list[torch.Tensor] = [
            layer.view(-1, 2, self.num_kv_heads, self.head_dim) for layer in pool
        ]

    @property
    def pool(self) -> torch.Tensor:
        """The whole tensor, in the layout of the class.

        Raises:
            EngineClosed: after `close`.
        """
        if self._pool is None:
            raise EngineClosed("the KV pool was freed by close(); make a new engine.")
        return self._pool

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers that it has room for, keys and values."""
        return 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of the pool; 0 once it is closed."""
        return 0 if self._pool is None else self._pool.nbytes

    def slots(self, layer: int) -> torch.Tensor:
        """A view of one layer, [num_slots, 2, num_kv_heads, head_dim]."""
        return self._layers[self.groups.row[layer]]

    def heads(self, layer: int) -> torch.Tensor:
        """A view of one layer, [num_slots * 2 * num_kv_heads, head_dim]: one key or value of a head per row."""
        return self.slots(layer).view(-1, self.head_dim)

    def write(self, layer: int, slot_mapping: torch.Tensor, kv: torch.Tensor) -> None:
        """Store `kv` [T, 2, num_kv_heads, head_dim] (keys, values) of T tokens at `slot_mapping` [T]."""
        self.slots(layer).index_copy_(0, slot_mapping, kv)

    def gather(
        self, layer: int, block_table: Sequence[int], num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out a request's first keys and values, each [num_tokens, num_kv_heads, head_dim]."""
        used = list(block_table[: -(-num_tokens // self.block_size)])
        rows = self.pool[self.groups.row[layer], used].flatten(0, 1)[:num_tokens]
        return rows[:, 0], rows[:, 1]

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks of all layers, (source, destination) one after the other, in order."""
        for source, destination in pairs:
            self.pool[:, destination] = self.pool[:, source]

    def read_out(self, block_ids: Sequence[int]) -> BlockData:
        """Copy whole blocks to the host: one tensor [num_layers, len(block_ids), ...] in the layout of the class.

        What it returns is for `write_in`; a storage of another kind may return more tensors (scales).
        """
        return (self.pool[:, list(block_ids)].cpu(),)

    def write_in(self, block_ids: Sequence[int], data: BlockData) -> None:
        """Put back what `read_out` gave, bit for bit, into these (other or the same) blocks."""
        (pool,) = data
        self.pool[:, list(block_ids)] = pool.to(self.pool.device)

    def resize(self, num_blocks: int) -> None:
        """Make the pool larger or smaller. Blocks that stay keep their bytes; for a while both pools exist.

        Raises:
            ConfigError: the machine has no memory for the new pool; the old one is as it was.
        """
        old, kept = self.pool, min(num_blocks, self.num_blocks)
        new = self._new_pool(num_blocks, old.device)
        new[:, :kept] = old[:, :kept]
        self.num_blocks = num_blocks
        self._use(new)

    def poison(self) -> None:
        """Fill the pool with NaN (the largest number of an integer type), so that a stray read shows."""
        self.pool.fill_(float("nan") if self.dtype.is_floating_point else torch.iinfo(self.dtype).max)

    def close(self) -> None:
        """Free the pool. Harmless when called twice."""
        self._pool = None
        self._layers = []
