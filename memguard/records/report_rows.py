"""The rows of an audit's results table, from the records of its report."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memguard.records.audit import AuditReport, TrainingSummary, Variant, VariantBucket
from memguard.records.results import (
    MEMBERS,
    NO_DOCUMENTS,
    ONE_TEXT,
    REFERENCE_SECRETS,
    SECRETS,
    TRAINED,
    Method,
    ResultRow,
    Statistic,
    fill_row,
    write_parameters,
)
from memguard.records.scores import (
    MIN_FOR_QUANTILES,
    NUM_RISK_QUERIES,
    AttackCostScores,
    AttackedBucket,
    BucketScores,
    CanaryScores,
    Interval,
    MaskChange,
    Measure,
    MembershipScores,
    Rate,
    RiskName,
)

_NOT_GENERATED = "no text was generated"
_QUANTILES: dict[Statistic, str] = {"q10": "quantile_10", "median": "median", "q90": "quantile_90"}


def list_report_rows(report: AuditReport) -> list[ResultRow]:
    """Return every number of a report's statistical parts, in the order of its parts."""
    has_base = report.model.base is not None
    rows: list[ResultRow] = []
    for measure in report.measures:
        rows += _list_measured(measure, has_base)
    for bucket in report.buckets:
        rows += _list_of_bucket(bucket, report)
    for cost in report.attack_cost:
        within = next(b for b in report.buckets if b.bucket == cost.bucket).minus_control
        rows += _list_attack_cost(cost.bucket, cost.model, within.get("attack_cost"))
        if cost.base is not None:
            base = _list_attack_cost(cost.bucket, cost.base)
            rows += [replace(row, model="base") for row in base]
    for attack in report.attacks:
        rows += _list_attacked(attack)
    for copies in report.extracted_copies:
        parameters = write_parameters({"copies_at_most": copies.k})
        row = ResultRow(
            probe="extraction",
            parameters=parameters,
            metric="verbatim",
            statistic="rate",
            bucket=TRAINED,
            num_documents=copies.num_documents,
        )
        rows.append(_fill_count(row, copies.num_extracted))
    for score in report.membership:
        rows += _list_membership(score)
    if report.canaries is not None:
        rows += _list_canaries(report.canaries)
    for change in report.mask_changes:
        rows += _list_mask_change(change)
    if report.training is not None:
        rows += _list_training(report.training)
    if report.variants is not None:
        first = report.variants.variants[0]
        for variant in report.variants.variants:
            heldout = (report.variants.heldout_bucket, report.variants.heldout_num_documents)
            rows += _list_variant(variant, first, heldout)
    return rows


def _fill_count(row: ResultRow, num_matched: int) -> ResultRow:
    """Fill a share of which only the counts are known."""
    count = row.num_documents
    rate = Rate(
        num_documents=count,
        num_matched=num_matched,
        rate=num_matched / count if count else None,
        ci=None,
    )
    return fill_row(row, rate, "")


def _list_measured(measure: Measure, has_base: bool) -> Iterator[ResultRow]:
    parameters = "" if measure.probe == "extraction" else write_parameters(measure.parameters)
    is_rate = any(isinstance(row.model, Rate) for row in measure.buckets)
    for bucket in measure.buckets:
        why_not = ONE_TEXT if bucket.num_documents else NO_DOCUMENTS
        row = ResultRow(
            probe=measure.probe,
            parameters=parameters,
            metric=measure.metric,
            statistic="rate" if is_rate else "mean",
            bucket=bucket.bucket,
            num_documents=bucket.num_documents,
            num_missing=bucket.num_missing,
        )
        method: Method = "clopper-pearson" if is_rate else "jackknife"
        yield fill_row(
            row, bucket.model, method, minus_control=bucket.minus_control, why_not=why_not
        )
        if has_base:
            yield fill_row(replace(row, model="base"), bucket.base, method, why_not=why_not)
            yield fill_row(
                replace(row, against="base", statistic="difference"),
                bucket.change_from_base,
                "tango" if is_rate else "jackknife",
                minus_control=bucket.change_from_base_minus_control,
                why_not=why_not,
            )


