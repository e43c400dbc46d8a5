"""Scripts and block keys of a re-played run. (Whole runs: test_fork.)"""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedinfer.sim.player import Script, _Rekey, scripts
from pagedinfer.trace import events as ev


def at(step, event):
    event.step = step
    return event


class Events:
    def __init__(self, *events):
        self.events = list(events)


def test_scripts_tell_lengths_ends_and_keys():
    found = scripts(
        Events(
            at(0, ev.Submit("a", 4, 9, 0, 0.0, keys=(1, 2))),
            at(0, ev.Submit("b", 2, 9, 0, 0.0, keys=(1,))),
            at(1, ev.Commit({"a": 1, "b": 2}, keys={"b": [7, 8]})),
            at(
                2,
                ev.Commit(
                    {"a": 1}, {"a": ["stop", "an end id came"], "b": ["error", "made up"]}, keys={"a": [9]}
                ),
            ),
            at(2, ev.Finish("a", "stop", "an end id came")),
            at(2, ev.Finish("b", "error", "made up")),
            at(2, ev.Submit("a", 1, 3, 0, 2.0)),
            at(3, ev.Commit({"a": 1})),
            at(3, ev.Finish("a", "abort", "aborted by the caller")),
        )
    )
    assert list(found["a"]) == [
        Script(2, ("stop", "an end id came"), True, [1, 2, 9]),
        Script(1, None, True, []),
    ]
    assert list(found["b"]) == [Script(2, ("error", "made up"), False, [1, 7, 8])]


def keys_of(tokens, size, table):
    """The true keys: one id for each content of a block and all before it."""
    return [table.setdefault(tuple(tokens[:end]), len(table)) for end in range(size, len(tokens) + 1, size)]


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 1), max_size=14), min_size=2, max_size=4),
    old=st.integers(1, 5), new=st.integers(1, 5),
)  # fmt: skip
def test_keys_of_another_size_never_overstate_sharing(texts, old, new):
    table, rekey = {}, _Rekey(old, new)
    again = [rekey(keys_of(tokens, old, table)) for tokens in texts]
    for (a, keys_a), (b, keys_b) in pairwise(zip(texts, again, strict=True)):
        for i, (x, y) in enumerate(zip(keys_a, keys_b, strict=False)):
            if x == y:
                assert a[: (i + 1) * new] == b[: (i + 1) * new]
            elif new % old == 0:
                assert a[: (i + 1) * new] != b[: (i + 1) * new]  # whole old blocks: nothing is lost
        assert len(keys_a) == len(a) // old * old // new
    assert len({rekey.new() for _ in range(5)}) == 5


@pytest.mark.parametrize("keys", [[], [3, 4, 9]])
def test_keys_of_the_same_size_stay(keys):
    assert _Rekey(16, 16)(keys) == keys
