"""Tables of the comparison page, with one row per setting or per run."""

import statistics
from collections.abc import Callable

from memguard.pages import formatting as fmt
from memguard.pages.columns import Column, Content, Heading, make_table, show_name
from memguard.pages.extraction_cost import Attack, list_attacks, write_attack_notes
from memguard.pages.membership import name_score
from memguard.pages.page import Cell, Section, Table
from memguard.records import BLIND, LEVEL_NAMES, ComparedRun, Comparison, Level, ResultRow
from memguard.report import seed_means as means
from memguard.report.audit_training import describe_dropped
from memguard.report.comparison_front import name_dominators, show_risk
from memguard.report.comparison_utility import (
    describe_chance,
    describe_left_out,
    describe_setting_utility,
    find_base_difference,
    head_utility,
    write_difference,
    write_value,
)
from memguard.report.seed_means import Setting

_MOST_ROWS = 40
_SEEDS_NOTE = (
    "Documents of all seeds are counted together; utilities, times and tokens are means over "
    "seeds. Below the utility is its mean change per seed, with the interval over seeds (of a task "
    "over items too)."
)


def _both(heading: Heading, show: Callable[[Setting], Content]) -> Column[Setting]:
    """Make a column that shows the same value of a setting and of the base model."""
    return Column(heading, show, show)


def build_headline(comparison: Comparison) -> Table:
    """Build the main table: risk, utility and cost of each setting, base model last."""
    dose = means.name_dose(means.pick_highest(comparison))
    utility = comparison.utility
    of_base = write_value(comparison.mean_utility(comparison.runs[0].setting, "base"), utility)
    change = write_difference(find_base_difference(comparison), utility)

    def name(setting: Setting) -> Cell:
        dominators = name_dominators(setting.point)
        detail = means.describe_setting(setting)
        note = f"dominated by {dominators}" if dominators else ""
        return show_name(fmt.clean_name(setting.name), detail, note)

    def show_utility(setting: Setting) -> Cell:
        value, change, ends = describe_setting_utility(setting)
        is_first = setting.name == comparison.runs[0].setting
        return Cell(value, detail="reference" if is_first else change, note=ends)

    def write_dropped(setting: Setting) -> str:
        shares = [run.cost.dropped_fraction for run in setting.runs]
        dropped = means.average([share for share in shares if share is not None])
        return describe_dropped(dropped, bool(setting.runs[0].mitigations))

    def show_training(setting: Setting) -> Cell:
        labels = statistics.fmean(run.cost.num_supervised_tokens for run in setting.runs)
        seconds = statistics.fmean(run.cost.train_s for run in setting.runs)
        return Cell(fmt.duration(seconds), detail=fmt.count(round(labels)))

    def show(setting: Setting, metric: str) -> Content:
        is_there = setting.find("extraction", metric)
        return means.show_counts(setting, metric) if is_there else fmt.MISSING

    columns: tuple[Column[Setting], ...] = (
        Column("Setting", name, lambda base: show_name(base.name, means.label_base(comparison))),
        Column(("Verdict", "of its own report"), show_level),
        Column(("Risk", "highest rate"), lambda s: show_risk(s.point, s.tables)),
        _both(("Verbatim", dose), lambda s: show(s, "verbatim")),
        _both(("Near-verbatim", dose), lambda s: show(s, "near_verbatim")),
        _both(
            ("Token accuracy", "teacher-forced, mean"),
            lambda s: means.show_accuracy(s) if s.find("extraction", "verbatim") else fmt.MISSING,
        ),
        Column(head_utility(comparison), show_utility, lambda _: Cell(of_base, detail=change)),
        Column(("Labels dropped", "measured"), write_dropped),
        Column(("Training", "time; labels"), show_training),
    )
    return make_table(
        "Risk, utility and cost of each setting",
        columns,
        means.list_settings(comparison),
        tone=lambda s: "dominated" if name_dominators(s.point) else "",
        base=means.get_base(comparison),
        notes=(
            *((_SEEDS_NOTE,) if means.has_several_seeds(comparison) else ()),
            *filter(None, (describe_chance(comparison),)),
            *describe_left_out(comparison),
        ),
        compact=True,
    )


def show_level(setting: Setting) -> Cell:
    """Show the worst level of the verdicts of a setting's runs."""
    verdicts = [run.verdict for run in setting.runs]
    worst = max(verdicts, key=lambda verdict: _BAD.index(verdict.level)).level
    number = sum(verdict.level == worst for verdict in verdicts)
    runs = "" if len(verdicts) == 1 else f"{fmt.of(number, len(verdicts))} runs"
    is_told = any(verdict.membership.level == "told-apart" for verdict in verdicts)
    return Cell(
        LEVEL_NAMES[worst],
        detail=runs,
        note="membership can be told" if is_told else "",
        kind="level",
        level=worst,
    )


_BAD: tuple[Level, ...] = ("none-found", "inconclusive", "extracted", "memorized")
"""Levels, the worst last."""


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

    def name_mitigations(run: ComparedRun) -> str:
        named = "; ".join(fmt.settings(mitigation) for mitigation in run.mitigations)
        return named or "none (plain loss)"

    columns: tuple[Column[ComparedRun], ...] = (
        Column("Setting", lambda run: fmt.clean_name(run.setting)),
        Column("Seed", lambda run: str(run.seed)),
        Column("Run", lambda run: show_name(fmt.clean_name(run.run))),
        Column("Mitigations", lambda run: show_name(name_mitigations(run))),
        Column("Overrides", lambda run: show_name(fmt.settings(run.overrides))),
        Column("Steps", lambda run: fmt.count(run.cost.num_steps)),
    )
    return make_table("Run configuration", columns, comparison.runs)


_SINGLE_NOTE = (
    f"Below each value are its {fmt.CI} (for the attack cost: the 10 to 90{fmt.PERCENT} quantiles "
    "over documents) and the control's value."
)
_SEVERAL_NOTE = (
    "Means over seeds. Below each value are the lowest and highest seed if they differ, and the "
    "control's value."
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
        short_title="By setting",
        lead=(
            "Exact match alone favours the mitigation that drops most labels. From left to right: "
            "extraction by greedy decoding, teacher-forced token accuracy, queries of a sampling "
            "attacker, verbatim extraction by attacks, membership inference, and held-out loss.",
        ),
        tables=(_build_gains_table(comparison, dose, score),),
    )


def _pick_score(comparison: Comparison) -> str:
    """Return the name of the first membership score that was computed; used for all settings."""
    scores = (
        row.parameters.removeprefix("score=")
        for row in comparison.tables.select("membership", "auc")
        if row.is_known
    )
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
        Column(
            "Setting",
            lambda s: show_name(fmt.clean_name(s.name), means.describe_setting(s)),
            lambda base: show_name(base.name, means.label_base(comparison)),
        ),
        _both(("Verbatim", "documents"), lambda s: means.show_mean_share(s, "verbatim")),
        _both(("Near-verbatim", "documents"), lambda s: means.show_mean_share(s, "near_verbatim")),
        _both(("Token accuracy", "teacher-forced"), means.show_accuracy),
        *([cost] if comparison.tables.select("sampling", "never") else []),
        *map(column_of_attack, attacks),
        *([membership] if score else []),
        Column(
            ("Held-out NLL", f"nats; from '{means.name_first(comparison, 12)}'"),
            means.show_loss,
            lambda base: fmt.number(means.get_base(comparison).mean_loss()),
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
