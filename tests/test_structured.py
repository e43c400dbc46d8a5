"""Structured outputs: what ends by itself has its form, beside others, after preemption, with any tokenizer."""

import json
import random
import re
import sys

import numpy as np
import pytest

from pagedinfer import SamplingParams, StructuredOutputsParams
from pagedinfer.errors import ConfigError, ModelError
from pagedinfer.model.sources import resolve
from pagedinfer.model.tiny import ByteTokenizer
from pagedinfer.model.tokenizer import open_tokenizer
from pagedinfer.runner.structured import StructuredOutputs
from pagedinfer.testing import (
    assert_no_leak,
    assert_same,
    cold_outputs,
    force_preempt,
    run_bounded,
    tiny_llm,
)

pytest.importorskip("llguidance", reason='needs the extra "structured"')
jsonschema = pytest.importorskip("jsonschema", reason="the extra `test` brings jsonschema with nbconvert")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "é"]}, "maxItems": 3},
        "home": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                 "required": ["zip"], "additionalProperties": False},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}  # fmt: skip
CHOICES = ["yes", "no", 'a "quote"', "back\\slash", "two\nlines", "naïve ☕", "no way"]


def is_json(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_balanced(text):
    return re.fullmatch(r"a*cb*", text) is not None and text.count("a") == text.count("b")


FORMS = {
    "json": ({"json": SCHEMA, "disable_any_whitespace": True}, is_json),
    "json text": ({"json": json.dumps(SCHEMA), "whitespace_pattern": " ?"}, is_json),
    "regex": ({"regex": r"[A-Z][a-z]{2,6}( [0-9]+\.[0-9]{2}|, née)?"},
              lambda text: re.fullmatch(r"[A-Z][a-z]{2,6}( [0-9]+\.[0-9]{2}|, née)?", text)),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "gbnf": ({"grammar": 'root ::= "a" root "b" | "c"'}, is_balanced),
    "lark": ({"grammar": 'start: "a" start "b" | "c"'}, is_balanced),
    "object": ({"json_object": True, "whitespace_pattern": ""}, lambda text: isinstance(json.loads(text), dict)),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llm():
    with tiny_llm(num_blocks=512) as llm:
        yield llm
        llm.engine.check()


@pytest.fixture(scope="module")
def smollm2():
    try:
        return open_tokenizer(resolve("smollm2-135m", progress=False))
    except ModelError as error:
        pytest.skip(f"SmolLM2 is not here and cannot be fetched: {error}")


def asked(form, **options):
    return SamplingParams(
        **({"temperature": 1.0, "seed": 1, "max_tokens": 200} | options),
        structured_outputs=StructuredOutputsParams(**FORMS[form][0]),
    )


# -- the form is kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_what_ends_by_itself_has_its_form(llm, form):
    params = [
        asked(form, temperature=temperature, seed=seed)
        for temperature in (0.0, 0.7, 3.0)
        for seed in range(5)
    ]
    outputs = llm.generate(["Tell me: "] * len(params), params)
    ended = 0
    for output in outputs:
        assert output.error is None
        completion = output.outputs[0]
        if completion.finish_reason == "stop":
            assert FORMS[form][1](completion.text), completion.text
            assert completion.token_ids[-1] == 257
            ended += 1
        else:
            assert completion.finish_reason == "length"
    assert ended >= 3, [output.outputs[0].text for output in outputs]
    assert_no_leak(llm.engine)


def ids_of(packed, vocab):
    return np.flatnonzero(np.unpackbits(packed.view(np.uint8), bitorder="little")[:vocab]).tolist()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "object"])  # which a walk would never end
def test_with_smollm2s_tokenizer_any_walk_has_its_form(smollm2, form):
    """No model: tokens drawn at random among those that the mask allows."""
    vocab, ends = 49_152, set(smollm2.eos_token_ids)
    make, pick = StructuredOutputs(smollm2, vocab, smollm2.eos_token_ids), random.Random(form)
    mask, ended = make(StructuredOutputsParams(**FORMS[form][0])), 0
    for _ in range(3):
        ids = []
        while len(ids) < 60:
            allowed = ids_of(mask.allowed(ids), vocab)
            assert allowed
            if ends & set(allowed) and (len(ids) > 20 or len(allowed) < 4):
                assert ends <= set(allowed)
                assert FORMS[form][1](smollm2.decode(ids)), smollm2.decode(ids)
                ended += 1
                break
            ids.append(pick.choice([token for token in allowed if token not in ends]))
    assert ended


def test_cut_by_max_tokens_is_length(llm):
    for most in (1, 5, 20):
        (output,) = llm.generate("x", asked("json", max_tokens=most))
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == most


