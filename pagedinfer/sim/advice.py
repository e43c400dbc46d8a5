"""What `why` advises: changes that were tried, what the request gains by each, and what the best one costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedinfer.errors import count
from pagedinfer.trace.metrics import Life, Times

__all__ = ["GROWS", "Help", "Price", "advice", "best_of", "growth", "label_of", "price_of"]

GROWS = {
    "num_blocks": "more memory",
    "num_host_blocks": "more host memory",
    "max_num_seqs": "more seats",
    "max_num_batched_tokens": "longer steps",
}
"""Settings by which a machine would grow, and what a larger value costs."""

SLACK_STEPS, SLACK_SHARE = 1.0, 0.05
"""Gains count as the same when they differ by so many steps, or by such a share of the larger."""


@dataclass(frozen=True, slots=True)
class Help:
    """One change, re-simulated from the first step: what the request gains; negative: it loses.

    Attributes:
        changes: the settings.
        ttft, e2e: steps gained. Where no first token came, its whole life stands for its TTFT.
        num_tokens: output tokens gained: it was aborted, or cut off by the pool, and gets further.
        first_token: its TTFT in this run, where without the change no token comes; else None.
        grows: setting -> its value now, of those by which the machine would be larger.
    """

    changes: dict[str, Any]
    ttft: float | None
    e2e: float | None
    num_tokens: int = 0
    first_token: float | None = None
    grows: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The change as a label: "num_blocks=20"."""
        return label_of(self.changes)

    @property
    def gain(self) -> tuple[float, float, float]:
        """By what changes are ranked: more tokens, then a sooner end, then a sooner first token."""
        return self.num_tokens, self.e2e or 0.0, self.ttft or 0.0

    @property
    def is_gain(self) -> bool:
        """Whether the request would have come further, or ended or begun sooner."""
        return self.gain > (0, 0.0, 0.0)

    def matches(self, other: Help) -> bool:
        """Whether it helps about as much as one that helps more."""
        pairs = zip(self.gain[1:], other.gain[1:], strict=True)
        near = all(theirs - mine <= max(SLACK_STEPS, SLACK_SHARE * theirs) for mine, theirs in pairs)
        return self.is_gain and self.num_tokens == other.num_tokens and near

    @property
    def effect(self) -> str:
        """The gain in words, "" for none."""
        parts = [
            f"{name} {_longer(-gain)}"
            for name, gain in (("TTFT", self.ttft if self.first_token is None else None), ("E2E", self.e2e))
            if gain
        ]
        if self.first_token is not None:
            parts.insert(0, f"a first token after {count(int(self.first_token), 'step')} instead of none")
        if self.num_tokens:
            more = count(abs(self.num_tokens), "token")
            parts.append(f"{more} {'more' if self.num_tokens > 0 else 'less'}")
        return _joined(parts)


def best_of(helps: Sequence[Help]) -> tuple[Help | None, Help | None]:
    """The change to advise, None when none helps, and the one in whose place it stands.

    Of changes that help about as much as the one that helps most, one comes first that costs no hardware.
    """
    most = next((help_ for help_ in helps if help_.is_gain), None)
    if most is None or not most.grows:
        return most, None
    free = next((help_ for help_ in helps if not help_.grows and help_.matches(most)), None)
    return (most, None) if free is None else (free, most)


def growth(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, int]:
    """Setting -> its value now, of the changes that are a larger machine."""
    return {
        name: config[name]
        for name in GROWS
        if name in changes and name in config and changes[name] > config[name]
    }


def label_of(changes: Mapping[str, Any]) -> str:
    """Changes as a label: "num_blocks=20"."""
    return ", ".join(f"{name}={value}" for name, value in changes.items())


