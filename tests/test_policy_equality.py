"""Whatever the policies decide, the tokens are those of each request alone: every name, on the tiny model."""

import pytest

from pagedinfer import Recorder, SamplingParams
from pagedinfer.config import ADMISSIONS, CHUNKINGS, ORDERS, PREEMPT_MODES, VICTIMS
from pagedinfer.testing import assert_no_leak, assert_same, cold_outputs, run_bounded, tiny_llm

pytestmark = pytest.mark.usefixtures("one_thread")

SHARED = [3, 1, 4, 1, 5, 9, 2, 6, 5]
PROMPTS = [[7] * 9, [*SHARED, 8, 8], [11, 12], [*SHARED, 9], [13] * 17, SHARED]
LENGTHS = (12, 9, 14, 10, 6, 11)
PARAMS = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in LENGTHS]
TENANTS = ("x", "x", "y", "x", "y", "z")
PRIORITIES = ("background", "interactive", 3, "background", "interactive", 3)

CROWDED = {
    "num_blocks": 13, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 12, "num_host_blocks": 6,
    "admission": "fits-now",
}  # fmt: skip
CASES = [
    *({"order": order} for order in ORDERS),
    {"order": "priority", "aging": 2.0},
    *({"victim": victim, "order": "priority"} for victim in VICTIMS),
    *({"preempt_mode": mode} for mode in PREEMPT_MODES),
    *({"admission": name} for name in ADMISSIONS if name != "expected-length"),
    {"admission": "expected-length", "expected_output_tokens": 2},
    *({"chunking": chunking} for chunking in CHUNKINGS),
    *({"chunking": chunking, "max_chunk_tokens": 3, "preempt_mode": "swap"} for chunking in CHUNKINGS),
    {"tenant_max_running": 1}, {"tenant_max_blocks": 7},
    {"order": "fair-share", "victim": "largest", "preempt_mode": "cheaper", "chunking": "equal-progress",
     "num_draft_tokens": 3},
    {"order": "longest-prefix", "victim": "fewest-tokens-lost", "preempt_mode": "swap", "chunking": "prefill-first",
     "num_draft_tokens": 2, "enable_prefix_caching": False},
]  # fmt: skip


@pytest.fixture(scope="module")
def references(one_thread):
    return cold_outputs(PROMPTS, PARAMS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_tokens_are_the_cold_runs(references, case):
    with tiny_llm(**(CROWDED | case)) as llm:
        engine, rids = llm.engine, []
        with Recorder(engine) as recording:
            for prompt, params, tenant, priority in zip(PROMPTS, PARAMS, TENANTS, PRIORITIES, strict=True):
                options = {"tenant": tenant, "deadline": 40 - len(prompt)}
                if engine.config.order == "priority":
                    options["priority"] = priority
                rids.append(engine.add_request(prompt, params, **options))
                engine.step()
            done = run_bounded(engine, 300)
        assert_no_leak(engine)
        outputs = [done[rid] for rid in rids]
    assert_same(outputs, references)
    kinds = {event.kind for event in recording.events}
    careful = {"full-reservation", "pressure"} & set(case.values()) or any(
        n.startswith("tenant") for n in case
    )
    if not careful:
        assert "preempt" in kinds, "nobody was crowded out: the case proves little"
