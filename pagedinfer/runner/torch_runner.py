"""The runner with a real model: inputs, decoder, sampler."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.engine.plan import StepPlan, StepResult, TokenLogprobs
from pagedinfer.errors import ConfigError, EngineClosed
from pagedinfer.model.protocols import CausalModel, ModelInfo
from pagedinfer.runner.acceptance import choose
from pagedinfer.runner.inputs import InputBuffers
from pagedinfer.runner.logprobs import prompt_logprobs, scored_span

__all__ = ["TorchRunner", "pick_dtype"]

Scored: TypeAlias = Mapping[str, tuple[int, Sequence[TokenLogprobs]]]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class TorchRunner:
    """Implements `engine.protocols.Runner` with a decoder and a KV pool of its own.

    Args:
        decoder: the model, loaded; several runners may share one.
        num_blocks: blocks in the pool.
        block_size: tokens per block.

    Raises:
        ConfigError: there is no memory for the pool.
    """

    def __init__(self, decoder: CausalModel, *, num_blocks: int, block_size: int) -> None:
        self.vocab_size = decoder.config.vocab_size
        self._decoder: CausalModel | None = decoder
        self._kv = decoder.new_kv(num_blocks, block_size)
        self._buffers = InputBuffers(block_size, decoder.device)

    @property
    def kv(self) -> KVStorage:
        """The KV pool."""
        return self._kv

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan: new tokens, errors and log-probabilities by request id, and the seconds it took.

        Raises:
            EngineClosed: after `close`.
            RequestError: a request of the plan carries no token ids.
        """
        if self._decoder is None:
            raise EngineClosed("this runner was closed; make a new one.")
        if not plan.scheduled:
            return StepResult(tokens={})
        start = time.perf_counter()
        inputs, items = self._buffers.update(plan)
        logits, scored = self._forward(self._decoder, inputs)
        result = choose(logits, items) if items else StepResult(tokens={})
        result.prompt_logprobs = scored
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
        """Free the pool and let go of the model. Harmless when called twice."""
        self._kv.close()
        self._decoder = None


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
