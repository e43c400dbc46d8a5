"""Prefix tree: what the prefix cache holds, which prefix follows which, how often each was hit and how old it is."""

from __future__ import annotations

from dataclasses import dataclass

from pagedinfer.trace.recording import Recording, recording_of
from pagedinfer.views.marks import SMALL, block_names, heading, part_of, share, wrapped
from pagedinfer.views.prefix_cache import CachedPrefix, PrefixCache, PrefixCaches
from pagedinfer.views.stepped import Sheet, SteppedView
from pagedinfer.views.svg import fit, legend, number, rect, text, translate

__all__ = ["PrefixTree"]

ROW, MAX_ROWS, ROOT = 38, 16, 10
UNIT = 64
"""Most pixels of a block."""


@dataclass(slots=True)
class _Cell:
    """A chain of prefixes that differ in nothing: one cell of the drawing, `top` and `rows` in leaf rows."""

    chain: list[CachedPrefix]
    depth: int
    users: int
    top: int = 0
    rows: int = 1


class PrefixTree(SteppedView):
    """The prefix cache as a tree, prompts from left to right: a cell is one or more blocks, right of it what follows.

    Cells say how often they were hit, their age (steps since they were cached or hit last, also as a bar below) and
    their blocks; solid edges are in use by requests, dashed ones idle: the next to be evicted. Thick edges are pinned.

    Args:
        recording: a run with prefix caching.
        step: the step to open at.
    """

    name = "Prefix tree"

    def __init__(self, recording: Recording, *, step: int = -1, title: str = "Prefix tree") -> None:
        self.recording = recording = recording_of(recording)
        self._caches = PrefixCaches(recording)
        super().__init__(title, [recording], step)

    def read(self) -> tuple[int, int]:
        """Only the steps' numbers: the caches are folded when they are asked for."""
        self._caches.forget()
        return self.recording.first_step, self.recording.last_step

    def cache(self, step: int | None = None) -> PrefixCache:
        """The cache at a step: read it before you ask for another. Asking for later steps in turn is quick."""
        return self._caches.at(self.clamp(step))

    # -- drawing --------------------------------------------------------------------------------------------------

    def sheet(self, step: int, width: int) -> Sheet:
        """The tree, and what happened in this step."""
        cache, users = self.cache(step), self.recording.at(step).ref_counts
        cells, hidden = self._cells(cache, users)
        sheet = Sheet(width, self._words(cache, users))
        sheet.notes = [*cache.causes, *(_cell_words(cell, cache) for cell in cells)]
        if hidden:
            sheet.notes.append(f"and {hidden} more branches")
        sheet.add(*heading(self.title, sheet.words, width))
        sheet.height += 6
        rows = max((cell.top + cell.rows for cell in cells), default=0)
        if cells:
            deepest = max(cell.depth + len(cell.chain) for cell in cells)
            unit = min(UNIT, (width - ROOT - 4) / deepest)
            oldest = max(1, *(step - cell.chain[0].used for cell in cells))
            parts = [rect("pi-muted", 0, 0, 4, rows * ROW - 4)]
            parts += [part for cell in cells for part in self._cell(cell, cache, unit, oldest)]
            sheet.add(parts, rows * ROW)
            sheet.add([text(0, 12, "start of prompts", SMALL)], 20)
        else:
            sheet.add([text(0, 14, "Nothing is cached at this step.", "pi-muted")], 24)
        if hidden:
            sheet.add([text(0, 12, f"and {hidden} more branches, used longer ago", SMALL)], 20)
        for cause in cache.causes[:4]:
            sheet.add(*wrapped(cause, 12, width))
        if len(cache.causes) > 4:
            sheet.add([text(0, 12, f"and {len(cache.causes) - 4} more", SMALL)], 18)
        key, below = _legend(width)
        sheet.add([translate(0, 22, key)], 40 + below)
        return sheet

    def _words(self, cache: PrefixCache, users: dict[int, int]) -> str:
        busy = sum(users.get(prefix.block_id, 0) > 0 for prefix in cache.prefixes.values())
        idle = len(cache.prefixes) - busy
        words = f"step {cache.step}: {len(cache.prefixes)} cached blocks, {busy} in use, {idle} idle; "
        words += (
            f"{cache.hits} of {cache.lookups} lookups hit, {cache.num_cached_tokens} of {cache.asked_tokens} "
        )
        return f"{words}tokens ({share(cache.num_cached_tokens, cache.asked_tokens)})"

    def _cells(self, cache: PrefixCache, users: dict[int, int]) -> tuple[list[_Cell], int]:
        """The cells from top to bottom, and how many branches are left out."""
        children = cache.children()
        leaves = [prefix for prefix in cache.prefixes.values() if prefix.key not in children]
        recent = sorted(leaves, key=lambda leaf: -leaf.used)[:MAX_ROWS]
        shown: set[int] = set()
        for leaf in recent:
            at: CachedPrefix | None = leaf
            while at is not None and at.key not in shown:
                shown.add(at.key)
                at = cache.prefixes.get(at.parent)
        cells: list[_Cell] = []
        row = 0
        stack = [(prefix, 0, None) for prefix in reversed(children.get(-1, [])) if prefix.key in shown]
        todo: list[tuple[CachedPrefix, int, _Cell | None]] = list(stack)
        parents: dict[int, _Cell | None] = {}
        while todo:
            prefix, depth, above = todo.pop()
            cell = _Cell([prefix], depth, users.get(prefix.block_id, 0), row)
            after = [p for p in children.get(prefix.key, []) if p.key in shown]
            while len(after) == 1 and _alike(cell, after[0], users):
                cell.chain.append(after[0])
                after = [p for p in children.get(after[0].key, []) if p.key in shown]
            parents[len(cells)] = above
            cells.append(cell)
            todo += [(p, depth + len(cell.chain), cell) for p in reversed(after)]
            if not after:
                row += 1
        for i in reversed(range(len(cells))):
            if (above := parents[i]) is not None:
                above.rows = max(above.rows, cells[i].top + cells[i].rows - above.top)
        return cells, len(leaves) - len(recent)

    def _cell(self, cell: _Cell, cache: PrefixCache, unit: float, oldest: int) -> list[str]:
        """The cell, and apart from it what changes with every step: its age."""
        x, y = ROOT + cell.depth * unit, cell.top * ROW
        w, h = len(cell.chain) * unit - 3, cell.rows * ROW - 4
        prefix, age = cell.chain[0], cache.step - cell.chain[0].used
        pinned = prefix.priority is not None and prefix.priority > 100
        body = _frame(x, y, w, h, bool(cell.users), pinned)
        hits, blocks, names = f"×{prefix.hits}", len(cell.chain), block_names(p.block_id for p in cell.chain)
        wide = w >= 12 * len(hits) + 46
        if _fits(hits, w):
            body += text(x + 4, y + 13, hits, "pi-ink pi-small pi-strong pi-num")
        line = f"blocks {names}" if blocks > 1 else f"block {names}"
        line = line if _fits(line, w) or blocks == 1 else f"{blocks} blocks"
        if h >= (26 if wide else 44) and _fits(line, w):
            body += text(x + 4, y + (26 if wide else 39), line, "pi-ink pi-small pi-num")
        at, ids = (
            f'data-k="{prefix.key}" data-x="{number(x)}" data-y="{number(y)}"',
            [p.block_id for p in cell.chain],
        )
        late = rect("pi-slack", x + 1, y + h - 4, (w - 2) * age / oldest, 3)
        if _fits(f"age {age}", w):
            place = (x + 4 + 7 * len(hits) + 8, y + 13) if wide else (x + 4, y + 26)
            late += text(*place, f"age {age}", "pi-ink pi-small pi-num")
        return [part_of(body, blocks=ids, title=_cell_words(cell, cache), more=at), part_of(late, blocks=ids)]


