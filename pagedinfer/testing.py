"""Helpers for tests of engines, ours and a learner's: references, invariants, poison, fault injection.

Each has a name in our list of known faults: TINY (`tiny_llm`), COLD (`cold_outputs`), SAME (`assert_same`),
LEAK (`assert_no_leak`), MAP (`check_map`), BOUND (`run_bounded`), POISON (`poison`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagedinfer.config import SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.output import RequestOutput
from pagedinfer.errors import ConfigError

if TYPE_CHECKING:
    from pagedinfer.engine.intake import Prompt
    from pagedinfer.llm import LLM

__all__ = [
    "TIE_GAP",
    "assert_no_leak",
    "assert_same",
    "check_map",
    "cold_outputs",
    "first_difference",
    "force_preempt",
    "poison",
    "refuse_allocation",
    "run_bounded",
    "tiny_llm",
    "unused_blocks",
]

TIE_GAP = 1e-3
"""Where the reference's two best logits are closer than this, either token may follow."""


def tiny_llm(**options: Any) -> LLM:
    """TINY: the seeded two-layer model in float32 with blocks of 4 tokens, a poisoned pool and no download."""
    from pagedinfer.llm import LLM

    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "num_blocks": 64} | options
    llm = LLM("tiny", **settings)
    poison(llm.engine)
    return llm


def cold_outputs(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams], **options: Any
) -> list[RequestOutput]:
    """COLD: what each prompt gives alone, in an engine of its own with a big pool and no chunking."""
    listed = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    outputs = []
    for prompt, wanted in zip(prompts, listed, strict=True):
        with tiny_llm(**({"num_blocks": 512, "max_num_batched_tokens": 2048} | options)) as llm:
            outputs += llm.generate([prompt], wanted, use_tqdm=False)
    return outputs


def first_difference(
    token_ids: Sequence[int], reference: Sequence[int], gaps: Sequence[float] | None = None
) -> tuple[str, int]:
    """The one tie rule. Compares greedy tokens with a reference's.

    `gaps[i]` is the reference's top-2 logit gap where it chose token `i`. Returns ("same", length), ("tie", i) when
    the first difference is at a tie (the comparison ends there), or ("different", i).
    """
    for i, (ours, theirs) in enumerate(zip(token_ids, reference, strict=False)):
        if ours != theirs:
            return ("tie" if gaps is not None and gaps[i] < TIE_GAP else "different"), i
    if len(token_ids) != len(reference):
        return "different", min(len(token_ids), len(reference))
    return "same", len(reference)


def assert_same(outputs: Sequence[RequestOutput], references: Sequence[RequestOutput]) -> None:
    """SAME: token ids, text and finish reason equal the reference's, request by request."""
    assert len(outputs) == len(references), f"{len(outputs)} outputs, {len(references)} references"
    for output, reference in zip(outputs, references, strict=True):
        got, want = output.outputs[0], reference.outputs[0]
        where = f"{output.request_id} (prompt of {len(output.prompt_token_ids)} tokens)"
        assert list(got.token_ids) == list(want.token_ids), (
            f"{where}: {got.token_ids} is not {want.token_ids}"
        )
        assert got.text == want.text, f"{where}: {got.text!r} is not {want.text!r}"
        assert got.finish_reason == want.finish_reason, (
            f"{where}: {got.finish_reason}, not {want.finish_reason}"
        )


def run_bounded(engine: Engine, max_steps: int) -> dict[str, RequestOutput]:
    """BOUND: step until nothing is left, but no more than `max_steps`. Returns ended requests' outputs by id."""
    done: dict[str, RequestOutput] = {}
    for _ in range(max_steps):
        if not engine.has_unfinished():
            return done
        done.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.check()
    assert not engine.has_unfinished(), f"still unfinished after {max_steps} steps: {engine!r}"
    return done


def unused_blocks(snapshot: Mapping[str, Any]) -> list[int]:
    """Blocks that nobody holds, the next to be taken first: those without content, then cached ones."""
    idle = snapshot.get("idle", {})
    return [*snapshot["free"], *(block for lane in sorted(idle, key=int) for block in idle[lane])]


def assert_no_leak(engine: Engine) -> None:
    """LEAK: a drained engine has every block free, no references, empty queues and tables."""
    snapshot = engine.snapshot()
    assert not engine.has_unfinished(), "the engine is not drained"
    for name in ("waiting", "running", "swapped", "requests", "block_tables", "ref_counts", "host_tables"):
        assert not snapshot[name], f"{name} is not empty after draining: {snapshot[name]}"
    free = unused_blocks(snapshot)
    assert sorted(free) == list(range(engine.scheduler.blocks.num_blocks)), (
        "blocks are missing from the free list"
    )


def check_map(engine: Engine) -> None:
    """MAP: ref counts equal the occurrences in live tables, the free list holds each unused block once."""
    engine.check()


def poison(engine: Engine) -> None:
    """POISON: fill the whole KV pool with NaN, so that a read of anything unwritten shows.

    What an idle engine has cached is forgotten first. Live requests lose what they have computed.
    """
    kv = getattr(engine.runner, "kv", None)
    if kv is None:
        raise ConfigError(
            f"{type(engine.runner).__name__} has no KV pool to poison; use a runner with a model."
        )
    engine.reset_prefix_cache("poisoned")
    kv.poison()


def force_preempt(engine: Engine, request_id: str) -> None:
    """Preempt a running request between two steps, as if the pool had run out."""
    engine.preempt(request_id, "forced")


def refuse_allocation(engine: Engine, *, at: int | Sequence[int]) -> None:
    """Make coming calls of the block manager's `allocate` fail as if no block were free; 0 is the next call."""
    blocks = engine.scheduler.blocks
    calls = [at] if isinstance(at, int) else list(at)
    if any(call < 0 for call in calls):
        raise ConfigError(f"at={at!r}: calls are counted from 0, the next one.")
    blocks.refuse_calls |= {blocks.num_calls + call for call in calls}
