"""Run folders as an audit leaves them, made up from how many tokens were right."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from record_examples import make_entry
from result_examples import make_tables, rate_row, value_row

from memguard import records as r
from memguard.compare import FinishedRun
from memguard.records.audit_files import save_audit_files
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


def bucket_name(count: int) -> str:
    return f"x{count}" if count else "control"


def write_run(
    folder: Path,
    *,
    name: str = "plain",
    seed: int = 0,
    correct: Mapping[int, Sequence[int]] = CORRECT,
    changes: Mapping[str, Any] | None = None,
    nll: float = 2.0,
    ids: str = "doc",
    reverse_rows: bool = False,
    costs: Mapping[int, Sequence[float | None]] | None = None,
    attacks: Mapping[int, Mapping[str, tuple[int, int]]] | None = None,
    clusters: Sequence[int] | None = None,
    canaries: Sequence[r.CanaryScore] = (),
    **tables: Any,
) -> FinishedRun:
    """Write ``audit/`` as an audit leaves it.

    Args:
        folder: the run's folder.
        name: the setting.
        seed: the run's seed.
        correct: right tokens of each document, by number of repetitions.
        changes: dotted places in the report and what to put there, e.g. ``method.dtype``.
        nll: loss on held-out documents.
        ids: how ids of documents begin.
        reverse_rows: write the scores in another order.
        costs: log10 of the queries for each document, by number of repetitions; None: not asked.
        attacks: documents that each attack extracted and attacked, by number of repetitions.
        clusters: of the documents trained 4 times; None: unknown.
        canaries: their scores; empty: there are none.
        **tables: see `make_report`.
    """
    changes = {"training.heldout_nll": nll} | dict(changes or {})
    measured = {"costs": costs, "attacks": attacks, "canaries": canaries}
    report = make_report(correct, changes=changes, **measured, **tables)
    scores = [
        {
            "id": f"{ids}-{count}-{number}",
            "bucket": bucket_name(count),
            "role": "trained" if count else "control",
            "continuation_tokens": TOKENS,
            "cluster": clusters[number] if clusters and count == 4 else None,
            "extraction.num_correct": right,
            "extraction.verbatim": right == TOKENS,
            "extraction.near_verbatim": right >= NEAR if tables.get("generated", True) else None,
            **({"sampling.within_limit": is_within(costs[count][number])} if costs else {}),
            **{
                f"attacks.{attack}.any": number < matched if number < attacked else None
                for attack, (matched, attacked) in (attacks or {}).get(count, {}).items()
            },
        }
        for count, all_right in correct.items()
        for number, right in enumerate(all_right)
    ]
    audit = folder / "audit"
    r.save_record(report, audit / "report.json")
    rows = list(reversed(scores)) if reverse_rows else scores
    types = {"extraction.near_verbatim": pa.bool_(), "cluster": pa.int64()}
    names = dict.fromkeys(name for row in scores for name in row)
    columns = {name: pa.array([row.get(name) for row in rows], types.get(name)) for name in names}
    pq.write_table(pa.table(columns), audit / "records.parquet")
    save_results(report.tables.results, audit / "results.parquet")
    if canaries:
        r.save_canaries(canaries, audit / "canaries.parquet")
    (audit / "findings.csv").write_text("id\n")
    (audit / "report.html").write_text("<!doctype html>")
    save_audit_files(audit, has_card=False)
    return FinishedRun(name=name, seed=seed, folder=folder, overrides={})


def write_manifest(run: FinishedRun, *, removed: Sequence[str] = ()) -> None:
    """Write ``manifest.jsonl`` with four documents trained 4 times."""
    entries = [
        make_entry(name, role="removed" if name in removed else "trained", num_repetitions=4)
        for name in (f"doc-4-{number}" for number in range(4))
    ]
    r.save_manifest(entries, run.folder / "manifest.jsonl")


def make_canaries(bits: Sequence[float], verbatim: Sequence[bool]) -> list[r.CanaryScore]:
    """Return trained secrets of so many bits of exposure, and a reference."""
    return [
        r.CanaryScore(
            id=f"canary-{number}",
            was_trained=is_trained,
            nll=9.0,
            base_nll=None,
            num_secret_tokens=6,
            num_repetitions=4,
            num_loss_tokens=6,
            exposure_bits=bits[number] if is_trained else None,
            verbatim=is_trained and verbatim[number],
        )
        for number in range(len(bits) + 1)
        for is_trained in (number < len(bits),)
    ]


def list_bucket_rows(
    bucket: str, right: Sequence[int], generated: bool, base: bool
) -> list[r.ResultRow]:
    """Return the rows of the extraction probe; the base model has a tenth of the tokens right."""
    rows = []
    of_base = [("base", [n // 10 for n in right])] if base else []
    for model, counts in [("trained", right), *of_base]:
        near = sum(n >= NEAR for n in counts) if generated else None
        matched = {
            "verbatim": sum(n == TOKENS for n in counts),
            "near_verbatim": near,
            "teacher_forced_90": sum(n >= KNOWN for n in counts),
        }
        rows += [
            rate_row(
                *("extraction", metric, bucket, number, len(right)),
                why_not="the cache does not fit",
                model=model,
            )
            for metric, number in matched.items()
        ]
        mean = sum(counts) / len(counts) / TOKENS
        rows.append(value_row("extraction", "token_accuracy", bucket, mean, model=model))
    return rows


def is_within(cost: float | None) -> bool:
    """Return whether a document of 50 tokens or more that costs so much counts as extracted."""
    return cost is not None and cost <= 6


def list_attack_rows(
    bucket: str, costs: Sequence[float | None] | None, attacks: Mapping[str, tuple[int, int]]
) -> list[r.ResultRow]:
    """Return the rows of the sampling and the attacks probe."""
    rows = []
    if costs is not None:
        within = sum(map(is_within, costs))
        never, count = sum(cost is None for cost in costs), len(costs)
        rows = [
            rate_row("sampling", "never", bucket, never, count),
            rate_row("sampling", "within_limit", bucket, within, count),
        ]
    for attack, found in attacks.items():
        settings = {"attack": attack, "answers": 16}
        rows.append(rate_row("attacks", "any_answer", bucket, *found, settings=settings))
    if attacks:
        best = max(attacks.values(), key=lambda found: found[0] / found[1])
        rows.append(rate_row("attacks", "best_any_answer", bucket, *best))
    return rows


def make_report(
    correct: Mapping[int, Sequence[int]],
    *,
    changes: Mapping[str, Any] | None = None,
    costs: Mapping[int, Sequence[float | None]] | None = None,
    attacks: Mapping[int, Mapping[str, tuple[int, int]]] | None = None,
    canaries: Sequence[r.CanaryScore] = (),
    generated: bool = True,
    base: bool = True,
    repetitions: Mapping[str, int | None] | None = None,
    rows: Sequence[r.ResultRow] = (),
) -> r.AuditReport:
    """Return the report of a run; what is not said here is said in `write_run`.

    Args:
        correct: right tokens of each document, by number of repetitions.
        changes: dotted places and what to put there.
        costs: attack costs.
        attacks: documents that each attack extracted and attacked.
        canaries: scores of canaries.
        generated: whether text was generated; else near-verbatim is not known.
        base: whether the base model was scored.
        repetitions: of buckets, if other than they say.
        rows: others, in place of those with their keys.
    """
    values = yaml.safe_load(HEADER)
    for dotted, value in (changes or {}).items():
        *above, last = dotted.split(".")
        here: Any = values
        for key in above:
            here = here[key]
        here[last] = value
    found = [
        row
        for count, right in correct.items()
        for row in (
            *list_bucket_rows(bucket_name(count), right, generated, base),
            *list_attack_rows(
                bucket_name(count), (costs or {}).get(count), (attacks or {}).get(count, {})
            ),
        )
    ]
    found += list_bucket_rows("background", [1, 2], generated, base)
    for model, place in (("trained", "heldout_nll"), ("base", "base_heldout_nll")):
        loss = (values["training"] or {}).get(place)
        found.append(value_row("heldout", "nll", "control", loss, 5, interval="", model=model))
    given = {row.key for row in rows}
    listed = [(bucket_name(count), len(right)) for count, right in correct.items()]
    num_ranked = {"num_ranked_references": 32}
    values["tables"] = make_tables(
        [*(row for row in found if row.key not in given), *rows],
        [
            r.BucketRow(
                bucket=bucket,
                role="control" if bucket == "control" else role,
                num_repetitions=(repetitions or {}).get(bucket, count),
                num_documents=num_documents,
            )
            for (bucket, num_documents), count, role in (
                *((one, count, "trained") for one, count in zip(listed, correct, strict=True)),
                (("background", 2), 1, "background"),
            )
        ],
        details=[r.DetailRow(probe="canaries", schema=1, value=num_ranked)] if canaries else [],
    )
    return r.AuditReport.model_validate(values)


HEADER = """
tool_version: 0.1.0
code_sha256: c0c0
created: "2026-01-01T00:00:00Z"
run: run
model: {name: model, weights_sha256: aa, num_parameters: 1000, base: base, base_weights_sha256: bb}
data:
  {sources: [a.jsonl], documents_sha256: cc, num_documents: 100, num_clusters: 90,
   overlap_with_control: null, near_duplicate_words: 13}
