"""What a caller may say about a request: checked at once, by name."""

import math

import pytest

from pagedinfer.engine.options import RequestOptions, Retain
from pagedinfer.errors import ConfigError
from pagedinfer.memory.prefix import PINNED


def test_nothing_said():
    options = RequestOptions()
    assert (options.priority, options.tenant, options.cache_salt, options.retain) == (0, "", "", ())
    assert options.deadline is options.timeout is None


@pytest.mark.parametrize(
    ("given", "number"), [("interactive", 0), ("background", 10), (3, 3), (-1000, -1000)]
)
def test_priorities_by_name_and_number(given, number):
    assert RequestOptions(priority=given).priority == number


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"priority": "urgent"}, "priority='urgent': give an integer, or interactive or background"),
        ({"priority": 1.5}, "priority=1.5"),
        ({"priority": True}, "priority=True"),
        ({"priority": 1001}, "priority=1001"),
        ({"tenant": 7}, "tenant=7: it must be a string"),
        ({"cache_salt": b"x"}, "cache_salt=b'x': it must be a string"),
        ({"deadline": math.nan}, "deadline=nan"),
        ({"deadline": "soon"}, "deadline='soon'"),
        ({"timeout": -1}, "timeout=-1"),
        ({"timeout": math.inf}, "timeout=inf"),
        ({"retain": [(0, 4)]}, r"retain holds \(0, 4\); give Retain"),
        (
            {"colour": "red"},
            "RequestOptions has no option colour. There are priority, tenant, deadline, timeout, cache_salt",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options, said):
    with pytest.raises(ConfigError, match=said):
        RequestOptions(**options)


def test_a_range_of_the_prompt():
    assert Retain().range(9, 5.0) == (0, 9, 50, -1.0)
    assert Retain(start=2, end=6, priority=80, seconds=3).range(9, 5.0) == (2, 6, 80, 8.0)
    assert Retain(priority="pin").range(9, 5.0) == (0, 9, PINNED, -1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"start": -1}, "start=-1"),
        ({"start": 4, "end": 4}, "end=4: it must be an integer of at least 5"),
        ({"priority": 101}, "priority of a retained range=101"),
        ({"priority": "PIN"}, "priority of a retained range='PIN'"),
        ({"seconds": -0.5}, "seconds=-0.5"),
    ],
)
def test_a_range_that_makes_no_sense(options, said):
    with pytest.raises(ConfigError, match=said):
        Retain(**options)
