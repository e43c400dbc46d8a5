"""The shadow: a pool that holds, in place of keys and values, whose they are, and checks every read of every step.

A real pool gives numbers back whatever it is asked for. Here each slot knows which token its content was computed
for, with everything before that token (keys and values depend on all of it), and a step that reads a slot with
another content, or with none, is a `ShadowFault` that names it. So a wrong block table, a forgotten copy, a swap to
the wrong place or a block handed out too early shows in the step where it does harm, without a model.

`ShadowRunner` is a runner for the engine; `ShadowMemory.watch` follows another runner, one with a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from pagedinfer.engine.plan import BlockOp, ScheduledRequest, StepPlan, StepResult
from pagedinfer.engine.protocols import Runner
from pagedinfer.errors import readable
from pagedinfer.sim.simulated import SimulatedRunner, TokenRule

__all__ = ["Content", "ShadowFault", "ShadowMemory", "ShadowRunner"]


class ShadowFault(AssertionError):
    """A step reads what is not its request's, writes where another one writes, or copies what is not there."""


class Content(NamedTuple):
    """What a slot holds. Two contents are the same keys and values when `group` and `identity` are equal.

    Attributes:
        group: kind of layer.
        identity: a hash of the token and all tokens before it; of the request and the position where there are none.
        request_id: who wrote it, for messages.
        position: of the token, for messages.
        step: when it was written, for messages.
    """

    group: int
    identity: int
    request_id: str
    position: int
    step: int

    def __str__(self) -> str:
        return readable(f"token {self.position} of {self.request_id}, written in step {self.step}")


Block: TypeAlias = list[Content | None]
"""The slots of a block; None where nothing was written since it was poisoned."""


