"""Attention over blocks: where the newest token of a request looks, drawn along its block table."""

from __future__ import annotations

from collections.abc import Sequence

from pagedinfer.errors import ConfigError, count
from pagedinfer.trace.tap_records import LayerAttention, TapRecord
from pagedinfer.views.svg import Drawing, fit, legend, number, path, rect, text, translate
from pagedinfer.views.tap_view import HATCH, WIDTH, TapView, bars_png, percent, quoted

__all__ = ["AttentionView", "attention_svg"]

MAX_ROWS = 16
"""Blocks with a row of their own, those with the largest shares; neighbours among the others share one."""
MAX_HEADS = 16
MAX_COLUMNS = 96
"""Columns of the strips of heads; where there are more blocks, a column stands for several neighbours."""
LINE = 22
LOGICAL, PHYSICAL, LEFT = 62, 130, 148
BAR = 220
STRIP = 26
SMALL, NUM = "pi-muted pi-small", "pi-ink pi-num"


class AttentionView(TapView):
    """Attention mass per block of one layer; one head, or the mean of those that were kept.

    Args:
        record: what a tap kept.
        layer: the layer's number; None: the last one kept.
        head: the query head's number; None: the mean.

    Raises:
        ConfigError: the record has no attention, or not of this layer or head.
    """

    title = "Attention over blocks"

    def __init__(self, record: TapRecord, layer: int | None = None, head: int | None = None) -> None:
        super().__init__(record)
        if not record.attention:
            raise ConfigError(
                "This record holds no attention; tap with attention=True and layers of the model."
            )
        layers = {each.layer: each for each in record.attention}
        if layer is not None and layer not in layers:
            raise ConfigError(f"layer={layer!r}: this record has {', '.join(map(str, layers))}.")
        self.layer: LayerAttention = record.attention[-1] if layer is None else layers[layer]
        if head is not None and head not in self.layer.heads:
            raise ConfigError(f"head={head!r}: this record has {', '.join(map(str, self.layer.heads))}.")
        self.head = head
        heads = self.layer.heads
        self.shares = self.layer.mean() if head is None else self.layer.mass[heads.index(head)]

    # -- in words -----------------------------------------------------------------------------------------------

    @property
    def which(self) -> str:
        """Whose attention: request, step, layer, head."""
        heads = len(self.layer.heads)
        head = f"head {self.head}" if self.head is not None else f"mean of {count(heads, 'head')}"
        return f"{self.record.request_id}, step {self.record.step}, layer {self.layer.layer}, {head}"

    @property
    def what(self) -> str:
        """What the newest token sees."""
        position, first = self.record.position, self.layer.first
        blocks = len(self.shares) - first // self.record.block_size
        seen = f"{count(position + 1 - first, 'token')} in {count(blocks, 'block')}"
        window = f" (window of {self.layer.window})" if self.layer.window is not None else ""
        return f"the newest token, at position {position}, looks at {seen}{window}"

    def text(self) -> str:
        """The shares of every block that has a row in the picture, in per cent."""
        out = [f"AttentionView({self.which}): {self.what}; shares of its attention"]
        for span in self._rows():
            words = self._words(span)
            out.append(f"  {self._name(span)}: {self._share(span)}{f'  {words}' if words else ''}")
        return "\n".join(out)

    def _rows(self) -> list[range]:
        """Runs of logical blocks, in order: blocks with large shares alone, neighbours between them together."""
        last = len(self.shares) - 1
        order = sorted(range(last + 1), key=lambda i: (i != last, -self.shares[i], i))
        alone, gone = set(order[:MAX_ROWS]), self.layer.first // self.record.block_size
        rows: list[range] = []
        for i in range(last + 1):
            joins = rows and i not in alone and rows[-1][-1] not in alone and i != gone
            if joins:
                rows[-1] = range(rows[-1].start, i + 1)
            else:
                rows.append(range(i, i + 1))
        return rows

    def _is_gone(self, span: range) -> bool:
        return span.stop * self.record.block_size <= self.layer.first

    def _share(self, span: range) -> str:
        return "outside the window" if self._is_gone(span) else percent(sum(self.shares[i] for i in span))

    def _name(self, span: range) -> str:
        if len(span) > 1:
            return f"logical {span.start} to {span.stop - 1}, {len(span)} blocks"
        return f"logical {span.start}, block {_physical(self.layer.block_table[span.start])}"

    def _words(self, span: range) -> str:
        """The text of the span's tokens, where there is any; of several blocks only its beginning."""
        size, tokens = self.record.block_size, self.record.tokens
        return quoted("".join(tokens[span.start * size : (span.start + 1) * size])) if tokens else ""

    # -- drawn --------------------------------------------------------------------------------------------------

    def draw(self) -> Drawing:
        """The block table with a bar per block; below, each head's own strip."""
        out = [f"<defs>{HATCH}</defs>", text(0, 12, f"{self.title}: {self.which}", "pi-ink pi-h")]
        out += [text(0, 31, fit(f"{self.what[0].upper()}{self.what[1:]}.", WIDTH), "pi-muted")]
        out += [text(LOGICAL, 58, "logical", SMALL, "end"), text(PHYSICAL, 58, "physical", SMALL, "end")]
        out.append(text(LEFT, 58, "share of attention, %", SMALL))
        if self.record.tokens:
            out.append(text(LEFT + BAR + 74, 58, "tokens", SMALL))
        y = 78
        most = max(self.shares)
        for span in self._rows():
            out.append(translate(0, y, self._row(span, most)))
            y += LINE
        y += 4
        out.append(translate(LEFT, y, _legend()))
        strips = self._strips()
        out.append(translate(0, y + 34, strips.body))
        top = max(range(len(self.shares)), key=self.shares.__getitem__)
        where = f"{self._name(range(top, top + 1))}, {percent(self.shares[top])}"
        words = f"{self.which}: {self.what}; most goes to {where}."
        return Drawing("".join(out), WIDTH, y + 34 + strips.height, words)

    def _row(self, span: range, most: float) -> str:
        share, last = sum(self.shares[i] for i in span), len(self.shares) - 1
        many, gone = len(span) > 1, self._is_gone(span)
        logical = f"{span.start}–{span.stop - 1}" if many else str(span.start)
        physical = f"{len(span)} blocks" if many else _physical(self.layer.block_table[span.start])
        out = [text(LOGICAL, 0, logical, NUM, "end"), text(PHYSICAL, 0, physical, NUM, "end")]
        out.append(rect("pi-free", LEFT, -10, BAR, 13, 2))
        if gone:
            out += [rect("", LEFT, -10, BAR, 13, 2, 'fill="url(#pi-gone)"')]
            out.append(text(LEFT + BAR + 8, 0, "not seen", "pi-muted pi-small"))
        else:
            if many:
                out.append(text(LEFT + 6, 0, "together", "pi-muted pi-small"))
            else:
                out.append(rect("pi-live", LEFT, -10, BAR * share / most, 13, 2))
            out.append(text(LEFT + BAR + 62, 0, percent(share), NUM, "end"))
        if last in span:
            out.append(path("pi-ink pi-s-page", f"M{LEFT + BAR - 7} -10h7v7z", 'stroke-width=".8"'))
        if words := self._words(span):
            out.append(text(LEFT + BAR + 74, 0, fit(words, WIDTH - LEFT - BAR - 74), "pi-muted"))
        return "".join(out)

    def _strips(self) -> Drawing:
        """A strip per head: its bars rise over the logical blocks, all heads to the same scale."""
        heads = self._heads()
        columns, each = self._columns(heads)
        wide = (WIDTH - LEFT - 160) / len(columns[0])
        wide = min(wide, 40.0)
        size = f", {each} blocks a column" if each > 1 else ""
        full = max(map(max, columns))
        caption = f"By head: share of attention over logical blocks{size}; a full bar is {percent(full)}"
        out = [text(0, 12, caption, "pi-muted")]
        y = 24
        for head, shares in zip(heads, columns, strict=True):
            strong = head == self.head
            if strong:
                out.append(rect("pi-accent", 0, y, 4, STRIP - 4, 1))
            out.append(text(PHYSICAL, y + 15, f"head {head}", NUM + " pi-strong" * strong, "end"))
            out.append(rect("pi-free", LEFT, y, wide * len(shares), STRIP - 4))
            out.append(
                path(
                    "pi-accent" if strong else "pi-live",
                    _bars(shares, wide, y + STRIP - 4, (STRIP - 4) / full),
                )
            )
            own = self.layer.mass[self.layer.heads.index(head)]
            top = max(range(len(own)), key=own.__getitem__)
            most = f"logical {top}: {percent(own[top])}"
            out.append(text(LEFT + wide * len(shares) + 10, y + 15, most, SMALL + " pi-num"))
            y += STRIP
        out += _axis(len(self.shares), each, wide, y + 10)
        if (hidden := len(self.layer.heads) - len(heads)) > 0:
            out.append(text(LEFT, y + 28, f"and {count(hidden, 'more head')}", SMALL))
        return Drawing("".join(out), WIDTH, y + (32 if hidden > 0 else 14), "")

    def _heads(self) -> list[int]:
        shown = list(self.layer.heads[:MAX_HEADS])
        return shown if self.head is None or self.head in shown else [*shown[:-1], self.head]

    def _columns(self, heads: Sequence[int]) -> tuple[list[list[float]], int]:
        """Per head its shares by column, and how many blocks a column stands for."""
        each = -(-len(self.shares) // MAX_COLUMNS)
        rows = [self.layer.mass[self.layer.heads.index(head)] for head in heads]
        return [[sum(row[i : i + each]) for i in range(0, len(row), each)] for row in rows], each

    def png(self) -> bytes:
        """The strips of the heads, without labels."""
        heads = self._heads()
        columns, each = self._columns(heads)
        gone = self.layer.first // self.record.block_size // each
        full = max(map(max, columns))
        rows = [[None] * gone + [share / full for share in shares[gone:]] for shares in columns]
        marked = heads.index(self.head) if self.head is not None else -1
        return bars_png(rows, (max(4, min(40, 560 // len(columns[0]))), 30), marked)


def _physical(block_id: int) -> str:
    return str(block_id) if block_id >= 0 else "freed"


def _bars(shares: Sequence[float], wide: float, base: float, tall: float) -> str:
    gap = 1.0 if wide >= 4 else 0.0
    return "".join(
        f"M{number(LEFT + i * wide)} {number(base)}v-{number(tall * share)}h{number(wide - gap)}V{number(base)}z"
        for i, share in enumerate(shares)
        if share > 0
    )


def _axis(blocks: int, each: int, wide: float, y: float) -> list[str]:
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**9) if n * wide / each >= 26)
    return [
        text(LEFT + (i // each + 0.5) * wide, y, str(i), SMALL + " pi-num", "middle")
        for i in range(0, blocks, every)
    ]


def _legend() -> str:
    box = rect("pi-free", 0, -10, 14, 12, 2)
    newest = box + path("pi-ink pi-s-page", "M8 -10h6v6z")
    gone = box + rect("", 0, -10, 14, 12, 2, 'fill="url(#pi-gone)"')
    return legend([
        ("share of attention (longest bar: the largest share)", rect("pi-live", 0, -10, 14, 12, 2)),
        ("holds the newest token", newest), ("outside the window", gone),
    ])  # fmt: skip


def attention_svg(record: TapRecord, layer: int | None = None, head: int | None = None) -> str:
    """Attention over blocks as an SVG file; see `AttentionView`."""
    return AttentionView(record, layer, head).svg()
