"""The runner with a real model: inputs, decoder, sampler."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.engine.plan import ScheduledRequest, StepPlan, StepResult, TokenLogprobs
from pagedinfer.errors import ConfigError, EngineClosed
from pagedinfer.model.protocols import CausalModel, ModelInfo
from pagedinfer.runner.inputs import InputBuffers
from pagedinfer.runner.logits import shape
from pagedinfer.runner.logprobs import prompt_logprobs, scored_span
from pagedinfer.runner.sampler import sample, uniform
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
        grouped: whether plans bring a block table per group of layers (`group_windows`), or one for all of them.

    Attributes:
        taps: who watches the tensors of its steps; `Tap.attach` adds one.
        num_heads: query heads per layer; None where the model does not say.
        group_windows: of each group of layers how many tokens it sees; None: all. (None,) unless `grouped`.

    Raises:
        ConfigError: there is no memory for the pool.
    """

    def __init__(
        self, decoder: CausalModel, *, num_blocks: int, block_size: int, grouped: bool = False
    ) -> None:
        self.vocab_size = decoder.config.vocab_size
        self.num_heads: int | None = getattr(decoder.config, "num_heads", None)
        self.taps: tuple[Tap, ...] = ()
        self._decoder: CausalModel | None = decoder
        self._kv = decoder.new_kv(num_blocks, block_size, decoder.layer_groups if grouped else None)
        self.group_windows = self._kv.groups.windows
        self._buffers = InputBuffers(block_size, decoder.device, self._kv.groups.num_groups)

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
        watch = StepWatch(self.taps, plan, self._buffers.batch, self._kv) if self.taps else None
        if watch is not None:
            inputs.watch = watch.queries
        logits, scored = self._forward(self._decoder, inputs)
        result = _choose(logits, items, watch) if items else StepResult(tokens={})
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
        """Free the pool and let go of the model. Harmless when called twice."""
        self._kv.close()
        self._decoder = None


def _choose(
    logits: torch.Tensor, items: Sequence[ScheduledRequest], watch: StepWatch | None = None
) -> StepResult:
    """A token for each row that has not failed."""
    logits = logits.float()
    if watch is not None:
        watch.rows(logits, items)
    raw, failed = shape(logits, items, None if watch is None else watch.shaped)
    uniforms = [uniform(item.seed, item.output_index) for item in items]
    sampled = sample(logits, [item.params for item in items], uniforms, raw)
    errors = sampled.errors | failed
    if watch is not None:
        watch.chosen(items, uniforms, sampled.tokens, errors)
    good = [(row, item.request_id) for row, item in enumerate(items) if row not in errors]
    return StepResult(
        tokens={rid: (sampled.tokens[row],) for row, rid in good},
        errors={items[row].request_id: why for row, why in errors.items()},
        logprobs={rid: (sampled.logprobs[row],) for row, rid in good if row in sampled.logprobs},
    )


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
