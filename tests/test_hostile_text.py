"""Tokenizer files and chat templates of strangers: they work, or one of our errors says why not."""

import contextlib
import json
import random
import re
import subprocess
import sys

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pagedinfer.errors import ModelError, PagedInferError, RequestError
from pagedinfer.model.chat_template import render_chat
from pagedinfer.model.tokenizer import open_tokenizer

pytestmark = pytest.mark.timeout(120)  # the guard against hanging; all together take a few seconds

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3}, "merges": [["a", "b"]]}
SPECIAL = {"id": 3, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False}
BEGIN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [SPECIAL | {"normalized": False, "special": True}],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": BEGIN,
    "decoder": {"type": "Fuse"},
    "model": BPE,
}


def write_tokenizer(folder, **changes):
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | changes))
    return folder


def use(folder):
    """Open a tokenizer and do with it all that an engine does."""
    tokenizer = open_tokenizer(folder)
    ids = tokenizer.encode("ab ba")
    tokenizer.decode(ids)
    tokenizer.decode([0, 1, 2, 3, 7])
    return ids


def is_sentence(text):
    return bool(re.search(r"\w+ \w+", text)) and text.isprintable() and len(text) < 1000


# -- tokenizer.json


def test_the_tokenizer_written_here_works(tmp_path):
    assert use(write_tokenizer(tmp_path)) == use(tmp_path) == [3, 2, 1, 0]


def test_padding_truncation_and_dropout_are_for_training(tmp_path):
    padding = {
        "strategy": {"Fixed": 10**12},  # which would end the process
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    truncation = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    write_tokenizer(tmp_path, padding=padding, truncation=truncation, model=BPE | {"dropout": 0.5})
    assert [use(tmp_path) for _ in range(20)] == [[3, 2, 1, 0]] * 20


ROBERTA = {"type": "RobertaProcessing", "sep": ["x", 99], "cls": ["y", 2**32 - 1], "trim_offsets": True}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": BPE | {"merges": [["a", "zz"]]}}, "cannot be read"),
        ({"model": BPE | {"vocab": {"a": -1}}}, "cannot be read"),
        ({"model": BPE | {"vocab": {"a": 2**40}}}, "cannot be read"),
        ({"model": BPE | {"vocab": []}}, "cannot be read"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}}, "cannot be read"),
        ({"model": BPE | {"continuing_subword_prefix": "####"}}, "cannot be read"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}}, "cannot be read"),
        ({"model": {"type": "Unigram", "vocab": [], "unk_id": None}}, "cannot encode|does not work"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}, "cannot encode"),
        ({"model": {"type": "Nothing"}}, "cannot be read"),
        ({"model": None}, "cannot be read"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be read"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
            "cannot be",
        ),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot encode|does not work"),
        ({"post_processor": BEGIN | {"special_tokens": {}}}, "does not work|cannot be read"),
        ({"post_processor": ROBERTA | {"add_prefix_space": False}}, None),
        ({"decoder": {"type": "Strip", "content": "a", "start": 10**10, "stop": 10**10}}, "does not work"),
        ({"decoder": {"type": "Strip", "content": "a", "start": -1, "stop": 0}}, "cannot be read"),
        ({"added_tokens": [SPECIAL | {"id": 2**40}]}, "cannot be read"),
        ({"added_tokens": 5}, "cannot be read"),
    ],
)
def test_a_tokenizer_that_cannot_work_is_one_of_our_errors(tmp_path, changes, match):
    """Among them some on which the package's Rust code panics, which is no Exception in Python."""
    write_tokenizer(tmp_path, **changes)
    if match is None:
        use(tmp_path)
        return
    with pytest.raises(PagedInferError, match=match) as caught:
        use(tmp_path)
    assert is_sentence(str(caught.value))


FUZZ = """
import pathlib, random, sys
sys.path.insert(0, sys.argv[1])
from test_hostile_text import PagedInferError, is_sentence, use
folder, first, last = pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
file = folder / "tokenizer.json"
whole, refused = file.read_text(), 0
for seed in range(first, last):
    rng = random.Random(seed)
    text, at = whole, rng.randrange(len(whole))
    kind, length = rng.randrange(4), rng.randrange(1, 30)
    if kind == 0:
        text = text[:at] + chr(rng.randrange(32, 127)) + text[at + 1 :]
    elif kind == 1:
        text = text[:at] + text[at + length :]
    elif kind == 2:
        text = text[:at] + text[at : at + length] + text[at:]
    else:
        digits = [i for i, char in enumerate(text) if char.isdigit()]
        at = rng.choice(digits)
        text = text[:at] + rng.choice(["-1", "4294967295", "99999999999999999999", "1e9", "null"]) + text[at + 1 :]
    file.write_text(text)
    print(seed, flush=True)
    try:
        use(folder)
    except PagedInferError as error:
        refused += 1
        assert is_sentence(str(error)), error
print("refused", refused)
"""


