"""What `check`, `hint` and `reveal` return: small cards, readable as text and in a notebook."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

__all__ = ["Card", "Verdict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A heading, lines of text, perhaps code. The mark and the words carry the meaning; colour only repeats it.

    Attributes:
        mark: one character before the heading.
        heading: what this card is about.
        lines: sentences.
        code: source to show below them; empty for none.
    """

    mark: str
    heading: str
    lines: tuple[str, ...] = ()
    code: str = ""

    @property
    def _colour(self) -> str:
        return "#5b7083"

    def __repr__(self) -> str:
        body = [f"{self.mark} {self.heading}", *(f"  {line}" for line in self.lines)]
        if self.code:
            body += ["", *(f"    {line}".rstrip() for line in self.code.splitlines())]
        return "\n".join(body)

    def _repr_html_(self) -> str:
        lines = "".join(f"<p style='margin:.3em 0'>{escape(line)}</p>" for line in self.lines)
        code = f"<pre style='margin:.5em 0'>{escape(self.code)}</pre>" if self.code else ""
        return (
            f"<div role='status' style='border-left:4px solid {self._colour};padding:.2em .8em;max-width:48em'>"
            f"<p style='margin:.3em 0'><strong>{escape(f'{self.mark} {self.heading}')}</strong></p>{lines}{code}</div>"
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict(Card):
    """What a check found.

    Attributes:
        passed: True when the answer holds; False when it does not, or when there is none yet.
    """

    passed: bool

    @property
    def _colour(self) -> str:
        return {"✓": "#0f7b4d", "✗": "#b4440e"}.get(self.mark, "#5b7083")

    def __bool__(self) -> bool:
        return self.passed
