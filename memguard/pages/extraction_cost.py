"""The section "Extraction cost": attack cost and attacks.

The first table shows the extraction rates, the attack cost and one column for each attack; the
second one lists each attack with its intervals. The section belongs to two probes, sampling and
attacks, and is drawn from the rows of whichever of them ran. An attack is any probe's row of metric
``any_answer``: whether one of several answers is right. Its settings are its name and the number of
answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memguard.pages import formatting as fmt
from memguard.pages.columns import (
    Column,
    Heading,
    make_table,
    name_bucket,
    show_missing,
    show_name,
    show_row,
    tone_of_bucket,
)
from memguard.pages.facts import explain_absence, name_scheme
from memguard.pages.formatting import NEVER
from memguard.pages.page import Cell, Fact, Section, Table
from memguard.pages.pivot import ResultColumn, bucket_table
from memguard.records import (
    MIN_FOR_QUANTILES,
    WITHIN_LIMIT,
    AuditReport,
    BucketRow,
    MetricRow,
    ResultRow,
    Tables,
    write_parameters,
)

_ANY_ANSWER = "any_answer"
_NAMES = {"fill": "Fill in dropped tokens"}
_QUERIES = 1_000
"""Number of queries for which documents are counted beside the limit."""
_LEAD = (
    "Exact match understates memorization: one wrong token makes a document count as not "
    "extracted, whether sampling needs a hundred queries to extract it or 10³⁰.",
    "The attack cost is the number of queries after which the true continuation has been "
    "generated with a probability of one half, by the cheapest decoding method that ran. The "
    "attack that fills in dropped tokens assumes an attacker who knows which tokens the "
    "mitigation dropped and searches for these only. Attack cost and attacks count verbatim text "
    "only.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """An attack, with one or several numbers of answers."""

    attack: str
    kinds: tuple[MetricRow, ...]
    """What its rows of metric ``any_answer`` mean, one for each number of answers."""

    @property
    def name(self) -> str:
        """The display name."""
        return _NAMES.get(self.attack) or fmt.clean_words(self.attack)

    @property
    def heading(self) -> tuple[str, str]:
        """The heading of a column: its name and the number of answers counted."""
        counts = {_count_answers(kind) for kind in self.kinds}
        count = counts.pop() if len(counts) == 1 else None
        if count is None:
            return self.name, "any answer"
        return self.name, "one answer" if count == 1 else f"any of {count:,} answers"

    def find(
        self, tables: Tables, bucket: str, metric: str = _ANY_ANSWER, **key: Any
    ) -> ResultRow | None:
        """Return the row of one of its metrics; None if the attack did not run on the bucket."""
        found = (
            tables.find(kind.probe, metric, bucket, parameters=kind.parameters, **key)
            for kind in self.kinds
        )
        return next((row for row in found if row is not None), None)


def list_attacks(tables: Tables) -> list[Attack]:
    """Return the attacks that have results, in the order of the record."""
    places = dict.fromkeys(
        (row.probe, row.parameters) for row in tables.results if row.metric == _ANY_ANSWER
    )
    kinds: dict[str, list[MetricRow]] = {}
    for probe, parameters in places:
        metric = tables.find_metric(probe, _ANY_ANSWER, parameters)
        if metric is not None:
            kinds.setdefault(str(metric.settings.get("attack", "")), []).append(metric)
    return [Attack(attack=name, kinds=tuple(rows)) for name, rows in kinds.items()]


def _count_answers(kind: MetricRow) -> int | None:
    """Return the answers for each document; None if they are not recorded."""
    answers = kind.settings.get("answers")
    return answers if isinstance(answers, int) else None


def write_attack_notes(attacks: Sequence[Attack]) -> tuple[str, ...]:
    """Return the record's notes on attacks, each once."""
    notes = (
        f"{attack.name}: {fmt.clean_text(kind.note)}"
        for attack in attacks
        for kind in attack.kinds
        if kind.note
    )
    return tuple(dict.fromkeys(notes))


def build_extraction_cost(report: AuditReport) -> Section:
    """Build the section; if nothing was measured, it gives the reason."""
    tables = report.tables
    attacks = list_attacks(tables)
    has_cost = bool(tables.select("sampling", "never"))
    lead = [*(_LEAD if has_cost or attacks else ()), _summarise(report, attacks)]
    lead.append(_describe_floor(report, report.verdict.bucket or ""))
    if not has_cost:
        lead.append(explain_absence(report, "sampling", "does not measure the cost of sampling"))
    if not attacks:
        lead.append(explain_absence(report, "attacks", "runs no attacks"))
    table = _build_rates(report, attacks, has_cost) if has_cost or attacks else None
    return Section(
        key="attacks",
        title="Extraction cost",
        lead=tuple(filter(None, lead)),
        tables=tuple(filter(None, (table, _build_attacks(report, attacks)))),
        brief=_write_brief(report),
    )


