"""Settings: every bound, and nothing ignored in silence."""

import dataclasses
import math

import pytest

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.errors import ConfigError, PagedInferError


def refused(make, **setting):
    """The sentence with which a setting is refused; it names the setting and its value."""
    with pytest.raises(ConfigError) as caught:
        make(**setting)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, PagedInferError)
    return str(caught.value)


def engine(**setting):
    return EngineConfig(**{"num_blocks": 8} | setting)


# -- EngineConfig -------------------------------------------------------------------------------------------------

COUNTS = ["num_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"]


@pytest.mark.parametrize("name", COUNTS)
def test_counts_start_at_1(name):
    assert getattr(engine(**{name: 1}), name) == 1
    for value in (0, -1):
        assert f"{name}={value}: it must be an integer" in refused(engine, **{name: value})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, False, 4.0, "4", None, math.nan])
def test_counts_are_integers_and_a_bool_is_none(name, value):
    assert f"{name}={value!r}" in refused(engine, **{name: value})


def test_drafts_may_be_none():
    assert engine().num_draft_tokens == 0
    assert engine(num_draft_tokens=4).num_draft_tokens == 4
    for value in (-1, 65, True, 2.0, None, "4"):
        assert f"num_draft_tokens={value!r}: it must be" in refused(engine, num_draft_tokens=value)


def test_block_size_ends_at_512_the_blocks_of_published_traces():
    assert engine(block_size=512).block_size == 512
    assert refused(engine, block_size=513) == "block_size=513: it must be an integer from 1 to 512."


def test_watermark_is_a_share_up_to_a_half():
    for value in (0, 0.0, 0.25, 0.5):
        assert engine(watermark=value).watermark == value
    for value in (-0.01, 0.51, 1, math.nan, math.inf, -math.inf, True, "0.1", None):
        assert (
            refused(engine, watermark=value) == f"watermark={value!r}: it must be a number from 0.0 to 0.5."
        )


@pytest.mark.parametrize(
    ("share", "num_blocks", "blocks"), [(0.01, 99, 0), (0.01, 100, 1), (0.2, 9, 1), (0.5, 8, 4)]
)
def test_watermark_in_whole_blocks_rounds_down(share, num_blocks, blocks):
    assert engine(watermark=share, num_blocks=num_blocks).watermark_blocks == blocks


def test_to_dict_holds_every_setting_and_makes_an_equal_config():
    config = engine(watermark=0.125, block_size=3)
    assert list(config.to_dict()) == [f.name for f in dataclasses.fields(EngineConfig)]
    assert EngineConfig(**config.to_dict()) == config


# -- SamplingParams -----------------------------------------------------------------------------------------------


def test_defaults_are_valid_and_cut_into_tuples():
    params = SamplingParams()
    assert (params.stop, params.stop_token_ids) == ((), ())
    assert params.max_tokens == 16
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.0, 1, 100.0], [-0.1, math.nan, math.inf, True, "1", None, 10**400]),
        ("top_k", [-1, 0, 1, 10**6], [-2, 1.0, True, None]),
        ("top_p", [0, 0.0, 0.5, 1, 1.0], [-0.1, 1.01, math.nan, True, None]),
        ("min_p", [0, 0.5, 1], [-0.1, 1.01, math.nan, False, None]),
        ("seed", [None, 0, -(2**63), 2**64 - 1], [-(2**63) - 1, 2**64, 1.0, True, "7"]),
        ("max_tokens", [None, 1, 10**9], [0, -1, 1.0, True]),
        ("min_tokens", [0, 16], [-1, 1.0, True, None]),
        ("logprobs", [None, 0, 20], [-2, 1.0, True]),
        ("ignore_eos", [True, False], [0, 1, None, "no"]),
        ("include_stop_str_in_output", [True, False], [1, None]),
        ("skip_special_tokens", [True, False], [1, None]),
        ("detokenize", [True, False], [1, None]),
        ("stop", [None, "x", ["x", "yz"], ("x",), []], ["", ["x", ""], [1], 5, b"x"]),
        ("n", [1], [0, -1, 1.5, "2", 16_385, 10**9]),
        ("best_of", [None, 1, 16_384], [0, 1.5, 16_385]),
        ("presence_penalty", [0.0], [2.5, -2.5, math.nan, "1"]),
        ("frequency_penalty", [0.0], [2.5, -2.5, math.nan, "1"]),
        ("repetition_penalty", [1.0], [0, -1, math.nan, math.inf, "1"]),
        ("prompt_logprobs", [None], [-2, 1.5, "1"]),
        ("structured_outputs", [None], [{"json": {}}, "json"]),
        ("stop_token_ids", [None, [], [0, 5], (7,)], [[-1], [1.0], [True], ["a"], "ab", 5]),
    ],
)
def test_bounds(name, good, bad):
    if name == "stop":
        bad = [value for value in bad if value != ""]  # the empty string reads as "no stop string"
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        assert refused(SamplingParams, **{name: value}).startswith(name)


def test_min_tokens_may_not_pass_max_tokens():
    sentence = refused(SamplingParams, min_tokens=5, max_tokens=4)
    assert sentence == "min_tokens=5 is above max_tokens=4; lower one or raise the other."
    SamplingParams(min_tokens=5, max_tokens=None)


def test_stop_strings_need_text():
    assert "stop strings need text" in refused(SamplingParams, stop="x", detokenize=False)
    SamplingParams(stop_token_ids=[3], detokenize=False)


def test_what_vllm_has_and_we_do_not_is_refused_by_name():
    sentence = refused(SamplingParams, truncate_prompt_tokens=5)
    assert sentence == "truncate_prompt_tokens=5 is not supported yet; leave it at None."
    SamplingParams(truncate_prompt_tokens=None)


# -- both ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [EngineConfig(num_blocks=4), SamplingParams()])
def test_frozen_keyword_only_and_hashable(value):
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, 5)
    with pytest.raises(TypeError):
        type(value)(4)
    assert hash(value) == hash(dataclasses.replace(value))
