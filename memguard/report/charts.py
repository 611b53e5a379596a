"""Draw charts: lines over ordinal positions, curves over steps, risk against utility, and a ROC.

In risk against utility, a line joins the settings that are not dominated. The points of a sweep are
close together (many at 0 %), so names next to them would overlap. The names are therefore listed in
a column at the right, each connected to its point, sorted so that the connecting lines rarely
cross: by risk, and at equal risk the rightmost point lowest.
"""

from collections.abc import Sequence
from typing import Any

from memguard.pages.page import CurveChart, FrontChart, Line, LineChart, Mark, RocChart
from memguard.report.svg import (
    BASE,
    CARD,
    INK,
    SERIES,
    SHADE,
    STRONG,
    WIDTH,
    draw_svg,
    set_percent_axis,
)

_LINE_HEIGHT = 16
"""Height of a name (units)."""
_COLUMN = 1.09
"""Left edge of the names, in widths of the axes."""
_ROOM_FOR_REFERENCE = 0.5
"""The axis is extended to the reference by at most this share of the range of the settings."""


def paint_front(axes: Any, chart: FrontChart, *, height: float) -> None:
    """Paint risk against utility into empty axes of about ``height`` units."""
    _paint_axes(axes, chart)
    sign = -1 if chart.is_right_better else 1
    front = sorted((m for m in chart.marks if not m.is_dominated), key=lambda m: (sign * m.x, -m.y))
    x, y = [mark.x for mark in front], [mark.y for mark in front]
    axes.plot(x, y, color=SERIES[1], linewidth=1.6, alpha=0.55, zorder=2)
    # Dominated settings are drawn first, below the others.
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
    reference = chart.reference_x
    room = _ROOM_FOR_REFERENCE * (max(edges) - min(edges)) or 1.0
    is_near = reference is not None and min(edges) - room <= reference <= max(edges) + room
    edges += [reference] if reference is not None and is_near else []
    margin = 0.08 * (max(edges) - min(edges)) or 1.0
    axes.set_xlim(min(edges) - margin, max(edges) + margin)
    axes.set_xlabel(chart.x_label)
    set_percent_axis(axes, chart.y_label)
    if reference is None:
        return
    if is_near:
        axes.axvline(reference, color=BASE, linestyle=(0, (5, 3)), linewidth=1.6)
        axes.text(reference, 108, chart.reference_label, ha="center", va="bottom", fontsize=11)
        return
    # A distant reference would squeeze the settings: only its label and direction are drawn.
    is_right = reference > max(edges)
    label = f"{chart.reference_label} →" if is_right else f"← {chart.reference_label}"
    axes.text(
        1.0 if is_right else 0.0,
        1.04,
        label,
        transform=axes.transAxes,
        ha="right" if is_right else "left",
        va="bottom",
        fontsize=11,
    )


def _paint_cross(axes: Any, mark: Mark) -> None:
    colour = BASE if mark.is_dominated else SERIES[1]
    if mark.y_ends is not None:
        axes.vlines([mark.x], [mark.y_ends[0]], [mark.y_ends[1]], color=colour, linewidth=1.5)
    if mark.x_ends is not None:
        axes.hlines([mark.y], [mark.x_ends[0]], [mark.x_ends[1]], color=colour, linewidth=1.5)
    # Dominated settings are hollow, so that they do not differ by colour alone.
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
    """Return ascending positions at least ``step`` apart, close to the ``wanted`` ones.

    Positions are first pushed up from the lowest on, then pushed down if the highest is above 1.
    """
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + step) if places else place)
    highest = 1.0
    for number in reversed(range(len(places))):
        places[number] = min(places[number], highest)
        highest = places[number] - step
    return places


_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
_BANDED = ("near", "verbatim", "accuracy")
_LEGEND_ROW = 19
_BODY = 250


def draw_chart(chart: LineChart | FrontChart | RocChart | CurveChart, key: str) -> str:
    """Return a chart as an ``<svg>`` element whose ids begin with ``key``."""
    if isinstance(chart, LineChart):
        return _draw_lines(chart, key)
    if isinstance(chart, CurveChart):
        return _draw_curves(chart, key)
    if isinstance(chart, RocChart):
        height = ROC_BODY + _LEGEND_ROW * _count_legend_rows(chart.lines) + 20

        def paint(figure: Any) -> None:
            _draw_legend(figure, chart.lines, paint_roc(figure.add_subplot(), chart))

        return draw_svg(key, height, chart.description, paint)
    body = max(_BODY, _LINE_HEIGHT * len(chart.marks))
    return draw_svg(
        key,
        body + 70,
        chart.description,
        lambda figure: paint_front(figure.add_subplot(), chart, height=body),
    )


