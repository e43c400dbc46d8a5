"""What one layer's attention of a tap's record says: shares of blocks, rows of the picture, words."""

from __future__ import annotations

from functools import cached_property

from pagedinfer.errors import count
from pagedinfer.trace.tap_records import LayerAttention, TapRecord
from pagedinfer.views.tap_view import percent, quoted

__all__ = ["Look"]

MAX_ROWS = 16
"""Blocks with a row of their own, those with the largest shares; neighbours among the others share one."""
MAX_HEADS = 16


class Look:
    """One layer's attention of a record: one head's, or the mean of those kept."""

    def __init__(self, record: TapRecord, layer: LayerAttention, head: int | None) -> None:
        self.record, self.layer, self.head = record, layer, head
        self.shares = layer.mean() if head is None else layer.mass[layer.heads.index(head)]
        self.last = len(self.shares) - 1

    @property
    def words(self) -> str:
        """Whose attention, what its newest token sees, and where it looks most."""
        record, layer = self.record, self.layer
        head = f"head {self.head}" if self.head is not None else f"mean of {count(len(layer.heads), 'head')}"
        blocks = count(self.last + 1 - layer.first // record.block_size, "block")
        window = f" (window of {layer.window})" if layer.window is not None else ""
        top = max(range(self.last + 1), key=self.shares.__getitem__)
        return (
            f"{record.request_id}, layer {layer.layer}, {head}: the newest token, at position {record.position}, looks "
            f"at {count(record.position + 1 - layer.first, 'token')} in {blocks}{window}; most goes to "
            f"{self.name(range(top, top + 1))}, {percent(self.shares[top])}"
        )

    @cached_property
    def rows(self) -> list[range]:
        """Runs of logical blocks, in order: blocks with large shares alone, neighbours between them together."""
        order = sorted(range(self.last + 1), key=lambda i: (i != self.last, -self.shares[i], i))
        alone, gone = set(order[:MAX_ROWS]), self.layer.first // self.record.block_size
        rows: list[range] = []
        for i in range(self.last + 1):
            if rows and i not in alone and rows[-1][-1] not in alone and i != gone:
                rows[-1] = range(rows[-1].start, i + 1)
            else:
                rows.append(range(i, i + 1))
        return rows

    def is_gone(self, span: range) -> bool:
        """Whether the window has left these blocks."""
        return span.stop * self.record.block_size <= self.layer.first

    def share(self, span: range) -> str:
        """Their share together, in words."""
        return "outside the window" if self.is_gone(span) else percent(sum(self.shares[i] for i in span))

    def physical(self, span: range) -> str:
        """Their block's id, or how many they are."""
        if len(span) > 1:
            return f"{len(span)} blocks"
        return "freed" if (block_id := self.layer.block_table[span.start]) < 0 else str(block_id)

    def name(self, span: range) -> str:
        """The blocks in words."""
        if len(span) > 1:
            return f"logical {span.start} to {span.stop - 1}, {self.physical(span)}"
        return f"logical {span.start}, block {self.physical(span)}"

    def ids(self, span: range) -> str:
        """The attribute that names the physical blocks; "" where all are freed."""
        ids = [self.layer.block_table[i] for i in span if self.layer.block_table[i] >= 0]
        return f'data-blocks="{" ".join(map(str, ids))}"' if ids else ""

    def text(self, span: range) -> str:
        """The text of the span's tokens, where there is any; of several blocks only its beginning."""
        size, tokens = self.record.block_size, self.record.tokens
        return quoted("".join(tokens[span.start * size : (span.start + 1) * size])) if tokens else ""

    def note(self, span: range) -> str:
        """The blocks, their share and their text."""
        words = self.text(span)
        return f"{self.name(span)}: {self.share(span)}{f'  {words}' if words else ''}"

    def shown_heads(self) -> list[int]:
        """The heads with a strip."""
        shown = list(self.layer.heads[:MAX_HEADS])
        return shown if self.head is None or self.head in shown else [*shown[:-1], self.head]

    def top(self, head: int) -> tuple[int, float]:
        """The logical block that a head looks at most, and its share."""
        own = self.layer.mass[self.layer.heads.index(head)]
        return max(enumerate(own), key=lambda pair: pair[1])
