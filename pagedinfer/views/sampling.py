"""Sampling: the likeliest tokens before and after each thing that the sampler does, what dropped whom, and the draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedinfer.errors import ConfigError, count
from pagedinfer.trace.tap_records import Candidate, Stage, TapRecord, TokenChoice
from pagedinfer.views.marks import SMALL, hatched, wrapped
from pagedinfer.views.stepped import Sheet
from pagedinfer.views.svg import number, path, rect, short, text, translate
from pagedinfer.views.tap_view import NARROWEST_WIDE, TapView, cut, legend_rows, percent, quoted, titled

__all__ = ["SamplingView", "sampling_svg"]

LABEL, WHY = 158, 248
"""Room for the token left of the bars and for the sentence right of them, where there is any."""
OWN = ("model", "temperature", "min_p", "top_k", "top_p", "greedy")
"""Stages with a column of their own; what changes logits between them shares one."""
HEADS = {name: name.replace("_", "-") for name in OWN}
SHORT = {"temperature": "temp."}
"""Names over narrow columns."""
NUM = f"{SMALL} pi-num"


class _Choice:
    """One token's choice: its stages with a column, and everything about it in words."""

    def __init__(self, record: TapRecord, choice: TokenChoice) -> None:
        self.record, self.choice = record, choice
        self.columns = _columns(choice.stages)
        self.stages = [choice.stages[i] for i in self.columns]
        self.is_greedy = choice.stages[-1].name == "greedy"
        self.most = max(one.shares[i] for one in choice.candidates for i in self.columns)

    @property
    def words(self) -> str:
        """What was chosen, of what, and how."""
        choice, one = self.choice, self.choice.chosen
        token = quoted(one.text, one.token_id) + (f" (id {one.token_id})" if one.text else "")
        how = f"the most likely, {token}" if self.is_greedy else f"u = {choice.uniform:.4f} drew {token}"
        left = ", ".join(f"{_head(stage)} leaves {stage.left}" for stage in self.stages[1:])
        whose = f"{self.record.request_id}, output token {choice.output_index}"
        return f"{whose}: {how}; of {self.stages[0].left} tokens, {left}"

    @property
    def changes(self) -> str:
        """What changed logits before the sampler."""
        names = [stage.name for stage in self.choice.stages if stage.name not in OWN]
        return f"Logits changed by {', '.join(names)}." if names else ""

    def is_drawn(self, one: Candidate) -> bool:
        """Whether it is the token that came."""
        return one.token_id == self.choice.token_id

    def why(self, one: Candidate) -> str:
        """What drew it, or what dropped it."""
        if not self.is_drawn(one):
            return one.why
        if self.is_greedy:
            return "chosen: the most likely"
        return f"drawn: u in {one.start:.4f} to {one.start + one.shares[-1]:.4f}"

    def note(self, one: Candidate) -> str:
        """A candidate's shares after the stages, and its fate."""
        shares = " -> ".join(percent(one.shares[i]) for i in self.columns)
        why = self.why(one)
        return f"{quoted(one.text, one.token_id)}: {shares}{f'  {why}' if why else ''}"

    def notes(self) -> list[str]:
        """All numbers, a line each."""
        out = [" -> ".join(f"{_head(stage)}: {stage.left} left" for stage in self.stages)]
        out += [self.changes] * bool(self.changes)
        out += map(self.note, self.choice.candidates)
        rest = " -> ".join(percent(stage.rest) for stage in self.stages)
        return [*out, f"all others: {rest}"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where things stand at a width: cells `wide` pixels apart from `left` on, their tops at `cell` in a row."""

    width: int
    left: int
    wide: float
    cell: int
    line: int
    under: bool
    """Whether token and sentence stand over and under the cells."""

    @classmethod
    def at(cls, width: int, columns: int) -> _Place:
        """The places at a width."""
        if width >= NARROWEST_WIDE:
            return cls(width, LABEL, min(150.0, (width - LABEL - WHY) / columns), 2, 34, False)
        return cls(width, 8, min(150.0, (width - 14) / columns), 18, 64, True)

    def x(self, column: int) -> float:
        """Left edge of a cell."""
        return self.left + column * self.wide


class SamplingView(TapView):
    """One token's choice at each step.

    Args:
        given: a tap, which may go on keeping, a record, or records in a sequence.
        choice: which of a step's tokens, where there are several.
        request: whose records; None: of the selected request where it has any, else of the first one in the step,
            by id, that chose a token.
        step: the step to open at. A step without a record shows the newest one before; where that one chose no token
            (a chunk of its prompt), the view says so.

    Raises:
        ConfigError: no record chose a token, or as many, or there is none of this request.
    """

    name = "Sampling"

    def __init__(
        self,
        given: Any,
        choice: int = -1,
        *,
        request: str | None = None,
        step: int = -1,
        title: str = "Sampling",
    ) -> None:
        if isinstance(choice, bool) or not isinstance(choice, int):
            raise ConfigError(f"choice={choice!r}: it must be an integer; -1 is the last of a step's tokens.")
        self.choice = choice
        super().__init__(given, request, step, title)

    def _check(self, records: Sequence[TapRecord]) -> None:
        lacks = [self._lack(record) for record in records]
        if all(lacks):
            best = max(range(len(records)), key=lambda i: len(records[i].choices))
            raise ConfigError(f"{lacks[best]}; show another record.")

    def _lack(self, record: TapRecord) -> str:
        choices = record.choices
        if not choices:
            return (
                f"{record.request_id} chose no token in this step (a chunk of its prompt, a failure, or a tap with "
                "sampling=False)"
            )
        if not -len(choices) <= self.choice < len(choices):
            return f"choice={self.choice!r}: this record has {count(len(choices), 'choice')}"
        return ""

    def _choice(self, record: TapRecord) -> _Choice:
        return _Choice(record, record.choices[self.choice])

    def _words(self, record: TapRecord) -> str:
        return self._choice(record).words

    # -- drawn --------------------------------------------------------------------------------------------------

    def _draw(self, sheet: Sheet, record: TapRecord) -> None:
        """A row per candidate, a column per stage; below, the interval that u falls into."""
        made = self._choice(record)
        place = _Place.at(sheet.width, len(made.columns))
        sheet.notes = made.notes()
        bars = f"bars up to {percent(made.most)}".replace(" ", "\N{NO-BREAK SPACE}")
        caption = f"Probability of each token, %, after each stage; {bars}. {made.changes}".strip()
        sheet.add(*wrapped(caption, 12, sheet.width))
        sheet.add(_header(made, place), 58)
        rows = [[one.shares[i] for i in made.columns] for one in made.choice.candidates]
        rows.append([stage.rest for stage in made.stages])
        parts = [_candidate(made, one, place) for one in made.choice.candidates] + [_others(made, place)]
        top = sheet.height
        sheet.add(
            [translate(0, i * place.line, _ground(row, place)) for i, row in enumerate(rows)],
            len(rows) * place.line,
        )
        sheet.over(top, [translate(0, i * place.line, part) for i, part in enumerate(parts)])
        sheet.height += 4
        legend, tall = legend_rows(_marks(made.is_greedy), sheet.width - place.left)
        sheet.add([translate(place.left, 0, "".join(legend))], tall + 14)
        if not made.is_greedy:
            caption = "The draw: what is left, side by side in the order of token ids, and u"
            sheet.add(*wrapped(caption, 12, sheet.width))
            sheet.add(_interval(made, sheet.width), 78)


def _header(made: _Choice, place: _Place) -> list[str]:
    out = [] if place.under else [text(8, 47, "token", SMALL)]
    for column, stage in enumerate(made.stages):
        x = place.x(column)
        left = (
            f"{stage.left} left" if place.wide >= 84 or stage.left < 10_000 else f"{short(stage.left)} left"
        )
        value = "" if stage.value is None else f"{stage.value:g}"
        body = text(
            x,
            19,
            _name(stage) if place.wide >= 84 else SHORT.get(stage.name, _name(stage)),
            "pi-ink pi-small pi-strong",
        )
        body += text(x, 33, value, NUM) if value else ""
        out.append(titled(f"{_head(stage)}: {stage.left} left", body + text(x, 47, left, NUM)))
    return out


def _ground(shares: Sequence[float], place: _Place) -> str:
    """What is under a row's bars, the same at many steps: of what is gone a dash and hatching."""
    out, y, wide = [], place.cell + 13, place.wide - 10
    for column, share in enumerate(shares):
        x = place.x(column)
        out.append(rect("pi-free", x, y, wide, 9, 2))
        out += [text(x, y - 5, "–", NUM), hatched("idle", x, y, wide, 9)] * (not share)
    return "".join(out)


def _candidate(made: _Choice, one: Candidate, place: _Place) -> str:
    drawn, why = made.is_drawn(one), made.why(one)
    strong = "pi-ink pi-strong" if drawn else "pi-ink"
    out = []
    if drawn:
        box = (1, -4, place.width - 2, place.line - 2, 4)
        out.append(rect("pi-s-accent", *box, 'fill="none" stroke-width="2"'))
    name = quoted(one.text, one.token_id)
    if place.under:
        out.append(text(place.left, 12, cut(name, place.width - 110), strong))
        if one.text:
            out.append(text(place.width - 8, 12, f"id {one.token_id}", NUM, "end"))
        out.append(
            text(
                place.left, 54, cut(why, place.width - 16, 11), "pi-ink pi-small pi-strong" if drawn else NUM
            )
        )
    else:
        out.append(text(8, 17, cut(name, LABEL - 62), strong))
        if one.text:
            out.append(text(LABEL - 12, 17, str(one.token_id), NUM, "end"))
        x, (head, _, tail) = place.x(len(made.columns)) + 6, why.partition(": ")
        out.append(text(x, 9 if tail else 16, head, "pi-ink pi-small pi-strong" if drawn else SMALL))
        out += [text(x, 23, cut(tail, place.width - x, 11), NUM)] if tail else []
    out.append(_cells([one.shares[i] for i in made.columns], made.most, place))
    return titled(made.note(one), "".join(out))


def _others(made: _Choice, place: _Place) -> str:
    rest = [stage.rest for stage in made.stages]
    label = text(8, 12 if place.under else 17, "all other tokens", "pi-muted")
    return label + _cells(rest, made.most, place)


def _cells(shares: Sequence[float], most: float, place: _Place) -> str:
    """Numbers over bars."""
    out, y, bars = [], place.cell + 13, {"pi-muted": "", "pi-live": ""}
    for column, share in enumerate(shares):
        if share:
            x, long = place.x(column), (place.wide - 10) * min(1.0, share / most)
            out.append(text(x, y - 5, percent(share), NUM))
            bars["pi-live" if column else "pi-muted"] += f"M{number(x)} {y}h{number(long)}v9h-{number(long)}z"
    return "".join(out) + "".join(path(tone, d) for tone, d in bars.items() if d)


def _interval(made: _Choice, width: int) -> list[str]:
    """The shares left, end to end in the order of token ids, and u."""
    room, u = width - 4, made.choice.uniform
    out = [rect("pi-free pi-s-line", 0, 26, room, 20, 0, 'stroke-width=".75"')]
    out += [text(0, 62, "0", NUM), text(room, 62, "1", NUM, "end")]
    for one in sorted(made.choice.candidates, key=lambda each: each.start):
        x, wide = one.start * room, one.shares[-1] * room
        if wide <= 0:
            continue
        body = rect("pi-accent" if made.is_drawn(one) else "pi-live", x, 26, max(0.8, wide - 1), 20)
        label = quoted(one.text, one.token_id)
        if wide >= 7 * len(label) + 8:
            body += text(x + wide / 2, 40, label, "pi-page pi-small pi-strong", "middle")
        out.append(titled(f"{label}: u from {one.start:.4f} to {one.start + one.shares[-1]:.4f}", body))
    x = u * room
    mark = path("pi-ink pi-s-page", f"M{number(x)} 25L{number(x - 6)} 16h12z", 'stroke-width=".8"')
    mark += path("pi-s-ink", f"M{number(x)} 22V26M{number(x)} 46V51", 'fill="none" stroke-width="1.6"')
    right = x > room - 90
    label = text(
        x + (-10 if right else 10), 20, f"u = {u:.4f}", "pi-ink pi-small pi-num", "end" if right else ""
    )
    return [*out, mark + label]


def _columns(stages: Sequence[Stage]) -> list[int]:
    """Stages with a column: those of the sampler, and the last of those that changed logits."""
    changed = [i for i, stage in enumerate(stages) if stage.name not in OWN]
    return sorted({*(i for i, stage in enumerate(stages) if stage.name in OWN), *changed[-1:]})


def _name(stage: Stage) -> str:
    return HEADS.get(stage.name, "changed")


def _head(stage: Stage) -> str:
    return _name(stage) if stage.value is None else f"{_name(stage)} {stage.value:g}"


def _marks(greedy: bool) -> list[tuple[str, str]]:
    bar = (0, 2, 14, 9)
    return [
        ("of the model", rect("pi-muted", *bar, 2)), ("after a stage", rect("pi-live", *bar, 2)),
        ("nothing left", rect("pi-free", *bar, 2) + hatched("idle", *bar)),
        ("chosen" if greedy else "drawn", rect("pi-s-accent", 1, 2, 13, 9, 3, 'fill="none" stroke-width="2"')),
    ]  # fmt: skip


def sampling_svg(record: Any, choice: int = -1) -> str:
    """How a token was chosen as an SVG file; see `SamplingView`."""
    return SamplingView(record, choice).svg()
