"""Tokenizers built from GGUF metadata and from folders give the ids that transformers gives."""

import json
import random

import gguf
import pytest
import tokenizers
import transformers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from pagedinfer.engine.protocols import Tokenizer
from pagedinfer.errors import ModelError, RequestError
from pagedinfer.model.gguf_header import read_header
from pagedinfer.model.sources import resolve
from pagedinfer.model.tokenizer import TextTokenizer, open_tokenizer

TEXTS = [
    "",
    "a",
    "Hello",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "  two  double  spaces  ",
    "don't I'll WE'RE they've he'd it's",
    "line\nbreak\n\ntwo\n\n\nthree",
    "\n",
    "\n\n leading newlines",
    "\ttab\tand \t mixed \n\t",
    "windows\r\nline ends\r\n\r\n",
    "    indented code:\n        return x[0]\n",
    "1",
    "42 is 42",
    "12345678901234567890",
    "3.14159e-10 and 1,000,000.50",
    "2024-12-31T23:59:59Z",
    "x1y2z3",
    "v1.2.3-rc4",
    "café crème brûlée",
    "Ærøskøbing, Łódź, Niño, Straße, İstanbul",
    "e\u0301 combining and \u00e9 composed",
    "Привет, мир!",
    "你好，世界。",
    "こんにちは世界、テスト",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "😀",
    "🎉🎉 party 🎊",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 skin",
    "math: ∀x∈ℝ, x² ≥ 0 ⇒ √x",
    "“curly” ‘quotes’ — dash… ellipsis",
    "\u00a0nbsp\u200bzero\u2003em",
    "\ufeffbyte order mark",
    "null\x00byte and \x7f",
    "!!!???...;;;",
    "snake_case camelCase PascalCase SCREAMING_CASE",
    "a" * 100,
    "https://" + "example.org/path?query=1&x=%20#frag",
    "<html><body>&amp;</body></html>",
    '{"key": [1, 2.5, null, true]}',
    "SELECT * FROM t WHERE a >= 10;",
    "def f(x):\n    return x ** 2  # square",
    "The quick brown fox jumps over the lazy dog.",
    "Supercalifragilisticexpialidocious antidisestablishmentarianism",
]
SPECIAL = [
    "<|im_start|>user\nhi<|im_end|>\n",
    "text<|im_end|>text",
    "<|endoftext|>",
    " <|im_start|> spaced <|im_end|> ",
    "a<file_sep>b<repo_name>c",
    "<|im_start|><|im_start|>",
    "<|im_star|>",
]
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 + 3?\n"}],
    [
        {"role": "user", "content": "Привет 😀"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "  and <|im_end|> inside"},
    ],
]


def ids_of(reference, text, **options):
    return reference.encode(text, **options)


def chat_ids(reference, chat, **options):
    found = reference.apply_chat_template(chat, tokenize=True, **options)
    return found if isinstance(found, list) else found["input_ids"]


@pytest.fixture(scope="module")
def smollm2():
    return open_tokenizer(resolve("smollm2-135m", progress=False))


@pytest.fixture(scope="module")
def reference():
    path = resolve("smollm2-135m", progress=False)
    made = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers (5.24) reads no `smollm` from `tokenizer.ggml.pre`: it lacks the rule of the model's own
    # tokenizer.json (and of llama.cpp) that digits stand alone, which shows after two spaces ("x  1").
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return made


def test_smollm2_ids_equal_transformers(smollm2, reference):
    assert len(TEXTS) >= 50
    assert isinstance(smollm2, Tokenizer)
    for text in TEXTS + SPECIAL:
        assert smollm2.encode(text) == ids_of(reference, text), text
        assert smollm2.encode(text, add_special_tokens=False) == ids_of(
            reference, text, add_special_tokens=False
        )


def test_smollm2_decodes_to_the_same_text(smollm2, reference):
    for text in TEXTS + SPECIAL:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids, skip_special_tokens=False) == text
        for skip in (True, False):
            assert smollm2.decode(ids, skip_special_tokens=skip) == reference.decode(
                ids, skip_special_tokens=skip
            )
    assert smollm2.decode(smollm2.encode("a<|im_end|>")) == "a"


def test_any_ids_decode(smollm2, reference):
    for seed in range(50):
        ids = random.Random(seed).choices(range(smollm2.vocab_size), k=12)
        assert smollm2.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert "\ufffd" in smollm2.decode(smollm2.encode("😀")[:1])


def test_smollm2_specials(smollm2, reference):
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.vocab_size) == (1, (2,), 49152)
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.chat_template == reference.chat_template


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_smollm2_chat_equals_transformers(smollm2, reference, chat, prompt):
    ids = smollm2.apply_chat_template(chat, add_generation_prompt=prompt)
    assert ids == chat_ids(reference, chat, add_generation_prompt=prompt)
    text = smollm2.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
    assert text == reference.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
    assert smollm2.encode(text) == ids  # the rendered string through generate


# -- small vocabularies, trained here