# -- the price --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Price:
    """What a change costs everybody else, over the whole run.

    Attributes:
        num_others: requests beside the one that gains.
        worst: "TTFT" and "E2E" -> (request, steps longer) of whoever loses most; those that nobody loses are left out.
        shorted: requests that are refused, or get fewer tokens.
        makespan: steps from the first submission to the last end, longer; negative: shorter.
    """

    num_others: int
    worst: dict[str, tuple[str, float]]
    shorted: list[str]
    makespan: float

    @property
    def sentence(self) -> str:
        """The price in words."""
        told = []
        if self.num_others:
            waits = self._wait("TTFT"), self._wait("E2E")
            told = [f"the others' {', '.join(waits) if self.worst else 'TTFT and E2E not longer'}"]
        if self.shorted:
            more = f" and {len(self.shorted) - 1} more" if len(self.shorted) > 1 else ""
            told.append(f"fewer tokens or none for {self.shorted[0]}{more}")
        return ", ".join([*told, f"makespan {_longer(self.makespan) if self.makespan else 'the same'}"])

    def _wait(self, name: str) -> str:
        if name not in self.worst:
            return f"{name} not longer"
        rid, steps = self.worst[name]
        return f"{name} at worst {_longer(steps)} ({rid})"


def price_of(mine: Life, before: Sequence[Life], after: Sequence[Life]) -> Price:
    """What the others lose from one whole run to another. `mine` is the request that does not count.

    A request is known by its id and when it came. One without a first token, or without an end, has waited for it until
    its run ended.
    """
    known = {_key(life): life for life in after}
    ends = _end(before), _end(after)
    worst: dict[str, tuple[str, float]] = {}
    shorted = []
    others = [life for life in before if _key(life) != _key(mine)]
    for was in others:
        now = known.get(_key(was))
        if now is None or now.num_output_tokens < was.num_output_tokens:
            shorted.append(was.rid)
        if now is None:
            continue
        for name, wait in (("TTFT", _ttft), ("E2E", _e2e)):
            more = wait(now.steps, ends[1]) - wait(was.steps, ends[0])
            if more > worst.get(name, ("", 0.0))[1]:
                worst[name] = was.rid, more
    return Price(len(others), worst, shorted, ends[1] - ends[0])


def _ttft(times: Times, end: float) -> float:
    """Steps to the first token, or to where it could have come last."""
    return times.ttft if times.ttft is not None else _e2e(times, end)


def _e2e(times: Times, end: float) -> float:
    return times.e2e if times.e2e is not None else end - (times.submitted or 0)


def _key(life: Life) -> tuple[str, float | None]:
    return life.rid, life.steps.submitted


def _end(everyone: Sequence[Life]) -> float:
    return max((life.steps.finished or 0 for life in everyone), default=0)


# -- in words ---------------------------------------------------------------------------------------------------------


def advice(helps: Sequence[Help], price: Price | None, is_live: bool, is_cut: bool) -> Iterator[str]:
    """Which change is best, and its price. `is_live`: the request has not ended; `is_cut`: somebody has not."""
    best, instead = best_of(helps)
    if best is None:
        if helps:
            yield "No single change that was tried would have helped."
        return
    end = ", projected to the run's end"
    beside = _beside(helps, best, instead)
    yield f"What would have helped most{end if is_live else ''}: {best.name}, {best.effect}{beside}."
    grown = [f"{GROWS[name]} ({name} is {now})" for name, now in best.grows.items()]
    cost = "what it costs the others is not known, for nobody knows how long they would run"
    told = ", ".join([*grown, cost if price is None else price.sentence])
    yield f"The price of {best.name}{end if is_cut and not is_live else ''}: {told}."


def _beside(helps: Sequence[Help], best: Help, instead: Help | None) -> str:
    """The other one of two changes, where one costs hardware and one does not."""
    if instead is not None:
        same = "as much" if instead.effect == best.effect else f"about as much ({instead.effect})"
        return f"; {instead.name} helps {same}, but costs {_joined([GROWS[name] for name in instead.grows])}"
    free = next((help_ for help_ in helps if help_.is_gain and not help_.grows), None)
    return f"; at no cost of hardware: {free.name}, {free.effect}" if best.grows and free else ""


def _longer(steps: float) -> str:
    return f"{count(int(abs(steps)), 'step')} {'longer' if steps > 0 else 'shorter'}"


def _joined(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 2 else parts)
