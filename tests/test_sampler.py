import itertools
import math
import random

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pagedinfer.config import SamplingParams
from pagedinfer.runner import sampler
from pagedinfer.runner.sampler import sample, sample_reference, uniform

NAN, INF = float("nan"), float("inf")


def support(logits, params, steps=512):
    """The tokens that the fast path can return, by walking u through [0, 1)."""
    uniforms = [(i + 0.5) / steps for i in range(steps)]
    rows = torch.tensor(logits).expand(steps, -1)
    return set(sample(rows, [params] * steps, uniforms).tokens)


def one(logits, params, u=0.5):
    return sample(torch.tensor([logits]), [params], [u]).tokens[0]


# -- uniform ---------------------------------------------------------------------------------


def test_uniform_is_a_pinned_function():
    assert [uniform(0, 0), uniform(0, 1), uniform(-1, 0), uniform(2**64 - 1, 7)] == [
        0.8833108082136426,
        0.43152799704850997,
        0.64635420864685,
        0.7741445495399422,
    ]
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_uniform_is_uniform_over_indices_and_over_seeds():
    for numbers in ([uniform(5, i) for i in range(20_000)], [uniform(i, 5) for i in range(20_000)]):
        assert 0.0 <= min(numbers) < max(numbers) < 1.0
        counts = [0] * 20
        for number in numbers:
            counts[int(number * 20)] += 1
        chi_square = sum((count - 1000) ** 2 / 1000 for count in counts)
        assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
        pairs = itertools.pairwise(numbers)
        correlation = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(numbers) * 12
        assert abs(correlation) < 0.03


# -- the twin ----------------------------------------------------------------------------------

# Multiples of 1/4 make many equal logits; -inf is a token that the model rules out.
LOGITS = st.lists(st.integers(-24, 24).map(lambda i: i / 4) | st.just(-INF), min_size=1, max_size=40)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 39, 1000]),
    top_p=st.sampled_from([0.0, 1e-8, 0.1, 0.5, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@settings(max_examples=300, deadline=None)
@given(logits=LOGITS, params=PARAMS, seed=st.integers(0, 2**32))
@example(logits=[0.0] * 8, params=SamplingParams(top_p=0.5), seed=1)
@pytest.mark.parametrize("candidates", [2, 64])  # 2 sends most filtered rows on to more
def test_sample_equals_the_reference(candidates, logits, params, seed):
    assume(max(logits) > -INF)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_CANDIDATES", candidates)
        uniforms = [uniform(seed, i) for i in range(16)]
        tokens = sample(torch.tensor([logits] * 16), [params] * 16, uniforms).tokens
        _, kept = sample_reference(logits, params, 0.5)
        for token, u in zip(tokens, uniforms, strict=True):
            near = {
                sample_reference(logits, params, min(max(u + d, 0.0), 1 - 1e-9))[0] for d in (-1e-6, 1e-6)
            }
            assert token in near | {sample_reference(logits, params, u)[0]}
            assert token in kept


@pytest.mark.parametrize("candidates", [4, 64])
def test_a_wide_vocabulary_and_wide_filters(monkeypatch, candidates):
    monkeypatch.setattr(sampler, "_CANDIDATES", candidates)
    torch.manual_seed(0)
    logits = (2 * torch.randn(8, 3001)).bfloat16().float()  # bfloat16 has many equal logits
    for params in (
        SamplingParams(top_k=2500),
        SamplingParams(top_p=0.999),
        SamplingParams(top_k=700, top_p=0.97, temperature=1.7),
        SamplingParams(top_k=20, top_p=0.9, min_p=0.02),
    ):
        uniforms = [uniform(4, row) for row in range(8)]
        tokens = sample(logits, [params] * 8, uniforms).tokens
        expected = [
            sample_reference(row.tolist(), params, u)[0] for row, u in zip(logits, uniforms, strict=True)
        ]
        assert tokens == expected


# -- edges -------------------------------------------------------------------------------------

HALF = [math.log(p) for p in (0.5, 0.3, 0.1, 0.1)]


@pytest.mark.parametrize(
    ("logits", "settings", "kept"),
    [
        (HALF, {"top_p": 0.0}, {0}),
        (HALF, {"top_p": 1e-8}, {0}),
        (HALF, {"top_p": 0.5}, {0}),
        (HALF, {"top_p": 0.51}, {0, 1}),
        (HALF, {"top_p": 0.8}, {0, 1}),  # reached exactly: not one token more
        (HALF, {"top_p": 0.85}, {0, 1, 2}),  # the two .1 tie; the lower id stays
        (HALF, {"top_p": 1.0}, {0, 1, 2, 3}),
        (HALF, {"top_k": 1, "top_p": 0.8}, {0}),
        (HALF, {"top_k": 3}, {0, 1, 2}),
        (HALF, {"top_k": 2, "top_p": 0.62}, {0}),  # top-p counts shares of what top-k left: .5 of .8
        (HALF, {"top_k": 2, "top_p": 0.63}, {0, 1}),
        (HALF, {"min_p": 0.2}, {0, 1, 2, 3}),
        (HALF, {"min_p": 0.21}, {0, 1}),
        (HALF, {"min_p": 1.0}, {0}),
        (HALF, {"min_p": 0.5, "top_p": 0.62}, {0}),  # min-p comes before: .5 of the .8 that it left
        (HALF, {"min_p": 0.5, "top_p": 0.63}, {0, 1}),
        (HALF, {"min_p": 0.5, "top_k": 3}, {0, 1}),
        ([1.0] * 5, {"top_p": 0.6}, {0, 1, 2}),
        ([1.0] * 5, {"top_k": 2}, {0, 1}),
        ([1.0] * 5, {}, {0, 1, 2, 3, 4}),
        ([-INF, -INF, 3.0, -INF], {}, {2}),
        ([-INF, -INF, 3.0, -INF], {"top_k": 3, "top_p": 0.9}, {2}),
        ([-INF, -INF, 3.0, -INF], {"temperature": 0.0}, {2}),
        (HALF, {"temperature": 1e-45}, {0}),
        ([0.0, 1e4, -1e4], {"temperature": 0.01}, {1}),
        ([7.0], {"top_k": 5, "top_p": 0.3}, {0}),
    ],
)
def test_sd_10_what_is_kept(logits, settings, kept):
    params = SamplingParams(**settings)
    assert support(logits, params) == kept
    assert sample_reference(logits, params, 0.5)[1] == kept


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_interval_hit_kept_tokens(u):
    logits = [-INF, 1.0, 1.0, 2.0, -INF]
    assert one(logits, SamplingParams(), u) == (1 if u == 0.0 else 3)
    assert one(logits, SamplingParams(top_k=2), u) == (1 if u == 0.0 else 3)


def test_greedy_is_the_first_maximum_and_uses_no_randomness():
    logits = [0.0, 2.0, 2.0, 1.0]
    for u in (0.0, 0.5, 0.999):
        assert one(logits, SamplingParams(temperature=0.0), u) == 1
        assert one(logits, SamplingParams(temperature=0.0, top_p=0.1, top_k=3, min_p=0.5, seed=3), u) == 1


def test_failed_rows_are_errors_and_the_others_are_sampled():
    good = [0.0, 1.0, 5.0]
    rows = [[NAN, 1.0, 2.0], good, [0.0, INF, 0.0], good, [-INF] * 3, [0.0, 1.0, NAN]]
    params = [SamplingParams(temperature=t, logprobs=1) for t in (0.0, 0.0, 1.0, 0.01, 1.0, 0.5)]
    sampled = sample(torch.tensor(rows), params, [0.5] * 6)
    assert sampled.tokens == [-1, 2, -1, 2, -1, -1]
    assert sorted(sampled.errors) == [0, 2, 4, 5]
    assert "not finite" in sampled.errors[0]
    assert sorted(sampled.logprobs) == [1, 3]


# -- independence ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_alone_and_in_any_company(dtype):
    torch.manual_seed(1)
    logits = (3 * torch.randn(24, 500)).to(dtype)
    choices = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.9999, "temperature": 5.0},  # wide: needs all candidates
        {"min_p": 0.1, "top_k": 300},
        {"top_k": 400},
        {"temperature": 1.0, "top_k": 7, "top_p": 0.5, "min_p": 0.01},
    ]
    params = [SamplingParams(**choices[row % len(choices)]) for row in range(24)]
    uniforms = [uniform(row, 3) for row in range(24)]
    alone = [sample(logits[r : r + 1], [params[r]], [uniforms[r]]).tokens[0] for r in range(24)]
    order = list(range(24))
    for seed in range(4):
        random.Random(seed).shuffle(order)
        part = order[: 24 - 5 * seed]
        together = sample(logits[part], [params[r] for r in part], [uniforms[r] for r in part]).tokens
        assert together == [alone[r] for r in part]


