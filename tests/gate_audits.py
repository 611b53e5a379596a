"""Sealed audit folders, made up, for the gate: a report, its results, and answers of documents."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow
from bundle_examples import make_counts, seal_audit
from pyarrow import parquet
from result_examples import change_rows, change_tables, make_metric, make_tables, rate_row

from memguard import records as r
from memguard.records import AuditReport, save_record
from memguard.records.audit_files import REPORT, RESULTS, load_audit_report, save_audit_files
from memguard.records.documents import DocumentTable
from memguard.records.results import save_results
from memguard.records.verdict import MIN_TRAINED

Answers = Mapping[str, Callable[[r.BucketRow, int], float | None]]
"""By probe: whether a document of a bucket, by its number, is extracted."""


def make_rates(counts: Mapping[str, tuple[int, int]], base: AuditReport) -> AuditReport:
    """Return the report with only the rates verbatim and near_verbatim, with the same counts.

    Args:
        counts: by bucket: matched and all documents; ``control`` is the control.
        base: the report to change.
    """
    rows = [
        rate_row("extraction", metric, bucket, *pair, model=model)
        for bucket, pair in counts.items()
        for model in ("trained", "base")
        for metric in ("verbatim", "near_verbatim")
    ]
    buckets = [
        r.BucketRow(
            bucket=bucket,
            role="control" if bucket == "control" else "trained",
            num_documents=pair[1],
        )
        for bucket, pair in counts.items()
    ]
    method = base.method.model_copy(update={"probes": [{"name": "extraction"}]})
    runs = [run for run in base.probe_runs if run.name == "extraction"]
    metrics = [make_metric("extraction", metric) for metric in ("verbatim", "near_verbatim")]
    tables = make_tables(rows, buckets, metrics=metrics)
    changes = {"tables": tables, "method": method, "probe_runs": runs, "findings": []}
    return base.model_copy(update={**changes, "num_findings": 0, "num_by_method": 0})


def make_attacked(
    counts: Mapping[str, tuple[int, int]], sample: int | None, base: AuditReport
) -> AuditReport:
    """Return `make_rates`, with attacks on a sample of each bucket; repetitions by its name.

    The verdict is that of the counts, without a test.
    """
    report = make_rates(counts, base)
    rows = [
        rate_row("attacks", "best_any_answer", bucket, min(matched, size), size)
        for bucket, (matched, number) in counts.items()
        if (size := min(number, sample or number))
    ]
    buckets = [
        replace(row, num_repetitions=0 if row.role == "control" else int(row.bucket[1:]))
        for row in report.tables.buckets
    ]
    report = change_rows(change_tables(report, buckets=buckets), add=rows)
    probes = [{"name": "extraction"}, {"name": "attacks", "max_documents_per_bucket": sample}]
    runs = [
        r.ProbeRun(name=name, version=1, num_documents=40, reason_not_run=None)
        for name in ("extraction", "attacks")
    ]
    trained = [pair for bucket, pair in counts.items() if bucket != "control"]
    number, matched = (sum(pair[place] for pair in trained) for place in (1, 0))
    level = "none-found" if number >= MIN_TRAINED else "inconclusive"
    values = {"level": "extracted" if matched else level, "trained": make_counts(matched, number)}
    values |= {"test": None, "reason": None if values["level"] == "none-found" else "too-few"}
    verdict = base.verdict.model_copy(update=values)
    changes = {"method": report.method.model_copy(update={"probes": probes}), "verdict": verdict}
    return report.model_copy(update={**changes, "probe_runs": runs, "num_findings": matched})


def write_audit(
    folder: Path,
    report: AuditReport,
    answers: Answers | None = None,
    columns: Mapping[str, Callable[[r.BucketRow, int], float]] | None = None,
    *,
    text: Callable[[str, int], int | str] = lambda bucket, number: f"{bucket} {number}",
    clusters: Callable[[str, int], int | None] = lambda bucket, number: None,
    has_card: bool = False,
) -> Path:
    """Write an audit folder and seal it.

    Args:
        folder: to write.
        report: its report.
        answers: by probe; None: by the near-verbatim rate of each bucket, its first documents.
        columns: other columns of the records.
        text: names the text of a document, of which the made-up hash is.
        clusters: of a document.
        has_card: whether it is the audit of a run, whose model has a card.
    """
    probes = {m.probe for m in report.tables.metrics if m.risk_rank is not None}
    given = answers or {probe: _follow_rate(report) for probe in probes}
    documents = [(b, n) for b in report.tables.buckets for n in range(b.num_documents)]
    values: dict[str, Sequence[object]] = {
        "text_hmac": [hash_text(text(bucket.bucket, n)) for bucket, n in documents],
        "id": [f"{bucket.bucket}-{n}" for bucket, n in documents],
        "has_own_id": [False] * len(documents),
        "bucket": [bucket.bucket for bucket, _ in documents],
        "role": [bucket.role for bucket, _ in documents],
        "num_repetitions": [0 if b.role == "control" else 4 for b, _ in documents],
    }
    for probe, is_extracted in given.items():
        values[f"{probe}.extracted"] = [is_extracted(bucket, n) for bucket, n in documents]
    for name, column in (columns or {}).items():
        values[name] = [column(bucket, n) for bucket, n in documents]
    table = pyarrow.table(
        {
            **{name: pyarrow.array(column) for name, column in values.items()},
            "cluster": pyarrow.array(
                [clusters(bucket.bucket, n) for bucket, n in documents], pyarrow.int64()
            ),
        }
    )
    return seal_audit(folder, report, table, has_card=has_card)


def open_records(table: pyarrow.Table) -> DocumentTable:
    """Return records as an audit that was read has them."""
    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(table, buffer)
    return DocumentTable(file=parquet.ParquetFile(buffer.getvalue()))


def _follow_rate(report: AuditReport) -> Callable[[r.BucketRow, int], float]:
    def is_extracted(bucket: r.BucketRow, number: int) -> float:
        row = report.tables.find("extraction", "near_verbatim", bucket.bucket)
        return float(row is not None and number < (row.num_matched or 0))

    return is_extracted


def hash_text(name: int | str) -> str:
    """Return 64 digits that stand for the keyed hash of a text."""
    return str(name).encode().hex().rjust(64, "0")[-64:]


def reseal(
    folder: Path, change: Callable[[AuditReport], AuditReport], *, has_card: bool = False
) -> None:
    """Change the report of an audit, write its results again, and seal both."""
    report = change(load_audit_report(folder))
    save_record(report, folder / REPORT)
    save_results(report.tables.results, folder / RESULTS)
    save_audit_files(folder, has_card=has_card)