def _style(name: str) -> dict[str, Any]:
    """Return colour, dashes and marker; no two series differ by colour alone."""
    fixed: dict[str, dict[str, Any]] = {
        "near": {"color": SERIES[0], "marker": "o", "linewidth": 2.2, "markersize": 7},
        "verbatim": {"color": SERIES[1], "marker": "s", "linewidth": 2.2, "markersize": 6},
        "accuracy": {"color": SERIES[2], "marker": "^", "linewidth": 1.2, "markersize": 6.5},
        "base-near": {"color": BASE, "linestyle": (0, (5, 3)), "linewidth": 1.6},
        "base-accuracy": {"color": BASE, "linestyle": (0, (1.5, 2)), "linewidth": 1.4},
        "base": {"color": BASE, "linestyle": (0, (5, 3)), "linewidth": 1.6},
    }
    if name in fixed:
        return fixed[name]
    number = int(name)
    return {
        "color": SERIES[number % len(SERIES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linestyle": _DASHES[number // len(SERIES) % len(_DASHES)],
        "linewidth": 2.0,
        "markersize": 6.5,
    }


def _draw_lines(chart: LineChart, key: str) -> str:
    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        set_percent_axis(axes, chart.y_label)
        axes.set_xlim(-0.35, len(chart.ticks) - 0.65)
        # Some labels are left out if there are too many to read.
        every = -(-len(chart.ticks) // 12)
        shown = [tick if number % every == 0 else "" for number, tick in enumerate(chart.ticks)]
        axes.set_xticks(range(len(chart.ticks)), shown)
        axes.set_xlabel(chart.x_label)
        if chart.control_at is not None:
            at = chart.control_at
            axes.axvspan(at - 0.28, at + 0.28, color=SHADE, linewidth=0, zorder=0)
            axes.text(at, 108, "control", ha="center", va="bottom", fontsize=11, clip_on=False)
        handles = [_draw_line(axes, line) for line in chart.lines]
        _draw_legend(figure, chart.lines, handles)

    height = _BODY + _LEGEND_ROW * _count_legend_rows(chart.lines) + 20
    return draw_svg(key, height, chart.description, paint)


def _count_legend_rows(lines: Sequence[Line]) -> int:
    """Return the number of rows of the legend if its columns are as wide as the longest label."""
    lengths = [len(line.label) for line in lines if line.label]
    if not lengths:
        return 0
    columns = max(1, int((WIDTH - 20) / (48 + 6.6 * max(lengths))))
    return -(-len(lengths) // columns)


def _draw_legend(figure: Any, lines: Sequence[Line], handles: Sequence[Any]) -> None:
    named = [(h, line.label) for h, line in zip(handles, lines, strict=True) if line.label]
    if not named:
        return
    columns = -(-len(named) // _count_legend_rows(lines))
    shown = [handle for handle, _ in named]
    legend = figure.legend(shown, ["label"] * len(shown), loc="outside upper left", ncols=columns)
    # Set afterwards because matplotlib omits labels that begin with an underscore.
    for text, (_, label) in zip(legend.get_texts(), named, strict=True):
        text.set_text(label)


def _draw_line(axes: Any, line: Line) -> Any:
    style = _style(line.style)
    x = [point.x for point in line.points]
    if line.style in _BANDED:
        low = [point.y if point.low is None else point.low for point in line.points]
        high = [point.y if point.high is None else point.high for point in line.points]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.14, linewidth=0)
        axes.vlines(x, low, high, color=style["color"], linewidth=1.0, alpha=0.7)
    y = [point.y for point in line.points]
    return axes.plot(x, y, markeredgecolor=CARD, markeredgewidth=0.8, **style)[0]


_PANEL = 170
"""Height of the axes of a panel (units)."""


def _draw_curves(chart: CurveChart, key: str) -> str:
    lines = [line for panel in chart.panels for line in panel.lines]

    def paint(figure: Any) -> None:
        rows = figure.subplots(len(chart.panels), 1, sharex=True, squeeze=False)[:, 0]
        handles = []
        for axes, panel in zip(rows, chart.panels, strict=True):
            axes.set_ylabel(panel.y_label)
            if panel.is_percent:
                set_percent_axis(axes, panel.y_label)
            if chart.mark_at is not None:
                axes.axvline(chart.mark_at, color=BASE, linestyle=(0, (5, 3)), zorder=1)
            for line in panel.lines:
                style = _style(line.style) | ({"marker": ""} if len(line.points) > 40 else {})
                points = [(point.x, point.y) for point in line.points]
                handles += axes.plot(*zip(*points, strict=True), markeredgecolor=CARD, **style)
        if chart.mark_at is not None:
            place = {"xy": (chart.mark_at, 1.02), "xycoords": ("data", "axes fraction")}
            rows[0].annotate(chart.mark_label, **place, ha="center", fontsize=11)
        rows[-1].set_xlabel(chart.x_label)
        rows[-1].xaxis.get_major_locator().set_params(integer=True)
        _draw_legend(figure, lines, handles)

    height = _PANEL * len(chart.panels) + _LEGEND_ROW * _count_legend_rows(lines) + 50
    return draw_svg(key, height, chart.description, paint)


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
    """Paint a ROC into empty axes, and return the handles of its lines for a legend."""
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
    handles: list[Any] = []
    for line in reversed(chart.lines):
        x = [point.x for point in line.points]
        # Rates below the axis are drawn on its edge.
        y = [max(point.y, chart.least) for point in line.points]
        style = {"drawstyle": "steps-post", **_STYLES[line.style]}
        handles += axes.plot(x, y, clip_on=False, zorder=3, **style)
    for mark in chart.marks:
        low, high = (max(end, chart.least) for end in (mark.low or 0.0, mark.high or 0.0))
        axes.vlines([mark.x], [low], [high], color=STRONG, linewidth=1.4, zorder=4, clip_on=False)
    return handles[::-1]
