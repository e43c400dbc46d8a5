"""The host's side of swapping: tensors in main memory that hold the blocks of swapped requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagedinfer.backends.kv_storage import BlockData, KVStorage
from pagedinfer.errors import ConfigError, count

__all__ = ["HostPool"]


class HostPool:
    """Room on the host for `num_slots` blocks of a KV storage, whatever tensors a block of it consists of.

    It asks `kv.read_out` what a block looks like and keeps one tensor [num_layers, num_slots, ...] for each part.
    They are made at once, so that a pool too large is refused with the settings and not in the middle of a step;
    the system gives the memory behind them when a slot is first written.

    Args:
        num_slots: blocks to hold; 0 is allowed.
        kv: the storage that the blocks come from and go back to.

    Raises:
        ConfigError: the machine has no memory for a pool of this size.
    """

    def __init__(self, num_slots: int, kv: KVStorage) -> None:
        self.num_slots = num_slots
        try:
            with torch.inference_mode(False):  # they are written in and out of that mode
                self._parts: BlockData = tuple(
                    torch.zeros((part.shape[0], num_slots, *part.shape[2:]), dtype=part.dtype)
                    for part in kv.read_out(())
                )
        except (RuntimeError, TypeError) as error:  # torch's word for a size beyond 64 bits is TypeError
            raise ConfigError(
                f"num_host_blocks={num_slots}: {count(num_slots, 'block')} on the host need "
                f"{num_slots * kv.bytes_per_block:,} bytes, more than this machine gives; ask for fewer."
            ) from error

    @property
    def total_bytes(self) -> int:
        """Bytes of the tensors, touched or not; 0 once it is closed."""
        return sum(part.nbytes for part in self._parts)

    def read_in(self, slots: Sequence[int], data: BlockData) -> None:
        """Keep blocks as `KVStorage.read_out` gave them, bit for bit, in these slots."""
        for pool, part in zip(self._parts, data, strict=True):
            pool[:, list(slots)] = part

    def read_out(self, slots: Sequence[int]) -> BlockData:
        """A copy of the blocks in these slots, as `KVStorage.write_in` takes them."""
        return tuple(pool[:, list(slots)] for pool in self._parts)

    def close(self) -> None:
        """Free the memory. Harmless when called twice."""
        self._parts = ()
