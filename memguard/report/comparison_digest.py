"""A comparison of settings as a page: every sentence and figure the template shows."""

from typing import Literal

from memguard.records import Comparison, ComparisonCell, SettingResult
from memguard.report.audit_tables import build_environment, make_headings, make_rate_cell
from memguard.report.comparison_figures import build_tradeoff, build_trends
from memguard.report.doses import (
    base_change,
    change_from_first,
    label_setting,
    list_doses,
    name_dose,
    pick_highest,
)
from memguard.report.formatting import (
    MISSING,
    format_change,
    format_count,
    format_duration,
    format_hash,
    format_number,
    format_of,
    format_percent,
    format_settings,
    format_signed,
    format_zero_bound,
)
from memguard.report.page import Cell, ComparisonPage, Fact, Row, Table
from memguard.report.prose import CONFIDENTIALITY, READING_GUIDE, write_glossary
from memguard.report.text import COMMAND_LIMIT, clean_name, clean_text

_IN_SHORT = 12


def digest_comparison(comparison: Comparison) -> ComparisonPage:
    """Turn a comparison into what its page shows."""
    name = clean_name(comparison.name)
    return ComparisonPage(
        title=f"Comparison: {name}",
        heading=name,
        tool_version=clean_name(comparison.tool_version, 40),
        confidentiality=CONFIDENTIALITY,
        identity=_describe_identity(comparison),
        in_short_lead=_write_in_short_lead(comparison),
        in_short=_write_in_short(comparison),
        guide=READING_GUIDE,
        headline=_build_headline(comparison),
        figures=tuple(filter(None, (build_tradeoff(comparison), *build_trends(comparison)))),
        extraction=_build_extraction(comparison),
        settings=_build_settings(comparison),
        command=clean_text(comparison.command, COMMAND_LIMIT),
        environment=build_environment(comparison.environment),
        glossary=write_glossary(None),
    )


def _describe_identity(comparison: Comparison) -> tuple[Fact, ...]:
    settings = comparison.settings
    seeds = sorted({setting.seed for setting in settings})
    first = settings[0].utility
    heldout = f"{format_count(first.num_documents)} documents"
    return (
        Fact(
            term="Compared",
            value=f"{len({setting.name for setting in settings}):,} settings",
            detail=f"{len(settings):,} runs",
        ),
        Fact(term="Seeds", value=", ".join(map(str, seeds[:12]))),
        Fact(term="Documents", value=format_hash(comparison.documents_sha256), code=True),
        Fact(term="Continuation", value=f"{comparison.continuation_tokens:,} tokens"),
        Fact(
            term="Held-out NLL on",
            value=heldout,
            detail=f"{format_count(first.num_tokens)} tokens",
        ),
        Fact(term="Made with", value=f"memguard {clean_name(comparison.tool_version, 40)}"),
    )


def _write_in_short(comparison: Comparison) -> tuple[Fact, ...]:
    """Say each setting's risk and cost in one sentence."""
    dose = pick_highest(comparison)
    return tuple(
        Fact(
            term=label_setting(setting, comparison),
            value=_summarise(comparison, setting, setting.extraction.get(dose or "")),
        )
        for setting in comparison.settings[:_IN_SHORT]
    )


def _write_in_short_lead(comparison: Comparison) -> str:
    dose = pick_highest(comparison)
    if dose is None:
        return "No trained bucket was measured; what is left is the loss on held-out documents."
    return f"Documents {name_dose(dose)}, continued for {comparison.continuation_tokens:,} tokens:"


def _summarise(comparison: Comparison, setting: SettingResult, cell: ComparisonCell | None) -> str:
    loss = f"held-out NLL {format_number(setting.utility.heldout_nll)}"
    change = change_from_first(setting, comparison)
    if setting.name != comparison.settings[0].name and change is not None:
        loss += f" ({format_change(change)} against the first setting)"
    if cell is None or not cell.num_documents:
        return f"no document in this bucket; {loss}."
    near = cell.near_verbatim.num_matched
    text = f"{format_of(near, cell.num_documents)} near-verbatim"
    if not max(near, cell.num_matched):
        text += f" ({format_zero_bound(cell.num_documents)})"
    text += f", {format_of(cell.num_matched, cell.num_documents)} verbatim"
    if cell.mean_token_accuracy is not None:
        text += f", {format_percent(cell.mean_token_accuracy)} of tokens right"
    return f"{text}; {loss}."


def _verbatim_cell(cell: ComparisonCell | None) -> Cell:
    if cell is None:
        return Cell(text=MISSING)
    return make_rate_cell(cell.rate, cell.ci, cell.num_matched, cell.num_documents)


