"""The parts of the page for signing: what was trained, asked, found, judged and not tested.

Every list is short, the worst first, and says how many it leaves out: the page is one sheet.
"""

from collections.abc import Sequence

from memguard.pages import formatting as fmt
from memguard.pages.judgements import describe_judgement, sort_acceptances, worst_first
from memguard.pages.page import Cell, Fact, Row, Table
from memguard.records import RISK_NAMES, AuditReport, BucketRow, ResultRow
from memguard.records.gate import GATE, Acceptance, GateResult, Judgement, Outcome, ReleaseContext
from memguard.report.attack_classes import CLASSES, AttackClass, describe_class, rank_row
from memguard.report.facts import describe_privacy

OUTCOME_LEVELS: dict[Outcome, str] = {
    "fail": "memorized",
    "cannot-be-judged": "extracted",
    "inconclusive": "inconclusive",
    "pass": "none-found",
}
"""Level whose icon and colour an outcome has."""
_NAME, _SHORT_NAME, _TEXT, _RULE, _REASON = 40, 20, 100, 70, 40
_MOST_GROUPS, _MOST_JUDGEMENTS, _MOST_ACCEPTED, _MOST_NOT_RUN, _MOST_PROBES = 3, 5, 3, 2, 9
_TRAINED = ("trained", "forget")
_RULE_COLUMNS = ("Rule", "Outcome", "Counts", "Value", "Interval", "Limit", "Documents needed")
NO_PROBE = (
    "No probe of memguard tests attribute inference, model inversion, reconstruction from weights "
    "or gradients, theft of the weights, or facts that the model repeats in other words."
)
RELEASES: dict[ReleaseContext | None, tuple[str, str]] = {
    "internal": (
        "internal",
        "Attackers are the people who can reach the model. Who that is, and filters around the "
        "model, were not part of the audit.",
    ),
    "api": (
        "API",
        "Attackers send queries: what they obtain within a number of queries counts. Limits and "
        "filters of the API were not part of the audit.",
    ),
    "open-weights": (
        "open weights",
        "Anyone can query the model without limit, read its probabilities and attack its weights. "
        "The audit did not attack the weights themselves, and a release cannot be withdrawn.",
    ),
    None: (
        "not declared",
        "The policy does not declare how the model will be released ('release: internal', 'api' or "
        "'open-weights'). Read the table as if anyone had the weights.",
    ),
}
"""Name of a release context, and what depends on it."""


def describe_trained(report: AuditReport) -> tuple[Fact, ...]:
    """List what was trained: model, base, adapter, mitigations, steps and documents."""
    model, training = report.model, report.training
    adapter, base = model.adapter, model.base or (model.adapter.base if model.adapter else None)
    facts = [
        Fact(
            "Model",
            fmt.clean_name(fmt.shorten_place(model.name), _NAME),
            detail=f"{fmt.count(model.num_parameters)} parameters, weights "
            f"{fmt.hash(model.weights_sha256)}",
        ),
        Fact("Base", fmt.clean_name(fmt.shorten_place(base), _NAME) if base else "not scored"),
    ]
    if adapter is not None:
        facts.append(Fact("Adapter", fmt.clean_name(adapter.description, _NAME)))
    if training is None:
        facts.append(Fact("Training", "not by memguard: steps and mitigations are not known"))
    else:
        named = "; ".join(fmt.settings(m) for m in training.mitigations)
        facts.append(
            Fact("Mitigations", fmt.clean_text(named, _TEXT) if named else "none (plain loss)")
        )
        facts.append(
            Fact(
                "Training",
                f"{fmt.count(training.num_steps)} steps, "
                f"{fmt.count(training.num_supervised_tokens)} supervised tokens",
            )
        )
        facts += [Fact("Privacy", fact.value) for fact in describe_privacy(training)]
    facts.append(Fact("Documents", _count_documents(report)))
    return tuple(facts)


def _count_documents(report: AuditReport) -> str:
    buckets = [bucket for bucket in report.tables.buckets if bucket.role in _TRAINED]
    documents = sum(bucket.num_documents for bucket in buckets)
    groups = f"{len(buckets):,} group{'' if len(buckets) == 1 else 's'}"
    left_out = sum(
        b.num_too_short + b.num_cut_too_short + b.num_nothing_supervised + b.num_not_sampled
        for b in buckets
    )
    more = f"; {left_out:,} more were not audited" if left_out else ""
    return f"{documents:,} trained ones audited, in {groups}{more}"


