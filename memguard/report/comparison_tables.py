"""Tables of the comparison page, with one row per setting or per run."""

from collections.abc import Callable

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, Content, Heading, make_table, show_name
from memguard.pages.extraction_cost import Attack, list_attacks, write_attack_notes
from memguard.pages.page import Cell, Section, Table
from memguard.pages.roc import name_score, read_score
from memguard.records import BLIND, ComparedRun, Comparison, ResultRow
from memguard.records.comparison import HELDOUT, MOST_SENTENCES
from memguard.report import seed_means as means
from memguard.report.audit_training import describe_dropped, name_mitigations
from memguard.report.comparison_front import describe_unshared, show_risk
from memguard.report.comparison_utility import (
    describe_chance,
    describe_setting_utility,
    find_base_difference,
    head_utility,
    write_difference,
    write_value,
)
from memguard.report.seed_means import Setting

_MOST_ROWS = 40
_SEEDS_NOTE = (
    "Documents of all seeds are counted together; utilities are means over seeds, with the "
    "interval of their change."
)


def _both(heading: Heading, show: Callable[[Setting], Content]) -> Column[Setting]:
    """Make a column that shows the same value of a setting and of the base model."""
    return Column(heading, show, show)


def _name_setting(comparison: Comparison) -> Column[Setting]:
    return Column(
        "Setting",
        lambda s: show_name(fmt.clean_name(s.name), means.describe_setting(s)),
        lambda base: show_name(base.name, means.label_base(comparison)),
    )


def build_headline(comparison: Comparison) -> Table:
    """Build the main table: badges, risk and utility of each setting, base model last."""
    utility = comparison.utility
    first = comparison.runs[0].setting
    of_base = write_value(comparison.find_mean(utility, first, "base"), utility)
    change = write_difference(find_base_difference(comparison), utility)

    def show_utility(setting: Setting) -> Cell:
        value, change, ends = describe_setting_utility(setting)
        return Cell(value, detail="reference" if setting.name == first else change, note=ends)

    columns: tuple[Column[Setting], ...] = (
        _name_setting(comparison),
        Column(("Text", "of its own report"), lambda s: _show_badge(s, 0)),
        Column(("Membership", "of its own report"), lambda s: _show_badge(s, 1)),
        Column(
            ("Came out", "documents, any method"),
            lambda s: fmt.count(s.point.num_findings if s.point else None),
        ),
        Column(("Risk", "highest rate"), lambda s: show_risk(s.point)),
        Column(head_utility(comparison), show_utility, lambda _: Cell(of_base, detail=change)),
    )
    return make_table(
        "Risk and utility of each setting",
        columns,
        means.list_settings(comparison),
        base=means.get_base(comparison),
        notes=(
            *describe_unshared(comparison),
            *((_SEEDS_NOTE,) if means.has_several_seeds(comparison) else ()),
            *filter(None, (describe_chance(comparison),)),
            *map(fmt.clean_text, comparison.tasks_left_out),
        ),
        shown=MOST_SENTENCES,
        compact=True,
    )


def _show_badge(setting: Setting, place: int) -> Cell:
    """Show the badge of the text or of membership, the worst of the setting's runs."""
    assert setting.point is not None, "only for settings, not for the base model"
    badge = setting.point.badges[place]
    state = fmt.clean_name(badge.state[:1].upper() + badge.state[1:])
    return Cell(state, detail=fmt.clean_name(badge.detail), kind="level", level=badge.colour)


_Extracted = tuple[Setting, str, int]
"""One run, or the base model; its label; a number of repetitions."""


def build_extraction(comparison: Comparison) -> Table:
    """Build the full table: every setting at every number of repetitions, with intervals."""
    base = means.get_base(comparison)
    named = [
        (Setting(run.setting, [run], comparison), means.label_run(run, comparison))
        for run in comparison.runs
    ]
    measured: list[_Extracted] = [
        (setting, label, dose)
        for dose in means.list_doses(comparison)
        for setting, label in (*named, (base, base.name))
        if setting.find("extraction", "verbatim", dose)
    ]

    def column_of(heading: Heading, metric: str) -> Column[_Extracted]:
        def write(row: _Extracted) -> str:
            return _write_share(*row[0].find("extraction", metric, row[2]))

        return Column(heading, write)

    columns: tuple[Column[_Extracted], ...] = (
        Column("Setting", lambda row: row[1]),
        Column("Documents", lambda row: means.name_dose(row[2])),
        column_of("Verbatim", "verbatim"),
        column_of("Near-verbatim", "near_verbatim"),
        column_of((f"90{fmt.PERCENT} teacher-forced", "not extraction"), "teacher_forced_90"),
        column_of(("Token accuracy", "teacher-forced"), "token_accuracy"),
    )
    return make_table(
        "Every setting at every number of repetitions",
        columns,
        measured,
        tone=lambda row: "base" if row[0].is_base else "",
        shown=_MOST_ROWS,
        compact=True,
    )


