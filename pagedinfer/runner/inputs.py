"""From a plan to tensors: buffers that persist from step to step and are filled, not rebuilt."""

from __future__ import annotations

import sys

import numpy as np
import torch

from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.engine.plan import ScheduledRequest, StepPlan
from pagedinfer.errors import RequestError

__all__ = ["InputBuffers"]

_Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class InputBuffers:
    """The step's integers. On the CPU the tensors share the buffers' memory: valid until the next `update`.

    Args:
        block_size: tokens per block.
        device: where the tensors must be.
        num_groups: block tables per request (`backends.layer_groups`).

    Attributes:
        batch: the plan's requests in the order of their rows.
    """

    def __init__(self, block_size: int, device: torch.device | str = "cpu", num_groups: int = 1) -> None:
        self.block_size = block_size
        self.device = torch.device(device)
        self._token_ids = np.empty(0, np.int64)
        self._positions = np.empty(0, np.int64)
        self._slots = [np.empty(0, np.int64)] * num_groups
        self._tables = [np.empty((0, 0), np.int64)] * num_groups
        self._count = np.arange(0, dtype=np.int64)
        self.batch: list[ScheduledRequest] = []

    def update(self, plan: StepPlan) -> tuple[ModelInputs, list[ScheduledRequest]]:
        """Fill the buffers for `plan`.

        Returns:
            the tensors, and the requests that sample. `logits_indices` has their rows in this order: of each the last
            known token's and its drafts'.

        Raises:
            RequestError: a request carries only lengths and no token ids.
        """
        # Single tokens first, in order of context; chunks stay as they come.
        items = sorted(plan.scheduled, key=lambda item: item.end if item.num_tokens == 1 else sys.maxsize)
        self.batch = items
        query_lens = [item.num_tokens for item in items]
        ends = [item.end for item in items]
        total, width = sum(query_lens), -(-max(ends) // self.block_size)
        self._reserve(total, len(items), width)
        token_ids, positions = self._token_ids[:total], self._positions[:total]

        query_start = np.cumsum([0, *query_lens], dtype=np.int64)
        token_ids[:] = _token_ids(items)
        rows = np.repeat(self._count[: len(items)], query_lens)
        np.subtract(self._count[:total], query_start[rows], out=positions)
        positions += np.asarray([item.start for item in items], np.int64)[rows]
        blocks, offsets = np.divmod(positions, self.block_size)
        groups = []
        for group in range(len(self._tables)):
            slots, tables = self._slots[group][:total], self._tables[group][: len(items), :width]
            self._fill_tables(tables, items, group)
            np.add(tables[rows, blocks] * self.block_size, offsets, out=slots)
            groups.append((self._tensor(slots), self._tensor(tables)))
        (slot_mapping, block_tables), *others = groups

        inputs = ModelInputs(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            slot_mapping=slot_mapping,
            query_start=self._tensor(query_start),
            context_lens=self._tensor(np.asarray(ends, np.int64)),
            block_tables=block_tables,
            logits_indices=self._tensor(_sampled_rows(items, query_start)),
            query_lens=query_lens,
            ends=ends,
            num_single=query_lens.count(1),
            groups=others,
        )
        return inputs, [item for item in items if item.samples]

    def _fill_tables(self, tables: _Ints, items: list[ScheduledRequest], group: int) -> None:
        # Whole tables each step: 64 of them cost a fraction of a millisecond, and a table that was changed by
        # a preemption or a copy can never be stale.
        tables.fill(-1)
        for row, item in enumerate(items):
            used = -(-item.end // self.block_size)
            table = item.block_table if group == 0 else item.group_tables[group - 1]
            assert len(table) >= used, f"{item.request_id}: {item.end} tokens, table {table} of group {group}"
            tables[row, :used] = table[:used]

    def _reserve(self, tokens: int, requests: int, width: int) -> None:
        """Make room, doubling so that growth is rare."""
        if tokens > len(self._token_ids):
            tokens = max(64, 2 * tokens)
            self._token_ids, self._positions, *self._slots = (
                np.empty(tokens, np.int64) for _ in range(2 + len(self._slots))
            )
            self._count = np.arange(tokens, dtype=np.int64)
        rows, columns = self._tables[0].shape
        if requests > rows or width > columns:
            shape = (max(rows, 2 * requests), max(columns, 2 * width))
            self._tables = [np.empty(shape, np.int64) for _ in self._tables]

    def _tensor(self, array: _Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _sampled_rows(items: list[ScheduledRequest], query_start: _Ints) -> _Ints:
    rows: list[int] = []
    for item, end in zip(items, query_start[1:].tolist(), strict=True):
        num_drafts = len(item.draft_token_ids)
        assert num_drafts < item.num_tokens and (item.samples or not num_drafts), (
            f"{item}: what do its drafts follow?"
        )
        if item.samples:
            rows.extend(range(end - 1 - num_drafts, end))
    return np.asarray(rows, np.int64)


def _token_ids(items: list[ScheduledRequest]) -> list[int]:
    ids: list[int] = []
    for item in items:
        known = item.end - len(item.draft_token_ids)
        if len(item.token_ids) < known:
            raise RequestError(
                f"request {item.request_id!r} has {len(item.token_ids)} token ids and computes up to "
                f"position {known - 1}: a request that carries only lengths runs on the simulated runner."
            )
        if item.num_tokens == 1:
            ids.append(item.token_ids[item.start])
        else:
            ids.extend(item.token_ids[item.start : known])
            ids.extend(item.draft_token_ids)
    return ids
