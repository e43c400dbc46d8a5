"""Forks that the model runs: the recorded tokens up to the fork, and the model's own after it."""

import pytest

from pagedinfer import Session, compare
from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import ConfigError, RecordingError
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.testing import tiny_llm

pytestmark = pytest.mark.usefixtures("one_thread")

POOL = {"num_blocks": 14, "block_size": 4, "max_num_batched_tokens": 24}


def busy(session):
    """Requests that come while others run, one of them with two outputs, one that is given up."""
    session.submit("a first prompt", temperature=0.0, max_tokens=14, ignore_eos=True)
    session.submit("the second one", temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
    for _ in range(3):
        session.step()
    session.submit("two", n=2, temperature=0.7, max_tokens=9, ignore_eos=True)
    gone = session.submit("given up", temperature=0.0, max_tokens=30, ignore_eos=True)
    session.step()
    session.engine.abort(gone)
    session.run()
    return session


@pytest.fixture(scope="module")
def session():
    with tiny_llm(**POOL) as llm, Session(llm) as session:
        yield busy(session)


def test_without_a_change_it_is_the_same_run(session):
    branch = session.fork(4)
    ours, theirs = (r.to_jsonl(wall=False).splitlines()[1:] for r in (session.recording, branch.recording))
    assert ours == theirs
    assert branch.way.startswith("The model ran it again")


def test_a_change_holds_from_the_fork_on(session):
    branch = session.fork(5, max_num_seqs=1, model=True)
    parting = compare(session.recording, branch.recording).first_divergence
    assert parting.step == 6
    assert all(len(branch.recording.at(s).running) <= 1 for s in range(6, branch.recording.last_step + 1))
    finished = branch.recording.at(-1).finished
    assert finished.keys() == session.recording.at(-1).finished.keys()
    assert (branch.step, branch.changes) == (5, {"max_num_seqs": 1})


def test_another_pool_holds_from_the_first_step(session):
    assert session.recording.at(-1).num_preemptions
    branch = session.fork(5, num_blocks=60)
    assert not branch.recording.at(-1).num_preemptions
    assert branch.recording.at(1).num_blocks == 60
    assert branch.step == 0
    assert "num_blocks cannot change in a running engine" in branch.way


def test_the_engine_goes_on_untouched(session):
    before = session.engine.snapshot()
    session.fork(3, chunking="equal-progress")
    assert session.engine.snapshot() == before
    session.engine.check()


def test_what_cannot_be_asked_again_is_simulated_or_refused():
    with tiny_llm(**POOL) as llm, Session(llm) as session:
        session.engine.add_request([1, 2, 3], SamplingParams(max_tokens=3))
        session.run()
        assert session.fork(1).way.startswith("re-run")
        with pytest.raises(RecordingError, match="'r0' came past the session"):
            session.fork(1, model=True)


def test_refusals(session):
    with pytest.raises(ConfigError, match="EngineConfig has no option speed"):
        session.fork(1, speed=3)
    with pytest.raises(RecordingError, match="No step 999"):
        session.fork(999)
    timed = Session(Engine(EngineConfig(num_blocks=8), SimulatedRunner(), clock=lambda: 1.0))
    timed.submit([1, 2], max_tokens=2)
    timed.run()
    with pytest.raises(ConfigError, match="a clock of its own"):
        timed.fork(1, model=True)
    timed.close()
