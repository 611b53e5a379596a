"""Draw what a digest decided to show: lines over doses, and risk against utility."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from memguard.report.page import Line, LineChart, ScatterChart
from memguard.report.svg import BASE, CARD, INK, SERIES, SHADE, WIDTH, draw_svg

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
_BANDED = ("near", "verbatim", "accuracy")
_LEGEND_ROW = 19
_MOST_LABELS = 6
"""Names written beside points; more of them go into a legend."""
_BODY = 250


@dataclass(frozen=True, kw_only=True, slots=True)
class _Label:
    """Where a point's name is written, in units of the axes."""

    text: str
    x: float
    y: float


def draw_chart(chart: LineChart | ScatterChart, key: str) -> str:
    """Return a chart as an ``<svg>`` element whose ids begin with ``key``."""
    if isinstance(chart, ScatterChart):
        return _draw_scatter(chart, key)
    return _draw_lines(chart, key)


def _style(name: str) -> dict[str, Any]:
    """Colour, dashes and marker; no two series differ by colour alone."""
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


def set_percent_axis(axes: Any, label: str) -> None:
    """Make the vertical axis run from 0 to 100."""
    axes.set_ylim(-4, 104)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_ylabel(label)


def _draw_lines(chart: LineChart, key: str) -> str:
    legend_rows = _count_legend_rows(chart.lines)

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        set_percent_axis(axes, chart.y_label)
        axes.set_xlim(-0.35, len(chart.ticks) - 0.65)
        axes.set_xticks(range(len(chart.ticks)), _thin(chart.ticks))
        axes.set_xlabel(chart.x_label)
        if chart.control_at is not None:
            at = chart.control_at
            axes.axvspan(at - 0.28, at + 0.28, color=SHADE, linewidth=0, zorder=0)
            axes.text(at, 108, "control", ha="center", va="bottom", fontsize=11, clip_on=False)
        handles = [_draw_line(axes, line) for line in chart.lines]
        _draw_legend(figure, chart.lines, handles)

    height = _BODY + _LEGEND_ROW * legend_rows + 20
    return draw_svg(key, height, chart.description, paint)


def _count_legend_rows(lines: Sequence[Line]) -> int:
    """Return the fewest rows in which columns as wide as the longest label fit."""
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
    # Set afterwards: matplotlib leaves a label out that begins with an underscore.
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


def _thin(ticks: Sequence[str]) -> list[str]:
    """Blank some labels where there are too many to read."""
    every = -(-len(ticks) // 12)
    return [tick if number % every == 0 else "" for number, tick in enumerate(ticks)]


def _draw_scatter(chart: ScatterChart, key: str) -> str:
    in_legend = sum(bool(line.label) for line in chart.points) > _MOST_LABELS

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        handles = paint_scatter(axes, chart, width=WIDTH - 70, height=_BODY - 60)
        if in_legend:
            _draw_legend(figure, chart.points, handles)

    height = _BODY + 50 + (_LEGEND_ROW * _count_legend_rows(chart.points) if in_legend else 0)
    return draw_svg(key, height, chart.description, paint)


def paint_scatter(axes: Any, chart: ScatterChart, *, width: float, height: float) -> list[Any]:
    """Paint risk against utility; name the points beside them where they are few.

    Args:
        axes: matplotlib axes, empty.
        chart: what to paint.
        width: about that of the axes, in units of the drawing.
        height: about that of the axes.
    """
    x = [line.points[0].x for line in chart.points]
    edges = [*x, *([] if chart.reference_x is None else [chart.reference_x])]
    margin = 0.16 * (max(edges) - min(edges)) or 1.0
    left, right = min(edges) - margin, max(edges) + margin
    set_percent_axis(axes, chart.y_label)
    axes.set_xlim(left, right)
    axes.set_xlabel(chart.x_label)
    if chart.reference_x is not None:
        at = chart.reference_x
        axes.axvline(at, **_style("base"))
        axes.text(at, 108, chart.reference_label, ha="center", va="bottom", fontsize=11)
    handles = [_draw_point(axes, line) for line in chart.points]
    if sum(bool(line.label) for line in chart.points) <= _MOST_LABELS:
        for label in _place_labels(chart, (left, right), width=width, height=height):
            axes.text(label.x, label.y, label.text, fontsize=11.5, color=INK, va="center")
    return handles


def _draw_point(axes: Any, line: Line) -> Any:
    style, point = _style(line.style), line.points[0]
    if point.low is not None and point.high is not None:
        axes.vlines([point.x], [point.low], [point.high], color=style["color"], linewidth=1.6)
    return axes.plot(
        [point.x],
        [point.y],
        color=style["color"],
        marker=style["marker"],
        markersize=9,
        markeredgecolor=CARD,
        markeredgewidth=1,
        linestyle="none",
    )[0]


def _place_labels(
    chart: ScatterChart, ends: tuple[float, float], *, width: float, height: float
) -> list[_Label]:
    """Put each label beside its point, stepping up where another label stands already."""
    left, right = ends
    unit = (right - left) / width
    step = 100 / height * 15
    taken: list[_Label] = []

    def measure(text: str) -> float:
        return 7 * unit * len(text)

    def overlaps(one: _Label, other: _Label) -> bool:
        return abs(one.y - other.y) < step and (
            one.x < other.x + measure(other.text) and other.x < one.x + measure(one.text)
        )

    named = (line for line in chart.points if line.label)
    for line in sorted(named, key=lambda line: (line.points[0].y, line.points[0].x)):
        point = line.points[0]
        length = measure(line.label)
        x = point.x + 10 * unit
        wall = chart.reference_x
        blocked = wall is not None and point.x < wall < x + length
        if (x + length > right or blocked) and point.x - 10 * unit - length > left:
            x = point.x - 10 * unit - length
        label = _Label(text=line.label, x=x, y=point.y)
        while any(overlaps(label, other) for other in taken):
            label = replace(label, y=label.y + step)
        taken.append(label)
    return taken
