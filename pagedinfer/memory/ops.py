"""Block operations: copies of whole blocks that a plan asks of its runner. Ids only, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BlockOp"]

_INVERSE = {"move": "move", "swap_out": "swap_in", "swap_in": "swap_out"}


@dataclass(frozen=True, slots=True)
class BlockOp:
    """Blocks to copy before the forward pass. Operations run in the order of the plan, pairs in order too.

    Attributes:
        kind: "copy" (block to block, copy-on-write), "move" (block to block, the source is given up), "swap_out"
            (block to host slot), "swap_in" (host slot to block).
        pairs: (source, destination).
    """

    kind: str
    pairs: tuple[tuple[int, int], ...]

    @property
    def inverse(self) -> BlockOp | None:
        """What takes the operation back when its plan is cancelled after it ran; None where nothing was lost.

        A move or a swap may have been followed by writes to the blocks given up, so they are filled again.
        """
        if self.kind not in _INVERSE:
            return None
        return BlockOp(_INVERSE[self.kind], tuple((to, source) for source, to in reversed(self.pairs)))
