"""Settings: frozen, keyword-only, validated at once. An unknown or unsupported option is an error, never ignored."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pagedinfer.checks import check_flags, check_int, check_real, options_by_name
from pagedinfer.errors import ConfigError
from pagedinfer.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams, TokenMask

__all__ = ["BeamSearchParams", "EngineConfig", "SamplingParams", "StructuredOutputsParams", "TokenMask"]

MAX_BLOCK_SIZE = 512

ALLOCATORS = ("paged", "reserve-max", "first-fit", "best-fit", "next-fit", "buddy", "grow-by-move")
ORDERS = ("fcfs", "priority", "shortest-prefill", "longest-prefix", "fair-share", "deadline")
VICTIMS = ("newest", "lowest-priority", "fewest-tokens-lost", "largest")
PREEMPT_MODES = ("recompute", "swap", "cheaper")
ADMISSIONS = ("watermark", "fits-now", "full-reservation", "expected-length", "pressure")
CHUNKINGS = ("decode-first", "prefill-first", "equal-progress")


@options_by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The core's settings: the pool, the limits of a step, and who decides what.

    Attributes:
        num_blocks: physical blocks in the KV pool.
        block_size: tokens a block holds, 1 to 512.
        max_model_len: the most tokens (prompt and output) of one request.
        max_num_seqs: the most requests in one step's batch.
        max_num_batched_tokens: the most tokens computed in one step (the token budget).
        watermark: share of the pool kept free when a request is admitted beside running ones, so that they can
            grow before anybody is preempted; 0 to 0.5, rounded down to whole blocks.
        enable_prefix_caching: full blocks are shared with later requests that begin with the same tokens. Paged only.
        group_windows: for each group of layers the tokens that a query sees, None for all. One group in most models.
        allocator: how memory is given out: one of `ALLOCATORS`.
        compaction: contiguous allocators may slide requests together when no hole is large enough.
        num_host_blocks: blocks of the host pool that preempted requests can be swapped to; 0 for none.
        order: who waits in front: one of `ORDERS`.
        victim: who gives way when blocks run out: one of `VICTIMS`.
        preempt_mode: one of `PREEMPT_MODES`.
        admission: when the first of the queue may come in: one of `ADMISSIONS`.
        chunking: who gets the step's tokens: one of `CHUNKINGS`.
        max_chunk_tokens: the most prefill tokens of one request in a step; None for no cap.
        aging: under order "priority", waiting this long (in the engine's clock) is worth one level; None for never.
        swap_cost_tokens: under "cheaper", what copying one block to the host and back costs, in tokens computed.
        expected_output_tokens: under "expected-length", the output that an admission reckons with.
        pressure: under "pressure", the share of the pool in use from which nobody is admitted.
        max_num_waiting: requests that may wait; more are refused. None for no limit.
        tenant_max_running: the most requests of one tenant in the batch. None for no limit.
        tenant_max_blocks: the most blocks that one tenant's requests may come to need. None for no limit.
        num_draft_tokens: tokens guessed per request and step by n-gram look-up; 0 for no speculation.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    group_windows: tuple[int | None, ...] = (None,)
    allocator: str = "paged"
    compaction: bool = False
    num_host_blocks: int = 0
    order: str = "fcfs"
    victim: str = "newest"
    preempt_mode: str = "recompute"
    admission: str = "watermark"
    chunking: str = "decode-first"
    max_chunk_tokens: int | None = None
    aging: float | None = None
    swap_cost_tokens: float = 2.0
    expected_output_tokens: int | None = None
    pressure: float = 0.9
    max_num_waiting: int | None = None
    tenant_max_running: int | None = None
    tenant_max_blocks: int | None = None
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        check_int("num_blocks", self.num_blocks, 1)
        check_int("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        check_int("max_model_len", self.max_model_len, 1)
        check_int("max_num_seqs", self.max_num_seqs, 1)
        check_int("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        check_int("num_host_blocks", self.num_host_blocks, 0)
        check_int("num_draft_tokens", self.num_draft_tokens, 0, 64)
        check_real("watermark", self.watermark, 0.0, 0.5)
        check_real("swap_cost_tokens", self.swap_cost_tokens, 0.0)
        check_real("pressure", self.pressure, 0.0, 1.0)
        check_flags(self, "enable_prefix_caching", "compaction")
        for name in ("max_chunk_tokens", "expected_output_tokens", "tenant_max_running", "tenant_max_blocks"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.max_num_waiting is not None:
            check_int("max_num_waiting", self.max_num_waiting, 1)
        if self.aging is not None:
            check_real("aging", self.aging, 0.0)
        _check_windows(self)
        _check_choices(self)

    @property
    def watermark_blocks(self) -> int:
        """`watermark` in whole blocks."""
        return int(self.watermark * self.num_blocks)

    def to_dict(self) -> dict[str, Any]:
        """Every setting by name, for a recording's first event."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
            "group_windows": list(self.group_windows)
        }


def _check_choices(config: EngineConfig) -> None:
    """Refuse unknown names, and options that the chosen names would ignore."""
    for name, known in (
        ("allocator", ALLOCATORS), ("order", ORDERS), ("victim", VICTIMS), ("preempt_mode", PREEMPT_MODES),
        ("admission", ADMISSIONS), ("chunking", CHUNKINGS),
    ):  # fmt: skip
        if getattr(config, name) not in known:
            raise ConfigError(f"{name}={getattr(config, name)!r}: it must be one of {', '.join(known)}.")
    if config.allocator == "paged" and config.compaction:
        raise ConfigError(
            "compaction=True: paged memory has no holes to close; choose a contiguous allocator."
        )
    if config.allocator != "paged" and config.group_windows != (None,):
        raise ConfigError(f"group_windows need paged memory, not allocator={config.allocator!r}.")
    if config.order != "priority" and config.aging is not None:
        raise ConfigError(f"aging={config.aging!r} belongs to order='priority', not {config.order!r}.")
    if config.preempt_mode != "recompute" and not config.num_host_blocks:
        raise ConfigError(f"preempt_mode={config.preempt_mode!r} needs a host pool; set num_host_blocks.")
    if (config.admission == "expected-length") != (config.expected_output_tokens is not None):
        raise ConfigError(
            "admission='expected-length' and expected_output_tokens belong together; set both or none."
        )


def _check_windows(config: EngineConfig) -> None:
    windows = config.group_windows
    if not isinstance(windows, list | tuple) or not windows:
        raise ConfigError(
            f"group_windows={windows!r}: it must hold, for each group of layers, None or a window."
        )
    for window in windows:
        if window is not None:
            check_int("a window of group_windows", window, 1)
    object.__setattr__(config, "group_windows", tuple(windows))  # a recording gives a list
