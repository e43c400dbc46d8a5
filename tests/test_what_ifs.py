"""Notebook 07's checks: stops, predicates, forks and pools, each beside plausible wrong answers."""

import subprocess
import sys

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.course import bundled_recording, check
from pagedinfer.course.sixty_seconds import simulated_recording
from pagedinfer.course.what_ifs import SEEDS
from pagedinfer.engine.engine import Engine
from pagedinfer.session import Session
from pagedinfer.sim.fork import fork
from pagedinfer.sim.simulated import SimulatedRunner


def new_session():
    limits = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    session = Session(Engine(EngineConfig(**limits, enable_prefix_caching=False), SimulatedRunner()))
    for length in (6, 5, 9):
        session.submit({"prompt_token_ids": list(range(length))}, max_tokens=20, detokenize=False)
    return session


@pytest.fixture(scope="module")
def session():
    """The run of the notebook, to its end."""
    session = new_session()
    assert session.run(until="free blocks < 4").step == 9
    assert session.run(until="any preempted").step == 16
    session.run()
    return session


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "says"),
    [
        (8, "there are 5 free blocks. That is not fewer"),  # as if a token took its block a step early
        (5, "there are 6 free blocks. That is not fewer"),
        (10, "became fewer than 4 before"),
        (16, "there are 5 free blocks"),
        (40, "has no step 40"),
        ("soon", "A step is a number"),
        (True, "A step is a number"),
    ],
)
def test_wrong_stops_are_refused(session, prediction, says):
    verdict = check("07.1", prediction, session)
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


@pytest.mark.parametrize(
    ("prediction", "says"),
    [
        ("r2", "Who has fewer?"),
        ("r0", "first of the batch"),
        ("r7", "does not run there"),
        (1, "does not run"),
    ],
)
def test_wrong_victims_are_refused(session, prediction, says):
    verdict = check("07.3", prediction, session)
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


def test_predictions_wait_for_the_run(session):
    fresh = new_session()
    fresh.advance()
    assert check("07.1", 9, fresh).mark == check("07.3", "r1", fresh).mark == "…"
    assert check("07.1", ..., session).mark == check("07.3", ..., session).mark == "…"
    for nothing in (None, 5, "session"):
        assert "it got " in check("07.1", 9, nothing).lines[0]
        assert "it got " in check("07.3", "r1", nothing).lines[0]


# -- predicates -------------------------------------------------------------------------------------------------------


def any_loss(state, events):
    return any(event.kind == "preempt" for event in events)


def ever_lost_twice(state, events):  # also true long after
    return any(request.num_preemptions >= 2 for request in state.requests.values())


def exactly_twice(state, events):
    return any(e.kind == "preempt" and state.requests[e.rid].num_preemptions == 2 for e in events)


def counts_before(state, events):  # as if the state were that before the step
    return any(e.kind == "preempt" and state.requests[e.rid].num_preemptions >= 1 for e in events)


@pytest.mark.parametrize(
    ("predicate", "says"),
    [
        (any_loss, "for the first time"),
        (counts_before, "for the first time"),
        (ever_lost_twice, "Nobody lost a place there"),
        (exactly_twice, "for the second time or more"),
        (lambda state, events: False, "for the second time or more"),
        (lambda state, events: state.nothing, "raised AttributeError"),
        (lambda event: False, "raised TypeError"),
        ("any preempted", "wants your function"),
    ],
)
def test_wrong_predicates_are_refused(predicate, says):
    verdict = check("07.2", predicate)
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict
    assert len(repr(verdict)) < 2_000


def test_a_predicate_that_spoils_the_state_spoils_no_other_check():
    def spoils(state, events):
        state.requests.clear()
        events.clear()
        return False

    assert not check("07.2", spoils)
    assert not check("07.2", any_loss)


# -- pools ------------------------------------------------------------------------------------------------------------


def preempted(recording, num_blocks):
    return sum(fork(recording, recording.first_step, num_blocks=num_blocks).recording.steps["preempted"])


def from_one_block(recording):  # in a tiny pool nobody runs beside another, or everybody is refused
    return next(n for n in range(1, 200) if not preempted(recording, n))


def most_used(recording):
    return max(recording.steps["used_blocks"])


def all_side_by_side(recording):
    size = recording.config["block_size"]
    return sum(-(-(r["prompt_tokens"] + r["output_tokens"]) // size) for r in recording.requests.rows())


def doubling(recording):
    num_blocks = recording.config["num_blocks"]
    while preempted(recording, num_blocks):
        num_blocks *= 2
    return num_blocks


def one_too_few(recording):
    num_blocks = recording.config["num_blocks"]
    while preempted(recording, num_blocks):
        num_blocks += 1
    return num_blocks - 1


@pytest.mark.parametrize(
    ("search", "says"),
    [
        (from_one_block, "as large or larger"),
        (most_used, "yours says"),
        (all_side_by_side, "are enough"),
        (doubling, "are enough"),
        (one_too_few, "leaves 1 preemption."),
        (lambda recording: "74", "a number of blocks"),
        (lambda recording: 1 / 0, "raised ZeroDivisionError"),
        (74, "wants your function"),
    ],
)
def test_wrong_searches_are_refused(search, says):
    verdict = check("07.4", search)
    assert verdict.mark == "✗"
    assert says in repr(verdict).lower() or says in repr(verdict), verdict


def test_runs_of_both_kinds_are_among_the_unseen():
    losses = [sum(simulated_recording(seed).steps["preempted"]) for seed in SEEDS]
    assert min(losses) == 0 < max(losses)


def test_more_blocks_do_not_always_help():
    """What the notebook shows beside the last exercise."""
    recording = bundled_recording()
    assert preempted(recording, 44) < preempted(recording, 45)
    assert preempted(recording, 73) > preempted(recording, 74) == 0


def test_stubs_are_no_answer_yet():
    def stub(*arguments):
        raise NotImplementedError

    assert check("07.2", stub).mark == check("07.4", stub).mark == "…"


def test_what_ifs_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from pagedinfer import fork\n"
        "from pagedinfer.course import check, exercises\n"
        "for exercise_id, name in (('07.2', 'lost_again'), ('07.4', 'smallest_pool')):\n"
        "    names = {'fork': fork}; exec(exercises()[exercise_id].code, names)\n"
        "    assert check(exercise_id, names[name])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