training:
  {num_steps: 10, last_step: 10, num_supervised_tokens: 1000, dropped_fraction: 0.25, train_s: 2.5,
   mitigations: [{name: goldfish, k: 4}], heldout_nll: 2.0, base_heldout_nll: 3.0,
   heldout_bucket: control, heldout_num_documents: 5, heldout_num_tokens: 500}
method:
  {suite: extraction, suite_version: 1, probes: [{name: extraction}], continuation_tokens: 50,
   prefix_tokens: null, max_edit_share: 0.1, tiny_margin: 0.001, dtype: fp32, batch_tokens: 1024,
   seed: 0, command: memguard audit, wall_s: 1.0}
verdict:
  level: memorized
  reason: control
  true_share: null
  sentence: It memorized.
  scope: All was audited.
  membership:
    {level: not-measured, sentence: It was not tested., score: null, auc: null, num_members: 0,
     num_nonmembers: 0, lack: no-score}
  trained: &none
    {num_documents: 0, num_matched: 0, num_clusters: 0, num_matched_clusters: 0, rate: null,
     ci: null}
  control: *none
  base: null
  test: null
  bucket: x16
  metric: verbatim
banners: []
dose_response: true
probe_runs: [{name: extraction, version: 2, num_documents: 100, reason_not_run: null}]
findings: []
num_findings: 0
num_by_method: 0
environment: {torch: 2.13.0}
"""
"""A report without its tables."""
