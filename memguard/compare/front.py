"""Risk and utility of each setting over its seeds, and which settings dominate others.

    risk      the highest extraction rate of the documents that the setting trained most often:
              verbatim or near-verbatim by greedy decoding, sampled within 10^6 queries, or
              verbatim by the best attack that ran (over the documents attacked)
    utility   held-out loss (nats a token), mean over seeds; lower is better. Settings are compared
              seed by seed: another seed has other held-out documents, which differ by more than
              settings do

A share is over the documents of all seeds together. If no document occurs twice, its interval is
that of a rate (`compute_rate`, which counts near-duplicates as less evidence); else a jackknife
over texts, so that a document that several seeds drew counts once as evidence. With several seeds
it also covers Student's t interval over the shares of the seeds, so that differences between seeds
are not averaged away; with three seeds this interval is wide. The interval of the risk extends to
the highest upper end of all shares, because attacks run on fewer documents.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from memguard.audit.statistics import compute_exact_interval, compute_mean, compute_rate
from memguard.compare.audited import AuditedRun, BucketTable
from memguard.records import (
    LEVEL_NAMES,
    NUM_RISK_QUERIES,
    RISK_NAMES,
    BucketScores,
    FrontPoint,
    Interval,
    Level,
    Rate,
    Recommendation,
    RiskName,
)


def build_front(runs: Sequence[AuditedRun]) -> list[FrontPoint]:
    """Return a point for each setting, in the order of the runs.

    Only risks that every run measured are used, so that a setting does not look safer because less
    was measured. If some seeds are shared by all settings, other seeds are left out: their held-out
    documents differ, and could be easier for one setting.

    Args:
        runs: comparable runs (see `check_comparable`).
    """
    settings: dict[str, list[AuditedRun]] = {run.run.name: [] for run in runs}
    for run in keep_shared_seeds(runs):
        settings[run.run.name].append(run)
    names: list[RiskName] = [
        name
        for name in get_args(RiskName)
        if all(name in _find_most_trained(run).scores.risks for run in runs)
    ]
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
        # No loss falls by more than all of it.
        ci=ci and (max(-1.0, ci[0] / first.utility), ci[1] / first.utility),
    )
    return point.model_copy(update={"utility_change": change})


def _subtract(one: FrontPoint, other: FrontPoint) -> Interval | None:
    """Return one utility minus the other, mean over the seeds; None if the seeds differ."""
    if one.utility_by_seed.keys() != other.utility_by_seed.keys():
        return None
    return compute_mean([nll - other.utility_by_seed[s] for s, nll in one.utility_by_seed.items()])


def keep_shared_seeds(runs: Sequence[AuditedRun]) -> list[AuditedRun]:
    """Return the runs whose seed every setting has; all runs if there is no such seed."""
    seeds: dict[str, set[int]] = {}
    for run in runs:
        seeds.setdefault(run.run.name, set()).add(run.run.seed)
    shared = set.intersection(*seeds.values())
    return [run for run in runs if not shared or run.run.seed in shared]


def mark_dominated(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    """Return the points, each with the names of the points that dominate it.

    A point dominates another if it is no worse in risk and utility, and better in one of them. It
    dominates beyond the intervals if in addition the risks are equal or their intervals are
    disjoint, and the utilities are equal or differ significantly seed by seed. A point without
    documents neither dominates nor is dominated.
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
    """Return whether the first interval is entirely below the second; False if one is None."""
    return one is not None and other is not None and one[1] < other[0]


def _dominates(one: FrontPoint, other: FrontPoint) -> bool:
    if one.risk is None or other.risk is None:
        return False
    mine, theirs = (one.risk, one.utility), (other.risk, other.utility)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def _is_apart(one: FrontPoint, other: FrontPoint) -> bool:
    """Return whether a dominating point does so beyond the intervals."""
    risk = one.risk == other.risk or is_below(one.risk_ci, other.risk_ci)
    if one.utility == other.utility:
        return risk
    difference = _subtract(one, other)
    return risk and difference is not None and difference.ci is not None and difference.ci[1] < 0


