"""What the views say in words; the same on screen, in text and for screen readers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedinfer.views.film import Film
    from pagedinfer.views.frame import Frame, Lane

__all__ = ["block_sentence", "short_label", "step_sentence"]

MAX_LABEL = 4
MAX_NAMED = 2


def short_label(rid: str, lane: int) -> str:
    """At most four characters for a request: its id, or first letter and number of it ("request-12": "r12")."""
    if len(rid) <= MAX_LABEL:
        return rid
    if (match := re.fullmatch(r"(\w).*?(\d+)", rid)) and len(label := match[1] + match[2]) <= MAX_LABEL:
        return label
    return f"#{lane}"


def step_sentence(
    step: int, running: int, waiting: int, tokens: int, budget: int,
    notes: Sequence[tuple[str, int, str]], lanes: Sequence[Lane],
) -> str:  # fmt: skip
    """A step in words: "step 12: 3 running, 2 waiting, 61 of 64 tokens; R3 preempted because ...".

    Preemptions, ends and failures come with their cause; admissions are named only.
    """
    head = f"step {step}: {running} running, {waiting} waiting"
    parts = [f"{head}, {tokens} of {budget} tokens" if budget else head]
    for kind, joint in (
        ("cancelled", "plan given up: {1}"), ("preempted", "{0} preempted because {1}"),
        ("finished", "{0} finished ({1})"), ("error", "error in {1}"), ("rejected", "rejected: {1}"), ("gap", "{1}"),
    ):  # fmt: skip
        found = [(lanes[lane].rid if lane >= 0 else "", why) for k, lane, why in notes if k == kind]
        parts += [joint.format(*item) for item in found[:MAX_NAMED]]
        parts += [f"{len(found) - MAX_NAMED} more {kind}"] if len(found) > MAX_NAMED else []
    for kind in ("admitted", "resumed"):
        if names := [lanes[lane].rid for k, lane, _ in notes if k == kind]:
            hidden = len(names) - 4
            parts.append(f"{', '.join(names[:4])}{f' and {hidden} more' if hidden > 0 else ''} {kind}")
    return "; ".join(parts)


def block_sentence(film: Film, frame: Frame, block_id: int) -> str:
    """All about one block: "block 17: R3, logical block 2, tokens 32 to 39, 8 of 16 slots filled, ref count 1"."""
    block = frame.blocks(film.block_size).get(block_id)
    if block is None:
        return f"block {block_id}: free"
    logical = block.owners[0][1]
    first = logical * film.block_size
    owners = " and ".join(film.lanes[owner].rid for owner, _ in block.owners)
    tokens = f"tokens {first} to {first + block.fill - 1}, " if block.fill else ""
    return (
        f"block {block_id}: {owners}, logical block {logical}, {tokens}{block.fill} of {film.block_size} slots filled, "
        f"ref count {block.ref_count}{', written in this step' if block.written else ''}"
    )
