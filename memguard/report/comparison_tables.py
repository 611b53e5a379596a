"""Tables of the comparison page, with one row per setting or per run."""

import statistics
from collections.abc import Callable

from memguard.records import (
    BLIND,
    LEVEL_NAMES,
    AttackedBucket,
    Comparison,
    ComparisonCell,
    Level,
    MatchedShare,
    SettingResult,
)
from memguard.report import formatting as fmt
from memguard.report.audit_attacks import head_attack, list_attacks, write_attack_notes
from memguard.report.audit_membership import name_score
from memguard.report.comparison_front import name_dominators, show_risk
from memguard.report.facts import describe_dropped
from memguard.report.page import Cell, Section, Table
from memguard.report.seed_means import (
    Greedy,
    Setting,
    average,
    base_change,
    describe_setting,
    get_base,
    has_several_seeds,
    label_base,
    label_setting,
    list_doses,
    list_highest,
    list_settings,
    mean_base_nll,
    name_dose,
    name_first,
    pick_highest,
    show_accuracy,
    show_attack,
    show_cost,
    show_counts,
    show_loss,
    show_mean_share,
    show_membership,
)
from memguard.report.tables import (
    Column,
    Content,
    Heading,
    make_table,
    show_name,
)

_MOST_ROWS = 40
_SEEDS_NOTE = (
    "Documents of all seeds are counted together; losses, times and tokens are means over seeds. "
    "Below the loss is its mean change per seed, with the interval over seeds."
)


_BASE = "Base model"


def _both(heading: Heading, show: Callable[[Setting], Content]) -> Column[Setting]:
    """Make a column that shows the same value of a setting and of the base model."""
    return Column(heading, show, show)


def build_headline(comparison: Comparison) -> Table:
    """Build the main table: risk, utility and cost of each setting, base model last."""
    dose = name_dose(pick_highest(comparison))
    nll, change = fmt.number(mean_base_nll(comparison)), fmt.change(base_change(comparison))

    def name(setting: Setting) -> Cell:
        dominators = name_dominators(setting.point)
        detail = describe_setting(setting, comparison)
        note = f"dominated by {dominators}" if dominators else ""
        return show_name(fmt.clean_name(setting.name), detail, note)

    def show(setting: Setting, metric: Greedy) -> Content:
        return show_counts(setting, metric) if setting.cells else fmt.MISSING

    columns: tuple[Column[Setting], ...] = (
        Column("Setting", name, lambda base: show_name(base.name, label_base(comparison))),
        Column(("Verdict", "of its own report"), show_level),
        Column(("Risk", "highest rate"), lambda s: show_risk(s.point)),
        _both(("Verbatim", dose), lambda s: show(s, "verbatim")),
        _both(("Near-verbatim", dose), lambda s: show(s, "near_verbatim")),
        _both(
            ("Token accuracy", "teacher-forced, mean"),
            lambda s: show_accuracy(s) if s.cells else fmt.MISSING,
        ),
        Column(
            ("Held-out NLL", f"nats; from '{name_first(comparison, 12)}'"),
            lambda s: show_loss(comparison, s),
            lambda base: Cell(nll, detail=change),
        ),
        Column(("Labels dropped", "measured"), _write_dropped),
        Column(("Training", "time; labels"), _show_training),
    )
    return make_table(
        "Risk, utility and cost of each setting",
        columns,
        list_settings(comparison),
        tone=lambda s: "dominated" if name_dominators(s.point) else "",
        base=get_base(comparison),
        notes=(_SEEDS_NOTE,) if has_several_seeds(comparison) else (),
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


def _write_dropped(setting: Setting) -> str:
    dropped = average([run.cost.dropped_fraction for run in setting.runs])
    return describe_dropped(dropped, bool(setting.runs[0].mitigations))


def _show_training(setting: Setting) -> Cell:
    labels = statistics.fmean(run.cost.num_supervised_tokens for run in setting.runs)
    return Cell(
        fmt.duration(statistics.fmean(run.cost.train_s for run in setting.runs)),
        detail=fmt.count(round(labels)),
    )


_Extracted = tuple[str, str, ComparisonCell]
"""Name of a setting or of the base model, number of repetitions, and its extraction rates."""


def build_extraction(comparison: Comparison) -> Table:
    """Build the full table: every setting at every number of repetitions, with intervals."""
    named = [(label_setting(run, comparison), run.extraction) for run in comparison.settings]
    named.append((_BASE, comparison.base_extraction))
    measured = [
        (name, dose, extraction[dose])
        for dose in list_doses(comparison)
        for name, extraction in named
        if dose in extraction
    ]

    def write_share(share: MatchedShare | None, cell: ComparisonCell) -> str:
        """Format a rate on one line; this table has too many rows for bars."""
        if share is None:
            return "not generated"
        if share.rate is None:
            return "no documents"
        counts = fmt.of(share.num_matched, cell.num_documents)
        counts += f" ({fmt.texts(share.texts)})" if share.texts else ""
        return f"{counts}, {fmt.percent(share.rate)} ({fmt.percent_range(share.ci)})"

    columns: tuple[Column[_Extracted], ...] = (
        Column("Setting", lambda row: row[0]),
        Column("Documents", lambda row: name_dose(row[1])),
        Column("Verbatim", lambda row: write_share(row[2].verbatim, row[2])),
        Column("Near-verbatim", lambda row: write_share(row[2].near_verbatim, row[2])),
        Column(
            (f"90{fmt.PERCENT} teacher-forced", "not extraction"),
            lambda row: write_share(row[2].teacher_forced_90, row[2]),
        ),
        Column(
            ("Token accuracy", "teacher-forced"),
            lambda row: fmt.percent(row[2].mean_token_accuracy),
        ),
    )
    return make_table(
        "Every setting at every number of repetitions",
        columns,
        measured,
        tone=lambda row: "base" if row[0] == _BASE else "",
        shown=_MOST_ROWS,
        compact=True,
    )


def build_settings(comparison: Comparison) -> Table:
    """Build the table of each run's settings."""

    def name_mitigations(run: SettingResult) -> str:
        named = "; ".join(fmt.settings(mitigation) for mitigation in run.mitigations[:20])
        return named or "none (plain loss)"

    columns: tuple[Column[SettingResult], ...] = (
        Column("Setting", lambda run: fmt.clean_name(run.name)),
        Column("Seed", lambda run: str(run.seed)),
        Column("Run", lambda run: show_name(fmt.clean_name(run.run))),
        Column("Mitigations", lambda run: show_name(name_mitigations(run))),
        Column("Overrides", lambda run: show_name(fmt.settings(run.overrides))),
        Column("Steps", lambda run: fmt.count(run.cost.num_steps)),
    )
    return make_table("Run configuration", columns, comparison.settings)


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
    dose = pick_highest(comparison)
    attacked = _list_attacked(comparison)
    has_cost = any(cell.attack_cost for s in comparison.settings for cell in s.extraction.values())
    score = _pick_score(comparison)
    if dose is None or not (has_cost or attacked or score):
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
        tables=(_build_gains_table(comparison, dose, has_cost, attacked, score),),
    )


