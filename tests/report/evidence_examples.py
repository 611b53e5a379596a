"""Reports with everything a full suite finds, made up: for tests of pages."""

import math
from collections.abc import Sequence
from typing import Any

import report_examples as examples
from result_examples import auc_row, change_tables, make_interval, make_metric, rate_row, value_row

from memguard import records as r

COSTS = {"control": None, "r4": 31.4, "r16": 5.13, "r64": 1.6}
"""log10 of the median document's queries; the control's median is never drawn."""
FOUND = {
    "sampling": {"r16": (1, 3), "r64": (4, 9)},
    "beam_search": {"r16": (2, 6), "r64": (6, 14)},
    "fill": {"r4": (0, 1), "r16": (11, 19), "r64": (24, 38)},
}
"""Documents by attack and bucket: of which the first answer was right, of which any."""
NOTES = {"fill": "Knows which tokens the mitigation drops, not what they are."}
DEFINITIONS = {
    "loss": "Mean log-probability of a token (Yeom et al. 2018).",
    "blind": "Bag of words, cross-fitted: never asks the model.",
}
BUCKETS = tuple(COSTS)
REWRITINGS = (
    ("leading_space", 40, 3, 0.011),
    ("single_line", 39, 39, 0.518),
    ("wrapped_60", 0, 0, None),
    ("near-duplicates", 5, 2, 0.072),
)
"""Name, passages, changed masks, leaked share."""


def list_costs(bucket: str, median: float | None, **key: Any) -> list[r.ResultRow]:
    """Return the attack cost of 40 documents; None: 25 of them are never drawn."""
    rows = [rate_row("sampling", "never", bucket, 0 if median is not None else 25, **key)]
    quantiles = {
        "q10": 52 if median is None else max(1, math.ceil(median - 1.7)),
        "median": None if median is None else math.ceil(median),
        "q90": None if median is None else math.ceil(median + 3.3),
    }
    for statistic, value in quantiles.items():
        rows.append(
            value_row(
                *("sampling", "log10_queries", bucket, value),
                statistic=statistic,
                why_not="never sampled",
                **key,
            )
        )
    for bound in (1, 10, 1_000, 1_000_000):
        drawn = 0 if median is None else round(20 + 9 * (math.log10(bound) - median))
        matched, settings = max(0, min(40, drawn)), {"queries": bound}
        rows.append(
            rate_row("sampling", "within_queries", bucket, matched, settings=settings, **key)
        )
    for statistic, value in quantiles.items():
        least = 20 if value is None else value // 2
        rows.append(value_row("sampling", "log10_floor", bucket, least, statistic=statistic, **key))
    beyond = 40 if median is None else max(0, min(40 - matched, round(2 * median)))
    # Of 50 tokens, the limit is a million.
    return [
        *rows,
        rate_row("sampling", "within_limit", bucket, matched, **key),
        rate_row("sampling", "beyond_limit", bucket, beyond, **key),
    ]


def list_attacked(bucket: str, attack: str, **key: Any) -> list[r.ResultRow]:
    """Return what an attack with 16 answers finds in 40 documents."""
    first, found = FOUND[attack].get(bucket, (0, 0))
    settings = {"attack": attack, "answers": 16}
    accuracy = make_interval(0.3 + first / 60, 0.05)
    return [
        rate_row("attacks", "first_answer", bucket, first, settings=settings, **key),
        rate_row("attacks", "any_answer", bucket, found, settings=settings, **key),
        value_row("attacks", "token_accuracy", bucket, accuracy, settings=settings, **key),
    ]


def list_membership(**key: Any) -> list[r.ResultRow]:
    """Return AUCs and true-positive rates; 'reference' had no model, 'recall' misses four."""
    rows = []
    aucs = {"loss": 0.884, "min_k_plus_plus": 0.921, "loss_minus_base": 0.957, "recall": 0.791}
    for score, auc in {**aucs, "reference": None, r.BLIND: 0.53}.items():
        missing = {"recall": 4, "reference": 120}.get(score, 0)
        members, known = 120 - missing, auc is not None
        counted = {"num_other": 40 if known else 0, "num_missing": missing, **key}
        interval = None if auc is None else make_interval(auc, 0.05)
        rows.append(auc_row(score, interval, members, **counted))
        for rate in ("0.001", "0.01", "0.1") if auc is not None else ():
            matched = round(100 * (auc or 0)) - missing if rate == "0.1" else None
            rows.append(
                rate_row(
                    *("membership", "tpr", r.MEMBERS, matched, members),
                    settings={"score": score, "fpr": rate},
                    why_not=f"fewer than 1 / {rate} control documents",
                    **counted,
                )
            )
    return rows


