"""Forks that the model runs: the recorded tokens up to the fork, and the model's own after it."""

import pytest

from pagedinfer import Session, compare
from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.drafter import NgramDrafter
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import ConfigError, RecordingError
from pagedinfer.memory.make import make_allocator
from pagedinfer.sim.fork import fork
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.sim.why import why
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
        assert session.fork(1).way == (
            "Simulated, because request 'r0' came past the session, so it cannot be asked again: "
            "re-run to step 1, then run on."
        )
        with pytest.raises(RecordingError, match="'r0' came past the session"):
            session.fork(1, model=True)


def test_every_reason_to_simulate_is_told(session):
    assert session.fork(4, model=False).way.startswith(
        "Simulated, because model=False asks for it: re-run to step 4"
    )
    with tiny_llm(**POOL) as llm, Session(llm) as copied:
        copied.submit("a prompt", temperature=0.0, max_tokens=6, ignore_eos=True)
        copied.step()
        copied.engine.fork("r0", "copy", seed=1)
        copied.run()
        assert copied.fork(2).way.startswith("Simulated, because request 'copy' is a copy of a live one")
    with Session(Engine(EngineConfig(num_blocks=8), SimulatedRunner())) as bare:
        bare.submit([1, 2], max_tokens=2)
        bare.run()
        assert bare.fork(1).way.startswith(
            "Simulated, because the engine has no model but a SimulatedRunner: re-run"
        )


class NewestFirst(Policy):
    """Who came last comes in first, and the oldest gives way: nearly the opposite of the default."""

    def order(self, request, view):
        return -request.arrival

    def victim(self, request, candidates, view):
        return candidates[0]


def greedy(session):
    """Requests that crowd each other: they wait, and some are preempted."""
    for number in range(5):
        session.submit(f"prompt number {number}", temperature=0.0, max_tokens=10 + number, ignore_eos=True)
    session.run()
    return session


@pytest.fixture(scope="module")
def crowded():
    with tiny_llm(**POOL, max_num_seqs=3) as llm, Session(llm) as session:
        yield greedy(session)


@pytest.mark.parametrize("step", [0, 3])
def test_a_policy_of_ones_own_decides_from_the_fork_on(crowded, step):
    branch = crowded.fork(step, policy=NewestFirst)
    assert branch.way.startswith("The model ran it again from the first step, with the change")
    assert (branch.step, branch.name) == (step, "policy=NewestFirst")
    parting = compare(crowded.recording, branch).first_divergence
    assert parting.step > step
    before = [r.requests["first_token"] for r in (crowded.recording, branch.recording)]
    assert before[0] != before[1]
    assert crowded.recording.requests["output_tokens"] == branch.recording.requests["output_tokens"]
    config = crowded.engine.config
    same = crowded.fork(step, policy=NewestFirst(config))
    assert same.recording.to_jsonl(wall=False) == branch.recording.to_jsonl(wall=False)


def test_greedy_tokens_stay_the_same_whatever_the_policy_decides(crowded, monkeypatch):
    """The fork's own outputs, picked up as its engine hands them out."""
    texts, step = {}, Engine.step

    def keep(engine):
        outputs = step(engine)
        texts.update((output.request_id, output.outputs[0].token_ids) for output in outputs)
        return outputs

    monkeypatch.setattr(Engine, "step", keep)
    crowded.fork(3, policy=NewestFirst)
    assert texts == {rid: output.outputs[0].token_ids for rid, output in crowded.outputs.items()}


def test_an_engine_with_a_policy_of_its_own_keeps_it_in_a_fork():
    """Also where another setting changes, by the model and simulated, and in what `why` tries."""
    with tiny_llm(**POOL, max_num_seqs=3, policy=NewestFirst) as llm, Session(llm) as session:
        greedy(session)
        told = session.recording.to_jsonl(wall=False).splitlines()[1:]
        assert session.fork(3).recording.to_jsonl(wall=False).splitlines()[1:] == told
        assert (
            session.fork(3, model=False).recording.requests["first_token"]
            == (session.recording.requests["first_token"])
        )
        wider = session.fork(3, max_num_seqs=5)
        assert wider.recording.at(-1).finished.keys() == session.recording.at(-1).finished.keys()
        twin = session.fork(3, max_num_seqs=5, policy=NewestFirst)
        assert facts(wider) == facts(twin)
        assert not session.why("r0").drift
        assert why(session.recording, "r0").drift  # without the policy it does not go as recorded


