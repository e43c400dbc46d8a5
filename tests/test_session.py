from itertools import pairwise

import pytest

from pagedinfer import Recorder, SamplingParams, Session
from pagedinfer.errors import ConfigError, RequestError
from pagedinfer.testing import assert_no_leak, assert_same, cold_outputs, tiny_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
OPTIONS = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llm():
    with tiny_llm() as llm:
        yield llm


def test_a_session_records_from_its_start_to_its_end(llm):
    with Session(llm) as session:
        rid = session.submit("Hello", GREEDY)
        recording = session.run()
        assert recording is session.recording
        assert recording.num_steps == 6
        assert recording.requests["request"] == [rid]
        assert_same([session.outputs[rid]], cold_outputs(["Hello"], GREEDY))
        assert session.texts == {rid: session.outputs[rid].outputs[0].text}
    session.close()
    length = len(recording)
    llm.generate("more", GREEDY)
    assert len(recording) == length
    assert_no_leak(llm.engine)


def test_it_takes_an_engine_as_well(llm):
    with Session(llm.engine) as session:
        assert session.engine is llm.engine
        assert "Session(Engine(step 0" in repr(session)


def test_params_come_whole_or_as_options(llm):
    with Session(llm) as session:
        first, second = session.submit("Hello", GREEDY), session.submit("Hello", **OPTIONS)
        session.run()
        assert session.texts[first] == session.texts[second]
        with pytest.raises(ConfigError, match="Both params and max_tokens"):
            session.submit("Hello", GREEDY, max_tokens=3)
        with pytest.raises(
            ConfigError, match=r"max_tokns; did you mean max_tokens\? There are temperature.* retain\.$"
        ):
            session.submit("Hello", max_tokns=3)
        with pytest.raises(ConfigError, match="max_tokens=0"):
            session.submit("Hello", max_tokens=0)
        with pytest.raises(RequestError, match="no tokens"):
            session.submit([])


def test_advance_says_whether_there_is_more(llm):
    with Session(llm) as session:
        assert not session.advance()
        assert session.recording.num_steps == 0
        session.submit("Hello", **OPTIONS)
        assert [session.advance() for _ in range(7)] == [True] * 5 + [False] * 2


def test_run_stops_at_its_limit(llm):
    with Session(llm) as session:
        session.submit("Hello", **OPTIONS)
        assert session.run(max_steps=2).num_steps == 2
        assert len(session.texts["r0"]) == 2
        assert session.run().num_steps == 6


def test_texts_grow_while_the_session_steps(llm):
    with Session(llm) as session:
        session.submit("Hello", **OPTIONS)
        seen = []
        while session.advance():
            seen.append(session.texts["r0"])
        assert all(after.startswith(before) for before, after in pairwise(seen))
        assert len(set(seen)) == 5


def test_a_session_begun_mid_run_starts_with_the_state(llm):
    llm.engine.add_request("Hello", GREEDY)
    llm.engine.step()
    with Session(llm) as session, Recorder(llm.engine) as other:
        session.run()
    assert session.recording.at(-1).snapshot() == llm.engine.snapshot() == other.at(-1).snapshot()
    assert session.recording.first_step == 1


def test_generate_beside_a_session_keeps_its_outputs(llm):
    """A notebook: Play steps the session in one thread while a cell generates."""
    with Session(llm) as session:
        mine = session.submit("Hello", **OPTIONS)
        stream = llm.stream("other", GREEDY)
        text = next(stream)
        session.run()
        text += "".join(stream)
        assert text == cold_outputs(["other"], GREEDY)[0].outputs[0].text
        assert_same([session.outputs[mine]], cold_outputs(["Hello"], GREEDY))
        assert set(session.texts) == {mine}


@pytest.mark.parametrize("what", ["tiny", None, 3])
def test_a_session_says_what_it_watches(what):
    with pytest.raises(ConfigError, match=r"an Engine or an LLM, not a"):
        Session(what)
