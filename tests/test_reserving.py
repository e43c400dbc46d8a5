"""Notebook 02's checks pass what is right and refuse, in words that help, what a learner may come up with."""

import subprocess
import sys

import pytest

from pagedinfer.course import check, exercises, reserving
from pagedinfer.course.arrivals import arrivals, memory_run
from pagedinfer.memory.extents import best_fit as built_in
from pagedinfer.trace.measures import free_extents

# -- the runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs():
    return {name: memory_run(name) for name in ("reserve-max", "best-fit", "buddy", "paged")}


def test_every_run_serves_everybody(runs):
    outputs = [request.num_output_tokens for request in arrivals()]
    for run in runs.values():
        assert [row["output_tokens"] for row in run.requests.rows()] == outputs
        assert not run.errors
    assert memory_run("buddy").to_jsonl(wall=False) == runs["buddy"].to_jsonl(wall=False)


def test_paging_holds_more_tokens_as_the_notebook_says(runs):
    share = {}
    for name, run in runs.items():
        live = [state.usage()["live_slots"] / 512 for state in run.states() if state.waiting]
        share[name] = sum(live) / len(live)
    assert share["reserve-max"] < share["buddy"] < share["best-fit"] < 0.5
    assert share["paged"] > 0.8
    assert runs["paged"].last_step < 0.6 * runs["best-fit"].last_step


def test_first_fit_and_best_fit_part_where_the_notebook_says(runs):
    other = memory_run("first-fit")
    apart = [
        s for s in range(1, 300) if other.at(s).ref_counts.keys() != runs["best-fit"].at(s).ref_counts.keys()
    ]
    assert apart[0] == 212


def test_compaction_wins_holes_not_what_is_reserved(runs):
    compacted = memory_run("best-fit", compaction=True)
    assert any(event.kind == "move" for event in compacted.events)
    assert runs["paged"].last_step < compacted.last_step < runs["best-fit"].last_step


def test_the_story_is_played_by_the_allocator():
    plain, compacted = reserving.story(), reserving.story(compaction=True)
    assert plain.refused
    assert not compacted.refused
    assert (plain.moved, compacted.moved) == (0, 3)
    taken = {i for i, letter in enumerate(plain.lines[-2][:22]) if letter != "."}
    assert free_extents(set(range(22)) - taken) == plain.holes
    assert repr(compacted).splitlines()[-1].startswith("zzeeefffffffccccc.....")


# -- wrong answers ----------------------------------------------------------------------------------------------------


def first_fit(holes, size):
    return next((first for first, length in holes if length >= size), None)


def worst_fit(holes, size):
    fitting = [(length, -first) for first, length in holes if length >= size]
    return -max(fitting)[1] if fitting else None


def too_strict(holes, size):
    fitting = [(length, first) for first, length in holes if length > size]
    return min(fitting)[1] if fitting else None


def too_lax(holes, size):
    fitting = [(length, first) for first, length in holes if length >= size - 1]
    return min(fitting)[1] if fitting else None


def last_of_equals(holes, size):
    fitting = [(length, -first) for first, length in holes if length >= size]
    return -min(fitting)[1] if fitting else None


def smallest(holes, size):
    return min(holes, key=lambda hole: hole[1])[0] if holes else None


def raises_when_full(holes, size):
    return min((length, first) for first, length in holes if length >= size)[1]


def whole_hole(holes, size):
    return min((hole for hole in holes if hole[1] >= size), key=lambda hole: hole[1], default=None)


def position(holes, size):
    fitting = [(length, i) for i, (_, length) in enumerate(holes) if length >= size]
    return min(fitting)[1] + 100 if fitting else None


def at_the_end(holes, size):
    place = built_in(holes, size)
    return None if place is None else place + dict(holes)[place] - size


def minus_one(holes, size):
    place = built_in(holes, size)
    return -1 if place is None else place