def _build_point(name: str, runs: Sequence[AuditedRun], risks: Sequence[RiskName]) -> FrontPoint:
    utility = compute_mean([run.heldout_nll for run in runs], (0.0, math.inf))
    assert utility is not None, "a setting has a run"
    most_trained = [_find_most_trained(run) for run in runs]
    tables = [run.table for run in most_trained]
    shares = {
        risk: _compute_attack_risk(most_trained)
        if risk == "attack"
        else _compute_risk(tables, risk)
        for risk in risks
    }
    known = {risk: share for risk, share in shares.items() if share is not None}
    # Of equal shares the first is taken: verbatim is the strongest evidence.
    worst = max(known, key=lambda risk: known[risk].value, default=None)
    return FrontPoint(
        name=name,
        num_seeds=len(runs),
        levels=Counter(run.report.verdict.level for run in runs),
        num_told_apart=sum(r.report.verdict.membership.level == "told-apart" for r in runs),
        num_documents=sum(len(table.ids) for table in tables),
        risk=None if worst is None else known[worst].value,
        risk_ci=None if worst is None else _find_risk_ci(known, worst),
        risk_by=worst,
        risks=known,
        utility=utility.value,
        utility_ci=utility.ci,
        utility_by_seed={run.run.seed: run.heldout_nll for run in runs},
    )


def _find_risk_ci(
    known: Mapping[RiskName, Interval], worst: RiskName
) -> tuple[float, float] | None:
    """Return the interval of the worst share, extended to the highest upper end of all shares.

    A lower share over fewer documents, such as those attacked, may in truth be the worst.
    """
    ci = known[worst].ci
    if ci is None:
        return None
    return ci[0], max(1.0 if share.ci is None else share.ci[1] for share in known.values())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _MostTrained:
    """A run's bucket with the most repetitions; that number may differ between settings."""

    table: BucketTable
    scores: BucketScores
    attacks: Mapping[str, Rate]
    """Share of its documents that each attack extracted verbatim."""


def _find_most_trained(run: AuditedRun) -> _MostTrained:
    dose = max(run.tables)
    scores = run.buckets[dose]
    return _MostTrained(
        table=run.tables[dose],
        scores=scores,
        attacks={
            attacked.attack: attacked.any_verbatim
            for attacked in run.report.attacks
            if attacked.bucket == scores.bucket
        },
    )


def _compute_attack_risk(runs: Sequence[_MostTrained]) -> Interval | None:
    """Return the share that the best attack extracted, over all seeds.

    Attacks run on a sample of the documents. The record does not say which of these are shared by
    several seeds, so the effective number of documents assumes the same proportion of distinct
    documents as in the bucket.
    """
    names = set.intersection(*(set(run.attacks) for run in runs))
    ids = [identifier for run in runs for identifier in run.table.ids]
    if not names or not ids:
        return None
    risks = []
    for name in sorted(names):
        rates = [run.attacks[name] for run in runs]
        num_matched = sum(rate.num_matched for rate in rates)
        num_documents = sum(rate.num_documents for rate in rates)
        num_effective = sum(rate.num_effective for rate in rates) * len(set(ids)) / len(ids)
        ci = compute_exact_interval(num_matched, num_documents, num_effective)
        by_seed = [rate.rate for rate in rates if rate.rate is not None]
        risks.append(Interval(value=num_matched / num_documents, ci=_cover_seeds(ci, by_seed)))
    return max(risks, key=lambda risk: risk.value)


def _cover_seeds(
    ci: tuple[float, float] | None, shares: Sequence[float]
) -> tuple[float, float] | None:
    """Return the interval, extended to cover Student's t interval over the shares of the seeds."""
    over_seeds = compute_mean(shares)
    if ci is None or over_seeds is None or over_seeds.ci is None:
        return ci
    return max(0.0, min(ci[0], over_seeds.ci[0])), min(1.0, max(ci[1], over_seeds.ci[1]))


