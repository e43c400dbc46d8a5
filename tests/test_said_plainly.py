"""What does not fit is said in a sentence that names it and what there is, never by Python's own errors alone."""

import dataclasses
import inspect
import pickle

import pytest

from pagedinfer import BeamSearchParams, EngineConfig, Recorder, SamplingParams, Session
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.options import RequestOptions, Retain
from pagedinfer.errors import ConfigError, PagedInferError, QueueFull, RecordingError, UnknownOption
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.simulated import SimulatedRunner


def small_engine(**config):
    return Engine(EngineConfig(num_blocks=16, block_size=4, **config), SimulatedRunner())


# -- options ----------------------------------------------------------------------------------------------------------

SETTINGS = [
    (EngineConfig, {"num_blocks": 4}, "block_siz", "block_size"),
    (SamplingParams, {}, "temprature", "temperature"),
    (BeamSearchParams, {"beam_width": 2}, "max_token", "max_tokens"),
    (RequestOptions, {}, "tennant", "tenant"),
    (Retain, {}, "prioritiy", "priority"),
]


@pytest.mark.parametrize(("cls", "needed", "typo", "meant"), SETTINGS, ids=lambda value: str(value)[:20])
def test_an_unknown_option_is_named_with_the_nearest_and_all_there_are(cls, needed, typo, meant):
    with pytest.raises(UnknownOption) as caught:
        cls(**needed, **{typo: 1})
    assert isinstance(caught.value, TypeError), "code that expects Python's own error goes on working"
    known = ", ".join(field.name for field in dataclasses.fields(cls))
    said = f"{cls.__name__} has no option {typo}; did you mean {meant}? There are {known}."
    assert str(caught.value) == said
    with pytest.raises(UnknownOption, match=typo):
        dataclasses.replace(cls(**needed), **{typo: 1})


def test_several_unknown_options_are_all_named():
    with pytest.raises(UnknownOption, match=r"no option zzz\. SamplingParams has no option topk; did you"):
        SamplingParams(zzz=1, topk=3)


def test_options_come_by_name_and_those_needed_come():
    with pytest.raises(UnknownOption, match="EngineConfig takes options by name only; 4 has none"):
        EngineConfig(4)
    with pytest.raises(UnknownOption, match="EngineConfig needs num_blocks"):
        EngineConfig()


@pytest.mark.parametrize("value", [EngineConfig(num_blocks=4, block_size=2), SamplingParams(top_k=3)])
def test_settings_are_what_they_were_to_other_tools(value):
    assert pickle.loads(pickle.dumps(value)) == dataclasses.replace(value) == value
    names = [field.name for field in dataclasses.fields(value)]
    assert list(inspect.signature(type(value)).parameters) == names
    assert type(value).__init__.__qualname__ == f"{type(value).__name__}.__init__"


def test_options_of_calls_are_named_too():
    with Session(small_engine()) as session:
        with pytest.raises(UnknownOption, match=r"A request has no option temprature; did you mean temper"):
            session.submit([1], temprature=1)
        with pytest.raises(UnknownOption, match=r"RequestOptions has no option tennant; did you mean tenant"):
            session.engine.add_request([1], tennant="a")
        with pytest.raises(UnknownOption, match=r"EngineView has no option pannes; did you mean panes\?"):
            session.view(pannes=("blocks",))


# -- requests and steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[], {}, None, 3])
def test_a_request_is_named_by_a_string(given):
    engine = small_engine()
    engine.add_request([1, 2])
    for ask in (
        engine.abort, engine.request, engine.fork, engine.is_live, lambda rid: engine.preempt(rid, "why"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            ask(given)
        assert str(caught.value) == f"request_id={given!r}: it must be a string."
    assert engine.is_live("r0")


def test_steps_and_their_number_are_integers():
    with Session(small_engine()) as session:
        session.submit([1, 2, 3], max_tokens=4)
        for given in ("x", -1, 2.0, True, None):
            with pytest.raises(ConfigError) as caught:
                session.run(given)
            assert str(caught.value) == f"max_steps={given!r}: it must be an integer of at least 0."
        assert session.run(0).num_steps == 0
        session.run()
        for given in ({}, [], "x", None, 1.5):
            with pytest.raises(RecordingError) as caught:
                session.fork(given)
            assert str(caught.value) == f"No step {given!r}: the recording has 0 to 4."


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([1, 2], "Request 'mine' with 3 outputs: 0 requests wait and max_num_waiting=2; try again later."),
        ([1] * 90, "Request 'mine': its 90 tokens need"),
    ],
)
def test_a_refused_request_of_several_outputs_is_named_as_it_was_submitted(prompt, said):
    engine = small_engine(max_num_waiting=2)
    with Recorder(engine) as recording:
        with pytest.raises(PagedInferError) as caught:
            engine.add_request(prompt, SamplingParams(n=3), request_id="mine")
        assert str(caught.value).startswith(said)
        assert isinstance(caught.value, QueueFull) == ("try again" in said)
        engine.add_request([1, 2], SamplingParams(max_tokens=1))
        engine.step()
    assert recording.events[1].why == str(caught.value)
    _, again = rerun(recording)
    assert again.to_jsonl(wall=False) == recording.to_jsonl(wall=False)