RIGHT = [(2, 6), (11, 1), (17, 5)]
WRONG = [
    ("02.1", [(98, 10, 10, 2)], "power of two"),
    ("02.1", [(98, 10, 34, 0)], "do not end at the end of a block"),
    ("02.1", [(98, 10, 34, 10)], "reserves nothing"),
    ("02.1", [(128, 40, 64, 32)], "how much of it is empty"),
    ("02.1", [(108, 20, 44, 2)], "as well as the prompt"),
    ("02.1", [(10, 10, 34, 2)], "max_model_len"),
    ("02.1", [(98, 0, 34, 2)], "prompt and max_tokens"),
    ("02.1", [(98, 10, 34)], "Give 4 numbers"),
    ("02.1", [98], "Give 4 numbers"),
    ("02.2", [[(2, 6), (11, 1), (17, 3), (20, 2)], False], "together they are one hole"),
    ("02.2", [[(2, 7), (11, 11), (17, 21)], False], "the length"),
    ("02.2", [[(2, 10), (20, 2)], False], "Block 8 is not free: e has it"),
    ("02.2", [[(2, 6), (11, 1), (20, 2)], False], "Block 17 is free too"),
    ("02.2", [[(2, 6), (17, 5)], False], "Block 11 is free too"),
    ("02.2", [[(2, 6), (11, 1), (17, 6)], False], "no block of the pool"),
    ("02.2", [RIGHT, True], "in a row"),
    ("02.2", [RIGHT, "no"], "True or False"),
    ("02.2", [12, False], "as pairs"),
    ("02.2", [[2, 11, 17], False], "as pairs"),
    ("02.3", [first_fit], "first-fit"),
    ("02.3", [worst_fit], "worst-fit"),
    ("02.3", [too_strict], "exactly `size` blocks"),
    ("02.3", [too_lax], "has only 4 blocks"),
    ("02.3", [last_of_equals], "take the lowest"),
    ("02.3", [smallest], "has only"),
    ("02.3", [raises_when_full], "raised ValueError"),
    ("02.3", [whole_hole], "one number"),
    ("02.3", [position], "No hole starts there"),
    ("02.3", [at_the_end], "No hole starts there"),
    ("02.3", [minus_one], "then return None"),
    ("02.3", [lambda holes, size: None], "But the hole at 20 has 4 blocks, exactly"),
    ("02.3", [lambda holes, size: "20"], "no block id"),
    ("02.3", [7], "wants your function"),
    ("02.4", [8, 10], "if everything slid down"),
    ("02.4", [0, 2], "largest hole has 6"),
    ("02.4", [1, 5], "moves as a whole"),
    ("02.4", [5, 5], "Slide the lowest extent"),
    ("02.4", [3, 2], "where does e end now"),
    ("02.4", ["three", 5], "two whole numbers"),
]


@pytest.mark.parametrize(("exercise_id", "answers", "says"), WRONG)
def test_wrong_answers_are_refused(exercise_id, answers, says):
    verdict = check(exercise_id, *answers)
    assert not verdict
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


def test_each_exercise_refuses_two():
    mine = [exercise_id for exercise_id in exercises() if exercise_id.startswith("02")]
    assert min(sum(w[0] == exercise_id for w in WRONG) for exercise_id in mine) >= 2


def test_a_fit_that_fails_only_in_the_engine_is_refused():
    calls = []

    def tires(holes, size):
        calls.append(size)
        if len(calls) > 320:
            raise KeyError("tired")
        return built_in(holes, size)

    assert "In the engine, step" in repr(check("02.3", tires))

    def forgets(holes, size):
        calls.append(size)
        return built_in(holes, size) if len(calls) < 650 else first_fit(holes, size)

    calls.clear()
    calls.extend([0] * 330)
    assert "the runs part in step" in repr(check("02.3", forgets))


def test_stubs_are_no_answer_yet():
    def stub(holes, size):
        raise NotImplementedError

    for exercise_id, answers in {
        "02.1": [(..., ..., ..., ...)],
        "02.2": [..., ...],
        "02.3": [stub],
        "02.4": [..., ...],
    }.items():
        assert check(exercise_id, *answers).mark == "…"


def test_other_ways_of_saying_it_pass():
    assert check("02.1", [98, 10, 34, 2])
    assert check("02.2", [list(hole) for hole in reversed(RIGHT)], False)
    assert check("02.3", lambda holes, size: built_in(sorted(holes), size))
    holes_emptied = check("02.3", lambda holes, size: (built_in(holes, size), list(holes).clear())[0])
    assert holes_emptied


def test_notebook_02_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from pagedinfer.course import check, exercises\n"
        "names = {}; exec(exercises()['02.3'].code, names)\n"
        "assert check('02.3', names['best_fit']) and check('02.4', 3, 5)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