@pytest.mark.parametrize("settings", [{}, {"top_k": 6}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_draws_follow_the_distribution(settings):
    logits = [1.0, 0.0, 2.0, -1.0, 0.5, 0.5, -2.0, 1.5]
    params, count = SamplingParams(temperature=0.8, **settings), 20_000
    tokens = sample(
        torch.tensor(logits).expand(count, -1), [params] * count, [uniform(11, i) for i in range(count)]
    ).tokens
    _, kept = sample_reference(logits, params, 0.5)
    weights = {token: math.exp(logits[token] / 0.8) for token in kept}
    expected = {token: count * weight / sum(weights.values()) for token, weight in weights.items()}
    assert set(tokens) == kept
    chi_square = sum((tokens.count(token) - mean) ** 2 / mean for token, mean in expected.items())
    assert chi_square < 24.3  # at most 7 degrees of freedom, p = 0.001


# -- log-probabilities -------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_and_hold_the_chosen_token():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 3)
    params = [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=9.0, top_k=4, logprobs=2),
        SamplingParams(temperature=1.0, logprobs=0),
    ]
    sampled = sample(logits, params, [0.0, 0.0, 0.0])
    assert sampled.tokens == [1, 0, 0]
    raw = logits[0].log_softmax(-1).tolist()
    assert [list(sampled.logprobs[row]) for row in range(3)] == [[1, 3], [1, 3, 0], [0]]
    for values in sampled.logprobs.values():
        for token, (value, rank) in values.items():
            assert value == pytest.approx(raw[token], abs=1e-6)
            assert rank == sorted(raw, reverse=True).index(raw[token]) + 1
    many = sample(logits[:1], [SamplingParams(temperature=0.0, logprobs=99)], [0.0])
    assert list(many.logprobs[0]) == [1, 3, 2, 0]
    assert sample(logits[:1], [SamplingParams()], [0.0]).logprobs == {}
