"""Text as it grows. The oracle is the tokenizer's decode of the whole output, and a plain search for stops."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.protocols import Tokenizer
from pagedinfer.engine.text import OutputText, find_end
from pagedinfer.errors import ModelError
from pagedinfer.model.sources import resolve
from pagedinfer.model.tiny import ByteTokenizer
from pagedinfer.model.tokenizer import TextTokenizer, open_tokenizer
from pagedinfer.sim.simulated import SimulatedRunner


class Pieces:
    """A tokenizer whose ids stand for fixed pieces of text. Counts the ids that it decodes."""

    bos_token_id = None
    eos_token_ids = ()

    def __init__(self, *pieces):
        self.pieces = pieces
        self.num_decoded = 0

    def encode(self, text, *, add_special_tokens=True):
        return [self.pieces.index(piece) for piece in text.split("|")]

    def decode(self, token_ids, *, skip_special_tokens=True):
        self.num_decoded += len(token_ids)
        return "".join(self.pieces[token_id] for token_id in token_ids)


def grow(tokenizer, token_ids, **options):
    """What a stream shows after each token, and the text at the end. Stops where a stop string does."""
    text = OutputText(tokenizer, SamplingParams(**options))
    shown = [""]
    for token_id in token_ids:
        stopped = text.append(token_id)
        shown.append(text.visible)
        if stopped:
            break
    text.finish()
    return shown, text.text


def assert_streams(tokenizer, token_ids, **options):
    """The stream only ever grows, takes nothing back, and ends as the decode of the whole."""
    shown, final = grow(tokenizer, token_ids, **options)
    for before, after in zip(shown, [*shown[1:], final], strict=True):
        assert after.startswith(before), (before, after)
    assert final == tokenizer.decode(token_ids, skip_special_tokens=options.get("skip_special_tokens", True))


# -- SD-06: increments add up to the whole ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    try:
        return open_tokenizer(resolve("smollm2-135m", progress=False))
    except ModelError as error:
        pytest.skip(f"SmolLM2 is not here and cannot be fetched: {error}")


@pytest.fixture(scope="module")
def sentencepiece():
    """The style of Llama 2: a mark for the leading space, which the decoder strips at the text's start."""
    words = ["<unk>", "▁Hello", "▁world", "▁", "wor", "ld", "!", "▁a", "▁▁", "\n"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return TextTokenizer(backend, vocab_size=backend.get_vocab_size())


BYTES = 8  # the id of byte 0 in `llama2`


@pytest.fixture(scope="module", params=["space prefix", "none"])
def llama2(request):
    """SentencePiece with byte fallback as Llama 2 has it, from GGUF metadata: what has no piece is spelled in bytes."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁Hello", "é", "▁▁", "\ufffd"]
    tokens = [*words, *(f"<0x{byte:02X}>" for byte in range(256)), "ab", "▁b", "c"]
    return TextTokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.0] * len(tokens),
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1] + [6] * 256 + [1] * 3,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_space_prefix": request.param == "space prefix",
        }
    )


def spelled(text):
    return [BYTES + byte for byte in text.encode()]


# Pieces, special tokens, and bytes that often make characters, whole, cut and wrong.
llama2_ids = st.lists(
    st.one_of(
        st.integers(0, 7).map(lambda token: [token]),
        st.integers(BYTES + 256, BYTES + 258).map(lambda token: [token]),
        st.integers(BYTES, BYTES + 255).map(lambda token: [token]),
        st.sampled_from("é☕🙂a \n\ufffd").map(spelled),
        st.sampled_from("é☕🙂").map(lambda text: spelled(text)[:-1]),
    ),
    max_size=8,
).map(lambda parts: [token for part in parts for token in part])


@settings(max_examples=1000, deadline=None)
@given(llama2_ids, st.booleans())
@example(
    [*spelled("é"), BYTES + 0xFF], True
)  # the é is taken back: bad bytes turn their whole run into marks
@example([4, *spelled("é"), 2, BYTES + 0xA9], True)  # a special token that is left out does not end the run
@example([4, *spelled("é"), 2, BYTES + 0xA9], False)
@example([*spelled("é"), 0, 5, *spelled("🙂")[:3]], True)
@example([7, 7, BYTES + 0xFF], True)
def test_sd_06_byte_fallback_adds_up(llama2, token_ids, skip):
    assert_streams(llama2, token_ids, skip_special_tokens=skip)


def test_a_run_of_bytes_is_let_out_by_the_token_after_it(llama2):
    assert llama2.decode([*spelled("é"), BYTES + 0xFF]) == "\ufffd" * 3
    shown, final = grow(llama2, [5, *spelled("☕\n"), 5, BYTES + 0x0A])
    assert shown == ["", "é", "é", "é", "é", "é", "é☕\né", "é☕\né"]
    assert final == "é☕\né\n"


def test_sd_02_a_stop_spelled_in_bytes_stops_at_once(llama2):
    shown, final = grow(llama2, [5, *spelled("☕\nx"), 5], stop="\n")
    assert final == "é☕"
    assert len(shown) == 1 + 5  # before anything follows that would let the line end out
    assert grow(llama2, spelled("☕🙂"), stop="🙂", include_stop_str_in_output=True)[1] == "☕🙂"


def test_only_byte_fallback_is_decoded_twice(llama2, smollm2, sentencepiece):
    assert llama2.decode([llama2.bad_byte_id]) == "\ufffd"
    assert smollm2.bad_byte_id is sentencepiece.bad_byte_id is None


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 258), max_size=24), st.booleans())
@example([*"naïve 🙂".encode()], True)
@example([0xF0, 0x9F, 0x41], True)
@example([0xEF, 0xBF, 0xBD, 0x41], True)  # the replacement mark itself, as text
def test_sd_06_bytes_add_up(token_ids, skip):
    assert_streams(ByteTokenizer(), token_ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 49151) | st.integers(0, 16) | st.integers(100, 350), max_size=24), st.booleans()
)
def test_sd_06_smollm2_adds_up(smollm2, token_ids, skip):
    assert_streams(smollm2, token_ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 11), max_size=16), st.booleans())
@example([10, 1, 10, 2], True)
@example([3, 3, 2], True)
def test_sd_06_leading_space_marks_add_up(sentencepiece, token_ids, skip):
    assert sentencepiece.decode([1, 2]) == "Hello world"  # each alone would lose its space
    assert_streams(sentencepiece, token_ids, skip_special_tokens=skip)


def test_sd_06_text_of_smollm2_streams_piece_by_piece(smollm2):
    ids = smollm2.encode("Once upon a time, naïve 🙂 robots lived.\n\nThe end.")
    shown, final = grow(smollm2, ids)
    assert final == "Once upon a time, naïve 🙂 robots lived.\n\nThe end."
    assert len(set(shown)) > len(ids) * 0.7  # nearly every token shows something at once


def test_the_work_is_linear_in_the_length():
    tokenizer = Pieces("ab ", "c", "\n")
    grow(tokenizer, [0, 1, 2] * 200)
    assert tokenizer.num_decoded < 600 * 8


def test_the_fake_is_a_tokenizer():
    assert isinstance(Pieces("a"), Tokenizer)


# -- SD-04: half characters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sd_04_a_half_character_shows_once_at_the_end(count):
    ids = [65, *"🙂".encode()[:count]]
    shown, final = grow(ByteTokenizer(), ids)
    assert set(shown[1:]) == {"A"}
    assert final == "A\ufffd" == ByteTokenizer().decode(ids)


def test_sd_04_a_whole_character_shows_as_soon_as_it_is_whole():
    shown, final = grow(ByteTokenizer(), [65, *"🙂".encode(), 66])
    assert shown == ["", "A", "A", "A", "A", "A🙂", "A🙂B"]
    assert final == "A🙂B"


def test_sd_04_bytes_that_are_never_valid_do_not_hold_the_rest_back():
    shown, final = grow(ByteTokenizer(), [0xFF, 65, 0xC0, 66])
    assert shown == ["", "", "\ufffdA", "\ufffdA", "\ufffdA\ufffdB"]
    assert final == "\ufffdA\ufffdB"


def test_sd_04_the_half_character_of_a_finished_output_stays_one_mark_while_its_siblings_go_on():
    runner = SimulatedRunner(
        vocab_size=259,
        rule=lambda item: 65 if item.request_id == "r0.0" else [66, 0xC4, 257, 257][item.output_index],
    )
    engine = Engine(EngineConfig(num_blocks=8), runner, tokenizer=ByteTokenizer())
    engine.add_request([66], SamplingParams(n=2, max_tokens=8))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert [output.outputs[1].text for output in outputs] == ["B", "B", *["B\ufffd"] * 6]
    assert outputs[-1].outputs[0].text == "A" * 8


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_prompt_may_end_in_half_a_character(count):
    """The output's text is the decode of the output's ids: it does not complete the prompt's character."""
    whole = [*"🙂".encode()]
    runner = SimulatedRunner(vocab_size=259, rule=lambda item: [*whole[count:], 65][item.output_index])
    engine = Engine(EngineConfig(num_blocks=8), runner, tokenizer=ByteTokenizer())
    engine.add_request([66, *whole[:count]], SamplingParams(max_tokens=len(whole) - count + 1))
    shown = [""]
    while engine.has_unfinished():
        (output,) = engine.step()
        shown.append(output.outputs[0].text)
    assert output.prompt is None
    assert output.prompt_token_ids == [66, *whole[:count]]
    assert output.outputs[0].text == ByteTokenizer().decode([*whole[count:], 65])
    assert set(shown[:-1]) == {""}  # marks are held back until they can be nothing else
    assert "\ufffd" in shown[-1]


def test_sd_04_a_stop_in_the_middle_of_a_character_drops_the_half():
    ids = [65, *"🙂".encode()[:2], 66, 67]
    _, final = grow(ByteTokenizer(), ids, stop="B")
    assert final == "A\ufffd"


# -- SD-02: stop strings ---------------------------------------------------------------------------------------------


def test_sd_02_a_stop_may_end_inside_a_token():
    shown, final = grow(Pieces("I love ", "Paris", " and"), [0, 1, 2], stop="Pari")
    assert final == "I love "
    assert shown == ["", "I love ", "I love "]


def test_sd_02_the_earliest_stop_wins_whatever_the_order():
    for stops in (["d", "b"], ["b", "d"]):
        _, final = grow(Pieces("abcde"), [0], stop=stops)
        assert final == "a"


def test_sd_02_a_stop_may_span_tokens_and_is_held_back():
    shown, final = grow(Pieces("a", "<", "end", ">", "b"), [0, 1, 2, 3, 4], stop="<end>")
    assert shown == ["", "a", "a", "a", "a"]
    assert final == "a"


def test_what_only_looked_like_a_stop_comes_later():
    shown, final = grow(Pieces("a", "<", "en", "b"), [0, 1, 2, 3], stop="<end>")
    assert shown == ["", "a", "a", "a", "a<enb"]
    assert final == "a<enb"


def test_an_output_that_ends_with_half_a_stop_keeps_it():
    assert grow(Pieces("a", "<"), [0, 1], stop="<end>")[1] == "a<"


def test_include_stop_str_keeps_the_stop_and_nothing_after_it():
    params = {"stop": "Pari", "include_stop_str_in_output": True}
    assert grow(Pieces("I love ", "Paris"), [0, 1], **params)[1] == "I love Pari"


PIECES = Pieces("a", "b", "ab", "ba", "aab", "c")


def plain_cut(tokenizer, token_ids, stops, *, keep=False, least=0, skip=True):
    """The slow twin: after each token the whole text, less a trailing half character, is searched for a stop that ends
    in what is new. Returns the tokens used, the text, and whether a stop was met.
    """
    before = ""
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count], skip_special_tokens=skip).rstrip("\ufffd")
        found = [
            (at, stop)
            for stop in stops
            if (at := text.find(stop, max(0, len(before) - len(stop) + 1))) >= 0 and count >= least
        ]
        if found:
            at, stop = min(found, key=lambda each: each[0])
            return count, text[: at + len(stop) if keep else at], True
        before = text
    return len(token_ids), tokenizer.decode(token_ids, skip_special_tokens=skip), False


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_sd_02_stops_equal_a_plain_search(token_ids, stops):
    assert_stops(PIECES, token_ids, stops)


