"""Sampling: the likeliest tokens before and after each thing that the sampler does, what dropped whom, and the draw."""

from __future__ import annotations

from collections.abc import Sequence

from pagedinfer.errors import ConfigError, count
from pagedinfer.trace.tap_records import Candidate, Stage, TapRecord, TokenChoice
from pagedinfer.views.svg import Drawing, fit, legend, number, path, rect, text, translate
from pagedinfer.views.tap_view import HATCH, WIDTH, TapView, bars_png, percent, quoted

__all__ = ["SamplingView", "sampling_svg"]

LABEL, WHY = 170, 246
"""Room for the token left of the bars and for the sentence right of them."""
LINE = 34
OWN = ("model", "temperature", "min_p", "top_k", "top_p", "greedy")
"""Stages with a column of their own; what changes logits between them shares one."""
HEADS = {name: name.replace("_", "-") for name in OWN}
SMALL, NUM = "pi-muted pi-small", "pi-muted pi-small pi-num"


class SamplingView(TapView):
    """One token's choice.

    Args:
        record: what a tap kept.
        choice: which of the step's tokens, where there are several.

    Raises:
        ConfigError: the step chose no token, or not as many.
    """

    title = "Sampling"

    def __init__(self, record: TapRecord, choice: int = -1) -> None:
        super().__init__(record)
        if not record.choices:
            raise ConfigError(
                f"Step {record.step} chose no token for {record.request_id} (a chunk of its prompt, a failure, or a "
                "tap with sampling=False); show another record."
            )
        wrong = isinstance(choice, bool) or not isinstance(choice, int)
        if wrong or not -len(record.choices) <= choice < len(record.choices):
            raise ConfigError(f"choice={choice!r}: this record has {count(len(record.choices), 'choice')}.")
        self.choice: TokenChoice = record.choices[choice]
        self._columns = _columns(self.choice.stages)

    @property
    def which(self) -> str:
        """What was chosen, of what, and how."""
        choice, one = self.choice, self.choice.chosen
        whose = f"{self.record.request_id}, step {self.record.step}, output token {choice.output_index}"
        token = quoted(one.text, one.token_id)
        token += f" (id {one.token_id})" if one.text else ""
        if choice.stages[-1].name == "greedy":
            return f"{whose}: the most likely, {token}"
        return f"{whose}: u = {choice.uniform:.4f} drew {token}"

    @property
    def _changes(self) -> str:
        names = [stage.name for stage in self.choice.stages if stage.name not in OWN]
        return f"Logits changed by {', '.join(names)}." if names else ""

    # -- in words -----------------------------------------------------------------------------------------------

    def text(self) -> str:
        """The stages, and each candidate's shares after them in per cent."""
        stages = [f"{_head(stage)}: {stage.left} left" for stage in self._shown]
        out = [f"SamplingView({self.which})", f"  {' -> '.join(stages)}"]
        out += [f"  {self._changes}"] * bool(self._changes)
        for one in self.choice.candidates:
            shares = " -> ".join(percent(one.shares[i]) for i in self._columns)
            out.append(f"  {quoted(one.text, one.token_id)}: {shares}{self._note(one, '  ')}")
        rest = " -> ".join(percent(stage.rest) for stage in self._shown)
        return "\n".join([*out, f"  all others: {rest}"])

    @property
    def _shown(self) -> list[Stage]:
        return [self.choice.stages[i] for i in self._columns]

    def _note(self, one: Candidate, before: str = "") -> str:
        if one.token_id == self.choice.token_id:
            if self.choice.stages[-1].name == "greedy":
                return f"{before}chosen: the most likely"
            return f"{before}drawn: u in {one.start:.4f} to {one.start + one.shares[-1]:.4f}"
        return f"{before}{one.why}" if one.why else ""

    # -- drawn --------------------------------------------------------------------------------------------------

    def draw(self) -> Drawing:
        """A row per candidate, a column per stage; below, the interval that u falls into."""
        greedy = self.choice.stages[-1].name == "greedy"
        out = [
            f"<defs>{HATCH}</defs>",
            text(0, 12, f"{self.title}: {fit(self.which, 820, 14)}", "pi-ink pi-h"),
        ]
        caption = f"Probability of each token, %, after each stage; bars up to {percent(self._most)}. {self._changes}"
        out += [text(0, 31, fit(caption, WIDTH), "pi-muted"), self._header()]
        y = 92
        for one in self.choice.candidates:
            out.append(translate(0, y, self._candidate(one)))
            y += LINE
        out.append(translate(0, y, self._others()))
        y += LINE + 6
        out.append(translate(LABEL, y + 8, _legend(greedy)))
        y += 26
        if not greedy:
            out.append(translate(0, y, self._interval()))
            y += 84
        stages = ", ".join(f"{_head(stage)} leaves {stage.left}" for stage in self._shown[1:])
        return Drawing("".join(out), WIDTH, y, f"{self.which}. Of {self._shown[0].left} tokens, {stages}.")

    @property
    def _most(self) -> float:
        return max(one.shares[i] for one in self.choice.candidates for i in self._columns)

    @property
    def _wide(self) -> float:
        return min(150.0, (WIDTH - LABEL - WHY) / len(self._columns))

    def _header(self) -> str:
        out = [text(0, 76, "token", SMALL)]
        for place, stage in enumerate(self._shown):
            x = LABEL + place * self._wide
            out.append(text(x, 60, _name(stage), "pi-ink pi-small pi-strong"))
            value = "" if stage.value is None else f"{stage.value:g}: "
            out.append(text(x, 76, f"{value}{stage.left} left", NUM))
        return "".join(out)

    def _candidate(self, one: Candidate) -> str:
        drawn = one.token_id == self.choice.token_id
        name = fit(quoted(one.text, one.token_id), LABEL - 62)
        out = (
            [rect("pi-s-accent", -5, -4, WIDTH + 10, LINE - 2, 4, 'fill="none" stroke-width="2"')]
            if drawn
            else []
        )
        out.append(text(0, 17, name, "pi-ink" + " pi-strong" * drawn))
        if one.text:
            out.append(text(LABEL - 12, 17, str(one.token_id), NUM, "end"))
        out += [self._cell(place, one.shares[i]) for place, i in enumerate(self._columns)]
        x = LABEL + len(self._columns) * self._wide + 6
        head, _, tail = self._note(one).partition(": ")
        tone = "pi-ink pi-small pi-strong" if drawn else SMALL
        out += [text(x, 9 if tail else 16, head, tone)] if head else []
        out += [text(x, 23, fit(tail, WIDTH - x, 11), SMALL + " pi-num")] if tail else []
        return "".join(out)

    def _others(self) -> str:
        out = [text(0, 17, "all other tokens", "pi-muted")]
        return "".join(out + [self._cell(place, stage.rest) for place, stage in enumerate(self._shown)])

    def _cell(self, place: int, share: float) -> str:
        x, wide = LABEL + place * self._wide, self._wide - 10
        out = [text(x, 8, percent(share) if share else "–", NUM), rect("pi-free", x, 13, wide, 9, 2)]
        if share:
            tone = "pi-live" if place else "pi-muted"
            out.append(rect(tone, x, 13, wide * min(1.0, share / self._most), 9, 2))
        else:
            out.append(rect("", x, 13, wide, 9, 2, 'fill="url(#pi-gone)"'))
        return "".join(out)

    def _interval(self) -> str:
        """The shares left, end to end in the order of token ids, and u."""
        room, u = WIDTH - 24, self.choice.uniform
        out = [
            text(0, 12, "The draw: what is left, side by side in the order of token ids, and u", "pi-muted")
        ]
        out.append(rect("pi-free pi-s-line", 0, 34, room, 20, 0, 'stroke-width=".75"'))
        for one in sorted(self.choice.candidates, key=lambda each: each.start):
            x, wide = one.start * room, one.shares[-1] * room
            if wide <= 0:
                continue
            drawn = one.token_id == self.choice.token_id
            out.append(rect("pi-accent" if drawn else "pi-live", x, 34, max(0.8, wide - 1), 20))
            label = quoted(one.text, one.token_id)
            if wide >= 7 * len(label) + 8:
                out.append(text(x + wide / 2, 48, label, "pi-page pi-small pi-strong", "middle"))
        x = u * room
        out.append(path("pi-ink pi-s-page", f"M{number(x)} 33l-6 -9h12z", 'stroke-width=".8"'))
        out.append(
            path("pi-s-ink", f"M{number(x)} 30V34M{number(x)} 54V59", 'fill="none" stroke-width="1.6"')
        )
        right = x > room - 90
        out.append(
            text(
                x + (-10 if right else 10),
                30,
                f"u = {u:.4f}",
                "pi-ink pi-small pi-num",
                "end" if right else "",
            )
        )
        out += [text(0, 70, "0", NUM), text(room, 70, "1", NUM, "end")]
        return "".join(out)

    def png(self) -> bytes:
        """A row per candidate and a rising bar per stage, without labels; the one that came is marked."""
        most = self._most
        rows = [[min(1.0, one.shares[i] / most) for i in self._columns] for one in self.choice.candidates]
        marked = [one.token_id for one in self.choice.candidates].index(self.choice.token_id)
        return bars_png(rows, (48, 24), marked)