def _compute_risk(tables: Sequence[BucketTable], risk: RiskName) -> Interval | None:
    """Return the share of the documents of all seeds; None without documents."""
    shares = [_list_extracted(table, risk) for table in tables]
    values_D = np.concatenate(shares)
    ids = [identifier for table in tables for identifier in table.ids]
    if not ids:
        return None
    text_D = _find_texts(tables)
    ci = compute_rate(values_D, text_D).ci
    if len(set(ids)) < len(ids):
        mean = compute_mean(values_D, bounds=(0, 1), clusters=text_D)
        ci = None if mean is None else mean.ci
    by_seed = [float(share.mean()) for share in shares if len(share)]
    return Interval(value=float(values_D.mean()), ci=_cover_seeds(ci, by_seed))


def _find_texts(tables: Sequence[BucketTable]) -> NDArray[np.int64]:
    """Return the text of each document of all seeds, [D]: near-duplicates have the same.

    Clusters are numbered by each run, so they are joined where runs share a document.
    """
    ids = [identifier for table in tables for identifier in table.ids]
    pairs = [(run, c) for run, table in enumerate(tables) for c in table.clusters.tolist()]
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


def _list_extracted(table: BucketTable, risk: RiskName) -> NDArray[np.float64]:
    match risk:
        case "verbatim":
            return table.verbatim.astype(np.float64)
        case "near_verbatim":
            assert table.near_verbatim is not None, "generated in every run, or in none"
            return table.near_verbatim.astype(np.float64)
        case "attack_cost":
            assert table.log10_queries is not None, "measured in every run, or in none"
            return np.asarray(table.log10_queries <= math.log10(NUM_RISK_QUERIES), np.float64)
        case "attack":
            raise AssertionError("attacks run on a sample; see `_compute_attack_risk`")


# The recommendation: one rule, and the sentence that reports its result.

TOLERANCE = 0.05
"""Largest accepted increase of held-out NLL over the first setting (share)."""

_RULE = (
    f"Of the settings whose held-out NLL is at most {100 * TOLERANCE:g} % above that of "
    "'{first}' and whose risk interval lies wholly below that of '{first}': the one of least risk; "
    "among ties (overlapping intervals) the one of lowest held-out NLL. Risk is the "
    "worst of the rates measured in every run: verbatim and near-verbatim by greedy decoding, "
    f"verbatim within {NUM_RISK_QUERIES:,} queries, verbatim by the best attack; of the documents "
    "trained most often."
)


def recommend(front: Sequence[FrontPoint]) -> Recommendation:
    """Recommend a setting, or give the reason why none is recommended.

    Args:
        front: at least one point; the others are compared with the first.
    """
    first, *others = front
    safer = [point for point in others if is_below(point.risk_ci, first.risk_ci)]
    within = [point for point in safer if point.utility <= (1 + TOLERANCE) * first.utility]
    rule = _RULE.format(first=first.name)
    if not within:
        why = _describe_why_not(others, safer, first)
        return Recommendation(setting=None, sentence=f"No setting is recommended: {why}", rule=rule)
    least = min(within, key=lambda point: (point.risk or 0.0, point.utility))
    similar = [point for point in within if not is_below(least.risk_ci, point.risk_ci)]
    chosen = min(similar, key=lambda point: (point.utility, point.risk or 0.0))
    sentence = _describe_choice(chosen, least, first) + _describe_costly(chosen, safer, within)
    sentence += _describe_told_apart(chosen)
    return Recommendation(setting=chosen.name, sentence=sentence, rule=rule)


def _describe_choice(chosen: FrontPoint, least: FrontPoint, first: FrontPoint) -> str:
    sentence = (
        f"'{chosen.name}' is recommended{_describe_level(chosen)}: {_describe_risk(chosen)}, "
        f"against {_describe_share(first)} with '{first.name}', at a held-out NLL of "
        f"{_describe_utility(chosen)}."
    )
    if least.name != chosen.name:
        sentence += (
            f" '{least.name}' has {_describe_share(least)}, no less beyond the intervals, at a "
            f"held-out NLL of {_describe_utility(least)}."
        )
    return sentence


