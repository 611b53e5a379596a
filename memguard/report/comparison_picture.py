"""A comparison as one wide SVG image for use outside its page."""

from dataclasses import dataclass, replace
from typing import Any

from memguard.pages import formatting as fmt
from memguard.pages.page import FrontChart
from memguard.records import Comparison
from memguard.records.comparison import list_shares
from memguard.report import seed_means as means
from memguard.report.charts import paint_front
from memguard.report.comparison_front import build_front
from memguard.report.comparison_utility import label_axis, name_direction
from memguard.report.seed_means import Setting
from memguard.report.svg import BASE, CARD, INK, SERIES, STRONG, draw_svg_file, set_percent_axis
from memguard.report.texts import name_continuation

Ends = tuple[float, float] | None
"""Ends of an interval; None without one."""

_SIZE = (960.0, 380.0)
_HEIGHT = 240
"""Approximate height of the axes, in pixels."""
_LEFT_SHARE = 0.6
_BARS_WIDTH = 490
"""Width of the left axes, in pixels; a letter of a label takes eight."""
_MOST_SETTINGS = 6
_BAR = 0.27
_METRICS = (
    ("verbatim", 1.0),
    ("near-verbatim", 0.55),
    ("teacher-forced accuracy, not extraction", 0.22),
)
"""Names of the bars and the opacity of their colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Three bars above one name."""

    label: str
    colour: str
    values: tuple[tuple[float | None, Ends], ...]
    """Height and interval of each bar."""


def render_comparison_chart(comparison: Comparison) -> str:
    """Render the image as an SVG file; the result is deterministic. Encode it as UTF-8.

    On the left are the extraction rates of the documents trained most often with each setting, and
    those of the control, as means over seeds; on the right is risk against utility. With too many
    settings for readable bars, risk against utility fills the image.
    """
    dose = means.pick_highest(comparison)
    shown = "no trained bucket" if dose is None else f"documents {means.name_dose(dose)}"
    front = build_front(comparison)
    num_settings = len(means.list_settings(comparison))
    groups = _list_groups(comparison) if front is None or num_settings <= _MOST_SETTINGS else []

    def paint(figure: Any) -> None:
        figure.get_layout_engine().set(w_pad=0.2, h_pad=0.16, wspace=0.03)
        shares = (_LEFT_SHARE, 1 - _LEFT_SHARE) if groups else (1.0,)
        grid = figure.add_gridspec(1, len(shares), width_ratios=shares)
        if groups:
            title = f"Extraction{':' if dose is None else ' of'} {shown}"
            _paint_groups(figure.add_subplot(grid[0]), groups, title)
        if front and isinstance(front.chart, FrontChart):
            axes = figure.add_subplot(grid[-1])
            limit = 12 if groups else means.CHART_NAME_LIMIT
            label = f"{label_axis(comparison, limit)}, {name_direction(comparison.utility)}"
            paint_front(axes, replace(front.chart, x_label=label), height=_HEIGHT)
            _set_title(axes, "Risk-utility trade-off")
        footer = _write_footer(comparison, bars=bool(groups))
        figure.supxlabel(footer, fontsize=10.5, color=INK, x=0.02, ha="left")

    return draw_svg_file(_SIZE, _describe(comparison, groups, shown), paint)


def _list_groups(comparison: Comparison) -> list[_Group]:
    settings = means.list_settings(comparison)[:_MOST_SETTINGS]
    limit = int(_BARS_WIDTH / (8 * (len(settings) + 1)))
    groups = [
        _Group(
            label=fmt.clean_name(setting.name, min(limit, means.CHART_NAME_LIMIT)),
            colour=SERIES[number % len(SERIES)],
            values=_list_values(setting),
        )
        for number, setting in enumerate(settings)
    ]
    if 0 not in comparison.runs[0].doses.values():
        return groups
    return [*groups, _Group(label="control", colour=BASE, values=_list_values(settings[0], 0))]


