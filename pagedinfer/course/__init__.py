"""The course behind the notebooks: `check` an answer, take a `hint`, `reveal` the solution. Standard library only.

from pagedinfer.course import check, hint, reveal
check("00.1", "newest")
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pagedinfer.course.bundled import bundled_prompts, bundled_recording, bundled_texts
from pagedinfer.course.cards import Card, Verdict
from pagedinfer.course.exercise import Exercise
from pagedinfer.errors import ConfigError

__all__ = [
    "Card",
    "Verdict",
    "bundled_prompts",
    "bundled_recording",
    "bundled_texts",
    "check",
    "exercises",
    "hint",
    "reveal",
]

_hints_given: dict[str, int] = {}


@cache
def exercises() -> dict[str, Exercise]:
    """Every exercise by id, in the notebooks' order."""
    from pagedinfer.course import (
        batching,
        block_tables,
        detective,
        reserving,
        sharing,
        sixty_seconds,
        what_ifs,
    )

    modules = (sixty_seconds, block_tables, reserving, batching, what_ifs, sharing, detective)
    return {exercise.id: exercise for module in modules for exercise in module.EXERCISES}


def check(exercise_id: str, *answers: Any, **named: Any) -> Verdict:
    """Judge an answer: a value, or a function that you wrote. Behaviour counts, not how it is written.

    Raises:
        ConfigError: no such exercise, or the wrong number of answers.
    """
    return _find(exercise_id).check(*answers, **named)


def hint(exercise_id: str) -> Card:
    """Hints for an exercise: one more with each call, three in all.

    Raises:
        ConfigError: no such exercise.
    """
    exercise = _find(exercise_id)
    given = _hints_given[exercise_id] = min(_hints_given.get(exercise_id, 0) + 1, len(exercise.hints))
    more = (
        "Call again for more."
        if given < len(exercise.hints)
        else f'The last one; reveal("{exercise_id}") has the rest.'
    )
    lines = (*(f"{number}. {text}" for number, text in enumerate(exercise.hints[:given], 1)), more)
    return Card(
        mark="?",
        heading=f"{exercise_id} {exercise.title} · hint {given} of {len(exercise.hints)}",
        lines=lines,
    )


def reveal(exercise_id: str) -> Card:
    """The solution of an exercise, and why it is one.

    Raises:
        ConfigError: no such exercise.
    """
    exercise = _find(exercise_id)
    return Card(
        mark="!",
        heading=f"{exercise_id} {exercise.title} · solution",
        lines=(exercise.why,),
        code=exercise.code,
    )


def _find(exercise_id: str) -> Exercise:
    try:
        return exercises()[exercise_id]
    except KeyError:
        raise ConfigError(f"No exercise {exercise_id!r}; there are {', '.join(exercises())}.") from None
