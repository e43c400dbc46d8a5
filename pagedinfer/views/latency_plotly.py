"""The distributions of latency as a plain plotly figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plotly.subplots import make_subplots

from pagedinfer.views.marks import plain

__all__ = ["histograms"]


def histograms(
    title: str, unit: str, series: Mapping[str, tuple[Sequence[float], float, float | None]]
) -> Any:
    """A histogram for each name -> (values, width of a bar, limit or None); limits are dashed lines."""
    figure = make_subplots(rows=1, cols=len(series), subplot_titles=list(series))
    for column, (name, (values, size, limit)) in enumerate(series.items(), 1):
        bins = {"start": 0, "size": size}
        figure.add_histogram(x=values, name=name, xbins=bins, row=1, col=column)
        if limit is not None:
            label = f"SLO {plain(limit)}"
            figure.add_vline(x=limit, line_dash="dash", annotation_text=label, row=1, col=column)
        figure.update_xaxes(title_text=unit, row=1, col=column)
    figure.update_yaxes(title_text="count", row=1, col=1)
    return figure.update_layout(showlegend=False, title=title)
