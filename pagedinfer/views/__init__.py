"""Pictures of the engine: block map, batch timeline, memory chart; live, recorded, static, or an offline page.

Views read recordings (`pagedinfer.trace`), never an engine. Everything static needs the standard library alone; the
live view needs the extra "view" (ipywidgets and anywidget), and where that is missing the same names give the same
pictures standing still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pagedinfer.trace.recording import Recording
from pagedinfer.views.attention import AttentionView, attention_svg
from pagedinfer.views.batch import BatchComposition
from pagedinfer.views.blocks import block_map_svg
from pagedinfer.views.compare_view import RunComparison
from pagedinfer.views.export import export_html
from pagedinfer.views.lab import FragmentationLab
from pagedinfer.views.latency import Latency
from pagedinfer.views.memory import memory_svg
from pagedinfer.views.picture import PANES, describe, picture_svg
from pagedinfer.views.png import block_map_png
from pagedinfer.views.prefix_tree import PrefixTree
from pagedinfer.views.sampling import SamplingView, sampling_svg
from pagedinfer.views.static_view import StaticView
from pagedinfer.views.timeline import timeline_svg

if TYPE_CHECKING:
    from pagedinfer.views.widget import EngineView as LiveView

__all__ = [
    "PANES",
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
    "block_map_png",
    "block_map_svg",
    "describe",
    "export_html",
    "memory_chart",
    "memory_svg",
    "picture_svg",
    "sampling_svg",
    "timeline_svg",
]

WIDGET_PACKAGES = ("anywidget", "ipywidgets", "traitlets")


def EngineView(
    recording: Recording, advance: Callable[[], bool] | None = None, **options: Any
) -> LiveView | StaticView:
    """The panes linked in one view: a widget, or its static twin where the extra "view" is not installed.

    `advance()` runs one engine step and returns whether there may be more; give it to watch a live engine. Options
    (`panes`, `step`, `request`, `title`, `frames_per_second`): see `pagedinfer.views.widget.EngineView`.
    """
    try:
        from pagedinfer.views.widget import EngineView as LiveView
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in WIDGET_PACKAGES:
            raise
        options.pop("frames_per_second", None)
        why = f'the live view needs {error.name}; pip install "pagedinfer[view]" brings it.'
        return StaticView(recording, advance, why=why, **options)
    return LiveView(recording, advance, **options)


def block_map(
    recording: Recording, advance: Callable[[], bool] | None = None, **options: Any
) -> LiveView | StaticView:
    """The block map alone: every physical block, and the block table of the selected request."""
    return EngineView(recording, advance, panes=("blocks",), **options)


def batch_timeline(
    recording: Recording, advance: Callable[[], bool] | None = None, **options: Any
) -> LiveView | StaticView:
    """The batch timeline alone: requests by step."""
    return EngineView(recording, advance, panes=("timeline",), **options)


def memory_chart(
    recording: Recording, advance: Callable[[], bool] | None = None, **options: Any
) -> LiveView | StaticView:
    """The memory chart alone: token slots live, tail slack and free, and the KV waste."""
    return EngineView(recording, advance, panes=("memory",), **options)
