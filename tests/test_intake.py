import numpy as np
import pytest
import torch

from pagedinfer.config import SamplingParams
from pagedinfer.engine.intake import check_params, read_prompt
from pagedinfer.errors import ConfigError, RequestError
from pagedinfer.model.tiny import ByteTokenizer

BYTES = ByteTokenizer()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", ("Hi", [256, 72, 105])),
        ("", ("", [256])),
        ([1, 2], (None, [1, 2])),
        ((1, 2), (None, [1, 2])),
        (range(3), (None, [0, 1, 2])),
        (np.array([1, 2]), (None, [1, 2])),
        (torch.tensor([1, 2]), (None, [1, 2])),
        ({"prompt": "Hi"}, ("Hi", [256, 72, 105])),
        ({"prompt_token_ids": [1, 2]}, (None, [1, 2])),
        ({"prompt": "shown", "prompt_token_ids": [1, 2]}, ("shown", [1, 2])),
        ({"prompt": None, "prompt_token_ids": (3,)}, (None, [3])),
    ],
)
def test_every_form_of_a_prompt(prompt, expected):
    text, ids = read_prompt(prompt, BYTES, 259)
    assert (text, ids) == expected
    assert all(type(token_id) is int for token_id in ids)


def test_the_ids_are_a_copy():
    mine = [1, 2]
    _, ids = read_prompt(mine, BYTES, 259)
    ids.append(3)
    assert mine == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (None, "empty"),
        (5, "int"),
        (b"bytes", "bytes"),
        ([], "no tokens"),
        ({}, "keys"),
        ({"prompt_token_ids": []}, "no tokens"),
        ({"prompt": None}, "empty"),
        ({"prompt": 5}, "int"),
        ({"promt": "Hi"}, "promt"),
        ({"prompt": "Hi", "multi_modal_data": {}}, "multi_modal_data"),
        ([1, True], "True.*bool"),
        ([1, 2.0], "2.0.*float"),
        ([1, "a"], "'a'.*str"),
        ([[1, 2]], "list"),
        (np.array([[1, 2]]), "list"),
        (np.array([1.5]), "float"),
        ([-1], "-1.*0 to 258"),
        ([259], "259.*0 to 258"),
        ([2**31], "2147483648"),
        ("\ud800", r"ud800.*half of a pair"),
    ],
)
def test_a_bad_prompt_is_named(prompt, words):
    with pytest.raises(RequestError, match=words):
        read_prompt(prompt, BYTES, 259)


def test_text_needs_a_tokenizer_and_ids_do_not():
    with pytest.raises(RequestError, match="no tokenizer"):
        read_prompt("Hi", None, 259)
    assert read_prompt([1], None, 259) == (None, [1])


def test_the_model_decides_which_ids_exist_not_the_tokenizer():
    with pytest.raises(RequestError, match=r"256.*0 to 99"):
        read_prompt("Hi", BYTES, 100)


def test_params_are_checked_against_the_model():
    params = SamplingParams(stop_token_ids=[258], logprobs=259, stop="a")
    assert check_params(params, BYTES, 259) is params
    assert check_params(None, None, 259) == SamplingParams()
    for bad, words in (
        (SamplingParams(stop_token_ids=[1, 259]), "259.*0 to 258"),
        (SamplingParams(logprobs=260), "logprobs=260.*259"),
        ({"temperature": 0}, "dict"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_params(bad, BYTES, 259)
    with pytest.raises(ConfigError, match="no tokenizer"):
        check_params(SamplingParams(stop="a"), None, 259)