CORPUS = [*TEXTS, *(f"{number} {number * 7}" for number in range(60))] * 2
BYTE_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<tool>"]


def train_byte_level(pre_tokenizer):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(CORPUS, trainer)
    return model


def byte_level_metadata(pre, **changes):
    """Metadata of a byte-level GGUF, as the converter writes them."""
    model = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    state = json.loads(model.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get) + BYTE_SPECIAL
    size = len(state["vocab"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * size + [3, 3, 3, 4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["merges"]],
        "tokenizer.ggml.bos_token_id": size,
        "tokenizer.ggml.eos_token_id": size + 1,
        "tokenizer.ggml.eot_token_id": size + 2,
        "tokenizer.ggml.add_bos_token": False,
        **changes,
    }


def write(path, metadata):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        kinds[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def both(tmp_path, metadata):
    path = write(tmp_path / "t.gguf", metadata)
    return open_tokenizer(path), transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "llama3", "qwen2"])
def test_byte_level_kinds_equal_transformers(tmp_path, pre):
    mine, theirs = both(tmp_path, byte_level_metadata(pre))
    for text in [*TEXTS, "a<|eot_id|>b", "<tool> x", "  <|begin_of_text|>  12345"]:
        assert mine.encode(text) == ids_of(theirs, text), text
        assert mine.decode(mine.encode(text), skip_special_tokens=False) == text
    assert mine.eos_token_ids == (mine.eos_token_id, mine.eos_token_id + 1)
    assert mine.decode(mine.encode("<tool>a<|eot_id|>")) == "<tool>a"  # user-defined tokens are text


def test_digits_tell_the_kinds_apart():
    pieces = {}
    for pre in ("smollm", "gpt-2", "llama-bpe", "qwen2"):
        tokenizer = TextTokenizer.from_gguf(byte_level_metadata(pre))
        before = tokenizer.backend.pre_tokenizer.pre_tokenize_str("a 1234")
        pieces[pre] = [piece for piece, _ in before]
    assert pieces == {
        "smollm": ["a", "Ġ", "1", "2", "3", "4"],
        "gpt-2": ["a", "Ġ1234"],
        "llama-bpe": ["a", "Ġ", "123", "4"],
        "qwen2": ["a", "Ġ", "1", "2", "3", "4"],
    }


LLAMA_SPECIAL = ["<unk>", "<s>", "</s>"]