def test_padded_vocabulary_rows_are_never_allowed(smollm2):
    make = StructuredOutputs(smollm2, smollm2.vocab_size + 100, smollm2.eos_token_ids)
    mask = make(StructuredOutputsParams(regex=".*"))
    packed = mask.allowed([])
    allowed = ids_of(packed, smollm2.vocab_size + 100)
    assert len(allowed) > 40_000
    assert max(allowed) < smollm2.vocab_size


# -- company, preemption ----------------------------------------------------------------------------------------------


def test_neighbours_are_unchanged(llm):
    free = SamplingParams(temperature=1.0, seed=9, max_tokens=40, ignore_eos=True)
    params = [free, asked("json"), free, asked("choice"), asked("regex"), free]
    outputs = llm.generate(["Hello"] * 6, params)
    assert_same(outputs, cold_outputs(["Hello"] * 6, params))


@pytest.mark.parametrize("form", ["json", "gbnf"])
def test_preemption_changes_nothing(form):
    params = asked(form, max_tokens=40)
    (cold,) = cold_outputs(["Hello"], params)
    for after in range(1, len(cold.outputs[0].token_ids), 3):
        with tiny_llm(num_blocks=64, max_num_batched_tokens=5) as llm:
            rid = llm.engine.add_request("Hello", params)
            while llm.engine.request(rid).num_output_tokens < after:
                llm.engine.step()
            force_preempt(llm.engine, rid)
            assert_same([run_bounded(llm.engine, 300)[rid]], [cold])


def test_a_failed_step_changes_nothing(llm):
    params = asked("json", max_tokens=40)
    (cold,) = cold_outputs(["Hello"], params)
    execute = llm.engine.runner.execute

    def failing(plan):
        result = execute(plan)  # the mask has been asked, and its answer is lost
        if plan.step % 3 == 0 and plan.step not in failed:
            failed.append(plan.step)
            raise RuntimeError("made to fail")
        return result

    failed = []
    llm.engine.runner.execute = failing
    rid, done = llm.engine.add_request("Hello", params), {}
    while llm.engine.has_unfinished():
        try:
            done.update((o.request_id, o) for o in llm.engine.step())
        except RuntimeError:
            llm.engine.check()
    assert len(failed) > 3
    assert_same([done[rid]], [cold])


def test_a_mask_is_a_function_of_the_ids():
    make = StructuredOutputs(ByteTokenizer(), 259, [257])
    mask, fresh = (make(StructuredOutputsParams(choice=["abc", "abd", "xy"])) for _ in range(2))

    def allowed(mask, ids):
        return set(ids_of(mask.allowed(ids), 259))

    assert allowed(mask, []) == {97, 120}
    assert allowed(mask, [97, 98]) == {99, 100}
    assert allowed(mask, [97, 98]) == {99, 100}  # asked again
    assert allowed(mask, [120]) == {121}  # another output
    assert allowed(mask, []) == allowed(fresh, []) == {97, 120}
    assert allowed(mask, [97, 98, 100]) == allowed(fresh, [97, 98, 100]) == {257}
    with pytest.raises(ValueError, match="doesn't satisfy the grammar"):
        mask.allowed([99])


def test_several_outputs_have_parsers_of_their_own(llm):
    (output,) = llm.generate("Hello", asked("json", n=4, temperature=2.0))
    assert len({completion.text for completion in output.outputs}) == 4
    assert all(c.finish_reason == "length" or is_json(c.text) for c in output.outputs)


def test_a_hook_and_a_form_must_agree(llm):
    class NoDigits:
        def allowed(self, token_ids):
            return [not 48 <= token < 58 for token in range(259)]

    params = SamplingParams(
        seed=1, token_mask=NoDigits(), structured_outputs=StructuredOutputsParams(regex="[0-9a]{4}")
    )
    (output,) = llm.generate("Hello", params)
    assert output.outputs[0].text == "aaaa"


def test_logprobs_are_those_before_the_mask(llm):
    (free,) = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=1, logprobs=3))
    (output,) = llm.generate("Hello", asked("choice", logprobs=3))
    raw, masked = free.outputs[0].logprobs[0], output.outputs[0].logprobs[0]
    for token in raw:
        assert masked[token].logprob == pytest.approx(raw[token].logprob, abs=1e-5)