def _list_attacked(comparison: Comparison) -> list[AttackedBucket]:
    """Return the attacks on the documents trained most often, over all runs."""
    cells = list_highest(setting.extraction for setting in comparison.settings)
    return [attack for cell in cells for attack in cell.attacks]


def _pick_score(comparison: Comparison) -> str:
    """Return the name of the first membership score that was computed; used for all settings."""
    scores = (
        row.score
        for setting in comparison.settings
        for row in setting.membership
        if row.auc and row.score != BLIND
    )
    return next(scores, "")


def _build_gains_table(
    comparison: Comparison, dose: str, has_cost: bool, attacked: list[AttackedBucket], score: str
) -> Table:
    """Build the table; attack cost and membership only if they were measured."""

    def column_of_attack(attack: str) -> Column[Setting]:
        heading = head_attack(attack, attacked)
        return Column(heading, lambda s: show_attack(s, attack))

    attacks = list_attacks(attacked)
    cost: Column[Setting] = _both(
        ("Attack cost", "log10 queries, median"), lambda s: show_cost(s.cells, s.control)
    )
    membership: Column[Setting] = Column(
        ("Membership AUC", name_score(score)), lambda s: show_membership(s, score)
    )
    columns: tuple[Column[Setting], ...] = (
        Column(
            "Setting",
            lambda s: show_name(fmt.clean_name(s.name), describe_setting(s, comparison)),
            lambda base: show_name(base.name, label_base(comparison)),
        ),
        _both(("Verbatim", "documents"), lambda s: show_mean_share(s, "verbatim")),
        _both(("Near-verbatim", "documents"), lambda s: show_mean_share(s, "near_verbatim")),
        _both(("Token accuracy", "teacher-forced"), show_accuracy),
        *([cost] if has_cost else []),
        *map(column_of_attack, attacks),
        *([membership] if score else []),
        Column(
            ("Held-out NLL", f"nats; from '{name_first(comparison, 12)}'"),
            lambda s: show_loss(comparison, s),
            lambda base: fmt.number(mean_base_nll(comparison)),
        ),
    )
    notes = [_SEVERAL_NOTE if has_several_seeds(comparison) else _SINGLE_NOTE]
    notes += write_attack_notes(attacked)
    if not attacks:
        notes.append("No attacks ran; 'audit.suite: full' includes them.")
    if score:
        notes.append(
            "AUC: trained documents of all buckets against the control. Blind is the baseline "
            "without model access; if it is above 0.5, the AUC proves nothing. An interval wholly "
            "below 0.5 tells the documents apart too, with the opposite sign."
        )
    return make_table(
        f"Documents {name_dose(dose)}",
        columns,
        list_settings(comparison),
        base=get_base(comparison),
        notes=notes,
        compact=True,
    )