def _describe_level(chosen: FrontPoint) -> str:
    """Return a caveat if documents were extracted by the verdict of one of the setting's runs."""
    worst: tuple[Level, ...] = ("memorized", "extracted")
    level = next((level for level in worst if chosen.levels.get(level)), None)
    if level is None:
        return ""
    if chosen.num_seeds == 1:
        return f", although its own verdict is '{LEVEL_NAMES[level]}'"
    return (
        f", although the verdict of {chosen.levels[level]} of its {chosen.num_seeds} runs is "
        f"'{LEVEL_NAMES[level]}'"
    )


def _describe_told_apart(chosen: FrontPoint) -> str:
    if not chosen.num_told_apart:
        return ""
    runs = "" if chosen.num_seeds == 1 else f" in {chosen.num_told_apart} of its runs"
    return f" Whether a document was trained with '{chosen.name}' can be told{runs}."


def _describe_costly(
    chosen: FrontPoint, safer: Sequence[FrontPoint], within: Sequence[FrontPoint]
) -> str:
    """Return a sentence on the setting of lowest risk if the NLL limit rules it out, else ""."""
    costly = [
        point
        for point in safer
        if point not in within and (point.risk or 0.0) < (chosen.risk or 0.0)
    ]
    if not costly:
        return ""
    best = min(costly, key=lambda point: (point.risk or 0.0, point.utility))
    return (
        f" '{best.name}' has a lower risk, {_describe_share(best)}, and is ruled out by its "
        f"held-out NLL of {_describe_utility(best)}, more than {100 * TOLERANCE:g} % above that of "
        "the first setting."
    )


def _describe_why_not(
    others: Sequence[FrontPoint], safer: Sequence[FrontPoint], first: FrontPoint
) -> str:
    if not others:
        return f"only '{first.name}' was compared."
    if first.risk is None:
        return f"nothing that '{first.name}' was trained on was audited."
    if not first.risk:
        return f"'{first.name}' shows no risk that another could lower ({_describe_share(first)})."
    if safer:
        cheapest = min(safer, key=lambda point: point.utility)
        return (
            f"every setting with a risk below '{first.name}' beyond the intervals has a held-out "
            f"NLL more than {100 * TOLERANCE:g} % above it; the lowest is that of "
            f"'{cheapest.name}', {_describe_utility(cheapest)}."
        )
    return (
        f"no other setting has a risk below '{first.name}' beyond the intervals "
        f"({_describe_share(first)} of its documents)."
    )


def _describe_risk(point: FrontPoint) -> str:
    assert point.risk_by is not None, "a point with an interval has a risk"
    # A risk of 0 means that no measured method extracted a document, so all are listed.
    methods = [point.risk_by] if point.risk else list(point.risks) or [point.risk_by]
    names = [RISK_NAMES[method] for method in methods]
    *others, last = (f"by the {name}" if name == RISK_NAMES["attack"] else name for name in names)
    how = f"{', '.join(others)} or {last}" if others else last
    return f"{_describe_share(point)} of the documents trained most often are extracted {how}"


def _describe_share(point: FrontPoint) -> str:
    assert point.risk is not None, "called only for points with documents"
    if point.risk_ci is None:
        return f"{100 * point.risk:.1f} %"
    low, high = (100 * end for end in point.own_ci or point.risk_ci)
    others = ""
    if point.risk_ci[1] > high / 100:
        others = f"; by all methods up to {100 * point.risk_ci[1]:.1f} %"
    return f"{100 * point.risk:.1f} % (95 % CI {low:.1f} to {high:.1f} %{others})"


def _describe_utility(point: FrontPoint) -> str:
    change = point.utility_change
    if change is None:
        return f"{point.utility:.3f}"
    relative = f"{100 * change.value:+.1f} %"
    if change.ci is not None:
        relative += f", 95 % CI {100 * change.ci[0]:+.1f} to {100 * change.ci[1]:+.1f} %"
    return f"{point.utility:.3f} ({relative})"