def _near_cell(cell: ComparisonCell | None) -> Cell:
    if cell is None:
        return Cell(text=MISSING)
    near = cell.near_verbatim
    return make_rate_cell(near.rate, near.ci, near.num_matched, cell.num_documents)


def _accuracy_cell(cell: ComparisonCell | None) -> Cell:
    return Cell(text=format_percent(cell.mean_token_accuracy if cell else None))


def _build_headline(comparison: Comparison) -> Table:
    dose = pick_highest(comparison)
    has_control = "0" in list_doses(comparison)
    rows = []
    for setting in comparison.settings:
        utility, cost = setting.utility, setting.cost
        change = change_from_first(setting, comparison)
        first = setting.name == comparison.settings[0].name
        cell = setting.extraction.get(dose) if dose is not None else None
        cells = [
            Cell(
                text=format_number(utility.heldout_nll),
                detail=format_signed(utility.heldout_nll - utility.base_heldout_nll),
            ),
            Cell(text="reference" if first else format_change(change)),
            _near_cell(cell),
            _verbatim_cell(cell),
            _accuracy_cell(cell),
            *([_near_cell(setting.extraction.get("0"))] if has_control else []),
            Cell(text=format_percent(cost.dropped_fraction)),
            Cell(
                text=format_duration(cost.train_s),
                detail=format_count(cost.num_supervised_tokens),
            ),
        ]
        head = Cell(text=label_setting(setting, comparison), kind="text")
        rows.append(Row(head=head, cells=tuple(cells)))
    rows.append(_base_row(comparison, dose, has_control))
    spoken = name_dose(dose)
    return Table(
        caption="Risk, utility and cost of each setting",
        columns=make_headings(
            "Setting",
            ("Held-out NLL", "nats; from base"),
            ("Against first", "setting"),
            ("Near-verbatim", spoken),
            ("Verbatim", spoken),
            ("Token accuracy", "mean"),
            *([("Near-verbatim", "control")] if has_control else []),
            ("Labels dropped", "realised"),
            ("Training", "time, tokens"),
        ),
        rows=tuple(rows),
    )


def _base_row(comparison: Comparison, dose: str | None, has_control: bool) -> Row:
    cell = comparison.base_extraction.get(dose) if dose is not None else None
    control = comparison.base_extraction.get("0")
    base_nll = comparison.settings[0].utility.base_heldout_nll
    cells = (
        Cell(text=format_number(base_nll)),
        Cell(text=format_change(base_change(comparison))),
        _near_cell(cell),
        _verbatim_cell(cell),
        _accuracy_cell(cell),
        *((_near_cell(control),) if has_control else ()),
        *(Cell(text="") for _ in range(2)),
    )
    head = Cell(text="Base model", detail="before training", kind="text")
    return Row(head=head, cells=cells, tone="base")


def _build_extraction(comparison: Comparison) -> Table:
    """Build the full table: every setting at every number of repetitions, with intervals."""
    rows = []
    for dose in list_doses(comparison):
        for setting in comparison.settings:
            label = label_setting(setting, comparison)
            if dose in setting.extraction:
                rows.append(_extraction_row(label, dose, setting.extraction[dose], ""))
        if dose in comparison.base_extraction:
            base = comparison.base_extraction[dose]
            rows.append(_extraction_row("Base model", dose, base, "base"))
    return Table(
        caption="Every setting at every number of repetitions",
        columns=make_headings(
            "Setting", "Documents", "Near-verbatim", "Verbatim", ("Token accuracy", "mean")
        ),
        rows=tuple(rows),
    )


def _extraction_row(label: str, dose: str, cell: ComparisonCell, tone: Literal["", "base"]) -> Row:
    return Row(
        head=Cell(text=label, detail=name_dose(dose), kind="text"),
        cells=(
            Cell(text=format_count(cell.num_documents)),
            _near_cell(cell),
            _verbatim_cell(cell),
            _accuracy_cell(cell),
        ),
        tone=tone,
    )


def _build_settings(comparison: Comparison) -> Table:
    return Table(
        caption="What was asked of each setting",
        columns=make_headings("Setting", "Seed", "Run", "Mitigations", "Overrides", "Steps"),
        rows=tuple(
            Row(
                head=Cell(text=clean_name(setting.name), kind="text"),
                cells=(
                    Cell(text=str(setting.seed)),
                    Cell(text=clean_name(setting.run), kind="text"),
                    Cell(
                        text="; ".join(format_settings(m) for m in setting.mitigations[:20])
                        or "none (plain loss)",
                        kind="text",
                    ),
                    Cell(text=format_settings(setting.overrides), kind="text"),
                    Cell(text=format_count(setting.cost.num_steps)),
                ),
            )
            for setting in comparison.settings
        ),
    )