def describe_asked(report: AuditReport) -> tuple[Fact, ...]:
    """List what was asked: probes, documents, continuation and control."""
    method, control = report.method, report.tables.control
    prefix = method.prefix_tokens
    given = "the whole true text" if prefix is None else f"{prefix:,} true tokens"
    unseen = "none: nothing shows what chance explains"
    if control is not None:
        unseen = f"{control.num_documents:,} documents never trained"
    return (
        Fact("Suite", f"{fmt.clean_name(method.suite, _NAME)}, version {method.suite_version:,}"),
        Fact("Probes", _list_probes(report), detail="(number of documents)"),
        Fact("Asked for", f"{method.continuation_tokens:,} tokens, given {given} before"),
        Fact("Control", unseen),
        Fact("Audited", fmt.time(report.created)),
    )


def _list_probes(report: AuditReport) -> str:
    """List the probes that ran with their numbers: ``extraction 160, canaries 32 canaries``."""
    ran = [run for run in report.probe_runs if run.num_documents is not None]
    named = [
        f"{fmt.clean_name(run.name, _SHORT_NAME)} {run.num_documents:,}"
        + ("" if run.counted == "documents" else f" {run.counted}")
        for run in ran[:_MOST_PROBES]
    ]
    if len(ran) > _MOST_PROBES:
        named.append(f"and {len(ran) - _MOST_PROBES:,} more")
    return ", ".join(named) or "none ran"


def build_found(report: AuditReport) -> Table | None:
    """Build the table of the trained groups with the highest upper bounds, beside the control."""
    worst = [(b, *found) for b in report.tables.buckets if (found := _find_risk(report, b))]
    worst.sort(key=lambda item: rank_row(item[2]), reverse=True)
    if not worst:
        return None
    control = report.tables.control
    rows = tuple(
        Row(
            head=Cell(fmt.clean_name(bucket.bucket, _SHORT_NAME), kind="text"),
            cells=(
                Cell(fmt.clean_text(_name_risk(risk), 24), kind="text"),
                _show_rate(row),
                _show_rate(_find_same(report, row, control.bucket if control else None)),
                _show_rate(_find_same(report, row, bucket.bucket, model="base")),
            ),
        )
        for bucket, risk, row in worst[:_MOST_GROUPS]
    )
    more = len(worst) - len(rows)
    unmeasured = sum(bucket.role in _TRAINED for bucket in report.tables.buckets) - len(worst)
    notes = (
        f"And {more:,} more groups in report.json, none with a higher upper bound." if more else "",
        f"{unmeasured:,} trained groups have no rate: nothing was measured of them."
        if unmeasured > 1
        else "1 trained group has no rate: nothing was measured of it."
        if unmeasured
        else "",
    )
    return Table(
        caption="Trained groups, that with the highest upper bound first",
        columns=tuple(map(Cell, ("Group", "Method", "Trained", "Unseen control", "Base model"))),
        rows=rows,
        notes=tuple(filter(None, notes)),
        compact=True,
    )


def _find_risk(report: AuditReport, bucket: BucketRow) -> tuple[str, ResultRow] | None:
    if bucket.role not in _TRAINED:
        return None
    risks = report.tables.risks(bucket.bucket)
    return max(risks.items(), key=lambda item: rank_row(item[1]), default=None)


def _name_risk(risk: str) -> str:
    return {str(known): name for known, name in RISK_NAMES.items()}.get(risk, risk)


def _find_same(
    report: AuditReport, row: ResultRow, bucket: str | None, model: str = "trained"
) -> ResultRow | None:
    if bucket is None:
        return None
    return report.tables.find(row.probe, row.metric, bucket, parameters=row.parameters, model=model)


def _show_rate(row: ResultRow | None) -> Cell:
    if row is None or row.value is None:
        return Cell("not measured")
    return Cell(f"{fmt.counts(row)} ({fmt.percent(row.value)}), {fmt.percent_range(row.ci)}")