def _write_brief(report: AuditReport) -> tuple[Fact, ...]:
    """Return the median cost in the bucket of the verdict and in the control, for cards."""
    control = report.tables.control
    costs = []
    for bucket in dict.fromkeys((report.verdict.bucket, control.bucket if control else "")):
        median = _find_cost(report.tables, bucket, "median")
        if median is not None and median.num_documents >= MIN_FOR_QUANTILES:
            costs.append(f"{fmt.clean_name(bucket)} {fmt.cost(median)}")
    text = (
        "Attack cost, median queries until the true continuation is generated with a probability "
        f"of one half: {'; '.join(costs)}."
    )
    return (Fact("", text),) if costs else ()


def _find_cost(tables: Tables, bucket: str | None, statistic: str, **key: str) -> ResultRow | None:
    return tables.find("sampling", "log10_queries", bucket or "", statistic=statistic, **key)


# -- sentences -------------------------------------------------------------------------------------


def _summarise(report: AuditReport, attacks: Sequence[Attack]) -> str:
    """Summarise attack cost and best attack for the bucket of the verdict."""
    tables, bucket = report.tables, report.tables.find_bucket(report.verdict.bucket)
    if bucket is None:
        return ""
    name, sentences = fmt.clean_name(bucket.bucket, 40), []
    cost = _find_cost(tables, bucket.bucket, "median")
    if cost is not None and cost.num_documents:
        sentences.append(f"In {name}, {_describe_cost(report, cost)}.")
    attacked = [(row, one) for one in attacks if (row := one.find(tables, bucket.bucket))]
    if attacked:
        row, best = max(attacked, key=lambda pair: pair[0].num_matched or 0)
        place = "" if sentences else f" in {name}"
        sentences.append(
            f"The attack that extracts most{place} is '{best.name}': "
            f"{fmt.of(row.num_matched, row.num_documents)} documents."
            if row.num_matched
            else f"No attack extracts any of the {row.num_documents:,} attacked documents{place}."
        )
    return " ".join(sentences)


def _describe_cost(report: AuditReport, median: ResultRow) -> str:
    """Describe the attack cost of a bucket, and its median with the base model and the control."""
    tables, control = report.tables, report.tables.control
    within = tables.find("sampling", "within_limit", median.bucket)
    if within is None:
        counted = "the extracted documents are not counted"
    else:
        counted = f"{fmt.of(*within.counts)} documents could be obtained {WITHIN_LIMIT}"
    if median.num_documents >= MIN_FOR_QUANTILES:
        half = "more than half of the documents can never be generated"
        if median.value is not None:
            noun = "query" if (cost := fmt.cost(median)) == "1" else "queries"
            half = f"half of the documents cost at most {cost}{fmt.NBSP}{noun}"
        counted += f"; {half}"
    others = {"base model": _find_cost(tables, median.bucket, "median", model="base")}
    if control is not None and control.bucket != median.bucket:
        others["control"] = _find_cost(tables, control.bucket, "median")
    medians = [
        f"{name}: {fmt.cost(row)}"
        for name, row in others.items()
        if row is not None and row.num_documents >= MIN_FOR_QUANTILES
    ]
    return counted + (f" (median of the {', of the '.join(medians)})" if medians else "")


def _describe_floor(report: AuditReport, bucket: str) -> str:
    """Say what no decoding of likelier tokens first does, after all that is not beyond that."""
    find = report.tables.find
    within, beyond = (find("sampling", name, bucket) for name in ("within_limit", "beyond_limit"))
    if within is None or beyond is None or not beyond.num_documents:
        return ""
    listed = [f for f in report.findings if f.bucket == bucket and f.found_by.keys() - {"sampling"}]
    risks = {**report.tables.risks(bucket), "other": find("extraction", "other_window", bucket)}
    risks.pop("attack_cost", None)
    # The list of findings may be cut, and two rows may count the same documents.
    num_out = max(len(listed), *(row.num_matched or 0 for row in risks.values() if row), 0)
    whole, num_beyond = beyond.num_documents, beyond.num_matched or 0
    num_open = whole - (within.num_matched or 0) - num_beyond
    methods = "by greedy text, an attack, another window or another method"
    most = "" if num_out == whole else "At least "
    out = f"{most}{fmt.of(num_out, whole)} came out {methods}. " if num_out else ""
    return (
        f"{out}{fmt.of(within.num_matched or 0, whole)} are within the limit of queries, "
        f"of {num_open:,} it depends on the decoding; for {num_beyond:,} "
        f"({fmt.percent_ci(beyond.ci)}) no temperature, top-k, top-p or min-p gives the "
        "continuation word for word within the limit after the true prefix, with a probability of "
        "one half. This says nothing about texts with a few edits, beam search, penalties, logit "
        "bias, other prompts or other forms of the weights."
    )


def _describe_decoding(report: AuditReport) -> tuple[str, ...]:
    """List the decoding methods, and explain 'never' if it occurs."""
    probe = next((p for p in report.method.probes if p.get("name") == "sampling"), {})
    schemes = probe.get("schemes")
    listed = schemes if isinstance(schemes, list) else []
    sampling = "; ".join(name_scheme(item) for item in listed if isinstance(item, dict))
    notes = [
        f"Decoding: greedy{f' and sampling ({sampling})' if sampling else ''}. For each document "
        "the cheapest method counts; greedy decoding takes one query if its text is verbatim. What "
        "is neither within nor beyond the limit depends on the decoding."
    ]
    if any(row.num_matched for row in report.tables.select("sampling", "never")):
        notes.append("'never': every decoding method excludes a token of the text.")
    return tuple(notes)


