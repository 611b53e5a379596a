"""The measurements -> tables, verdict, banners, findings, probe runs; and rows of the training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from memguard.audit.document_scores import DocumentScores
from memguard.audit.findings import MAX_FINDINGS, FindingList
from memguard.audit.metrics import Evidence
from memguard.audit.plugins import contain
from memguard.audit.probe import Probe, Summary
from memguard.audit.suite import Suite
from memguard.audit.verdict import (
    Canaries,
    ControlKind,
    Coverage,
    DocumentResults,
    MethodResults,
)
from memguard.audit.verdict_sentences import VerdictInput, build_verdict
from memguard.audit.warnings import Tally, collect_banners, is_base_nearly_equal, is_collapsed
from memguard.errors import ForeignError
from memguard.records import (
    ONE_TEXT,
    REFERENCE_SECRETS,
    SECRETS,
    AuditResults,
    CutDocuments,
    LoadAs,
    MetricRow,
    ProbeRun,
    ResultRow,
    Tables,
    TrainingSummary,
    WatchedLine,
    fill_row,
)
from memguard.records.verdict import OtherMethod


def tabulate(evidence: Evidence, suite: Suite) -> dict[str, Summary]:
    """Return what each probe adds to the report, by name; one of another package may fail."""
    summaries: dict[str, Summary] = {}
    for probe in suite.probes:
        missing = evidence.skipped_because.get(probe.name) or probe.find_missing(
            evidence.inputs, has_base=evidence.other is not None
        )
        package = suite.packages.get(probe.name)
        if missing:
            summaries[probe.name] = Summary(reason=missing)
            continue
        if package is None:
            summary = probe.tabulate(evidence)
        else:
            tabulate_foreign = partial(_tabulate_foreign, probe, package, evidence)
            summary = contain(package, tabulate_foreign, lambda reason: Summary(reason=reason))
        if not suite.counts(probe):
            # What does not count in the verdict extracts no document.
            summary = replace(summary, matched={}, windows={})
        summaries[probe.name] = summary
    return summaries


def _tabulate_foreign(probe: Probe, package: str, evidence: Evidence) -> Summary:
    """Return what a probe of another package adds, checked and with the name of the package."""
    summary = probe.tabulate(evidence)
    arrays = {name: column.values for name, column in summary.columns.items()}
    for name, values in {**arrays, **summary.matched}.items():
        if len(values) != len(evidence.inputs.windows):
            raise ForeignError(f"'{name}' must have one value for each document")
    starts = (f"{probe.name}.", f"base.{probe.name}.")
    if not all(name.startswith(starts) for name in summary.columns):
        raise ForeignError(f"every column must begin with '{starts[0]}'")
    parts = (summary.rows, summary.metrics, summary.tests, summary.details)
    if any(row.probe != probe.name for part in parts for row in part):
        raise ForeignError(f"every row must have the probe '{probe.name}'")
    if len({row.key for row in summary.rows}) < len(summary.rows):
        raise ForeignError("two rows have one key")
    # Validates every value.
    tables = Tables.model_validate_json(
        Tables(
            results=tuple(summary.rows),
            metrics=tuple(replace(metric, package=package) for metric in summary.metrics),
            tests=tuple(summary.tests),
            details=tuple(summary.details),
        ).model_dump_json()
    )
    if not all(row.is_known or row.missing_because for row in tables.results):
        raise ForeignError("a row has neither a number nor a reason")
    return replace(
        summary,
        rows=tables.results,
        metrics=tables.metrics,
        tests=tables.tests,
        details=tables.details,
    )


def collect_tables(evidence: Evidence, summaries: Mapping[str, Summary], suite: Suite) -> Tables:
    """Return the tables of the report; risks that do not count in the verdict are no risks."""
    parts = list(summaries.values())
    counted = {probe.name for probe in suite.probes if suite.counts(probe)}
    return Tables(
        results=tuple(row for part in parts for row in part.rows),
        metrics=tuple(
            metric if metric.probe in counted else replace(metric, risk_rank=None)
            for part in parts
            for metric in part.metrics
        ),
        buckets=tuple(
            replace(b, num_documents=int((evidence.bucket_N == b.bucket).sum()))
            for b in evidence.buckets
        ),
        tests=tuple(row for part in parts for row in part.tests),
        details=tuple(row for part in parts for row in part.details),
    )


def summarise(
    evidence: Evidence,
    summaries: Mapping[str, Summary],
    scores: DocumentScores,
    *,
    suite: Suite,
    tally: Tally,
    cut: CutDocuments | None,
    control: ControlKind,
    is_limited: bool = False,
) -> AuditResults:
    """Compute the parts of the report that describe the documents.

    There is no dose-response unless the tally is complete. ``control`` is explained in `Coverage`;
    ``is_limited`` is whether the limit of generation time ended a probe, whose rest was not
    generated.
    """
    documents = [window.document for window in evidence.inputs.windows]
    tables = collect_tables(evidence, summaries, suite)
    probe_runs = [_describe_run(probe, summaries[probe.name]) for probe in suite.probes]
    generated = tables.find_detail("extraction") or {}
    findings = FindingList(scores)
    buckets = evidence.buckets
    num_unaudited = sum(o.num_not_auditable for o in buckets if o.was_trained)
    has_base = evidence.other is not None and not is_base_nearly_equal(scores)
    verdict = build_verdict(
        VerdictInput(
            ids=[document.id for document in documents],
            documents=_collect_results(evidence, summaries, suite, has_base=has_base),
            canaries=_count_canaries(tables),
            coverage=Coverage(
                num_trained=int(evidence.is_trained_N.sum())
                + num_unaudited
                + sum(o.num_not_sampled for o in buckets if o.was_trained),
                num_unaudited=num_unaudited,
                weakened=suite.extraction.describe_weakened()
                if any(document.format == "text" for document in documents)
                else (),
                has_base=has_base,
                control=control,
                was_generated=generated.get("reason_not_generated") is None,
                num_generated=generated.get("num_generated", 0),
                num_not_generated=generated.get("num_not_generated", 0),
                is_limited=is_limited,
                is_collapsed=is_collapsed(scores),
            ),
            tables=tables,
            membership={
                name.removeprefix("membership."): column.values
                for name, column in scores.columns.items()
                if name.startswith("membership.")
            },
            dose_response=evidence.dose_response,
            not_run={r.name: r.reason_not_run for r in probe_runs if r.reason_not_run is not None},
        )
    )
    if generated.get("num_not_generated"):
        probe_runs.append(
            ProbeRun(
                name="near-verbatim",
                version=suite.extraction.VERSION,
                num_documents=None,
                counted="texts",
                reason_not_run=str(generated["reason_not_generated"]),
            )
        )
    return AuditResults(
        verdict=verdict,
        banners=collect_banners(
            tables,
            scores,
            tally=tally,
            tiny_margin=evidence.inputs.tiny_margin,
            cut=cut,
            documents=documents,
        ),
        dose_response=evidence.dose_response,
        findings=list(islice(findings, MAX_FINDINGS)),
        num_findings=len(findings),
        num_by_method=findings.num_by_method,
        cut=cut,
        probe_runs=probe_runs,
        tables=tables,
    )


def _collect_results(
    evidence: Evidence, summaries: Mapping[str, Summary], suite: Suite, *, has_base: bool
) -> DocumentResults:
    """Return which documents each method extracted, and which of them the base produces too."""
    if not has_base:
        summaries = {name: _leave_out_base(summary) for name, summary in summaries.items()}
    none_N = np.zeros(len(evidence.bucket_N), dtype=bool)
    extracted_N, new_N, of_base_N = (none_N.copy() for _ in range(3))
    others: dict[OtherMethod, list[Mapping[str, NDArray[np.float64]]]] = {}
    for probe in suite.probes:
        summary = summaries[probe.name]
        if "trained" in summary.windows:
            method: OtherMethod = "generated" if probe.name == "generation" else "windows"
            others.setdefault(method, []).append(summary.windows)
        if "trained" not in summary.matched:
            continue
        is_sample = probe.name in suite.packages and np.isnan(summary.matched["trained"]).any()
        if probe.is_attack or is_sample:
            others.setdefault("attacked", []).append(summary.matched)
            continue
        # Greedy text of the base, exact or nearly so, is subtracted from greedy text.
        extracted_N |= summary.matched["trained"] == 1
        new_N |= (summary.matched["trained"] == 1) & ~_match_base(summary.matched)
        of_base_N |= _match_base(summary.matched)
    roles = [window.document.role for window in evidence.inputs.windows]
    return DocumentResults(
        bucket_N=evidence.bucket_N,
        cluster_N=evidence.cluster_N,
        is_trained_N=evidence.is_trained_N,
        is_forgotten_N=np.array([role == "forget" for role in roles], dtype=bool),
        is_control_N=np.array([role == "control" for role in roles], dtype=bool),
        is_own_N=evidence.own_text.is_own_N,
        is_extracted_N=extracted_N,
        is_new_N=new_N,
        is_of_base_N=of_base_N,
        others={
            # Attacks are not run on the base model: what it produces otherwise is not counted.
            name: _join_methods(matches, of_base_N if name == "attacked" else none_N)
            for name, matches in others.items()
        },
    )


def _leave_out_base(summary: Summary) -> Summary:
    matched, windows = (
        {model: of for model, of in part.items() if model != "base"}
        for part in (summary.matched, summary.windows)
    )
    return replace(summary, matched=matched, windows=windows)


def _match_base(matched: Mapping[str, NDArray[np.float64]]) -> NDArray[np.bool_]:
    is_of_base_N: NDArray[np.bool_] = np.zeros(len(matched["trained"]), dtype=bool)
    if "base" in matched:
        is_of_base_N = np.asarray(matched["base"], dtype=np.float64) == 1
    return is_of_base_N


def _join_methods(
    matches: Sequence[Mapping[str, NDArray[np.float64]]], of_base_N: NDArray[np.bool_]
) -> MethodResults:
    """Join probes of one kind; a document is tried if one of them tried it."""
    return MethodResults(
        is_tried_N=np.any([~np.isnan(matched["trained"]) for matched in matches], axis=0),
        is_extracted_N=np.any([matched["trained"] == 1 for matched in matches], axis=0),
        is_new_N=np.any(
            [(m["trained"] == 1) & ~_match_base(m) & ~of_base_N for m in matches], axis=0
        ),
    )


def _count_canaries(tables: Tables) -> Canaries | None:
    trained, references = (
        tables.find("canaries", "verbatim", bucket) for bucket in (SECRETS, REFERENCE_SECRETS)
    )
    if trained is None or references is None:
        return None
    return Canaries(
        num_trained=trained.num_documents,
        num_trained_extracted=trained.num_matched or 0,
        num_references=references.num_documents,
        num_references_extracted=references.num_matched or 0,
    )


def _describe_run(probe: Probe, summary: Summary) -> ProbeRun:
    return ProbeRun(
        name=probe.name,
        version=probe.VERSION,
        num_documents=summary.num_items or None,
        counted=probe.counted,
        reason_not_run=None if summary.num_items else summary.reason,
    )


HELDOUT_NLL = MetricRow(
    probe="heldout",
    metric="nll",
    version=1,
    meaning="Loss on documents that were never trained.",
    unit="nats",
    statistic="mean",
    bounds=(0.0, None),
    higher_is_better=False,
    heading="Held-out NLL",
    spoken="held-out loss",
)
_LEARNED = MetricRow(
    probe="extraction",
    metric="learned",
    version=1,
    meaning="Extracted now, and not before training.",
    unit="documents",
    statistic="rate",
    heading="Learned",
    spoken="newly",
)


NOT_OF_THIS_FORM = "not measured: training measured it of the stored model"
"""Why a model that was loaded in another form has no held-out loss."""


def tabulate_training(
    training: TrainingSummary | None, watched: Sequence[WatchedLine], load_as: LoadAs = "stored"
) -> Tables:
    """Return the rows of the losses before and after training, and of the audits during it."""
    rows: list[ResultRow] = []
    metrics = []
    if training is not None and training.heldout_bucket is not None:
        row = ResultRow(
            probe="heldout",
            metric="nll",
            statistic="mean",
            bucket=training.heldout_bucket,
            num_documents=training.heldout_num_documents,
        )
        of_trained = ONE_TEXT if load_as == "stored" else NOT_OF_THIS_FORM
        for model, nll, why_not in (
            ("trained", training.heldout_nll, of_trained),
            ("base", training.base_heldout_nll, ONE_TEXT),
        ):
            rows.append(fill_row(replace(row, model=model), nll, "", why_not=why_not))
        metrics.append(HELDOUT_NLL)
    rows += [row for line in watched for row in line.results]
    return Tables(results=tuple(rows), metrics=(*metrics, *([_LEARNED] if watched else [])))