def build_judged(result: GateResult, report: AuditReport) -> Table | None:
    """Build the table of the judgements that decide."""
    judgements = worst_first(result)
    if not judgements:
        return None
    shown = judgements[:_MOST_JUDGEMENTS]
    more = len(judgements) - len(shown)
    return Table(
        caption="Rules of the policy, those that decide first",
        columns=tuple(map(Cell, _RULE_COLUMNS)),
        rows=tuple(_show_judgement(judgement, report) for judgement in shown),
        notes=(f"And {more:,} more in {GATE}.",) if more else (),
        compact=True,
    )


def _show_judgement(judgement: Judgement, report: AuditReport) -> Row:
    text = describe_judgement(judgement, report.tables, _RULE)
    numbers = (text.counts, text.value, text.interval or fmt.MISSING, text.limit, text.needed)
    return Row(
        head=Cell(text.name, kind="text"),
        cells=(
            Cell(text.outcome, kind="level", level=OUTCOME_LEVELS[judgement.outcome]),
            *map(Cell, numbers),
        ),
    )


def list_not_tested(report: AuditReport) -> tuple[str, ...]:
    """Return what the audit did not test, as sentences."""
    sentences = (
        [_name_not_run(report)] if any(run.reason_not_run for run in report.probe_runs) else []
    )
    if report.tables.control is None:
        sentences.append("There was no control of unseen documents.")
    if report.model.base is None:
        sentences.append("The base model was not scored.")
    return (*sentences, NO_PROBE)


def _name_not_run(report: AuditReport) -> str:
    not_run = [run for run in report.probe_runs if run.reason_not_run is not None]
    named = [
        f"{fmt.clean_name(run.name, _SHORT_NAME)} "
        f"({fmt.clean_text(fmt.hide_paths(run.reason_not_run or ''), _REASON)})"
        for run in not_run[:_MOST_NOT_RUN]
    ]
    if len(not_run) > _MOST_NOT_RUN:
        named.append(f"and {len(not_run) - _MOST_NOT_RUN:,} more in report.json")
    return f"Probes that did not run: {'; '.join(named)}."


def build_accepted(result: GateResult) -> Table | None:
    """Build the table of accepted findings, those that no longer hold first."""
    accepted = sort_acceptances(result)
    if not accepted:
        return None
    shown = accepted[:_MOST_ACCEPTED]
    more = len(accepted) - len(shown)
    return Table(
        caption="Accepted findings",
        columns=tuple(map(Cell, ("Finding", "State", "By", "Until", "Why"))),
        rows=tuple(_show_acceptance(entry) for entry in shown),
        notes=(f"And {more:,} more in {GATE}.",) if more else (),
        compact=True,
    )


def _show_acceptance(entry: Acceptance) -> Row:
    text_hmac, _, probe = entry.finding.partition(":")
    named = f"{fmt.hash(text_hmac)}:{fmt.clean_text(probe, 12)}" if probe else fmt.hash(text_hmac)
    states = {
        "accepted": ("accepted", "low"),
        "expired": ("expired: counts again", "warning"),
        "not-found": ("not in this audit", "low"),
    }
    text, level = states[entry.state]
    until = "without end" if entry.until is None else fmt.clean_text(entry.until, 12)
    return Row(
        head=Cell(named, kind="hash"),
        cells=(
            Cell(text, kind="level", level=level),
            Cell(fmt.clean_name(entry.by, 20), kind="text"),
            Cell(until),
            Cell(fmt.clean_text(entry.reason, 36), kind="text"),
        ),
    )


def build_classes(
    report: AuditReport,
    release: ReleaseContext | None,
    classes: Sequence[AttackClass] = CLASSES,
) -> Table:
    """Build the table of attack classes with their quotations and results for a release."""
    return Table(
        caption="Attack classes, in the words of their sources",
        columns=tuple(map(Cell, ("Class", "Quotation", "Tested, with the highest upper bound"))),
        rows=tuple(
            Row(
                head=Cell(attack.name, kind="text"),
                cells=(
                    Cell(
                        f"“{attack.quote}”",
                        detail=f"{attack.source.short}, {attack.source.place}",
                        kind="text",
                    ),
                    Cell(describe_class(attack, report, release), kind="text"),
                ),
            )
            for attack in classes
        ),
        compact=True,
    )
