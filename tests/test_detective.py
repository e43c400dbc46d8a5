"""Notebook 10's checks: each incident is what it says, cures are judged by re-simulation, detectors on unseen runs."""

import subprocess
import sys

import pytest

from pagedinfer.course import bundled_recording, check, exercises
from pagedinfer.course.detective import CASES, UNSEEN
from pagedinfer.course.incidents import INCIDENTS, quiet_day
from pagedinfer.course.symptoms import EVIDENCE
from pagedinfer.sim.fork import fork

ANSWERS = {
    "10.1": ("head-of-line blocking", (6, 46), {"order": "shortest-prefill"}),
    "10.2": ("preemption storm", (10, 127), {"admission": "full-reservation"}),
    "10.3": ("cache wipe", (31, 36), {"tenant_max_blocks": 16}),
    "10.4": ("starvation", (8, 47), {"aging": 1.0}),
}


def with_change(exercise_id, change):
    cause, steps, _ = ANSWERS[exercise_id]
    return check(exercise_id, cause, steps, change)


# -- the recordings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INCIDENTS)
def test_bundled_incidents_are_what_this_engine_does(name):
    """A change of the scheduler or of a maker? Then run notebooks/record_incidents.py again."""
    recording = bundled_recording(name)
    assert INCIDENTS[name](0).to_jsonl(wall=False) == recording.to_jsonl(wall=False)
    assert len(recording.to_jsonl(wall=False)) < 100_000
    assert list(fork(recording, 0).recording.requests.rows()) == list(recording.requests.rows())


@pytest.mark.parametrize("seed", [0, *UNSEEN])
def test_incidents_have_their_symptom_and_no_other(seed):
    """Each number that names an incident is far larger in its own kind than in all others."""
    for exercise_id, case in CASES.items():
        assert case.symptom(INCIDENTS[case.recording](seed)) > 1.5 * case.limit + 5, exercise_id
        assert case.symptom(quiet_day(seed)) <= case.limit
    assert CASES["10.2"].symptom(INCIDENTS["incident_1"](seed)) < 5
    assert CASES["10.3"].symptom(INCIDENTS["incident_4"](seed)) == 0


# -- cures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exercise_id", "change"),
    [
        ("10.2", {"max_num_seqs": 3}),
        ("10.2", {"admission": "expected-length", "expected_output_tokens": 48}),
        ("10.3", {"tenant_max_running": 1}),
        ("10.4", {"aging": 0.5}),
        ("10.1", {"order": "shortest-prefill", "chunking": "equal-progress"}),
    ],
)
def test_other_cures_pass(exercise_id, change):
    assert with_change(exercise_id, change)


@pytest.mark.parametrize(
    ("exercise_id", "change", "says"),
    [
        ("10.1", {"chunking": "equal-progress"}, "slowest gets its first token after 45 steps"),
        ("10.1", {"num_blocks": 96}, "larger machine"),
        ("10.1", {"max_model_len": 200}, "r3 is refused"),
        ("10.1", {"order": "fcfs"}, "nothing changes"),
        ("10.1", {"order": "priorty"}, "The engine does not take"),
        ("10.1", {"ordering": "fcfs"}, "no setting 'ordering'"),
        ("10.1", {"policy": "mine"}, "no setting 'policy'"),
        ("10.1", "shortest-prefill", "a dict of settings"),
        ("10.1", {}, "a dict of settings"),
        ("10.2", {"victim": "largest"}, "15 preemptions"),
        ("10.2", {"watermark": 0.3}, "6 preemptions"),
        ("10.2", {"max_num_seqs": 1}, "so is the speed"),
        ("10.3", {"tenant_max_running": 2}, "of the shared prefixes are evicted"),
        ("10.3", {"order": "longest-prefix"}, "of the shared prefixes are evicted"),
        ("10.3", {"enable_prefix_caching": False}, "0 prompt tokens are found"),
        ("10.4", {"aging": 10.0}, "comes after 41 steps"),
        ("10.4", {"victim": "lowest-priority"}, "comes after 41 steps"),
        (
            "10.4",
            {"order": "fcfs"},
            "r6 is refused: \"priority=10 of 'r6' would be ignored under order='fcfs'",
        ),
        ("10.4", {"max_num_seqs": 6}, "larger machine"),
    ],
)
def test_changes_that_do_not_cure_are_refused(exercise_id, change, says):
    verdict = with_change(exercise_id, change)
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