def _list_values(
    setting: Setting, dose: int | None = None
) -> tuple[tuple[float | None, Ends], ...]:
    """Return the mean over seeds and the interval of each bar.

    The interval over several seeds is that of the documents trained most often.
    """
    values: list[tuple[float | None, Ends]] = []
    over_seeds = {} if dose == 0 else list_shares(setting.tables, setting.name)
    for risk in ("verbatim", "near_verbatim"):
        rows = setting.find("extraction", risk, dose)
        source = rows[0] if len(rows) == 1 else over_seeds.get(risk) if rows else None
        values.append(
            (means.average(means.list_values(rows)), None if source is None else source.ci)
        )
    accuracies = means.list_values(setting.find("extraction", "token_accuracy", dose))
    return (*values, (means.average(accuracies), None))


def _set_title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=13.5, fontweight="bold", color=STRONG, pad=36)


def _paint_groups(axes: Any, groups: list[_Group], title: str) -> None:
    set_percent_axis(axes, "documents, or tokens (%)")
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_xticks(range(len(groups)), [group.label for group in groups])
    for number, group in enumerate(groups):
        for place, (value, ci) in enumerate(group.values):
            if value is not None:
                x = number + (place - 1) * _BAR
                _paint_bar(axes, x, 100 * value, ci, group.colour, _METRICS[place][1])
    _paint_legend(axes)
    _set_title(axes, title)


def _paint_bar(axes: Any, x: float, value: float, ci: Any, colour: str, strength: float) -> None:
    # Two bars: the outline keeps its colour if the fill is faint.
    axes.bar(x, value, _BAR - 0.03, color=colour, alpha=strength, linewidth=0)
    axes.bar(x, value, _BAR - 0.03, fill=False, edgecolor=colour, linewidth=1)
    top = value
    if ci is not None:
        low, high = (100 * bound for bound in ci)
        # A light border keeps the line visible on a strong colour.
        axes.vlines([x], [low], [high], color=CARD, linewidth=3, alpha=0.7)
        axes.vlines([x], [low], [high], color=STRONG, linewidth=1.1)
        top = max(top, high)
    text = fmt.percent(value / 100).removesuffix(f"{fmt.NBSP}%")
    axes.text(x, top + 1.2, text, ha="center", va="bottom", fontsize=10.5, clip_on=False)


def _paint_legend(axes: Any) -> None:
    from matplotlib.patches import Rectangle

    handles = [
        Rectangle((0, 0), 1, 1, facecolor=INK, alpha=strength, edgecolor=CARD, linewidth=0)
        for _, strength in _METRICS
    ]
    axes.legend(
        handles,
        [name for name, _ in _METRICS],
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.035),
        ncols=3,
        handlelength=1.1,
        borderpad=0.1,
    )


def _write_footer(comparison: Comparison, *, bars: bool) -> str:
    first = means.name_first(comparison, means.CHART_NAME_LIMIT)
    parts = [f"Lines: 95{fmt.NBSP}% intervals.", "Grey: dominated."]
    if bars and 0 in comparison.runs[0].doses.values():
        parts.append(f"Control: never trained, with '{first}'.")
    if means.has_several_seeds(comparison):
        parts.append("Means over seeds.")
    return " ".join([f"Continuation: {name_continuation(comparison)}.", *parts])


def _describe(comparison: Comparison, groups: list[_Group], shown: str) -> str:
    sentences = []
    for group in groups:
        values = [fmt.percent(value) for value, _ in group.values]
        if set(values) != {fmt.MISSING}:
            named = zip(_METRICS, values, strict=True)
            bars = ", ".join(f"{name} {value}" for (name, _), value in named)
            sentences.append(f"{group.label}: {bars}.")
    if sentences:
        return f"Bar chart of {shown}, and risk-utility trade-off. {' '.join(sentences)}"
    front = build_front(comparison)
    return front.chart.description if front else f"{shown.capitalize()}: nothing was measured."
