"""What a view is given: a recording, whatever has one, or a sentence why not."""

import pytest

from pagedinfer.errors import ConfigError
from pagedinfer.sim.fork import fork
from pagedinfer.views import BatchComposition, EngineView, Latency, PrefixTree

VIEWS = [EngineView, Latency, BatchComposition, PrefixTree]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_a_branch_is_shown_as_its_recording(simulated_run, view):
    recording = simulated_run(seed=1).finish()
    branch = fork(recording, 2)
    shown = view(branch)._repr_mimebundle_()
    assert "image/svg+xml" in (shown[0] if isinstance(shown, tuple) else shown)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("what", [None, 5, "run.jsonl", [1]])
def test_anything_else_is_refused_in_words(view, what):
    with pytest.raises(ConfigError, match=f"A view shows a Recording, not a {type(what).__name__}"):
        view(what)
