"""What a tensor tap kept of one request's step, as plain numbers: attention per block, and how tokens were chosen.

Taps are not events: a recording holds none of this. A record goes to JSON and back, so that a notebook can ship one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pagedinfer.errors import RecordingError

__all__ = ["Candidate", "LayerAttention", "Stage", "TapRecord", "TokenChoice"]

SCHEMA = "tap 1.0"


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Where one layer's newest query looked: attention weights, summed per block.

    Attributes:
        layer: the layer's number.
        window: how many tokens a token of this layer sees; None: all before it.
        first: position of the first token seen.
        block_table: physical block of each logical one, -1 where a window has left it.
        heads: numbers of the query heads kept.
        mass: per head and logical block the share of attention that went there; a head's shares add up to 1.
    """

    layer: int
    window: int | None
    first: int
    block_table: tuple[int, ...]
    heads: tuple[int, ...]
    mass: tuple[tuple[float, ...], ...]

    def mean(self) -> tuple[float, ...]:
        """Share of attention per logical block, the mean of the heads."""
        return tuple(sum(column) / len(self.heads) for column in zip(*self.mass, strict=True))


@dataclass(frozen=True, slots=True)
class Stage:
    """One thing that the sampler does to a row, in its order.

    Attributes:
        name: "model" (its own probabilities), a name of what changed logits ("mask", "logit_bias", ...),
            "temperature", "min_p", "top_k", "top_p", or "greedy".
        value: the parameter, for the last ones; None where there is no single number.
        left: how many tokens can still be drawn after it.
        rest: the share of all those that are not among the record's candidates.
    """

    name: str
    value: float | None
    left: int
    rest: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One token that might have come.

    Attributes:
        token_id, text: the token; the text is "" unless a tokenizer was given.
        logit: the model's, None where that was -inf.
        shares: its probability after each of the stages.
        start: share of the tokens left at the end whose ids are lower: drawn if start <= u < start + its own share.
        why: what dropped it, as a sentence; "" where nothing did.
    """

    token_id: int
    text: str
    logit: float | None
    shares: tuple[float, ...]
    start: float
    why: str


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """How one output token was chosen.

    Attributes:
        output_index: number of the output token, from 0.
        uniform: the number in [0, 1) that drew it; greedy rows do not use theirs.
        token_id: the token that came.
        stages: what was done to the row, in order.
        candidates: the likeliest tokens before and after, and the one that came; likeliest under the model first.
    """

    output_index: int
    uniform: float
    token_id: int
    stages: tuple[Stage, ...]
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        """The token that came."""
        return next(one for one in self.candidates if one.token_id == self.token_id)


@dataclass(frozen=True, slots=True)
class TapRecord:
    """What was kept of one request's share of one step.

    Attributes:
        step: the step's number. request_id: whose tokens. block_size: tokens per block.
        position: of the newest token computed, whose query `attention` is about.
        attention: a layer each; () where not asked for.
        choices: the tokens sampled in this step, usually one; () where none was, or not asked for.
        tokens: text of each token up to `position`; () unless a tokenizer was given.
    """

    step: int
    request_id: str
    block_size: int
    position: int
    attention: tuple[LayerAttention, ...] = ()
    choices: tuple[TokenChoice, ...] = ()
    tokens: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"schema": SCHEMA} | asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> TapRecord:
        """What `to_json` wrote.

        Raises:
            RecordingError: it is something else.
        """
        try:
            raw = json.loads(line)
            if raw["schema"] != SCHEMA:
                raise RecordingError(f"Schema {raw['schema']!r}: this version reads {SCHEMA!r}.")
            attention = tuple(_layer(each) for each in raw["attention"])
            choices = tuple(_choice(each) for each in raw["choices"])
            plain = {name: raw[name] for name in ("step", "request_id", "block_size", "position")}
            return cls(**plain, attention=attention, choices=choices, tokens=tuple(raw["tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, RecordingError):
                raise
            raise RecordingError(
                f"This is no tap's record ({type(error).__name__}: {error}); give a line that TapRecord.to_json wrote."
            ) from error


def _layer(raw: Mapping[str, Any]) -> LayerAttention:
    lists = {
        "block_table": tuple(raw["block_table"]),
        "heads": tuple(raw["heads"]),
        "mass": tuple(map(tuple, raw["mass"])),
    }
    return LayerAttention(**{**raw, **lists})


def _choice(raw: Mapping[str, Any]) -> TokenChoice:
    stages = tuple(Stage(**each) for each in raw["stages"])
    candidates = tuple(Candidate(**{**each, "shares": tuple(each["shares"])}) for each in raw["candidates"])
    return TokenChoice(**{**raw, "stages": stages, "candidates": candidates})