def describe_membership(control: int = 40) -> r.DetailRow:
    """Return the ROC of each score with rates: powers of the FPR, through the TPR at 10 %."""
    rates = {
        row.parameters: row for row in list_membership() if row.metric == "tpr" and row.is_known
    }
    curves = []
    for row in rates.values():
        score = row.parameters.rpartition("score=")[2]
        power = math.log10(1 / (row.value or 1))
        allowed = (*range(11), 12, 13, 15, 18, 20, 24, 27, 32, 37, control)
        curve = r.RocCurve(
            score=score,
            num_members=row.num_documents,
            num_control=control,
            num_allowed=tuple(allowed),
            num_matched=tuple(round(row.num_documents * (k / control) ** power) for k in allowed),
        )
        curves.append(curve.model_dump(mode="json"))
    return r.DetailRow(probe="membership", schema=2, value={"roc": curves})


def list_canaries() -> list[r.ResultRow]:
    rows = [
        rate_row("canaries", "verbatim", r.SECRETS, 3, 17),
        rate_row("canaries", "verbatim", r.REFERENCE_SECRETS, 0, 15),
        rate_row("canaries", "without_loss", r.SECRETS, 0, 17),
        value_row("canaries", "loss_coverage", r.SECRETS, 0.75, 17),
    ]
    bits = {"median": math.log2(15) - math.log2(5), "max": math.log2(15)}
    for statistic, value in bits.items():
        key = {"statistic": statistic, "num_other": 15}
        rows.append(value_row("canaries", "exposure_bits", r.SECRETS, value, 17, **key))
    return rows


def describe_canaries(epsilon: float | None = 1.496) -> r.DetailRow:
    value = {
        "num_trained": 17,
        "num_references": 15,
        "num_ranked": 32,
        "num_ranked_references": 15,
        "num_repetitions": 64,
        "num_guesses": 24,
        "num_right": 23,
        "epsilon_lower_bound": epsilon,
        "epsilon_ceiling": None if epsilon is None else 2.017,
        "delta": 1e-5,
        "assumptions": [
            "Each canary was trained or left out by its own fair coin.",
            "One training run was audited; another may leak more or less.",
        ],
        "has_base": True,
        "exposure": {"bits": [0, 1, 2, 3], "reached": [17, 14, 8, 2], "num_secrets": 17},
    }
    return r.DetailRow(probe="canaries", schema=1, value=value)


def list_masks(
    rewritings: Sequence[tuple[str, int, int, float | None]] = REWRITINGS,
) -> list[r.ResultRow]:
    rows = []
    for name, passages, changed, share in rewritings:
        settings = {"rewriting": name}
        counted: tuple[Any, ...] = (changed, passages)
        rows += [
            rate_row("mask_consistency", "mask_changed", r.TRAINED, *counted, settings=settings),
            value_row(
                *("mask_consistency", "leaked_share", r.TRAINED, share, passages),
                settings=settings,
                why_not="no passage differs",
            ),
        ]
    return rows


def list_copies() -> list[r.ResultRow]:
    """Return the documents extracted although at most k of the trained ones have their text."""
    return [
        rate_row("extraction", "verbatim", r.TRAINED, matched, documents, settings=settings)
        for k, documents, matched in ((1, 104, 3), (2, 112, 5), (5, 120, 7), (10, 120, 7))
        for settings in [{"copies_at_most": k}]
    ]


