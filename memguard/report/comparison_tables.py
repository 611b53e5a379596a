"""Tables of the comparison page: one row a setting, and one row a run."""

import statistics
from collections.abc import Mapping, Sequence

from memguard.records import (
    BLIND,
    AttackedBucket,
    Comparison,
    ComparisonCell,
    FrontPoint,
    SettingResult,
)
from memguard.report.audit_attacks import head_attack, list_attacks, write_attack_notes
from memguard.report.audit_membership import name_score
from memguard.report.comparison_front import name_dominators, show_risk
from memguard.report.facts import describe_dropped
from memguard.report.formatting import (
    CI,
    MISSING,
    PERCENT,
    clean_name,
    format_change,
    format_count,
    format_duration,
    format_number,
    format_of,
    format_percent,
    format_percent_range,
    format_settings,
)
from memguard.report.page import Cell, Row, Section, Table, fold_rows, make_headings
from memguard.report.seed_means import (
    average,
    base_change,
    describe_group,
    find_point,
    group_settings,
    label_base,
    label_setting,
    list_doses,
    list_highest,
    mean_base_nll,
    name_dose,
    name_first,
    pick_highest,
    show_accuracy,
    show_attack,
    show_cost,
    show_loss,
    show_membership,
    show_near,
    show_rates,
    show_verbatim,
)

_MOST_ROWS = 40
_SEEDS_NOTE = (
    "Documents of all seeds are counted together; losses, times and tokens are means over seeds. "
    "Below the loss stands its change, seed by seed, with the interval of that over seeds."
)


def build_headline(comparison: Comparison) -> Table:
    """Build the main table: risk, utility and cost of each setting, base model last."""
    groups = group_settings(comparison)
    rows = [_build_setting_row(group, comparison) for group in groups.values()]
    rows.append(_build_base_row(comparison))
    spoken = name_dose(pick_highest(comparison))
    return Table(
        caption="Risk, utility and cost of each setting",
        columns=make_headings(
            "Setting",
            ("Risk", "worst rate of extraction"),
            ("Verbatim", spoken),
            ("Near-verbatim", spoken),
            ("Token accuracy", "teacher-forced, mean"),
            ("Held-out NLL", f"nats; against '{name_first(comparison, 12)}'"),
            ("Labels dropped", "realised"),
            ("Training", "time; labels with loss"),
        ),
        rows=tuple(rows),
        notes=(_SEEDS_NOTE,) if len(groups) < len(comparison.settings) else (),
    )


def _build_setting_row(group: list[SettingResult], comparison: Comparison) -> Row:
    costs = [setting.cost for setting in group]
    name = group[0].name
    point = find_point(name, comparison)
    beaten = name_dominators(point)
    dropped = average([cost.dropped_fraction for cost in costs])
    cells = (
        show_risk(point),
        *_show_extraction([setting.extraction for setting in group], point),
        show_loss(comparison, group),
        Cell(text=describe_dropped(dropped, bool(group[0].mitigations))),
        Cell(
            text=format_duration(statistics.fmean(cost.train_s for cost in costs)),
            detail=format_count(round(statistics.fmean(c.num_supervised_tokens for c in costs))),
        ),
    )
    head = Cell(
        text=clean_name(name),
        detail=describe_group(group, comparison),
        note=f"beaten by {beaten}" if beaten else "",
        kind="text",
    )
    return Row(head=head, cells=cells, tone="dominated" if beaten else "")


def _build_base_row(comparison: Comparison) -> Row:
    cells = (
        Cell(text=""),
        *_show_extraction([comparison.base_extraction], None),
        Cell(
            text=format_number(mean_base_nll(comparison)),
            detail=format_change(base_change(comparison)),
        ),
        *(Cell(text="") for _ in range(2)),
    )
    head = Cell(text="Base model", detail=label_base(comparison), kind="text")
    return Row(head=head, cells=cells, tone="base")


def _show_extraction(
    runs: Sequence[Mapping[str, ComparisonCell]], point: FrontPoint | None
) -> list[Cell]:
    """Show what is extracted at the highest dose, and below it the same of the control."""
    cells = list_highest(runs)
    control = [run["0"] for run in runs if "0" in run]
    if not cells:
        return [Cell(text=MISSING)] * 3
    return [
        show_verbatim(cells, point),
        show_near(cells, control, point),
        show_accuracy(cells, control),
    ]


def build_extraction(comparison: Comparison) -> Table:
    """Build the full table: every setting at every number of repetitions, with intervals."""
    rows = []
    for dose in list_doses(comparison):
        for setting in comparison.settings:
            if dose in setting.extraction:
                label = label_setting(setting, comparison)
                rows.append(_build_extraction_row(label, dose, setting.extraction[dose]))
        if dose in comparison.base_extraction:
            base = comparison.base_extraction[dose]
            rows.append(_build_extraction_row("Base model", dose, base))
    shown, folded, label = fold_rows(rows, _MOST_ROWS)
    return Table(
        caption="Every setting at every number of repetitions",
        columns=make_headings(
            "Setting",
            "Documents",
            "Verbatim",
            "Near-verbatim",
            (f"90{PERCENT} teacher-forced", "not extraction"),
            ("Token accuracy", "teacher-forced"),
        ),
        rows=shown,
        more_rows=folded,
        more_label=label,
        compact=True,
    )


