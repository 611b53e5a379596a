"""What each setting really buys: rates, attacks, membership and loss, means over seeds."""

from memguard.records import BLIND, AttackedBucket, Comparison, SettingResult
from memguard.report.attacks import head_attack, list_attacks, write_attack_notes
from memguard.report.cells import make_headings
from memguard.report.doses import (
    describe_group,
    group_settings,
    label_base,
    list_highest,
    mean_base_nll,
    name_dose,
    name_first,
    pick_highest,
)
from memguard.report.formatting import CI, PERCENT, format_number
from memguard.report.membership import name_score
from memguard.report.page import Cell, Row, Section, Table
from memguard.report.seed_means import (
    show_attack,
    show_cost,
    show_loss,
    show_membership,
    show_rates,
)
from memguard.report.text import clean_name

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
    rows.append(_build_base_row(comparison, asked, attacks, score))
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


def _build_base_row(comparison: Comparison, asked: bool, attacks: list[str], score: str) -> Row:
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
