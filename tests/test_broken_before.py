"""What a careless or hostile caller broke once: each of these cost other requests, a recording, or the whole engine."""

import signal
from itertools import count

import pytest

from pagedinfer import LLM, Policy, Recorder, Retain, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import ConfigError
from pagedinfer.sim.fork import fork
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.testing import run_bounded, tiny_llm
from pagedinfer.trace.replay import fold

PROMPT = [1, 2, 3, 4, 5, 6]


def engine(policy=None, **options):
    config = EngineConfig(**{"num_blocks": 8, "block_size": 4, "max_model_len": 32} | options)
    return Engine(config, SimulatedRunner(), policy=policy)


@pytest.mark.parametrize("seed", ["x", 1.5, True, [], 2**64, -(2**63) - 1], ids=repr)
def test_a_fork_with_a_seed_that_is_none_costs_nobody(seed):
    """It was taken, and then every step failed for every request."""
    with tiny_llm() as llm:
        rid = llm.engine.add_request("hello", SamplingParams(max_tokens=4, ignore_eos=True))
        llm.engine.step()
        with pytest.raises(ConfigError, match="seed"):
            llm.engine.fork(rid, seed=seed)
        assert list(run_bounded(llm.engine, 20)) == [rid]


@pytest.mark.parametrize("why", [None, 5, b"x", ["x"]], ids=repr)
def test_a_reason_that_is_no_text_is_refused(why):
    """It was recorded, and the saved recording could not be loaded."""
    paged, contiguous = engine(), engine(allocator="best-fit")
    for one in (paged, contiguous):
        one.add_request(PROMPT, SamplingParams(max_tokens=4))
        one.step()
    for call in (lambda: paged.preempt("r0", why), lambda: paged.reset_prefix_cache(why),
                 lambda: contiguous.compact(why)):  # fmt: skip
        with pytest.raises(ConfigError, match="why"):
            call()


@pytest.mark.parametrize("retain", [Retain(), None, 3, {}, iter([Retain()])], ids=lambda r: type(r).__name__)
def test_retain_that_is_no_list_is_refused_in_words(retain):
    with pytest.raises(ConfigError, match="list of Retain"):
        engine().add_request(PROMPT, retain=retain)


@pytest.mark.parametrize("policy", [Policy, 5, object()], ids=repr)
def test_an_engine_takes_only_an_object_of_a_policy(policy):
    with pytest.raises(ConfigError, match="made from Policy"):
        engine(policy)


NO_POLICIES = [int, "fcfs", 5, Policy(EngineConfig(num_blocks=1)), lambda config: 5, lambda config: Policy]


@pytest.mark.parametrize("policy", NO_POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_policy_that_is_none_is_refused_in_words(policy):
    with pytest.raises(ConfigError, match="made from Policy"):
        LLM("tiny", num_blocks=4, policy=policy)


@pytest.mark.parametrize("name", ["order", "admit", "chunk", "victim"])
@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, MemoryError])
def test_whatever_a_policy_raises_the_default_decides(name, error):
    """A plan stayed open for ever: no step could run after it."""

    def ask(self, *args):
        raise error("made up")

    broken = type("Broken", (Policy,), {name: ask})(EngineConfig(num_blocks=1))
    own, default = engine(broken, num_blocks=4), engine(num_blocks=4)
    ends = []
    for one in (own, default):
        with Recorder(one) as recording:
            for _ in range(3):
                one.add_request(PROMPT, SamplingParams(max_tokens=6))
            ends.append({rid: o.outputs[0].token_ids for rid, o in run_bounded(one, 100).items()})
            assert fold(recording.events).snapshot() == one.snapshot()
        if one is own:
            assert {e.where for e in recording.errors} == {f"policy.{name}"}
    assert ends[0] == ends[1]


@pytest.mark.parametrize("name", ["admit", "chunk"])
def test_a_second_interrupt_ends_a_policy_that_never_answers(name):
    """Only killing the process helped."""

    class Endless(Policy):
        pass

    def ask(self, *args):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one should have stopped this")

    setattr(Endless, name, ask)
    one = engine(Endless(EngineConfig(num_blocks=1)))
    with Recorder(one) as recording:
        rid = one.add_request(PROMPT, SamplingParams(max_tokens=3))
        with pytest.raises(KeyboardInterrupt):
            one.step()
        one.check()
        assert one.scheduler.step == 1  # the step was finished first
        assert not one.scheduler.open_plans
        delattr(Endless, name)
        assert list(run_bounded(one, 20)) == [rid]
    assert "Ctrl-C" in recording.errors[0].what
    assert fold(recording.events).snapshot() == one.snapshot()


@pytest.mark.parametrize(
    "policy", [int, [], 5, "fcfs", lambda config: Policy(config)], ids=lambda policy: type(policy).__name__
)
def test_a_fork_takes_only_a_policy(policy):
    one = engine()
    with Recorder(one) as recording:
        one.add_request(PROMPT, SamplingParams(max_tokens=3))
        run_bounded(one, 20)
    with pytest.raises(ConfigError, match="made from Policy"):
        fork(recording, 1, policy=policy)


class Guesses:
    """A drafter that does `act` at each guess."""

    def __init__(self, act):
        self.propose = lambda request, new, limit: act()

    def forget(self, request_id):
        pass


def exits():
    raise SystemExit


def interrupted_twice():
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "act", [exits, lambda: count(1), interrupted_twice], ids=["exits", "endless", "interrupted"]
)
def test_a_drafter_cannot_stop_the_engine(act):
    """The plan stayed open for ever; an endless generator took all memory."""
    config = EngineConfig(num_blocks=8, block_size=4, max_model_len=32)
    one = Engine(config, SimulatedRunner(), drafter=Guesses(act))
    rid = one.add_request(PROMPT, SamplingParams(max_tokens=4))
    for _ in range(10):
        try:
            one.step()
        except KeyboardInterrupt:
            assert act is interrupted_twice
        one.check()
        assert not one.scheduler.open_plans
    assert not one.is_live(rid)


@pytest.mark.parametrize("now", [float("nan"), float("inf"), "x", None], ids=repr)
def test_a_clock_that_is_none_is_refused_in_words(now):
    one = Engine(EngineConfig(num_blocks=8), SimulatedRunner(), clock=lambda: now)
    with pytest.raises(ConfigError, match="clock"):
        one.add_request(PROMPT)
    assert not one.has_unfinished()