def _write_share(row: ResultRow | None = None) -> str:
    """Format a value on one line; this table has too many rows for bars."""
    if row is None or not means.is_measured(row):
        return fmt.MISSING if row is None or row.statistic == "mean" else "not generated"
    if row.statistic == "mean":
        return fmt.percent(row.value)
    if not row.is_known:
        return "no documents"
    return f"{fmt.counts(row)}, {fmt.percent(row.value)} ({fmt.percent_range(row.ci)})"


def build_settings(comparison: Comparison) -> Table:
    """Build the table of each run's settings."""

    def show_training(run: ComparedRun) -> Cell:
        labels = fmt.count(run.cost.num_supervised_tokens)
        return Cell(fmt.duration(run.cost.train_s), detail=labels)

    columns: tuple[Column[ComparedRun], ...] = (
        Column("Setting", lambda run: fmt.clean_name(run.setting)),
        Column("Seed", lambda run: str(run.seed)),
        Column("Run", lambda run: show_name(fmt.clean_name(run.run))),
        Column("Mitigations", lambda run: show_name(name_mitigations(run.mitigations))),
        Column("Overrides", lambda run: show_name(fmt.settings(run.overrides))),
        Column(
            ("Labels dropped", "measured"),
            lambda run: describe_dropped(run.cost.dropped_fraction, bool(run.mitigations)),
        ),
        Column(("Training", "time; labels"), show_training),
        Column("Steps", lambda run: fmt.count(run.cost.num_steps)),
    )
    return make_table("Run configuration", columns, comparison.runs)


_SINGLE_NOTE = (
    f"Below each value are its {fmt.CI} (for the attack cost: the 10 to 90{fmt.PERCENT} quantiles "
    "over documents, and the median query floor) and the control's value."
)
_SEVERAL_NOTE = (
    "Means over seeds. Below each value are the lowest and highest seed if they differ, the query "
    "floor of the attack cost, and the control's value."
)


def build_gains(comparison: Comparison) -> Section | None:
    """Build the section; None if no run has results that the other tables do not show."""
    dose = means.pick_highest(comparison)
    tables, score = comparison.tables, _pick_score(comparison)
    if dose is None or not (tables.select("sampling", "never") or list_attacks(tables) or score):
        return None
    return Section(
        key="gains",
        title="Extraction, attacks and membership by setting",
        lead=(
            "Exact match alone favours the mitigation that drops most labels. From left to right: "
            "extraction by greedy decoding, teacher-forced token accuracy, queries of a sampling "
            "attacker, verbatim extraction by attacks, membership inference, and held-out loss.",
        ),
        tables=(_build_gains_table(comparison, dose, score),),
    )


def _pick_score(comparison: Comparison) -> str:
    """Return the name of the first membership score that was computed; used for all settings."""
    aucs = comparison.tables.select("membership", "auc")
    scores = (read_score(row) for row in aucs if row.is_known)
    return next((score for score in scores if score != BLIND), "")


def _build_gains_table(comparison: Comparison, dose: int, score: str) -> Table:
    """Build the table; attack cost and membership only if they were measured."""
    attacks = list_attacks(comparison.tables)

    def column_of_attack(attack: Attack) -> Column[Setting]:
        return Column(attack.heading, lambda s: means.show_attack(s, attack))

    cost: Column[Setting] = _both(("Attack cost", "log10 queries, median"), means.show_cost)
    membership: Column[Setting] = Column(
        ("Membership AUC", name_score(score)), lambda s: means.show_membership(s, score)
    )
    columns: tuple[Column[Setting], ...] = (
        _name_setting(comparison),
        _both(("Verbatim", "documents"), lambda s: means.show_mean_share(s, "verbatim")),
        _both(("Near-verbatim", "documents"), lambda s: means.show_mean_share(s, "near_verbatim")),
        _both(("Token accuracy", "teacher-forced"), means.show_accuracy),
        *([cost] if comparison.tables.select("sampling", "never") else []),
        *map(column_of_attack, attacks),
        *([membership] if score else []),
        Column(
            ("Held-out loss", f"nats; from '{means.name_first(comparison, 12)}'"),
            means.show_loss,
            lambda base: fmt.number(comparison.find_mean(HELDOUT, base.runs[0].setting, "base")),
        ),
    )
    notes = [_SEVERAL_NOTE if means.has_several_seeds(comparison) else _SINGLE_NOTE]
    notes += write_attack_notes(attacks)
    if not attacks:
        notes.append("No attacks ran; 'audit.suite: full' includes them.")
    if score:
        notes.append(
            "AUC: trained documents of all buckets against the control. Blind is the baseline "
            "without model access; if it is above 0.5, the AUC proves nothing. An interval wholly "
            "below 0.5 tells the documents apart too, with the opposite sign."
        )
    return make_table(
        f"Documents {means.name_dose(dose)}",
        columns,
        means.list_settings(comparison),
        base=means.get_base(comparison),
        notes=notes,
        compact=True,
    )