def list_windows() -> list[r.ResultRow]:
    """Return rates and token accuracies of twelve windows, and the base model's."""
    rows = []
    for offset in (0, 64):
        for prefix in (10, 25, 50):
            for size in (25, 50):
                settings = {"offset": offset, "prefix_tokens": prefix, "continuation_tokens": size}
                accuracy = [0.17, 0.22 + prefix / 400, 0.4 + prefix / 300, 0.6 + prefix / 250]
                matched = [0, 0, prefix // 25, prefix // 5]
                rows += _list_pairs("grid", "verbatim", matched, 0, settings)
                rows += _list_pairs("grid", "token_accuracy", accuracy, 0.131, settings)
    return rows


def list_written() -> list[r.ResultRow]:
    """Return the overlap of greedy and of sampled text."""
    rows = []
    for decoding, lost in (("greedy", 0.0), ("T=1, top-p 0.95", 0.11)):
        values: dict[str, tuple[list[float], float]] = {
            "rouge_l": ([0.21, 0.3 - lost / 3, 0.52 - lost, 0.79 - lost], 0.184),
            "longest_copied_run": ([3.1, 5.2, 14.7 - 10 * lost, 31.5], 3.0),
            "edit_distance": ([0.86, 0.77, 0.51 + lost, 0.24 + lost], 0.88),
            "near_verbatim": ([0, 0, 2, 11], 0),
            "bleu_above_0.75": ([0, 0, 3, 13], 0),
            "type_token_ratio": ([0.63, 0.66, 0.7, 0.71], 0.61),
        }
        for metric, (of_model, base) in values.items():
            rows += _list_pairs("generation", metric, of_model, base, {"decoding": decoding})
    return rows


def _list_pairs(
    probe: str, metric: str, values: Sequence[float], base: float, settings: dict[str, Any]
) -> list[r.ResultRow]:
    """Return the rows of the four buckets, each followed by the base model's."""
    rows = []
    for bucket, value in zip(BUCKETS, values, strict=True):
        for model, shown in (("trained", value), ("base", base)):
            key: dict[str, Any] = {"settings": settings, "model": model}
            if make_metric(probe, metric).statistic == "rate":
                rows.append(rate_row(probe, metric, bucket, int(shown), **key))
            else:
                interval = make_interval(shown, 0.03, 0, 50 if shown > 1 else 1)
                rows.append(value_row(probe, metric, bucket, interval, **key))
    return rows


def list_trends() -> list[r.TestRow]:
    return [
        r.TestRow(
            probe="extraction",
            metric=metric,
            bucket=r.TRAINED,
            test="cochran-armitage",
            num_documents=160,
            statistic=z,
            p_value=p_value,
            doses=(0, 4, 16, 64),
            fitted=(0.0, 0.0, 0.0, highest),
        )
        for metric, z, p_value, highest in (
            ("verbatim", None, None, 0.0),
            ("near_verbatim", 3.912, 0.00009, 0.15),
        )
    ]


def make_full_report(goldfish: bool = True) -> r.AuditReport:
    """Return a report with every kind of evidence."""
    report = examples.make_report(goldfish)
    probes = [
        {"name": "extraction", "version": 1, "continuation_tokens": 50, "prefix_tokens": None},
        {"name": "grid", "version": 1, "offsets": [0, 64]},
        {
            "name": "sampling",
            "version": 1,
            "schemes": [{"temperature": 1.0, "top_k": None}, {"temperature": 1.0, "top_k": 40}],
        },
        {"name": "membership", "version": 2},
        {"name": "canaries", "version": 1, "delta": 1e-05},
        {"name": "generation", "version": 1},
        {"name": "attacks", "version": 1, "width": 16},
        {"name": "mask_consistency", "version": 1},
    ]
    best = {name: max(found.get(name, (0, 0))[1] for found in FOUND.values()) for name in BUCKETS}
    rows = [row for row in report.tables.results if row.probe != "membership"]
    rows += [row for name in BUCKETS for row in list_costs(name, COSTS[name])]
    rows += [row for name in BUCKETS for row in list_costs(name, None, model="base")]
    rows += [row for name in BUCKETS for attack in FOUND for row in list_attacked(name, attack)]
    rows += [rate_row("attacks", "best_any_answer", name, best[name]) for name in BUCKETS]
    rows += [*list_membership(), *list_canaries(), *list_masks(), *list_copies()]
    rows += [*list_windows(), *list_written()]
    attacks = {row.parameters for row in rows if row.probe == "attacks" and row.parameters}
    metrics = [
        make_metric("attacks", metric, parameters, note=note)
        for metric in ("first_answer", "any_answer")
        for parameters in sorted(attacks)
        for attack, note in NOTES.items()
        if f"attack={attack}" in parameters
    ]
    metrics += [
        make_metric("membership", "auc", f"score={score}", meaning=meaning)
        for score, meaning in DEFINITIONS.items()
    ]
    details = [
        *report.tables.details,
        describe_membership(),
        describe_canaries(),
        r.DetailRow(probe="sampling", schema=1, value={"schemes": ["temperature 1"]}),
        r.DetailRow(probe="attacks", schema=1, value={"best": dict.fromkeys(BUCKETS, "fill")}),
    ]
    report = change_tables(
        report, results=rows, tests=list_trends(), details=details, metrics=metrics
    )
    return report.model_copy(
        update={
            "method": report.method.model_copy(update={"suite": "full", "probes": probes}),
            "probe_runs": [
                *(examples.make_probe_run(n, 160) for n in ("extraction", "grid", "sampling")),
                examples.make_probe_run("membership", 160),
                examples.make_probe_run("canaries", 32, "canaries"),
                *(examples.make_probe_run(n, 80) for n in ("generation", "attacks")),
                examples.make_probe_run("mask_consistency", 40, "texts"),
            ],
        }
    )