def _build_extraction_row(label: str, dose: str, cell: ComparisonCell) -> Row:
    near, known = cell.near_verbatim, cell.teacher_forced_90
    return Row(
        head=Cell(text=label, kind="text"),
        cells=(
            Cell(text=name_dose(dose)),
            Cell(text=_write_rate(cell.rate, cell.ci, cell.num_matched, cell.num_documents)),
            Cell(
                text="not generated"
                if near is None
                else _write_rate(near.rate, near.ci, near.num_matched, cell.num_documents)
            ),
            Cell(text=_write_rate(known.rate, known.ci, known.num_matched, cell.num_documents)),
            Cell(text=format_percent(cell.mean_token_accuracy)),
        ),
        tone="base" if label == "Base model" else "",
    )


def _write_rate(
    rate: float | None, ci: tuple[float, float] | None, num_matched: int, num_documents: int
) -> str:
    """Write a rate on one line, where there are too many rows for bars."""
    if rate is None:
        return "no documents"
    counts = format_of(num_matched, num_documents)
    return f"{counts}, {format_percent(rate)} ({format_percent_range(ci)})"


def build_settings(comparison: Comparison) -> Table:
    """Build the table of each run's settings."""
    return Table(
        caption="Run configuration",
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


# What each setting really buys: rates, attacks, membership and loss, means over seeds.

_SINGLE_NOTE = (
    f"Below each number its {CI}, of the attack cost what 10 to 90{PERCENT} of the documents cost, "
    "and what the control shows."
)
_SEVERAL_NOTE = (
    "Means over seeds. Below each number the lowest and highest seed where they differ, and what "
    "the control shows."
)


def build_gains(comparison: Comparison) -> Section | None:
    """Build the section; None where no run has anything that the other tables do not show."""
    dose = pick_highest(comparison)
    attacked = _list_attacked(comparison)
    asked = any(cell.attack_cost for one in comparison.settings for cell in one.extraction.values())
    score = _pick_score(comparison)
    if dose is None or not (asked or attacked or score):
        return None
    return Section(
        key="gains",
        title="Extraction, attacks and membership by setting",
        short_title="By setting",
        lead=(
            "Exact match alone favours the mitigation that drops most labels. From left to right: "
            "what greedy decoding extracts, what is known token by token, queries of a sampling "
            "attacker, what attacks extract verbatim, membership inference, and held-out loss.",
        ),
        tables=(_build_table(comparison, dose, asked, attacked, score),),
    )


def _list_attacked(comparison: Comparison) -> list[AttackedBucket]:
    """Return what was attacked of the documents trained most often, over all runs."""
    cells = list_highest(setting.extraction for setting in comparison.settings)
    return [one for cell in cells for one in cell.attacks]


def _pick_score(comparison: Comparison) -> str:
    """Return the first membership score that was asked; the same for all settings."""
    asked = (
        one.score
        for setting in comparison.settings
        for one in setting.membership
        if one.auc and one.score != BLIND
    )
    return next(asked, "")


def _build_table(
    comparison: Comparison, dose: str, asked: bool, attacked: list[AttackedBucket], score: str
) -> Table:
    groups = group_settings(comparison)
    attacks = list_attacks(attacked)
    rows = [_build_row(comparison, group, asked, attacks, score) for group in groups.values()]
    rows.append(_build_gain_base(comparison, asked, attacks, score))
    several = len(groups) < len(comparison.settings)
    notes = [_SEVERAL_NOTE if several else _SINGLE_NOTE, *write_attack_notes(attacked)]
    if not attacks:
        notes.append("No run was attacked; 'audit.suite: full' attacks.")
    if score:
        notes.append(
            "AUC: trained documents of all buckets against the control. Blind is the same "
            "without the model; where it is above 0.5, the AUC proves nothing."
        )
    return Table(
        caption=f"Documents {name_dose(dose)}",
        columns=make_headings(
            "Setting",
            ("Verbatim", "documents"),
            ("Near-verbatim", "documents"),
            ("Token accuracy", "teacher-forced"),
            *((("Attack cost", "log10 queries, median"),) if asked else ()),
            *(head_attack(attack, attacked) for attack in attacks),
            *((("Membership AUC", name_score(score)),) if score else ()),
            ("Held-out NLL", f"nats; against '{name_first(comparison, 12)}'"),
        ),
        rows=tuple(rows),
        notes=tuple(notes),
        compact=True,
    )


def _build_row(
    comparison: Comparison,
    group: list[SettingResult],
    asked: bool,
    attacks: list[str],
    score: str,
) -> Row:
    cells = list_highest(one.extraction for one in group)
    control = [one.extraction["0"] for one in group if "0" in one.extraction]
    below = describe_group(group, comparison)
    return Row(
        head=Cell(text=clean_name(group[0].name), detail=below, kind="text"),
        cells=(
            *show_rates(cells, control),
            *((show_cost(cells, control),) if asked else ()),
            *(show_attack(cells, control, attack) for attack in attacks),
            *((show_membership(group, score),) if score else ()),
            show_loss(comparison, group),
        ),
    )


def _build_gain_base(comparison: Comparison, asked: bool, attacks: list[str], score: str) -> Row:
    cells = list_highest([comparison.base_extraction])
    control = [comparison.base_extraction[d] for d in ("0",) if d in comparison.base_extraction]
    return Row(
        head=Cell(text="Base model", detail=label_base(comparison), kind="text"),
        cells=(
            *show_rates(cells, control),
            *((show_cost(cells, control),) if asked else ()),
            *(Cell(text="") for _ in attacks),
            *((Cell(text=""),) if score else ()),
            Cell(text=format_number(mean_base_nll(comparison))),
        ),
        tone="base",
    )
