"""Results as cards in notebooks: verdict, tiles, chart and a link to the page.

A card is one element with inline styles and its own light background, because notebooks remove
style sheets from outputs that they do not trust, and have themes of their own. Its chart is an
image, so that ids of several cards cannot clash. Every text is cleaned and escaped.
"""

import base64
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from memguard.pages import formatting as fmt
from memguard.pages.page import Fact, Figure
from memguard.records import AuditReport, Badge, Comparison
from memguard.report.audit_facts import collect_facts
from memguard.report.charts import draw_chart
from memguard.report.comparison_front import list_sentences, show_risk
from memguard.report.comparison_picture import render_comparison_chart
from memguard.report.comparison_utility import write_value
from memguard.report.svg import LIGHT

_TINTS = {
    "red": ("#b3261e", "#fbeeec"),
    "amber": ("#845500", "#fbf3e0"),
    "violet": ("#6d3fb0", "#f2ecfb"),
    "green": ("#0b6e69", "#e6f3f2"),
    "grey": ("#566172", "#eef0f3"),
}
"""Border and background of a badge, as on its page."""
_SOFT = "color:#566172"
_CARD = (
    "box-sizing:border-box;max-width:56rem;padding:14px 16px;border:1px solid #dde1e7;"
    "border-radius:10px;background:#ffffff;color:#1a212b;text-align:left;overflow-wrap:anywhere;"
    "font:14px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,Arial,sans-serif"
)
_TILE = "flex:1 1 11rem;padding:8px 12px;border:1px solid #dde1e7;border-radius:8px;background:#fff"
_CELL = "padding:4px 14px 4px 0;text-align:left;border-bottom:1px solid #dde1e7;background:#fff"
_VARIABLE = re.compile(r"var\((--[\w-]+)\)")
_MOST_SETTINGS = 12
_MOST_UP = 1
"""Folders above the notebook's that a link may lead through; notebooks serve no others."""


def render_audit_card(
    report: AuditReport, page: Path, *, facts: Sequence[Fact] = (), note: str = ""
) -> str:
    """Return the card of an audit, with lines of facts below the chart.

    It links to ``page`` if that is there; ``note`` is what to know about the page's folder.
    """
    shown = collect_facts(report)
    parts = [
        _write_heading("Audit", shown.heading),
        _write_badge(shown.badges[0], shown.verdict.text),
        _write_tiles(shown.counts),
        _write_badge(shown.badges[1], shown.membership.text),
        *(_write_paragraph("margin:8px 0 0", text) for text in shown.find("dose").lead),
    ]
    if shown.notices:
        text = f"{shown.count_notices()} on the page"
        parts.append(_write_paragraph(f"margin:4px 0 0;{_SOFT}", text))
    parts += [_draw_figure(figure) for figure in [shown.find("dose").figure] if figure]
    return _wrap([*parts, _write_facts(facts), _link(page, "Whole report", note)])


def render_comparison_card(comparison: Comparison, page: Path) -> str:
    """Return the card of a comparison, which links to its page if that is there."""
    parts = [
        _write_heading("Comparison", fmt.clean_name(comparison.name, 120)),
        *(
            Markup('<p style="margin:8px 0;font-size:15px"><b>{}</b>: {}</p>').format(
                fact.term, fact.value
            )
            for fact in list_sentences(comparison)
        ),
        _write_settings(comparison),
        _show_picture(
            render_comparison_chart(comparison),
            "Extraction of each setting, and risk against utility",
            width=860,
        ),
    ]
    return _wrap([*parts, _link(page, "Whole comparison", "")])


def render_plain_card(heading: str, facts: Sequence[Fact]) -> str:
    """Return a card of facts alone."""
    return _wrap([Markup("<b>{}</b>").format(fmt.clean_text(heading)), _write_facts(facts)])


def render_table_card(
    heading: str, sentence: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str
) -> str:
    """Return a card of a sentence and a table, with a note below it."""
    return _wrap(
        [
            Markup('<div style="{}">memguard · {}</div>').format(_SOFT, fmt.clean_text(heading)),
            _write_paragraph(
                "margin:8px 0;font-size:15px",
                Markup("<b>{}</b>").format(fmt.clean_text(sentence, 2 * fmt.SENTENCE_LIMIT)),
            ),
            _write_table(columns, rows),
            _write_paragraph(f"margin:0;{_SOFT}", note),
        ]
    )


def _write_paragraph(style: str, text: str) -> Markup:
    return Markup('<p style="{}">{}</p>').format(style, text)


def _wrap(parts: Iterable[Markup]) -> str:
    return str(Markup('<div style="{}">{}</div>').format(_CARD, Markup("").join(parts)))


