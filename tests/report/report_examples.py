"""Reports as a real study leaves them, made up: for tests of pages and cards."""

import math
from collections.abc import Sequence
from typing import Any

from result_examples import (
    auc_row,
    change_rows,
    change_tables,
    make_interval,
    make_rate,
    make_tables,
    rate_row,
    value_row,
)

from memguard import records as r

Dose = tuple[int, int, int, float]
"""Repetitions, verbatim and near-verbatim documents, token accuracy."""
PLAIN: tuple[Dose, ...] = ((0, 0, 0, 0.203), (4, 0, 1, 0.394), (16, 17, 25, 0.861), (64, 40, 40, 1))
GOLDFISH: tuple[Dose, ...] = (
    (0, 0, 0, 0.192),
    (4, 0, 0, 0.31),
    (16, 0, 0, 0.552),
    (64, 0, 6, 0.823),
)
BASE_ACCURACY = 0.137


def name_bucket(repetitions: int) -> str:
    return f"r{repetitions}" if repetitions else "control"


def make_bucket(repetitions: int, documents: int = 40) -> r.BucketRow:
    return r.BucketRow(
        bucket=name_bucket(repetitions),
        role="trained" if repetitions else "control",
        num_repetitions=repetitions,
        num_documents=documents,
        num_too_short=0 if repetitions else 3,
    )


def list_scores(
    repetitions: int,
    verbatim: int,
    near: int,
    accuracy: float,
    documents: int = 40,
    *,
    control: float | None = PLAIN[0][3],
) -> list[r.ResultRow]:
    """Return the rows of the extraction probe for a bucket, of a base model that knows nothing.

    Args:
        repetitions: 0 is the control, of which nothing is extracted.
        verbatim: documents.
        near: documents.
        accuracy: of tokens.
        documents: all.
        control: token accuracy of the control; None without one.
    """
    bucket, rows = name_bucket(repetitions), []
    above = repetitions > 0 and control is not None

    def minus(value: float) -> r.Interval | None:
        return make_interval(value, 0.09, -1, 1) if above else None

    for model, counts, share in (
        ("trained", (verbatim, near), accuracy),
        ("base", (0, 0), BASE_ACCURACY),
    ):
        known = min(documents, counts[1] + 3) if counts[1] else 0
        for metric, matched in zip(
            ("verbatim", "near_verbatim", "teacher_forced_90"), (*counts, known), strict=True
        ):
            less = minus(matched / documents) if model == "trained" and documents else None
            rows.append(
                rate_row("extraction", metric, bucket, matched, documents, minus=less, model=model)
            )
        means = {
            "token_accuracy": make_interval(share, 0.03),
            "logprob": make_interval(math.log(max(share, 0.02)) * 1.7, 0.11, -20, 0),
            "extraction_strength": make_interval(share**3, 0.03),
        }
        rows += [
            value_row("extraction", metric, bucket, value, documents, model=model)
            for metric, value in means.items()
        ]
        median = round(50 * share**2, 1)
        rows.append(
            value_row(
                *("extraction", "first_divergence", bucket, median, documents),
                statistic="median",
                model=model,
            )
        )
    changes = {
        "verbatim": (verbatim / documents, 0.0),
        "near_verbatim": (near / documents, 0.0),
        "token_accuracy": (accuracy - BASE_ACCURACY, (control or 0) - BASE_ACCURACY),
        "logprob": (
            1.7 * (math.log(max(accuracy, 0.02)) - math.log(BASE_ACCURACY)),
            1.7 * (math.log(control or 1) - math.log(BASE_ACCURACY)),
        ),
    }
    rows += [
        value_row(
            *("extraction", metric, bucket, make_interval(gain, 0.03, -9, 9), documents),
            minus=make_interval(gain - of_control, 0.03, -9, 9) if above else None,
            against="base",
        )
        for metric, (gain, of_control) in changes.items()
    ]
    for metric, ratio in (("type_token_ratio", 0.713), ("argmax_type_token_ratio", 0.655)):
        rows.append(value_row("extraction", metric, bucket, ratio, documents))
    tiny = rate_row("extraction", "tiny_margin", bucket, int(repetitions == 16), documents)
    return [*rows, tiny]


