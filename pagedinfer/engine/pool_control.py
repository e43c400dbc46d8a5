"""What can be done to the pool between two steps: another size, no holes, no cached content."""

from __future__ import annotations

from pagedinfer.checks import check_int, check_text
from pagedinfer.engine.watched import Watched
from pagedinfer.errors import ConfigError

__all__ = ["PoolControl"]


class PoolControl(Watched):
    """The memory side of an engine: each call moves the runner's bytes first, then changes the books."""

    def reset_prefix_cache(self, why: str = "asked for") -> bool:
        """Forget everything cached. False, and nothing is changed, while any block is in use.

        Call it after changing the model's weights in place: what they computed before is wrong now.
        """
        check_text("why", why)
        with self._operations.run():
            self._check_open()
            return self.scheduler.reset_prefix_cache(why)

    def resize_pool(self, num_blocks: int) -> int:
        """Give the pool another size while requests live. Returns the blocks that had to move.

        Raises:
            OutOfBlocks: more blocks are in use. RequestError: a step is open.
            ConfigError: the size is no positive integer, or there is no memory for it.
        """
        check_int("num_blocks", num_blocks, 1)
        with self._operations.run():
            self._check_open()
            ops = self.scheduler.plan_resize(num_blocks)
            self.runner.run_ops(ops)
            try:
                self.runner.resize(num_blocks)
            except BaseException:
                self.runner.run_ops([back for op in reversed(ops) if (back := op.inverse) is not None])
                raise
            self.scheduler.resize(num_blocks, ops)
            return sum(len(op.pairs) for op in ops)

    def compact(self, why: str = "asked for") -> int:
        """Slide the requests of a contiguous pool together. Returns the blocks that moved.

        Raises:
            ConfigError: paged memory has no holes. RequestError: a step is open.
        """
        check_text("why", why)
        with self._operations.run():
            self._check_open()
            if self.config.allocator == "paged":
                raise ConfigError(
                    "Paged memory has no holes to close; compact() is for contiguous allocators."
                )
            ops = self.scheduler.plan_compact()
            self.runner.run_ops(ops)
            self.scheduler.compact(ops, why)
            return sum(len(op.pairs) for op in ops)
