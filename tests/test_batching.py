"""Notebook 03's checks pass what is right and refuse, in words that help, what a learner may come up with."""

import subprocess
import sys

import pytest

from pagedinfer.course import check, exercises
from pagedinfer.course.batching import GOAL, SEEDS, TPOT, TTFT, StaticBatching, six_requests
from pagedinfer.course.traffic import ROOMY, TIGHT, run_traffic
from pagedinfer.engine.policies import POLICIES
from pagedinfer.engine.policy import Policy
from pagedinfer.trace.metrics import goodput
from pagedinfer.views.batch import static_batching


def policy(admit):
    return type("Mine", (Policy,), {"admit": admit})


def solution(exercise_id, name):
    names = {"Policy": Policy}
    exec(exercises()[exercise_id].code, names)
    return names[name]


def stub(*arguments):
    raise NotImplementedError


# -- the traffic ----------------------------------------------------------------------------------------------------


def test_every_policy_sees_the_same_arrivals():
    for workload in (ROOMY, TIGHT):
        one, other = (run_traffic(workload, 1, kind).requests for kind in (Policy, StaticBatching))
        for column in ("request", "submitted", "prompt_tokens", "output_tokens"):
            assert one[column] == other[column]
    assert set(run_traffic(TIGHT, 1).requests["finish_reason"]) == {"stop"}


def test_static_batching_in_the_engine_is_what_the_view_computes():
    computed = static_batching(run_traffic(ROOMY, 1), ROOMY.max_num_seqs)
    assert run_traffic(ROOMY, 1, StaticBatching).last_step == computed.last
    assert six_requests(StaticBatching).last_step == static_batching(six_requests(), 2).last == 26


# -- predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("static", "continuous", "says"),
    [
        (19, 19, "wait for the first"),
        (26, 26, "in the step after its request ends"),
        (36, 19, "one request after the other"),
        (18, 19, "no seat were ever empty"),
        (26, 18, "continuous: 18 steps would do"),
        (25, 19, "static: not 25"),
        (26, None, "continuous: not None"),
    ],
)
def test_wrong_step_counts(static, continuous, says):
    verdict = check("03.1", static, continuous)
    assert verdict.mark == "✗"
    assert says in repr(verdict)


# -- static batching ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("admit", "says"),
    [
        (lambda self, request, view: "full" if view.num_running else None, "seats were taken"),
        (lambda self, request, view: None, "joined while"),
        (lambda self, request, view: "full" if view.num_running > 1 else None, "joined while"),
        (lambda self, request, view: "full" if view.num_admitted else None, "joined while"),
        (lambda self, request, view: True, "None says yes"),
        (lambda self, request, view: view.nothing, "AttributeError"),
    ],
)
def test_wrong_static_policies(admit, says):
    verdict = check("03.2", policy(admit))
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


def test_no_class_or_one_that_cannot_be_made():
    class Broken(Policy):
        def __init__(self, config):
            raise SystemExit(3)

    for exercise_id in ("03.2", "03.4"):
        assert "made from Policy" in repr(check(exercise_id, stub))
        assert "made from Policy" in repr(check(exercise_id, StaticBatching(None)))
        assert "Broken raised SystemExit: 3" in repr(check(exercise_id, Broken))
        assert check(exercise_id, policy(stub)).mark == "…"


# -- goodput --------------------------------------------------------------------------------------------------------


def right(rows, ttft, tpot):
    return solution("03.3", "share_served_well")(rows, ttft, tpot)


def ended_or_not(rows, ttft, tpot):
    return sum((r["ttft_steps"] or 999) <= ttft and (r["tpot_steps"] or 0) <= tpot for r in rows) / len(rows)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda rows, a, b: sum((r["ttft_steps"] or 999) <= a for r in rows) / len(rows), "yours says"),
        (ended_or_not, "has not ended is not served"),
        (lambda rows, a, b: right([r for r in rows if r["finished"]], a, b), "yours says"),
        (lambda rows, a, b: right(rows, a, b) * len(rows), "A share is from 0 to 1"),
        (lambda rows, a, b: right(rows, a, 999), "there is one for TPOT"),
        (lambda rows, a, b: right(rows, 999, b), "there is one for TTFT"),
        (lambda rows, a, b: sum(r["ttft_steps"] <= a and r["tpot_steps"] <= b for r in rows) / len(rows), "TypeError"),
        (lambda rows, a, b: None, "a number from 0 to 1"),
    ],
)  # fmt: skip
def test_wrong_goodputs(function, says):
    verdict = check("03.3", function)
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


# -- admission ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("admit", "says"),
    [
        (Policy.admit, "You admit too many"),
        (POLICIES["admission"]["fits-now"].admit, "You admit too many"),
        (POLICIES["admission"]["full-reservation"].admit, "You admit too few"),
        (lambda self, request, view: "never", "You admit too few"),
        (lambda self, request, view: "3 run" if view.num_running >= 3 else None, "You admit too few"),
        (StaticBatching, "the goal is 70%"),
        (lambda self, request, view: 7, "None says yes"),
    ],
)
def test_wrong_admissions(admit, says):
    verdict = check("03.4", admit if isinstance(admit, type) else policy(admit))
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


def few(self, request, view):
    return "five run" if view.num_running >= 5 else view.shortage(request)


def pressure(self, request, view):
    return "60 % in use" if view.num_running and view.kv_usage > 0.6 else view.shortage(request)


@pytest.mark.parametrize("admit", [few, pressure])
def test_more_than_one_rule_reaches_the_goal(admit):
    assert check("03.4", policy(admit))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_default_is_far_from_the_goal(seed):
    assert goodput(run_traffic(TIGHT, seed), ttft=TTFT, tpot=TPOT).share < GOAL - 0.15


def test_notebook_03_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from pagedinfer.course import check\n"
        "from pagedinfer.course.batching import StaticBatching\n"
        "assert check('03.1', 26, 19) and check('03.2', StaticBatching)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