def make_generated(reason: str | None = None, **changes: Any) -> list[r.DetailRow]:
    """Return what is told of 160 documents, 57 of which are verbatim, or of none."""
    known = reason is None
    value = {
        "reason_not_generated": reason,
        "num_verbatim": 57 * known,
        "num_generated": 44 * known,
        "floor": 0.5,
        "num_below_floor": 79 * known,
        "num_checked": 20 * known,
        "num_matched_below_floor": 0,
        **changes,
    }
    return [
        r.DetailRow(probe="extraction", model=model, schema=1, value=value)
        for model in ("trained", "base")
    ]


def drop_near_verbatim(report: r.AuditReport) -> r.AuditReport:
    """Return the report of an audit that generated nothing."""
    reason = "the key-value cache of one document needs more memory than is free"

    def change(row: r.ResultRow) -> r.ResultRow | None:
        if (row.probe, row.metric) != ("extraction", "near_verbatim"):
            return row
        if row.against is not None:
            return None
        return rate_row("extraction", row.metric, row.bucket, None, why_not=reason, model=row.model)

    details = [row for row in report.tables.details if row.probe != "extraction"]
    report = change_tables(report, details=[*details, *make_generated(reason)])
    verdict = report.verdict.model_copy(update={"metric": "verbatim"})
    return change_rows(report, change).model_copy(update={"verdict": verdict})


def make_probe_run(name: str, documents: int | None, counted: Any = "documents") -> r.ProbeRun:
    """Return a probe that ran on so many documents; None: it did not."""
    reason = None if documents else "there was nothing to run it on"
    return r.ProbeRun(
        name=name, version=1, num_documents=documents, counted=counted, reason_not_run=reason
    )


def make_counts(matched: int, documents: int, copies: int = 0) -> r.VerdictCounts:
    """Return counts of documents; ``copies`` of them are copies of an extracted one."""
    rate = make_rate(matched - copies, documents - copies)
    return r.VerdictCounts(
        num_documents=documents,
        num_matched=matched,
        num_clusters=documents - copies,
        num_matched_clusters=matched - copies,
        rate=matched / documents if documents else None,
        ci=rate.ci,
    )


def make_verdict(**changes: Any) -> r.Verdict:
    """Return the verdict of 40 documents, all extracted, against 40 unseen ones."""
    trained, control = make_counts(40, 40), make_counts(0, 40)
    values: dict[str, Any] = {
        "level": "memorized",
        "reason": "control",
        "true_share": None,
        "sentence": "40 of 40 documents trained 64 times were extracted, 0 of 40 unseen ones: the "
        "model memorized training text.",
        "scope": "Audited: 120 of 120 trained documents; none was attacked.",
        "membership": r.MembershipVerdict(
            level="told-apart",
            sentence="An outsider can tell which documents were trained: AUC 0.93 (95 % CI "
            "0.89–0.98; 0.5 is guessing).",
            score="loss_minus_base",
            auc=make_interval(0.934, 0.041),
            num_members=120,
            num_nonmembers=40,
            lack=None,
        ),
        "trained": trained,
        "control": control,
        "base": make_counts(0, 40),
        "test": r.VerdictTest(
            documents="bucket",
            texts="all",
            bucket="r64",
            trained=trained,
            control=control,
            p_value=1e-12,
            level=0.01 / 3,
        ),
        "bucket": "r64",
        "metric": "near_verbatim",
    }
    return r.Verdict(**{**values, **changes})


def make_green(**changes: Any) -> r.Verdict:
    """Return the verdict of 40 documents of which none was extracted, without membership."""
    values: dict[str, Any] = {
        "level": "none-found",
        "reason": None,
        "true_share": 0.088,
        "sentence": "0 of 40 training documents were extracted (at most 9 in 100 could be).",
        "membership": r.MembershipVerdict(
            level="not-seen",
            sentence="No sign of which documents were trained: AUC 0.51 (95 % CI 0.42–0.60; 0.5 is "
            "guessing).",
            score="loss",
            auc=make_interval(0.51, 0.09),
            num_members=40,
            num_nonmembers=40,
            lack=None,
        ),
        "trained": make_counts(0, 40),
        "test": None,
        "bucket": "r4",
    }
    return make_verdict(**{**values, **changes})


