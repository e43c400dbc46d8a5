"""The runner with a real model: inputs, decoder, sampler."""

from __future__ import annotations

import time

import torch

from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.engine.plan import StepPlan, StepResult
from pagedinfer.errors import ConfigError, EngineClosed
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.decoder import Decoder
from pagedinfer.runner.inputs import InputBuffers
from pagedinfer.runner.sampler import sample, uniform

__all__ = ["TorchRunner", "pick_dtype"]

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

    def __init__(self, decoder: Decoder, *, num_blocks: int, block_size: int) -> None:
        self.vocab_size = decoder.config.vocab_size
        self._decoder: Decoder | None = decoder
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
        logits = self._decoder.forward(inputs, self._kv)
        if not items:
            return StepResult(tokens={}, seconds=time.perf_counter() - start)
        uniforms = [uniform(item.seed, item.output_index) for item in items]
        forbidden = [item.forbidden_token_ids for item in items]
        sampled = sample(logits, [item.params for item in items], uniforms, forbidden)
        ids = [item.request_id for item in items]
        return StepResult(
            tokens={
                ids[row]: (token,) for row, token in enumerate(sampled.tokens) if row not in sampled.errors
            },
            errors={ids[row]: why for row, why in sampled.errors.items()},
            logprobs={ids[row]: (values,) for row, values in sampled.logprobs.items()},
            seconds=time.perf_counter() - start,
        )

    def close(self) -> None:
        """Free the pool and let go of the model. Harmless when called twice."""
        self._kv.close()
        self._decoder = None


def pick_dtype(name: str, config: ModelConfig, device: torch.device | str = "cpu") -> torch.dtype:
    """The torch dtype for a name.

    "auto" is what runs fast: on a GPU the checkpoint's own type; on a CPU bfloat16 where the processor
    multiplies it in hardware (AVX-512 BF16 or AMX), unless the checkpoint is float32, and float32 elsewhere.

    Raises:
        ConfigError: a name that is neither "auto" nor one of the types.
    """
    if name == "auto":
        if torch.device(device).type != "cpu":
            name = config.dtype
        else:
            name = "bfloat16" if config.dtype != "float32" and _cpu_multiplies_bfloat16() else "float32"
    if name not in _DTYPES:
        raise ConfigError(f"dtype={name!r}: it must be one of auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _cpu_multiplies_bfloat16() -> bool:
    # Private names of torch (in 2.6 to 2.13); without them float32 is the safe answer.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, lambda: False)()) for probe in probes)