def test_tokenizer_files_with_random_damage(tmp_path):
    """In a process of its own: Rust code that finds no memory ends it."""
    write_tokenizer(tmp_path)
    here = __file__.rsplit("test_hostile_text", 1)[0]
    command = [sys.executable, "-c", FUZZ, here, str(tmp_path), "0", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-100:] + done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 100


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        (
            "tokenizer_config.json",
            {"bos_token": 5},
            "bos_token in tokenizer_config.json is 5; it must be text",
        ),
        (
            "tokenizer_config.json",
            {"bos_token": {"text": "<s>"}},
            "bos_token in tokenizer_config.json is None",
        ),
        ("tokenizer_config.json", {"eos_token": ["</s>"]}, "eos_token in tokenizer_config.json"),
        ("tokenizer_config.json", {"pad_token": "\ud800"}, "pad_token in tokenizer_config.json"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template in tokenizer_config.json is 5"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, None),
        ("tokenizer_config.json", {"chat_template": [5, None, {}]}, None),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 5}]}, "chat_template"),
        ("tokenizer_config.json", [], "holds a list"),
        ("config.json", {"eos_token_id": "x"}, "eos_token_id"),
        ("config.json", {"eos_token_id": -1}, "eos_token_id is -1"),
        ("config.json", {"eos_token_id": [2, True]}, "eos_token_id is True"),
        ("config.json", {"bos_token_id": "x"}, "bos_token_id"),
        ("config.json", {"bos_token_id": 2**70}, "bos_token_id"),
        ("config.json", {"bos_token_id": 1000}, None),
        ("generation_config.json", {"eos_token_id": {}}, "eos_token_id"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_files_beside_the_tokenizer_that_lie_are_named(tmp_path, file, content, match):
    write_tokenizer(tmp_path)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    if match is None:
        use(tmp_path)
        return
    with pytest.raises(ModelError, match=match) as caught:
        use(tmp_path)
    assert is_sentence(str(caught.value))


# -- chat templates

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def render(source):
    variables = {"messages": CHAT, "tools": None, "documents": None, "add_generation_prompt": True}
    return render_chat(source, variables)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index ~ ':' ~ m.role ~ none ~ 1.5 }}{% endfor %}",
        "{{ ['a', 'b'] | join(', ') }} {{ 'a' ~ ('b' ~ 'c') }} {{ 'x' + 'y' * 3 }} {{ 2 ** 10 }} {{ 7 % 4 }}",
        "{{ {'b': [1, '<é>'], 'a': none} | tojson }} {{ {'a': 1} | tojson(indent=2) }}",
        "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }} {{ 'é' | tojson(true) }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% macro f(m, n=1) %}<{{ m.role }}{{ n }}>{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
        "{% for m in messages recursive %}{{ m.role }}{% if m.content == 'Hello' %}{{ loop(messages[1:]) }}"
        "{% endif %}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}{{ loop is defined }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% macro twice() %}{{ caller('a') }}{{ caller('b') }}{% endmacro %}{% call(x) twice() %}{{ x }}{% endcall %}",
        "{% generation %}{% for m in messages %}{{ m.content }}\n{% endfor %}{% endgeneration %} end",
        "{% set x = dict(a=1, b=2) %}{{ x.items() | list }}{{ dict([('c', 3)]) }} {{ range(3) | list }}",
        "{{ '%s and %d' % ('a', 3) }} {{ '{} {x}'.format(1, x=2) }} {{ 'a-b'.split('-') }} {{ messages | length }}",
        "{{ messages[0].content.upper().replace('L', 'l') | trim }} {{ 'ab'[::-1] }} {{ undefined_thing is defined }}",
        "{{ '%s is %d' | format('x', 1700000000) }} {{ '%(a)s' | format(a=1) }} {{ '100%, 1234567'.strip() }}",
        "{% set joined = [1, 2] + [3] %}{{ joined }}{{ 3 * [0] }}{{ 1700000000 * 1000 }}{{ -7 // 2 }}{{ 1e3 + 1 }}",
    ],
)
def test_templates_render_as_transformers_renders_them(source):
    def theirs():
        return render_jinja_template([CHAT], chat_template=source, add_generation_prompt=True)[0][0]

    try:
        expected = theirs()
    except Exception:
        with pytest.raises(RequestError):
            render(source)
    else:
        assert render(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ strftime_now.__code__.co_consts.__class__.__base__.__subclasses__() }}",
        "{{ dict.__base__.__subclasses__() }}",
        "{{ namespace.__init__.__globals__.x }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ joiner.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ self._TemplateReference__context.x.y }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ('{0.__class__.__mro__}' | attr('format'))('') }}",
        "{{ '{0.__class__.__mro__}'.format_map({'0': ''}) }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set ns = namespace(__class__=1) %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
        "{% set ns = namespace({'_x': 1}) %}{{ ns }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.x.y }}",
        "{% extends 'x' %}",
        "{{ raise_exception({'a': 1}) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source):
    before = json.dumps(CHAT)
    with pytest.raises(PagedInferError) as caught:
        render(source)
    assert is_sentence(str(caught.value))
    assert json.dumps(CHAT) == before


