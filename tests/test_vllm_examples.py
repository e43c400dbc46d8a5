"""Scripts as one writes them for vLLM's offline interface run here with only the import changed."""

import json
import math
import re

import pytest

from pagedinfer.model.tiny import ByteTokenizer

MODEL = "tiny"


pytestmark = pytest.mark.usefixtures("one_thread")


def run(script):
    """Run a script with `vllm` in its imports replaced. Returns its names."""
    moved = re.sub(r"^from vllm\b", "from pagedinfer", script, flags=re.MULTILINE)
    assert "vllm" not in moved
    names = {"__name__": "__main__", "MODEL": MODEL}
    exec(compile(moved, "script", "exec"), names)  # the scripts below
    names["llm"].close()
    return names


GENERATE = """
from vllm import LLM, SamplingParams

prompts = ["The weather today is", "My favourite colour is", "One, two, three,"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model=MODEL)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
"""


def test_generate(capsys):
    names = run(GENERATE)
    lines = capsys.readouterr().out.splitlines()
    for prompt, output, line in zip(names["prompts"], names["outputs"], lines, strict=True):
        assert output.prompt == prompt
        assert output.prompt_token_ids == [256, *prompt.encode()]
        assert output.finished
        (completion,) = output.outputs
        assert completion.index == 0
        assert 0 < len(completion.token_ids) <= 16  # the default of max_tokens, there and here
        assert completion.finish_reason in ("length", "stop")
        assert completion.logprobs is completion.cumulative_logprob is None
        assert line == f"{prompt!r} -> {completion.text!r}"


IDS = """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, dtype="float32", max_model_len=64, gpu_memory_utilization=0.05, max_num_seqs=4, seed=0)
greedy = SamplingParams(temperature=0, max_tokens=8)
by_ids = llm.generate({"prompt_token_ids": [256, 72, 105]}, greedy)
by_text = llm.generate(prompts="Hi", sampling_params=greedy, use_tqdm=False)
each = llm.generate(["Hi", "Hi"], [greedy, SamplingParams(temperature=0, max_tokens=3)])
"""


def test_prompts_of_token_ids_and_parameters_for_each():
    names = run(IDS)
    (by_ids,), (by_text,) = names["by_ids"], names["by_text"]
    assert by_ids.outputs[0].token_ids == by_text.outputs[0].token_ids
    assert by_ids.prompt is None
    assert [len(output.outputs[0].token_ids) for output in names["each"]] == [8, 3]


CHAT = """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
sampling_params = SamplingParams(temperature=0.5, max_tokens=12)
conversation = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! What can I do for you?"},
    {"role": "user", "content": "Tell me about trees."},
]
one = llm.chat(conversation, sampling_params, use_tqdm=False)
several = llm.chat([conversation, conversation[:2]], sampling_params=sampling_params, use_tqdm=True)
"""


def test_chat():
    names = run(CHAT)
    (one,), several = names["one"], names["several"]
    assert len(several) == 2
    assert several[0].prompt_token_ids == one.prompt_token_ids
    assert one.prompt_token_ids.count(256) == 1  # one begin token
    assert bytes(one.prompt_token_ids[1:]).decode().endswith("user: Tell me about trees.\nassistant: ")
    assert all(output.outputs[0].token_ids for output in [one, *several])


N = """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
outputs = llm.generate("Once upon a time", SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=10))
for completion in outputs[0].outputs:
    print(completion.index, completion.text)
best = llm.generate("Once upon a time", SamplingParams(n=2, best_of=5, temperature=1.0, logprobs=1, max_tokens=10))
"""


def test_several_outputs(capsys):
    names = run(N)
    (output,) = names["outputs"]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({completion.text for completion in output.outputs}) == 3
    assert capsys.readouterr().out.startswith(f"0 {output.outputs[0].text}")
    first, second = names["best"][0].outputs
    assert first.cumulative_logprob >= second.cumulative_logprob


SEEDS = """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL, seed=42)
prompts = ["Roll a die:"] * 3
params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=12) for seed in (1, 2, 1)]
first = llm.generate(prompts, params)
again = llm.generate(list(reversed(prompts)), list(reversed(params)))
"""


def test_seeds():
    names = run(SEEDS)
    first, again = ([output.outputs[0].text for output in names[name]] for name in ("first", "again"))
    assert first[0] == first[2] != first[1]
    assert again == first[::-1]


STOP = """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
text = llm.generate("Hello", free)[0].outputs[0].text
stop = text[10:12]
cut = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop, "never there"])
kept = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop, include_stop_str_in_output=True)
by_id = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[ord(stop[0])])
late = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop, min_tokens=40)
outputs = [output.outputs[0] for output in llm.generate(["Hello"] * 4, [cut, kept, by_id, late])]
"""


def test_stop():
    names = run(STOP)
    text, stop = names["text"], names["stop"]
    cut, kept, by_id, late = names["outputs"]
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert kept.text == cut.text + stop
    assert by_id.text == text[: text.index(stop[0])]
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", ord(stop[0]))
    assert len(late.token_ids) == 40


LOGPROBS = """
from vllm import LLM, SamplingParams

llm = LLM(model=MODEL)
params = SamplingParams(temperature=0.9, seed=3, max_tokens=6, logprobs=3, prompt_logprobs=2)
output = llm.generate("Hello", params)[0]
for position in output.outputs[0].logprobs:
    for token_id, entry in position.items():
        print(token_id, entry.logprob, entry.rank, repr(entry.decoded_token))
"""


def test_logprobs():
    output = run(LOGPROBS)["output"]
    (completion,) = output.outputs
    assert len(completion.logprobs) == len(completion.token_ids)
    total = 0.0
    for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert 3 <= len(position) <= 4  # the chosen one, too
        assert {1, 2, 3} <= {entry.rank for entry in position.values()}
        assert all(entry.logprob <= 0.0 for entry in position.values())
        assert position[token_id].decoded_token == ByteTokenizer().decode(
            [token_id], skip_special_tokens=False
        )
        total += position[token_id].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    for token_id, position in list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]:
        assert 2 <= len(position) <= 3
        assert math.isfinite(position[token_id].logprob)


STRUCTURED = r"""
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

llm = LLM(model=MODEL, max_model_len=200)
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
}
grammar = '''
root ::= "let " name " = " number
name ::= "x" | "y"
number ::= "1" | "2" | number "0"
'''

def ask(prompt, form, **options):
    params = SamplingParams(structured_outputs=form, max_tokens=100, seed=1, **options)
    return llm.generate(prompts=prompt, sampling_params=params)[0].outputs[0]

choice = ask("Is this nice? ", StructuredOutputsParams(choice=["Positive", "Negative"]))
regex = ask("A date: ", StructuredOutputsParams(regex=r"20\d\d-[01]\d-[0-3]\d\n"), stop=["\n"])
pet = ask("A pet: ", StructuredOutputsParams(json=schema, disable_any_whitespace=True,
                                             disable_additional_properties=True))
line = ask("A line: ", StructuredOutputsParams(grammar=grammar))
"""


def test_structured_outputs():
    pytest.importorskip("llguidance", reason='needs the extra "structured"')
    names = run(STRUCTURED)
    assert names["choice"].text in ("Positive", "Negative")
    assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", names["regex"].text)
    assert names["regex"].stop_reason == "\n"
    pet = json.loads(names["pet"].text)
    assert set(pet) == {"name", "kind"}
    assert pet["kind"] in ("cat", "dog")
    assert re.match(r"let [xy] = [12]0*", names["line"].text)