def _columns(stages: Sequence[Stage]) -> list[int]:
    """Stages with a column: those of the sampler, and the last of those that changed logits."""
    changed = [i for i, stage in enumerate(stages) if stage.name not in OWN]
    return sorted({*(i for i, stage in enumerate(stages) if stage.name in OWN), *changed[-1:]})


def _name(stage: Stage) -> str:
    return HEADS.get(stage.name, "changed")


def _head(stage: Stage) -> str:
    return _name(stage) if stage.value is None else f"{_name(stage)} {stage.value:g}"


def _legend(greedy: bool) -> str:
    box = rect("pi-free", 0, -9, 14, 9, 2)
    end = "chosen" if greedy else "drawn"
    return legend([
        ("of the model", rect("pi-muted", 0, -9, 14, 9, 2)), ("after a stage", rect("pi-live", 0, -9, 14, 9, 2)),
        ("nothing left", box + rect("", 0, -9, 14, 9, 2, 'fill="url(#pi-gone)"')),
        (end, rect("pi-s-accent", 1, -9, 13, 9, 3, 'fill="none" stroke-width="2"')),
    ])  # fmt: skip


def sampling_svg(record: TapRecord, choice: int = -1) -> str:
    """How a token was chosen as an SVG file; see `SamplingView`."""
    return SamplingView(record, choice).svg()