def _write_heading(kind: str, name: str) -> Markup:
    return Markup('<div style="{}">memguard · {} · {}</div>').format(_SOFT, kind, name)


def _write_badge(badge: Badge, text: str) -> Markup:
    tint, background = _TINTS[badge.colour]
    style = f"margin:8px 0;padding:8px 12px;border-left:4px solid {tint};background:{background}"
    return Markup(
        '<div style="{}"><b style="font-size:17px;color:{}">{}: {}</b><br>'
        '<span style="font-size:15px">{}</span></div>'
    ).format(style, tint, badge.title, badge.state, text)


def _write_tiles(tiles: Iterable[Fact]) -> Markup:
    written = [
        Markup(
            '<div style="{}"><div style="font-size:13px;{}">{}</div>'
            '<div style="font-size:20px;line-height:1.3"><b>{}</b></div>'
            '<div style="font-size:13px;{}">{}</div></div>'
        ).format(_TILE, _SOFT, tile.term, tile.value, _SOFT, tile.detail or "")
        for tile in tiles
    ]
    style = "display:flex;flex-wrap:wrap;gap:8px"
    return Markup('<div style="{}">{}</div>').format(style, Markup("").join(written))


def _write_settings(comparison: Comparison) -> Markup:
    """Return the table of settings: badges, documents that came out, risk and utility."""
    points = comparison.front[:_MOST_SETTINGS]
    rows = [
        (
            fmt.clean_name(point.name),
            *(
                Markup('<b style="color:{}">{}</b> ({})').format(
                    _TINTS[badge.colour][0],
                    fmt.clean_name(badge.state),
                    fmt.clean_name(badge.detail),
                )
                for badge in point.badges
            ),
            fmt.count(point.num_findings),
            risk.text if point.risk is None else f"{risk.text} ({risk.detail}, {risk.note})",
            write_value(point.utility, comparison.utility),
        )
        for point in points
        for risk in [show_risk(point)]
    ]
    heading = fmt.clean_name(comparison.utility.heading, 60)
    columns = ("Setting", "Text", "Membership", "Came out", "Risk", heading)
    table = _write_table(columns, rows)
    if not (left_out := len(comparison.front) - len(points)):
        return table
    return table + _write_paragraph(_SOFT, f"{left_out:,} more settings are on the page.")


def _write_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    head = Markup("").join(
        Markup('<th style="{};{}">{}</th>').format(_CELL, _SOFT, column) for column in columns
    )
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(Markup('<td style="{}">{}</td>').format(_CELL, cell) for cell in row)
        )
        for row in rows
    )
    return Markup(
        '<table style="border-collapse:collapse;margin:8px 0;font-size:14px;color:#1a212b">'
        "<thead><tr>{}</tr></thead><tbody>{}</tbody></table>"
    ).format(head, body)


def _write_facts(facts: Sequence[Fact]) -> Markup:
    lines = [
        Markup('<div><span style="{}">{}</span> {}</div>').format(_SOFT, fact.term, fact.value)
        for fact in facts
    ]
    return Markup('<div style="margin:6px 0 0">{}</div>').format(Markup("").join(lines))


def _draw_figure(figure: Figure) -> Markup:
    drawn = draw_chart(figure.chart, figure.key)
    drawn = _VARIABLE.sub(lambda match: LIGHT[match[1]], drawn)
    drawn = drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    picture = _show_picture(drawn, figure.chart.description, width=460)
    return picture + _write_paragraph(f"margin:0;font-size:13px;{_SOFT}", figure.caption)


def _show_picture(svg: str, description: str, *, width: int) -> Markup:
    data = base64.b64encode(svg.encode()).decode()
    style = f"display:block;width:100%;max-width:{width}px;margin:10px 0 4px"
    return Markup('<img style="{}" alt="{}" src="data:image/svg+xml;base64,{}">').format(
        style, description, data
    )


def _link(page: Path, label: str, note: str) -> Markup:
    """Return the link to a page: relative to the notebook, as notebooks serve files, if near."""
    if not page.is_file():
        return _write_paragraph(f"margin:8px 0 0;{_SOFT}", "The page was deleted since.")
    relative = os.path.relpath(page)
    is_near = relative.split(os.sep).count("..") <= _MOST_UP
    target = quote(relative) if is_near else page.resolve().as_uri()
    shown = relative if is_near else str(page.resolve())
    return Markup(
        '<p style="margin:8px 0 0"><a href="{}" target="_blank" rel="noopener" '
        'style="color:#2b5f9e">{}</a> <code style="font-size:12px;{}">{}</code>{}</p>'
    ).format(
        target,
        label,
        _SOFT,
        fmt.clean_text(shown, 2 * fmt.SENTENCE_LIMIT),
        f" – {note}" if note else "",
    )
