"""Block operations carried out: copies within the pool and between pool and host, each of which can be taken back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch

from pagedinfer.backends.host_pool import HostPool
from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.engine.plan import BlockOp
from pagedinfer.errors import RunnerError

__all__ = ["BlockOps"]


class BlockOps:
    """Runs block operations and remembers how to take the last run back.

    A plan that is cancelled after it ran (the forward pass failed, or was interrupted) must leave the data where the
    books say. Three rules make that so wherever the run is cut:

    - No operation destroys its source; it is lost when something later writes to it. So an operation's inverse is
      remembered after it is done, and one cut short needs none.
    - A pair of a move may fill what an earlier pair gave up, so each pair is done, and taken back, by itself. So are
      pairs with a destination in common.
    - Content that a destination or the forward pass overwrites and no operation carried away, the plan names
      (`overwritten`): it is kept aside.

    Args:
        kv: the pool.
        host: where swapped blocks go.
    """

    def __init__(self, kv: KVStorage, host: HostPool) -> None:
        self._kv, self._host = kv, host
        self._inverses: list[Callable[[], None]] = []

    def run(self, ops: Sequence[BlockOp], overwritten: Collection[int] = ()) -> tuple[int, float]:
        """Do all operations in order, or none of them and raise.

        Returns the bytes that they copied and the seconds they took, the copies of `overwritten` blocks included in
        the seconds.

        Raises:
            RunnerError: an operation of an unknown kind, or with a block or slot that does not exist.
        """
        self.forget()
        for op in ops:
            self._check(op)
        if not ops and not overwritten:
            return 0, 0.0
        start, lost = time.perf_counter(), set(overwritten)
        try:
            for op in _in_parts(ops):
                if op.kind != "swap_out":
                    self._keep([block_id for _, block_id in op.pairs if block_id in lost])
                self._do(op)
                if op.inverse is not None:
                    self._inverses.append(partial(self._do, op.inverse))
            self._keep(lost)  # what the forward pass is going to overwrite
            if self._kv.pool.is_cuda:  # the seconds are of the copies, not of asking for them
                torch.cuda.synchronize(self._kv.pool.device)
        except BaseException:
            self.take_back()
            raise
        num_bytes = sum(len(op.pairs) for op in ops) * self._kv.bytes_per_block
        return num_bytes, time.perf_counter() - start

    def take_back(self) -> None:
        """Undo the last run, newest operation first. Harmless when there is nothing left; goes on where it was cut."""
        while self._inverses:
            self._inverses[-1]()  # doing one twice does no harm, leaving one out does: forgotten afterwards
            self._inverses.pop()

    def forget(self) -> None:
        """The last run stands."""
        self._inverses.clear()

    def _keep(self, block_ids: Collection[int]) -> None:
        if block_ids:
            ids = list(block_ids)
            self._inverses.append(partial(self._kv.write_in, ids, self._kv.read_out(ids)))

    def _do(self, op: BlockOp) -> None:
        if op.kind in ("copy", "move"):
            self._kv.copy(op.pairs)
            return
        sources, destinations = [source for source, _ in op.pairs], [to for _, to in op.pairs]
        if op.kind == "swap_out":
            self._host.read_in(destinations, self._kv.read_out(sources))
        else:
            self._kv.write_in(destinations, self._host.read_out(sources))

    def _check(self, op: BlockOp) -> None:
        """Refuse what torch would read as something else: -1 is the last block to an index."""
        block, slot = ("block", self._kv.num_blocks), ("host slot", self._host.num_slots)
        ends = {
            "copy": (block, block), "move": (block, block), "swap_out": (block, slot), "swap_in": (slot, block),
        }  # fmt: skip
        if op.kind not in ends:
            raise RunnerError(f"{op.kind!r} is no block operation; there are {', '.join(ends)}.")
        for pair in op.pairs:
            for number, (noun, limit) in zip(pair, ends[op.kind], strict=True):
                if not 0 <= number < limit:
                    raise RunnerError(
                        f"{op.kind} {pair[0]} -> {pair[1]}: there is no {noun} {number}, {limit} exist."
                    )


def _in_parts(ops: Sequence[BlockOp]) -> Iterator[BlockOp]:
    """The operations, split into pairs where these depend on each other."""
    for op in ops:
        if op.kind == "move" or len({to for _, to in op.pairs}) < len(op.pairs):
            yield from (BlockOp(op.kind, (pair,)) for pair in op.pairs)
        else:
            yield op
