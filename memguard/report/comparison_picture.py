"""A comparison in one wide picture that stands alone."""

from dataclasses import dataclass, replace
from typing import Any

from memguard.records import Comparison, ComparisonCell
from memguard.report.charts import paint_scatter, set_percent_axis
from memguard.report.comparison_figures import build_tradeoff
from memguard.report.doses import CHART_NAME_LIMIT, name_dose, name_first, pick_highest
from memguard.report.formatting import MISSING, NBSP, format_count, format_percent
from memguard.report.page import ScatterChart
from memguard.report.svg import BASE, CARD, INK, SERIES, STRONG, draw_svg_file
from memguard.report.text import clean_name

_SIZE = (960.0, 380.0)
_LEFT_SHARE = 0.6
_BARS_WIDTH = 490
"""Of the left axes, in pixels; a letter under them takes eight."""
_MOST_SETTINGS = 6
_BAR = 0.27
_METRICS = (("near-verbatim", 1.0), ("verbatim", 0.55), ("tokens right", 0.22))
"""Names of the bars and how strong their colour is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """Three bars over one name."""

    label: str
    colour: str
    cell: ComparisonCell | None


def render_comparison_chart(comparison: Comparison) -> str:
    """Render the picture as an SVG file, the same bytes each time; encode it as UTF-8.

    Left, what comes back of the documents trained most often, with each setting, and of the
    control; right, risk against utility. With several seeds the left shows the first.
    """
    groups = _list_groups(comparison)
    dose = pick_highest(comparison)
    tradeoff = build_tradeoff(comparison)

    def paint(figure: Any) -> None:
        figure.get_layout_engine().set(w_pad=0.2, h_pad=0.16, wspace=0.03)
        grid = figure.add_gridspec(1, 2, width_ratios=(_LEFT_SHARE, 1 - _LEFT_SHARE))
        title = f"What comes back of documents {name_dose(dose)}"
        _paint_groups(figure.add_subplot(grid[0]), groups, title)
        if tradeoff and isinstance(tradeoff.chart, ScatterChart):
            axes = figure.add_subplot(grid[1])
            label = f"held-out NLL against {name_first(comparison, 12)} (%), lower is better"
            paint_scatter(axes, replace(tradeoff.chart, x_label=label), width=280, height=240)
            _set_title(axes, "Risk against utility")
        figure.supxlabel(_write_footer(comparison), fontsize=10.5, color=INK, x=0.02, ha="left")

    return draw_svg_file(_SIZE, _describe(groups, name_dose(dose)), paint)


def _list_groups(comparison: Comparison) -> list[_Group]:
    dose = pick_highest(comparison)
    # The first run of each name; its number decides the colour, as in the page's charts.
    firsts = {setting.name: setting for setting in reversed(comparison.settings)}
    names = list(dict.fromkeys(setting.name for setting in comparison.settings))
    limit = int(_BARS_WIDTH / (8 * (min(len(names), _MOST_SETTINGS) + 1)))
    groups = [
        _Group(
            label=clean_name(name, min(limit, CHART_NAME_LIMIT)),
            colour=SERIES[number % len(SERIES)],
            cell=firsts[name].extraction.get(dose) if dose is not None else None,
        )
        for number, name in enumerate(names[:_MOST_SETTINGS])
    ]
    control = comparison.settings[0].extraction.get("0")
    return [*groups, _Group(label="control", colour=BASE, cell=control)] if control else groups


def _list_values(cell: ComparisonCell | None) -> list[tuple[float | None, Any]]:
    """Return each bar's share and its interval."""
    if cell is None:
        return [(None, None)] * 3
    near = cell.near_verbatim
    return [(near.rate, near.ci), (cell.rate, cell.ci), (cell.mean_token_accuracy, None)]


def _set_title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=13.5, fontweight="bold", color=STRONG, pad=36)


def _paint_groups(axes: Any, groups: list[_Group], title: str) -> None:
    set_percent_axis(axes, "documents, or tokens (%)")
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_xticks(range(len(groups)), [group.label for group in groups])
    for number, group in enumerate(groups):
        for place, (value, ci) in enumerate(_list_values(group.cell)):
            if value is not None:
                x = number + (place - 1) * _BAR
                _paint_bar(axes, x, 100 * value, ci, group.colour, _METRICS[place][1])
    _paint_legend(axes)
    _set_title(axes, title)


def _paint_bar(axes: Any, x: float, value: float, ci: Any, colour: str, strength: float) -> None:
    # Two bars: the edge keeps its colour where the inside is faint.
    axes.bar(x, value, _BAR - 0.03, color=colour, alpha=strength, linewidth=0)
    axes.bar(x, value, _BAR - 0.03, fill=False, edgecolor=colour, linewidth=1)
    top = value
    if ci is not None:
        low, high = (100 * bound for bound in ci)
        # A light rim keeps the line visible on a strong colour.
        axes.vlines([x], [low], [high], color=CARD, linewidth=3, alpha=0.7)
        axes.vlines([x], [low], [high], color=STRONG, linewidth=1.1)
        top = max(top, high)
    text = format_percent(value / 100).removesuffix(f"{NBSP}%")
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


def _write_footer(comparison: Comparison) -> str:
    first = name_first(comparison, CHART_NAME_LIMIT)
    parts = [f"Lines: 95{NBSP}% intervals."]
    if "0" in comparison.settings[0].extraction:
        parts.append(f"Control: documents never trained, with '{first}'.")
    names = {setting.name for setting in comparison.settings}
    if len(comparison.settings) > len(names):
        parts.append("Bars: first seed.")
    if len(names) > _MOST_SETTINGS:
        parts.append(f"Bars: first {_MOST_SETTINGS} of {len(names)} settings.")
    tokens = format_count(comparison.continuation_tokens)
    return " ".join([f"Continuation of {tokens} tokens.", *parts])


def _describe(groups: list[_Group], spoken: str) -> str:
    told = []
    for group in groups:
        values = [format_percent(value) for value, _ in _list_values(group.cell)]
        if set(values) != {MISSING}:
            named = zip(_METRICS, values, strict=True)
            told.append(f"{group.label}: {', '.join(f'{name} {v}' for (name, _), v in named)}.")
    return f"Bar chart of documents {spoken}, and risk against utility. {' '.join(told)}"
