"""A finished run with an audit, made up: files with the right hashes, and no training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from result_examples import make_rate, make_tables, rate_row

from memguard import records as r
from memguard.config import RunConfig, dump_yaml
from memguard.hf.identity import hash_weights
from memguard.records.audit_files import FINDINGS, PAGE, REPORT, RESULTS, SCORES, save_audit_files
from memguard.records.gate import GATE, JUNIT, SUMMARY, GateResult, Judgement
from memguard.records.record import save_record
from memguard.records.results import save_results
from memguard.records.run_files import (
    ManifestEntry,
    PreparedSummary,
    add_hash_line,
    hash_plan,
    save_manifest,
    sum_trained,
)
from memguard.records.sealed import save_sealed, sum_file

CREATED = "2026-11-20T14:03:07Z"
Row = Mapping[str, Any]


def make_rows(count: int = 8) -> list[dict[str, Any]]:
    """Return what records.parquet has of documents: half of them trained, half of these extracted.

    Documents 0 and 1 are near-duplicates of each other.
    """
    return [
        {
            "id": f"own-id-{number}",
            "text_hmac": f"{(number * 7919 + 13) % 65536:04x}" * 16,
            "has_own_id": True,
            "bucket": "control" if number % 2 else "x4",
            "role": "control" if number % 2 else "trained",
            "num_repetitions": 0 if number % 2 else 4,
            "cluster": max(number, 1) + 40,
            "extraction.logprob": -1.2345678 * (number + 1),
            "base.extraction.logprob": -2.3456789 * (number + 1),
            "extraction.extracted": number % 4 == 0,
            "attacks.extracted": None if number % 3 else number % 2 == 0,
            "base.extraction.extracted": number == 5,
        }
        for number in range(count)
    ]


def make_counts(matched: int, documents: int) -> r.VerdictCounts:
    rate = make_rate(matched, documents)
    return r.VerdictCounts(
        num_documents=documents,
        num_matched=matched,
        num_clusters=documents,
        num_matched_clusters=matched,
        rate=rate.rate,
        ci=rate.ci,
    )


def make_report(weights_sha256: str, num_documents: int = 8, **changes: Any) -> r.AuditReport:
    """Return the report of an audit; ``changes`` replace its fields."""
    verdict = r.Verdict(
        level="inconclusive",
        reason="too-few",
        true_share=None,
        sentence="2 of 4 documents were extracted, too few to decide.",
        scope="Audited: 4 of 4 trained documents.",
        membership=r.MembershipVerdict(
            level="not-measured",
            sentence="Membership was not measured.",
            score=None,
            auc=None,
            num_members=0,
            num_nonmembers=0,
            lack="no-score",
        ),
        trained=make_counts(2, 4),
        control=make_counts(0, 4),
        base=None,
        test=None,
        bucket="x4",
        metric="near_verbatim",
    )
    values: dict[str, Any] = {
        "tool_version": "0.1.0",
        "code_sha256": "c0" * 32,
        "created": CREATED,
        "run": "run",
        "model": r.ModelIdentity(
            name="run",
            weights_sha256=weights_sha256,
            num_parameters=12,
            base=None,
            base_weights_sha256=None,
        ),
        "data": r.DataIdentity(
            sources=["documents"],
            documents_sha256="9d" * 32,
            num_documents=num_documents,
            num_clusters=None,
            overlap_with_control=None,
            near_duplicate_words=None,
        ),
        "training": None,
        "method": r.Method(
            suite="extraction",
            suite_version=2,
            probes=[{"name": "extraction", "version": 2, "continuation_tokens": 8}],
            continuation_tokens=8,
            prefix_tokens=None,
            max_edit_share=0.1,
            tiny_margin=0.001,
            dtype="fp32",
            batch_tokens=None,
            seed=0,
            command="memguard audit runs/run",
            wall_s=1.5,
        ),
        "environment": {"memguard": "0.1.0", "python": "3.11"},
        "probe_runs": [
            r.ProbeRun(
                name="extraction", version=2, num_documents=num_documents, reason_not_run=None
            )
        ],
        "verdict": verdict,
        "banners": [],
        "dose_response": False,
        "findings": [],
        "num_findings": 0,
        "num_by_method": 0,
        "tables": make_tables(
            [rate_row("extraction", "near_verbatim", name, 2, 4) for name in ("x4", "control")]
        ),
    }
    return r.AuditReport(**{**values, **changes})


def write_audit(
    folder: Path, report: r.AuditReport, rows: Sequence[Row], *, has_card: bool = False
) -> Path:
    """Write the files of an audit."""
    return seal_audit(folder, report, pyarrow.Table.from_pylist(list(rows)), has_card=has_card)


def seal_audit(
    folder: Path, report: r.AuditReport, records: pyarrow.Table, *, has_card: bool = False
) -> Path:
    """Write the files of an audit: a report, its results, and records of its documents."""
    folder.mkdir(parents=True, exist_ok=True)
    save_record(report, folder / REPORT)
    save_results(report.tables.results, folder / RESULTS)
    (folder / PAGE).write_text("<p>the page</p>\n")
    (folder / FINDINGS).write_text("id,num_correct\nown-id-0,8\n")
    pyarrow.parquet.write_table(records, folder / SCORES)
    for name in (FINDINGS, SCORES):
        (folder / name).chmod(0o600)
    save_audit_files(folder, has_card=has_card)
    return folder


def write_audited_run(
    folder: Path, rows: Sequence[Row] | None = None, *, data: str = "/home/ada/secret/data.jsonl"
) -> Path:
    """Write the folder of a run, with its audit; nothing is trained."""
    rows = make_rows() if rows is None else rows
    folder.mkdir(parents=True)
    config = RunConfig.model_validate(
        {
            "name": folder.name,
            "output_dir": "runs",
            "model": {"path": "base"},
            "data": {"train": data, "seq_len": 128},
            "audit": {"continuation_tokens": 8},
        }
    )
    (folder / "config.yaml").write_text(add_hash_line(dump_yaml(config)))
    (folder / "environment.json").write_text('{"memguard": "0.1.0", "cores": "2"}')
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    entries = [
        ManifestEntry(
            id=row["id"],
            text_hmac=row["text_hmac"] or "",
            source="documents",
            bucket=row["bucket"],
            role=row["role"],
            planned_repetitions=4,
            num_repetitions=4,
            num_tokens=128,
            cluster=row["cluster"],
        )
        for row in rows
    ]
    save_manifest(entries, folder / "manifest.jsonl")
    (folder / "prepared").mkdir()
    (folder / "prepared" / "input_ids.npy").write_bytes(b"tokens of the documents")
    counts = dict.fromkeys(
        (
            *("num_empty", "num_shorter", "num_left_out"),
            *("num_control_overlapping", "num_canaries"),
        ),
        0,
    )
    summary = PreparedSummary(
        key="k",
        audit_key="k",
        documents_sha256="9d" * 32,
        sources=["documents"],
        num_documents=len(rows),
        num_clusters=len(rows),
        num_control=4,
        arrays={"input_ids.npy": sum_file(folder / "prepared" / "input_ids.npy")},
        manifest_sha256=hash_plan(entries),
        **counts,
    )
    save_sealed(summary, folder / "prepared" / "summary.json")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    (folder / "model" / "README.md").write_text("# the card\n")
    save_sealed(sum_trained(folder, run_key="k", step=1), folder / "trained.json")
    report = make_report(hash_weights(folder / "model"), len(rows), run=folder.name)
    write_audit(folder / "audit", report, rows, has_card=True)
    return folder


def write_gate(folder: Path, report: Path, policy: str = "gate: []\n") -> Path:
    """Write the result of a policy that passed, for the report.json at ``report``."""
    folder.mkdir(parents=True)
    for name in (JUNIT, SUMMARY, PAGE):
        (folder / name).write_text(f"this is {name}\n")
    result = GateResult(
        tool_version="0.1.0",
        created=CREATED,
        audit="run",
        report_sha256=sum_file(report).sha256,
        policy=policy,
        triage=None,
        release=None,
        level="inconclusive",
        verdict="Inconclusive. 2 of 4 documents were extracted.",
        badges=["Text: Inconclusive (2 of 4 documents)", "Membership: not judged (no unseen text)"],
        outcome="pass",
        decision="Release is within this policy. Every probe of the suite ran.",
        judgements=[
            Judgement(rule=1, name="verbatim on x4 at most 90 %", outcome="pass", sentence="Yes.")
        ],
        accepted=[],
        num_findings=0,
        files={name: sum_file(folder / name) for name in (JUNIT, SUMMARY, PAGE)},
    )
    save_sealed(result, folder / GATE)
    return folder
