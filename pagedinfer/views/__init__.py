"""Pictures of the engine: block map, batch timeline, memory chart; live, recorded, static, or an offline page.

Views read recordings (`pagedinfer.trace`), never an engine. Everything static needs the standard library alone; the
live view needs the extra "view" (ipywidgets and anywidget), and where that is missing the same names give the same
pictures standing still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pagedinfer.checks import check_names
from pagedinfer.errors import ConfigError
from pagedinfer.trace.recording import Recording, recording_of
from pagedinfer.views.attention import AttentionView, attention_svg
from pagedinfer.views.batch import BatchComposition
from pagedinfer.views.blocks import block_map_svg
from pagedinfer.views.budget import budget_svg
from pagedinfer.views.chains import chains_svg
from pagedinfer.views.compare_view import RunComparison
from pagedinfer.views.export import export_html
from pagedinfer.views.lab import FragmentationLab
from pagedinfer.views.latency import Latency
from pagedinfer.views.memory import memory_svg
from pagedinfer.views.panels import details_svg, queues_svg
from pagedinfer.views.picture import PANES, describe, picture_svg
from pagedinfer.views.prefix_tree import PrefixTree
from pagedinfer.views.sampling import SamplingView, sampling_svg
from pagedinfer.views.static_view import StaticView
from pagedinfer.views.timeline import timeline_svg

if TYPE_CHECKING:
    from pagedinfer.views.core_widget import CoreView
    from pagedinfer.views.widget import EngineView as LiveView

    View = LiveView | CoreView | StaticView

__all__ = [
    "PANES",
    "TIERS",
    "AttentionView",
    "BatchComposition",
    "EngineView",
    "FragmentationLab",
    "Latency",
    "PrefixTree",
    "RunComparison",
    "SamplingView",
    "StaticView",
    "attention_svg",
    "batch_timeline",
    "block_map",
    "block_map_svg",
    "budget_svg",
    "chains_svg",
    "describe",
    "details_svg",
    "export_html",
    "memory_chart",
    "memory_svg",
    "picture_svg",
    "prefix_chains",
    "queues",
    "queues_svg",
    "sampling_svg",
    "timeline_svg",
    "token_budget",
]

TIERS = ("anywidget", "ipywidgets", "static")
"""How a view can be drawn, the best first."""

WIDGET_PACKAGES = ("anywidget", "ipywidgets", "traitlets")

LIVE_ONLY = ("frames_per_second", "watch", "stops")
"""Options that the other tiers have no use for."""

OPTIONS = ("panes", "step", "request", "title", *LIVE_ONLY)


def EngineView(
    recording: Recording, advance: Callable[[], bool] | None = None, tier: str | None = None, **options: Any
) -> View:
    """The panes linked in one view, by the best of `TIERS` that the installed packages allow; its `tier` says which.

    Args:
        recording: what to show; it may grow.
        advance: runs one engine step and returns whether there may be more; give it to watch a live engine.
        tier: one of `TIERS` to have that one whatever is installed.
        options: `panes`, `step`, `request`, `title`, and for the live view `frames_per_second`, `watch`, `stops`; see
            `pagedinfer.views.widget.EngineView`.

    Raises:
        ConfigError: no such tier, no recording, or a value that does not fit. UnknownOption: no such option.
        ModuleNotFoundError: the tier asked for needs a package that is not installed.
    """
    if tier not in (None, *TIERS):
        raise ConfigError(
            f"tier={tier!r}: it must be one of {', '.join(TIERS)}, or None to choose by itself."
        )
    check_names("EngineView", options, OPTIONS)
    recording, why = recording_of(recording), ""
    for name in TIERS if tier is None else (tier,):
        if name != "anywidget":
            options = {key: value for key, value in options.items() if key not in LIVE_ONLY} | {"why": why}
        try:
            view: View = _view_class(name)(recording, advance, **options)
            return view
        except ModuleNotFoundError as error:
            if tier is not None or (error.name or "").split(".")[0] not in WIDGET_PACKAGES:
                raise
            why = why or f'the live view needs {error.name}; pip install "pagedinfer[view]" brings it.'
    raise AssertionError("the static tier needs no package")


def _view_class(tier: str) -> Callable[..., Any]:
    if tier == "anywidget":
        from pagedinfer.views.widget import EngineView as LiveView

        return LiveView
    if tier == "ipywidgets":
        from pagedinfer.views.core_widget import CoreView

        return CoreView
    return StaticView


def block_map(recording: Recording, advance: Callable[[], bool] | None = None, **options: Any) -> View:
    """The block map: every physical block, and beside it the block table of the selected request."""
    return EngineView(recording, advance, panes=("blocks", "details"), **options)


def batch_timeline(recording: Recording, advance: Callable[[], bool] | None = None, **options: Any) -> View:
    """The batch timeline alone: requests by step."""
    return EngineView(recording, advance, panes=("timeline",), **options)


def memory_chart(recording: Recording, advance: Callable[[], bool] | None = None, **options: Any) -> View:
    """The memory chart alone: what the token slots are used for, and the KV waste."""
    return EngineView(recording, advance, panes=("memory",), **options)


def token_budget(recording: Recording, advance: Callable[[], bool] | None = None, **options: Any) -> View:
    """The budget bar alone: the step's tokens by request."""
    return EngineView(recording, advance, panes=("budget",), **options)


def queues(recording: Recording, advance: Callable[[], bool] | None = None, **options: Any) -> View:
    """The queues alone: who runs, who waits and why."""
    return EngineView(recording, advance, panes=("queues",), **options)


def prefix_chains(recording: Recording, advance: Callable[[], bool] | None = None, **options: Any) -> View:
    """The prefix chains alone: the blocks that the prefix cache knows, as they follow each other."""
    return EngineView(recording, advance, panes=("chains",), **options)
