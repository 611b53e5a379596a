"""Risk against utility: each setting over its seeds, and which others beat it.

    risk      the worst of three shares of the documents that the setting trained most often:
              recited verbatim, recited near-verbatim, drawn within 10^6 queries (where asked)
    utility   nats a token on documents never trained, mean over seeds; lower is better. Settings
              are held against each other seed by seed: another seed has other held-out documents,
              which differ by more than settings do

A share is of the documents of all seeds together. A document that several seeds drew is one piece
of evidence: its interval is exact (Clopper-Pearson) where no document comes twice, else a jackknife
over documents. With several seeds it also covers Student's t interval over the seeds' own shares,
so that seeds that disagree are not averaged away; with three of them that is wide.
"""

import math
from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from memguard.audit.statistics import clopper_pearson, compute_mean
from memguard.compare.audited import AuditedRun, BucketTable
from memguard.records import NUM_RISK_QUERIES, FrontPoint, Interval, RiskName


def build_front(runs: Sequence[AuditedRun]) -> list[FrontPoint]:
    """Return a point for each setting, in the order in which they first come.

    Attack cost counts where every run was asked for it: a setting must not look safer because less
    was asked. Seeds that not all settings have are left out, where some are shared by all: another
    seed has other held-out documents, and one setting must not have the easier ones.

    Args:
        runs: comparable runs (see `check_comparable`).
    """
    settings: dict[str, list[AuditedRun]] = {run.run.name: [] for run in runs}
    for run in keep_shared_seeds(runs):
        settings[run.run.name].append(run)
    names: Sequence[RiskName] = get_args(RiskName)
    if any(_find_most_trained(run).log10_queries is None for run in runs):
        names = [name for name in names if name != "attack_cost"]
    points = [_build_point(name, group, names) for name, group in settings.items()]
    first, *others = points
    return mark_dominated([first, *(_hold_against(first, point) for point in others)])


def _hold_against(first: FrontPoint, point: FrontPoint) -> FrontPoint:
    """Add the change of utility."""
    difference = _subtract(point, first)
    if difference is None or first.utility <= 0:
        return point
    ci = difference.ci
    change = Interval(
        value=difference.value / first.utility,
        ci=ci and (ci[0] / first.utility, ci[1] / first.utility),
    )
    return point.model_copy(update={"utility_change": change})


def _subtract(one: FrontPoint, other: FrontPoint) -> Interval | None:
    """Return one utility minus the other, mean over the seeds; None where these differ."""
    if one.utility_by_seed.keys() != other.utility_by_seed.keys():
        return None
    return compute_mean([nll - other.utility_by_seed[s] for s, nll in one.utility_by_seed.items()])


def keep_shared_seeds(runs: Sequence[AuditedRun]) -> list[AuditedRun]:
    """Return the runs with the seeds that every setting has; all runs where there is none."""
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.run.name, set()).add(run.run.seed)
    shared = set.intersection(*seeds.values())
    return [run for run in runs if not shared or run.run.seed in shared]


def mark_dominated(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Return the points, each with the names of those that are no worse in both and better in one.

    Beyond the intervals a point dominates another if, besides, in risk the two are equal or their
    intervals apart, and in utility equal or apart seed by seed. A point without documents neither
    dominates nor is dominated.
    """
    marked = []
    for point in points:
        above = [other for other in points if _dominates(other, point)]
        update = {
            "is_dominated": bool(above),
            "dominated_by": [other.name for other in above],
            "dominated_beyond_ci_by": [other.name for other in above if _is_apart(other, point)],
        }
        marked.append(point.model_copy(update=update))
    return marked


def is_below(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    """Tell whether the first interval lies wholly below the second; not without both."""
    return one is not None and other is not None and one[1] < other[0]


def _dominates(one: FrontPoint, other: FrontPoint) -> bool:
    if one.risk is None or other.risk is None:
        return False
    mine, theirs = (one.risk, one.utility), (other.risk, other.utility)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def _is_apart(one: FrontPoint, other: FrontPoint) -> bool:
    """Tell whether a point that dominates does so by more than the intervals."""
    risk = one.risk == other.risk or is_below(one.risk_ci, other.risk_ci)
    if one.utility == other.utility:
        return risk
    difference = _subtract(one, other)
    return risk and difference is not None and difference.ci is not None and difference.ci[1] < 0


def _build_point(name: str, runs: Sequence[AuditedRun], risks: Sequence[RiskName]) -> FrontPoint:
    utility = compute_mean([run.heldout_nll for run in runs])
    assert utility is not None, "a setting has a run"
    tables = [_find_most_trained(run) for run in runs]
    found = {risk: _compute_risk(tables, risk) for risk in risks}
    known = {risk: share for risk, share in found.items() if share is not None}
    # The first of equals: verbatim says the most.
    worst = max(known, key=lambda risk: known[risk].value, default=None)
    return FrontPoint(
        name=name,
        num_seeds=len(runs),
        num_documents=sum(len(table.ids) for table in tables),
        risk=None if worst is None else known[worst].value,
        risk_ci=None if worst is None else known[worst].ci,
        risk_by=worst,
        risks=known,
        utility=utility.value,
        utility_ci=utility.ci,
        utility_by_seed={run.run.seed: run.heldout_nll for run in runs},
    )


def _find_most_trained(run: AuditedRun) -> BucketTable:
    """Return the run's bucket of the highest dose; a setting may train the documents less often."""
    return run.tables[max(run.tables)]


def _compute_risk(tables: Sequence[BucketTable], risk: RiskName) -> Interval | None:
    """Return the share of the documents of all seeds; None without documents."""
    shares = [_list_extracted(table, risk) for table in tables]
    values_D = np.concatenate(shares)
    ids = [identifier for table in tables for identifier in table.ids]
    if not ids:
        return None
    ci = _find_interval(values_D, ids)
    over_seeds = compute_mean([float(one.mean()) for one in shares if len(one)])
    if ci is not None and over_seeds is not None and over_seeds.ci is not None:
        ci = (max(0.0, min(ci[0], over_seeds.ci[0])), min(1.0, max(ci[1], over_seeds.ci[1])))
    return Interval(value=float(values_D.mean()), ci=ci)


def _find_interval(values_D: NDArray[np.float64], ids: Sequence[str]) -> tuple[float, float] | None:
    num_distinct = len(set(ids))
    if num_distinct < len(ids):
        share = compute_mean(values_D, bounds=(0, 1), clusters=np.array(ids))
        if share is not None and share.ci is not None:
            return share.ci
    # Each document once; all of them alike, where the jackknife has nothing to say.
    return clopper_pearson(round(float(values_D.mean()) * num_distinct), num_distinct).ci


def _list_extracted(table: BucketTable, risk: RiskName) -> NDArray[np.float64]:
    match risk:
        case "verbatim":
            return table.verbatim.astype(np.float64)
        case "near_verbatim":
            return table.near_verbatim.astype(np.float64)
        case "attack_cost":
            assert table.log10_queries is not None, "asked of every run, or of none"
            return np.asarray(table.log10_queries <= math.log10(NUM_RISK_QUERIES), np.float64)