def _list_of_bucket(bucket: BucketScores, report: AuditReport) -> Iterator[ResultRow]:
    """Yield what the main table has besides the measures: medians, ratios, ties, risks."""
    row = ResultRow(
        probe="extraction",
        metric="first_divergence",
        statistic="median",
        bucket=bucket.bucket,
        num_documents=bucket.num_documents,
    )
    yield fill_row(row, bucket.model.median_first_divergence, "")
    if bucket.base is not None:
        base = replace(row, model="base")
        yield fill_row(base, bucket.base.median_first_divergence, "")
    for metric, value in (
        ("type_token_ratio", bucket.mean_type_token_ratio),
        ("argmax_type_token_ratio", bucket.mean_argmax_type_token_ratio),
    ):
        yield fill_row(replace(row, metric=metric, statistic="mean"), value, "")
    tiny = replace(row, metric="tiny_margin", statistic="rate")
    yield _fill_count(tiny, bucket.num_tiny_margin)
    if bucket.model.near_verbatim is None:
        near = replace(row, metric="near_verbatim", statistic="rate")
        yield fill_row(near, None, "", why_not=report.generated.reason_not_generated or "")
        if bucket.base is not None:
            yield fill_row(replace(near, model="base"), None, "", why_not=_NOT_GENERATED)
    if (best := bucket.risks.get("attack")) is not None:
        attack = replace(row, probe="attacks", metric="best_any_answer", statistic="rate")
        minus = bucket.minus_control.get("attack")
        yield fill_row(attack, best, "clopper-pearson", minus_control=minus)


def _list_attack_cost(
    bucket: str, cost: AttackCostScores, minus_control: Interval | None = None
) -> Iterator[ResultRow]:
    row = ResultRow(
        probe="sampling",
        metric="never",
        statistic="rate",
        bucket=bucket,
        num_documents=cost.num_documents,
    )
    yield _fill_count(row, cost.num_never)
    is_few = cost.num_documents < MIN_FOR_QUANTILES
    why_not = f"fewer than {MIN_FOR_QUANTILES} documents" if is_few else "never sampled"
    for statistic, name in _QUANTILES.items():
        quantile = replace(row, metric="log10_queries", statistic=statistic)
        yield fill_row(quantile, getattr(cost, name), "", why_not=why_not)
    for queries, rate in cost.within.items():
        within = replace(
            row, metric="within_queries", parameters=write_parameters({"queries": queries})
        )
        minus = minus_control if queries == NUM_RISK_QUERIES else None
        yield fill_row(within, rate, "clopper-pearson", minus_control=minus)


def _list_attacked(attack: AttackedBucket) -> Iterator[ResultRow]:
    row = ResultRow(
        probe="attacks",
        parameters=write_parameters({"attack": attack.attack, "answers": attack.num_queries}),
        metric="first_answer",
        statistic="rate",
        bucket=attack.bucket,
        num_documents=attack.any_verbatim.num_documents,
    )
    yield fill_row(row, attack.best_verbatim, "clopper-pearson")
    yield fill_row(replace(row, metric="any_answer"), attack.any_verbatim, "clopper-pearson")
    accuracy = replace(row, metric="token_accuracy", statistic="mean")
    yield fill_row(accuracy, attack.mean_token_accuracy, "jackknife")


def _list_membership(score: MembershipScores) -> Iterator[ResultRow]:
    row = ResultRow(
        probe="membership",
        parameters=write_parameters({"score": score.score}),
        metric="auc",
        statistic="auc",
        bucket=MEMBERS,
        num_documents=score.num_members,
        num_other=score.num_nonmembers,
        num_missing=score.num_missing,
    )
    too_few = "fewer than two trained or control documents have the score"
    yield fill_row(row, score.auc, "delong", why_not=too_few)
    for rate, tpr in score.tpr_at_fpr.items():
        yield fill_row(
            replace(
                row,
                parameters=write_parameters({"score": score.score, "fpr": rate}),
                metric="tpr",
                statistic="rate",
            ),
            tpr,
            "threshold",
            why_not=f"fewer than 1 / {rate} control documents",
        )


def _list_canaries(canaries: CanaryScores) -> Iterator[ResultRow]:
    row = ResultRow(
        probe="canaries",
        metric="verbatim",
        statistic="rate",
        bucket=SECRETS,
        num_documents=canaries.num_trained,
    )
    yield fill_row(row, canaries.verbatim, "clopper-pearson")
    references = replace(row, bucket=REFERENCE_SECRETS, num_documents=canaries.num_references)
    yield fill_row(references, canaries.reference_verbatim, "clopper-pearson")
    ranked = canaries.num_ranked - canaries.num_ranked_references
    exposure = replace(row, num_documents=ranked, num_other=canaries.num_ranked_references)
    for metric, values in (
        ("exposure_bits", (canaries.median_exposure_bits, canaries.max_exposure_bits)),
        (
            "exposure_extrapolated_bits",
            (canaries.median_exposure_extrapolated_bits, canaries.max_exposure_extrapolated_bits),
        ),
    ):
        median, highest = (
            replace(exposure, metric=metric, statistic=statistic) for statistic in ("median", "max")
        )
        why_not = "too few references of the same length, or all equal"
        yield fill_row(median, values[0], "", why_not=why_not)
        yield fill_row(highest, values[1], "", why_not=why_not)
    coverage = replace(row, metric="loss_coverage", statistic="mean")
    yield fill_row(coverage, canaries.loss_coverage, "", why_not="not recorded")
    without = replace(row, metric="without_loss")
    if canaries.num_without_loss is None:
        yield fill_row(without, None, "", why_not="not recorded")
    else:
        yield _fill_count(without, canaries.num_without_loss)


