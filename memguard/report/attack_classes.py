"""Attack classes of public documents, and how an audit tested each: rows of the page for signing.

    AttackClass     a class with the exact words of its source
    CLASSES         those whose source was read; all others are left out, and NOT_READ names them
    describe_class  what the audit found: by each method, or "not tested" with the reason

Nothing here is written from memory: a quotation is part of a text that was read at its address.
The page makes no claim about law.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from memguard.pages import formatting as fmt
from memguard.records import RISK_NAMES, AuditReport, ResultRow, Tables
from memguard.records.gate import ReleaseContext
from memguard.records.scores import RiskName
from memguard.records.tables import RISK_PLACES

_NAME_LIMIT, _REASON_LIMIT = 20, 56


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A public document."""

    title: str
    short: str
    """Name in the table: ``Opinion 28/2024``."""
    place: str
    """Paragraph, or the part of the document."""
    address: str
    """Where it was read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttackClass:
    """A class of attacks that a source names."""

    name: str
    quote: str
    """Words of the source, exactly; an ellipsis ends a quotation inside a sentence."""
    source: Source
    methods: tuple[RiskName, ...]
    """Extraction risks of the audit that test it."""
    not_covered: str
    """What no method of memguard tests of it."""
    by_weights: bool = False
    """Whether `not_covered` needs the weights, so that the release decides who can do it."""


_OPINION: Final = Source(
    title="European Data Protection Board, Opinion 28/2024, adopted on 17 December 2024",
    short="Opinion 28/2024",
    place="executive summary",
    address="globalregulatoryinsights.com/art/opinion-28-2024-on-certain-data-protection-aspects-"
    "related-to-the-processing-of-personal-data-in-the-context-of-ai-models (a copy)",
)
CLASSES: Final[tuple[AttackClass, ...]] = (
    AttackClass(
        name="Direct extraction",
        quote="the likelihood of direct (including probabilistic) extraction of personal data",
        source=_OPINION,
        methods=("verbatim", "near_verbatim", "attack_cost"),
        not_covered="extraction from weights or gradients",
        by_weights=True,
    ),
    AttackClass(
        name="Obtaining, intentionally or not",
        quote="the likelihood of obtaining, intentionally or not, such …",
        source=_OPINION,
        methods=("near_verbatim", "attack"),
        not_covered="unintended output: every probe knows the true beginning of a document",
    ),
)
NOT_READ: Final = (
    "paragraphs 46, 55 and 58 of the same opinion",
    "measure 1.4 of the copyright chapter of the general-purpose AI code of practice",
)
"""Places whose classes belong in the table, and whose text could not be read at the source."""
_WEIGHTS: Final[Mapping[ReleaseContext | None, str]] = {
    "internal": ", which people with the weights can try",
    "api": ", which an API does not offer",
    "open-weights": ", which this release lets anyone try",
    None: ", which the release may let anyone try",
}


def list_sources(classes: Sequence[AttackClass] = CLASSES) -> list[str]:
    """Return the sources of some classes, each once: title, place and address."""
    return list(
        dict.fromkeys(f"{c.source.title}, {c.source.place}: {c.source.address}" for c in classes)
    )


def describe_class(attack: AttackClass, report: AuditReport, release: ReleaseContext | None) -> str:
    """Return what an audit found by the methods that test a class, and what none of them tests.

    Args:
        attack: the class.
        report: the audit.
        release: how the model will be released; None if that is not declared.
    """
    by_whom = _WEIGHTS[release] if attack.by_weights else ""
    results = [_describe_method(risk, report) for risk in attack.methods]
    return f"{'; '.join(results)}. Not tested: {attack.not_covered}{by_whom}."


def _describe_method(risk: RiskName, report: AuditReport) -> str:
    row = find_worst(risk, report.tables)
    if row is None:
        return f"{RISK_NAMES[risk]}: not tested ({_explain(risk, report)})"
    bucket = fmt.clean_name(row.bucket, _NAME_LIMIT)
    ci = f", {fmt.percent_ci(row.ci)}" if row.ci is not None else ", no interval"
    counts = fmt.of(row.num_matched or 0, row.num_documents)
    return f"{RISK_NAMES[risk]}: {counts} of '{bucket}'{ci}"


def find_worst(risk: str, tables: Tables) -> ResultRow | None:
    """Return the rate of the trained bucket with the highest upper bound; None if none has one.

    Args:
        risk: name of an extraction risk.
        tables: of an audit.
    """
    rows = [
        row
        for bucket in tables.buckets
        if bucket.role in ("trained", "forget")
        and (row := tables.risks(bucket.bucket).get(risk)) is not None
    ]
    return max(rows, key=rank_row, default=None)


def rank_row(row: ResultRow) -> tuple[float, float, int]:
    """Return what orders rates by danger: the upper bound, the rate, the number of documents."""
    value = row.value or 0.0
    # Without an interval nothing bounds the rate.
    return (1.0 if row.high is None else row.high, value, row.num_documents)


def _explain(risk: RiskName, report: AuditReport) -> str:
    probe, metric, parameters = RISK_PLACES[risk]
    run = next((run for run in report.probe_runs if run.name == probe), None)
    if run is None:
        return f"the suite has no probe '{probe}'"
    if run.reason_not_run is not None:
        return fmt.clean_text(fmt.hide_paths(run.reason_not_run), _REASON_LIMIT)
    rows = report.tables.select(probe, metric, parameters=parameters, model="trained")
    reasons = [row.missing_because for row in rows if row.missing_because is not None]
    known = reasons[0] if reasons else f"the probe '{probe}' has no such result"
    return fmt.clean_text(fmt.hide_paths(known), _REASON_LIMIT)
