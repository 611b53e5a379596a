"""Risk and utility of each setting over its seeds, and which settings dominate others.

    risk      the highest extraction rate of the documents that the setting trained most often:
              verbatim or near-verbatim by greedy decoding, sampled within the limit of
              queries, or verbatim by the best attack that ran (over the documents attacked)
    utility   the held-out loss or the benchmark task that the comparison names, mean over seeds;
              see `utility.py`. Settings are compared seed by seed: another seed has other held-out
              documents, which differ by more than settings do

A share is over the documents of all seeds together. If no document occurs twice, its interval is
that of a rate (`compute_rate`, which counts near-duplicates as less evidence); else a jackknife
over texts, so that a document that several seeds drew counts once as evidence. With several seeds
it also covers Student's t interval over the shares of the seeds, so that differences between seeds
are not averaged away; with three seeds this interval is wide. Which share is the risk, and its
interval, `records.tables.choose_risk` says: the same as in an audit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from memguard.audit.statistics import compute_exact_interval, compute_mean, compute_rate
from memguard.compare.runs import AuditedRun, Documents, find_shared_seeds
from memguard.compare.utility import (
    Axis,
    Losses,
    cover_seeds,
    list_utility_rows,
    make_task_axis,
)
from memguard.records import (
    MOST_TRAINED,
    RISK_PLACES,
    AuditReport,
    Badge,
    ComparedTask,
    FrontPoint,
    Interval,
    Level,
    Rate,
    ResultRow,
    RiskName,
    Utility,
    Verdict,
    fill_row,
)
from memguard.records.comparison import HELDOUT
from memguard.records.tables import choose_risk
from memguard.records.verdict import MembershipLevel


def build_front(
    runs: Sequence[AuditedRun], tasks: Sequence[ComparedTask] = (), utility: Utility = HELDOUT
) -> tuple[list[FrontPoint], list[ResultRow]]:
    """Return a point for each setting, in the order of the runs, and its shares and losses as rows.

    Only risks that every run measured are used, so that a setting does not look safer because less
    was measured. If some seeds are shared by all settings, other seeds are left out: their held-out
    documents differ, and could be easier for one setting.
    """
    settings: dict[str, list[AuditedRun]] = {run.run.name: [] for run in runs}
    audits: dict[str, list[AuditReport]] = {name: [] for name in settings}
    shared = find_shared_seeds(runs)
    for run in runs:
        audits[run.run.name].append(run.report)
        if not shared or run.run.seed in shared:
            settings[run.run.name].append(run)
    risks = [name for name in RISK_PLACES if all(_is_measured(run, name) for run in runs)]
    losses: Losses = {
        name: {run.run.seed: run.heldout_nll for run in group} for name, group in settings.items()
    }
    axes = [Axis(values=losses), *(make_task_axis(task, settings) for task in tasks)]
    axis = next(axis for axis in axes if axis.utility == utility)
    points: list[FrontPoint] = []
    rows: list[ResultRow] = []
    for name, group in settings.items():
        shares = dict(_list_shares(name, group, risks))
        points.append(_build_point(name, group, shares, axis, audits[name]))
        rows += [*shares.values(), *_list_losses(name, points[0].name, axes[0])]
    rows += [row for of_task in axes[1:] for row in list_utility_rows(of_task)]
    return mark_dominated(points, axis), rows


def _is_measured(run: AuditedRun, risk: RiskName) -> bool:
    probe, metric, parameters = RISK_PLACES[risk]
    bucket = run.buckets[max(run.buckets)].bucket
    row = run.report.tables.find(probe, metric, bucket, parameters=parameters)
    return row is not None and (row.is_known or not row.num_documents)


def _list_shares(
    name: str, runs: Sequence[AuditedRun], risks: Sequence[RiskName]
) -> Iterator[tuple[RiskName, ResultRow]]:
    """Yield the shares of the documents of all seeds as rows, by method; none without documents."""
    most_trained = [_find_most_trained(run) for run in runs]
    for risk in risks:
        if risk == "attack":
            share = _compute_attack_share(most_trained)
        else:
            share = _compute_share(most_trained, risk)
        if share is None:
            continue
        probe, metric, parameters = RISK_PLACES[risk]
        row = ResultRow(
            setting=name,
            probe=probe,
            parameters=parameters,
            metric=metric,
            statistic="rate",
            bucket=MOST_TRAINED,
            num_documents=share.num_documents,
        )
        yield risk, fill_row(row, share, "pooled")


def _list_losses(name: str, first: str, axis: Axis) -> Iterator[ResultRow]:
    """Yield the held-out loss of a setting, and its change from the first setting."""
    loss = axis.utility.start_row(name, "mean")
    yield fill_row(loss, axis.compute(name), "t")
    difference, reference = axis.subtract(name, first), axis.compute(first).value
    if name == first or difference is None or reference <= 0:
        return
    ci = difference.ci
    change = Interval(
        value=difference.value / reference,
        # No loss falls by more than all of it.
        ci=ci and (max(-1.0, ci[0] / reference), ci[1] / reference),
    )
    against = replace(loss, metric="nll_change", against=f"setting:{first}", statistic="difference")
    yield fill_row(against, change, "t")


def mark_dominated(points: Sequence[FrontPoint], axis: Axis) -> list[FrontPoint]:
    """Return the points, each with the names of the points that dominate it.

    A point dominates another if it is no worse in risk and utility, and better in one of them. It
    dominates beyond the intervals if in addition the risks are equal or their intervals are
    disjoint, and the utilities are equal or differ significantly seed by seed. A point without
    documents neither dominates nor is dominated.
    """
    marked = []
    for point in points:
        above = [other for other in points if _dominates(other, point, axis)]
        apart = [other.name for other in above if _is_apart(other, point, axis)]
        update = {"dominated_by": [other.name for other in above], "dominated_beyond_ci_by": apart}
        marked.append(point.model_copy(update=update))
    return marked


def is_below(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    """Return whether the first interval is entirely below the second; False if one is None."""
    return one is not None and other is not None and one[1] < other[0]


def _dominates(one: FrontPoint, other: FrontPoint, axis: Axis) -> bool:
    if one.risk is None or other.risk is None:
        return False
    worse = axis.utility.worsening
    mine, theirs = (one.risk, worse(one.utility)), (other.risk, worse(other.utility))
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def _is_apart(one: FrontPoint, other: FrontPoint, axis: Axis) -> bool:
    """Return whether a dominating point does so beyond the intervals."""
    is_safer = one.risk == other.risk or is_below(one.risk_ci, other.risk_ci)
    return is_safer and (one.utility == other.utility or axis.is_better(one.name, other.name))


def _build_point(
    name: str,
    runs: Sequence[AuditedRun],
    shares: Mapping[RiskName, ResultRow],
    axis: Axis,
    audits: Sequence[AuditReport],
) -> FrontPoint:
    """Return the point of a setting; ``audits`` are those of all its seeds, compared or not."""
    utility = axis.compute(name)
    by, risk = choose_risk(shares) or (None, None)
    low, high = utility.ci or (None, None)
    return FrontPoint(
        name=name,
        num_seeds=len(runs),
        badges=merge_badges([audit.verdict for audit in audits]),
        num_findings=sum(audit.num_findings for audit in audits),
        num_documents=sum(len(_find_most_trained(run).ids) for run in runs),
        risk=None if risk is None else risk.value,
        risk_low=None if risk is None else risk.low,
        risk_high=None if risk is None else risk.high,
        risk_by=by,
        utility=utility.value,
        utility_low=low,
        utility_high=high,
        is_at_chance=axis.is_at_chance(name),
    )


_TEXT: tuple[Level, ...] = ("none-found", "inconclusive", "extracted", "memorized")
_MEMBERSHIP: tuple[MembershipLevel, ...] = (
    *("not-seen", "not-measured", "cannot-be-judged"),
    *("slightly", "told-apart"),
)
"""Levels, the worst last."""


def merge_badges(verdicts: Sequence[Verdict]) -> tuple[Badge, Badge]:
    """Return the worst badges of several runs; the detail then says how many runs have it."""
    worst = (
        max(verdicts, key=lambda verdict: _TEXT.index(verdict.level)).badges[0],
        max(verdicts, key=lambda one: _MEMBERSHIP.index(one.membership.level)).badges[1],
    )
    if len(verdicts) == 1:
        return worst
    text, membership = (
        replace(
            badge,
            detail=f"{sum(verdict.badges[place].state == badge.state for verdict in verdicts)} of "
            f"{len(verdicts)} runs",
        )
        for place, badge in enumerate(worst)
    )
    return text, membership


def _find_most_trained(run: AuditedRun) -> Documents:
    """Return the bucket with the most repetitions; their number may differ between settings."""
    return run.documents[max(run.documents)]


def _compute_attack_share(seeds: Sequence[Documents]) -> Rate | None:
    """Return the share that the best attack extracted, over all seeds.

    Attacks run on a sample of the documents. The effective number of documents assumes that the
    samples share the same proportion of documents as the buckets of the seeds do.
    """
    names = set.intersection(*(set(documents.attacks) for documents in seeds))
    ids = [identifier for documents in seeds for identifier in documents.ids]
    if not names or not ids:
        return None
    shares = []
    for name in sorted(names):
        rates = [documents.attacks[name] for documents in seeds]
        num_matched = sum(rate.num_matched for rate in rates)
        num_documents = sum(rate.num_documents for rate in rates)
        num_effective = sum(rate.num_effective for rate in rates) * len(set(ids)) / len(ids)
        ci = compute_exact_interval(num_matched, num_documents, num_effective)
        by_seed = [rate.rate for rate in rates if rate.rate is not None]
        shares.append(
            Rate(
                num_documents=num_documents,
                num_matched=num_matched,
                rate=num_matched / num_documents,
                ci=cover_seeds(ci, by_seed),
            )
        )
    return max(shares, key=lambda share: share.rate or 0.0)


def _compute_share(seeds: Sequence[Documents], risk: RiskName) -> Rate | None:
    """Return the share of the documents of all seeds; None without documents."""
    extracted = [_list_extracted(documents, risk) for documents in seeds]
    values_D = np.concatenate(extracted)
    ids = [identifier for documents in seeds for identifier in documents.ids]
    if not ids:
        return None
    text_D = _find_texts(seeds)
    share = compute_rate(values_D, text_D)
    ci = share.ci
    if len(set(ids)) < len(ids):
        mean = compute_mean(values_D, bounds=(0, 1), clusters=text_D)
        ci = None if mean is None else mean.ci
    by_seed = [float(values.mean()) for values in extracted if len(values)]
    return share.model_copy(update={"ci": cover_seeds(ci, by_seed)})


def _find_texts(seeds: Sequence[Documents]) -> NDArray[np.int64]:
    """Return the text of each document of all seeds, [D]: near-duplicates have the same.

    Clusters are numbered by each run, so they are joined where runs share a document.
    """
    ids = [identifier for documents in seeds for identifier in documents.ids]
    pairs = [(run, c) for run, one in enumerate(seeds) for c in one.clusters.tolist()]
    names = [np.unique(ids, return_inverse=True)[1]]
    names.append(np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1))
    text_D, before_D = np.arange(len(ids)), None
    while before_D is None or (text_D != before_D).any():
        before_D = text_D
        for name_D in names:
            # Each document takes the smallest number among those that it shares a name with.
            smallest = np.full(len(ids), len(ids))
            np.minimum.at(smallest, name_D, text_D)
            text_D = smallest[name_D]
    return text_D


def _list_extracted(documents: Documents, risk: RiskName) -> NDArray[np.float64]:
    # Attacks run on a sample; see `_compute_attack_share`.
    extracted = {
        "verbatim": documents.verbatim,
        "near_verbatim": documents.near_verbatim,
        "attack_cost": documents.within_limit,
    }[risk]
    assert extracted is not None, "measured in every run, or in none"
    return extracted.astype(np.float64)
