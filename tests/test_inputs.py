import pytest
import torch

from pagedinfer.config import SamplingParams
from pagedinfer.engine.plan import ScheduledRequest, StepPlan
from pagedinfer.errors import RequestError
from pagedinfer.runner.inputs import InputBuffers


def item(rid, tokens, start, num, table, *, samples=True):
    return ScheduledRequest(
        request_id=rid,
        start=start,
        num_tokens=num,
        samples=samples,
        output_index=0,
        is_prefill=num > 1,
        new_block_ids=(),
        block_table=table,
        token_ids=tokens,
        params=SamplingParams(),
        seed=0,
    )


def plan(*items):
    return StepPlan(step=1, now=1.0, token_budget=512, scheduled=list(items))


def test_a_mixed_plan_in_numbers():
    inputs, sampled = InputBuffers(4).update(
        plan(
            item("chunk", list(range(100, 110)), 3, 5, (7, 2, 9), samples=False),
            item("decode", [11, 12, 13, 14, 15], 4, 1, [5, 0]),
            item("prefill", [21, 22], 0, 2, (1,)),
        )
    )
    # The single token comes first, the rest keeps its order.
    assert inputs.token_ids.tolist() == [15, 103, 104, 105, 106, 107, 21, 22]
    assert inputs.positions.tolist() == [4, 3, 4, 5, 6, 7, 0, 1]
    assert inputs.slot_mapping.tolist() == [0, 31, 8, 9, 10, 11, 4, 5]
    assert inputs.query_start.tolist() == [0, 1, 6, 8]
    assert inputs.context_lens.tolist() == inputs.ends == [5, 8, 2]
    assert inputs.query_lens == [1, 5, 2]
    assert inputs.block_tables.tolist() == [[5, 0], [7, 2], [1, -1]]  # no wider than the tokens need
    assert inputs.num_single == 1
    assert inputs.logits_indices.tolist() == [0, 7]
    assert [one.request_id for one in sampled] == ["decode", "prefill"]
    for name in ("token_ids", "positions", "slot_mapping", "query_start", "context_lens", "logits_indices"):
        assert getattr(inputs, name).dtype == torch.int64


def test_single_tokens_are_ordered_by_context_and_chunks_are_not():
    ids = list(range(40))
    items = [item(str(end), ids, end - num, num, (0,) * 10) for num, end in ((2, 9), (1, 8), (2, 4), (1, 3))]
    inputs, sampled = InputBuffers(4).update(plan(*items))
    assert [one.request_id for one in sampled] == ["3", "8", "9", "4"]
    assert inputs.ends == [3, 8, 9, 4]


def test_nothing_of_an_earlier_step_remains():
    buffers = InputBuffers(2)
    buffers.update(
        plan(*(item(f"r{i}", list(range(50)), 0, 50, range(25 * i, 25 * i + 25)) for i in range(4)))
    )
    small = plan(item("b", [4], 0, 1, (8,)), item("a", [1, 2, 3], 2, 1, (3, 1)))
    again, _ = buffers.update(small)
    fresh, _ = InputBuffers(2).update(small)
    for name in ("token_ids", "positions", "slot_mapping", "query_start", "context_lens", "block_tables"):
        assert getattr(again, name).tolist() == getattr(fresh, name).tolist()
    assert again.block_tables.tolist() == [[8, -1], [3, 1]]


def test_buffers_persist():
    buffers = InputBuffers(2)
    first, _ = buffers.update(plan(item("a", [1, 2, 3], 2, 1, (3, 1))))
    second, _ = buffers.update(plan(item("a", [1, 2, 3, 4], 3, 1, (3, 1))))
    assert first.token_ids.data_ptr() == second.token_ids.data_ptr()
    assert first.block_tables.data_ptr() == second.block_tables.data_ptr()


def test_a_resumed_request_is_a_chunk_although_it_has_output():
    resumed = item("r", list(range(9)), 0, 9, (0, 1, 2))
    resumed.output_index = 5
    inputs, sampled = InputBuffers(4).update(plan(resumed))
    assert inputs.num_single == 0
    assert inputs.positions.tolist() == list(range(9))
    assert sampled == [resumed]


def test_a_request_without_token_ids_is_refused():
    with pytest.raises(RequestError, match=r"'trace'.*simulated runner"):
        InputBuffers(4).update(plan(item("trace", (), 0, 3, (0,))))


def test_every_group_has_its_own_tables_and_slots():
    decode, chunk = item("decode", list(range(9)), 8, 1, (5, 0, 7)), item("chunk", [21, 22, 23], 0, 3, (1,))
    decode.group_tables, chunk.group_tables = ((-1, -1, 4), (-1, 8, 9)), ((2,), (3,))
    buffers = InputBuffers(4, num_groups=3)
    inputs, _ = buffers.update(plan(decode, chunk))
    expected = [
        ([28, 4, 5, 6], [[5, 0, 7], [1, -1, -1]]),
        ([16, 8, 9, 10], [[-1, -1, 4], [2, -1, -1]]),
        ([36, 12, 13, 14], [[-1, 8, 9], [3, -1, -1]]),
    ]
    for group, (slots, tables) in enumerate(expected):
        one = inputs.of_group(group)
        assert (one.slot_mapping.tolist(), one.block_tables.tolist()) == (slots, tables)
        assert one.positions is inputs.positions
    again, _ = buffers.update(plan(chunk, decode))
    assert again.of_group(2).block_tables.data_ptr() == inputs.of_group(2).block_tables.data_ptr()
