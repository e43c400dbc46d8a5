"""Contiguous KV memory: each request holds one extent, reserved ahead or moved when it outgrows its place.

What engines did before paging, kept to be compared with it (Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", SOSP 2023, section 3.1). A block table here is a run of consecutive ids
and names the whole extent, reserved blocks included, so kernels and views see no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagedinfer.errors import ConfigError, OutOfBlocks, count
from pagedinfer.memory import extents as ex
from pagedinfer.memory import sliding
from pagedinfer.memory.extent_tables import ExtentTables
from pagedinfer.memory.keys import BlockKey
from pagedinfer.memory.ops import BlockOp
from pagedinfer.memory.refusals import Refusals
from pagedinfer.memory.reservation import STRATEGIES, Reservation
from pagedinfer.trace import events as ev
from pagedinfer.trace.bus import EventBus

__all__ = ["STRATEGIES", "ContiguousAllocator"]


class ContiguousAllocator(ExtentTables, Refusals):
    """Hands out extents: the contiguous `KVAllocator`. Each method does all of its work or nothing.

    A request that outgrows its extent takes the free blocks behind it; where they are taken it moves to a hole that is
    large enough.

    Attributes:
        name, strategy, reservation: how much to reserve, and where.
        compaction: whether extents slide together when the free blocks would do and no hole is large enough.
        num_blocks, block_size: the pool.
        journal: where inverses of changes go while a plan is being made; None outside.
        refuse_calls: fault injection: numbers of `allocate` calls (counted from 0) that are refused.
        num_calls: `allocate` calls so far that asked for at least one block.
        can_share: False: no two extents overlap.
    """

    can_share = False

    def __init__(
        self,
        strategy: str,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        bus: EventBus,
        *,
        compaction: bool = False,
        fit: ex.LearnerFit | None = None,
        on_error: Callable[[str], object] | None = None,
    ) -> None:
        """`fit(holes, size)` takes the place of the strategy's choice of a hole.

        What it does wrong goes to `on_error` (default: an `error` event).

        Raises:
            ConfigError: no strategy has this name, or `fit` was given to one that has no choice.
        """
        if strategy not in STRATEGIES:
            raise ConfigError(f"allocator is {strategy!r}; contiguous ones are {', '.join(STRATEGIES)}.")
        super().__init__(num_blocks, block_size, bus)
        self.strategy = STRATEGIES[strategy]
        if fit is not None and self.strategy.buddy:
            raise ConfigError(
                "A buddy system places extents at multiples of their length; use fit with another one."
            )
        self.name = strategy
        self.compaction = compaction
        self.refuse_calls: set[int] = set()
        self.num_calls = 0
        self.reservation = Reservation(self.strategy, block_size, max_model_len)
        self._fit = self.strategy.fit if fit is None else ex.guarded(fit, on_error or self._emit_error)
        self._lowest: ex.Fit = ex.buddy_lowest if self.strategy.buddy else ex.first_fit

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def largest_hole(self) -> int:
        """The most blocks that one request could get without a move; in a buddy system its largest free piece."""
        return self._largest(self._space)

    def _largest(self, space: ex.Extents) -> int:
        if not self.strategy.buddy:
            return space.largest
        return max((length for _, length in ex.buddy_pieces(space.holes)), default=0)

    def num_needed(self, num_tokens: int, max_total_tokens: int) -> int:
        """Blocks that the strategy reserves for a request that comes in."""
        return self.reservation.size(num_tokens, max_total_tokens)

    def why_never(self, num_tokens: int, max_total_tokens: int) -> str | None:
        """Why even the empty pool could not hold a request of `num_tokens` that may grow to `max_total_tokens`."""
        return self.reservation.why_never(self.num_blocks, num_tokens, max_total_tokens)

    def shortage(
        self, keys: Sequence[BlockKey], num_tokens: int, max_total_tokens: int, spare: int
    ) -> str | None:
        """Why a request without a table cannot come in now, leaving `spare` blocks free."""
        size = self.reservation.size(num_tokens, max_total_tokens)
        if size + spare > self.num_free:
            return self._shortage(size, spare)
        fits = self._lowest(self._space.holes, size, 0) is not None or self._moves_for(size) is not None
        return None if fits else self._shortage(size, spare)

    def _moves_for(self, size: int) -> sliding.Moves | None:
        """What compaction would move to make a hole of `size` blocks; None when it is off, or would not do it."""
        if not self.compaction:
            return None
        return sliding.gather(self._space, self._extents(), self._lowest, size)

    def _shortage(self, size: int, spare: int = 0, held: int = 0) -> str:
        kept = f" ({spare} to be kept)" if spare else ""
        where = "piece" if self.strategy.buddy else "hole"
        has = f" (it has {held})" if held else ""
        return (
            f"needs {count(size, 'block')} in a row{has}, {self.num_free} free{kept}, "
            f"the largest {where} has {self.largest_hole}"
        )

    def num_cached(self, keys: Sequence[BlockKey], num_tokens: int) -> int:
        """Tokens of a request that `attach` would find: none."""
        return 0

    # -- what comes from sharing, which there is none of ----------------------------------------------------------

    def attach(self, rid: str, keys: Sequence[BlockKey], num_tokens: int) -> tuple[int, str]:
        """Nothing: no two extents overlap."""
        return 0, "contiguous memory shares nothing"

    def publish(
        self,
        rid: str,
        keys: Sequence[BlockKey],
        num_tokens: int,
        retain: Sequence[tuple[int, int, int, float]] = (),
        *,
        is_first: bool = False,
    ) -> None:
        """Nothing: nobody could share the blocks."""

    def fork(self, parent: str, rid: str, num_tokens: int) -> None:
        """Never called: `can_share` is False."""
        raise AssertionError("contiguous memory shares nothing")

    def group_tables(self, rid: str) -> Sequence[list[int]]:
        """None: models with sliding-window groups need paged memory."""
        return ()

    def reaches(self, rid: str, position: int) -> bool:
        """True: contiguous memory has no windows."""
        return True

    def expire(self, now: float) -> None:
        """Nothing: nothing is cached."""

    def release_pins(self) -> bool:
        """False: nothing is pinned."""
        return False

    def reset_prefix_cache(self, why: str) -> bool:
        """Nothing is cached; False all the same while any block is in use, as for paged memory."""
        return self.num_free == self.num_blocks

    # -- changes ------------------------------------------------------------------------------------------------

    def allocate(
        self,
        rid: str,
        num_tokens: int,
        *,
        start: int | None = None,
        max_total_tokens: int | None = None,
        asked: bool = False,
    ) -> tuple[int, ...]:
        """Make the request's extent cover `num_tokens` tokens. Returns the blocks added at its end.

        A request without an extent gets what the strategy reserves. To be called before each step that writes tokens:
        what is covered is what moves copy. `asked`: `ask` was called for it.

        Raises:
            OutOfBlocks: no hole is large enough (or the call was refused by fault injection).
        """
        held = len(self.tables.get(rid, ()))
        size = self.reservation.rounded(num_tokens)
        if not held:
            size = self.reservation.size(num_tokens, max_total_tokens)
        new: tuple[int, ...] = ()
        if size > held:
            if not asked:
                self.ask(size - held)
            first = self._make_growable(rid, size) if held else self._find(rid, size)
            new = self._extend(rid, first, size - held)
        self._fill(rid, self.blocks_for(num_tokens))
        return new

    def restore(self, rid: str, num_tokens: int, max_total_tokens: int) -> list[int]:
        """An extent for a request that comes back with `num_tokens` tokens. Returns the blocks for these.

        Raises:
            OutOfBlocks: as `allocate`.
        """
        self.allocate(rid, num_tokens, max_total_tokens=max_total_tokens)
        return self.kept_blocks(rid, num_tokens)

    def _find(self, rid: str, size: int) -> int:
        """First block for a new extent."""
        place = self._fit(self._space.holes, size, self._last)
        if place is None and (moves := self._moves_for(size)) is not None:
            self._apply(moves, f"{rid} needs {count(size, 'block')} in a row")
            place = self._fit(self._space.holes, size, self._last)
        if place is None:
            raise OutOfBlocks(size, self.num_free, self._shortage(size))
        return place

    def _make_growable(self, rid: str, size: int) -> int:
        """See to it that the blocks behind the extent are free until it has `size`. Returns the first of them."""
        table = self.tables[rid]
        first, held = table[0], len(table)
        missing, why = size - held, f"{rid} grows to {count(size, 'block')}, the next ones are taken"
        if self.strategy.buddy or self._space.free_from(first + held) < missing:
            without = self._space.copy()
            without.give(first, held)
            place = self._fit(without.holes, size, self._last)
            if place is not None:
                self._apply([(rid, place)] if place != first else [], why)
            elif self.compaction and not self.strategy.buddy and missing <= self.num_free:
                self._apply(sliding.make_room(self._space, self._extents(), rid, missing), why)
            else:
                raise OutOfBlocks(size, self.num_free, self._shortage(size, held=held))
        return self.tables[rid][0] + held

    def trim(self, rid: str, num_tokens: int) -> None:
        """Give back the blocks that `num_tokens` tokens do not need, unless they are reserved for later ones."""
        if self.strategy.reserves == "known":
            self._cut(rid, self.blocks_for(num_tokens))

    def _emit_error(self, what: str) -> None:
        if self._bus.subs:
            self._bus.emit(ev.Error("fit", what))

    # -- the whole pool, between steps ----------------------------------------------------------------------------

    def plan_compact(self) -> list[BlockOp]:
        """The copies that slide all extents down, so that what is free is one hole."""
        return self._ops_of(self._packing())

    def compact(self, ops: Sequence[BlockOp], why: str) -> None:
        """The runner has run what `plan_compact` asked for: take the new places."""
        self._take_places(self._packing(), ops, f"compaction: {why}")

    def _packing(self) -> sliding.Moves:
        """No moves when they would cost the largest piece of a buddy system.

        They may in a pool that is no power of two: a small extent slides into it.
        """
        after = self._space.copy()
        moves = sliding.pack(after, self._extents(), self._lowest)
        return moves if self._largest(after) >= self.largest_hole else []

    def plan_resize(self, num_blocks: int) -> list[BlockOp]:
        """The copies that a pool of `num_blocks` blocks needs first.

        Extents that reach into the part that goes away move into holes, or all slide down where that is not enough.

        Raises:
            OutOfBlocks: the extents do not fit.
        """
        return self._ops_of(self._moves_below(num_blocks))

    def resize(self, num_blocks: int, ops: Sequence[BlockOp]) -> None:
        """The runner has run what `plan_resize` asked for: take the new places and the new size."""
        moves = self._moves_below(num_blocks)
        self._take_places(moves, ops, f"the pool shrinks to {count(num_blocks, 'block')}")
        self._space.resize(num_blocks)
        self.num_blocks = num_blocks

    def _moves_below(self, num_blocks: int) -> sliding.Moves:
        moves = sliding.fit_below(self._space, self._extents(), self._lowest, num_blocks)
        if moves is None:
            held = self.num_blocks - self.num_free
            raise OutOfBlocks(
                held,
                num_blocks,
                f"The pool cannot shrink from {self.num_blocks} to {count(num_blocks, 'block')}: {held} are held by "
                f"{count(len(self.tables), 'request')} ({self.name}), which do not fit. Wait until some end, or "
                "preempt them.",
            )
        return moves

    def _take_places(self, moves: sliding.Moves, ops: Sequence[BlockOp], why: str) -> None:
        assert self.journal is None and not self.ops, "a plan is being made, or its block operations are left"
        self._apply(moves, why)
        done = self.take_ops()
        assert done == list(ops), f"the runner ran {list(ops)}, the books need {done}"

    # -- whole state --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of the pool; in a buddy system extents are powers of two at multiples of them."""
        super().check()
        for rid, table in self.tables.items() if self.strategy.buddy else ():
            first, size = table[0], len(table)
            aligned = size == ex.power_of_two(size) and first % size == 0
            assert aligned, f"{rid} holds {size} blocks from {first}, no piece of a buddy system"

    def __repr__(self) -> str:
        used = self.num_blocks - self.num_free
        return (
            f"ContiguousAllocator({self.name}, {used} of {self.num_blocks} blocks used, holes {self.holes})"
        )
