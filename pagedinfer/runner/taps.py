"""Tensor taps: what a step's attention and sampler did for chosen requests, kept as plain numbers.

A tap only reads: it copies queries, keys and logits where the step has them anyway, and computes on the copies.
Outputs are the same with and without it. A runner without taps asks one question per step and per layer.

Attention is computed once more, by the slow twin in float32, from the same queries and the same blocks. Sampling is
told by the sampler's own stages.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from pagedinfer.backends.attention import AttentionRule, attention_weights, gather_seen
from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.engine.plan import ScheduledRequest, StepPlan
from pagedinfer.errors import ConfigError
from pagedinfer.runner.explain import explain
from pagedinfer.trace.tap_records import LayerAttention, TapRecord, TokenChoice

__all__ = ["StepWatch", "Tap", "Tapped"]


class Tapped(Protocol):
    """A runner with tensors to tap."""

    taps: tuple[Tap, ...]
    """Who watches; the runner looks at the start of a step."""

    @property
    def kv(self) -> KVStorage:
        """The KV pool."""


class _Decodes(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Tap:
    """Keeps records of the steps that run while it is attached; also a context manager, which detaches at the end.

    Args:
        attention: keep attention per block. sampling: keep how tokens were chosen.
        requests: ids of those watched; None: all.
        layers: whose attention, negative from the last one; None: all. heads: query heads; None: all.
        steps: numbers of the steps watched (a range, a list); None: all.
        keep: how many steps to remember, the newest.
        top: how many of the likeliest tokens become candidates.
        tokenizer: whose texts of tokens are kept beside the numbers; None: no text is kept.

    Attributes:
        recording: of the same run, where there is one; a view of the tap goes along with the views of it.

    Raises:
        ConfigError: nothing is asked for, or a number is out of range.
    """

    def __init__(
        self,
        *,
        attention: bool = True,
        sampling: bool = True,
        requests: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        steps: Container[int] | None = None,
        keep: int = 64,
        top: int = 12,
        tokenizer: _Decodes | None = None,
    ) -> None:
        if not (attention or sampling):
            raise ConfigError(
                "A tap with attention=False and sampling=False keeps nothing; leave one of them on."
            )
        for name, value in (("keep", keep), ("top", top)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}: it must be an integer of at least 1.")
        if isinstance(requests, str):
            raise ConfigError(f"requests={requests!r}: give a list of ids, [{requests!r}].")
        self.attention, self.sampling, self.keep, self.top = attention, sampling, keep, top
        self.requests = None if requests is None else frozenset(requests)
        self.layers = None if layers is None else _numbers("layers", layers)
        self.heads = None if heads is None else _numbers("heads", heads)
        self._steps, self._tokenizer = steps, tokenizer
        self._kept: dict[int, list[TapRecord]] = {}
        self._total = 0
        self.recording: Any = None
        self._runner: Tapped | None = None

    # -- on and off ---------------------------------------------------------------------------------------------

    def attach(self, runner: Any) -> Self:
        """Watch this runner's steps from now on.

        Raises:
            ConfigError: it has no tensors, no such layer or head, or the tap is attached already.
        """
        if self._runner is not None:
            raise ConfigError("This tap is attached already; make another one, or close it first.")
        if not isinstance(getattr(runner, "taps", None), tuple):
            raise ConfigError(
                f"A {type(runner).__name__} has no tensors to tap; a tap needs a runner with a model, as LLM has."
            )
        tapped: Tapped = runner
        self._check("layers", self.layers, len(tapped.kv.groups.group))
        self._check("heads", self.heads, getattr(runner, "num_heads", None))
        self._runner = tapped
        tapped.taps = (*tapped.taps, self)
        return self

    @staticmethod
    def _check(name: str, wanted: tuple[int, ...] | None, count: int | None) -> None:
        if count is not None and (wrong := [n for n in wanted or () if not -count <= n < count]):
            raise ConfigError(f"{name}={wrong}: this model has {count}, numbered from 0.")

    def close(self) -> None:
        """Stop watching; the records stay. Harmless when called twice."""
        if self._runner is not None:
            self._runner.taps = tuple(tap for tap in self._runner.taps if tap is not self)
            self._runner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- what it has --------------------------------------------------------------------------------------------

    @property
    def records(self) -> list[TapRecord]:
        """All records kept, in order of steps."""
        return [record for records in list(self._kept.values()) for record in records]

    @property
    def last_step(self) -> int:
        """The newest step with a record; 0 where there is none."""
        return max(self._kept, default=0)

    def __len__(self) -> int:
        """How many records it has ever kept, those forgotten since among them: it grows with every one."""
        return self._total

    def last(self, request_id: str | None = None) -> TapRecord:
        """The newest record, of this request if one is named.

        Raises:
            ConfigError: there is none.
        """
        for record in reversed(self.records):
            if request_id in (None, record.request_id):
                return record
        whose = "" if request_id is None else f" of {request_id!r}"
        raise ConfigError(f"The tap has no record{whose} yet; run a step while it is attached.")

    def clear(self) -> None:
        """Forget all records."""
        self._kept.clear()

    def __repr__(self) -> str:
        kept = list(self._kept)
        span = f", steps {kept[0]} to {kept[-1]}" if kept else ""
        return f"Tap({len(self.records)} records{span}, {'attached' if self._runner else 'detached'})"

    # -- what the step asks of it -------------------------------------------------------------------------------

    def wants(self, step: int, request_id: str) -> bool:
        """Whether it watches this request in this step."""
        return (self._steps is None or step in self._steps) and (
            self.requests is None or request_id in self.requests
        )

    def text(self, token_id: int) -> str:
        """The token's text, "" without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def add(self, step: int, records: list[TapRecord]) -> None:
        """Keep a step's records (a step that is run again replaces its first run), and forget the oldest step."""
        if records:
            self._kept.pop(step, None)
            self._kept[step] = records
            self._total += len(records)
            while len(self._kept) > self.keep:
                del self._kept[next(iter(self._kept))]

    def record(self, step: int, one: _Watched, block_size: int) -> TapRecord:
        """A watched request's share of a step."""
        ids = one.item.token_ids[: one.position + 1]
        return TapRecord(
            step=step,
            request_id=one.item.request_id,
            block_size=block_size,
            position=one.position,
            attention=tuple(one.attention),
            choices=tuple(one.choices),
            tokens=tuple(map(self.text, ids)) if self._tokenizer is not None else (),
        )


