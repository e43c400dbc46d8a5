"""Guesses from a request's own text, and what the engine makes of a drafter's guesses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedinfer.config import SamplingParams
from pagedinfer.engine.drafter import Drafter, NgramDrafter
from pagedinfer.engine.plan import ScheduledRequest, StepPlan, StepResult, TokenRules
from pagedinfer.engine.request import Request
from pagedinfer.engine.speculation import Speculation, may_speculate
from pagedinfer.errors import ConfigError
from pagedinfer.trace.bus import EventBus

# -- n-grams ----------------------------------------------------------------------------------------------------------


def propose(tokens, *, limit=100, **settings):
    """What is proposed after `tokens`, the last of which is new."""
    request = Request("r", len(tokens) - 1, 100, token_ids=list(tokens[:-1]))
    return NgramDrafter(**{"num_draft_tokens": 3} | settings).propose(request, tokens[-1:], limit)


def reference(tokens, num_draft_tokens, max_ngram, min_ngram):
    """The slow twin: search backwards for each suffix, longest first; go on past the end by going round."""
    for length in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                text = list(tokens)
                while len(text) < len(tokens) + num_draft_tokens:
                    text.append(text[start + length + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1]),  # three tokens known from before
        ([9, 3, 7, 8, 2, 3, 5, 5, 6, 2, 3], [5, 5, 6]),  # the longest suffix that has come before is 2, 3
        ([3, 1, 1, 3, 2, 2, 3], [2, 2, 3]),  # the most recent of two
        ([1, 2, 1, 2, 1], [2, 1, 2]),  # a loop goes on
        ([7, 7], [7, 7, 7]),
        ([1, 2, 3], []),
        ([4], []),
    ],
)
def test_proposals_by_hand(tokens, drafts):
    assert propose(tokens) == drafts


def test_lengths_of_suffixes_and_of_proposals_are_bounded():
    tokens = [1, 2, 3, 4, 9, 3, 4, 8, 1, 2, 3, 4]
    assert propose(tokens, max_ngram=4) == propose(tokens) == [9, 3, 4]
    assert propose([*tokens[:8], 7, 4], max_ngram=1) == [8, 7, 4]
    assert propose([*tokens[:8], 7, 4], min_ngram=2) == []
    assert propose(tokens, num_draft_tokens=1) == propose(tokens, limit=1) == [9]


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=2, max_size=12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.data(),
)
def test_the_index_finds_what_a_search_finds(pieces, num_draft_tokens, max_ngram, data):
    min_ngram = data.draw(st.integers(1, max_ngram))
    drafter = NgramDrafter(num_draft_tokens, max_ngram, min_ngram)
    request = Request("r", len(pieces[0]), 100, token_ids=list(pieces[0]))
    for new in pieces[1:]:
        if data.draw(st.booleans()):  # the engine need not ask at each step
            text = [*request.token_ids, *new]
            expected = reference(text, num_draft_tokens, max_ngram, min_ngram)
            assert drafter.propose(request, new, 100) == expected
        request.append(new)


def test_an_ended_request_is_forgotten():
    drafter = NgramDrafter(2)
    assert isinstance(drafter, Drafter)
    assert drafter.propose(Request("r", 3, 9, token_ids=[1, 2, 3]), [1], 9) == [2, 3]
    drafter.forget("r")
    drafter.forget("never came")
    assert drafter.propose(Request("r", 3, 9, token_ids=[5, 6, 1]), [7], 9) == []
    drafter.forget("r")
    assert not drafter._indices


@pytest.mark.parametrize(
    "bad", [{"num_draft_tokens": 0}, {"max_ngram": 0}, {"min_ngram": 0}, {"min_ngram": 4}]
)
def test_bad_settings_are_refused(bad):
    name = next(iter(bad))
    with pytest.raises(ConfigError, match=f"{name}={bad[name]}"):
        NgramDrafter(**{"num_draft_tokens": 2} | bad)


# -- who may have drafts ----------------------------------------------------------------------------------------------


class Parrot:
    """Guesses what it was told to."""

    def __init__(self, guess=(1, 2, 3, 4)):
        self.guess, self.asked, self.forgotten = guess, [], []

    def propose(self, request, new_token_ids, limit):
        self.asked.append((request.request_id, list(new_token_ids), limit))
        if isinstance(self.guess, Exception):
            raise self.guess
        return self.guess

    def forget(self, request_id):
        self.forgotten.append(request_id)
        if isinstance(self.guess, Exception):
            raise self.guess


def request(rid="r", *, output=0, max_tokens=100, **more):
    made = Request(rid, 3, max_tokens, token_ids=[1, 2, 3], **more)
    made.append([5] * output)
    return made


def drafts(guess, requests, result, ends=(), bus=None):
    speculation = Speculation(Parrot(guess), 10, bus or EventBus())
    return speculation.propose({one.request_id: one for one in requests}, result, dict.fromkeys(ends))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"top_p": 0.5, "top_k": 3, "min_p": 0.1},
        {"logit_bias": {1: 2.0}, "allowed_token_ids": [1, 2]},
        {"logprobs": 3, "prompt_logprobs": 3},
        {"stop_token_ids": [7], "stop": ["x"]},
    ],
)
def test_what_every_row_has_alike_may_have_drafts(params):
    assert may_speculate(request(params=SamplingParams(**params)), 1)


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logits_processors": [lambda ids, logits: logits]},
    ],
)
def test_what_depends_on_the_output_so_far_may_not(params):
    assert not may_speculate(request(params=SamplingParams(**params)), 1)


def test_masks_bad_words_and_lengths_without_ids_may_not():
    assert not may_speculate(request(rules=TokenRules(bad_words=((1, 2),))), 1)
    assert not may_speculate(Request("lengths", 3, 9), 1)


def test_drafts_begin_when_min_tokens_are_there():
    params = SamplingParams(min_tokens=4)
    found = [drafts((1,), [request(output=n, params=params)], StepResult({"r": (5,)})) for n in range(5)]
    assert found == [{}, {}, {}, {"r": [1]}, {"r": [1]}]


def test_no_more_drafts_than_tokens_are_left_less_one():
    guess, result = (1, 2, 3, 4), StepResult({"r": (5, 5)})
    found = [drafts(guess, [request(output=1, max_tokens=n)], result) for n in range(3, 9)]
    assert [len(row.get("r", ())) for row in found] == [0, 0, 1, 2, 3, 4]


def test_only_those_that_go_on_are_asked_about():
    requests = [request(rid) for rid in ("going", "ended", "failed", "mute")]
    result = StepResult({"going": (5,), "ended": (5,), "failed": (5,)}, errors={"failed": "no text"})
    assert drafts((1,), requests, result, ends=["ended"]) == {"going": [1]}
    assert drafts((), requests, result, ends=["ended"]) == {}


@pytest.mark.parametrize(
    ("guess", "what"),
    [
        (ValueError("lost"), "ValueError: lost"),
        ((1, 10), "10 is outside the vocabulary (0 to 9)"),
        ((-1,), "-1 is outside"),
        ((1.0,), "1.0 is a float; a draft is an integer"),
        ((True,), "True is a bool"),
        (None, "TypeError"),
    ],
)
def test_a_drafter_that_fails_is_an_error_event_and_no_draft(guess, what):
    bus, events = EventBus(), []
    bus.subscribe(events.append)
    assert drafts(guess, [request()], StepResult({"r": (5,)}), bus=bus) == {}
    (event,) = events
    assert (event.kind, event.where) == ("error", "drafter")
    assert what in event.what
    assert "no drafts for r" in event.what


def test_an_end_reaches_the_drafter_and_its_fault_nobody():
    parrot, bus, events = Parrot(ValueError("lost")), EventBus(), []
    bus.subscribe(events.append)
    Speculation(parrot, 10, bus).forget("r")
    Speculation(None, 10, bus).forget("r")
    assert parrot.forgotten == ["r"]
    assert [event.what for event in events] == ["forgetting r: ValueError: lost"]


def test_drafts_computed_and_accepted_are_counted():
    def item(rid, *draft_token_ids):
        return ScheduledRequest(rid, 3, 1 + len(draft_token_ids), True, 1, False, (), (), (), SamplingParams(), 0,
                                draft_token_ids=draft_token_ids)  # fmt: skip

    speculation = Speculation(Parrot(), 10, EventBus())
    plan = StepPlan(1, 1.0, 99, [item("none"), item("all", 1, 2), item("one", 1, 2, 3), item("failed", 1)])
    speculation.count(plan, StepResult({"none": (4,), "all": (1, 2, 4), "one": (1, 5)}, {"failed": "NaN"}))
    assert (speculation.num_draft_tokens, speculation.num_accepted_tokens) == (6, 3)
