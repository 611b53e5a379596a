"""Draw what a digest decided to show: lines over doses; `front_chart` draws the front."""

from collections.abc import Sequence
from typing import Any

from memguard.report.front_chart import fit_height, paint_front
from memguard.report.page import FrontChart, Line, LineChart
from memguard.report.svg import BASE, CARD, SERIES, SHADE, WIDTH, draw_svg, set_percent_axis

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (7, 2, 1.5, 2)))
_BANDED = ("near", "verbatim", "accuracy")
_LEGEND_ROW = 19
_BODY = 250


def draw_chart(chart: LineChart | FrontChart, key: str) -> str:
    """Return a chart as an ``<svg>`` element whose ids begin with ``key``."""
    if isinstance(chart, FrontChart):
        return _draw_front(chart, key)
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


def _draw_front(chart: FrontChart, key: str) -> str:
    height = fit_height(chart, _BODY)

    def paint(figure: Any) -> None:
        paint_front(figure.add_subplot(), chart, height=height)

    return draw_svg(key, height + 70, chart.description, paint)