def _numbers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    numbers = tuple(values) if isinstance(values, Iterable) else ()
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise ConfigError(f"{name}={values!r}: give a list of whole numbers, or None for all.")
    return numbers


@dataclass(slots=True)
class _Watched:
    """One request of a step that one tap watches; `row` is its newest query's of the step's T tokens."""

    tap: Tap
    item: ScheduledRequest
    row: int
    position: int
    attention: list[LayerAttention] = field(default_factory=list)
    choices: list[TokenChoice] = field(default_factory=list)


class StepWatch:
    """The eyes of all taps on one step; the runner makes it where it has taps and calls it as the step goes."""

    def __init__(
        self, taps: Sequence[Tap], plan: StepPlan, batch: Sequence[ScheduledRequest], kv: KVStorage
    ) -> None:
        self._kv, self._step = kv, plan.step
        self._watched: list[_Watched] = []
        self._rows: dict[int, list[tuple[str, torch.Tensor]]] = {}
        ends = itertools.accumulate(item.num_tokens for item in batch)
        for item, end in zip(batch, ends, strict=True):
            drafts = len(item.draft_token_ids)  # guesses: the newest token known comes before them
            for tap in taps:
                if tap.wants(plan.step, item.request_id):
                    self._watched.append(_Watched(tap, item, end - 1 - drafts, item.end - 1 - drafts))

    @property
    def queries(self) -> Callable[[int, torch.Tensor, AttentionRule], None] | None:
        """What `ModelInputs.watch` takes; None where no tap wants attention."""
        return self._queries if any(one.tap.attention for one in self._watched) else None

    def _queries(self, layer: int, q: torch.Tensor, rule: AttentionRule) -> None:
        for one in self._watched:
            if one.tap.attention and _chosen(layer, one.tap.layers, len(self._kv.groups.group)):
                heads = [h for h in range(q.shape[1]) if _chosen(h, one.tap.heads, q.shape[1])]
                one.attention.append(self._attention(layer, q[one.row], rule, one, heads))

    def _attention(
        self, layer: int, query: torch.Tensor, rule: AttentionRule, one: _Watched, heads: list[int]
    ) -> LayerAttention:
        """The shares per block of a query [H, D]."""
        kv, size = self._kv, self._kv.block_size
        number = kv.groups.group[layer]
        whole = one.item.block_table if number == 0 else one.item.group_tables[number - 1]
        table = list(whole[: one.position // size + 1])
        first, keys, _ = gather_seen(layer, kv, table, one.position, rule.window)
        block = torch.arange(first, one.position + 1, device=keys.device) // size
        group = len(query) // kv.num_kv_heads
        mass = torch.zeros(len(heads), len(table), dtype=torch.float64, device=keys.device)
        for place, head in enumerate(heads):
            weights = attention_weights(query[head], keys[:, head // group], rule)
            mass[place].index_add_(0, block, weights.double())
        return LayerAttention(
            layer, rule.window, first, tuple(table), tuple(heads), tuple(map(tuple, mass.tolist()))
        )

    def shaped(self, row: int, what: str, logits: torch.Tensor) -> None:
        """Note a sampling row as it is now; a change that changed nothing is no stage."""
        if row in self._rows and not torch.equal(logits, self._rows[row][-1][1]):
            self._rows[row].append((what, logits.clone()))

    def rows(self, logits: torch.Tensor, items: Sequence[ScheduledRequest]) -> None:
        """Note the rows [S, vocab_size] of watched requests as the model gave them; `items` are whose they are."""
        watched = {one.item.request_id for one in self._watched if one.tap.sampling}
        for row, item in enumerate(items):
            if item.request_id in watched:
                self._rows[row] = [("model", logits[row].clone())]

    def chosen(
        self,
        items: Sequence[ScheduledRequest],
        uniforms: Sequence[float],
        tokens: Sequence[int],
        left_out: Container[int] = (),
    ) -> None:
        """Note what came of the rows, but for those that failed or do not count.

        `items` are whose they are; several rows of one request are its output tokens from `output_index` on.
        """
        before: Counter[str] = Counter()
        for row, item in enumerate(items):
            index = item.output_index + before[item.request_id]
            before[item.request_id] += 1
            if row in self._rows and row not in left_out:
                for one in self._watched:
                    if one.tap.sampling and one.item.request_id == item.request_id:
                        one.choices.append(
                            explain(
                                self._rows[row],
                                item.params,
                                output_index=index,
                                uniform=uniforms[row],
                                token_id=tokens[row],
                                top=one.tap.top,
                                text=one.tap.text,
                            )
                        )

    def finish(self) -> None:
        """Hand each tap its records."""
        for tap in dict.fromkeys(one.tap for one in self._watched):
            mine = [one for one in self._watched if one.tap is tap]
            tap.add(self._step, [tap.record(self._step, one, self._kv.block_size) for one in mine])


def _chosen(number: int, wanted: tuple[int, ...] | None, count: int) -> bool:
    return wanted is None or number in wanted or number - count in wanted
