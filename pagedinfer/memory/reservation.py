"""How much contiguous memory a request gets, by strategy, and the sentences that say so."""

from __future__ import annotations

from dataclasses import dataclass

from pagedinfer.errors import count
from pagedinfer.memory import extents as ex

__all__ = ["STRATEGIES", "Reservation", "Strategy"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """How much to reserve for a request, and where.

    Attributes:
        fit: which hole to use.
        reserves: "max_model_len" tokens, "max_total_tokens" (prompt and `max_tokens`), or "known" tokens alone.
        buddy: whether extents are powers of two, each at a multiple of its length.
    """

    fit: ex.Fit
    reserves: str = "max_total_tokens"
    buddy: bool = False


STRATEGIES = {
    "reserve-max": Strategy(ex.first_fit, "max_model_len"),
    "first-fit": Strategy(ex.first_fit),
    "best-fit": Strategy(ex.best_fit),
    "next-fit": Strategy(ex.next_fit),
    "buddy": Strategy(ex.buddy_fit, buddy=True),
    "grow-by-move": Strategy(ex.first_fit, "known"),
}
"""Every contiguous strategy by its name in `EngineConfig.allocator`."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A strategy's sizes for blocks of `block_size` tokens and requests of at most `max_model_len` tokens."""

    strategy: Strategy
    block_size: int
    max_model_len: int

    def size(self, num_tokens: int, max_total_tokens: int | None) -> int:
        """Blocks that a request of `num_tokens` tokens gets when it comes in."""
        return self.rounded(self._claim(num_tokens, max_total_tokens)[0])

    def rounded(self, num_tokens: int) -> int:
        """Blocks of an extent that covers `num_tokens` tokens."""
        exact = -(-num_tokens // self.block_size)
        return ex.power_of_two(exact) if self.strategy.buddy and exact else exact

    def _claim(self, num_tokens: int, max_total_tokens: int | None) -> tuple[int, str]:
        """The tokens to make room for, and what they are."""
        total = max_total_tokens or 0
        if self.strategy.reserves == "max_model_len" and self.max_model_len >= num_tokens:
            return self.max_model_len, " (max_model_len, reserved for each request)"
        if self.strategy.reserves == "max_total_tokens" and total >= num_tokens:
            return total, " (prompt and max_tokens)"
        return num_tokens, ""

    def why_never(self, num_blocks: int, num_tokens: int, max_total_tokens: int) -> str | None:
        """Why an empty pool of `num_blocks` blocks could not hold the request."""
        size, most = self.size(num_tokens, max_total_tokens), num_blocks
        if self.strategy.buddy:
            most = 1 << (num_blocks.bit_length() - 1)
        if size <= most:
            return None
        tokens, what = self._claim(num_tokens, max_total_tokens)
        exact = -(-tokens // self.block_size)
        rounded = f" (as a power of two {size})" if size > exact else ""
        piece = f", its largest power of two is {most}" if self.strategy.buddy else ""
        return (
            f"{count(tokens, 'token')}{what} need {count(exact, 'block')} of {self.block_size} in a row{rounded}, "
            f"the whole pool has {num_blocks}{piece}"
        )
