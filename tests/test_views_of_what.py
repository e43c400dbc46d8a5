"""What a view is given: a recording, whatever has one, or a sentence why not."""

import pytest

from pagedinfer.errors import ConfigError
from pagedinfer.sim.fork import fork
from pagedinfer.views import (
    BatchComposition,
    EngineView,
    Latency,
    PrefixTree,
    block_map,
    block_map_svg,
    budget_svg,
    chains_svg,
    details_svg,
    export_html,
    picture_svg,
    timeline_svg,
)

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
    with pytest.raises(ConfigError, match=f"A view shows a Recording, not an? {type(what).__name__}"):
        view(what)


# -- which request -----------------------------------------------------------------------------------------------------


def in_tier(tier):
    return lambda recording, **options: EngineView(recording, tier=tier, **options)


TAKERS = {
    "anywidget": in_tier("anywidget"), "ipywidgets": in_tier("ipywidgets"), "static": in_tier("static"),
    "block_map": block_map, "picture": picture_svg, "blocks": block_map_svg, "budget": budget_svg,
    "chains": chains_svg, "details": details_svg, "timeline": timeline_svg,
    "page": lambda recording, **options: export_html(recording, "/dev/null", **options),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKERS)
def test_a_request_that_is_not_there_is_missed_by_name(name, simulated_run):
    recording = simulated_run(seed=1, requests=12).finish()
    for given in ("nope", "", 3, ["R1"]):
        with pytest.raises(ConfigError) as caught:
            TAKERS[name](recording, request=given)
        known = "R1, R2, R3, R4, R5, R6, R7, R8 and 4 more."
        assert str(caught.value) == f"request={given!r}: the recording has no such request; it has {known}"
    assert TAKERS[name](recording, request="R1")
    assert TAKERS[name](recording, request=None)


@pytest.mark.parametrize("tier", ["anywidget", "ipywidgets", "static"])
def test_a_live_view_may_wait_for_a_request_to_come(tier, simulated_run):
    run = simulated_run(requests=6, cancels=0, aborts=0)
    late = "R4"
    view = EngineView(run.recording, run.advance, tier=tier, request=late)
    assert view.selected == {"request": late}
    assert late not in view.svg()
    while late not in run.scheduler.requests:
        assert view.step()
    assert view.selected == {"request": late}
    assert f"{late}: logical to physical" in view.svg()
    with pytest.raises(ConfigError, match="request=3"):
        EngineView(run.recording, run.advance, tier=tier, request=3)