class ShadowMemory:
    """The pool and the host's slots, as contents.

    Blocks of all groups come from one pool, as in the engine. Sharing is allowed exactly where token ids are equal
    from the start; requests that carry only lengths share nothing.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        num_host_blocks: blocks on the host.
        windows: for each group how many tokens a token sees, itself included; None: all. Groups beyond see all.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.block_size = block_size
        self.blocks: list[Block] = [self._blank() for _ in range(num_blocks)]
        self.host: list[Block | None] = [None] * num_host_blocks
        self._windows = tuple(windows)
        self._lives: dict[str, int] = {}  # of requests without token ids: how often they started anew
        self._last_plan: StepPlan | None = None
        self._undo: list[BlockOp | tuple[int, Block]] = []  # as the real runner does it

    def _blank(self) -> Block:
        return [None] * self.block_size

    def watch(self, runner: Runner) -> None:
        """Follow everything that `runner` does from now on; its calls raise `ShadowFault` too.

        They are wrapped on the object, so the runner must not use one of them within another.
        """
        for name in ("execute", "take_back", "run_ops", "resize"):
            follow = getattr(self, "run" if name == "execute" else name)
            setattr(runner, name, _both(getattr(runner, name), follow))

    # -- what a runner does ---------------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> None:
        """Carry out the plan: its block operations, all writes, then all reads (as in each layer of a model).

        Raises:
            ShadowFault: something is read, written or copied that must not be.
        """
        self._undo, self._last_plan = [], plan
        self._do_all(plan.ops, plan.overwritten)
        writers: dict[tuple[int, int], str] = {}
        identities = [self._identities(item) for item in plan.scheduled]
        for item, own in zip(plan.scheduled, identities, strict=True):
            self._write(item, own, plan.step, writers)
        for item, own in zip(plan.scheduled, identities, strict=True):
            self._read(item, own, plan.step)

    def take_back(self, plan: StepPlan) -> None:
        """The plan was cancelled after `run`: its operations are undone; what it wrote elsewhere stays."""
        if plan is self._last_plan:
            self._undo_all()

    def run_ops(self, ops: Sequence[BlockOp]) -> None:
        """Block operations between two steps.

        Raises:
            ShadowFault: an operation names a block or slot that does not exist, or swaps in an empty slot.
        """
        self._undo, self._last_plan = [], None
        self._do_all(ops, ())

    def resize(self, num_blocks: int) -> None:
        """Make the pool larger, with empty blocks, or smaller."""
        del self.blocks[num_blocks:]
        self.blocks += [self._blank() for _ in range(num_blocks - len(self.blocks))]

    def poison(self, block_ids: Iterable[int] | None = None) -> None:
        """Forget what these blocks hold, all by default: from now on reading them is a fault."""
        for block_id in range(len(self.blocks)) if block_ids is None else block_ids:
            self.blocks[block_id] = self._blank()

    # -- block operations -----------------------------------------------------------------------------------------

    def _do_all(self, ops: Sequence[BlockOp], overwritten: Sequence[int]) -> None:
        for op in ops:
            for pair in op.pairs:
                one = BlockOp(op.kind, (pair,))
                if op.kind != "swap_out" and pair[1] in overwritten:
                    self._keep(pair[1])
                try:
                    self._do(one)
                except ShadowFault:
                    self._undo_all()
                    raise
                if (inverse := one.inverse) is not None:
                    self._undo.append(inverse)
        for block_id in overwritten:
            self._keep(block_id)

    def _keep(self, block_id: int) -> None:
        self._undo.append((block_id, list(self.blocks[block_id])))

    def _undo_all(self) -> None:
        while self._undo:
            entry = self._undo.pop()
            if isinstance(entry, BlockOp):
                self._do(entry)
            else:
                block_id, self.blocks[block_id] = entry

    def _do(self, op: BlockOp) -> None:
        """Copy contents. The source of a move and the slot of a swap-in are emptied: nobody may count on them.

        The source of a swap-out is not: it may be cached, or another request's too.
        """
        for source, to in op.pairs:
            where = f"{op.kind} {source} -> {to}"
            if op.kind in ("copy", "move"):
                self._inside(where, source, to)
                self.blocks[to] = list(self.blocks[source])
                if op.kind == "move" and source != to:
                    self.blocks[source] = self._blank()
            elif op.kind == "swap_out":
                self._inside(where, source, slot=to)
                self.host[to] = list(self.blocks[source])
            elif op.kind == "swap_in":
                self._inside(where, to, slot=source)
                block = self.host[source]
                if block is None:
                    raise ShadowFault(f"{where}: host slot {source} holds nothing.")
                self.blocks[to], self.host[source] = block, None
            else:
                raise ShadowFault(f"{where}: there is no such block operation.")

    def _inside(self, where: str, *block_ids: int, slot: int | None = None) -> None:
        for block_id in block_ids:
            if not 0 <= block_id < len(self.blocks):
                raise ShadowFault(f"{where}: there is no block {block_id}, {len(self.blocks)} exist.")
        if slot is not None and not 0 <= slot < len(self.host):
            raise ShadowFault(f"{where}: there is no host slot {slot}, {len(self.host)} exist.")

    # -- the forward pass -----------------------------------------------------------------------------------------

    def _identities(self, item: ScheduledRequest) -> list[int]:
        """What tells the contents of positions 0 to `item.end - 1` from all others."""
        if not item.token_ids:
            if item.start == 0:  # a new request may have an old one's id
                self._lives[item.request_id] = self._lives.get(item.request_id, 0) + 1
            life = self._lives.get(item.request_id, 0)
            return [hash((item.request_id, life, position)) for position in range(item.end)]
        token_ids = [*item.token_ids, *item.draft_token_ids][: item.end]
        if len(token_ids) < item.end:
            raise ShadowFault(f"{item.request_id} computes up to {item.end}, it has {len(token_ids)} tokens.")
        hashes = accumulate(token_ids, lambda before, token_id: hash((before, token_id)), initial=0)
        return list(hashes)[1:]

    def _write(
        self,
        item: ScheduledRequest,
        own: Sequence[int],
        step: int,
        writers: dict[tuple[int, int], str],
    ) -> None:
        rid = item.request_id
        for group, table in _tables(item):
            for position in range(item.start, item.end):
                block_id, offset = self._slot(item, group, table, position, step)
                writer = f"token {position} of {rid} (group {group})"
                if (other := writers.setdefault((block_id, offset), writer)) is not writer:
                    raise ShadowFault(
                        f"step {step}: {writer} and {other} are both written to slot {offset} of block {block_id}."
                    )
                self.blocks[block_id][offset] = Content(group, own[position], rid, position, step)

    def _read(self, item: ScheduledRequest, own: Sequence[int], step: int) -> None:
        for group, table in _tables(item):
            window = self._windows[group] if group < len(self._windows) else None
            first = 0 if window is None else max(0, item.start - window + 1)
            for position in range(first, item.end):
                block_id, offset = self._slot(item, group, table, position, step)
                content = self.blocks[block_id][offset]
                if content is None or content[:2] != (group, own[position]):
                    raise ShadowFault(
                        f"step {step}: {item.request_id} reads token {position} (group {group}) from slot "
                        f"{offset} of block {block_id}, which holds {content or 'nothing'}."
                    )

    def _slot(
        self, item: ScheduledRequest, group: int, table: Sequence[int], position: int, step: int
    ) -> tuple[int, int]:
        index, offset = divmod(position, self.block_size)
        block_id = table[index] if index < len(table) else -1
        if not 0 <= block_id < len(self.blocks):
            raise ShadowFault(
                f"step {step}: {item.request_id} has no block for token {position} (group {group}): its table "
                f"is {list(table)}, the pool has blocks 0 to {len(self.blocks) - 1}."
            )
        return block_id, offset


def _both(first: Callable[[Any], Any], then: Callable[[Any], object]) -> Callable[[Any], Any]:
    def call(argument: Any) -> Any:
        result = first(argument)
        then(argument)
        return result

    return call


def _tables(item: ScheduledRequest) -> Iterator[tuple[int, Sequence[int]]]:
    yield 0, item.block_table
    yield from enumerate(item.group_tables, 1)


class ShadowRunner:
    """Implements `engine.protocols.Runner`: tokens by a rule, as the simulated runner, and every access checked.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        num_host_blocks: blocks on the host.
        windows: see `ShadowMemory`.
        vocab_size: ids that the rule may give.
        rule: the token of a request, see `SimulatedRunner`.
        bytes_per_block: what a copied block counts for.

    Attributes:
        has_logits: False.
        vocab_size: token ids are below this.
        memory: the `ShadowMemory`, to look at, to poison.
    """

    has_logits = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        *,
        windows: Sequence[int | None] = (None,),
        vocab_size: int = 256,
        rule: TokenRule | None = None,
        bytes_per_block: int = 1,
    ) -> None:
        self.memory = ShadowMemory(num_blocks, block_size, num_host_blocks, windows=windows)
        self._tokens = SimulatedRunner(vocab_size=vocab_size, rule=rule, bytes_per_block=bytes_per_block)
        self.vocab_size = vocab_size

    @property
    def num_steps(self) -> int:
        """Plans executed so far."""
        return self._tokens.num_steps

    def execute(self, plan: StepPlan) -> StepResult:
        """Check the plan against the memory and give tokens by the rule.

        Raises:
            ShadowFault: see `ShadowMemory.run`.
        """
        self.memory.run(plan)
        return self._tokens.execute(plan)

    def take_back(self, plan: StepPlan) -> None:
        """Undo the block operations of a plan that is cancelled after `execute`."""
        self.memory.take_back(plan)

    def run_ops(self, ops: Sequence[BlockOp]) -> tuple[int, float]:
        """Block operations between two steps. Returns the bytes they stand for, and 0.0 seconds."""
        self.memory.run_ops(ops)
        return self._tokens.run_ops(ops)

    def resize(self, num_blocks: int) -> None:
        """Make the pool larger or smaller between two steps."""
        self.memory.resize(num_blocks)

    def close(self) -> None:
        """Nothing to free."""