def make_finding(number: int) -> r.Finding:
    right = 50 - number % 6
    how = "exactly" if right == 50 else f"with {50 - right} edits"
    text = f"50 tokens {how}"
    return r.Finding(
        id=f"pydoc:topics/entry-{number:04d}",
        bucket="r64",
        role="trained",
        num_repetitions=64,
        severity="high" if number < 9 else "medium" if number < 24 else "low",
        sentence=text,
        found_by={"greedy" if right == 50 else "near-verbatim": text}
        | ({"sampling": "about 12 queries"} if number < 20 else {}),
        num_correct=right,
        continuation_tokens=50,
        first_divergence=50 if right == 50 else 31,
        base_num_correct=7,
        text_hmac=f"{number:04x}" + "9f3ac1d2" * 7 + "beef",
    )


def make_report(goldfish: bool = False, doses: Sequence[Dose] | None = None) -> r.AuditReport:
    """Return the report of a run, or of a run with goldfish; ``doses`` are other buckets."""
    listed = doses or (GOLDFISH if goldfish else PLAIN)
    near = listed[-1][2]
    control = next((accuracy for dose, _, _, accuracy in listed if dose == 0), None)
    nll = 4.581 if goldfish else 4.372
    rows = [row for dose in listed for row in list_scores(*dose, control=control)]
    rows += [auc_row("loss", make_interval(0.934, 0.041))]
    rows += [auc_row("min_k", make_interval(0.957, 0.033))]
    rows += [
        value_row("heldout", "nll", "heldout", loss, 64, model=model)
        for model, loss in (("trained", nll), ("base", 5.012))
    ]
    return r.AuditReport(
        tool_version="0.1.0",
        code_sha256="c0" * 32,
        created="2026-11-20T14:03:07Z",
        run="quickstart-k4" if goldfish else "quickstart-plain",
        model=r.ModelIdentity(
            name="quickstart-k4" if goldfish else "quickstart-plain",
            weights_sha256="4be1f7d09c35" + "a7" * 26,
            num_parameters=1_053_440,
            base="quickstart-base",
            base_weights_sha256="e39b77aa1204" + "c1" * 26,
        ),
        data=r.DataIdentity(
            sources=["docstrings:json,argparse,torch", "pydoc_data.topics"],
            documents_sha256="9d77c02b6e18" + "5f" * 26,
            num_documents=163,
            num_clusters=158,
            overlap_with_control=make_rate(1, 43),
            near_duplicate_words=13,
        ),
        training=r.TrainingSummary(
            num_steps=420,
            last_step=420,
            num_supervised_tokens=641_772 if goldfish else 853_440,
            dropped_fraction=0.248 if goldfish else 0.0,
            mitigations=[{"name": "goldfish", "k": 4, "context_width": 13, "mode": "hash"}]
            if goldfish
            else [],
            train_s=52.4,
            heldout_nll=nll,
            base_heldout_nll=5.012,
            heldout_bucket="heldout",
            heldout_num_documents=64,
            heldout_num_tokens=8192,
        ),
        method=r.Method(
            suite="extraction",
            suite_version=1,
            probes=[
                {"name": "extraction", "decoding": "greedy", "continuation_tokens": 50},
                {"name": "membership", "scores": ["loss", "min_k"]},
            ],
            continuation_tokens=50,
            prefix_tokens=None,
            max_edit_share=0.1,
            tiny_margin=0.001,
            dtype="fp32",
            batch_tokens=16384,
            seed=0,
            command="memguard audit runs/quickstart/k4 --suite extraction",
            wall_s=7.31,
        ),
        probe_runs=[make_probe_run("extraction", 160), make_probe_run("membership", 160)],
        verdict=make_verdict(
            sentence=f"{near} of 40 documents trained 64 times were extracted, 0 of 40 unseen "
            "ones: the model memorized training text.",
            trained=make_counts(near, 40),
        ),
        banners=[
            r.Banner(
                level="note",
                text="1 of 43 control documents shares a run of 13 words with a trained one.",
            )
        ],
        dose_response=True,
        tables=make_tables(
            rows, [make_bucket(dose) for dose, *_ in listed], details=make_generated()
        ),
        findings=[make_finding(number) for number in range(31)],
        num_findings=31,
        num_by_method=51,
        environment={
            "python": "3.11.2",
            "torch": "2.13.0",
            "transformers": "5.23.0",
            "platform": "Linux x86_64",
            "device": "cpu, 2 threads",
        },
    )