def sentencepiece_parts():
    """A Llama-2 style tokenizer.json trained here, and the same as GGUF metadata: scores, no merges."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=500, show_progress=False, limit_alphabet=80)
    model.train_from_iterator(CORPUS, trainer)
    state = json.loads(model.to_str())["model"]
    learned = sorted(state["vocab"], key=state["vocab"].get)
    tokens = [*LLAMA_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    vocab = {token: index for index, token in enumerate(tokens)}
    merged = {"".join(pair): -float(rank) for rank, pair in reversed(list(enumerate(state["merges"])))}
    scores = [merged.get(token, -1e6 if index >= 259 else 0.0) for index, token in enumerate(tokens)]
    original = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab=vocab,
            merges=[tuple(pair) for pair in state["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    original.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    original.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    original.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in LLAMA_SPECIAL])
    original.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(learned),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return original, metadata


def test_sentencepiece_equals_the_original():
    original, metadata = sentencepiece_parts()
    mine = TextTokenizer.from_gguf(metadata)
    for text in [*TEXTS, "<s>", "a</s> b", "<s>[INST] x [/INST] y</s>"]:
        ids = mine.encode(text, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False).ids, text
        assert mine.decode(ids) == original.decode(ids)
    for text in TEXTS:
        assert mine.encode(text) == original.encode(text).ids
        assert mine.decode(mine.encode(text)) == text


def test_sentencepiece_equals_transformers(tmp_path):
    _, metadata = sentencepiece_parts()
    mine, theirs = both(tmp_path, metadata)
    for text in TEXTS:
        if text.startswith(
            " "
        ):  # transformers' LlamaTokenizer swallows the first space; the original keeps it
            continue
        assert mine.encode(text) == ids_of(theirs, text), text


def test_prefix_space_flag():
    _, metadata = sentencepiece_parts()
    without = TextTokenizer.from_gguf(metadata | {"tokenizer.ggml.add_space_prefix": False})
    with_it = TextTokenizer.from_gguf(metadata | {"tokenizer.ggml.add_space_prefix": True})
    assert with_it.encode("The") == without.encode(" The")
    assert without.encode("The") != with_it.encode("The")
    for text in TEXTS:
        assert without.decode(without.encode(text)) == text


@pytest.mark.parametrize(
    ("kind", "flag", "adds"),
    [
        ("llama", None, True),
        ("llama", True, True),
        ("llama", False, False),
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
    ],
)
def test_ql_10_begin_token_as_the_flags_say_and_never_twice(kind, flag, adds):
    metadata = sentencepiece_parts()[1] if kind == "llama" else byte_level_metadata(kind)
    metadata.pop("tokenizer.ggml.add_bos_token", None)
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    mine = TextTokenizer.from_gguf(metadata)
    bos = mine.bos_token_id
    begin = mine.decode([bos], skip_special_tokens=False)
    for text in ("hello", "", " x", begin + "hello", begin):
        assert mine.encode(text).count(bos) == (1 if adds or begin in text else 0), text
        assert mine.encode(text, add_special_tokens=False).count(bos) == text.count(begin)


def test_end_token_flag():
    metadata = byte_level_metadata("gpt-2") | {"tokenizer.ggml.add_eos_token": True}
    mine = TextTokenizer.from_gguf(metadata)
    assert mine.encode("x")[-1] == mine.eos_token_id
    del metadata["tokenizer.ggml.eos_token_id"]
    with pytest.raises(ModelError, match="end token"):
        TextTokenizer.from_gguf(metadata)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokenizer.ggml.model": "t5"}, '"t5"'),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, '"deepseek-llm"; supported: smollm'),
        ({"tokenizer.ggml.tokens": []}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
    ],
)
def test_unknown_tokenizers_are_named(change, text):
    with pytest.raises(ModelError, match=text):
        TextTokenizer.from_gguf(byte_level_metadata("gpt-2") | change)


# -- folders


def save_llama(folder, **options):
    original, _ = sentencepiece_parts()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=original, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options
    )
    made.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_a_folder_equals_transformers(tmp_path, reference):
    reference.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    mine = open_tokenizer(tmp_path)
    for text in TEXTS + SPECIAL:
        assert mine.encode(text) == ids_of(reference, text)
    for chat in CHATS:
        assert mine.apply_chat_template(chat) == chat_ids(reference, chat, add_generation_prompt=True)
    assert (mine.bos_token_id, mine.eos_token_ids, mine.vocab_size) == (1, (0, 2), 49152)
    assert mine.special_token_ids == frozenset(range(17))


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {%- if m['role'] not in ['user', 'assistant'] %}\n"
    "    {{ raise_exception('only users here, not ' + m['role']) }}\n"
    "    {%- endif %}\n"
    "[{{ m['role'] | upper }}] {{ m['content'] | trim }}{{ eos_token }}\n"
    "{% if loop.last %}{% break %}{% endif %}\n"
    "{% endfor %}\n"
    "{{ {'é': [1, '<']} | tojson }}{% if tools is none %}-{% endif %}{{ pad_token is defined }}\n"
    "{% if add_generation_prompt %}[ASSISTANT] {% endif %}"
)


def test_one_begin_token_in_chat_and_in_the_rendered_string(tmp_path):
    theirs = save_llama(tmp_path, chat_template=TEMPLATE)
    assert (tmp_path / "chat_template.jinja").exists()
    mine = open_tokenizer(tmp_path)
    chat = [{"role": "user", "content": " Hello 12 "}, {"role": "assistant", "content": "yes"}]
    for prompt in (True, False):
        text = mine.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
        assert text == theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
        ids = mine.apply_chat_template(chat, add_generation_prompt=prompt)
        assert ids == chat_ids(theirs, chat, add_generation_prompt=prompt)
        assert mine.encode(text) == ids
        assert ids.count(1) == 1
    assert mine.encode("Hello") == ids_of(theirs, "Hello")
    assert mine.encode("Hello")[0] == 1
    with pytest.raises(RequestError, match="only users here, not system"):
        mine.apply_chat_template([{"role": "system", "content": "x"}])
    with pytest.raises(RequestError, match="role"):
        mine.apply_chat_template([{"content": "x"}])


@pytest.mark.parametrize("flag", [True, False, None])
def test_add_bos_in_the_folder_config(tmp_path, flag):
    save_llama(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config.pop("add_bos_token", None)
    file.write_text(json.dumps(config if flag is None else config | {"add_bos_token": flag}))
    mine = open_tokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert mine.encode("Hello") == ids_of(theirs, "Hello")
    assert mine.encode("Hello").count(1) == 1  # tokenizer.json says so, and it wins
    assert mine.encode("<s>Hello").count(1) == 1


def test_templates_cannot_reach_python(tmp_path):
    save_llama(tmp_path, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match="refuses"):
        open_tokenizer(tmp_path).apply_chat_template(CHATS[0])
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match="not valid Jinja"):
        open_tokenizer(tmp_path).apply_chat_template(CHATS[0])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        open_tokenizer(tmp_path).apply_chat_template(CHATS[0])


def test_missing_and_damaged_tokenizers(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        open_tokenizer(tmp_path)
    with pytest.raises(ModelError, match="neither"):
        open_tokenizer(tmp_path / "nothing.gguf")


def test_several_named_templates(tmp_path):
    save_llama(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": named}))
    assert open_tokenizer(tmp_path).apply_chat_template([], tokenize=False) == "yes"


def test_metadata_round_trip_through_a_file(tmp_path):
    metadata = byte_level_metadata("gpt-2")
    assert metadata.items() <= read_header(write(tmp_path / "t.gguf", metadata)).metadata.items()