def assert_stops(tokenizer, token_ids, stops, *, keep=False, least=0, skip=True):
    """Through `find_end`, token by token: the twin's end and text, and a stream that takes nothing back."""
    params = SamplingParams(
        stop=stops,
        include_stop_str_in_output=keep,
        min_tokens=least,
        max_tokens=None,
        skip_special_tokens=skip,
    )
    text, used, shown = OutputText(tokenizer, params), 0, [""]
    for token_id in token_ids:
        _, stop = find_end([token_id], num_output_tokens=used, params=params, end_token_ids=(), text=text)
        used += 1
        shown.append(text.visible)
        if stop is not None:
            break
    text.finish()
    expected = plain_cut(tokenizer, token_ids, stops, keep=keep, least=least, skip=skip)
    assert (used, text.text, text.stopped_by is not None) == expected
    for before, after in zip(shown, [*shown[1:], text.text], strict=True):
        assert after.startswith(before), "the stream showed what was cut later"


stop_options = {"keep": st.booleans(), "least": st.integers(0, 6), "skip": st.booleans()}


@settings(max_examples=600, deadline=None)
@given(
    token_ids=llama2_ids,
    stops=st.lists(st.text("éab\n ☕🙂<", min_size=1, max_size=3), min_size=1, max_size=3),
    **stop_options,
)
@example(token_ids=[*spelled("é"), 5], stops=["éé"], keep=True, least=0, skip=True)
@example(token_ids=[*spelled("éa"), BYTES + 0xFF], stops=["é"], keep=False, least=3, skip=True)
def test_sd_02_stops_over_byte_fallback(llama2, token_ids, stops, keep, least, skip):
    assert_stops(llama2, token_ids, stops, keep=keep, least=least, skip=skip)


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.sampled_from(["the", " end", "é", "🙂", "<|im_end|>", "\n\n", " 🙂 then"]), max_size=8),
    cut=st.integers(0, 3),
    stops=st.lists(st.text("the nd🙂é\n<|", min_size=1, max_size=4), min_size=1, max_size=3),
    **stop_options,
)
def test_sd_02_stops_over_smollm2(smollm2, words, cut, stops, keep, least, skip):
    ids = smollm2.encode("".join(words))
    assert_stops(smollm2, ids[: len(ids) - cut], stops, keep=keep, least=least, skip=skip)