def test_min_tokens_beyond_the_form_is_told(llm):
    params = SamplingParams(min_tokens=10, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    (output,) = llm.generate("Hello", params)
    assert output.outputs[0].finish_reason == "error"
    assert "min_tokens" in output.error
    assert output.outputs[0].text in ("yes", "no")


# -- at the door ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "no form"),
        ({"regex": "a", "choice": ["a"]}, r"\['regex', 'choice'\]"),
        ({"json": "{"}, "is no JSON schema"),
        ({"json": "3"}, "a JSON schema is an object"),
        ({"json": {"a": {1, 2}}}, "is no JSON schema"),
        ({"choice": []}, "choice=\\[\\]"),
        ({"choice": "yes"}, "choice='yes'"),
        ({"choice": ["a", ""]}, "non-empty"),
        ({"choice": [1]}, "choice"),
        ({"regex": 5}, "regex=5"),
        ({"json_object": 1}, "json_object=1"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace=1"),
        ({"structural_tag": "x"}, "structural_tag='x' is not supported"),
    ],
    ids=str,
)
def test_bad_forms_are_refused_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        StructuredOutputsParams(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json": {"type": "objekt"}}, "objekt"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/nope"}}, "nope"),
        ({"grammar": "root ::= foo"}, "foo"),
        ({"grammar": "hello"}, "cannot be used"),
    ],
    ids=str,
)
def test_what_the_library_refuses_is_refused_when_it_is_submitted(llm, options, words):
    name = next(iter(options))
    with pytest.raises(ConfigError, match=words) as caught:
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(**options)))
    assert str(caught.value).startswith(f"{name}=")
    assert "\n" not in str(caught.value)
    assert_no_leak(llm.engine)


def test_a_form_and_ignore_eos_contradict_each_other():
    with pytest.raises(ConfigError, match="ignore_eos"):
        asked("choice", ignore_eos=True)
    with pytest.raises(ConfigError, match=r"give StructuredOutputsParams\(\.\.\.\)"):
        SamplingParams(structured_outputs={"choice": ["a"]})


def test_without_the_extra_one_sentence(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r'pip install "pagedinfer\[structured\]"'):
        llm.generate("a", asked("choice"))
    assert_no_leak(llm.engine)


def test_an_engine_without_forms_says_so():
    from pagedinfer import Engine, EngineConfig
    from pagedinfer.sim.simulated import SimulatedRunner

    engine = Engine(EngineConfig(num_blocks=4), SimulatedRunner(), eos_token_ids=[0])
    with pytest.raises(ConfigError, match=r"structured_outputs=.*simulates"):
        engine.add_request([1], asked("choice"))
    with pytest.raises(ConfigError, match="it needs `token_bytes`"):
        StructuredOutputs(type("Odd", (), {"vocab_size": 5})(), 5, [0])(StructuredOutputsParams(choice=["a"]))


def test_no_additional_properties(llm):
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"enum": [1]}}}}}
    mask = StructuredOutputs(ByteTokenizer(), 259, [257])
    closed = mask(StructuredOutputsParams(json=schema, disable_additional_properties=True))
    opened = mask(StructuredOutputsParams(json=schema))
    for made, possible in ((closed, False), (opened, True)):
        assert (ord("z") in ids_of(made.allowed(list(b'{"')), 259)) == possible
    assert schema == {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"enum": [1]}}}},
    }


# -- as in vLLM's own examples ----------------------------------------------------------------------------------------

SQL = """
root ::= select_statement

select_statement ::= "SELECT " column " from " table " where " condition

column ::= "col_1 " | "col_2 "

table ::= "table_1 " | "table_2 "

condition ::= column "= " number

number ::= "1 " | "2 "
"""


def test_the_forms_of_vllms_example(llm):
    from pagedinfer.sampling_params import SamplingParams, StructuredOutputsParams

    car = {
        "properties": {
            "brand": {"title": "Brand", "type": "string", "maxLength": 5},
            "car_type": {"$ref": "#/$defs/CarType"},
        },
        "$defs": {"CarType": {"enum": ["sedan", "SUV", "Truck"], "title": "CarType", "type": "string"}},
        "required": ["brand", "car_type"],
        "title": "CarDescription",
        "type": "object",
    }
    forms = [
        StructuredOutputsParams(choice=["Positive", "Negative"]),
        StructuredOutputsParams(regex=r"\w+@\w+\.com\n"),
        StructuredOutputsParams(json=car, disable_any_whitespace=True, disable_additional_properties=True),
        StructuredOutputsParams(grammar=SQL),
    ]
    params = [
        SamplingParams(structured_outputs=form, seed=1, temperature=0.8, max_tokens=80) for form in forms
    ]
    params[1] = SamplingParams(
        structured_outputs=forms[1], stop=["\n"], seed=1, max_tokens=300, logit_bias={64: 9}
    )
    sentiment, email, description, query = (o.outputs[0].text for o in llm.generate(["Hello"] * 4, params))
    assert sentiment in ("Positive", "Negative")
    assert re.fullmatch(r"\w+@\w+\.com", email)
    assert json.loads(description)["car_type"] in ("sedan", "SUV", "Truck")
    assert re.fullmatch(r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ", query)