GROWING = "{% set ns = namespace(x='aaaaaaaa') %}{% for _ in range(60) %}{% set ns.x = STEP %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "turns"),
        ("{% for a in range(10**12) %}{% endfor %}", "Range too big"),
        ("{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError|turns"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "turns",
        ),
        (
            "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{{ loop([[1]]) }}{% endfor %}",
            "RecursionError|turns",
        ),
        (
            "{% set turn = 1 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "turns",
        ),
        ("{{ 'a' * 10**10 }}", "larger"),
        ("{{ 10**10 * 'a' }}", "larger"),
        ("{{ [0] * 10**10 }}", "larger"),
        ("{{ 9 ** (9 ** 9) }}", "larger"),
        ("{{ 'a'.ljust(10**10) }}", "a number above"),
        ("{{ 'a' | center(10**10) }}", "a number above"),
        ("{{ 'a' | indent(10**10) }}", "a number above"),
        ("{{ 'a' | indent(width=10**10) }}", "a number above"),
        ("{{ [1] | batch(10**10, 'x') | list }}", "a number above"),
        ("{{ [1] | slice(10**10) | list }}", "a number above"),
        ("{{ messages | tojson(indent=10**10) }}", "indents"),
        ("{{ lipsum(n=10**9) }}", "undefined"),
        (GROWING.replace("STEP", "ns.x ~ ns.x"), "larger"),
        (GROWING.replace("STEP", "ns.x + ns.x"), "larger"),
        (GROWING.replace("STEP", "[ns.x, ns.x] | join"), "larger"),
        (GROWING.replace("STEP", "ns.x.replace('a', 'aa')"), "larger"),
        (GROWING.replace("STEP", "ns.x | replace('a', 'aa')"), "larger"),
        (GROWING.replace("'aaaaaaaa'", "99").replace("STEP", "ns.x * ns.x"), "larger"),
        ("{{ '%9999999999d' % 1 }}", "a width of millions"),
        ("{{ '%*d' % (10**10, 1) }}", "a width of millions"),
        ("{{ '%.9999999999f' % 1 }}", "a width of millions"),
        ("{{ '%9999999999d' | format(1) }}", "a width of millions"),
        ("{{ '{:9999999999}'.format(1) }}", "a width of millions"),
        ("{{ '{:{w}}'.format(1, w=10**10) }}", "a number above"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.nothing.more }}", "has no attribute"),
        ("{{ none + 1 }}", "TypeError"),
        ("{{ messages[10] }}{{ messages[10].x }}", "no element|undefined"),
        ("{{ strftime_now('\\ud800') }}", "fails|refuses"),
        ("{{ strftime_now(5) }}", "TypeError"),
    ],
)
def test_a_template_cannot_run_for_ever(source, match):
    with pytest.raises(RequestError, match=match) as caught:
        render(source)
    assert is_sentence(str(caught.value))


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{",
        "{% if",
        "{{ '" + "x" * 100,
        "{{ " + "(" * 100_000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "-" * 50_000 + "1 }}",
        "{{ " + "not " * 50_000 + "1 }}",
        "{{ a" + ".b" * 100_000 + " }}",
        "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
        "{% for a in [1] %}" * 100 + "{% endfor %}" * 100,
        "{{ " + "9" * 10_000 + " }}",
        "{% block a %}{% block a %}{% endblock %}{% endblock %}",
        "{{ \x00 }}",
    ],
)
def test_a_template_that_is_no_jinja_is_said_so(source):
    with pytest.raises(PagedInferError) as caught:
        render(source)
    assert is_sentence(str(caught.value))


def test_templates_with_random_damage():
    whole = (
        "{% set ns = namespace(x='a') %}{% macro f(m) %}{{ m.role ~ ': ' ~ m.content | trim }}{% endmacro %}"
        "{% for m in messages %}{% if loop.index0 % 2 == 0 %}{{ f(m) }}{% else %}{{ m | tojson }}{% endif %}"
        "{% set ns.x = ns.x * 2 + 'b' %}{% endfor %}{{ ns.x }}{% if add_generation_prompt %}end{% endif %}"
    )
    assert render(whole) == 'user: Hello{"role": "assistant", "content": "Hi"}aabaabbend'
    refused = 0
    for seed in range(300):
        rng = random.Random(seed)
        at, other, length = rng.randrange(len(whole)), rng.randrange(len(whole)), rng.randrange(1, 20)
        piece = whole[other : other + length]
        text = whole[:at] + (piece if rng.random() < 0.7 else "") + whole[at + rng.randrange(3) * length :]
        with contextlib.suppress(PagedInferError):
            render(text)
            continue
        refused += 1
    assert refused > 100