def test_memory_and_drafter_of_ones_own_are_not_left_out():
    """The twin's memory is made the same way; a drafter may remember what it saw, so it is not shared."""
    made = []

    def make_memory(config, bus):
        made.append(config.num_blocks)
        return make_allocator(config, bus)

    class Guess(NgramDrafter):
        pass

    with tiny_llm(**POOL) as llm:
        with Session(
            Engine(llm.engine.config, llm.engine.runner, tokenizer=llm.tokenizer, make_memory=make_memory)
        ) as own:
            own.submit("a prompt", temperature=0.0, max_tokens=4)
            own.run()
            assert own.fork(1, num_blocks=20).way.startswith("The model ran it again")
            assert made == [14, 20]
        with Session(
            Engine(llm.engine.config, llm.engine.runner, tokenizer=llm.tokenizer, drafter=Guess(2))
        ) as own:
            own.submit("a prompt", temperature=0.0, max_tokens=4)
            own.run()
            assert own.fork(1).way.startswith("Simulated, because the engine has a drafter of its own")


def facts(branch):
    return branch.recording.to_jsonl(wall=False).splitlines()[1:]


def test_what_is_done_to_the_pool_between_steps_is_done_again():
    with tiny_llm(**POOL) as llm, Session(llm) as session:
        session.submit("a first prompt", temperature=0.0, max_tokens=12, ignore_eos=True)
        session.submit("a late one", temperature=0.0, max_tokens=12, ignore_eos=True, timeout=6)
        session.run(max_steps=3)
        session.engine.preempt("r0", "by hand")
        session.run(max_steps=2)
        session.engine.resize_pool(20)
        session.run()
        session.engine.reset_prefix_cache("by hand")
        session.submit("another one", temperature=0.0, max_tokens=2, ignore_eos=True)
        session.run()
        kinds = {event.kind for event in session.recording.events}
        assert {"preempt", "resize", "reset", "abort"} <= kinds
        branch = session.fork(9)
        assert facts(branch) == session.recording.to_jsonl(wall=False).splitlines()[1:]
        assert branch.is_complete


def test_a_branch_says_that_it_cannot_be_run_again(session):
    branch = session.fork(5, max_num_seqs=1)
    assert branch.recording.info["fork"] == {"step": 5, "max_num_seqs": 1}
    with pytest.raises(RecordingError, match="whose settings changed at step 5; fork the one it came from"):
        fork(branch.recording, 6)


def test_what_other_settings_refuse_is_told(session):
    branch = session.fork(2, max_model_len=14)
    assert not branch.is_complete
    assert "The submit after step 0 could not be repeated" in branch.way


def test_an_interrupted_fork_leaves_nothing_behind(session, monkeypatch):
    before, step = session.engine.snapshot(), Engine.step

    def interrupted(engine):
        if engine.scheduler.step == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.fork(5)
    assert session.engine.snapshot() == before


def test_refusals(session):
    with pytest.raises(ConfigError, match="EngineConfig has no option speed"):
        session.fork(1, speed=3)
    with pytest.raises(RecordingError, match="No step 999"):
        session.fork(999)
    with pytest.raises(ConfigError, match="policy='newest': give a policy of your own or its class"):
        session.fork(1, policy="newest")
    timed = Session(Engine(EngineConfig(num_blocks=8), SimulatedRunner(), clock=lambda: 1.0))
    timed.submit([1, 2], max_tokens=2)
    timed.run()
    with pytest.raises(ConfigError, match="a clock of its own"):
        timed.fork(1, model=True)
    timed.close()