# -- causes and steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise_id", CASES)
def test_every_other_cause_is_refused_with_evidence(exercise_id):
    right, steps, change = ANSWERS[exercise_id]
    for cause in EVIDENCE.keys() - {right}:
        verdict = check(exercise_id, cause, steps, change)
        assert f"against {cause}" in verdict.lines[0]
        assert any(character.isdigit() for character in verdict.lines[0])
    assert "not one of the choices" in check(exercise_id, "bad luck", steps, change).lines[0]
    assert check(exercise_id, right.upper(), [steps[0] + 1, steps[1] - 1], change)


@pytest.mark.parametrize("exercise_id", CASES)
def test_wrong_steps_are_refused(exercise_id):
    cause, (first, last), change = ANSWERS[exercise_id]
    for steps, says in (
        ((first - 20, last), "too early"),
        ((first, last + 20), "too late"),
        ((first, first + 1), "too early"),
        ((0, 200), "too"),
        (first, "a pair"),
        ((first, last, last), "a pair"),
        ("all", "a pair"),
    ):
        verdict = check(exercise_id, cause, steps, change)
        assert not verdict
        assert says in verdict.lines[0], verdict


def test_nothing_given_is_no_answer_yet():
    for exercise_id in CASES:
        assert check(exercise_id, ..., ..., ...).mark == "…"
    assert exercises()["10.2"].usage == 'check("10.2", cause, steps, change)'


# -- detectors --------------------------------------------------------------------------------------------------------


def count(recording, kind):
    return sum(event.kind == kind for event in recording.events)


def waited(recording):
    return max(row["admitted"] - row["submitted"] for row in recording.requests.rows())


def right_detector():
    names = {}
    exec(exercises()["10.5"].code, names)
    return names["diagnose"]


def any_preemption_is_a_storm(recording):
    return "preemption storm" if count(recording, "preempt") else right_detector()(recording)


def any_eviction_is_a_wipe(recording):
    return "cache wipe" if count(recording, "evict") else "starvation" if waited(recording) > 20 else None


def all_long_waits_are_blocking(recording):
    found = right_detector()(recording)
    return "head-of-line blocking" if found == "starvation" else found


def never_well(recording):
    return right_detector()(recording) or "token budget too small"


@pytest.mark.parametrize(
    ("detector", "says"),
    [
        (any_preemption_is_a_storm, "preemptions in"),
        (any_eviction_is_a_wipe, "it was 'head-of-line blocking'"),
        (all_long_waits_are_blocking, "it was 'starvation'"),
        (never_well, "it was None"),
        (lambda recording: "starvation", "it was 'head-of-line blocking'"),
        (lambda recording: 1 / 0, "raised ZeroDivisionError"),
        (lambda recording: [], "yours says []"),
        ("starvation", "wants your function"),
    ],
)
def test_wrong_detectors_are_refused(detector, says):
    verdict = check("10.5", detector)
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


def test_a_detector_stub_is_no_answer_yet():
    def diagnose(recording):
        raise NotImplementedError

    assert check("10.5", diagnose).mark == "…"


def test_the_detective_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from pagedinfer.course import check, exercises\n"
        "names = {}; exec(exercises()['10.5'].code, names)\n"
        "assert check('10.5', names['diagnose'])\n"
        "assert check('10.3', 'cache wipe', (31, 36), {'tenant_max_blocks': 16})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
