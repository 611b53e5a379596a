"""Draw risk against utility: crosses, the front as a line, names in a column beside.

Points of a sweep lie close together (many at 0 %), and names beside them would cover each other.
So they stand one below the other at the right, each joined to its cross, in an order in which the
joining lines seldom cross: by risk, and of equal risk the rightmost lowest.
"""

from collections.abc import Sequence
from typing import Any

from memguard.report.page import FrontChart, Mark
from memguard.report.svg import BASE, CARD, INK, SERIES, set_percent_axis

_LINE_HEIGHT = 16
"""Of a name (units)."""
_COLUMN = 1.09
"""Where names begin, in widths of the axes."""


def fit_height(chart: FrontChart, least: float) -> float:
    """Return the height of axes in which all names find room, at least ``least`` (units)."""
    return max(least, _LINE_HEIGHT * len(chart.marks))


def paint_front(axes: Any, chart: FrontChart, *, height: float) -> None:
    """Paint into empty axes of about so many units.

    Args:
        axes: matplotlib's.
        chart: with at least one mark.
        height: about that of the axes.
    """
    _paint_axes(axes, chart)
    front = sorted((m for m in chart.marks if not m.is_dominated), key=lambda m: (m.x, -m.y))
    x, y = [mark.x for mark in front], [mark.y for mark in front]
    axes.plot(x, y, color=SERIES[1], linewidth=1.6, alpha=0.55, zorder=2)
    # Those that are beaten lie below the others.
    for mark in sorted(chart.marks, key=lambda mark: not mark.is_dominated):
        _paint_cross(axes, mark)
    ordered = sorted(chart.marks, key=lambda mark: (mark.y, -mark.x))
    low, high = axes.get_ylim()
    wanted = [(mark.y - low) / (high - low) for mark in ordered]
    heights = spread_evenly(wanted, _LINE_HEIGHT / height)
    for mark, at in zip(ordered, heights, strict=True):
        _paint_name(axes, mark, at)


def _paint_axes(axes: Any, chart: FrontChart) -> None:
    edges = [end for mark in chart.marks for end in (mark.x, *(mark.x_ends or ()))]
    edges += [] if chart.reference_x is None else [chart.reference_x]
    margin = 0.08 * (max(edges) - min(edges)) or 1.0
    axes.set_xlim(min(edges) - margin, max(edges) + margin)
    axes.set_xlabel(chart.x_label)
    set_percent_axis(axes, chart.y_label)
    if chart.reference_x is not None:
        axes.axvline(chart.reference_x, color=BASE, linestyle=(0, (5, 3)), linewidth=1.6)
        axes.text(
            chart.reference_x, 108, chart.reference_label, ha="center", va="bottom", fontsize=11
        )


def _paint_cross(axes: Any, mark: Mark) -> None:
    colour = BASE if mark.is_dominated else SERIES[1]
    if mark.y_ends is not None:
        axes.vlines([mark.x], [mark.y_ends[0]], [mark.y_ends[1]], color=colour, linewidth=1.5)
    if mark.x_ends is not None:
        axes.hlines([mark.y], [mark.x_ends[0]], [mark.x_ends[1]], color=colour, linewidth=1.5)
    # Not by colour alone: what is beaten is hollow.
    axes.plot(
        [mark.x],
        [mark.y],
        marker="o",
        markersize=7.5,
        markerfacecolor=CARD if mark.is_dominated else colour,
        markeredgecolor=colour if mark.is_dominated else CARD,
        markeredgewidth=1.5 if mark.is_dominated else 1,
        linestyle="none",
        zorder=4,
        clip_on=False,
    )


def _paint_name(axes: Any, mark: Mark, at: float) -> None:
    axes.annotate(
        mark.label,
        xy=(mark.x, mark.y),
        xytext=(_COLUMN, at),
        textcoords="axes fraction",
        color=BASE if mark.is_dominated else INK,
        fontsize=11.5,
        va="center",
        annotation_clip=False,
        arrowprops={
            "arrowstyle": "-",
            "color": BASE,
            "alpha": 0.45,
            "linewidth": 0.8,
            "relpos": (0, 0.5),
            "shrinkA": 2,
            "shrinkB": 6,
        },
        zorder=1,
    )


def spread_evenly(wanted: Sequence[float], step: float) -> list[float]:
    """Return ascending places, each as near to the one wanted as a distance of ``step`` allows.

    Pushed up from below, then down from the top where the uppermost has left the axes.
    """
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + step) if places else place)
    highest = 1.0
    for number in reversed(range(len(places))):
        places[number] = min(places[number], highest)
        highest = places[number] - step
    return places
