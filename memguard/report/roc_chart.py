"""Draw a ROC: steps on two logarithmic axes, with the diagonal of chance."""

from typing import Any

from memguard.pages.page import Line, RocChart
from memguard.report.svg import BASE, SERIES, STRONG

ROC_BODY = 300
"""Height of the axes (units)."""
_STYLES: dict[str, dict[str, Any]] = {
    "0": {"color": SERIES[0], "linewidth": 2.2},
    "1": {"color": SERIES[1], "linewidth": 1.7, "linestyle": (0, (6, 2))},
    "2": {"color": SERIES[2], "linewidth": 1.7, "linestyle": (0, (6, 2, 1.5, 2))},
    "blind": {"color": BASE, "linewidth": 1.7, "linestyle": (0, (3, 2))},
}
"""By name of the line; no two differ by colour alone."""


def paint_roc(axes: Any, chart: RocChart) -> list[Any]:
    """Paint a ROC into empty axes, and return the handles of its lines for a legend.

    Args:
        axes: axes of matplotlib.
        chart: chart with at least one line.
    """
    for set_scale in (axes.set_xscale, axes.set_yscale):
        set_scale("log")
    for axis, set_limits in ((axes.xaxis, axes.set_xlim), (axes.yaxis, axes.set_ylim)):
        set_limits(chart.least, 1.0)
        axis.set_ticks([place for place, _ in chart.ticks], [text for _, text in chart.ticks])
        axis.set_ticks([], minor=True)
    axes.grid(True, axis="x")
    axes.tick_params(pad=6)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    ends = [chart.least, 1.0]
    axes.plot(ends, ends, color=BASE, linewidth=1.1, linestyle=(0, (1, 2)), zorder=1)
    # The first line is painted last, above the others.
    handles = [_paint_line(axes, line, chart.least) for line in reversed(chart.lines)]
    for mark in chart.marks:
        low, high = (max(end, chart.least) for end in (mark.low or 0.0, mark.high or 0.0))
        axes.vlines([mark.x], [low], [high], color=STRONG, linewidth=1.4, zorder=4, clip_on=False)
    return handles[::-1]


def _paint_line(axes: Any, line: Line, least: float) -> Any:
    x = [point.x for point in line.points]
    # Rates below the axis are drawn on its edge.
    y = [max(point.y, least) for point in line.points]
    return axes.plot(x, y, drawstyle="steps-post", clip_on=False, zorder=3, **_STYLES[line.style])[
        0
    ]
