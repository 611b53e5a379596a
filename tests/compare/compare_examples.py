"""Run folders as an audit leaves them, made up from how many tokens were right."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from record_examples import make_entry

from memguard.audit.document_scores import build_schema
from memguard.compare import FinishedRun
from memguard.records import AuditReport, DocumentScore, save_manifest, save_record
from memguard.records.audit_files import save_audit_files
from memguard.records.report_rows import list_report_rows
from memguard.records.results import save_results

TOKENS = 50
KNOWN, NEAR = 45, 46
"""Right tokens from which on a document counts as 90 % teacher-forced, and near-verbatim: of the
former some are not extracted."""

CORRECT: Mapping[int, Sequence[int]] = {
    0: [3, 5, 2, 8, 4],
    4: [50, 20, 30, 10, 44],
    16: [50, 50, 46, 20, 50],
}
"""Right tokens of each document, by number of repetitions; the control never has any verbatim."""


def write_run(
    folder: Path,
    *,
    name: str = "plain",
    seed: int = 0,
    correct: Mapping[int, Sequence[int]] = CORRECT,
    changes: Mapping[str, Any] | None = None,
    ids: str = "doc",
    reverse_rows: bool = False,
    costs: Mapping[int, Sequence[float | None]] | None = None,
    attacks: Mapping[int, Mapping[str, tuple[int, int]]] | None = None,
    generated: bool = True,
) -> FinishedRun:
    """Write ``audit/`` as an audit leaves it.

    Args:
        folder: the run's folder.
        name: the setting.
        seed: the run's seed.
        correct: right tokens of each document, by number of repetitions.
        changes: dotted places in the report and what to put there, e.g. ``method.dtype``.
        ids: how ids of documents begin.
        reverse_rows: write the scores in another order.
        costs: log10 of the queries for each document, by number of repetitions; None: not asked.
        attacks: documents that each attack extracted and attacked, by number of repetitions.
        generated: whether text was generated; else near-verbatim is not known.
    """
    scores = [
        make_score(f"{ids}-{count}-{number}", count, right).model_copy(
            update={
                "attack_log10_queries": costs[count][number] if costs else None,
                "near_verbatim": right >= NEAR if generated else None,
            }
        )
        for count, all_right in correct.items()
        for number, right in enumerate(all_right)
    ]
    values = make_report(correct, generated=generated)
    rows = {bucket["bucket"]: bucket for bucket in values["buckets"]}
    if costs:
        values["attack_cost"] = [make_cost(count, queries) for count, queries in costs.items()]
        for count, queries in costs.items():
            drawn = sum(cost is not None and cost <= 6 for cost in queries)
            rows[bucket_name(count)]["risks"]["attack_cost"] = make_rate(drawn, len(queries))
    if attacks:
        values["attacks"] = [
            make_attacked(count, attack, *found)
            for count, tried in attacks.items()
            for attack, found in tried.items()
        ]
        for count, tried in attacks.items():
            best = max(tried.values(), key=lambda found: found[0] / found[1])
            rows[bucket_name(count)]["risks"]["attack"] = make_rate(*best)
    for dotted, value in (changes or {}).items():
        *above, last = dotted.split(".")
        here: Any = values
        for key in above:
            here = here[int(key) if key.isdigit() else key]
        here[last] = value
    report = AuditReport.model_validate(values)
    save_record(report, folder / "audit" / "report.json")
    dumped = [score.model_dump() for score in (reversed(scores) if reverse_rows else scores)]
    pq.write_table(
        pa.Table.from_pylist(dumped, schema=build_schema()), folder / "audit" / "records.parquet"
    )
    (folder / "audit" / "findings.csv").write_text("id\n")
    save_results(list_report_rows(report), folder / "audit" / "results.parquet")
    (folder / "audit" / "report.html").write_text("<!doctype html>")
    save_audit_files(folder / "audit", has_card=False)
    return FinishedRun(name=name, seed=seed, folder=folder, overrides={})


def write_manifest(
    run: FinishedRun, *, clusters: Sequence[int], removed: Sequence[str] = ()
) -> None:
    """Write ``manifest.jsonl``, with a cluster for each document trained 4 times, in order."""
    entries = [
        make_entry(
            f"doc-4-{number}",
            bucket="x4",
            role="removed" if f"doc-4-{number}" in removed else "trained",
            planned_repetitions=4,
            num_repetitions=4,
            num_tokens=100,
            cluster=cluster,
        )
        for number, cluster in enumerate(clusters)
    ]
    save_manifest(entries, run.folder / "manifest.jsonl")


def make_canaries(bits: Sequence[float], verbatim: Sequence[bool]) -> dict[str, Any]:
    """Return trained secrets of so many bits of exposure, and one of 32 references."""

    def make(number: int, was_trained: bool) -> dict[str, Any]:
        return {
            "id": f"canary-{number}",
            "was_trained": was_trained,
            "nll": 9.0,
            "base_nll": None,
            "num_secret_tokens": 6,
            "num_repetitions": 4,
            "num_loss_tokens": 6,
            "exposure_bits": bits[number] if was_trained else None,
            "exposure_extrapolated_bits": None,
            "verbatim": was_trained and verbatim[number],
        }

    rate = {"num_documents": len(bits), "num_matched": sum(verbatim), "rate": None, "ci": None}
    return {
        "num_trained": len(bits),
        "num_references": 32,
        "num_ranked": len(bits) + 32,
        "num_ranked_references": 32,
        "num_repetitions": 4,
        "verbatim": rate,
        "reference_verbatim": {**rate, "num_documents": 32, "num_matched": 0},
        "loss_coverage": None,
        "num_without_loss": None,
        "median_exposure_bits": None,
        "max_exposure_bits": None,
        "median_exposure_extrapolated_bits": None,
        "max_exposure_extrapolated_bits": None,
        "num_guesses": 0,
        "num_right": 0,
        "epsilon_lower_bound": None,
        "epsilon_ceiling": None,
        "delta": 1e-5,
        "assumptions": [],
        "canaries": [make(n, True) for n in range(len(bits))] + [make(len(bits), False)],
    }


def bucket_name(count: int) -> str:
    return f"x{count}" if count else "control"


def make_score(identifier: str, count: int, right: int) -> DocumentScore:
    return DocumentScore(
        id=identifier,
        bucket=bucket_name(count),
        role="trained" if count else "control",
        source="a.jsonl",
        num_repetitions=count,
        num_tokens=100,
        prefix_tokens=50,
        continuation_tokens=TOKENS,
        num_correct=right,
        verbatim=right == TOKENS,
        near_verbatim=right >= NEAR,
        num_edits=TOKENS - right if right >= NEAR else None,
        greedy_margin=0.5,
        teacher_forced_90=right >= KNOWN,
        first_divergence=right,
        extraction_strength=right / TOKENS,
        logprob=-1.0,
        min_margin=0.5,
        type_token_ratio=0.8,
        argmax_type_token_ratio=0.7,
    )


def make_cost(count: int, log10_queries: Sequence[float | None]) -> dict[str, Any]:
    scores = {
        "num_documents": len(log10_queries),
        "num_never": sum(cost is None for cost in log10_queries),
        "quantile_10": None,
        "median": None,
        "quantile_90": None,
        "within": {},
    }
    return {"bucket": bucket_name(count), "model": scores, "base": None}


def make_rate(matched: int, documents: int) -> dict[str, Any]:
    share = matched / documents
    ci = [max(0.0, share - 0.1), min(1.0, share + 0.1)]
    return {"num_documents": documents, "num_matched": matched, "rate": share, "ci": ci}


def make_attacked(count: int, attack: str, matched: int, documents: int) -> dict[str, Any]:
    return {
        "bucket": bucket_name(count),
        "attack": attack,
        "num_queries": 16,
        "best_verbatim": make_rate(0, documents),
        "any_verbatim": make_rate(matched, documents),
        "mean_token_accuracy": None,
    }


def make_models_scores(right: Sequence[int], *, generated: bool) -> dict[str, Any]:
    near = make_rate(sum(r >= NEAR for r in right), len(right))
    return {
        "verbatim": make_rate(sum(r == TOKENS for r in right), len(right)),
        "near_verbatim": near if generated else None,
        "teacher_forced_90": make_rate(sum(r >= KNOWN for r in right), len(right)),
        "mean_token_accuracy": {"value": sum(right) / len(right) / TOKENS, "ci": None},
        "median_first_divergence": 1.0,
        "mean_logprob": None,
    }


def make_bucket(count: int, right: Sequence[int], *, generated: bool = True) -> dict[str, Any]:
    model = make_models_scores(right, generated=generated)
    base = make_models_scores([r // 10 for r in right], generated=generated)
    greedy = ("verbatim", "near_verbatim") if generated else ("verbatim",)
    return {
        "bucket": bucket_name(count),
        "role": "trained" if count else "control",
        "num_repetitions": count,
        "num_documents": len(right),
        "num_too_short": 0,
        "model": model,
        "base": base,
        "mean_extraction_strength": 0.1,
        "mean_type_token_ratio": 0.8,
        "mean_argmax_type_token_ratio": 0.8,
        "num_tiny_margin": 0,
        "risks": {name: model[name] for name in greedy},
        "base_risks": {name: base[name] for name in greedy},
        "minus_control": {},
    }


def make_generated(generated: bool) -> dict[str, Any]:
    return {
        "reason_not_generated": None if generated else "the cache does not fit",
        "num_verbatim": 0,
        "num_generated": 0,
        "floor": 0.5,
        "num_below_floor": 0,
        "num_checked": 0,
        "num_matched_below_floor": 0,
    }


def make_verdict() -> dict[str, Any]:
    none = {"num_documents": 0, "num_matched": 0, "num_clusters": 0, "num_matched_clusters": 0}
    counts = {**none, "rate": None, "ci": None}
    return {
        "level": "memorized",
        "reason": "control",
        "sentence": "It memorized.",
        "scope": "All was audited.",
        "membership": {
            "level": "not-measured",
            "sentence": "It was not tested.",
            "score": None,
            "auc": None,
            "num_members": 0,
            "num_nonmembers": 0,
        },
        "trained": counts,
        "control": counts,
        "base": None,
        "test": None,
        "bucket": "x16",
        "metric": "verbatim",
    }


def make_report(correct: Mapping[int, Sequence[int]], *, generated: bool = True) -> dict[str, Any]:
    background = make_bucket(1, [1, 2], generated=generated) | {
        "bucket": "background",
        "role": "background",
    }
    return {
        "schema": "memguard.report/2",
        "tool_version": "0.1.0",
        "created": "2026-01-01T00:00:00Z",
        "run": "run",
        "model": {
            "name": "model",
            "weights_sha256": "aa",
            "num_parameters": 1000,
            "base": "base",
            "base_weights_sha256": "bb",
        },
        "data": {
            "sources": ["a.jsonl"],
            "documents_sha256": "cc",
            "num_documents": 100,
            "num_clusters": 90,
            "overlap_with_control": None,
            "near_duplicate_words": 13,
        },
        "training": {
            "num_steps": 10,
            "num_supervised_tokens": 1000,
            "dropped_fraction": 0.25,
            "mitigations": [{"name": "goldfish", "k": 4}],
            "train_s": 2.5,
            "heldout_nll": 2.0,
            "base_heldout_nll": 3.0,
            "heldout_bucket": "control",
            "heldout_num_documents": 5,
            "heldout_num_tokens": 500,
        },
        "method": {
            "suite": "extraction",
            "suite_version": 1,
            "probes": [{"name": "extraction"}],
            "continuation_tokens": TOKENS,
            "prefix_tokens": None,
            "max_edit_share": 0.1,
            "tiny_margin": 0.001,
            "dtype": "fp32",
            "batch_tokens": 1024,
            "seed": 0,
            "command": "memguard audit",
            "wall_s": 1.0,
        },
        "verdict": make_verdict(),
        "banners": [],
        "buckets": [
            *(make_bucket(count, right, generated=generated) for count, right in correct.items()),
            background,
        ],
        "generated": make_generated(generated),
        "base_generated": make_generated(generated),
        "dose_response": True,
        "probe_runs": [
            {"name": "extraction", "version": 2, "num_documents": 100, "reason_not_run": None}
        ],
        "membership": [],
        "findings": [],
        "num_findings": 0,
        "environment": {"torch": "2.13.0"},
    }