def _list_mask_change(change: MaskChange) -> Iterator[ResultRow]:
    row = ResultRow(
        probe="mask_consistency",
        parameters=write_parameters({"rewriting": change.rewriting}),
        metric="mask_changed",
        statistic="rate",
        bucket=TRAINED,
        num_documents=change.num_passages,
    )
    yield _fill_count(row, change.num_changed)
    leaked = replace(row, metric="leaked_share", statistic="mean")
    yield fill_row(leaked, change.mean_leaked_share, "", why_not="no passage differs")


def _list_training(training: TrainingSummary) -> Iterator[ResultRow]:
    """Yield the held-out losses, and the audits during training."""
    if training.heldout_bucket is not None:
        row = ResultRow(
            probe="heldout",
            metric="nll",
            statistic="mean",
            bucket=training.heldout_bucket,
            num_documents=training.heldout_num_documents,
        )
        yield fill_row(row, training.heldout_nll, "", why_not=ONE_TEXT)
        yield fill_row(replace(row, model="base"), training.base_heldout_nll, "", why_not=ONE_TEXT)
    for audit in training.watched:
        for bucket in audit.buckets:
            row = ResultRow(
                step=audit.step,
                probe="extraction",
                metric="verbatim",
                statistic="rate",
                bucket=bucket.bucket,
                num_documents=bucket.num_documents,
            )
            yield _fill_count(row, bucket.num_verbatim)
            near = replace(row, metric="near_verbatim")
            if bucket.num_near_verbatim is None:
                yield fill_row(near, None, "", why_not=_NOT_GENERATED)
            else:
                yield _fill_count(near, bucket.num_near_verbatim)
            yield _fill_count(replace(row, metric="learned"), bucket.num_learned)
            accuracy = replace(row, metric="token_accuracy", statistic="mean")
            yield fill_row(accuracy, bucket.mean_token_accuracy, "")


def _list_variant(
    variant: Variant, first: Variant, heldout: tuple[str | None, int]
) -> Iterator[ResultRow]:
    against = f"variant:{first.name}"
    rows: list[ResultRow] = []
    for bucket in variant.buckets:
        rows += _list_of_variant(bucket, None if variant is first else against, variant)
    if heldout[0] is not None:
        row = ResultRow(
            probe="heldout",
            metric="nll",
            statistic="mean",
            bucket=heldout[0],
            num_documents=heldout[1],
        )
        rows.append(fill_row(row, variant.heldout_nll, "", why_not=ONE_TEXT))
        if variant is not first:
            paired = replace(row, against=against, statistic="difference")
            rows.append(fill_row(paired, variant.heldout_difference, "jackknife", why_not=ONE_TEXT))
    return (replace(row, variant=variant.name) for row in rows)


def _list_of_variant(
    bucket: VariantBucket, against: str | None, variant: Variant
) -> Iterable[ResultRow]:
    row = ResultRow(
        probe="extraction",
        metric="verbatim",
        statistic="rate",
        bucket=bucket.bucket,
        num_documents=bucket.num_documents,
    )
    within = write_parameters({"queries": NUM_RISK_QUERIES})
    places: dict[RiskName, ResultRow] = {
        "verbatim": row,
        "near_verbatim": replace(row, metric="near_verbatim"),
        "attack_cost": replace(row, probe="sampling", metric="within_queries", parameters=within),
    }
    for risk, place in places.items():
        rate = bucket.risks.get(risk)
        if rate is None and risk == "near_verbatim":
            why_not = variant.reason_not_generated or NO_DOCUMENTS
            yield fill_row(place, None, "", why_not=why_not)
        if rate is None:
            continue
        if bucket.attack_cost is None or risk != "attack_cost":
            yield fill_row(place, rate, "clopper-pearson")
        if against is not None:
            paired = replace(place, against=against, statistic="difference")
            yield fill_row(paired, bucket.differences.get(risk), "tango")
    if bucket.attack_cost is not None:
        yield from _list_attack_cost(bucket.bucket, bucket.attack_cost)
    mean = replace(row, metric="logprob", statistic="mean")
    why_not = ONE_TEXT if bucket.num_documents else NO_DOCUMENTS
    yield fill_row(mean, bucket.mean_logprob, "jackknife", why_not=why_not)
    if against is not None:
        paired = replace(mean, against=against, statistic="difference")
        yield fill_row(paired, bucket.logprob_difference, "jackknife", why_not=why_not)
