"""The runner with a real model: inputs, decoder, sampler."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from pagedinfer.backends.host_pool import HostPool
from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.config import EngineConfig
from pagedinfer.engine.plan import BlockOp, StepPlan, StepResult, TokenLogprobs
from pagedinfer.errors import ConfigError, EngineClosed
from pagedinfer.model.protocols import CausalModel, ModelInfo
from pagedinfer.runner.acceptance import choose
from pagedinfer.runner.block_ops import BlockOps
from pagedinfer.runner.inputs import InputBuffers
from pagedinfer.runner.logprobs import prompt_logprobs, scored_span
from pagedinfer.runner.taps import StepWatch, Tap

__all__ = ["TorchRunner", "pick_dtype"]

Scored: TypeAlias = Mapping[str, tuple[int, Sequence[TokenLogprobs]]]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TorchRunner:
    """Implements `engine.protocols.Runner` with a decoder and a KV pool of its own.

    Args:
        decoder: the model, loaded; several runners may share one.
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        num_host_blocks: blocks on the host, for swapped requests.
        grouped: whether plans bring a block table per group of layers (`group_windows`), or one for all of them.

    Attributes:
        taps: who watches the tensors of its steps; `Tap.attach` adds one.
        num_heads: query heads per layer; None where the model does not say.
        group_windows: of each group of layers how many tokens it sees; None: all. (None,) unless `grouped`.

    Raises:
        ConfigError: there is no memory for the pool, or for the host's.
    """

    def __init__(
        self,
        decoder: CausalModel,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        grouped: bool = False,
    ) -> None:
        self.vocab_size = decoder.config.vocab_size
        self.num_heads: int | None = getattr(decoder.config, "num_heads", None)
        self.taps: tuple[Tap, ...] = ()
        self._decoder: CausalModel | None = decoder
        self._kv = decoder.new_kv(num_blocks, block_size, decoder.layer_groups if grouped else None)
        self.group_windows = self._kv.groups.windows
        self._host = HostPool(num_host_blocks, self._kv)
        self._ops = BlockOps(self._kv, self._host)
        self._last_plan: StepPlan | None = None
        self._buffers = InputBuffers(block_size, decoder.device, self._kv.groups.num_groups)

    @property
    def kv(self) -> KVStorage:
        """The KV pool."""
        return self._kv

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan: block operations, then new tokens, errors and log-probabilities by request id, and the cost.

        Whatever fails or interrupts it, the block operations done so far are taken back first.

        Raises:
            EngineClosed: after `close`.
            RequestError: a request of the plan carries no token ids.
            RunnerError: a block operation names a block or host slot that does not exist.
        """
        if self._decoder is None:
            raise EngineClosed("this runner was closed; make a new one.")
        self._ops.forget()  # before the plan is taken for the last one
        self._last_plan = plan
        try:
            op_bytes, op_seconds = self._ops.run(plan.ops, plan.overwritten)
            result = self._compute(self._decoder, plan) if plan.scheduled else StepResult(tokens={})
        except BaseException:
            self._ops.take_back()
            raise
        result.op_bytes, result.op_seconds = op_bytes, op_seconds
        return result

    def take_back(self, plan: StepPlan) -> None:
        """Undo the block operations of `plan`, if it was the last to be executed and they have not been undone."""
        if plan is self._last_plan:
            self._ops.take_back()

    def run_ops(self, ops: Sequence[BlockOp]) -> tuple[int, float]:
        """Block operations between two steps, all or none. Returns the bytes copied and the seconds.

        Raises:
            RunnerError: an operation names a block or host slot that does not exist.
        """
        self._last_plan = None
        return self._ops.run(ops)

    def resize(self, num_blocks: int) -> None:
        """Make the pool larger or smaller between two steps; blocks that stay keep their bytes.

        Raises:
            ConfigError: there is no memory for the new pool; the old one stays.
        """
        self._kv.resize(num_blocks)
        self._ops.forget()
        self._last_plan = None

    def twin(self, config: EngineConfig) -> TorchRunner:
        """Another runner over the same model, with a pool of the size that `config` says.

        Raises:
            EngineClosed: after `close`. ConfigError: there is no memory for it.
        """
        if self._decoder is None:
            raise EngineClosed("this runner was closed; make a new one.")
        return TorchRunner(
            self._decoder,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_host_blocks=config.num_host_blocks,
            grouped=config.group_windows != (None,),
        )

    def _compute(self, decoder: CausalModel, plan: StepPlan) -> StepResult:
        start = time.perf_counter()
        inputs, items = self._buffers.update(plan)
        watch = StepWatch(self.taps, plan, self._buffers.batch, self._kv) if self.taps else None
        if watch is not None:
            inputs.watch = watch.queries
        logits, scored = self._forward(decoder, inputs)
        result = choose(logits, items, watch) if items else StepResult(tokens={})
        result.prompt_logprobs = scored
        if watch is not None:
            watch.finish()
        result.seconds = time.perf_counter() - start
        return result

    def _forward(self, decoder: CausalModel, inputs: ModelInputs) -> tuple[torch.Tensor, Scored]:
        """Logits of the rows that sample, and the prompt log-probabilities of those who asked."""
        starts = itertools.accumulate(inputs.query_lens, initial=0)
        asking = [
            (row, item) for row, item in zip(starts, self._buffers.batch, strict=False) if scored_span(item)
        ]
        if not asking:
            return decoder.forward(inputs, self._kv), {}
        hidden = decoder.hidden(inputs, self._kv)

        def project(rows: torch.Tensor) -> torch.Tensor:
            return decoder.logits(hidden, rows.to(decoder.device))

        scored = {item.request_id: prompt_logprobs(project, row, item) for row, item in asking}
        return project(inputs.logits_indices), scored

    def close(self) -> None:
        """Free the pools and let go of the model. Harmless when called twice."""
        self._ops.forget()
        self._kv.close()
        self._host.close()
        self._decoder = self._last_plan = None


def pick_dtype(name: str, config: ModelInfo, device: torch.device | str = "cpu") -> torch.dtype:
    """The torch dtype for a name.

    "auto" is float32 on a CPU: the same outputs on every machine, and no ties among bfloat16's coarse logits. Ask for
    bfloat16 to halve the memory and, where the processor multiplies it in hardware, about the time. On a GPU "auto"
    is the checkpoint's own type.

    Raises:
        ConfigError: a name that is neither "auto" nor one of the types.
    """
    if name == "auto":
        name = "float32" if torch.device(device).type == "cpu" else config.dtype
    if name not in _DTYPES:
        raise ConfigError(f"dtype={name!r}: it must be one of auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]