def _frame(x: float, y: float, w: float, h: float, used: bool, pinned: bool) -> str:
    """A cell's box: what is pinned has a thick edge, what nobody uses a dashed one."""
    edge = f'fill-opacity="{".38" if used else ".12"}"' + ("" if used else ' stroke-dasharray="4 3"')
    tone = "pi-live pi-s-ink" if used or pinned else "pi-live pi-s-muted"
    if pinned:
        return rect(tone, x + 1, y + 1, w - 2, h - 2, 0, f'{edge} stroke-width="2.6"')
    return rect(tone, x, y, w, h, 0, edge)


def _fits(words: str, width: float) -> bool:
    return fit(words, width - 8, 11) == words


def _alike(cell: _Cell, prefix: CachedPrefix, users: dict[int, int]) -> bool:
    last = cell.chain[-1]
    same = (last.hits, last.used, last.priority) == (prefix.hits, prefix.used, prefix.priority)
    return same and users.get(prefix.block_id, 0) == cell.users


def _cell_words(cell: _Cell, cache: PrefixCache) -> str:
    prefix, size = cell.chain[0], cache.block_size
    many = "s" if len(cell.chain) > 1 else ""
    words = f"block{many} {block_names(p.block_id for p in cell.chain)}: tokens {cell.depth * size} to "
    words += (
        f"{(cell.depth + len(cell.chain)) * size - 1}, hits {prefix.hits}, last used in step {prefix.used}, "
    )
    words += f"in use by {cell.users}" if cell.users else "idle"
    if prefix.priority is not None:
        words += ", pinned" if prefix.priority > 100 else f", retention priority {prefix.priority}"
    return words + (", what came before it is gone" if cache.is_orphan(prefix) else "")


def _legend(width: float) -> tuple[str, int]:
    marks = [
        ("in use", _frame(0, -11, 22, 13, True, False)),
        ("idle: may be evicted", _frame(0, -11, 22, 13, False, False)),
        ("pinned: never evicted", _frame(0, -11, 22, 13, True, True)),
        ("×3: hit 3 times", ""),
        ("age 5: last used 5 steps ago; full bar: the oldest", rect("pi-slack", 0, -4, 22, 3)),
    ]
    return legend(marks, width, 28)