# -- tables ----------------------------------------------------------------------------------------


def _build_rates(report: AuditReport, attacks: Sequence[Attack], has_cost: bool) -> Table:
    """Build the table of rates by greedy decoding, attack cost and each attack."""
    tables = report.tables

    def column_of_cost(heading: Heading, metric: str, **key: str) -> Column[BucketRow]:
        def show(bucket: BucketRow, model: str = "trained") -> Cell:
            row = tables.find("sampling", metric, bucket.bucket, model=model, **key)
            if row is None or not row.num_documents:
                return show_missing("not measured" if row is None else "no documents")
            if row.statistic == "median":
                return _show_spread(tables, row)
            return show_row(row, how="narrow")

        return Column(heading, show, lambda bucket: show(bucket, "base"))

    def column_of_attack(attack: Attack) -> Column[BucketRow]:
        return Column(attack.heading, lambda b: _show_attacked(tables, attack, b.bucket))

    columns: list[ResultColumn | Column[BucketRow]] = [
        ResultColumn(("Verbatim", "greedy answer"), "extraction", "verbatim", how="narrow"),
        ResultColumn(
            ("Near-verbatim", "documents"),
            "extraction",
            "near_verbatim",
            how="narrow",
            why_not="not generated",
        ),
    ]
    if has_cost:
        spread = ("Attack cost", f"median (10–90{fmt.PERCENT})")
        key = {"parameters": write_parameters({"queries": _QUERIES})}
        columns += [
            column_of_cost(spread, "log10_queries", statistic="median"),
            column_of_cost((f"Within {_QUERIES:,}", "queries"), "within_queries", **key),
            column_of_cost(("Within the limit", "of queries"), "within_limit"),
            column_of_cost(("Beyond the limit", "else it depends"), "beyond_limit"),
        ]
    columns += map(column_of_attack, attacks)
    return bucket_table(
        report,
        f"Extraction rate by attack ({fmt.CI})",
        columns,
        notes=(*(_describe_decoding(report) if has_cost else ()), *write_attack_notes(attacks)),
        compact=True,
    )


def _show_spread(tables: Tables, median: ResultRow) -> Cell:
    bucket, model = median.bucket, median.model
    if median.num_documents < MIN_FOR_QUANTILES:
        return show_missing(f"fewer than {MIN_FOR_QUANTILES} documents")
    low, high = (_find_cost(tables, bucket, name, model=model) for name in ("q10", "q90"))
    never = tables.find("sampling", "never", bucket, model=model)
    count = 0 if never is None else never.num_matched or 0
    return Cell(
        fmt.cost(median),
        detail=f"{fmt.cost(low)} to {fmt.cost(high)}",
        note=f"{fmt.of(count, median.num_documents)} {NEVER}" if count else "",
    )


def _show_attacked(tables: Tables, attack: Attack, bucket: str) -> Cell:
    """Show how many documents any answer extracted, and how many the first answer did."""
    row, first = attack.find(tables, bucket), attack.find(tables, bucket, "first_answer")
    note = ""
    if first is not None and first.num_documents and attack.heading[1] != "one answer":
        note = f"first: {fmt.of(*first.counts)}"
    return show_row(row, how="narrow", note=note, why_not="not attacked")


def _build_attacks(report: AuditReport, attacks: Sequence[Attack]) -> Table | None:
    """Build the table of every attack on every bucket, collapsed; None without attacks."""
    tables = report.tables
    attacked = [
        (bucket, attack, kind)
        for bucket in tables.buckets
        for attack in attacks
        for kind in attack.kinds
        if tables.find(kind.probe, _ANY_ANSWER, bucket.bucket, parameters=kind.parameters)
    ]
    if not attacked:
        return None

    def column(heading: Heading, metric: str, unit: str = "") -> Column[Any]:
        return Column(
            heading,
            lambda item: ResultColumn("", item[2].probe, metric, unit=unit).show(
                tables, bucket=item[0].bucket, parameters=item[2].parameters
            ),
        )

    columns: tuple[Column[tuple[BucketRow, Attack, MetricRow]], ...] = (
        Column(
            ("Bucket", "attack"),
            lambda item: show_name(name_bucket(item[0], report).text, item[1].name),
        ),
        column(("First answer matches", f"documents ({fmt.CI})"), "first_answer"),
        column(("Any answer matches", f"documents ({fmt.CI})"), _ANY_ANSWER),
        Column(("Answers", "per document"), lambda item: fmt.count(_count_answers(item[2]))),
        column(("Token accuracy", f"of the first answer ({fmt.CI})"), "token_accuracy", "share"),
    )
    return make_table(
        "Each attack by bucket",
        columns,
        attacked,
        tone=lambda item: tone_of_bucket(item[0]),
        shown=0,
        more_label="Show each attack with its intervals",
    )
