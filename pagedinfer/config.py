"""Settings: frozen, keyword-only, validated at once. An unknown or unsupported option is an error, never ignored."""

from __future__ import annotations

from dataclasses import dataclass, fields

from pagedinfer.checks import check_int, check_real
from pagedinfer.sampling_params import SamplingParams, StructuredOutputsParams, TokenMask

__all__ = ["EngineConfig", "SamplingParams", "StructuredOutputsParams", "TokenMask"]

MAX_BLOCK_SIZE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The core's settings: the pool and the limits of a step.

    Attributes:
        num_blocks: physical blocks in the KV pool.
        block_size: tokens a block holds, 1 to 256.
        max_model_len: the most tokens (prompt and output) of one request.
        max_num_seqs: the most requests in one step's batch.
        max_num_batched_tokens: the most tokens computed in one step (the token budget).
        watermark: share of the pool kept free when a request is admitted beside running ones, so that they can
            grow before anybody is preempted; 0 to 0.5, rounded down to whole blocks.
        num_draft_tokens: tokens guessed per request and step by n-gram look-up; 0 for no speculation.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    watermark: float = 0.01
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        check_int("num_blocks", self.num_blocks, 1)
        check_int("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        check_int("max_model_len", self.max_model_len, 1)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_real("watermark", self.watermark, 0.0, 0.5)
        check_int("num_draft_tokens", self.num_draft_tokens, 0, 64)

    @property
    def watermark_blocks(self) -> int:
        """`watermark` in whole blocks."""
        return int(self.watermark * self.num_blocks)

    def to_dict(self) -> dict[str, int | float]:
        """Every setting by name, for a recording's first event."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