# -- the end of an output ---------------------------------------------------------------------------------------------


def end_of(new, before=0, end_ids=(), **options):
    params = SamplingParams(**options)
    text = OutputText(PIECES, params)
    kept, stop = find_end(new, num_output_tokens=before, params=params, end_token_ids=end_ids, text=text)
    text.finish()
    return kept, stop, text.text


def test_an_end_id_ends_and_is_no_part_of_the_text():
    assert end_of([0, 1, 5, 0], end_ids=(5,)) == (3, 5, "ab")
    assert end_of([0, 1], end_ids=(5,)) == (2, None, "ab")


def test_nothing_ends_before_min_tokens():
    assert end_of([5, 0, 5, 1], end_ids=(5,), min_tokens=3) == (3, 5, "ca")
    assert end_of([5], before=2, end_ids=(5,), min_tokens=3) == (1, 5, "")
    assert end_of([5, 0, 5, 1], stop="c", min_tokens=2) == (3, "c", "ca")  # the early one does not count
    assert end_of([0, 1], stop="ab", min_tokens=2) == (2, "ab", "")  # it is complete at token 2


def test_without_text_only_ids_end():
    params = SamplingParams(detokenize=False)
    assert find_end([1, 2], num_output_tokens=0, params=params, end_token_ids=(2,), text=None) == (2, 2)
